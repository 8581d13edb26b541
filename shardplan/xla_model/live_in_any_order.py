"""Which values are in memory together in every order in which the ops of a step may run: what a bound of all peaks counts.

    chain of ops, each reads the one before it    a --> b --> c --> d
    value x, made by m and read by r              m --> a            x is in memory while a and b run,
                                                        c --> r      in whatever order the others do

A value is in memory while an op of the chain runs if the op is its maker or waits for it, and a reader of it waits for the next op of
the chain. Its last reader may write over it, so there it does not count. A copy in another layout may be made, and the value freed, as
soon as it is there: until the copy is read, either of the two is in memory. A loop is one op; what stays inside of it does not count.
Also known as the values live across a cut of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardplan.ir.graph import Graph
from shardplan.xla_model.liveness import Interval


class LiveInAnyOrder(NamedTuple):
    """What is in memory in any order.

    Attributes:
        values: per value, the places lo <= t < hi of the chain at which it is in memory; None for none.
        copied: value -> the places at which it is, or a copy of it or of what is computed of it; and the least bytes of these.
    """

    values: list[Interval | None]
    copied: dict[int, tuple[Interval, float]]


def chain_through(graph: Graph, at: int) -> list[int]:
    """The longest chain of ops, each of which reads what the one before it makes, with `at`, or its loop, among them.

    A loop stands as its first op.
    """
    node = _nodes(graph)
    before, after = _neighbours(graph, node)
    nodes = sorted({*node})
    back, forth = [node[at]], [node[at]]
    depth, height = _longest(nodes, before), _longest(nodes[::-1], after)
    while some := before.get(back[-1]):
        back.append(max(some, key=lambda n: (depth[n], n)))
    while some := after.get(forth[-1]):
        forth.append(max(some, key=lambda n: (height[n], -n)))
    return [*reversed(back), *forth[1:]]


def _longest(nodes: Sequence[int], before: Mapping[int, Collection[int]]) -> dict[int, int]:
    """Per node, how many stand before it on the longest chain; `nodes` are in an order of the graph."""
    out: dict[int, int] = {}
    for n in nodes:
        out[n] = max((1 + out[m] for m in before.get(n, ())), default=0)
    return out


def live_in_any_order(
    graph: Graph, materialised: Sequence[bool], live: Sequence[Interval | None], chain: Sequence[int]
) -> LiveInAnyOrder:
    """What is in memory at the places of a chain, whatever the order.

    Args:
        graph: the step.
        materialised: per value, whether it is written to memory; else its readers read what it is computed of.
        live: when each value is in memory in one order; None for values without memory of their own.
        chain: as of `chain_through`.
    """
    node, end = _nodes(graph), len(chain)
    before, after = _neighbours(graph, node)
    place, nodes = {n: at for at, n in enumerate(chain)}, sorted({*node})
    since: dict[int, int] = {}  # the first place whose op is this one, or waits for it
    for n in reversed(nodes):
        since[n] = min((since[m] for m in after.get(n, ())), default=end) if n not in place else place[n]
    until: dict[int, int] = {}  # the last place whose op is this one, or this one waits for it
    for n in nodes:
        until[n] = max((until[m] for m in before.get(n, ())), default=-1) if n not in place else place[n]
    replacing = {o for a, o in graph.same_layout if a in graph.donated}

    read, copied = [-1] * len(graph.values), [-1] * len(graph.values)  # the place until which it is read; until which copies of it are
    least = [value.bytes for value in graph.values]  # of itself, and of what copies are made of
    for v in reversed(range(len(graph.values))):
        for at, _ in graph.values[v].consumers:
            op, seen = graph.ops[at], [w for w in graph.ops[at].outputs if not materialised[w]]
            if op.traits.copy and op.loop < 0:
                w = op.outputs[0]
                copied[v] = max(copied[v], min(since[node[at]], max(read[w], copied[w])))
                least[v] = min(least[v], least[w])
            elif op.traits.step_output:
                read[v] = end
            elif node[at] != node[graph.values[v].producer[0]]:
                read[v] = max([read[v], until[node[at]], *(read[w] for w in seen)])
                copied[v] = max([copied[v], *(copied[w] for w in seen)])
                least[v] = min([least[v], *(least[w] for w in seen if copied[w] >= 0)])
    found = LiveInAnyOrder([], {})
    for v, value in enumerate(graph.values):
        maker = value.producer[0]
        persistent = graph.ops[maker].traits.persistent
        whole = persistent and live[v] == (0, len(graph.ops))
        lo, hi = 0 if persistent else since[node[maker]], end if whole else read[v]
        counts = live[v] is not None and replacing.isdisjoint(at for at, _ in value.consumers)  # new state may be written over the old
        found.values.append((lo, hi) if counts and lo < hi else None)
        if counts and not persistent and not graph.ops[maker].traits.alias and copied[v] > max(lo, hi):
            found.copied[v] = (max(lo, hi), copied[v]), least[v]
    return found


def _nodes(graph: Graph) -> list[int]:
    """Per op, itself, or the first op of the outermost loop that holds it."""
    out = list(range(len(graph.ops)))
    for loop in sorted(graph.loops, key=lambda loop: loop.stop - loop.start):
        out[loop.start : loop.stop] = [loop.start] * (loop.stop - loop.start)
    return out


def _neighbours(graph: Graph, node: Sequence[int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """Per node, those that it reads of, and those that read of it."""
    before: dict[int, set[int]] = {}
    after: dict[int, set[int]] = {}
    for j, op in enumerate(graph.ops):
        for v in op.inputs:
            if v is not None and (i := node[graph.values[v].producer[0]]) != node[j]:
                before.setdefault(node[j], set()).add(i)
                after.setdefault(i, set()).add(node[j])
    return before, after
