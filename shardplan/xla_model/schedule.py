"""Which arrays may be resharded at leisure, and which of them at once.

    gather      inputs of the step, and rows that a loop reads: known before most of their readers run
    gradient    what the backward pass makes and only the optimizer, or a loop that stacks or adds it up, reads
    update      what the optimizer makes
    line        all else: the next op waits

Collectives of one of the first three do not depend on each other, and XLA merges many into one. What stands in line is merged only with
what is as far down the same line: the k-th small sum of a layer waits for the one before it. Collectives of the first two run
while other work goes on, as far as XLA's schedule has any between the op that makes the array and the one that computes with it:

    loop   |--what is computed on--|--products for gradients--|--rows into stacks--|
    row's gather   ---------->|                 gradients' collectives    -->|
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any, Literal

from shardplan.ir.graph import Graph, Op, Phase
from shardplan.mesh.collective import COMBINE_THRESHOLD_BYTES
from shardplan.xla_model.accumulation import ADDS, passes_on
from shardplan.xla_model.liveness import PUT_OFF

CollectiveClass = Literal["prefetch", "gradient", "update", "blocking"]

KNOWN = frozenset({"arg", "const", "loop_slice"})
COPIES = frozenset({"share", "barrier", "loop_const"})
PUT_BY = frozenset({"loop_stack", "loop_next", "out"})


@dataclass(frozen=True)
class CollectiveSite:
    """Where the reshards of a value stand.

    Attributes:
        collective_class: see the module's head.
        group_size: arrays in this queue of the same loop, casts and copies of one counted once, of sums those of one type; in line,
            the small sums as far down the line as this one.
        group: the same number for all members.
        origin: the op that makes the array of which this is a cast or a copy.
    """

    collective_class: CollectiveClass
    group_size: int
    group: int
    origin: int


def collective_sites(graph: Graph, sums: Sequence[bool]) -> tuple[CollectiveSite, ...]:
    """Per value, where its reshards stand.

    Args:
        sums: per value, whether it is a small sum that a split leaves partial.
    """
    later, depth = _later(graph), [0] * len(graph.values)
    origins = [_origin(graph, v) for v in range(len(graph.values))]
    for op in graph.ops:
        inside = (v for v in op.inputs if v is not None and graph.ops[graph.values[v].producer[0]].phase == op.phase)
        above = max((depth[v] for v in inside), default=0)
        for v in op.outputs:
            depth[v] = above + sums[v]
    keys: list[tuple] = []
    for v, value in enumerate(graph.values):
        op = graph.ops[value.producer[0]]
        loop = graph.ops[value.consumers[0][0]].loop if value.consumers else op.loop
        if graph.ops[origins[v]].primitive in KNOWN:
            keys.append(("prefetch", loop))
        elif later[v] and op.phase == "backward":
            keys.append(("gradient", loop, str(value.dtype)))  # sums of different types are not merged
        elif op.phase == "update" and not sums[v]:
            keys.append(("update", loop))
        else:
            keys.append(("blocking", loop, str(value.dtype), op.phase, depth[v] if sums[v] else ~v))
    members = Counter(key for key, _ in set(zip(keys, origins, strict=True)))
    number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return tuple(CollectiveSite(key[0], members[key], number[key], at) for key, at in zip(keys, origins, strict=True))


@dataclass(frozen=True)
class OverlapWindows:
    """How long reshards may take, and what they wait for.

    Attributes:
        seconds: (op, operand) -> seconds of work, in one run, that a reshard of the operand may run beside.
        scatter_seconds: of operands that are gradients, the same for a reduce-scatter.
        deferred_until: op that makes a gradient -> the op when it runs: that makes the last of those that are merged with it, or beside which
            it was put off.
        prefetch_start: op that takes an array that is gathered -> the op beside which that begins, if this is before it.
    """

    seconds: Mapping[tuple[int, int], float]
    scatter_seconds: Mapping[tuple[int, int], float]
    deferred_until: Mapping[int, int]
    prefetch_start: Mapping[int, int]


_Key = tuple[int, Phase, int]
"""The op that makes an array; phase and loop of who reads it, of gradients at last."""


@dataclass(frozen=True)
class _Window:
    """When an array may move and when it is needed, its crowd and by what way it goes, the bytes it arrives with, and how often."""

    made: float
    needed: float
    queue: tuple[CollectiveClass, Phase, int, Hashable]
    bytes: float
    reads: float


@dataclass(frozen=True)
class _Chunk:
    """The windows of arrays that are merged into one."""

    windows: Mapping[_Key, _Window]

    @property
    def queue(self) -> tuple[CollectiveClass, Phase, int, Hashable]:
        return next(iter(self.windows.values())).queue

    @property
    def made(self) -> float:
        """When the last is there."""
        return max(w.made for w in self.windows.values())

    @property
    def needed(self) -> float:
        """When the first is waited for."""
        return min(w.needed for w in self.windows.values())

    @property
    def bytes(self) -> float:
        return sum(w.bytes for w in self.windows.values())

    def takes(self, seconds: Callable[[Any, float], float]) -> float:
        """How long it is on its way, in all its runs; `seconds` as in `overlap_windows`."""
        return seconds(self.queue[3], self.bytes) * next(iter(self.windows.values())).reads


def overlap_windows(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    moved: Mapping[int, tuple[Hashable, float]] | None = None,
    seconds: Callable[[Any, float], float] = lambda way, size: 0.0,
    shards: int = 1,
    scattered: Collection[int] = (),
    blocking: Mapping[int, tuple[Hashable, float]] | None = None,
) -> OverlapWindows:
    """A reshard may last from when the array is made until somebody computes with it.

    XLA starts no gather before a loop that ends before its reader. Of arrays that are merged the one made last is waited for, and the
    one that is needed first waits for all; each has its part of the time between, by bytes. Gathers run one at a time, and so do
    gradients, as late as they can be done in time: what is known to come after leaves those before it less. Products whose gradients
    are scattered come last in the backward pass, each beside the scatter of those before. All do where somebody in the backward pass
    waits for collectives in line, which go before those of gradients, beside as many of these products as there are. Gathers do not
    last over collectives in line.

    Args:
        sites: of all values.
        work_s: seconds of every op in one run.
        moved: by the op that makes an array, the way that it is moved, which only arrays of the same way can be merged with, and the
            bytes of the result on a device. By default all of a queue are moved alike, and whole.
        seconds: what moving so many bytes by one of these ways takes, or all of a queue by "all-reduce" or "reduce-scatter".
        shards: into how many parts gradients are scattered that are not known to be moved so; 1 as if they arrived whole.
        scattered: those of `moved` that are scattered.
        blocking: as `moved`, of arrays in line outside of loops.
    """
    line = _awaited(graph, sites, {at: seconds(*asked) for at, asked in (blocking or {}).items()})
    waiting = any(graph.ops[j].phase == "backward" for j in line)
    early = _schedule(graph, sites, work_s, moved or {}, line, late=waiting)
    late = early if waiting else _schedule(graph, sites, work_s, moved or {}, line, late=True)
    chunks = _merged(early.windows)
    starts: dict[int, int] = {}
    for chunk in chunks:
        if chunk.queue[0] == "gradient":
            made = [at for at, *_ in chunk.windows]
            starts.update(dict.fromkeys(made, max(made)))
    starts.update((j, max(starts.get(j, j), after)) for j, after in early.put_off.items())

    def slack(by: Mapping[_Key, _Window], schedule: _Schedule) -> dict[tuple[int, int], float]:
        beside: dict[_Key, float] = {}
        merged = _merged(by)
        for chunk, (_, stops) in zip(merged, _spans(merged, seconds, schedule.begun), strict=True):
            room, whole = max(0.0, stops - chunk.made), chunk.bytes or 1.0
            beside.update((key, room * window.bytes / whole) for key, window in chunk.windows.items())
        alone = (e for e, key in schedule.edges.items() if key in beside and not _fetched_again(graph, e[0], key))
        return {(j, k): beside[schedule.edges[j, k]] / graph.ops[j].reads for j, k in alone}

    def as_all(key: _Key, window: _Window, kind: str, shards: int) -> _Window:
        """An array moved in another way than it is known to be, as all of its queue then."""
        return replace(window, queue=(*window.queue[:3], kind), bytes=early.sizes[key] / shards)

    summed = {key: as_all(key, w, "all-reduce", 1) if key[0] in scattered else w for key, w in early.windows.items()}
    gradients = {key: w for key, w in late.windows.items() if w.queue[0] == "gradient"}
    scatter_windows = {key: w if key[0] in scattered else as_all(key, w, "reduce-scatter", shards) for key, w in gradients.items()}
    spans = zip(chunks, _spans(chunks, seconds, early.begun), strict=True)
    gathers = (
        (c, begins) for c, (begins, _) in spans if c.queue[0] == "prefetch" and c.queue[1] != "update" and c.queue[3] is not None
    )
    begins = {key: at for chunk, at in gathers for key in chunk.windows}
    times = list(accumulate(reversed(early.begun), min))[::-1]  # products that wait for the end of a loop begin late
    fetched = {j: bisect_right(times, begins[key]) - 1 for (j, _), key in early.edges.items() if key in begins}
    beside = {**slack(summed, early), **early.beside}
    return OverlapWindows(beside, slack(scatter_windows, late), starts, {j: at for j, at in fetched.items() if at < j})


@dataclass(frozen=True)
class _Schedule:
    """When ops run, and what may move meanwhile.

    Attributes:
        begun: per op, when it starts; and the end of the step.
        windows: of all arrays that are gathered, and of gradients.
        edges: (op, operand) -> which window.
        sizes: bytes of the whole arrays.
        beside: (op, operand) that is awaited -> seconds of work meanwhile.
        put_off: op in no loop that runs after others that stand behind it in the program -> the last of these.
    """

    begun: Sequence[float]
    windows: Mapping[_Key, _Window]
    edges: Mapping[tuple[int, int], _Key]
    sizes: Mapping[_Key, float]
    beside: Mapping[tuple[int, int], float]
    put_off: Mapping[int, int]


def _schedule(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    moved: Mapping[int, tuple[Hashable, float]],
    awaited: Mapping[int, Sequence[_Awaited]],
    late: bool,
) -> _Schedule:
    """Ops in the order in which XLA runs them.

    Args:
        awaited: `_awaited`.
        late: as in `_order`; the others as in `overlap_windows`.
    """
    begun, done, now, meanwhile = [0.0] * len(graph.ops), [0.0] * len(graph.ops), 0.0, 0.0
    beside: dict[tuple[int, int], float] = {}
    put_off: dict[int, int] = {}
    latest = -1
    waiting = {j: sum(a.seconds for a in some) for j, some in awaited.items()}
    for j, meantime in _order(graph, sites, work_s, moved, waiting, late):
        begun[j] = now
        done[j] = now = now + work_s[j] * graph.ops[j].runs
        meanwhile += (done[j] - begun[j]) * meantime
        if graph.ops[j].phase != "update" and graph.ops[j].loop < 0 and j < latest:
            put_off[j] = latest
        elif graph.ops[j].phase != "update":
            latest = max(latest, j)
        if j in awaited:
            beside.update((edge, meanwhile * a.seconds / waiting[j]) for a in awaited[j] for edge in a.edges)
            meanwhile = 0.0
    begun.append(now)
    lines = sorted(begun[j] for j in awaited)
    stops = sorted({0, *(loop.stop for loop in graph.loops)})
    needed = list(range(len(graph.ops)))
    windows: dict[_Key, _Window] = {}
    edges: dict[tuple[int, int], _Key] = {}
    sizes: dict[_Key, float] = {}
    for j in reversed(range(len(graph.ops))):
        op = graph.ops[j]
        if op.primitive == "out":
            needed[j] = len(graph.ops)
        elif _hands_on(op):
            readers = (needed[at] for v in op.outputs for at, _ in graph.values[v].consumers)
            needed[j] = min(readers, key=begun.__getitem__, default=j)
        for k, v in enumerate(op.inputs):
            if v is not None and (queue := sites[v].collective_class) in ("prefetch", "gradient"):
                at = sites[v].origin
                phase = op.phase if queue == "prefetch" else "update"
                key = edges[j, k] = at, phase, op.loop
                sizes[key] = min(sizes.get(key, inf), graph.values[v].bytes)
                way, size = moved.get(at, (None, graph.values[v].bytes))
                after = stops[bisect_right(stops, needed[j]) - 1] if queue == "prefetch" else 0
                asked = queue, phase, sites[v].group, way
                first = begun[after] if queue == "prefetch" else 0.0
                if op.loop < 0:  # what is awaited goes before gradients, and gathers go between
                    before = bisect_left(lines, begun[needed[j]]) if queue == "prefetch" else len(lines)
                    first = max(first, lines[before - 1]) if before else first
                found = _Window(max(done[at], first), begun[needed[j]], asked, size, op.reads)
                if (seen := windows.get(key)) is not None:
                    found = replace(found, needed=min(seen.needed, found.needed), bytes=min(seen.bytes, found.bytes))
                windows[key] = found
    return _Schedule(begun, windows, edges, sizes, beside, put_off)


@dataclass
class _Awaited:
    """An array that is moved in line: for how long, and the edges, (op, operand), one of which that is."""

    seconds: float
    edges: list[tuple[int, int]]


def _awaited(graph: Graph, sites: Sequence[CollectiveSite], takes: Mapping[int, float]) -> dict[int, list[_Awaited]]:
    """By op of the forward and backward pass that is in no loop, the arrays that it is the first to wait for in line.

    Args:
        takes: seconds, by the op that makes an array that is moved in line.
    """
    found: dict[tuple[int, Phase], _Awaited] = {}
    out: dict[int, list[_Awaited]] = {}
    for j, op in enumerate(graph.ops):
        for k, v in enumerate(op.inputs if op.phase != "update" and op.loop < 0 else ()):
            if v is not None and sites[v].collective_class == "blocking" and takes.get(at := sites[v].origin, 0.0) > 0:
                arrival = found.setdefault((at, op.phase), _Awaited(takes[at], []))
                if op.primitive != "share" and all(graph.ops[i].primitive == "share" for i, _ in arrival.edges):
                    out.setdefault(j, []).append(arrival)
                arrival.edges.append((j, k))
    return out


def _order(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    moved: Collection[int],
    awaited: Mapping[int, float],
    late: bool,
) -> Iterator[tuple[int, bool]]:
    """The ops as XLA runs them, and whether it puts them off until something is awaited.

    In a loop, products that only make gradients come last, just before what leaves the loop; at the end of the step, what is computed
    with gradients comes as these arrive.

    Args:
        work_s: seconds of every op in one run.
        moved: ops that make arrays which are moved.
        awaited: by op, how long it waits for collectives in line.
        late: whether products that only make gradients come last in the backward pass, too, or while something is awaited.
    """
    last = max((j for j, op in enumerate(graph.ops) if op.phase != "update" or op.loop >= 0), default=-1) + 1
    there = list(range(last))  # per op, the last of the others that it waits for
    for op in graph.ops[last:]:
        there.append(max((there[graph.values[v].producer[0]] for v in op.inputs if v is not None), default=-1))
    update = sorted(range(last, len(graph.ops)), key=there.__getitem__)
    makes = {
        j for j, op in enumerate(graph.ops[:last])
        if op.phase == "backward" and op.primitive in PUT_OFF and all(sites[v].collective_class == "gradient" for v in op.outputs)
    }  # fmt: skip
    kept = [j for j in sorted(makes) if late and graph.ops[j].loop < 0]
    beside = _meanwhile(graph, sites, work_s, moved, awaited, kept, {j: there[j] for j in update}) if late else {}
    put_off: list[int] = []
    for j, op in enumerate(graph.ops[:last]):
        if put_off and (op.primitive in PUT_BY or op.loop != graph.ops[put_off[-1]].loop):
            yield from ((at, False) for at in put_off)
            put_off.clear()
        yield from ((at, True) for at in beside.get(j, ()))
        if j in makes and op.loop >= 0:
            put_off.append(j)
        elif j not in makes or not late:
            yield j, False
    done = {at for some in beside.values() for at in some}
    yield from ((j, False) for j in (*put_off, *kept, *update) if j not in done)


def _meanwhile(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    moved: Collection[int],
    awaited: Mapping[int, float],
    kept: Sequence[int],
    update: Mapping[int, int],
) -> dict[int, list[int]]:
    """Op of the backward pass that waits -> what runs meanwhile, in order.

    As XLA does, from the end of the step: ops of the optimizer that need no gradient which is put off or on its way, then the products
    just before.

    Args:
        work_s, moved, awaited: as in `_order`.
        kept: products that are put off.
        update: ops of the optimizer, as gradients arrive -> the last of the other ops that each needs, or -1.
    """
    late = set(kept)  # and what needs these
    for j in sorted(update):
        inputs = [v for v in graph.ops[j].inputs if v is not None]
        if any(
            graph.values[v].producer[0] in late or (sites[v].collective_class == "gradient" and sites[v].origin in moved)
            for v in inputs
        ):
            late.add(j)
    ready, left = [j for j in update if j not in late and graph.ops[update[j]].phase == "backward"], list(kept)
    out: dict[int, list[int]] = {}
    for j in sorted((j for j in awaited if graph.ops[j].phase == "backward"), reverse=True):
        seconds, some = awaited[j], out.setdefault(j, [])
        while ready and update[ready[0]] < j and seconds > 0:
            some.append(ready.pop(0))
            seconds -= work_s[some[-1]]
        n = at = bisect_left(left, j)
        while at and seconds > 0:
            at -= 1
            seconds -= work_s[left[at]]
        some += left[at:n]
        del left[at:n]
    return out


def _merged(windows: Mapping[_Key, _Window]) -> list[_Chunk]:
    """Neighbours in a queue that are made into one together: gathers as they are needed, gradients as they are made."""

    def order(key: _Key):
        w = windows[key]
        return number[w.queue], (w.needed, w.made) if w.queue[0] == "prefetch" else (w.made, w.needed), key

    number = {queue: n for n, queue in enumerate(dict.fromkeys(w.queue for w in windows.values()))}
    out: list[dict[_Key, _Window]] = []
    for key in sorted(windows, key=order):
        last = list(out[-1].values()) if out else []
        full = sum(w.bytes for w in last) + windows[key].bytes > COMBINE_THRESHOLD_BYTES
        if full or not last or last[0].queue != windows[key].queue:
            out.append({})
        out[-1][key] = windows[key]
    return [_Chunk(chunk) for chunk in out]


def _spans(chunks: Sequence[_Chunk], seconds: Callable[[Any, float], float], starts: Sequence[float]) -> list[tuple[float, float]]:
    """Per chunk, from when until when it runs: one of a queue at a time, as late as can be, from the start of some op.

    What moves by a way that is not known has all the time before the next, and keeps none waiting; nor does a later reader, which may
    find the array there.

    Args:
        seconds: as in `overlap_windows`.
        starts: when ops start.
    """
    out, starts = [(0.0, 0.0)] * len(chunks), sorted(starts)
    gathers, gradients = ([n for n, c in enumerate(chunks) if c.queue[0] == queue] for queue in ("prefetch", "gradient"))
    gathers.sort(key=lambda n: (chunks[n].needed, chunks[n].queue[3] is None))
    gradients.sort(key=lambda n: chunks[n].made)
    for queue in gathers, gradients:
        there: set[int] = set()
        news = {}
        for n in queue:
            news[n] = _Chunk({key: w for key, w in chunks[n].windows.items() if key[0] not in there})
            if chunks[n].queue[3] is not None:
                there.update(at for at, *_ in chunks[n].windows)
        free = inf
        for n in reversed(queue):
            begins, stops = chunks[n].made, min(chunks[n].needed, free)
            if chunks[n].queue[3] is not None:
                late = stops - (news[n] if news[n].windows else chunks[n]).takes(seconds)
                begins = max(begins, starts[bisect_right(starts, late) - 1] if late > 0 else 0.0)
                free = begins if news[n].windows else free
            out[n] = begins, stops
    return out


def _origin(graph: Graph, v: int) -> int:
    """The op that makes an array, whatever casts and copies it goes through."""
    at = graph.values[v].producer[0]
    while (graph.ops[at].primitive in COPIES or passes_on(graph.ops[at])) and (w := graph.ops[at].inputs[0]) is not None:
        at = graph.values[w].producer[0]
    return at


def _later(graph: Graph) -> list[bool]:
    """Per value, whether nothing in the pass that makes it computes with it."""
    out = [True] * len(graph.values)
    for op in reversed(graph.ops):
        if op.primitive in PUT_BY or op.phase == "update":
            continue
        for v in op.inputs:
            if v is not None and not (_hands_on(op) and all(out[w] for w in op.outputs)):
                out[v] = False
    return out


def _fetched_again(graph: Graph, j: int, key: _Key) -> bool:
    """Whether op j only casts an array that is on its way from the inputs: of two gathers one behind the other XLA hides the second."""
    behind = (graph.ops[at] for v in graph.ops[j].outputs for at, _ in graph.values[v].consumers)
    copied = any(op.primitive == "share" and not op.is_follower for op in behind)
    return copied and passes_on(graph.ops[j]) and graph.ops[key[0]].primitive in KNOWN


def _hands_on(op: Op) -> bool:
    return op.primitive in COPIES or op.primitive in ADDS or passes_on(op)
