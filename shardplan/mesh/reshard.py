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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.collective import ALONE, Crowd
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard_graph import Lattice, Part, Question, Region, State, Ways, bits

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
        cuts: whether sums may be completed and then cut up, which XLA does as asked where they are merged, and may scatter otherwise.
        wider: kinds of collectives that send this many times the bytes of the array (`collective.wider`).
        lattice: that of another resharder on this mesh, to be shared.

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
        cuts: bool = False,
        wider: tuple[tuple[str, float], ...] = (),
        lattice: Lattice | None = None,
    ):
        self.mesh = mesh
        self.cluster = cluster
        self.crowd, self.merged, self.known = crowd, merged, dict(known)
        self.wider, self.cuts = dict(wider), cuts
        self._lattice = lattice or Lattice(mesh, cluster.reduce_scatter)
        self._tables: dict[tuple, np.ndarray] = {}
        self._lines: dict[Ways, np.ndarray] = {}
        self._distances: dict[tuple, _Distances] = {}
        self._paths: dict[tuple, tuple[Step, ...]] = {}
        self._settings = {"crowd": crowd, "merged": merged, "known": known, "cuts": cuts, "wider": wider}
        self._others: dict[tuple, Resharder] = {}

    def combining(self, crowd: Crowd, kinds: tuple[str, ...] = MERGED, known: tuple[tuple[Sent, Crowd], ...] = ()) -> Resharder:
        """Ways whose collectives are made into one with those of other arrays, and share their latency."""
        if crowd.arrays == 1 and not known:
            return self
        return self._but(crowd=crowd, merged=kinds, known=known, cuts=True)

    def of(self, dtype, part: float = 1.0) -> Resharder:
        """Ways of arrays of this type, some of which XLA sends as another one.

        Args:
            dtype: the arrays' type.
            part: what of the arrays' bytes partial sums have, which may have been added up before a cast.
        """
        sums: dict[str, float] = dict.fromkeys(("all-reduce", "reduce-scatter"), part) if part != 1 else {}
        for kind, times in collective.wider(str(dtype)):
            sums[kind] = times * sums.get(kind, 1.0)
        return self._but(wider=tuple(sums.items())) if sums else self

    def _but(self, **changes) -> Resharder:
        """This one but for some settings; the same for the same."""
        settings = self._settings | changes
        key = tuple(settings.values())
        if key not in self._others:
            self._others[key] = Resharder(self.mesh, self.cluster, **settings, lattice=self._lattice)
        return self._others[key]

    def table(
        self, shape: tuple[int, ...], itemsize: float, srcs: Sequence[Layout], dsts: Sequence[Layout], last: bool = False
    ) -> np.ndarray:
        """Seconds of the cheapest path from every src to every dst; inf where there is none.

        Args:
            shape: shape of the whole tensor.
            itemsize: bytes per element.
            srcs: layouts to come from.
            dsts: layouts to go to.
            last: of the path's last collective alone, without the kernels that XLA puts around it (`collective.around`).

        Returns:
            float64 [len(srcs), len(dsts)], read-only; the same object for the same arguments, and for any other shape of
            as many bytes that divides as evenly.
        """
        question = self._lattice.question(tuple(srcs), tuple(dsts))
        key = (question, tuple(shape), itemsize, last)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        return self._tables[key]

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

    def _table(self, question: Question, shape: tuple[int, ...], itemsize: float, last: bool) -> np.ndarray:
        if len(shape) != question.rank and question.parts:
            raise ValueError(f"layouts have {question.rank} dims, the tensor of shape {shape} has {len(shape)}")
        found = [self._shortest(question, part, shape, itemsize) for part in question.parts]
        key = (question, *found, last)
        if key not in self._tables:
            out = np.empty(question.size)
            for distances, part in zip(found, question.parts, strict=True):
                out[part.rows] = distances.between(part.src, part.dst, last)
            out[question.never[:, 0], question.never[:, 1]] = np.inf
            out.flags.writeable = False
            self._tables[key] = out
        return self._tables[key]

    def _shortest(self, question: Question, part: Part, shape: tuple[int, ...], itemsize: float) -> _Distances:
        total = float(itemsize)
        for n in shape:
            total *= n
        region = part.ways.region(tuple(shape[d] for d in question.dims), part.src, part.dst)
        if (region, total) not in self._distances:
            self._distances[region, total] = _Distances(region, total, self._priced(part.ways), self.cuts)
        return self._distances[region, total]

    def _priced(self, ways: Ways) -> np.ndarray:
        """[edge class, algorithm] -> (seconds at 0 bytes, seconds per byte, and what is `collective.around` it)."""
        if ways not in self._lines:
            found = [self._lines_of(kind, tuple(self._lattice.axes[a] for a in axes)) for kind, axes, _, _ in ways.classes]
            width = max(map(len, found), default=1)
            self._lines[ways] = np.array([[*x, *[x[-1]] * (width - len(x))] for x in found], float).reshape(-1, width, 5)
        return self._lines[ways]

    def _lines_of(self, kind: str, over: tuple[str, ...]) -> list[tuple[float, ...]]:
        others, wider = self.known.get((kind, over), self.crowd) if kind in self.merged else ALONE, self.wider.get(kind, 1.0)
        found = []
        for crowd in dict.fromkeys((ALONE, others)):
            first, least, second = collective.around(kind, self.cluster, crowd.arrays)
            some = collective.lines(kind, over, self.mesh, self.cluster, crowd)
            found += [(a, b * wider, first * wider, least, second * wider) for a, b in some]
        return found

    def _path(self, shape, itemsize, src: Layout, dst: Layout) -> tuple[Step, ...]:
        lattice = self._lattice
        if src != dst and (partial := lattice.partial(dst)):
            kept = ", ".join(f"{kind} over {axis}" for axis, kind in sorted(partial))
            raise ValueError(f"no reshard leads from {src} to {dst}: nothing is moved and stays partial ({kept})")
        if len(shape) != src.rank:
            raise ValueError(f"layout {src} has {src.rank} dims, the tensor of shape {shape} has {len(shape)}")
        question = lattice.question((src,), (dst,))
        (part,) = question.parts
        kind_of = dict(src.partial)

        def layout(state: State) -> Layout:
            dims: list[tuple[str, ...]] = [()] * len(shape)
            for d, axes in zip(question.dims, state[0], strict=True):
                dims[d] = tuple(lattice.axes[a] for a in axes)
            return Layout(tuple(dims), tuple(sorted((lattice.axes[a], kind_of[lattice.axes[a]]) for a in state[1])))

        walk = self._shortest(question, part, shape, itemsize).walk(int(part.src[0]), int(part.dst[0]))
        steps = []
        for i, (kind, axes, before, after, bytes_, cost) in enumerate(walk):
            here = src if i == 0 else layout(before)
            there = dst if i == len(walk) - 1 else layout(after)
            sent = bytes_ * self.wider.get(kind, 1.0)
            steps.append(Step(kind, tuple(lattice.axes[a] for a in axes), sent, cost, here, there))
        return tuple(steps)


class _Distances:
    """Shortest distances from layouts asked for, for one number of bytes; rows are added as they are needed."""

    def __init__(self, region: Region, total_bytes: float, lines: np.ndarray, cuts: bool):
        self.region, self.cuts = region, cuts
        self.bytes = total_bytes / region.ways.class_shards
        alone, per_byte, first, least, second = np.moveaxis(lines, 2, 0)
        size = self.bytes[:, None]
        sent = alone + size * per_byte
        cost = sent + size * first + np.maximum(least, size * second)
        best = cost.argmin(axis=1)[:, None] if cost.size else np.zeros((len(cost), 0), np.int64)
        self.cost, self.sent = (np.take_along_axis(x, best, axis=1).ravel() for x in (cost, sent))  # per edge class
        self.row = np.full(len(region.allowed), -1)
        self.starts = np.empty(0, np.int64)
        self.rows = np.empty((len(region.nodes), 0))  # [place, start]: seconds of the whole way
        self.ends = np.empty((len(region.nodes), 0))  # those of its last step, for as many starts as were asked for

    def between(self, src: np.ndarray, dst: np.ndarray, last: bool = False) -> np.ndarray:
        """Seconds [len(src), len(dst)], of the whole way or of its last collective alone."""
        start = self.region.canon[src]
        self._ensure(start)
        if last and (new := len(self.starts) - self.ends.shape[1]):
            self.ends = np.hstack([self.ends, self._last(self.starts[-new:], self.rows[:, -new:])])
        return (self.ends if last else self.rows)[self.region.place[self.region.renamed(src, dst)], self.row[start][:, None]]

    def _ensure(self, start: np.ndarray) -> None:
        new = np.unique(start[self.row[start] < 0])
        if len(new):
            self.row[new] = len(self.starts) + np.arange(len(new))
            self.starts = np.append(self.starts, new)
            self.rows = np.hstack([self.rows, self._search(new)])

    def _blocks(self, starts: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per block of edges: where they come from, [edge, start] what they cost, [edge, 1] what of it a collective takes alone."""
        axes, ways = self._axes(starts), self.region.ways
        sent = np.where([kind != "slice" for kind, *_ in ways.classes], self.sent, np.nan)
        return [(sources, self._costs(group, *axes), sent[group][:, None]) for sources, group in self.region.blocks]

    def _search(self, starts: np.ndarray) -> np.ndarray:
        """Bellman-Ford from every start at once: [place, start] -> seconds of the whole way."""
        blocks = self._blocks(starts)
        best = np.full((len(self.region.nodes), len(starts)), np.inf)
        best[self.region.place[starts], np.arange(len(starts))] = 0
        while True:
            found = best.copy()
            for sources, cost, _ in blocks:
                head = found[: len(sources)]
                np.minimum(head, best[sources] + cost, out=head)
            if np.array_equal(found, best):
                return best
            best = found

    def _last(self, starts: np.ndarray, best: np.ndarray) -> np.ndarray:
        """Of the shortest ways, the seconds of the last collective alone; of several such ways, the most."""
        blocks, last = self._blocks(starts), np.zeros_like(best)
        while True:
            found = np.zeros_like(best)
            for sources, cost, sent in blocks:
                head, taken = found[: len(sources)], np.isfinite(cost) & (best[sources] + cost == best[: len(sources)])
                np.maximum(head, np.where(np.isnan(sent), last[sources], sent), out=head, where=taken)
            if np.array_equal(found, last):
                return last
            last = found

    def _axes(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[start]: the axes, as bits, over which a layout is split, and those over which it is partial."""
        found = [self.region.ways.states[i] for i in starts.tolist()]
        split = [bits(a for axes in dims for a in axes) for dims, _ in found]
        return np.array(split, np.int64), np.array([bits(axes) for _, axes in found], np.int64)

    def _costs(self, group: np.ndarray, split: np.ndarray, partial: np.ndarray) -> np.ndarray:
        """[edge, start]: what is sliced on a path is not gathered on it, nor what is scattered, which would be an all-reduce; a sum
        is not scattered beside where it just was: XLA scatters over both axes at once; nor cut up when it is complete, but for
        `cuts`."""
        ways = self.region.ways
        summed = ways.beside[group] | (0 if self.cuts else ways.cuts[group])
        never = (ways.gathers[group][:, None] & ~split) | (summed[:, None] & partial)
        return np.where(never, np.inf, self.cost[group][:, None])

    def walk(self, src: int, dst: int) -> list[tuple[str, tuple[int, ...], State, State, float, float]]:
        """One shortest path: kind, axes, before, after, bytes, seconds per edge; of equal edges the first listed."""
        region, ways, one = self.region, self.region.ways, np.array([src])
        start = region.canon[one]
        self._ensure(start)
        distance = self.rows[:, self.row[start[0]]]
        at, stop = int(region.place[region.renamed(one, np.array([dst]))[0, 0]]), int(region.place[start[0]])
        order, steps = region.order(src), []

        def state(place: int) -> State:
            canonical, partial = ways.states[region.nodes[place]]
            dims: list[tuple[int, ...]] = [()] * ways.rank
            for d, axes in zip(order, canonical, strict=True):
                dims[d] = axes
            return tuple(dims), partial

        while at != stop:
            into = [(sources[at], group[at]) for sources, group in region.blocks if at < len(sources)]
            costs = self._costs(np.array([c for _, c in into]), *self._axes(start))[:, 0]
            n = min(range(len(into)), key=lambda n: distance[into[n][0]] + costs[n])
            before, c = into[n]
            kind, axes, _, _ = ways.classes[c]
            steps.append((kind, axes, state(before), state(at), float(self.bytes[c]), float(self.cost[c])))
            at = int(before)
        return steps[::-1]


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
