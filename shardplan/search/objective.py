"""The one objective: the simulated seconds of the program that a plan decides, whichever search found it.

A cost network's prices find candidates. Each candidate is repriced at what it combines itself, its program is scheduled
(`costs/decided_program.py`), its peak taken; then it is compared with all others in the same seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.decided_memory import DecidedMemory
from shardplan.costs.decided_program import DecidedProgram, decided_program
from shardplan.costs.kernel_tasks import Tasks
from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing, ScheduleWindows
from shardplan.costs.schedule_windows import schedule_windows
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.problem import Solution
from shardplan.search.simplicity import complexity
from shardplan.xla_model.compiler_options import DEFAULT, XlaOptions, thresholds
from shardplan.xla_model.timeline import Timeline

States = tuple[int, ...]

OPTIMAL = 1e-6
"""A plan is called optimal if its gap is at most this."""

GAIN = 0.001
"""Compiler options are set, and the best plan is changed for longer, if the step is faster by this fraction."""

ROUNDING = 1e-6
"""Fraction by which a bound may exceed the seconds of a plan: of the sums of both."""

OTHERWISE, OTHERWISE_OPS = 8, 40_000
"""Plans that are tried with other combine thresholds at the end: the best ones, so many, or more of up to so many ops together ..."""

THRESHOLD_GAIN = 0.15
"""... that take at most this fraction more than the best one: thresholds gain up to so much."""

NEAR_TIE = 0.005
"""Among plans of at most this fraction more seconds than the fastest, the simplest is taken, of equals that of least seconds x
memory^this."""


@dataclass(frozen=True, eq=False, repr=False)
class Judged:
    """A candidate by the objective.

    Attributes:
        network: at the prices of what the plan itself combines; its reshard paths are those of the program.
        states: of the network.
        solution: the search's, with the objective in picoseconds of simulated step.
        timeline: seconds of the step.
        limit: bytes per device, or None.
        xla: the compiler options that it is compiled with.
        tasks: of its program, where they are known.
        timelines: by compiler options, those found so far.
        known_peak: its peak in bytes per device, where it was taken while the program was at hand.
    """

    network: CostNetwork
    solution: Solution
    timeline: Timeline
    limit: float | None
    xla: XlaOptions = DEFAULT
    tasks: Tasks | None = None
    timelines: dict[XlaOptions, Timeline] = field(default_factory=dict)
    known_peak: float | None = None

    @property
    def program(self) -> DecidedProgram:
        """The program that is compiled."""
        return decided_program(self.network, self.states, self.xla, self.tasks)

    @cached_property
    def peak_bytes(self) -> float:
        """The most memory of a device."""
        return self.memory.peak_bytes() if self.known_peak is None else self.known_peak

    @cached_property
    def memory(self) -> DecidedMemory:
        """What a device has in memory."""
        return DecidedMemory(self.program)

    @cached_property
    def windows(self) -> ScheduleWindows:
        """Overlap windows of its schedule."""
        return schedule_windows(self.program)

    @property
    def excess_bytes(self) -> float:
        """By which the peak exceeds the limit."""
        return 0.0 if self.limit is None else max(0.0, self.peak_bytes - self.limit)

    @property
    def states(self) -> States:
        """Of all nodes."""
        return self.solution.states

    def proven(self, bound: float) -> Candidate:
        """The network and the answer, with a lower bound in picoseconds.

        Raises:
            AssertionError: the bound is above the plan's own seconds, so it is none.
        """
        objective = self.solution.objective
        if bound > objective + ROUNDING * (1.0 + objective):
            raise AssertionError(f"internal error: no plan takes less than {bound:.0f} ps, but one takes {objective:.0f} ps")
        status = "optimal" if bound >= (1 - OPTIMAL) * objective else "feasible"
        return Candidate(self.network, replace(self.solution, bound=min(bound, objective), status=status))

    @property
    def rank(self) -> tuple[float, float]:
        """Bytes over the limit, then seconds: less is better."""
        return self.excess_bytes, self.timeline.total_s

    @cached_property
    def complexity(self) -> tuple[float, ...]:
        """How far the plan is from one that a person would write; less is simpler."""
        return complexity(self.network, self.states)


def reprice(price: Callable[[Pricing], CostNetwork], network: CostNetwork, states: States) -> CostNetwork:
    """The network at the prices of what these states combine."""
    own = network
    for _ in range(2):  # other prices make other reshard paths
        own = price(Pricing(network.pricing.background_price, own.combined_groups(states)))
    return own


def judge(task: PlanningTask, found: Candidate, limit: float | None, others: Iterable[XlaOptions] = ()) -> Judged:
    """A candidate with states, by the objective, under a limit of bytes per device; with the task's compiler options, or `others`."""
    network, solution = found

    def price(pricing: Pricing) -> CostNetwork:
        if network.space is task.space:
            return task.network(pricing, limit)
        return build_network(network.space, task.resharder, limit, None, task.options.corrections, pricing)

    own = reprice(price, network, solution.states)
    return compiled(task, Judged(own, solution, Timeline(inf, inf, 0.0, 0.0), limit), dict.fromkeys((*task.options.xla, *others)))


def compiled(task: PlanningTask, judged: Judged, options: Iterable[XlaOptions]) -> Judged:
    """A plan with the compiler options with which it fits and is fastest; others than the first must gain something."""
    program = decided_program(judged.network, judged.states, tasks=judged.tasks)
    best = judged
    for some in options:
        program = program.with_options(some)
        if (line := judged.timelines.get(some)) is None:
            line = judged.timelines[some] = program.step_timeline(task.interference)
        answer = replace(judged.solution, objective=float(np.rint(line.total_s * PS)), bound=0.0)
        peak = None if judged.limit is None else DecidedMemory(program).peak_bytes()
        found = replace(judged, solution=answer, timeline=line, xla=some, tasks=program.tasks, known_peak=peak)
        if best.timeline.total_s == inf or (found.excess_bytes, line.total_s) < (best.excess_bytes, (1 - GAIN) * best.timeline.total_s):
            best = found
    return best


@dataclass(repr=False)
class Candidates:
    """All plans that a search has come upon, by the objective.

    Attributes:
        task: the step.
        limit: bytes per device, or None.
        judged: in the order in which they were found, each once.
        best: the one of least rank.
        bound: picoseconds that no plan undercuts, whatever its memory.
        others: compiler options next to the task's that plans are judged with: those of the best plan, with its combine threshold.
    """

    task: PlanningTask
    limit: float | None
    judged: dict[tuple, Judged]
    best: Judged | None = None
    bound: float = 0.0
    others: tuple[XlaOptions, ...] = ()

    @classmethod
    def none(cls, task: PlanningTask, limit: float | None) -> Candidates:
        """No plan yet."""
        return cls(task, limit, {})

    @property
    def excess_bytes(self) -> float:
        """By which the best plan exceeds the limit; inf if there is none."""
        return inf if self.best is None else self.best.excess_bytes

    def add(self, found: Candidate, judged: Judged | None = None) -> Judged:
        """Judges a candidate, unless it was `judged` already; it becomes the best if it is better."""
        network, solution = found
        key = tuple(of.keys[s] for of, s in zip(network.space.strategies, network.strategies(solution.states), strict=True))
        key = (*key, network.retained(solution.states))
        if key not in self.judged:
            if self.best is not None:
                self.task.stopwatch.lap("other searches")  # what led to it and no other stage has counted
            self.judged[key] = judged or judge(self.task, found, self.limit, self.others)
            self.task.stopwatch.lap("simulate")
        judged = self.judged[key]
        if self.best is None or judged.rank < self.best.rank:
            self.best = judged
        return judged

    def adopt(self, plans: Iterable[Judged]) -> None:
        """Adds plans that were found under another limit."""
        for plan in sorted(plans, key=lambda x: x.rank):
            network, solution = plan.network, plan.solution
            if network.space is self.task.space:  # with other states: a buffer of its own is one of them only under a limit
                states = network.strategies(solution.states), network.retained(solution.states)
                network = self.task.network(network.pricing, self.limit)
                solution = replace(solution, states=network.states_of(*states))
            own = replace(plan, network=network, solution=solution, limit=self.limit, tasks=None, known_peak=None)
            self.add(Candidate(network, solution), own)

    def add_if_it_computes_less(self, found: Candidate) -> None:
        """Judges a candidate, unless its kernels alone take longer than the step of the best plan: by (11) it is slower."""
        kernels = found.network.least_kernel_ps(found.solution.states)
        if self.best is None or self.best.excess_bytes or kernels < PS * self.best.timeline.total_s:
            self.add(found)

    def lowest_peak(self) -> Judged | None:
        """The plan of the lowest peak."""
        return min(self.judged.values(), key=lambda x: x.peak_bytes, default=None)

    def combine_otherwise(self) -> None:
        """The best plans with the combine thresholds with which they are fastest, which may make another one the best.

        Plans that are added later are tried with that one's threshold.
        """
        if self.best is None or not self.task.options.chooses_xla:
            return
        count = max(OTHERWISE, OTHERWISE_OPS // max(1, len(self.task.space.graph.ops)))
        best = sorted(self.judged.items(), key=lambda x: x[1].rank)[:count]
        for key, judged in best:
            if (
                judged.excess_bytes <= self.best.excess_bytes
                and judged.timeline.total_s <= (1 + THRESHOLD_GAIN) * self.best.timeline.total_s
            ):
                self.judged[key] = compiled(self.task, judged, thresholds(judged.xla))
        self.best = min((self.judged[key] for key, _ in best), key=lambda x: x.rank)
        self.others = (self.best.xla,)

    def simplest(self, most_s: float | None = None) -> Judged | None:
        """The simplest of the plans that fit, and take at most `NEAR_TIE` more than the best and `most_s`; None if none fits.

        Of equally simple ones, a tenth less memory is worth a twentieth of a percent of the seconds.
        """
        if self.best is None or self.best.excess_bytes:
            return None
        most = max(self.best.timeline.total_s, min((1 + NEAR_TIE) * self.best.timeline.total_s, inf if most_s is None else most_s))
        near = [x for x in self.judged.values() if x.timeline.total_s <= most and not x.excess_bytes]
        least = min(x.complexity for x in near)
        simple = [x for x in near if x.complexity == least]
        return min(simple, key=lambda x: x.timeline.total_s * max(1.0, x.peak_bytes) ** NEAR_TIE)
