"""In which order XLA runs the kernels and collectives of one computation, and how long two streams take for it.

    compute  |--matmul--|--matmul--|        |--norm--|
    network             |--all-gather-------|               exposed where the compute stream waits

`Streams` runs kernels and collectives in a given order: of a compiled program that of its HLO, of a decided program that of
`latency_hiding_order`. XLA's latency-hiding scheduler builds the order of a computation from its end. Of the tasks whose readers are
all placed it places, one at a time,

    1 the end of a collective, or a loop with collectives inside, if none is in flight; of several the one behind the longest chain of
      collectives, its own seconds counted
    2 the start of the collective in flight, once enough work is placed to hide it, if another one waits for the network or if its chain
      is the longest
    3 the kernel behind the longest chain of collectives, of equal ones one that reads a collective, then the last of the program
    4 the start of the collective in flight if nothing else is left: the compute stream waits

Also known as list scheduling with asynchronous collectives. docs/xla_model.md has a picture.
Facts: schedule-from-end, overlap-as-late-as-possible, overlap-one-per-kind, overlap-not-across-loops.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple


class Task(NamedTuple):
    """A kernel, a collective or a loop of one computation; one of no seconds only joins others."""

    seconds: float  # of the compute stream; of the network if it is a collective
    collective: bool
    before: tuple[int, ...]  # tasks of the computation that it waits for, all earlier in the list
    has_collectives: bool = False  # a loop with collectives inside: no other one is in flight meanwhile


@dataclass(frozen=True)
class Timeline:
    """Seconds of one step, of them the busy ones of the compute and of the network stream, and the compute stream's idle ones."""

    total_s: float
    compute_s: float
    collective_s: float
    exposed_s: float

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


def latency_hiding_order(tasks: Sequence[Task]) -> list[tuple[int, bool]]:
    """(task, whether it is the start of a collective), in the order in which they run; a collective has a start and an end."""
    return _Scheduler(tasks).order()


class _Scheduler:
    """The state of the scheduler, at the time `now` before the end of the computation."""

    def __init__(self, tasks: Sequence[Task]):
        self.tasks = tasks
        self.readers = [0] * len(tasks)  # not yet placed
        self.depth = [0.0] * len(tasks)  # seconds of the longest chain of collectives before a task
        self.joins: list[int] = []
        self.ends: list[tuple[float, bool, int]] = []
        self.kernels: list[tuple[float, bool, int]] = []
        for n, task in enumerate(tasks):
            for m in task.before:
                self.readers[m] += 1
                self.depth[n] = max(self.depth[n], self.depth[m] + (tasks[m].seconds if tasks[m].collective else 0.0))
        self.release(n for n, readers in enumerate(self.readers) if not readers)

    def release(self, tasks: Iterable[int]) -> None:
        """Tasks whose readers are all placed."""
        for n in tasks:
            task = self.tasks[n]
            reads_none = not any(self.tasks[m].collective for m in task.before)
            if task.collective or task.has_collectives:
                heappush(self.ends, (-self.depth[n] - task.seconds * task.collective, reads_none, -n))
            elif task.seconds > 0:
                heappush(self.kernels, (-self.depth[n], reads_none, -n))
            else:
                self.joins.append(n)

    def placed(self, n: int) -> None:
        """What waits only for task n to be placed may follow."""
        for m in self.tasks[n].before:
            self.readers[m] -= 1
            if not self.readers[m]:
                self.release((m,))

    def order(self) -> list[tuple[int, bool]]:
        """As `latency_hiding_order`."""
        out: list[tuple[int, bool]] = []
        now, in_flight, hidden_at = 0.0, -1, 0.0
        while True:
            released = in_flight >= 0 and not self.joins and self._releases(in_flight, now >= hidden_at)
            start = False
            if self.joins:
                n = self.joins.pop()
            elif in_flight < 0 and self.ends:
                n = -heappop(self.ends)[-1]
            elif released:
                n, in_flight, now, start = in_flight, -1, max(now, hidden_at), True
            elif self.kernels:
                n = -heappop(self.kernels)[-1]
            else:
                break
            out.append((n, start))
            if self.tasks[n].collective and not start:
                in_flight, hidden_at = n, now + self.tasks[n].seconds
                continue
            now += 0.0 if start else self.tasks[n].seconds
            self.placed(n)
        return out[::-1]

    def _releases(self, in_flight: int, hidden: bool) -> bool:
        """Whether the start of the collective in flight comes before any kernel."""
        if not self.kernels:
            return True
        depth = self.depth[in_flight]
        return hidden and (bool(self.ends) or (depth > 0 and depth > -self.kernels[0][0]))


def schedule(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]]) -> Timeline:
    """The seconds of a computation in XLA's order; `nested` are the tasks that are loops: (one run, number of runs)."""
    return _run(tasks, nested)[0].timeline()


def spans(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]]) -> list[tuple[float, float]]:
    """Per task, from when until when it is on its stream, in seconds after the start of the computation."""
    found = _run(tasks, nested)[1]
    return [found[n] for n in range(len(tasks))]


def _run(tasks: Sequence[Task], nested: Mapping[int, tuple[Timeline, float]]) -> tuple[Streams, dict[int, tuple[float, float]]]:
    streams, found = Streams(), {}
    for n, starts in latency_hiding_order(tasks):
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
