"""Which layouts a tensor can have on a mesh, and which collectives lead from one to another: the graph that reshards are paths in.

Prices, and so which path is the cheapest, are decided in `reshard.py`. Nothing here depends on prices, so all resharders of a mesh
share one `ReshardGraphs`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardplan.mesh.layout import Layout, MeshShape, splits_unevenly

LayoutState = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""A layout without the kinds of its reductions, mesh axes as numbers: (per dim its axes, the partial axes sorted)."""

MAX_STATES = 8000
"""With more layouts of one rank than this (five axes, three dims), paths mostly pass through layouts in mesh order."""


class ReshardGraphs:
    """The reshard graphs of one mesh, one per rank (and per mix of reductions), built when first asked for.

    Args:
        mesh: names and sizes of the axes.
        reduce_scatter: whether there are reduce-scatters.
    """

    def __init__(self, mesh: MeshShape, reduce_scatter: bool):
        self.mesh, self.reduce_scatter = mesh, reduce_scatter
        self.axes = tuple(a for a, n in mesh if n > 1)  # an axis of size 1 shards nothing
        self.number = {a: i for i, a in enumerate(self.axes)}
        self.sizes = tuple(mesh.size(a) for a in self.axes)
        self._graphs: dict[tuple, ReshardGraph] = {}
        self._queries: dict[tuple, TableQuery] = {}
        self._by_identity: dict[tuple[int, int], tuple[TableQuery, tuple, tuple]] = {}

    def lasting_query(self, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]) -> TableQuery:
        """`query` of tuples that last, which are known by their identity and kept: hashing all layouts takes longer."""
        if (found := self._by_identity.get((id(srcs), id(dsts)))) is None:
            found = self._by_identity[id(srcs), id(dsts)] = self.query(srcs, dsts), srcs, dsts
        return found[0]

    def query(self, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]) -> TableQuery:
        """A table's rows and columns reduced to what decides it: the dims that any layout shards, and node numbers.

        Raises:
            ValueError: the layouts differ in rank, name an axis that the mesh lacks, or use an axis twice.
        """
        if found := self._queries.get((srcs, dsts)):
            return found
        ranks = {x.rank for x in (*srcs, *dsts)}
        if len(ranks) > 1:
            raise ValueError(f"one tensor's layouts have one number of dims; these have {sorted(ranks)}")
        every = [self._state(x) for x in (*srcs, *dsts)]
        dims = tuple(sorted({d for s, _ in every for d, axes in enumerate(s) if axes}))
        states = [(tuple(s[d] for d in dims), partial) for s, partial in every]
        mixed, parts = [_mixed(s) for s in srcs], []
        for kinds in dict.fromkeys(mixed):
            rows = np.array([i for i, of in enumerate(mixed) if of == kinds])
            graph = self._graph(len(dims), kinds, states)
            parts.append(TablePart(rows, graph, graph.ids([states[i] for i in rows]), graph.ids(states[len(srcs) :])))
        never = np.zeros((len(srcs), len(dsts)), bool)
        for j, d in enumerate(dsts):
            if self.partial(d):
                never[:, j] = [s != d for s in srcs]
        found = self._queries[srcs, dsts] = TableQuery(max(ranks, default=0), dims, tuple(parts), never)
        return found

    def partial(self, layout: Layout) -> set[tuple[str, str]]:
        """(axis, kind) of the reductions over axes of more than one device."""
        return {(a, kind) for a, kind in layout.partial if a in self.number}

    def _state(self, layout: Layout) -> LayoutState:
        every = (*layout.sharded_axes, *layout.partial_axes)
        for axis in every:
            if axis not in self.mesh.axes:
                raise ValueError(f"layout {layout} names axis {axis!r}, which mesh {self.mesh} does not have")
        if len(set(every)) != len(every):
            raise ValueError(f"layout {layout} uses a mesh axis twice")
        number = self.number
        dims = tuple(tuple(number[a] for a in axes if a in number) for axes in layout.dims)
        return dims, tuple(sorted(number[a] for a in layout.partial_axes if a in number))

    def _graph(self, rank: int, kinds: tuple[tuple[str, ...], ...], wanted: list[LayoutState]) -> ReshardGraph:
        full = _count(rank, len(self.axes)) <= MAX_STATES
        key = (rank, kinds) if full else (rank, kinds, frozenset(wanted))
        if key not in self._graphs:
            states = _all_states(rank, len(self.axes)) if full else _some_states(rank, len(self.axes), wanted)
            groups = {self.number[a]: i for i, axes in enumerate(kinds) for a in axes if a in self.number}
            self._graphs[key] = ReshardGraph(self.sizes, rank, states, groups, self.reduce_scatter, symmetric=full)
        return self._graphs[key]


class TablePart(NamedTuple):
    """Rows of a table whose sources live in one graph: their numbers, and the node numbers of the sources and of all targets."""

    rows: np.ndarray
    graph: ReshardGraph
    src: np.ndarray
    dst: np.ndarray


@dataclass(frozen=True, eq=False)
class TableQuery:
    """One table of reshards, without shape and prices.

    Attributes:
        rank: dims of the tensor.
        dims: the tensor dims that the dims of the graph's layouts stand for.
        parts: the rows, by graph.
        never: [row, column] whether no path joins them: nothing is moved and stays partial.
    """

    rank: int
    dims: tuple[int, ...]
    parts: tuple[TablePart, ...]
    never: np.ndarray


def _mixed(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Axes grouped by their reduction, where there is more than one: such reductions are not done jointly."""
    kinds = sorted({k for _, k in layout.partial})
    return tuple(tuple(a for a, k in layout.partial if k == kind) for kind in kinds) if len(kinds) > 1 else ()


def _count(rank: int, n_axes: int) -> int:
    """How many layouts a tensor has: some axes on dims, in any order there; the others replicated or partial."""
    return sum(math.comb(n_axes, k) * math.prod(range(rank, rank + k)) * 2 ** (n_axes - k) for k in range(n_axes + 1))


def _all_states(rank: int, n_axes: int) -> list[LayoutState]:
    found: list[LayoutState] = [(((),) * rank, ())]
    for axis in range(n_axes):
        more = []
        for dims, partial in found:
            more += [(dims, partial), (dims, (*partial, axis))]
            for d, axes in enumerate(dims):
                for at in range(len(axes) + 1):
                    more.append(((*dims[:d], (*axes[:at], axis, *axes[at:]), *dims[d + 1 :]), partial))
        found = more
    return sorted(found)


def _some_states(rank: int, n_axes: int, wanted: Sequence[LayoutState]) -> list[LayoutState]:
    """The layouts with axes in mesh order, if these are few enough, and everything below `wanted`."""
    found = set(_below(wanted))
    if (rank + 2) ** n_axes <= MAX_STATES:
        for where in itertools.product(range(-2, rank), repeat=n_axes):
            dims = tuple(tuple(a for a, d in enumerate(where) if d == e) for e in range(rank))
            found.add((dims, tuple(a for a, d in enumerate(where) if d == -2)))
    return sorted(found)


def _below(wanted: Sequence[LayoutState]) -> list[LayoutState]:
    """The layouts reached from `wanted` by dropping minor-most axes and completing reductions."""
    found = set()
    for dims, partial in set(wanted):
        prefixes = [[axes[:k] for k in range(len(axes) + 1)] for axes in dims]
        left = [p for k in range(len(partial) + 1) for p in itertools.combinations(partial, k)]
        found.update(itertools.product(itertools.product(*prefixes), left))
    return sorted(found)


class EdgeClass(NamedTuple):
    """Edges of one price: kind, axes, shards of the larger buffer, and the axes that already shard the dim a sum is scattered along."""

    kind: str
    axes: tuple[int, ...]
    shards: int
    outer_axes: tuple[int, ...]


class ReshardGraph:
    """Layouts of one rank as nodes 0..N-1, collectives as edges.

    Attributes:
        states: [node] the layouts.
        sharded, partial: [node] axes as bits, over which a layout is sharded and partial.
        axes_of_dims: [node, dim] how many axes shard the dim.
        sharded_dims: [node] dims as bits that any axis shards.
        classes: [edge class].
        edges: [edge, 3] target, source, edge class; sorted.
        class_shards, gathers, slices, outer_axes: [edge class] shards of the larger buffer; axes as bits that an all-gather gathers,
            that a slice shards where a reduce-scatter could, and `EdgeClass.outer_axes`.
        symmetric: whether all layouts of the rank are nodes, so that dims can be renamed.
    """

    def __init__(self, sizes, rank, states: list[LayoutState], groups, reduce_scatter: bool, symmetric: bool):
        self.sizes, self.rank, self.states, self.symmetric = sizes, rank, states, symmetric
        self.id = {s: i for i, s in enumerate(states)}
        split = [[a for axes in dims for a in axes] for dims, _ in states]
        shards = [_product(axes, sizes) for axes in split]
        self.sharded, self.partial = _bits(split), _bits(partial for _, partial in states)
        self.axes_of_dims = np.array([[len(axes) for axes in dims] for dims, _ in states]).reshape(len(states), rank)
        self._dims = 1 << np.arange(rank)
        self.sharded_dims = (self.axes_of_dims > 0) @ self._dims
        same_shards: dict[tuple, list[LayoutState]] = {}
        for s in states:
            same_shards.setdefault(_shard_key(s, sizes), []).append(s)

        classes: dict[EdgeClass, int] = {}
        edges = []
        for u, state in enumerate(states):
            for kind, axes, after in _edges(state, sizes, groups, reduce_scatter, same_shards):
                if (v := self.id.get(after)) is not None:
                    outer = _changed_dim(state, after) if kind == "reduce-scatter" else ()
                    edge = EdgeClass(kind, axes, shards[v if kind == "all-gather" else u], outer)
                    edges.append((v, u, classes.setdefault(edge, len(classes))))
        self.classes = list(classes)
        self.edges = np.array(sorted(edges), np.int64).reshape(-1, 3)
        self.class_shards = np.array([e.shards for e in self.classes], float)
        self.gathers = _bits(e.axes if e.kind == "all-gather" else () for e in self.classes)
        scattered = reduce_scatter and symmetric  # instead of all-reduced and sliced; layouts in between may be missing otherwise
        self.slices = _bits(e.axes if e.kind == "slice" and scattered else () for e in self.classes)
        self.outer_axes = _bits(e.outer_axes for e in self.classes)

        axes = range(len(sizes))
        self._products = sorted({_product(c, sizes) for k in range(1, len(sizes) + 1) for c in itertools.combinations(axes, k)})
        self._subgraphs: dict[tuple, ReshardSubgraph] = {}

    def ids(self, states: Sequence[LayoutState]) -> np.ndarray:
        """[n] node numbers."""
        return np.array([self.id[s] for s in states], np.int64)

    def left(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """[n] the dims as bits that axes leave along edges between these nodes."""
        return (self.axes_of_dims[target] < self.axes_of_dims[source]) @ self._dims

    def subgraph(self, shape: tuple[int, ...], src: np.ndarray, dst: np.ndarray) -> ReshardSubgraph:
        """The layouts that divide a tensor of this shape evenly or nearly so, other sources and targets, and what leads to these."""
        rows = tuple(tuple(n % p == 0 for p in self._products) for n in shape)
        unequal = [n if any(splits_unevenly(n, k) for k in self.sizes) else 0 for n in shape]
        divides: tuple = tuple(zip(rows, unequal, strict=True)) if any(unequal) else rows
        found = self._subgraphs.get(divides)
        if found is None:
            blocks = self._blocks(shape, unequal) if any(unequal) else None
            even = [dict(zip(self._products, row, strict=True)) | {1: True} for row in rows]
            allowed = np.array([all(even[d][_product(a, self.sizes)] for d, a in enumerate(dims)) for dims, _ in self.states])
            allowed = allowed | blocks.filled if blocks else allowed
            interchangeable = tuple(divides.index(row) for row in divides)
            found = ReshardSubgraph(self, allowed, interchangeable if self.symmetric else tuple(range(self.rank)), blocks)
            self._subgraphs[divides] = found
        uneven = np.unique([*src[~found.allowed[src]], *dst[~found.allowed[dst]]])
        if len(uneven):
            key = (divides, uneven.tobytes())
            if key not in self._subgraphs:
                allowed = found.allowed.copy()
                allowed[self.ids(_below([self.states[i] for i in uneven.astype(int)]))] = True
                self._subgraphs[key] = ReshardSubgraph(self, allowed, tuple(range(self.rank)), found.unequal)
            found = self._subgraphs[key]
        return found

    def _blocks(self, shape: tuple[int, ...], unequal: Sequence[int]) -> UnequalBlocks:
        """What is not even about the layouts of a tensor of this shape; `unequal`: its sizes that are sharded so, others as 0."""
        uneven, padding = [], []
        for dims, _ in self.states:
            counts = [_product(axes, self.sizes) for axes in dims]
            filled = [len(axes) == 1 and splits_unevenly(n, k) for n, axes, k in zip(unequal, dims, counts, strict=True)]
            fits = all(x or n % k == 0 for n, k, x in zip(shape, counts, filled, strict=True))
            grows = (-(-n // k) * k / n for n, k, x in zip(shape, counts, filled, strict=True) if x)
            uneven.append(filled)
            padding.append(math.prod(grows) if fits else 0.0)
        found = np.array(padding)
        return UnequalBlocks(found > 1, np.array(uneven).reshape(len(self.states), -1), np.maximum(found, 1.0))


class UnequalBlocks(NamedTuple):
    """What is not even about the layouts of a tensor.

    Attributes:
        filled: [node] whether it is a layout in which some dim's blocks are filled up.
        uneven: [node, dim] whether the dim's are.
        padding: [node] elements of all shards, filled up, over those of the tensor.
    """

    filled: np.ndarray
    uneven: np.ndarray
    padding: np.ndarray


class ReshardSubgraph:
    """The layouts that paths of one shape may use, ready for searching.

    Args:
        graph: the layouts of this rank.
        allowed: [node] whether a path may use it.
        interchangeable: [dim] equal numbers for dims that divide evenly by the same numbers: renaming them changes no price.
        blocks: of a tensor of which some layouts are uneven.

    Attributes:
        classes: [group of edges] the edge class.
        padding: [group] bytes of the collective over those of equal blocks.
        slices: [group] `ReshardGraph.slices`; next to unequal blocks none, since a sum may have no other way.
        blocks: edges, the d-th into every node together: their sources, groups, and the dims as bits that axes leave.
    """

    def __init__(self, graph: ReshardGraph, allowed: np.ndarray, interchangeable: tuple[int, ...], blocks: UnequalBlocks | None = None):
        self.graph, self.allowed, self.unequal = graph, allowed, blocks
        target, source, group = graph.edges[allowed[graph.edges[:, 0]] & allowed[graph.edges[:, 1]]].T
        self.classes, self.padding, self.slices = np.arange(len(graph.classes)), np.ones(len(graph.classes)), graph.slices
        if blocks:
            target, source, group = self._with_unequal_blocks(blocks, target, source, group)

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
            self.blocks.append((self.place[source[here]], group[here], graph.left(source[here], target[here])))

        # `canon[s]` is s with its dims ordered by their axes, and `renamed` does the same to any other layout.
        self.canon = np.arange(len(allowed))
        self._renaming = np.zeros(len(allowed), np.int64)
        number = {tuple(range(graph.rank)): 0}
        same = interchangeable
        if len(set(same)) < graph.rank:
            last = (len(graph.sizes),)
            slots = [d for c in dict.fromkeys(same) for d in range(graph.rank) if same[d] == c]
            for i in self.nodes.tolist():
                dims, partial = graph.states[i]
                order = [0] * graph.rank
                for slot, d in zip(slots, sorted(range(graph.rank), key=lambda d: (same[d], dims[d] or last, d)), strict=True):
                    order[slot] = d
                self._renaming[i] = number.setdefault(tuple(order), len(number))
                self.canon[i] = graph.id[tuple(dims[d] for d in order), partial]
        self._orders = list(number)
        self._renamed = {0: np.arange(len(allowed))}

    def _with_unequal_blocks(self, blocks: UnequalBlocks, target, source, group) -> tuple[np.ndarray, ...]:
        """The edges with their groups.

        A sum is not scattered along a dim of unequal blocks, and such blocks are not moved before it is complete (facts:
        uneven-sum-is-all-reduced, uneven-sum-is-completed-first).
        """
        changes = np.asarray((blocks.uneven[target] != blocks.uneven[source]).any(axis=1))
        kept = ~(changes & (self.graph.partial[source] != 0))
        target, source, group = (x[kept] for x in (target, source, group))
        padding = np.maximum(blocks.padding[target], blocks.padding[source])
        groups, index = np.unique(np.stack([group.astype(float), padding], axis=1), axis=0, return_inverse=True)
        self.classes, self.padding = groups[:, 0].astype(np.int64), groups[:, 1]
        self.slices = np.zeros(len(groups), np.int64)
        return target, source, index.reshape(-1)

    def renamed(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """[len(src), len(dst)]: each dst with its dims renamed as src's were to make it canonical."""
        which = self._renaming[src]
        out = np.empty((len(src), len(dst)), np.int64)
        for r in np.unique(which).tolist():
            if r not in self._renamed:
                order = self._orders[r]
                self._renamed[r] = self.graph.ids([(tuple(dims[d] for d in order), p) for dims, p in self.graph.states])
            out[which == r] = self._renamed[r][dst]
        return out

    def order(self, src: int) -> tuple[int, ...]:
        """Dim d of the canonical layout is dim order[d] of `src`."""
        return self._orders[self._renaming[src]]


def _bits(sets: Iterable[Iterable[int]]) -> np.ndarray:
    """Sets of axes as integers, one bit per axis."""
    return np.array([sum(1 << a for a in axes) for axes in sets], np.int64)


# ---- edges


def _edges(state: LayoutState, sizes, groups, reduce_scatter, same_shards) -> Iterator[tuple[str, tuple[int, ...], LayoutState]]:
    """Every collective out of a layout: (kind, axes, layout after).

    Facts: partition-rest-is-all-reduced, partition-reshard-kinds.
    """
    dims, partial = state
    idle = [a for a in range(len(sizes)) if a not in partial and all(a not in axes for axes in dims)]

    def put(d: int, axes: tuple[int, ...], base=dims) -> tuple[tuple[int, ...], ...]:
        return (*base[:d], axes, *base[d + 1 :])

    for d, axes in enumerate(dims):
        for k in range(len(axes)):
            head, tail = axes[:k], axes[k:]
            yield "all-gather", tuple(sorted(tail)), (put(d, head), partial)
            for e in range(len(dims)):
                if e != d:
                    yield "all-to-all", tuple(sorted(tail)), (put(e, (*dims[e], *tail), put(d, head)), partial)
        for k in () if partial else range(1, len(idle) + 1):  # XLA would slice the operands of a sum that is still partial
            for order in itertools.permutations(idle, k):
                yield "slice", tuple(sorted(order)), (put(d, (*axes, *order)), partial)
    for some in itertools.chain.from_iterable(itertools.combinations(partial, k) for k in range(1, len(partial) + 1)):
        if len({groups.get(a) for a in some}) > 1:
            continue
        left = tuple(a for a in partial if a not in some)
        if groups.get(some[0]) not in [groups.get(a) for a in left]:  # fact: partition-scatter-at-once
            yield "all-reduce", some, (dims, left)
        for order in itertools.permutations(some) if reduce_scatter else ():
            for d, axes in enumerate(dims):
                yield "reduce-scatter", some, (put(d, (*axes, *order)), left)
    for other in same_shards[_shard_key(state, sizes)]:
        if other != state:
            yield "collective-permute", _displaced(state, other, sizes), other


def _changed_dim(before: LayoutState, after: LayoutState) -> tuple[int, ...]:
    """The axes that already shard the dim along which a sum is scattered."""
    return next(tuple(sorted(a)) for a, b in zip(before[0], after[0], strict=True) if a != b)


def _displaced(a: LayoutState, b: LayoutState, sizes) -> tuple[int, ...]:
    """Axes whose place (the dim, and how many shards one step along the axis is) differs between two layouts."""

    def places(s: LayoutState) -> dict[int, tuple[int, int]]:
        return {axis: (d, _product(axes[i + 1 :], sizes)) for d, axes in enumerate(s[0]) for i, axis in enumerate(axes)}

    before, after = places(a), places(b)
    return tuple(sorted({x for x in before.keys() | after.keys() if before.get(x) != after.get(x)}))


def _shard_key(state: LayoutState, sizes) -> tuple:
    """Layouts with equal keys hold the same shards, on other devices."""
    dims, partial = state
    return tuple(_product(axes, sizes) for axes in dims), partial


def _product(axes, sizes) -> int:
    return math.prod([sizes[a] for a in axes])
