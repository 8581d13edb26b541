"""In which order XLA runs the kernels and collectives of one computation, and how long two streams take for it.

    compute  |--matmul--|--matmul--|        |--norm--|
    network             |--all-gather-------|               exposed where the compute stream waits

`Streams` runs kernels and collectives in a given order: of a compiled program that of its HLO, of a decided program that of
`latency_hiding_order`. XLA's latency-hiding scheduler builds the order of a computation from its end, by its own estimates of seconds
(`latency_estimate.py`). A task may be placed once its readers all are, without a stall `EDGE_S` after each of them was, twice that
where they read it through views, which are operations of no time: one of several results, a row of a stack, an operand of a split
product. Of the tasks that may be placed it places, one at a time,

    1 the end of a collective, or a loop with collectives inside, if none is in flight; first without a stall, then the one behind the
      longest chain of collectives, its own seconds counted
    2 what makes it stall least: a kernel that may be placed now comes before all that may not; the start of the collective in flight
      may be once enough work is placed to hide it
    3 the start of the collective in flight, if another one waits for the network
    4 of kernels, and of a start with collectives before it, the one behind the longest chain of collectives; of several kernels the one
      whose seconds come closest to those left until the next task may be placed without a stall; then one that reads a collective,
      then what leaves most tasks with no reader to place, then the last of the program
    5 the start of the collective in flight if nothing else is left: the compute stream waits

Also known as list scheduling with asynchronous collectives. docs/xla_model.md has a picture.
Facts: schedule-from-end, schedule-least-stall, overlap-as-late-as-possible, overlap-one-per-kind, overlap-not-across-loops.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

EDGE_S = 1e-6
"""Seconds that XLA's scheduler puts between any two instructions, and for the start and the end of a collective."""


Order = Sequence[tuple[int, bool]]
"""(task, whether it is the start of a collective), in the order in which a computation runs; a collective has a start and an end."""


class Task(NamedTuple):
    """A kernel, a collective or a loop of one computation; one of no seconds only joins others."""

    seconds: float  # of the compute stream; of the network if it is a collective
    collective: bool
    before: tuple[int, ...]  # tasks of the computation that it waits for, all earlier in the list
    has_collectives: bool = False  # a loop with collectives inside: no other one is in flight meanwhile
    estimate_s: float = -1.0  # seconds by XLA's own estimate, which decides the order; by default the same
    viewed: bool = False  # its readers read it through operations of no time: it has several results, or is a row of a stack
    inputs: int = 0  # how many arrays that are there from the start only this task reads
    views: bool = False  # it reads its operands through such operations: a product that is split in parts

    @property
    def estimated_s(self) -> float:
        """Seconds by XLA's estimate."""
        return self.seconds if self.estimate_s < 0 else self.estimate_s


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step: busy ones of the compute and of the network stream, and the compute stream's idle ones.

    `interference_s` is by how much longer the step takes because kernels and collectives that run at once slow each other.
    """

    total_s: float
    compute_s: float
    collective_s: float
    exposed_s: float
    interference_s: float = 0.0

    @property
    def hidden_s(self) -> float:
        """Seconds in which a kernel and a collective run at once."""
        return max(0.0, self.collective_s - self.exposed_s)

    def with_interference(self, fraction: float) -> Timeline:
        """The step if each second in which both streams are busy takes this fraction longer; by 1, nothing is gained by overlap."""
        lost_s = fraction * self.hidden_s
        return replace(self, total_s=self.total_s + lost_s, interference_s=lost_s)

    def __add__(self, other: Timeline) -> Timeline:
        """One after the other."""
        return Timeline(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, times: float) -> Timeline:
        """Several in a row."""
        return Timeline(*(times * a for a in astuple(self)))


@dataclass
class Streams:
    """One compute stream and one network stream, run task by task."""

    now: float = 0.0
    free: float = 0.0  # when the network is
    compute_s: float = 0.0
    collective_s: float = 0.0
    done_at: dict[Hashable, float] = field(default_factory=dict)

    def kernel(self, seconds: float) -> None:
        """Runs a kernel."""
        self.now += seconds
        self.compute_s += seconds

    def nested(self, line: Timeline, times: float) -> None:
        """Runs a loop or call; a collective in flight goes on meanwhile."""
        self.now += line.total_s * times
        self.compute_s += line.compute_s * times
        self.collective_s += line.collective_s * times

    def start(self, collective: Hashable, seconds: float) -> None:
        """Issues a collective; it runs once the network is free."""
        self.collective_s += seconds
        self.done_at[collective] = self.free = max(self.now, self.free) + seconds

    def wait(self, collective: Hashable) -> None:
        """Waits until a collective is done."""
        self.now = max(self.now, self.done_at[collective])

    def timeline(self) -> Timeline:
        """What has run so far."""
        total = max([self.now, *self.done_at.values()])
        return Timeline(total, self.compute_s, self.collective_s, total - self.compute_s)


def latency_hiding_order(tasks: Sequence[Task]) -> Order:
    """The order in which XLA runs them where it hides latency."""
    return _Scheduler(tasks).order()


class _Kernels:
    """Kernels whose readers are all placed: those that would stall, by time, and the others by the collectives before them.

    Attributes:
        stalled: (time from which it may be placed, -depth, key); a key is (estimate, preferences, the last of them its number).
        ready: -depth -> keys in their order, and as a heap that is led by preference.
        depths: the heap of what `ready` holds.
    """

    def __init__(self):
        self.stalled: list[tuple[float, float, tuple]] = []
        self.ready: dict[float, tuple[list[tuple], list[tuple]]] = {}
        self.depths: list[float] = []
        self.waiting: dict[int, tuple[float, float, tuple]] = {}  # kernel -> (time, -depth, key)

    def add(self, at: float, depth: float, seconds: float, preferences: tuple[bool, int, int]) -> None:
        """A kernel that may be placed from a time on."""
        entry = at, -depth, (seconds, *preferences)
        self.waiting[preferences[-1]] = entry
        heappush(self.stalled, entry)

    def frees_one_more(self, n: int) -> None:
        """Kernel n is the last reader of one task more."""
        if n not in self.waiting:
            return
        at, depth, (seconds, reads_collective, freed, _) = entry = self.waiting[n]
        if depth in self.ready and (where := _index(self.ready[depth][0], entry[2])) >= 0:
            self.ready[depth][0].pop(where)
            self._make_ready(depth, (seconds, reads_collective, freed + 1, n))
        else:
            self.stalled.remove(entry)
            heapify(self.stalled)
            heappush(self.stalled, (at, depth, (seconds, reads_collective, freed + 1, n)))
        self.waiting[n] = at, depth, (seconds, reads_collective, freed + 1, n)

    def pass_time(self, now: float) -> None:
        """What stalled until now may be placed."""
        while self.stalled and self.stalled[0][0] <= now:
            _, depth, key = heappop(self.stalled)
            self._make_ready(depth, key)

    def _make_ready(self, depth: float, key: tuple) -> None:
        if depth not in self.ready:
            self.ready[depth] = [], []
            heappush(self.depths, depth)
        keys, preferred = self.ready[depth]
        insort(keys, key)
        heappush(preferred, (*(-x for x in key[1:]), key[0]))

    def pop(self, left_s: float | None) -> int:
        """Of the deepest kernels the one whose seconds come closest to those that are left to hide, if any are, else the preferred."""
        depth = self.depths[0]
        keys, preferred = self.ready[depth]
        if left_s is None:
            at = -1
            while at < 0:
                *preferences, seconds = heappop(preferred)
                at = _index(keys, (seconds, *(-x for x in preferences)))
        else:
            at = bisect_left(keys, (left_s,))
            if at == len(keys) or (at and left_s - keys[at - 1][0] <= keys[at][0] - left_s):
                at -= 1
            else:
                at = bisect_right(keys, (keys[at][0], inf)) - 1
        n = keys.pop(at)[-1]
        del self.waiting[n]
        if not keys:
            del self.ready[depth]
            heappop(self.depths)
        return n


def _index(keys: list[tuple], key: tuple) -> int:
    """Where a sorted list has a key; -1 if it has not."""
    at = bisect_left(keys, key)
    return at if at < len(keys) and keys[at] == key else -1


class _Scheduler:
    """The state of the scheduler, at the time `now` before the end of the computation."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks, self.now, self.placed = tasks, 0.0, list[tuple[int, bool]]()
        self.in_flight, self.hidden_at = -1, 0.0
        self.readers = [0] * len(tasks)  # not yet placed
        self.readers_of: list[set[int]] = [set() for _ in tasks]
        self.depth = [0.0] * len(tasks)  # seconds of the longest chain of collectives before a task
        self.no_stall_at = [0.0] * len(tasks)
        self.joins: list[int] = []
        self.ends: list[tuple[float, bool, int, float]] = []  # of collectives, and loops with collectives
        self.stalled_ends: list[tuple[float, float, bool, int]] = []
        self.kernels = _Kernels()
        for n, task in enumerate(tasks):
            for m in task.before:
                self.readers[m] += 1
                self.readers_of[m].add(n)
                self.depth[n] = max(self.depth[n], self.depth[m] + (tasks[m].estimated_s if tasks[m].collective else 0.0))
        for n, readers in enumerate(self.readers):
            if not readers:
                self.release(n)

    def release(self, n: int) -> None:
        """The readers of task n are all placed."""
        task, depth, at = self.tasks[n], self.depth[n], max(self.now, self.no_stall_at[n])
        reads_collective = any(self.tasks[m].collective and not self.tasks[m].viewed for m in task.before)
        if task.collective or task.has_collectives:
            heappush(self.stalled_ends, (at, -depth - task.estimated_s * task.collective, not reads_collective, -n))
        elif task.seconds > 0:
            freed = task.inputs + sum(task.views or self.readers[m] == 1 for m in task.before)
            self.kernels.add(at, depth, task.estimated_s, (reads_collective, freed, n))
        else:
            self.joins.append(n)

    def place(self, n: int, at: float, seconds: float, start: bool = False) -> None:
        """Task n ends at a time before the end, and takes so long by estimate; what waits only for it may follow."""
        self.placed.append((n, start))
        self.now = at + seconds
        for m in self.tasks[n].before:
            self.readers[m] -= 1
            self.readers_of[m].discard(n)
            if self.readers[m] == 1:
                (last,) = self.readers_of[m]
                if not self.tasks[last].views:
                    self.kernels.frees_one_more(last)
            viewed = self.tasks[m].viewed or self.tasks[n].views
            no_stall_at = max(self.now, at + EDGE_S) + EDGE_S if viewed else at + EDGE_S
            self.no_stall_at[m] = max(self.no_stall_at[m], no_stall_at)
            if not self.readers[m]:
                self.release(m)

    def order(self) -> Order:
        """As `latency_hiding_order`."""
        tasks, kernels = self.tasks, self.kernels
        while True:
            kernels.pass_time(self.now)
            while self.stalled_ends and (self.stalled_ends[0][0] <= self.now or not self.ends):
                at, *end = heappop(self.stalled_ends)
                heappush(self.ends, (*end, at))  # pyright: ignore[reportArgumentType]
            if self.joins:
                self.place(self.joins.pop(), self.now, 0.0)
            elif self.in_flight < 0 and self.ends:
                _, _, n, at = heappop(self.ends)
                self.place_end(-n, max(self.now, at))
            elif self.in_flight >= 0 and self.starts():
                n, self.in_flight = self.in_flight, -1
                self.place(n, max(self.now, self.hidden_at), EDGE_S, start=True)
            elif kernels.ready:
                n = kernels.pop(self.left_s())
                self.place(n, self.now, tasks[n].estimated_s)
            elif kernels.stalled:
                self.now = kernels.stalled[0][0]
            else:
                return self.placed[::-1]

    def place_end(self, n: int, at: float) -> None:
        """Places the end of a collective, which is in flight from now on, or a loop with collectives."""
        if self.tasks[n].collective:
            self.placed.append((n, False))
            self.in_flight, self.hidden_at, self.now = n, at + self.tasks[n].estimated_s, at + EDGE_S
        else:
            self.place(n, at, self.tasks[n].estimated_s)

    def starts(self) -> bool:
        """Whether the start of the collective in flight comes before any kernel."""
        kernels = self.kernels
        if not kernels.ready:
            return not kernels.stalled or self.hidden_at < max(self.now, kernels.stalled[0][0])
        depth = self.depth[self.in_flight]
        return self.hidden_at <= self.now and (bool(self.ends) or (depth > 0 and depth > -kernels.depths[0]))

    def left_s(self) -> float | None:
        """Estimated seconds until the next task may be placed without a stall; None if none has to wait."""
        times = [kernel[0] for kernel in self.kernels.stalled[:1]]
        if self.in_flight >= 0 and self.hidden_at >= self.now:
            times.append(self.hidden_at)
        return min(times) - self.now if times else None


def program_order(tasks: Sequence[Task]) -> Order:
    """As `latency_hiding_order`, where no latency is hidden: a collective starts where it stands, and its first reader waits."""
    out: list[tuple[int, bool]] = []
    in_flight: dict[int, None] = {}
    for n, task in enumerate(tasks):
        for m in task.before if not task.has_collectives else tuple(in_flight):
            if m in in_flight:
                del in_flight[m]
                out.append((m, False))
        out.append((n, task.collective))
        if task.collective:
            in_flight[n] = None
    return [*out, *((n, False) for n in in_flight)]


def scheduled(tasks: Sequence[Task], hides: bool) -> Order:
    """The order in which a computation runs; `hides`: whether XLA hides latency.

    A computation without collectives keeps the order of the memory scheduler.
    """
    return latency_hiding_order(tasks) if hides and any(task.collective for task in tasks) else program_order(tasks)


def schedule(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]], hides: bool = True) -> Timeline:
    """The seconds of a computation in XLA's order.

    Args:
        tasks: of the computation.
        nested: those that are loops: (one run, number of runs).
        hides: whether XLA hides latency.
    """
    return timeline_of(tasks, nested, scheduled(tasks, hides))


def timeline_of(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]], order: Order) -> Timeline:
    """As `schedule`, of tasks in an order that is known."""
    return _run(tasks, nested, order)[0].timeline()


def spans(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]], hides: bool = True) -> list[tuple[float, float]]:
    """Per task, from when until when it is on its stream, in seconds after the start of the computation."""
    found = _run(tasks, nested, scheduled(tasks, hides))[1]
    return [found[n] for n in range(len(tasks))]


def _run(
    tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]], order: Order
) -> tuple[Streams, dict[int, tuple[float, float]]]:
    streams, found = Streams(), {}
    for n, starts in order:
        begins = streams.now
        if n in nested:
            streams.nested(*nested[n])
        elif not tasks[n].collective:
            streams.kernel(tasks[n].seconds)
        elif starts:
            streams.start(n, tasks[n].seconds)
            found[n] = streams.done_at[n] - tasks[n].seconds, streams.done_at[n]
        else:
            streams.wait(n)
        if not tasks[n].collective:
            found[n] = begins, streams.now
    return streams, found
