"""Which readers of a value share one copy of it.

Elementwise ops, views and reductions *follow*: they take an array in the layout it has. Big ops (products, gathers, ...) may
want it otherwise, and the way there is paid once for all that want the same. So a value is read through *copies*: one `share`
op for the big readers of one phase (forward, backward, update) of one loop; and one for the followers, when the value may
be partial (a big op's result, or a sum of such) or placed otherwise. Readers in different phases have different copies: a
parameter gathered for the forward pass may be let go and gathered again, or kept (`Graph.retainable_from`): one collective, and memory in
between; small arrays are kept. A lookup shares its copy of a table with the followers: gathered for a product, turned, the table is
there to look things up. A large array that a big op reads has a copy even for a single reader, so that a gathered one is counted in
memory.

The first copy of a big op's result stands right behind it, so that a partial sum is reduced at once and not kept whole until
somebody reads it, a gradient until the optimizer runs. All other copies are made just before they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from shardplan.ir.graph import BORDER, Graph, Op, Value

PASSIVE = frozenset({"out", "barrier", "branch_in"})
"""Readers that fetch for themselves: each already is a copy."""

FETCHED = ("loop_const", "loop_slice")
"""Readers that hand a loop what was gathered as a whole, before it begins."""

SMALL_BYTES = 1 << 16
"""Arrays that are kept from the forward to the backward pass: one copy serves both."""

Readers = list[tuple[int, int]]


def _groups(
    graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int], v: int
) -> list[tuple[bool, Readers, tuple[int, int] | None]]:
    """(whether followers, readers, first reader of the same kind in the phase before) of every copy to be made of a value."""
    value, found, others = graph.values[v], {}, {}
    made = value.producer[0]
    settled = follows[made] and not sums[made]
    born = graph.ops[made].phase
    for at, k in value.consumers:
        op = graph.ops[at]
        phase = op.phase if value.bytes > SMALL_BYTES or "update" in (op.phase, born) else born
        following = follows[at] and op.primitive not in FETCHED
        if op.primitive in PASSIVE or (op.primitive == "loop_const" and graph.ops[made].scalar_broadcast):
            continue
        alone = following and (settled or (sums[at] and len(value.consumers) == 1))
        (others if alone else found).setdefault((phase, op.loop, following), []).append((at, k))
    for phase, loop, following in [*found]:
        if not following and any(at in lookups for at, _ in found[phase, loop, False]):
            for some in (others, found):
                found[phase, loop, False] += some.pop((phase, loop, True), ())
    late = {key for key in found if not settled and (key[0] != born or sums[made])}
    before: dict[tuple, tuple[int, int]] = {}
    out = []
    for key, readers in found.items():
        earlier = before.get(key[1:]) if value.bytes > SMALL_BYTES else None
        large = value.bytes > SMALL_BYTES and not key[2]
        if key in late or large or len({at for at, _ in readers}) > 1:
            out.append((key[2], readers, earlier))
        before[key[1:]] = readers[0]
    return out


def with_copies(graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int] = ()) -> Graph:
    """The same graph with a `share` op before every group of at least two readers; numbers of ops and values change.

    Args:
        graph: the step.
        follows: per op, whether it takes arrays in the layout they have.
        sums: per op, whether its result may be partial.
        lookups: ops that read places of a table, in whatever layout.
    """
    groups: dict[int, list[tuple[bool, Readers, tuple[int, int] | None]]] = {}
    before: dict[int, list[tuple[int, int]]] = {}
    for v in range(len(graph.values)):
        if many := _groups(graph, follows, sums, lookups, v):
            groups[v] = many
            made = graph.values[v].producer[0]
            at_once = (sums[made] or not follows[made]) and graph.ops[made].primitive not in BORDER
            for g, (_, readers, first) in enumerate(many):
                place = made + 1 if at_once and g == 0 and first is None else min(at for at, _ in readers)
                before.setdefault(place, []).append((v, g))

    ops: list[Op] = []
    moved: list[int] = []  # old op number -> new
    values: list[tuple[Value, tuple[int, int]]] = []  # what it was, and what makes it
    renamed: dict[int, int] = {}  # old value -> new
    through: dict[tuple[int, int], int] = {}  # (reader, operand) -> new value of its copy
    copied: dict[tuple[int, int], int] = {}  # (old reader, operand) -> the copy it reads
    earlier: dict[int, tuple[int, int]] = {}
    for at, op in enumerate(graph.ops):
        for v, g in before.get(at, ()):
            value, (following, readers, first) = graph.values[v], groups[v][g]
            maker = graph.ops[value.producer[0]]
            aval = maker.outs[value.producer[1]]
            copy = Op(
                "share",
                (renamed[v],),
                (len(values),),
                (aval,),
                (aval,),
                {},
                (*maker.path, "share", value.producer[1], g),
                source=op.source,
                phase=op.phase,
                runs=op.reads,
                reads=op.reads,
                loop=op.loop,
                is_follower=following,
            )
            values.append((value, (len(ops), 0)))
            through.update({reader: len(values) - 1 for reader in readers})
            copied.update({reader: len(ops) for reader in readers})
            if first is not None:
                earlier[len(ops)] = (copied[first], 0) if first in copied else (moved[first[0]], first[1])
            ops.append(copy)
        moved.append(len(ops))
        inputs = tuple(None if v is None else through.get((at, k), renamed.get(v)) for k, v in enumerate(op.inputs))
        outputs = tuple(range(len(values), len(values) + len(op.outputs)))
        renamed.update(zip(op.outputs, outputs, strict=True))
        values += [(graph.values[v], (len(ops), k)) for k, v in enumerate(op.outputs)]
        ops.append(replace(op, inputs=inputs, outputs=outputs))
    consumers: list[list[tuple[int, int]]] = [[] for _ in values]
    for at, op in enumerate(ops):
        for k, v in enumerate(op.inputs):
            if v is not None:
                consumers[v].append((at, k))
    moved.append(len(ops))
    return Graph(
        tuple(ops),
        tuple(replace(v, producer=made, consumers=tuple(c)) for (v, made), c in zip(values, consumers, strict=True)),
        tuple(replace(loop, start=moved[loop.start], stop=moved[loop.stop]) for loop in graph.loops),
        tuple((moved[a], moved[b]) for a, b in graph.same_layout),
        tuple(moved[a] for a in graph.args),
        tuple(moved[o] for o in graph.outs),
        frozenset(moved[d] for d in graph.donated),
        retainable_from=earlier,
    )
