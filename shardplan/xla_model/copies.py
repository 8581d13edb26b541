"""Which readers of a value share one resharded copy of it.

Elementwise ops, views and reductions are *followers*: they take an operand in the layout it has. Products, gathers and other big ops
may want another layout, and the reshard is paid once for all readers that want the same one. So values are read through *copies*:

    w -+-> copy 1 -+-> dot (forward)            one copy for the big readers of one phase and loop
       |           +-> gather (forward)
       +-> copy 2 ---> dot (backward)           regathered, or the retained copy 1 (`Graph.retainable_from`)
       +-> copy 3 -+-> add                      one for followers, if w may be partial or lies otherwise
                   +-> mul

A retained copy costs memory between the phases, a regathered one a second collective; small arrays are always retained. Followers
share the copy of a lookup: gathered for a product and transposed, the table is there to look things up. A large array that a big
op reads has a copy even for a single reader, so that memory counts the gathered array.

The first copy of a big op's result stands right behind the op, so that a partial sum is reduced at once and not held in full until
somebody reads it (a gradient: until the optimizer). All other copies stand before their first reader.

Facts: cse-merges-equal-reshards, partition-gathers-per-use, partition-remat-gathers-again, gather-cast-first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from shardplan.ir.graph import Graph, Op, Value

SMALL_BYTES = 1 << 16
"""Arrays of up to so many bytes are retained from the forward to the backward pass: one copy serves both."""

Reader = tuple[int, int]
"""(op, operand)."""


@dataclass(frozen=True)
class _Copy:
    """One copy to be made of a value.

    Attributes:
        follows: whether its readers are followers.
        readers: who reads it.
        earlier: first reader of the same kind in the phase before.
    """

    follows: bool
    readers: list[Reader]
    earlier: Reader | None


def _copies(graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int], v: int) -> list[_Copy]:
    """The copies to be made of value v; arguments as in `with_copies`."""
    value, found, direct = graph.values[v], {}, {}
    made = value.producer[0]
    fixed = follows[made] and not sums[made]  # lies as its operands do, complete
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
        earlier = before.get(key[1:]) if large else None
        if key in needed or (large and not key[2]) or len({at for at, _ in readers}) > 1:
            out.append(_Copy(key[2], readers, earlier))
        before[key[1:]] = readers[0]
    return out


def with_copies(graph: Graph, follows: Sequence[bool], sums: Sequence[bool], lookups: Collection[int] = ()) -> Graph:
    """The same graph with a copy before every group of readers; numbers of ops and values change.

    Args:
        graph: the step.
        follows: per op, whether it takes operands in the layout they have.
        sums: per op, whether its result may be partial.
        lookups: ops that read places of a table, in whatever layout.
    """
    copies: dict[int, list[_Copy]] = {}
    before: dict[int, list[tuple[int, int]]] = {}  # op -> (value, number of the copy) that stand before it
    for v in range(len(graph.values)):
        if some := _copies(graph, follows, sums, lookups, v):
            copies[v] = some
            made = graph.values[v].producer[0]
            at_once = (sums[made] or not follows[made]) and not graph.ops[made].traits.border
            for n, copy in enumerate(some):
                place = made + 1 if at_once and n == 0 and copy.earlier is None else min(at for at, _ in copy.readers)
                before.setdefault(place, []).append((v, n))
    new = _Rewritten()
    for at, op in enumerate(graph.ops):
        for v, n in before.get(at, ()):
            new.copy(graph, op, v, n, copies[v][n])
        new.op(graph, at, op)
    return new.graph(graph)


@dataclass
class _Rewritten:
    """A graph as it is written anew, with copies; lives for one call of `with_copies`.

    Attributes:
        ops: the new ops.
        moved: old op number -> new.
        values: per new value, what it was, and its (op, result).
        renamed: old value -> new.
        through: (old reader, operand) -> the new value of the copy it reads, and the new number of that copy.
        earlier: `Graph.retainable_from`.
    """

    ops: list[Op] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    values: list[tuple[Value, tuple[int, int]]] = field(default_factory=list)
    renamed: dict[int, int] = field(default_factory=dict)
    through: dict[Reader, tuple[int, int]] = field(default_factory=dict)
    earlier: dict[int, Reader] = field(default_factory=dict)

    def copy(self, graph: Graph, before: Op, v: int, n: int, copy: _Copy) -> None:
        """Append copy n of old value v, right before an op."""
        value = graph.values[v]
        maker, k = graph.ops[value.producer[0]], value.producer[1]
        avals, at, made = (maker.outs[k],), len(self.ops), len(self.values)
        path = (*maker.path, "shared_copy", k, n)
        times = {"runs": before.reads, "reads": before.reads, "loop": before.loop, "is_follower": copy.follows}
        self.ops.append(
            Op("shared_copy", (self.renamed[v],), (made,), avals, avals, {}, path, source=before.source, phase=before.phase, **times)
        )
        self.values.append((value, (at, 0)))
        self.through.update(dict.fromkeys(copy.readers, (made, at)))
        if (first := copy.earlier) is not None:
            self.earlier[at] = (self.through[first][1], 0) if first in self.through else (self.moved[first[0]], first[1])

    def op(self, graph: Graph, at: int, op: Op) -> None:
        """Append old op `at`."""
        self.moved.append(len(self.ops))
        read = (self.through.get((at, k), (None if v is None else self.renamed.get(v),)) for k, v in enumerate(op.inputs))
        outputs = tuple(range(len(self.values), len(self.values) + len(op.outputs)))
        self.renamed.update(zip(op.outputs, outputs, strict=True))
        self.values += [(graph.values[v], (len(self.ops), k)) for k, v in enumerate(op.outputs)]
        self.ops.append(replace(op, inputs=tuple(made for made, *_ in read), outputs=outputs))

    def graph(self, old: Graph) -> Graph:
        """The new graph."""
        consumers: list[list[Reader]] = [[] for _ in self.values]
        for at, op in enumerate(self.ops):
            for k, v in enumerate(op.inputs):
                if v is not None:
                    consumers[v].append((at, k))
        moved = [*self.moved, len(self.ops)]
        return Graph(
            tuple(self.ops),
            tuple(replace(v, producer=made, consumers=tuple(c)) for (v, made), c in zip(self.values, consumers, strict=True)),
            tuple(replace(loop, start=moved[loop.start], stop=moved[loop.stop]) for loop in old.loops),
            tuple((moved[a], moved[b]) for a, b in old.same_layout),
            tuple(moved[a] for a in old.args),
            tuple(moved[o] for o in old.outs),
            frozenset(moved[d] for d in old.donated),
            retainable_from=self.earlier,
        )
