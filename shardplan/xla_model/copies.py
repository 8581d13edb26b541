"""Which readers of a value share one resharded copy of it.

Elementwise ops, views and reductions are *followers*: they take an operand in the layout it has. Products, gathers and other big ops
may want another layout, and the reshard is paid once for all readers that want the same one. So values are read through *copies*:

    w -+-> copy 1 -+-> dot (forward)            one copy for the big readers of one phase and loop
       |           +-> gather (forward)
       +-> copy 2 ---> dot (backward)           regathered, or the retained copy 1 (`Graph.retainable_from`)
       +-> copy 3 -+-> add                      one for followers, if w may be partial or lies otherwise
                   +-> mul

A retained copy costs memory between the phases, a regathered one a second collective; small arrays are always retained. The update
reads parameters behind a barrier, so that no copy of one is retained for it. The operand of
a recomputed layer's barrier is a copy in the same way: what is gathered before the barrier is the array that the forward pass gathered,
what is gathered behind it is gathered again. Followers share the copy of a lookup: gathered for a product and transposed, the table is
there to look things up. A large array that a big op reads has a copy even for one reader, so that memory counts the gathered array.

The first copy of a big op's result stands right behind the op, so that a partial sum is reduced at once and not held in full until
somebody reads it (a gradient: until the optimizer). All other copies stand before their first reader.

Facts: cse-merges-equal-reshards, cse-stops-at-barriers, partition-gathers-per-use, partition-remat-gathers-again, gather-cast-first.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op

SMALL_BYTES = 1 << 16
"""Arrays of up to so many bytes are retained from the forward to the backward pass: one copy serves both."""

Reader = tuple[int, int]
"""(op, operand)."""


class _Copy(NamedTuple):
    """One copy to be made of a value: whether its readers are followers, who they are, and the first such reader a phase earlier."""

    follows: bool
    readers: list[Reader]
    earlier: Reader | None


def _copies(graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int], v: int) -> list[_Copy]:
    """The copies to be made of value v."""
    value, found, direct = graph.values[v], {}, {}
    made = value.producer[0]
    leaves = graph.ops[made].traits.leaves_region
    fixed = follows[made] and not sums[made] and not leaves  # lies as its operands do, complete, and is read so
    born, large = graph.ops[made].phase, value.bytes > SMALL_BYTES
    for at, k in value.consumers:
        op = graph.ops[at]
        phase = op.phase if large or "update" in (op.phase, born) else born
        following = follows[at] and not op.traits.loop_operand
        if op.traits.own_copy or (op.traits.loop_const and graph.ops[made].scalar_broadcast):
            continue
        alone = following and (fixed or (sums[at] and len(value.consumers) == 1))
        (direct if alone else found).setdefault((phase, op.loop, following), []).append((at, k))
    for phase, loop, following in [*found]:
        if not following and any(at in lookups for at, _ in found[phase, loop, False]):
            for some in (direct, found):
                found[phase, loop, False] += some.pop((phase, loop, True), ())
    needed = {key for key in found if not fixed and (key[0] != born or sums[made])}
    before: dict[tuple, Reader] = {}
    out = []
    for key, readers in found.items():
        behind_barrier = key[0] == "update" and graph.ops[made].traits.step_input
        earlier = before.get(key[1:]) if large and not behind_barrier else None
        if key in needed or (large and not key[2]) or len({at for at, _ in readers}) > 1:
            out.append(_Copy(key[2], readers, earlier))
        before[key[1:]] = readers[0]
    return out


def _recomputed_from(graph: Graph, v: int, copies: Sequence[_Copy]) -> Iterator[tuple[Reader, Reader]]:
    """(barrier, earlier reader) of a large value: a recomputed layer's barriers that read it, and a big reader of the pass before."""
    readers = [copy.readers[0] for copy in copies if not copy.follows] if graph.values[v].bytes > SMALL_BYTES else ()
    for at, k in graph.values[v].consumers if readers else ():
        op = graph.ops[at]
        earlier = (x for x in readers if x[0] < at and (graph.ops[x[0]].loop, graph.ops[x[0]].phase) == (op.loop, "forward"))
        if op.traits.recompute_barrier and op.phase != "forward" and (first := next(earlier, None)):
            yield (at, k), first


def with_copies(graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int] = ()) -> Graph:
    """The same graph with a copy before every group of readers; numbers of ops and values change.

    `follows` says per op whether it takes operands in the layout they have, `sums` whether its result may be partial; `lookups` are the
    ops that read places of a table, in whatever layout.
    """
    wanted: list[tuple[int, int, int, _Copy]] = []  # (op behind the copy, value, number of the copy, copy)
    recomputed: dict[Reader, Reader] = {}
    for v, value in enumerate(graph.values):
        made = value.producer[0]
        at_once = (sums[made] or not follows[made]) and not graph.ops[made].traits.border
        recomputed.update(_recomputed_from(graph, v, copies := _copies(graph, follows, sums, lookups, v)))
        for n, copy in enumerate(copies):
            before = made + 1 if at_once and n == 0 and copy.earlier is None else min(at for at, _ in copy.readers)
            wanted.append((before, v, n, copy))
    wanted.sort(key=lambda x: x[:3])
    return _insert(graph, wanted, recomputed)


def _insert(graph: Graph, wanted: Sequence[tuple[int, int, int, _Copy]], recomputed: Mapping[Reader, Reader]) -> Graph:
    """The graph with copies put in, each (op behind it, value, number among the value's copies, copy), in this order.

    `recomputed`: barriers that are retainable, each with an earlier reader.
    """
    behind, makers = [before for before, *_ in wanted], [value.producer[0] for value in graph.values]
    moved = [at + bisect_right(behind, at) for at in range(len(graph.ops) + 1)]  # old op -> new
    renamed = [v + bisect_right(behind, at) for v, at in enumerate(makers)]  # old value -> new
    made = [bisect_left(makers, before) + i for i, before in enumerate(behind)]  # per copy, its value
    through = {reader: i for i, (*_, copy) in enumerate(wanted) for reader in copy.readers}
    new: dict[int, Op] = {}

    def source(first: Reader) -> Reader:
        """What a retainable copy is retained from, given an earlier reader: the copy that this one reads, or itself."""
        return (behind[through[first]] + through[first], 0) if first in through else (moved[first[0]], first[1])

    retainable = {moved[at]: source(first) for (at, _), first in recomputed.items()}
    for i, (before, v, n, copy) in enumerate(wanted):
        maker, k, op, at = graph.ops[makers[v]], graph.values[v].producer[1], graph.ops[before], before + i
        avals, path = (maker.outs[k],), (*maker.path, "shared_copy", k, n)
        times = {"runs": op.reads, "reads": op.reads, "loop": op.loop, "is_follower": copy.follows}
        new[at] = Op("shared_copy", (renamed[v],), (made[i],), avals, avals, {}, path, source=op.source, phase=op.phase, **times)
        if (first := copy.earlier) is not None:
            retainable[at] = source(first)
    read = {reader: made[i] for reader, i in through.items()}
    for at, op in enumerate(graph.ops):
        inputs = tuple(None if v is None else read.get((at, k), renamed[v]) for k, v in enumerate(op.inputs))
        new[moved[at]] = replace(op, inputs=inputs, outputs=tuple(renamed[v] for v in op.outputs))
    ops = tuple(new[at] for at in range(len(new)))
    copied = dict(zip(renamed, graph.values, strict=True)) | {made[i]: graph.values[v] for i, (_, v, *_) in enumerate(wanted)}
    consumers: dict[int | None, list[Reader]] = {}
    for at, op in enumerate(ops):
        for k, v in enumerate(op.inputs):
            consumers.setdefault(v, []).append((at, k))
    producers = ((v, (at, k)) for at, op in enumerate(ops) for k, v in enumerate(op.outputs))
    return Graph(
        ops,
        tuple(replace(copied[v], producer=producer, consumers=tuple(consumers.get(v, ()))) for v, producer in producers),
        tuple(replace(loop, start=moved[loop.start], stop=moved[loop.stop]) for loop in graph.loops),
        tuple((moved[a], moved[b]) for a, b in graph.same_layout),
        tuple(moved[a] for a in graph.args),
        tuple(moved[o] for o in graph.outs),
        frozenset(moved[d] for d in graph.donated),
        retainable,
        graph.repeats,
    )
