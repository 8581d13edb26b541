"""The layouts that a tensor can have on a mesh, as nodes, and the collectives between them, as edges: what ways there are.

What they cost, and so which of them is taken, is `reshard.py`'s. Nothing here depends on prices, so all resharders of a mesh share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape

# A layout without the names of its reductions, axes as numbers: (per dim its axes, the partial axes sorted).
State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]

MAX_STATES = 8000
"""With more layouts of one rank than this (five axes, three dims), paths mostly pass through layouts in mesh order."""


class Lattice:
    """The layouts of tensors on one mesh and what leads from one to the other, whatever it costs.

    Args:
        mesh: names and sizes of the axes.
        reduce_scatter: whether there are reduce-scatters.
    """

    def __init__(self, mesh: MeshShape, reduce_scatter: bool):
        self.mesh, self.reduce_scatter = mesh, reduce_scatter
        self.axes = tuple(a for a, n in mesh if n > 1)  # an axis of size 1 splits nothing
        self.number = {a: i for i, a in enumerate(self.axes)}
        self.sizes = tuple(mesh.size(a) for a in self.axes)
        self._found: dict[tuple, Ways] = {}
        self._states: dict[Layout, State] = {}
        self._questions: dict[tuple, Question] = {}

    def question(self, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]) -> Question:
        """A table's rows and columns reduced to what decides it: the dims that any layout splits, and node numbers."""
        found = self._questions.get((srcs, dsts))
        if found is None:
            ranks = {x.rank for x in srcs} | {x.rank for x in dsts}
            if len(ranks) > 1:
                raise ValueError(f"one tensor's layouts have one number of dims; these have {sorted(ranks)}")
            src_states, dst_states = [self._state(s) for s in srcs], [self._state(d) for d in dsts]
            every = [*src_states, *dst_states]
            dims = tuple(sorted({d for s, _ in every for d, axes in enumerate(s) if axes}))
            src_states = [(tuple(s[d] for d in dims), p) for s, p in src_states]
            dst_states = [(tuple(s[d] for d in dims), p) for s, p in dst_states]
            parts = []
            for kinds in dict.fromkeys(_mixed(s) for s in srcs):
                rows = np.array([i for i, s in enumerate(srcs) if _mixed(s) == kinds])
                ways = self._ways(len(dims), kinds, [*src_states, *dst_states])
                parts.append(Part(rows, ways, ways.ids([src_states[i] for i in rows]), ways.ids(dst_states)))
            never = [(i, j) for j, d in enumerate(dsts) if self.partial(d) for i, s in enumerate(srcs) if s != d]
            found = self._questions[srcs, dsts] = Question(
                max(ranks, default=0), dims, (len(srcs), len(dsts)), tuple(parts), np.array(never, np.int64).reshape(-1, 2)
            )
        return found

    def partial(self, layout: Layout) -> set[tuple[str, str]]:
        return {(a, kind) for a, kind in layout.partial if a in self.number}

    def _state(self, layout: Layout) -> State:
        found = self._states.get(layout)
        if found is None:
            every = (*layout.split_axes, *layout.partial_axes)
            for axis in every:
                if axis not in self.mesh.axes:
                    raise ValueError(f"layout {layout} names axis {axis!r}, which mesh {self.mesh} does not have")
            if len(set(every)) != len(every):
                raise ValueError(f"layout {layout} uses a mesh axis twice")
            number = self.number
            dims = tuple(tuple(number[a] for a in axes if a in number) for axes in layout.dims)
            found = self._states[layout] = dims, _sorted(number[a] for a in layout.partial_axes if a in number)
        return found

    def _ways(self, rank: int, kinds: tuple[tuple[str, ...], ...], wanted: list[State]) -> Ways:
        full = _count(rank, len(self.axes)) <= MAX_STATES
        key = (rank, kinds) if full else (rank, kinds, frozenset(wanted))
        if key not in self._found:
            states = _all_states(rank, len(self.axes)) if full else _some_states(rank, len(self.axes), wanted)
            groups = {self.number[a]: i for i, axes in enumerate(kinds) for a in axes if a in self.number}
            self._found[key] = Ways(self.sizes, rank, states, groups, self.reduce_scatter, symmetric=full)
        return self._found[key]


@dataclass(frozen=True, eq=False)
class Part:
    rows: np.ndarray  # the rows of the table that this part answers
    ways: Ways
    src: np.ndarray  # node numbers
    dst: np.ndarray


@dataclass(frozen=True, eq=False)
class Question:
    rank: int
    dims: tuple[int, ...]  # the tensor dims that those of the ways' layouts stand for
    size: tuple[int, int]
    parts: tuple[Part, ...]
    never: np.ndarray  # (row, column) pairs that no path joins


def _mixed(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Axes grouped by their reduction, where there is more than one: such reductions are not done jointly."""
    kinds = sorted({k for _, k in layout.partial})
    return tuple(tuple(a for a, k in layout.partial if k == kind) for kind in kinds) if len(kinds) > 1 else ()


def _count(rank: int, n_axes: int) -> int:
    """How many layouts a tensor has on a mesh, partial ones included."""
    total, orders = 0, 1
    for split in range(n_axes + 1):  # `split` axes on dims, in order; the others whole or partial
        choose = len(list(itertools.combinations(range(n_axes), split)))
        total += choose * orders * 2 ** (n_axes - split)
        orders *= rank + split
    return total


def _all_states(rank: int, n_axes: int) -> list[State]:
    found: list[State] = [(((),) * rank, ())]
    for axis in range(n_axes):
        more = []
        for dims, partial in found:
            more += [(dims, partial), (dims, (*partial, axis))]
            for d, axes in enumerate(dims):
                for at in range(len(axes) + 1):
                    more.append(((*dims[:d], (*axes[:at], axis, *axes[at:]), *dims[d + 1 :]), partial))
        found = more
    return sorted(found)


def _some_states(rank: int, n_axes: int, wanted: Sequence[State]) -> list[State]:
    """The layouts with axes in mesh order, if these are few enough, and everything below `wanted`."""
    found = set(_below(wanted))
    if (rank + 2) ** n_axes <= MAX_STATES:
        for where in itertools.product(range(-2, rank), repeat=n_axes):
            dims = tuple(tuple(a for a, d in enumerate(where) if d == e) for e in range(rank))
            found.add((dims, tuple(a for a, d in enumerate(where) if d == -2)))
    return sorted(found)


def _below(wanted: Sequence[State]) -> list[State]:
    """Everything got from `wanted` by dropping minor-most axes and finishing reductions."""
    found = set()
    for dims, partial in set(wanted):
        prefixes = [[axes[:k] for k in range(len(axes) + 1)] for axes in dims]
        left = [p for k in range(len(partial) + 1) for p in itertools.combinations(partial, k)]
        found.update(itertools.product(itertools.product(*prefixes), left))
    return sorted(found)


class Ways:
    """Layouts of one rank as nodes 0..N-1, collectives as edges."""

    def __init__(self, sizes, rank, states: list[State], groups, reduce_scatter: bool, symmetric: bool):
        self.sizes, self.rank, self.states, self.symmetric = sizes, rank, states, symmetric
        self.id = {s: i for i, s in enumerate(states)}
        shards = [_shards(s, sizes) for s in states]
        same_shards: dict[tuple, list[State]] = {}
        for s in states:
            same_shards.setdefault(_shard_key(s, sizes), []).append(s)

        # Edges, grouped by (kind, axes, shards of the larger buffer): all of one group cost the same.
        classes: dict[tuple, int] = {}
        edges = []
        for u, state in enumerate(states):
            for kind, axes, after, larger in _moves(state, sizes, groups, reduce_scatter, same_shards):
                v = self.id.get(after)
                if v is not None:
                    beside = _beside(state, after) if kind == "reduce-scatter" else ()
                    group = (kind, axes, shards[u if larger == "before" else v], beside)
                    edges.append((v, u, classes.setdefault(group, len(classes))))
        self.classes = list(classes)
        self.edges = np.array(sorted(edges), np.int64).reshape(-1, 3)  # target, source, class
        self.class_shards = np.array([n for _, _, n, _ in self.classes], float)
        self.gathers = np.array([bits(axes) if kind == "all-gather" else 0 for kind, axes, _, _ in self.classes], np.int64)
        scattered = reduce_scatter and symmetric  # instead of being summed and cut up; layouts in between may be missing otherwise
        self.cuts = np.array([bits(axes) if kind == "slice" and scattered else 0 for kind, axes, _, _ in self.classes], np.int64)
        self.beside = np.array([bits(axes) for _, _, _, axes in self.classes], np.int64)

        self._products = sorted(
            {_product(axes, sizes) for k in range(1, len(sizes) + 1) for axes in itertools.combinations(range(len(sizes)), k)}
        )
        self._regions: dict[tuple, Region] = {}

    def ids(self, states: Sequence[State]) -> np.ndarray:
        return np.fromiter((self.id[s] for s in states), np.int64, len(states))

    def region(self, shape: tuple[int, ...], src: np.ndarray, dst: np.ndarray) -> Region:
        """The layouts that split a tensor of this shape evenly, and those asked for with what leads to them."""
        divides = tuple(tuple(n % p == 0 for p in self._products) for n in shape)
        found = self._regions.get(divides)
        if found is None:
            even = [dict(zip(self._products, row, strict=True)) | {1: True} for row in divides]
            allowed = np.array([all(even[d][_product(a, self.sizes)] for d, a in enumerate(dims)) for dims, _ in self.states])
            alike = tuple(divides.index(row) for row in divides)  # dims that divide alike may be renamed
            found = self._regions[divides] = Region(self, allowed, alike if self.symmetric else tuple(range(self.rank)))
        uneven = np.unique([*src[~found.allowed[src]], *dst[~found.allowed[dst]]])
        if len(uneven):
            key = (divides, uneven.tobytes())
            if key not in self._regions:
                allowed = found.allowed.copy()
                allowed[self.ids(_below([self.states[i] for i in uneven.astype(int)]))] = True
                self._regions[key] = Region(self, allowed, tuple(range(self.rank)))
            found = self._regions[key]
        return found


class Region:
    """The layouts that paths of one shape may use, ready for searching; dims that are `alike` can be renamed at no cost."""

    def __init__(self, ways: Ways, allowed: np.ndarray, alike: tuple[int, ...]):
        self.ways, self.allowed = ways, allowed
        target, source, group = ways.edges[allowed[ways.edges[:, 0]] & allowed[ways.edges[:, 1]]].T

        # Nodes by falling number of edges into them, so that the d-th edges of all nodes are one block: those of the first few.
        degree = np.bincount(target, minlength=len(allowed))
        nodes = np.flatnonzero(allowed)
        self.nodes = nodes[np.argsort(-degree[nodes], kind="stable")]
        self.place = np.full(len(allowed), -1)
        self.place[self.nodes] = np.arange(len(self.nodes))
        nth = np.arange(len(target)) - (np.cumsum(degree) - degree)[target]
        self.blocks = []
        for d in range(int(degree.max(initial=0))):
            here = np.flatnonzero(nth == d)
            here = here[np.argsort(self.place[target[here]])]
            self.blocks.append((self.place[source[here]], group[here]))

        # `canon[s]` is s with its dims ordered by their axes, and `renamed` does the same to any other layout.
        self.canon = np.arange(len(allowed))
        self._renaming = np.zeros(len(allowed), np.int64)
        number = {tuple(range(ways.rank)): 0}
        if len(set(alike)) < ways.rank:
            last = (len(ways.sizes),)
            slots = [d for c in dict.fromkeys(alike) for d in range(ways.rank) if alike[d] == c]
            for i in self.nodes.tolist():
                dims, partial = ways.states[i]
                order = [0] * ways.rank
                for slot, d in zip(slots, sorted(range(ways.rank), key=lambda d: (alike[d], dims[d] or last, d)), strict=True):
                    order[slot] = d
                self._renaming[i] = number.setdefault(tuple(order), len(number))
                self.canon[i] = ways.id[tuple(dims[d] for d in order), partial]
        self._orders = list(number)
        self._renamed = {0: np.arange(len(allowed))}

    def renamed(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """[len(src), len(dst)]: each dst with its dims renamed as src's were to make it canonical."""
        which = self._renaming[src]
        out = np.empty((len(src), len(dst)), np.int64)
        for r in np.unique(which).tolist():
            if r not in self._renamed:
                order = self._orders[r]
                self._renamed[r] = self.ways.ids([(tuple(dims[d] for d in order), p) for dims, p in self.ways.states])
            out[which == r] = self._renamed[r][dst]
        return out

    def order(self, src: int) -> tuple[int, ...]:
        """Dim d of the canonical layout is dim order[d] of `src`."""
        return self._orders[self._renaming[src]]


def bits(axes: Iterable[int]) -> int:
    return sum(1 << a for a in axes)


# ---- the moves


Move = tuple[str, tuple[int, ...], State, str]


def _moves(state: State, sizes, groups, reduce_scatter, same_shards) -> Iterator[Move]:
    """Every collective out of a layout: (kind, axes, layout after, which side has the larger buffer)."""
    dims, partial = state
    idle = [a for a in range(len(sizes)) if a not in partial and all(a not in axes for axes in dims)]

    def put(d: int, axes: tuple[int, ...], base=dims) -> tuple[tuple[int, ...], ...]:
        return (*base[:d], axes, *base[d + 1 :])

    for d, axes in enumerate(dims):
        for k in range(len(axes)):
            kept, tail = axes[:k], axes[k:]
            yield "all-gather", _sorted(tail), (put(d, kept), partial), "after"
            for e in range(len(dims)):
                if e != d:
                    yield "all-to-all", _sorted(tail), (put(e, (*dims[e], *tail), put(d, kept)), partial), "before"
        for a in () if partial else idle:  # of a sum still partial XLA would make only a slice, and of what it is the sum
            yield "slice", (a,), (put(d, (*axes, a)), partial), "before"
    for k in range(1, len(partial) + 1):
        for some in itertools.combinations(partial, k):
            if len({groups.get(a) for a in some}) > 1:
                continue
            left = tuple(a for a in partial if a not in some)
            if groups.get(some[0]) not in [groups.get(a) for a in left]:  # XLA sums over all axes at once
                yield "all-reduce", some, (dims, left), "before"
            if reduce_scatter:
                for order in itertools.permutations(some):
                    for d, axes in enumerate(dims):
                        yield "reduce-scatter", some, (put(d, (*axes, *order)), left), "before"
    for other in same_shards[_shard_key(state, sizes)]:
        if other != state:
            yield "collective-permute", _displaced(state, other, sizes), other, "before"


def _beside(before: State, after: State) -> tuple[int, ...]:
    """Axes that already split the dim along which a sum is scattered."""
    return next(_sorted(a) for a, b in zip(before[0], after[0], strict=True) if a != b)


def _displaced(a: State, b: State, sizes) -> tuple[int, ...]:
    """Axes whose place (the dim, and how many shards one step along the axis is) differs between two layouts."""

    def places(s: State) -> dict[int, tuple[int, int]]:
        return {axis: (d, _product(axes[i + 1 :], sizes)) for d, axes in enumerate(s[0]) for i, axis in enumerate(axes)}

    before, after = places(a), places(b)
    return _sorted({x for x in before.keys() | after.keys() if before.get(x) != after.get(x)})


def _shard_key(state: State, sizes) -> tuple:
    """Layouts with equal keys hold the same shards, on other devices."""
    dims, partial = state
    return tuple(_product(axes, sizes) for axes in dims), partial


def _shards(state: State, sizes) -> int:
    return _product((a for axes in state[0] for a in axes), sizes)


def _product(axes, sizes) -> int:
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


def _sorted(axes) -> tuple[int, ...]:
    return tuple(sorted(axes))
