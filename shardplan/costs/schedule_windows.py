"""How long a collective could be in flight in the schedule of one decided program: the overlap windows of a next plan's prices.

    compute  |-- producer --|-- kernel --|-- kernel --|          |-- consumer --|
    network       |=== others ===|    hideable   |                                    window: kernels between, less the others' time

The rules of `xla_model/overlap_windows.py` say what any plan may hide, by the class of a collective. The schedule of a plan says it of
every array: between the end of the kernel that makes it and the start of the first kernel that computes with it, less what other
collectives take of that time. The prices of a network that reads these windows find plans near that one (`ilp/integer_program.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf, log2

from shardplan.costs.decided_program import DecidedProgram
from shardplan.costs.kernel_tasks import OUTSIDE
from shardplan.costs.pipelining import Member
from shardplan.costs.pricing import ScheduleWindows
from shardplan.mesh import collective
from shardplan.xla_model.timeline import spans


def schedule_windows(program: DecidedProgram) -> ScheduleWindows:
    """The windows of all operands that may be resharded."""
    program = program.acyclic
    space, graph = program.network.space, program.graph
    clocks = {home: _Clock.of(program, home) for home in (OUTSIDE, *range(len(graph.loops)))}
    moved = dict(_own_seconds(program))
    longest = {size: _longest_s(program, size) for size in {value.bytes for value in graph.values}}
    needed = _needed(program, clocks)
    found = {}
    for i, j, k, v, template in space.array_edges:
        if template.is_follower:
            continue
        clock = clocks[graph.ops[j].loop]
        made, until = clock.end_of(i), needed[j]
        between = clock.compute(until) - clock.compute(made)
        taken = max(0.0, clock.network(until) - clock.network(made) - moved.get((j, k), 0.0))
        if (window := min(between - taken, longest[graph.values[v].bytes])) > 0:
            found[j, k] = _rounded(window)
    return ScheduleWindows(found)


def _rounded(seconds: float) -> float:
    """To a power of two, so that arrays of repeated layers share tables."""
    return 2.0 ** round(log2(seconds))


def _longest_s(program: DecidedProgram, size: float) -> float:
    """Seconds that no collective of an array of this size exceeds by much: its sum over all devices."""
    space = program.network.space
    return collective.seconds("all-reduce", size, space.mesh.axes, space.mesh, space.cluster)


def _own_seconds(program: DecidedProgram) -> Iterable[tuple[tuple[int, int], float]]:
    """(op, operand) -> seconds of one run of the collectives that bring it there."""
    network = program.network
    strategies, retained = network.strategies(program.states), network.retained(program.states)
    for j, k, _, steps in network.moves(strategies, retained):
        yield (j, k), sum(step.seconds for step in steps)


def _needed(program: DecidedProgram, clocks: dict[int, _Clock]) -> list[float]:
    """Per op, when the first kernel starts that computes with its operands, in the computation of the op."""
    graph, kernels = program.graph, program.network.kernel_ps(program.states)
    out = [inf] * len(graph.ops)
    for j in reversed(range(len(graph.ops))):
        op = graph.ops[j]
        clock = clocks[op.loop]
        if op.traits.leaves_region:
            out[j] = clock.total_s
        elif kernels[j]:
            out[j] = clock.start_of(j)
        else:
            readers = [at for v in op.outputs for at, _ in graph.values[v].consumers]
            out[j] = min((out[at] if graph.ops[at].loop == op.loop else clock.start_of(at) for at in readers), default=clock.total_s)
    return out


@dataclass(frozen=True, eq=False)
class _Clock:
    """The time of one computation: when ops run, and how long each stream was busy by then."""

    program: DecidedProgram
    home: int
    numbers: dict[Member, int]
    members: dict[int, Member]
    collective: Sequence[bool]
    spans: Sequence[tuple[float, float]]
    kernels: Sequence[tuple[float, float]]
    collectives: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, program: DecidedProgram, home: int) -> _Clock:
        """The clock of a computation with all collectives that run in it."""
        (tasks, nested, members, _), numbers = program.listed(home)
        found = spans(tasks, nested, program.hides)
        kernels = [s for s, task in zip(found, tasks, strict=True) if not task.collective and not task.has_collectives]
        collectives = [s for s, task in zip(found, tasks, strict=True) if task.collective]
        return cls(program, home, numbers, members, [task.collective for task in tasks], found, sorted(kernels), sorted(collectives))

    @cached_property
    def total_s(self) -> float:
        """The end of one run."""
        return max((end for _, end in self.spans), default=0.0)

    def end_of(self, i: int) -> float:
        """When what op i makes is there; 0 if it is there before the computation starts."""
        return self._span(self.program.tasks.made[i])[1]

    def start_of(self, j: int) -> float:
        """When op j, or the loop that holds it, starts."""
        tasks = self.program.tasks
        return self._span(tasks.computed.get(j, tasks.made[j]))[0]

    def _span(self, n: int) -> tuple[float, float]:
        if n < 0 or self.home not in self.program.graph.loop_holders[self.program.tasks.home[n]]:
            return 0.0, 0.0
        number = self.numbers.get(member := self.program.member(n, self.home))
        if number is None:
            return 0.0, 0.0
        in_parts = self.members.get(number - 1) == member and not self.collective[number]
        return self.spans[number - in_parts][0], self.spans[number][1]

    def compute(self, time: float) -> float:
        """Seconds of kernels by then."""
        return _busy(self.kernels, self._computed, time)

    def network(self, time: float) -> float:
        """Seconds of collectives by then."""
        return _busy(self.collectives, self._sent, time)

    @cached_property
    def _computed(self) -> list[float]:
        return [0.0, *accumulate(end - start for start, end in self.kernels)]

    @cached_property
    def _sent(self) -> list[float]:
        return [0.0, *accumulate(end - start for start, end in self.collectives)]


def _busy(some: Sequence[tuple[float, float]], totals: Sequence[float], time: float) -> float:
    """Seconds by `time` of spans that follow each other; `totals` are their sums."""
    n = bisect_right(some, (time, inf))
    return totals[n] - max(0.0, some[n - 1][1] - time) if n else 0.0
