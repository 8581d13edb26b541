"""How a tensor gets from one layout to another: the cheapest path over collectives, and its seconds.

The layouts of one tensor are the nodes of a graph and the collectives its edges; a reshard is a shortest path. Example, on
mesh x=2, y=4, a tensor laid out P('x', 'y') that is needed as P('y', None):

    all-gather over y          P('x', 'y') -> P('x', None)        drops the minor-most axes of a dim
    slice over y               P('x', None) -> P(('x','y'), None) adds axes to a dim, each device keeps a part of what it has
    all-to-all over y          P('x', 'y') -> P(('x','y'), None)  moves the minor-most axes of a dim to another dim
    collective-permute         P(('x','y'), None) -> P(('y','x'), None)   same shards, other devices
    all-gather over x          P(('y','x'), None) -> P('y', None)
    reduce-scatter over x      P(None, None) + sum over x -> P('x', None)
    all-reduce over x          P(None, None) + sum over x -> P(None, None)

Seconds depend on the tensor only through its total bytes, and on the names of dims not at all. So one small array of
distances per (rank, bytes) answers every table; tables are cached and returned as the same read-only array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import UNCOMBINED, CollectiveKey, CombinedCollectives
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard_graph import LayoutState, ReshardGraph, ReshardGraphs, ReshardSubgraph, TablePart, TableQuery

KnownGroups = tuple[tuple[CollectiveKey, CombinedCollectives], ...]
Kernels = Literal["all", "none", "only"]


@dataclass(frozen=True)
class ReshardStep:
    """One collective of a path.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute" or "slice".
        axes: the mesh axes it runs over, jointly, in mesh order.
        bytes: bytes per device of its larger buffer (see `shardplan.mesh.collective`).
        seconds: of one run.
        before: layout it starts from.
        after: layout it leaves.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    before: Layout
    after: Layout


@dataclass(frozen=True, eq=False)
class Resharder:
    """Cheapest paths between layouts on one mesh of one cluster.

    A path uses only layouts that divide the tensor evenly or nearly so (`Layout.splits`), besides its source and target. Results are
    cached; they are read-only and never change.

    Attributes:
        mesh: names and sizes of the axes.
        cluster: the machine.
        combined: the arrays that are resharded at once; their collectives of one kind and axes are combined.
        combinable: kinds of collectives that are combined.
        known: the arrays that are really combined, by kind and axes; they win over `combined`.
        sliced_sums: whether a path may complete a sum and then slice it. XLA does so where the all-reduces are combined, and may
            reduce-scatter otherwise.
        sliced_wholly: whether it may be sliced over all its axes at once, which XLA leaves so only where something else reads it whole.
        byte_factors: (kind, factor) of collectives that send `factor` times the bytes of the array.
        kernels: whether kernels count that fill and empty a collective's buffer, and slices; in lower bounds they may count not at
            all, or alone.
        shared_graphs: those of another resharder on this mesh.
    """

    mesh: MeshShape
    cluster: Cluster
    combined: CombinedCollectives = UNCOMBINED
    combinable: tuple[str, ...] = ()
    known: KnownGroups = ()
    sliced_sums: bool = False
    sliced_wholly: bool = True
    byte_factors: tuple[tuple[str, float], ...] = ()
    kernels: Kernels = "all"
    shared_graphs: ReshardGraphs | None = None
    _tables: dict[tuple, np.ndarray] = field(default_factory=dict, init=False)
    _prices: dict[ReshardGraph, np.ndarray] = field(default_factory=dict, init=False)
    _distances: dict[tuple, _Distances] = field(default_factory=dict, init=False)
    _paths: dict[tuple, tuple[ReshardStep, ...]] = field(default_factory=dict, init=False)
    _variants: dict[tuple, Resharder] = field(default_factory=dict, init=False)

    @cached_property
    def _graphs(self) -> ReshardGraphs:
        return self.shared_graphs or ReshardGraphs(self.mesh, self.cluster.reduce_scatter)

    def combining(
        self, combined: CombinedCollectives, kinds: tuple[str, ...], known: KnownGroups = (), read_once: bool = False
    ) -> Resharder:
        """A resharder whose collectives are combined with those of other arrays; `read_once`: its array has one reader."""
        if combined.arrays == 1 and not known:
            return self
        return self._variant(combined=combined, combinable=kinds, known=known, sliced_sums=True, sliced_wholly=not read_once)

    def sending(self, byte_factors: tuple[tuple[str, float], ...]) -> Resharder:
        """A resharder whose collectives send `factor` times the bytes of the array, by kind; others its bytes."""
        return self._variant(byte_factors=byte_factors) if byte_factors else self

    def bounding(self, combined: CombinedCollectives, kinds: tuple[str, ...], kernels: Kernels) -> Resharder:
        """A resharder whose paths take no more than those of any other that combines at most so much."""
        return self._variant(combined=combined, combinable=kinds, sliced_sums=True, kernels=kernels)

    def _variant(self, **changes) -> Resharder:
        """This resharder with some settings changed; one object per settings."""
        key = tuple(changes.items())
        if key not in self._variants:
            self._variants[key] = replace(self, shared_graphs=self._graphs, **changes)
        return self._variants[key]

    def table(
        self, shape: tuple[int, ...], itemsize: float, srcs: Sequence[Layout], dsts: Sequence[Layout], last: bool = False
    ) -> np.ndarray:
        """Seconds of the cheapest path from every src to every dst; inf where there is none.

        Args:
            shape: shape of the whole tensor.
            itemsize: bytes per element.
            srcs: source layouts; a tuple is kept, and known by its identity.
            dsts: target layouts, likewise.
            last: of the path's last collective alone, without its staging kernels (`collective.staging_kernels`).

        Returns:
            float64 [len(srcs), len(dsts)], read-only; the same object for the same arguments, and for any other shape of
            as many bytes that divides as evenly.
        """
        if isinstance(srcs, tuple) and isinstance(dsts, tuple):
            query = self._graphs.lasting_query(srcs, dsts)
        else:
            query = self._graphs.query(tuple(srcs), tuple(dsts))
        asked = query, tuple(shape), itemsize, last
        if asked in self._tables:
            return self._tables[asked]
        if len(shape) != query.rank and query.parts:
            raise ValueError(f"layouts have {query.rank} dims, the tensor of shape {shape} has {len(shape)}")
        found = [self._shortest(query, part, shape, itemsize) for part in query.parts]
        key = (query, *found, last)
        if key not in self._tables:
            out = np.empty(query.never.shape)
            for distances, part in zip(found, query.parts, strict=True):
                out[part.rows] = distances.between(part.src, part.dst, last)
            out[query.never] = np.inf
            out.flags.writeable = False
            self._tables[key] = out
        self._tables[asked] = self._tables[key]
        return self._tables[key]

    def path(self, shape: tuple[int, ...], itemsize: float, src: Layout, dst: Layout) -> tuple[ReshardStep, ...]:
        """The steps of the cheapest path; () where src is dst. Equal costs are decided the same way every time.

        Raises:
            ValueError: no path leads there: dst is partial and another layout than src, or does not divide the shape.
        """
        key = (tuple(shape), itemsize, src, dst)
        if (found := self._paths.get(key)) is not None:
            return found
        graphs = self._graphs
        if src != dst and (partial := graphs.partial(dst)):
            unreduced = ", ".join(f"{kind} over {axis}" for axis, kind in sorted(partial))
            raise ValueError(f"no reshard leads from {src} to {dst}: nothing is moved and stays partial ({unreduced})")
        if len(shape) != src.rank:
            raise ValueError(f"layout {src} has {src.rank} dims, the tensor of shape {shape} has {len(shape)}")
        query = graphs.query((src,), (dst,))
        (part,) = query.parts
        kind_of, factors = dict(src.partial), dict(self.byte_factors)

        def layout(state: LayoutState) -> Layout:
            dims: list[tuple[str, ...]] = [()] * len(shape)
            for d, axes in zip(query.dims, state[0], strict=True):
                dims[d] = tuple(graphs.axes[a] for a in axes)
            return Layout(tuple(dims), tuple(sorted((graphs.axes[a], kind_of[graphs.axes[a]]) for a in state[1])))

        shortest = self._shortest(query, part, shape, itemsize)
        if np.isinf(shortest.between(part.src, part.dst)).any():
            raise ValueError(f"no reshard leads from {src} to {dst}: shape {shape} does not divide evenly on mesh {self.mesh}")
        walk = shortest.walk(int(part.src[0]), int(part.dst[0]))
        layouts = [src, *(layout(after) for _, after in walk[:-1]), dst]
        steps = []
        for (c, _), (before, after) in zip(walk, pairwise(layouts), strict=False):
            edge = part.graph.classes[shortest.subgraph.classes[c]]
            sent = float(shortest.bytes[c]) * factors.get(edge.kind, 1.0)
            axes = tuple(graphs.axes[a] for a in edge.axes)
            steps.append(ReshardStep(edge.kind, axes, sent, float(shortest.cost[c]), before, after))
        self._paths[key] = tuple(steps)
        return self._paths[key]

    def leads(self, shape: tuple[int, ...], itemsize: float, src: Layout, dst: Layout) -> bool:
        """Whether any path leads from one layout to another."""
        try:
            self.path(shape, itemsize, src, dst)
        except ValueError:
            return False
        return True

    def _shortest(self, query: TableQuery, part: TablePart, shape: tuple[int, ...], itemsize: float) -> _Distances:
        total = math.prod(shape, start=float(itemsize))
        subgraph = part.graph.subgraph(tuple(shape[d] for d in query.dims), part.src, part.dst)
        if (subgraph, total) not in self._distances:
            prices = self._priced(part.graph)
            self._distances[subgraph, total] = _Distances(subgraph, total, prices, self.sliced_sums, self.sliced_wholly)
        return self._distances[subgraph, total]

    def _priced(self, graph: ReshardGraph) -> np.ndarray:
        """[edge class, algorithm, figure of `_edge_prices`]; the last algorithm is repeated where a class has fewer."""
        if graph not in self._prices:
            found = [self._edge_prices(e.kind, tuple(self._graphs.axes[a] for a in e.axes)) for e in graph.classes]
            width = max(map(len, found), default=1)
            self._prices[graph] = np.array([[*x, *[x[-1]] * (width - len(x))] for x in found], float).reshape(-1, width, 5)
        return self._prices[graph]

    def _edge_prices(self, kind: str, axes: tuple[str, ...]) -> list[tuple[float, ...]]:
        """Per algorithm of a collective, alone and combined: its `AlphaBeta`, and the figures of its `staging_kernels`."""
        if kind == "slice" and self.kernels == "none":
            return [(0.0,) * 5]
        known = dict(self.known).get(CollectiveKey(kind, axes), self.combined) if kind in self.combinable else UNCOMBINED
        factor, found = dict(self.byte_factors).get(kind, 1.0), []
        for combined in dict.fromkeys((UNCOMBINED, known)):
            staging = collective.staging_kernels(kind, self.cluster, combined.arrays)
            shared, latency_s, own = (0.0,) * 3 if self.kernels == "none" else staging
            for a, b in collective.algorithms(kind, axes, self.mesh, self.cluster, combined):
                a, b = (0.0, 0.0) if self.kernels == "only" and kind != "slice" else (a, b)
                found.append((a, b * factor, shared * factor, latency_s, own * factor))
        return found


class _Distances:
    """Shortest paths from every source asked for, for one number of bytes; a source is added when it is first needed.

    Also known as multi-source Bellman-Ford, vectorised over sources.
    """

    def __init__(self, subgraph: ReshardSubgraph, total_bytes: float, prices: np.ndarray, sliced_sums: bool, sliced_wholly: bool):
        self.subgraph, self.sliced_sums, self.sliced_wholly = subgraph, sliced_sums, sliced_wholly
        self.bytes = total_bytes / subgraph.graph.class_shards[subgraph.classes] * subgraph.padding
        latency, per_byte, shared, kernel_latency, kernel_per_byte = np.moveaxis(prices[subgraph.classes], 2, 0)
        size = self.bytes[:, None]
        sent = latency + size * per_byte
        cost = sent + size * shared + np.maximum(kernel_latency, size * kernel_per_byte)
        best = cost.argmin(axis=1)[:, None] if cost.size else np.zeros((len(cost), 0), np.int64)
        self.cost, self.sent = (np.take_along_axis(x, best, axis=1).ravel() for x in (cost, sent))  # per group of edges
        self.row = np.full(len(subgraph.allowed), -1)
        self.starts = np.empty(0, np.int64)
        self.rows = np.empty((len(subgraph.nodes), 0))  # [place, start]: seconds of the whole path
        self.ends = np.empty((len(subgraph.nodes), 0))  # those of its last collective, for as many starts as were asked for

    def between(self, src: np.ndarray, dst: np.ndarray, last: bool = False) -> np.ndarray:
        """Seconds [len(src), len(dst)], of the whole path or of its last collective alone."""
        start = self.subgraph.canon[src]
        self._ensure(start)
        if last and (new := len(self.starts) - self.ends.shape[1]):
            self.ends = np.hstack([self.ends, self._last(self.starts[-new:], self.rows[:, -new:])])
        return (self.ends if last else self.rows)[self.subgraph.place[self.subgraph.renamed(src, dst)], self.row[start][:, None]]

    def _ensure(self, start: np.ndarray) -> None:
        new = np.unique(start[self.row[start] < 0])
        if len(new):
            self.row[new] = len(self.starts) + np.arange(len(new))
            self.starts = np.append(self.starts, new)
            self.rows = np.hstack([self.rows, self._search(new)])

    def _blocks(self, starts: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per block of edges: sources, [edge, start] costs, and [edge, 1] seconds of the collective without staging kernels."""
        sent = np.where([self.subgraph.graph.classes[c].kind != "slice" for c in self.subgraph.classes], self.sent, np.nan)
        return [(sources, self._costs(group, left, starts), sent[group][:, None]) for sources, group, left in self.subgraph.blocks]

    def _search(self, starts: np.ndarray) -> np.ndarray:
        """Bellman-Ford from every start at once: [place, start] -> seconds of the whole path."""
        blocks = self._blocks(starts)
        best = np.full((len(self.subgraph.nodes), len(starts)), np.inf)
        best[self.subgraph.place[starts], np.arange(len(starts))] = 0
        while True:
            found = best.copy()
            for sources, cost, _ in blocks:
                head = found[: len(sources)]
                np.minimum(head, best[sources] + cost, out=head)
            if np.array_equal(found, best):
                return best
            best = found

    def _last(self, starts: np.ndarray, best: np.ndarray) -> np.ndarray:
        """[place, start] -> seconds of the last collective of the shortest path; the most of several shortest paths."""
        blocks, last = self._blocks(starts), np.zeros_like(best)
        while True:
            found = np.zeros_like(best)
            for sources, cost, sent in blocks:
                head, taken = found[: len(sources)], np.isfinite(cost) & (best[sources] + cost == best[: len(sources)])
                np.maximum(head, np.where(np.isnan(sent), last[sources], sent), out=head, where=taken)
            if np.array_equal(found, last):
                return last
            last = found

    def _costs(self, group: np.ndarray, left: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """[edge, start] -> seconds; inf for edges that XLA would not follow on a path from that start.

        Axes that the path sliced are not gathered again, nor axes that it scattered, which XLA turns into an all-reduce. A sum is
        not scattered along a dim that the path just scattered: XLA scatters over both axes at once. A completed sum is not
        sliced, unless `sliced_sums`, and not over all its axes at once, unless `sliced_wholly`. Facts: partition-scatter-at-once,
        partition-sliced-sum, partition-sum-sliced-whole. Axes stay on a dim that the start does not
        shard, so a path passes through dims of its two ends alone, whatever other layouts are asked for with them.
        """
        graph, classes = self.subgraph.graph, self.subgraph.classes[group]
        summed = graph.outer_axes[classes] | (0 if self.sliced_sums else self.subgraph.slices[group])
        partial = graph.partial[starts]
        never = (graph.gathers[classes][:, None] & ~graph.sharded[starts]) | (summed[:, None] & partial)
        never = (never | (left[:, None] & ~graph.sharded_dims[starts])) != 0
        if not self.sliced_wholly:
            never |= (partial != 0) & (self.subgraph.slices[group][:, None] & partial == partial)
        return np.where(never, np.inf, self.cost[group][:, None])

    def walk(self, src: int, dst: int) -> list[tuple[int, LayoutState]]:
        """(group of edges, layout after) of one shortest path; of equal edges the first listed."""
        subgraph, graph, one = self.subgraph, self.subgraph.graph, np.array([src])
        start = subgraph.canon[one]
        self._ensure(start)
        distance = self.rows[:, self.row[start[0]]]
        at, stop = int(subgraph.place[subgraph.renamed(one, np.array([dst]))[0, 0]]), int(subgraph.place[start[0]])
        path = []
        while at != stop:
            into = np.array([[column[at] for column in block] for block in subgraph.blocks if at < len(block[0])])
            costs = self._costs(into[:, 1], into[:, 2], start)[:, 0]
            before, c, _ = into[np.argmin(distance[into[:, 0]] + costs)]
            canonical, partial = graph.states[subgraph.nodes[at]]
            dims = sorted(zip(subgraph.order(src), canonical, strict=True))
            path.append((int(c), (tuple(axes for _, axes in dims), partial)))
            at = int(before)
        return path[::-1]
