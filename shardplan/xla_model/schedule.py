"""In which order XLA runs the ops of a step, before strategies are known: for the overlap windows that prices read, and for memory.

The seconds of a decided program are those of `timeline.py`.

XLA's latency-hiding scheduler builds the schedule from its end: what is needed late runs late, and what can run while a collective is
in flight does.

Rule 4, program order: forward and backward ops run in the order of the program, the optimizer at the end.
Rule 5, gradients in a loop: products that only make gradients run last in a loop.
Rule 6, gradients outside of loops: they are deferred to the end of the backward pass.
Rule 7, blocking collectives: deferred work runs while one is in flight.
Rule 8, products in memory: a backward product runs where its result is needed, a gradient's where its collective starts, at once, or
behind the product that hands the gradient on.

docs/xla_model.md states the rules in full, with pictures. Also known as list scheduling with asynchronous collectives.
Facts: schedule-from-end, schedule-blocking-first, schedule-loop-gradients.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.ir.graph import Graph, Phase
from shardplan.xla_model.combining import CollectiveSite


class BlockingCollective(NamedTuple):
    """A collective that an op waits for, outside of loops: seconds of one run, and the (op, operand) that read the array."""

    seconds: float
    edges: list[tuple[int, int]]


@dataclass(frozen=True)
class Schedule:
    """When ops run, in seconds after the step's start."""

    start_s: Sequence[float]  # per op; then the end of the step
    end_s: Sequence[float]  # per op
    hidden_s: Mapping[
        tuple[int, int], float
    ]  # (op, operand) of a blocking collective -> seconds of work that run while it is in flight
    runs_after: Mapping[int, int]  # op outside of loops that is deferred -> the last op of the program that runs before it
    blocks: Collection[int]  # ops that wait for a blocking collective


def blocking_collectives(
    graph: Graph, sites: Sequence[CollectiveSite], seconds: Mapping[int, float]
) -> dict[int, list[BlockingCollective]]:
    """By op of the forward and backward pass outside of loops, the blocking collectives that it is the first to wait for.

    `seconds` are those of an array's collectives, by the op that makes it.
    """
    found: dict[tuple[int, Phase], BlockingCollective] = {}
    out: dict[int, list[BlockingCollective]] = {}
    for j, op in enumerate(graph.ops):
        for k, v in enumerate(op.inputs if op.phase != "update" and op.loop < 0 else ()):
            if v is not None and sites[v].collective_class == "blocking" and seconds.get(at := sites[v].origin, 0.0) > 0:
                collective = found.setdefault((at, op.phase), BlockingCollective(seconds[at], []))
                if not op.traits.copy and all(graph.ops[i].traits.copy for i, _ in collective.edges):
                    out.setdefault(j, []).append(collective)
                collective.edges.append((j, k))
    return out


def schedule(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    in_flight: Collection[int],
    blocking: Mapping[int, Sequence[BlockingCollective]],
    defer: bool,
) -> Schedule:
    """When ops run, by rules 4 to 7, of which 6 and 7 apply where `defer` holds.

    Args:
        graph: the step.
        sites: per value.
        work_s: seconds of every op in one run.
        in_flight: ops that make arrays for which there is a collective.
        blocking: `blocking_collectives`.
    """
    last = max((j for j, op in enumerate(graph.ops) if op.phase != "update" or op.loop >= 0), default=-1) + 1
    there = list(range(last))  # per op, the last op of the two passes that it needs
    for op in graph.ops[last:]:
        there.append(max((there[graph.values[v].producer[0]] for v in op.inputs if v is not None), default=-1))
    update = {j: there[j] for j in sorted(range(last, len(graph.ops)), key=there.__getitem__)}
    gradients = {
        j: op.loop for j, op in enumerate(graph.ops[:last])
        if op.phase == "backward" and op.traits.deferrable and all(sites[v].collective_class == "gradient" for v in op.outputs)
        and (defer or op.loop >= 0)
    }  # fmt: skip
    deferred = [j for j, loop in gradients.items() if loop < 0]
    blocked_s = {j: sum(c.seconds for c in some) for j, some in blocking.items()}
    blocked = {j: blocked_s[j] for j in sorted(blocked_s, reverse=True) if defer and graph.ops[j].phase == "backward"}
    fills = _fills(work_s, blocked, update, _ready(graph, sites, in_flight, deferred, update), deferred)

    start_s, end_s, now, meanwhile = [0.0] * len(graph.ops), [0.0] * len(graph.ops), 0.0, 0.0
    hidden_s: dict[tuple[int, int], float] = {}
    runs_after: dict[int, int] = {}
    latest = -1
    for j, hides in _order(graph, last, gradients, fills, (*deferred, *update)):
        start_s[j] = now
        end_s[j] = now = now + work_s[j] * graph.ops[j].runs
        meanwhile += (end_s[j] - start_s[j]) * hides
        if graph.ops[j].phase != "update" and graph.ops[j].loop < 0 and j < latest:
            runs_after[j] = latest
        elif graph.ops[j].phase != "update":
            latest = max(latest, j)
        if j in blocking:
            hidden_s.update((edge, meanwhile * c.seconds / blocked_s[j]) for c in blocking[j] for edge in c.edges)
            meanwhile = 0.0
    return Schedule([*start_s, now], end_s, hidden_s, runs_after, blocking.keys())


def _order(
    graph: Graph, last: int, gradients: Mapping[int, int], fills: Mapping[int, Sequence[int]], late: Sequence[int]
) -> Iterator[tuple[int, bool]]:
    """The ops as XLA runs them, and whether they hide a blocking collective.

    `gradients` are the products of gradients that do not run in program order, each with its loop; `late` is what runs after the first
    `last` ops if it fills nothing.
    """
    of_loop: list[int] = []
    for j, op in enumerate(graph.ops[:last]):
        if of_loop and (op.traits.leaves_region or op.loop != graph.ops[of_loop[-1]].loop):
            yield from ((at, False) for at in of_loop)
            of_loop.clear()
        yield from ((at, True) for at in fills.get(j, ()))
        if j not in gradients:
            yield j, False
        elif gradients[j] >= 0:
            of_loop.append(j)
    done = {at for some in fills.values() for at in some}
    yield from ((j, False) for j in (*of_loop, *late) if j not in done)


def _ready(
    graph: Graph, sites: Sequence[CollectiveSite], in_flight: Collection[int], deferred: Sequence[int], update: Mapping[int, int]
) -> list[int]:
    """Ops of the optimizer that may fill a blocking collective: they need neither deferred products nor gradients in flight."""
    late = set(deferred)
    for j in sorted(update):
        if any(
            graph.values[v].producer[0] in late or (sites[v].collective_class == "gradient" and sites[v].origin in in_flight)
            for v in graph.ops[j].inputs if v is not None
        ):  # fmt: skip
            late.add(j)
    return [j for j, needs in update.items() if j not in late and graph.ops[needs].phase == "backward"]


def _fills(
    work_s: Sequence[float], blocked_s: Mapping[int, float], update: Mapping[int, int], ready: list[int], deferred: Sequence[int]
) -> dict[int, list[int]]:
    """Op that waits for a blocking collective -> what runs meanwhile, in order (rule 7).

    `blocked_s` are seconds by waiting op, the last first; `update` maps ops of the optimizer to the last op of the two passes that each
    needs, or -1; `ready` are those of them that may fill, and are used up.
    """
    products = list(deferred)
    out: dict[int, list[int]] = {}
    for j, seconds in blocked_s.items():
        some = out.setdefault(j, [])
        while ready and update[ready[0]] < j and seconds > 0:
            some.append(ready.pop(0))
            seconds -= work_s[some[-1]]
        stop = at = bisect_left(products, j)
        while at and seconds > 0:
            at -= 1
            seconds -= work_s[products[at]]
        some += products[at:stop]
        del products[at:stop]
    return out


def runs_at(graph: Graph, deferred_until: Mapping[int, int]) -> list[int]:
    """Per op, the number of the op at whose place it runs, by rule 8.

    `deferred_until` maps an op that makes a gradient to the op at whose place it runs, by default its own.
    """
    out, needed = list(range(len(graph.ops))), [len(graph.ops)] * len(graph.values)
    for at, op in reversed(list(enumerate(graph.ops))):
        if op.phase != "backward" or op.traits.leaves_region:
            continue
        first = min((needed[v] for v in op.outputs), default=at)
        place = at  # where what it reads is needed
        if op.traits.matmul and first < len(graph.ops):
            out[at] = first
        elif op.traits.deferrable and first == len(graph.ops):
            out[at] = place = deferred_until.get(at, at)
        for v in op.inputs:
            if v is not None and op.loop == graph.ops[graph.values[v].producer[0]].loop:
                needed[v] = min(needed[v], first if op.traits.runs_with_reader else place)
    return out
