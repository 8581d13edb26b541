"""How a tensor gets from one layout to another: the cheapest path over collectives, and what it costs in seconds.

The layouts of one tensor are the nodes of a graph and the collectives its edges; a path is a shortest path. Example, on
mesh x=2, y=4, a tensor split P('x', 'y') that is needed as P('y', None):

    all-gather over y          P('x', 'y') -> P('x', None)        drops the minor-most axes of a dim
    slice over y               P('x', None) -> P(('x','y'), None) adds axes to a dim, each device keeps a part of what it has
    all-to-all over y          P('x', 'y') -> P(('x','y'), None)  moves the minor-most axes of a dim to another dim
    collective-permute         P(('x','y'), None) -> P(('y','x'), None)   same shards, other devices
    all-gather over x          P(('y','x'), None) -> P('y', None)
    reduce-scatter over x      P(None, None) + sum over x -> P('x', None)
    all-reduce over x          P(None, None) + sum over x -> P(None, None)

Seconds depend on the tensor only through its total bytes, and on the names of dims not at all. So one small array of
distances per (rank, bytes) answers every table; tables are cached and handed out as the same read-only array.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import ALONE, Crowd
from shardplan.mesh.layout import Layout, MeshShape

# A layout without the names of its reductions, axes as numbers: (per dim its axes, the partial axes sorted).
State = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]

MERGED = ("all-gather", "all-reduce", "reduce-scatter")
"""What XLA makes into one where several do not wait for each other."""

Sent = tuple[str, tuple[str, ...]]
"""A kind of collective, and over which axes."""


@dataclass(frozen=True)
class Step:
    """One collective of a path.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute" or "slice".
        axes: the mesh axes it runs over, jointly, in mesh order.
        bytes: bytes per device of its larger buffer (see `shardplan.mesh.collective`).
        seconds: what it costs.
        before: layout it starts from.
        after: layout it leaves.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    before: Layout
    after: Layout


class Resharder:
    """Cheapest ways between layouts on one mesh of one cluster.

    Args:
        mesh: names and sizes of the axes.
        cluster: the machine.
        crowd: the arrays that take such ways at once, of whose collectives XLA makes one for each kind and axes.
        merged: kinds of collectives of which it does.
        known: of some kinds and axes, which arrays really do.
        kernels: whether the kernels count that XLA puts around collectives (`collective.around`).

    A path uses only layouts that divide the tensor evenly, besides the two it is asked for. Results are remembered; they
    are read-only and never change.
    """

    def __init__(
        self,
        mesh: MeshShape,
        cluster: Cluster,
        crowd: Crowd = ALONE,
        merged: tuple[str, ...] = MERGED,
        known: tuple[tuple[Sent, Crowd], ...] = (),
        kernels: bool = True,
    ):
        self.mesh = mesh
        self.cluster = cluster
        self.crowd, self.merged, self.known, self.kernels = crowd, merged, dict(known), kernels
        self._axes = tuple(a for a, n in mesh if n > 1)  # an axis of size 1 splits nothing
        self._number = {a: i for i, a in enumerate(self._axes)}
        self._sizes = tuple(mesh.size(a) for a in self._axes)
        self._graphs: dict[tuple, _Graph] = {}
        self._distances: dict[tuple, _Distances] = {}
        self._states: dict[Layout, State] = {}
        self._questions: dict[tuple, _Question] = {}
        self._paths: dict[tuple, tuple[Step, ...]] = {}
        self._combining: dict[tuple, Resharder] = {}

    def combining(
        self, crowd: Crowd, kinds: tuple[str, ...] = MERGED, known: tuple[tuple[Sent, Crowd], ...] = ()
    ) -> Resharder:
        """Ways whose collectives are made into one with those of other arrays, and share their latency."""
        if crowd.arrays == 1 and not known:
            return self
        key = crowd, kinds, known
        if key not in self._combining:
            self._combining[key] = Resharder(self.mesh, self.cluster, *key)
        return self._combining[key]

    @functools.cached_property
    def bare(self) -> Resharder:
        """The same ways, at the seconds of their collectives alone: what other work can hide."""
        return Resharder(self.mesh, self.cluster, self.crowd, self.merged, tuple(self.known.items()), kernels=False)

    def table(self, shape: tuple[int, ...], itemsize: float, srcs: Sequence[Layout], dsts: Sequence[Layout]) -> np.ndarray:
        """Seconds of the cheapest path from every src to every dst; inf where there is none.

        Args:
            shape: shape of the whole tensor.
            itemsize: bytes per element.
            srcs: layouts to come from.
            dsts: layouts to go to.

        Returns:
            float64 [len(srcs), len(dsts)], read-only; the same object for the same arguments, and for any other shape of
            as many bytes that divides as evenly.
        """
        question = self._question(tuple(srcs), tuple(dsts))
        found = question.tables.get((shape := tuple(shape), itemsize))
        if found is None:
            found = question.tables[shape, itemsize] = self._table(question, shape, itemsize)
        return found

    def path(self, shape: tuple[int, ...], itemsize: float, src: Layout, dst: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest path; () where src is dst. Equal costs are decided the same way every time.

        Raises:
            ValueError: no path leads there: dst is partial, and another layout than src.
        """
        key = (tuple(shape), itemsize, src, dst)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._path(*key)
        return found

    def describe(self, step: Step) -> str:
        """One line for people: "all-gather 12.6 MB over model, 41 µs: P('model', None) -> P(None, None)"."""
        over = ", ".join(step.axes)
        return f"{step.kind} {_bytes(step.bytes)} over {over}, {_seconds(step.seconds)}: {step.before} -> {step.after}"

    # ---- inside

    def _question(self, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...]) -> _Question:
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
                graph = self._graph(len(dims), kinds, [*src_states, *dst_states])
                parts.append(_Part(rows, graph, graph.ids([src_states[i] for i in rows]), graph.ids(dst_states)))
            never = [(i, j) for j, d in enumerate(dsts) if self._partial(d) for i, s in enumerate(srcs) if s != d]
            found = self._questions[srcs, dsts] = _Question(
                max(ranks, default=0), dims, (len(srcs), len(dsts)), tuple(parts), np.array(never, np.int64).reshape(-1, 2), {}
            )
        return found

    def _table(self, question: _Question, shape: tuple[int, ...], itemsize: float) -> np.ndarray:
        if len(shape) != question.rank and question.parts:
            raise ValueError(f"layouts have {question.rank} dims, the tensor of shape {shape} has {len(shape)}")
        found = [self._shortest(question, part, shape, itemsize) for part in question.parts]
        key = tuple(map(id, found))
        if key not in question.tables:
            out = np.empty(question.size)
            for distances, part in zip(found, question.parts, strict=True):
                out[part.rows] = distances.between(part.src, part.dst)
            out[question.never[:, 0], question.never[:, 1]] = np.inf
            out.flags.writeable = False
            question.tables[key] = out
        return question.tables[key]

    def _shortest(self, question: _Question, part: _Part, shape: tuple[int, ...], itemsize: float) -> _Distances:
        total = float(itemsize)
        for n in shape:
            total *= n
        region = part.graph.region(tuple(shape[d] for d in question.dims), part.src, part.dst)
        key = (id(region), total)
        if key not in self._distances:
            self._distances[key] = _Distances(region, total)
        return self._distances[key]

    def _path(self, shape, itemsize, src: Layout, dst: Layout) -> tuple[Step, ...]:
        if src != dst and self._partial(dst):
            kept = ", ".join(f"{kind} over {axis}" for axis, kind in sorted(self._partial(dst)))
            raise ValueError(f"no reshard leads from {src} to {dst}: nothing is moved and stays partial ({kept})")
        if len(shape) != src.rank:
            raise ValueError(f"layout {src} has {src.rank} dims, the tensor of shape {shape} has {len(shape)}")
        question = self._question((src,), (dst,))
        (part,) = question.parts
        kind_of = dict(src.partial)

        def layout(state: State) -> Layout:
            dims: list[tuple[str, ...]] = [()] * len(shape)
            for d, axes in zip(question.dims, state[0], strict=True):
                dims[d] = tuple(self._axes[a] for a in axes)
            return Layout(tuple(dims), tuple(sorted((self._axes[a], kind_of[self._axes[a]]) for a in state[1])))

        walk = self._shortest(question, part, shape, itemsize).walk(int(part.src[0]), int(part.dst[0]))
        steps = []
        for i, (kind, axes, before, after, bytes_, cost) in enumerate(walk):
            here = src if i == 0 else layout(before)
            there = dst if i == len(walk) - 1 else layout(after)
            steps.append(Step(kind, tuple(self._axes[a] for a in axes), bytes_, cost, here, there))
        return tuple(steps)

    def _partial(self, layout: Layout) -> set[tuple[str, str]]:
        return {(a, kind) for a, kind in layout.partial if a in self._number}

    def _state(self, layout: Layout) -> State:
        found = self._states.get(layout)
        if found is None:
            every = (*layout.split_axes, *layout.partial_axes)
            for axis in every:
                if axis not in self.mesh.axes:
                    raise ValueError(f"layout {layout} names axis {axis!r}, which mesh {self.mesh} does not have")
            if len(set(every)) != len(every):
                raise ValueError(f"layout {layout} uses a mesh axis twice")
            number = self._number
            dims = tuple(tuple(number[a] for a in axes if a in number) for axes in layout.dims)
            found = self._states[layout] = dims, _sorted(number[a] for a in layout.partial_axes if a in number)
        return found

    def _graph(self, rank: int, kinds: tuple[tuple[str, ...], ...], wanted: list[State]) -> _Graph:
        full = _count(rank, len(self._axes)) <= MAX_STATES
        key = (rank, kinds) if full else (rank, kinds, frozenset(wanted))
        if key not in self._graphs:
            states = _all_states(rank, len(self._axes)) if full else _some_states(rank, len(self._axes), wanted)
            groups = {self._number[a]: i for i, axes in enumerate(kinds) for a in axes if a in self._number}

            def lines(kind: str, axes: tuple[int, ...]) -> tuple[collective.Line, ...]:
                over = tuple(self._axes[a] for a in axes)
                others = self.known.get((kind, over), self.crowd) if kind in self.merged else ALONE
                found = []
                for crowd in dict.fromkeys((ALONE, others)):
                    more = collective.around(kind, self.cluster, crowd.arrays) if self.kernels else (0.0, 0.0)
                    some = collective.lines(kind, over, self.mesh, self.cluster, crowd)
                    found += [(a + more[0], b + more[1]) for a, b in some]
                return tuple(found)

            self._graphs[key] = _Graph(self._sizes, rank, states, groups, self.cluster.reduce_scatter, lines, symmetric=full)
        return self._graphs[key]


MAX_STATES = 8000
"""With more layouts of one rank than this (five axes, three dims), paths mostly pass through layouts in mesh order."""


@dataclass(frozen=True)
class _Part:
    rows: np.ndarray  # the rows of the table that this part answers
    graph: _Graph
    src: np.ndarray  # node numbers
    dst: np.ndarray


@dataclass(frozen=True)
class _Question:
    rank: int
    dims: tuple[int, ...]  # the tensor dims that the graph's dims stand for
    size: tuple[int, int]
    parts: tuple[_Part, ...]
    never: np.ndarray  # (row, column) pairs that no path joins
    tables: dict  # by (shape, itemsize), and by the distances they came from


def _mixed(layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Axes grouped by their reduction, where there is more than one: such reductions are not done jointly."""
    kinds = sorted({k for _, k in layout.partial})
    return tuple(tuple(a for a, k in layout.partial if k == kind) for kind in kinds) if len(kinds) > 1 else ()


def _count(rank: int, n_axes: int) -> int:
    """How many layouts a tensor has on a mesh, partial ones included."""
    total, ways = 0, 1
    for split in range(n_axes + 1):  # `split` axes on dims, in order; the others whole or partial
        choose = len(list(itertools.combinations(range(n_axes), split)))
        total += choose * ways * 2 ** (n_axes - split)
        ways *= rank + split
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


class _Graph:
    """Layouts of one rank as nodes 0..N-1, collectives as edges; costs come with the bytes."""

    def __init__(self, sizes, rank, states: list[State], groups, reduce_scatter: bool, lines: Callable, symmetric: bool):
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
        all_lines = [lines(kind, axes) for kind, axes, _, _ in self.classes]
        width = max(map(len, all_lines), default=1)
        self.lines = np.array([[*x, *[x[-1]] * (width - len(x))] for x in all_lines], float).reshape(-1, width, 2)
        self.class_shards = np.array([n for _, _, n, _ in self.classes], float)
        self.gathers = np.array([_bits(axes) if kind == "all-gather" else 0 for kind, axes, _, _ in self.classes], np.int64)
        self.beside = np.array([_bits(axes) for _, _, _, axes in self.classes], np.int64)

        self._products = sorted(
            {_product(axes, sizes) for k in range(1, len(sizes) + 1) for axes in itertools.combinations(range(len(sizes)), k)}
        )
        self._regions: dict[tuple, _Region] = {}

    def ids(self, states: Sequence[State]) -> np.ndarray:
        return np.fromiter((self.id[s] for s in states), np.int64, len(states))

    def region(self, shape: tuple[int, ...], src: np.ndarray, dst: np.ndarray) -> _Region:
        """The layouts that split a tensor of this shape evenly, and those asked for with what leads to them."""
        divides = tuple(tuple(n % p == 0 for p in self._products) for n in shape)
        found = self._regions.get(divides)
        if found is None:
            even = [dict(zip(self._products, row, strict=True)) | {1: True} for row in divides]
            allowed = np.array([all(even[d][_product(a, self.sizes)] for d, a in enumerate(dims)) for dims, _ in self.states])
            alike = tuple(divides.index(row) for row in divides)  # dims that divide alike may be renamed
            found = self._regions[divides] = _Region(self, allowed, alike if self.symmetric else tuple(range(self.rank)))
        uneven = np.unique([*src[~found.allowed[src]], *dst[~found.allowed[dst]]])
        if len(uneven):
            key = (divides, uneven.tobytes())
            if key not in self._regions:
                allowed = found.allowed.copy()
                allowed[self.ids(_below([self.states[i] for i in uneven.astype(int)]))] = True
                self._regions[key] = _Region(self, allowed, tuple(range(self.rank)))
            found = self._regions[key]
        return found

    def costs(self, total_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and seconds of every edge class."""
        bytes_ = total_bytes / self.class_shards
        cost = (self.lines[:, :, 0] + bytes_[:, None] * self.lines[:, :, 1]).min(axis=1, initial=np.inf)
        return bytes_, cost


class _Region:
    """The part of a graph that paths may use, ready for searching; dims that are `alike` can be renamed at no cost."""

    def __init__(self, graph: _Graph, allowed: np.ndarray, alike: tuple[int, ...]):
        self.graph, self.allowed = graph, allowed
        target, source, group = graph.edges[allowed[graph.edges[:, 0]] & allowed[graph.edges[:, 1]]].T

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
        number = {tuple(range(graph.rank)): 0}
        if len(set(alike)) < graph.rank:
            last = (len(graph.sizes),)
            slots = [d for c in dict.fromkeys(alike) for d in range(graph.rank) if alike[d] == c]
            for i in self.nodes.tolist():
                dims, partial = graph.states[i]
                order = [0] * graph.rank
                for slot, d in zip(slots, sorted(range(graph.rank), key=lambda d: (alike[d], dims[d] or last, d)), strict=True):
                    order[slot] = d
                self._renaming[i] = number.setdefault(tuple(order), len(number))
                self.canon[i] = graph.id[tuple(dims[d] for d in order), partial]
        self._orders = list(number)
        self._renamed = {0: np.arange(len(allowed))}

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


class _Distances:
    """Shortest distances from layouts asked for, for one number of bytes; rows are added as they are needed."""

    def __init__(self, region: _Region, total_bytes: float):
        self.region = region
        self.bytes, self.cost = region.graph.costs(total_bytes)
        self.row = np.full(len(region.allowed), -1)
        self.rows = np.empty((len(region.nodes), 0))  # [place, start]

    def between(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Seconds [len(src), len(dst)]."""
        start = self.region.canon[src]
        self._ensure(start)
        return self.rows[self.region.place[self.region.renamed(src, dst)], self.row[start][:, None]]

    def _ensure(self, start: np.ndarray) -> None:
        new = np.unique(start[self.row[start] < 0])
        if len(new):
            self.row[new] = self.rows.shape[1] + np.arange(len(new))
            self.rows = np.concatenate([self.rows, self._search(new)], axis=1)

    def _search(self, starts: np.ndarray) -> np.ndarray:
        """Bellman-Ford from every start at once."""
        axes = self._axes(starts)
        blocks = [(sources, self._costs(group, *axes)) for sources, group in self.region.blocks]
        best = np.full((len(self.region.nodes), len(starts)), np.inf)
        best[self.region.place[starts], np.arange(len(starts))] = 0
        while True:
            found = best.copy()
            for sources, cost in blocks:
                head = found[: len(sources)]
                np.minimum(head, best[sources] + cost, out=head)
            if np.array_equal(found, best):
                return best
            best = found

    def _axes(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[start]: the axes, as bits, over which a layout is split, and those over which it is partial."""
        found = [self.region.graph.states[i] for i in starts.tolist()]
        split = [_bits(a for axes in dims for a in axes) for dims, _ in found]
        return np.array(split, np.int64), np.array([_bits(axes) for _, axes in found], np.int64)

    def _costs(self, group: np.ndarray, split: np.ndarray, partial: np.ndarray) -> np.ndarray:
        """[edge, start]: what is sliced on a path is not gathered on it, nor what is scattered, which would be an all-reduce; and a
        sum is not scattered beside where it just was: XLA scatters over both axes at once."""
        graph = self.region.graph
        never = (graph.gathers[group][:, None] & ~split) | (graph.beside[group][:, None] & partial)
        return np.where(never, np.inf, self.cost[group][:, None])

    def walk(self, src: int, dst: int) -> list[tuple[str, tuple[int, ...], State, State, float, float]]:
        """One shortest path: kind, axes, before, after, bytes, seconds per edge; of equal edges the first listed."""
        region, graph, one = self.region, self.region.graph, np.array([src])
        start = region.canon[one]
        self._ensure(start)
        distance = self.rows[:, self.row[start[0]]]
        at, stop = int(region.place[region.renamed(one, np.array([dst]))[0, 0]]), int(region.place[start[0]])
        order, steps = region.order(src), []

        def state(place: int) -> State:
            canonical, partial = graph.states[region.nodes[place]]
            dims: list[tuple[int, ...]] = [()] * graph.rank
            for d, axes in zip(order, canonical, strict=True):
                dims[d] = axes
            return tuple(dims), partial

        while at != stop:
            into = [(sources[at], group[at]) for sources, group in region.blocks if at < len(sources)]
            costs = self._costs(np.array([c for _, c in into]), *self._axes(start))[:, 0]
            n = min(range(len(into)), key=lambda n: distance[into[n][0]] + costs[n])
            before, c = into[n]
            kind, axes, _, _ = graph.classes[c]
            steps.append((kind, axes, state(before), state(at), float(self.bytes[c]), float(self.cost[c])))
            at = int(before)
        return steps[::-1]


def _bits(axes: Iterable[int]) -> int:
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


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}" if n < 1000 else f"{n:.0f} {unit}"


def _seconds(s: float) -> str:
    for scale, unit in ((1e6, "µs"), (1e3, "ms"), (1, "s")):
        if s * scale < 1000 or unit == "s":
            break
    return f"{s * scale:.3g} {unit}"
