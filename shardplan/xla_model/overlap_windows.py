"""How long a collective may be in flight before somebody waits for it: its overlap window.

Rule 9, prefetch: from the last loop or blocking collective before the reader to the reader.
Rule 10, gradient: from its product, or the last blocking collective, to the optimizer.
Rule 11, one in flight: one prefetch and one gradient reduction at a time, each as late as it is done in time.
Rule 12, two in a row: of two gathers of one array, with a cast between, the first blocks.

Live intervals read the windows, and prices of cost networks as long as no plan is judged; then the schedule of a plan says it
(`costs/schedule_windows.py`). The seconds of a decided program are those of `timeline.py`.
docs/xla_model.md states the rules in full, with pictures.
Facts: overlap-one-per-kind, overlap-as-late-as-possible, overlap-not-across-loops, overlap-both-of-two, schedule-filters-deferred.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import Any

from shardplan.ir.graph import Graph
from shardplan.xla_model.combining import CollectiveSite, Key, Window, combined, hands_on, merged
from shardplan.xla_model.schedule import Schedule, blocking_collectives, schedule

Edge = tuple[int, int]
"""(op, operand)."""
Transfer = tuple[Hashable, float]
"""How an array moves, and the bytes of the result on one device; only arrays that move in the same way are combined."""
Seconds = Callable[[Any, float], float]
"""(how an array moves, bytes of the result on one device) -> seconds of one run."""


@dataclass(frozen=True)
class OverlapWindows:
    """The schedule as prices and memory see it; seconds are of work, in one run, during which a reshard may be in flight."""

    seconds: Mapping[Edge, float] = field(default_factory=dict)  # (op, operand) -> seconds
    scatter_seconds: Mapping[Edge, float] = field(default_factory=dict)  # the same for gradients that are reduce-scattered
    deferred_until: Mapping[int, int] = field(default_factory=dict)  # op that makes a gradient -> the op at whose place it runs
    prefetch_start: Mapping[int, int] = field(default_factory=dict)  # reader -> the earlier op at whose start its prefetch starts


def overlap_windows(
    graph: Graph,
    sites: Sequence[CollectiveSite],
    work_s: Sequence[float],
    transfers: Mapping[int, Transfer] | None = None,
    seconds: Seconds = lambda transfer, size: 0.0,
    shards: int = 1,
    scattered: Collection[int] = (),
    blocking: Mapping[int, Transfer] | None = None,
    at_once: Mapping[int, int] = MappingProxyType({}),
) -> OverlapWindows:
    """The overlap window of every reshard.

    Args:
        graph: the step.
        sites: per value.
        work_s: seconds of every op in one run.
        transfers: by the op that makes an array, its transfer; by default all of a group move in one way, in full.
        seconds: (transfer, bytes) -> seconds; also of a whole group by "all-reduce" or "reduce-scatter".
        shards: number of shards of gradients that are scattered but not in `transfers`; 1 as if they arrived in full.
        scattered: those of `transfers` that are reduce-scattered.
        blocking: transfers of blocking collectives outside of loops.
        at_once: products of gradients that run where their operands are made, unless rule 6 or 7 defers them -> the op at whose place.
    """
    transfers = transfers or {}
    blocks = blocking_collectives(graph, sites, {at: seconds(*transfer) for at, transfer in (blocking or {}).items()})
    backward = any(graph.ops[j].phase == "backward" for j in blocks)
    early = _windows(graph, sites, transfers, schedule(graph, sites, work_s, transfers, blocks, defer=backward))
    late = early if backward else _windows(graph, sites, transfers, schedule(graph, sites, work_s, transfers, blocks, defer=True))

    def as_all(key: Key, window: Window, kind: str, shards: int) -> Window:
        """An array that moves otherwise than `transfers` says, as all of its group then."""
        return replace(window, stream=(*window.stream[:3], kind), bytes=early.bytes[key] / shards)

    reduced = {key: as_all(key, w, "all-reduce", 1) if key[0] in scattered else w for key, w in early.windows.items()}
    gradients = {key: w for key, w in late.windows.items() if w.stream[0] == "gradient"}
    scatters = {key: w if key[0] in scattered else as_all(key, w, "reduce-scatter", shards) for key, w in gradients.items()}
    known = combined(early.windows)
    gradients_made = [[at for at, *_ in some] for some in known if merged(some.values()).stream[0] == "gradient"]
    postponed = early.schedule.runs_after
    waits = {at for made in gradients_made for at in made if not (graph.ops[at].traits.convolution or at in at_once)}
    deferred = {**at_once} | {at: max(made) for made in gradients_made for at in made if at in waits or at in postponed}
    return OverlapWindows(
        {**_overlapped_s(graph, early, reduced, seconds), **early.schedule.hidden_s},
        _overlapped_s(graph, late, scatters, seconds),
        deferred | {j: max(deferred.get(j, j), after) for j, after in postponed.items()},
        dict(_prefetch_start(known, early, seconds)),
    )


def _prefetch_start(known: Sequence[Mapping[Key, Window]], early: _Windows, seconds: Seconds) -> Iterator[tuple[int, int]]:
    """`OverlapWindows.prefetch_start`."""
    start_s, begins = early.schedule.start_s, {}
    for some, (begin, _) in zip(known, _in_flight(known, seconds, start_s), strict=True):
        kind, phase, _, transfer = merged(some.values()).stream
        if kind == "prefetch" and phase != "update" and transfer is not None:
            begins.update(dict.fromkeys(some, begin))
    times = list(accumulate(reversed(start_s), min))[::-1]  # products that wait for the end of a loop begin late
    for (j, _), key in early.edges.items():
        if key in begins and (at := bisect_right(times, begins[key]) - 1) < j:
            yield j, at


@dataclass(frozen=True)
class _Windows:
    """Windows of all prefetches and gradients under one schedule."""

    schedule: Schedule
    windows: dict[Key, Window]  # by array
    edges: dict[Edge, Key]  # (op, operand) -> array
    bytes: dict[Key, float]  # of the arrays in full


def _windows(graph: Graph, sites: Sequence[CollectiveSite], transfers: Mapping[int, Transfer], schedule: Schedule) -> _Windows:
    """Rules 9 and 10."""
    start_s = schedule.start_s
    blocked = sorted(start_s[j] for j in schedule.blocks)
    stops = sorted({0, *(loop.stop for loop in graph.loops)})
    needed = _needed(graph, start_s)
    out = _Windows(schedule, {}, {}, {})
    for j in reversed(range(len(graph.ops))):
        op = graph.ops[j]
        for k, v in enumerate(op.inputs):
            if v is None or (kind := sites[v].collective_class) not in ("prefetch", "gradient"):
                continue
            at, prefetch = sites[v].origin, kind == "prefetch"
            phase = op.phase if prefetch else "update"
            key = out.edges[j, k] = at, phase, op.loop
            out.bytes[key] = min(out.bytes.get(key, inf), graph.values[v].bytes)
            transfer, size = transfers.get(at, (None, graph.values[v].bytes))
            closes, seen = start_s[needed[j]], out.windows.get(key)
            if seen is not None:
                closes, size = min(seen.needed, closes), min(seen.bytes, size)
            first = start_s[stops[bisect_right(stops, needed[j]) - 1]] if prefetch else 0.0
            if op.loop < 0:
                before = bisect_left(blocked, start_s[needed[j]]) if prefetch else len(blocked)
                first = max(first, blocked[before - 1]) if before else first
            out.windows[key] = Window(max(schedule.end_s[at], first), closes, (kind, phase, sites[v].group, transfer), size, op.reads)
    return out


def _overlapped_s(graph: Graph, found: _Windows, windows: Mapping[Key, Window], seconds: Seconds) -> dict[Edge, float]:
    """(op, operand) -> seconds of its window in one run, when `windows` are in flight."""
    part: dict[Key, float] = {}
    some = combined(windows)
    for together, (_, stops) in zip(some, _in_flight(some, seconds, found.schedule.start_s), strict=True):
        window = merged(together.values())
        overlapped = max(0.0, stops - window.made)
        part.update((key, overlapped * w.bytes / (window.bytes or 1.0)) for key, w in together.items())
    return {
        (j, k): part[key] / graph.ops[j].reads
        for (j, k), key in found.edges.items()
        if key in part and not _gathered_twice(graph, j, key)
    }


def _needed(graph: Graph, start_s: Sequence[float]) -> list[int]:
    """Per op, the first op that computes with its result, or itself."""
    out = list(range(len(graph.ops)))
    for j in reversed(range(len(graph.ops))):
        op = graph.ops[j]
        if op.traits.step_output:
            out[j] = len(graph.ops)
        elif hands_on(op):
            readers = (out[at] for v in op.outputs for at, _ in graph.values[v].consumers)
            out[j] = min(readers, key=start_s.__getitem__, default=j)
    return out


def _in_flight(some: Sequence[Mapping[Key, Window]], seconds: Seconds, start_s: Sequence[float]) -> list[tuple[float, float]]:
    """Per combined collective, from when until when it is in flight (rule 11), in seconds after the step's start.

    One whose transfer is not known has all the time before the next, and delays none. Neither does a later reader of an array, which
    may find it there.
    """
    out, starts, windows = [(0.0, 0.0)] * len(some), sorted(start_s), [merged(c.values()) for c in some]
    prefetches, gradients = ([n for n, w in enumerate(windows) if w.stream[0] == kind] for kind in ("prefetch", "gradient"))
    prefetches.sort(key=lambda n: (windows[n].needed, windows[n].stream[3] is None))
    gradients.sort(key=lambda n: windows[n].made)
    for line in prefetches, gradients:
        there: set[int] = set()
        new: dict[int, list[Window]] = {}  # of the arrays that no earlier collective brings
        for n in line:
            new[n] = [w for key, w in some[n].items() if key[0] not in there]
            if windows[n].stream[3] is not None:
                there.update(at for at, *_ in some[n])
        free = inf
        for n in reversed(line):
            begins, stops = windows[n].made, min(windows[n].needed, free)
            if windows[n].stream[3] is not None:
                sent = merged(new[n] or some[n].values())
                late = stops - seconds(sent.stream[3], sent.bytes) * sent.runs
                begins = max(begins, starts[bisect_right(starts, late) - 1] if late > 0 else 0.0)
                free = begins if new[n] else free
            out[n] = begins, stops
    return out


def _gathered_twice(graph: Graph, j: int, key: Key) -> bool:
    """Whether op j only casts an array in flight from the inputs, and a copy of the result is gathered again (rule 12)."""
    readers = (graph.ops[at] for v in graph.ops[j].outputs for at, _ in graph.values[v].consumers)
    copied = any(op.traits.copy and not op.is_follower for op in readers)
    return copied and graph.ops[j].forwards_value and graph.ops[key[0]].traits.known_early
