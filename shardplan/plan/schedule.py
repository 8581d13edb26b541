"""When each kernel and collective of a planned step runs, by the schedule that judged the plan, and what is in memory meanwhile.

    compute  |--dot_general--|--dot_general--|       |--add--|
    network                  |--all-gather-----------|            exposed: the part in which the compute stream is idle
    memory   buffers, from the kernel that makes them to the last one that reads them, in program order

A loop's rounds follow one another; past `MAX_SPANS` the rounds that are left are one span on each stream that they use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from shardplan.costs.decided_memory import DecidedMemory
from shardplan.costs.decided_program import DecidedProgram
from shardplan.costs.kernel_tasks import OUTSIDE
from shardplan.costs.pipelining import NOTHING
from shardplan.costs.states import PS
from shardplan.files import portable
from shardplan.mesh.collective import wire_bytes
from shardplan.plan.planned import Planned
from shardplan.plan.why import array_name
from shardplan.xla_model.timeline import spans

MAX_SPANS = 20_000


@dataclass(frozen=True)
class Span:
    """A kernel or a collective at work.

    Attributes:
        lane: the stream.
        start_s, seconds: after the start of the step.
        name: primitive of the kernel's most expensive op, or kind and axes of a collective.
        phase: "forward", "backward" or "update"; "" for what belongs to none.
        op: number of that op in the graph, or of the first array's reader; -1 for none.
        parts: ops of the kernel, or arrays of a combined collective.
        arrays: names of the first arrays that a collective moves.
        sent_bytes: by one device.
        exposed_s: of a collective, seconds in which the compute stream is idle.
        transfers: of a collective, numbers in `StepSchedule.program.tasks.transfers`.
    """

    lane: Literal["compute", "network"]
    start_s: float
    seconds: float
    name: str
    phase: str
    op: int
    parts: int = 1
    arrays: tuple[str, ...] = ()
    sent_bytes: float = 0.0
    exposed_s: float = 0.0
    transfers: tuple[int, ...] = ()

    @property
    def end_s(self) -> float:
        """When it is done."""
        return self.start_s + self.seconds


@dataclass(frozen=True)
class HeldArray:
    """An array in the memory of a device.

    Attributes:
        kind: category, as in `MemoryReport`.
        op: number in the graph of the op that makes it.
        bytes: on one device.
        first, last: places of the schedule: made at, read last before.
        start_s, end_s: the same on the time line.
    """

    kind: str
    op: int
    bytes: float
    first: int
    last: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class StepSchedule:
    """The predicted schedule of one step."""

    planned: Planned

    @cached_property
    def program(self) -> DecidedProgram:
        """The program that is scheduled."""
        return self.planned.program(self.planned.xla).acyclic

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All kernels and collectives, by their start."""
        found = sorted(self._run(OUTSIDE, 0.0, 1.0), key=lambda x: (x.start_s, x.lane))
        lost = self.planned.options.interference(self.planned.space.cluster)
        return tuple(_with_exposure(_one_after_the_other(found) if lost == 1 else _slowed(found, lost)))

    def _run(self, home: int, start_s: float, share: float, pipelined: bool = True) -> Iterator[Span]:
        """One run of a computation that starts at a time; `share` is its part of all spans that are shown one by one."""
        (tasks, nested, members, _), _ = self.program.listed(home, pipelined)
        for n, (begin, end) in enumerate(spans(tasks, nested, self.program.hides)):
            kind, number = members.get(n, ("task", -1))
            if kind == "loop":
                yield from self._rounds(number, start_s + begin, share / max(1, len(nested)))
            elif end > begin:
                yield (self._collective if tasks[n].collective else self._kernel)(number, start_s + begin, end - begin)

    def _rounds(self, loop: int, start_s: float, share: float) -> Iterator[Span]:
        """The rounds of a loop, as many as are shown one by one, then the rest together; what is pipelined is missing in one round."""
        trips = max(1.0, self.planned.graph.loops[loop].trips)
        usual, usual_s = [*self._run(loop, 0.0, share)], self.program.round_s(loop)
        pipelined = self.program.pipelined.get(loop, NOTHING)
        short = [*self._run(loop, 0.0, share, pipelined=False)] if pipelined != NOTHING else usual
        short_s = self.program.round_s(loop, pipelined=False) if pipelined != NOTHING else usual_s
        shown = int(min(trips, max(1.0, MAX_SPANS * share // max(1, len(usual)))))
        for n in range(shown):
            is_short = n == (trips - 1 if pipelined.ahead else 0)
            yield from (replace(x, start_s=start_s + x.start_s) for x in (short if is_short else usual))
            start_s += short_s if is_short else usual_s
        for lane in ("compute", "network") if shown < trips else ():
            if here := [x for x in usual if x.lane == lane]:
                seconds = (trips - shown) * sum(x.seconds for x in here)
                idle_s = (trips - shown) * usual_s - seconds if lane == "network" else 0.0  # so that both are busy as long as they are
                yield Span(lane, start_s + idle_s, seconds, f"{trips - shown:.0f} more rounds", here[0].phase, here[0].op)

    def _kernel(self, task: int, start_s: float, seconds: float) -> Span:
        ops = self._ops.get(task, [])
        if not ops:
            kind = "buffers of a collective" if task in self.program.tasks.transfers else "change of a layout"
            return Span("compute", start_s, seconds, kind, "", -1)
        op = self.planned.graph.ops[ops[0]]
        return Span("compute", start_s, seconds, op.primitive, op.phase, ops[0], len(ops))

    def _collective(self, first: int, start_s: float, seconds: float) -> Span:
        graph, transfers, mesh = self.planned.graph, self.program.tasks.transfers, self.planned.space.mesh
        if first not in transfers:
            return Span("network", start_s, seconds, "collective", "", -1)
        numbers = tuple(self.program.joined[1].get(first, [first]))
        some = [transfers[n] for n in numbers]
        step = some[0].step
        sent = sum(wire_bytes(x.step.kind, x.step.bytes, mesh.size(*x.step.axes)) for x in some)
        reader = self._reader_of(first)
        phase = graph.ops[reader].phase if reader >= 0 else ""
        names = tuple(dict.fromkeys(array_name(self.planned, x.value) for x in some[:6]))
        name = f"{step.kind} over {', '.join(step.axes)}"
        return Span("network", start_s, seconds, name, phase, reader, len(some), names, sent, transfers=numbers)

    def _reader_of(self, transfer: int) -> int:
        """The first op of the program that reads what a collective moves."""
        graph = self.planned.graph
        v = self.program.tasks.transfers[transfer].value
        return next((at for at in graph.readers(graph.original(v))), graph.values[v].producer[0])

    @cached_property
    def _kernels(self) -> dict[int, int]:
        """Op -> the task that computes it."""
        tasks = self.program.tasks
        return {op: tasks.computed.get(op, made) for op, made in tasks.made.items()}

    @cached_property
    def _ops(self) -> dict[int, list[int]]:
        """Task -> ops that take its time, the most expensive first."""
        kernel_ps, out = self.program.network.kernel_ps(self.planned.solution.states), {}
        one = self.program.joined[0]
        for op, task in self._kernels.items():
            if task >= 0 and kernel_ps[op]:
                out.setdefault(one[task], []).append(op)
        for ops in out.values():
            ops.sort(key=lambda i: (-kernel_ps[i], i))
        return out

    # ---- phases

    @cached_property
    def bands(self) -> tuple[tuple[str, float, float], ...]:
        """(phase, start, end) in seconds, one after the other: the borders with the least kernel seconds on a wrong side."""
        kernels = [x for x in self.spans if x.lane == "compute" and x.phase]
        order = [phase for phase in ("forward", "backward", "update") if any(x.phase == phase for x in kernels)]
        borders = [0.0, *(self._border(kernels, order[:n]) for n in range(1, len(order))), self.end_s]
        ends = np.maximum.accumulate(borders).tolist()
        return tuple((phase, ends[n], ends[n + 1]) for n, phase in enumerate(order))

    @staticmethod
    def _border(kernels: Sequence[Span], before: Sequence[str]) -> float:
        early = np.array([x.phase in before for x in kernels])
        seconds = np.array([x.seconds for x in kernels])
        gain = np.cumsum(np.where(early, seconds, -seconds))
        return kernels[int(gain.argmax())].end_s

    @cached_property
    def end_s(self) -> float:
        """Seconds of the step."""
        return max((x.end_s for x in self.spans), default=0.0)

    # ---- memory

    @cached_property
    def memory(self) -> DecidedMemory:
        """What a device has in memory."""
        return DecidedMemory(self.program)

    @cached_property
    def times(self) -> np.ndarray:
        """When ops run, by their places, in seconds [place + 1]: never decreasing, else nearest to the ends of the kernels."""
        one, kernels = self.program.joined[0], self._kernels
        ends: dict[int, float] = {}
        for x in self.spans:
            if x.lane == "compute" and x.op >= 0:
                ends.setdefault(one[kernels[x.op]], x.end_s)
        n, seconds = self.memory.order.end, self.seconds_of_ops()
        timed = (i for i in dict.fromkeys(self.memory.order.ops) if seconds[i] and one[kernels[i]] in ends)
        known = [(self.memory.order.places[i] + 1, ends[one[kernels[i]]], seconds[i]) for i in timed]
        if not known:
            return np.zeros(n + 1)
        at, end, weight = map(np.array, zip(*known, strict=True))
        return np.interp(np.arange(n + 1), np.append(0, at), np.append(0.0, _isotonic(end, weight)))

    @cached_property
    def buffers(self) -> tuple[HeldArray, ...]:
        """All that a device has in memory at some time."""
        kinds, last = self.planned.categories, len(self.times) - 1
        return tuple(
            HeldArray(kinds[i], i, held, lo, hi, float(self.times[min(lo, last)]), float(self.times[min(hi, last)]))
            for i, lo, hi, held in self.memory.allocations()
            if held
        )

    @property
    def peak_at(self) -> int:
        """Place of the peak in the schedule."""
        return self.memory.place_of_peak

    def at_peak(self) -> list[HeldArray]:
        """Buffers in memory at the peak, the largest first."""
        return sorted((x for x in self.buffers if x.first <= self.peak_at < x.last), key=lambda x: (-x.bytes, x.first))

    def name(self, op: int) -> str:
        """Of the array that an op makes, as `Plan.why` writes it."""
        graph = self.planned.graph
        return array_name(self.planned, graph.ops[op].outputs[0]) if graph.ops[op].outputs else graph.ops[op].primitive

    def place(self, op: int) -> tuple[str, int]:
        """(file by its portable name, line) of an op, ("", 0) where it has none."""
        source = self.planned.graph.ops[op].source if op >= 0 else None
        return (portable(source.file), source.line) if source and source.file else ("", 0)

    def seconds_of_ops(self) -> np.ndarray:
        """Seconds per step of each op's kernel on one device."""
        return np.asarray(self.program.network.kernel_ps(self.planned.solution.states)) / PS


def _one_after_the_other(found: Sequence[Span]) -> list[Span]:
    """The same without overlap: each waits for the one before it."""
    starts = itertools.accumulate((x.seconds for x in found), initial=0.0)
    return [replace(x, start_s=start_s) for x, start_s in zip(found, starts, strict=False)]


def _slowed(found: Sequence[Span], interference: float) -> list[Span]:
    """Where both streams are busy, all takes longer by this fraction of it."""
    kernels, collectives = (_busy_until([x for x in found if x.lane == lane]) for lane in ("compute", "network"))
    either = _busy_until(found)

    def slowed(t: float) -> float:
        return t + interference * (kernels(t) + collectives(t) - either(t))

    out = []
    for x in found:
        start_s = slowed(x.start_s)
        out.append(replace(x, start_s=start_s, seconds=slowed(x.end_s) - start_s))
    return out


def _with_exposure(found: Sequence[Span]) -> Iterator[Span]:
    """Spans in which a collective knows how long the compute stream is idle meanwhile."""
    computed = _busy_until([x for x in found if x.lane == "compute"])
    for x in found:
        if x.lane == "compute":
            yield x
        else:
            idle = x.seconds - (computed(x.end_s) - computed(x.start_s))
            yield replace(x, exposed_s=idle if idle > 1e-12 else 0.0)


def _busy_until(found: Sequence[Span]) -> Callable[[float], float]:
    """Seconds until a time in which at least one of the spans runs."""
    busy = _merged((x.start_s, x.end_s) for x in found)
    starts, ends = (np.array([x[n] for x in busy]) for n in (0, 1))
    before = np.concatenate([[0.0], np.cumsum(ends - starts)]) if busy else np.zeros(1)

    def until(t: float) -> float:
        n = int(np.searchsorted(starts, t)) if busy else 0
        return float(before[n - 1] + min(t, ends[n - 1]) - starts[n - 1]) if n else 0.0

    return until


def _isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence of least weighted squared distance (pool adjacent violators)."""
    blocks: list[list[float]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, w, count = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + mean * w) / (last[1] + w)
            last[1] += w
            last[2] += count
    return np.repeat([mean for mean, *_ in blocks], [int(count) for *_, count in blocks])


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((start, end))
    return out
