"""How a problem gets its answer: the chain of links on one page.

    shrink      exact reductions                                                                 shrink.py
    bound       elimination under prices on bytes: a bound, first answers, and states that no
                better answer takes; shrink again, with larger joint tables each time            bound.py, prices.py
    explore     annealed sweeps under prices find better answers, which delete more states       explore.py, plans.py
    CP-SAT      closes the gap on a small core                                                   cpsat.py

On a planner's problem the first two links end with a proof. Without a time limit no clock is read: every link counts its
work, so the answer is the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import cpsat, prices
from .bound import Bound, bound
from .eliminate import Elimination
from .local import Neighbourhood, descend, repair
from .memory import Memory
from .problem import Problem, Solution
from .shrink import Shrunk, shrink

Progress = Callable[[tuple[int, ...], float, float], None]
Back = Callable[[tuple[int, ...]], tuple[int, ...]]  # states of a smaller problem -> states of the given one

JOINTS = (1 << 14, 1 << 17, 1 << 20, 1 << 22)  # entries of a joint table, as far as the work allows
SWEEP_JOINT = (20_000, 4_000)  # the same for sweeps, on small and on large problems
GUESS_JOINT = 1 << 18  # and for guesses
FIRST_RUN, LONGEST_RUN = 60, 1500  # sweeps
MOST_PLANS = 32  # that take turns in a run
LARGE = 20_000  # states from which a problem counts as large
LARGE_MEMORY = 2_000  # usages from which one-node moves are left to compiled code
CORE = (4_000, 40_000)  # variables of the 0-1 program up to which CP-SAT comes before and after exploring
WORK = 10.0  # default work limit
BOUND_WORK = 8e8  # table entries that bounding may visit before exploring, and 0.3 of what exploring does
ROUNDING = 1e-9  # relative, where costs or bytes are not whole numbers
UNIT = 1e8  # table entries per unit of work: about a second


class Clock:
    """What may still be spent: seconds of wall clock if a limit was given, else work (about seconds, counted not measured)."""

    def __init__(self, seconds: float | None, work: float | None):
        self.start = time.monotonic()
        self.seconds = seconds
        self.work = (WORK if seconds is None else np.inf) if work is None else work

    def spend(self, entries: float) -> None:
        self.work -= entries / UNIT

    @property
    def seconds_left(self) -> float:
        return np.inf if self.seconds is None else 0.985 * self.seconds - 0.05 - (time.monotonic() - self.start)

    def over(self) -> bool:
        return self.work <= 0 or self.seconds_left <= 0

    def allows(self, entries: float) -> bool:
        """Whether so much work may be begun."""
        return entries / UNIT <= min(self.work, self.seconds_left / 3)


class Search:
    """The best answer and bound so far; answers are kept as states of the problem they were found in, with the way back."""

    def __init__(self, problem: Problem, progress: Progress | None):
        self.problem, self.progress = problem, progress
        self.objective, self.bound = np.inf, -np.inf
        self.answer: tuple[tuple[int, ...], Back] = (), tuple
        arrays = (*problem.costs, *(e.cost for e in problem.edges), *(u.bytes for u in problem.usages))
        self.whole = all((a == np.floor(a)).all() for a in {id(a): a for a in arrays}.values())

    def offer(self, states: tuple[int, ...], objective: float, back: Back = tuple) -> bool:
        """Takes states that fit, if they are better."""
        if not objective < self.objective:
            return False
        self.answer, self.objective = (states, back), objective
        self._report()
        return True

    def prove(self, value: float) -> None:
        """Takes a lower bound if it is better; sums of whole numbers are whole, so it may be rounded up."""
        if np.isfinite(value):
            value = float(np.ceil(value)) if self.whole else value - ROUNDING * abs(value)
        if min(value, self.objective) > self.bound:
            self.bound = min(value, self.objective)
            self._report()

    def _report(self) -> None:
        if self.progress and self.found:
            self.progress(self.states, self.bound, Solution("feasible", (), self.objective, self.bound).gap)

    @property
    def states(self) -> tuple[int, ...]:
        states, back = self.answer
        return back(states)

    @property
    def found(self) -> bool:
        return bool(np.isfinite(self.objective))

    @property
    def done(self) -> bool:
        return self.objective <= self.bound

    @property
    def worth(self) -> float:
        """What a better answer may cost at most; where costs are not whole, an answer must be better by more than rounding."""
        return self.objective - (1.0 if self.whole else ROUNDING * abs(self.objective))


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    work_limit: float | None = None,
    hint: tuple[int, ...] | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The cheapest states of (1) under (2)-(3), with a proof of how good they are.

    Args:
        problem: the network; nodes of one class in `problem.ties` take the same state.
        time_limit: seconds; at the limit the best answer so far is returned. None: no clock is read.
        work_limit: counted work, about seconds; by default 10 without a time limit, none with one.
        hint: states to start from, and to return when nothing better is found (status "fallback").
        progress: called with (states, bound, gap) whenever one of them gets better.

    Returns:
        "optimal", "feasible" (with a gap), "infeasible" (proven) or "fallback".
    """
    clock, search = Clock(time_limit, work_limit), Search(problem, progress)
    if hint is not None and (problem.limit is None or problem.peak(hint) <= problem.limit):
        search.offer(tuple(hint), problem.objective(hint))
    hinted = search.answer if search.found else None
    small = shrink(problem, tie=True)
    chain = Chain(small, search, clock)
    proven = not small.feasible or chain.run()
    stats = {"nodes": len(problem.costs), "nodes after shrinking": len(small.problem.costs), **chain.stats}
    if proven and search.found:
        search.prove(np.inf)
    elif not proven and not search.found:
        least = least_memory(problem)
        limit = np.inf if problem.limit is None else problem.limit
        if least.states and least.bytes <= limit:
            search.offer(least.states, problem.objective(least.states))
        proven = least.bound_bytes > limit
    if not search.found:
        status = "infeasible" if proven else "fallback"
        return Solution(status, (), np.inf, np.inf if proven else search.bound, small.tied, stats)
    status = "optimal" if search.done else "fallback" if search.answer is hinted else "feasible"
    return Solution(status, search.states, search.objective, search.bound, small.tied, stats)


class Chain:
    """The links after the first shrink, on a problem that gets smaller as answers and bounds get better."""

    def __init__(self, small: Shrunk, search: Search, clock: Clock):
        self.search, self.clock = search, clock
        self.problem, self.back, self.offset = small.problem, small.invert, small.offset
        self.stats: dict = {"bounds": 0, "runs": 0}
        self.spent = {"bound": 0.0, "explore": 0.0}  # table entries
        self.explorer = None  # kept as long as the problem stays the same
        self.known: tuple[int, ...] | None = None  # the best answer, as states of the problem as it is now
        self.run_seconds, self.last_run = 0.0, False
        self.prices: np.ndarray | None = None  # of the last run, for the problem as it is now

    def run(self) -> bool:
        """True when it is proven that nothing better than the search's answer is left."""
        if self._large:
            self._explore(0, FIRST_RUN)
        if self._bound(JOINTS[:1] if self._large else JOINTS[:2], rounds=0 if self._large else 10):
            return True
        if self._core(CORE[0], work=2.0):
            return True
        number, bounded = 0, np.inf
        while not self.clock.over():
            number += 1
            self._explore(number, FIRST_RUN << number if self._large else min(int(FIRST_RUN * 1.4**number), LONGEST_RUN))
            if self._large and not self.last_run:
                continue
            if self.search.objective < bounded and self._bound(JOINTS, rounds=0 if self._large else 20):
                return True
            bounded = self.search.objective
            if number >= 3 and self._core(CORE[1], work=float(number)):
                return True
        return False

    @property
    def _large(self) -> bool:
        return sum(map(len, self.problem.costs)) > LARGE

    def _offer(self, states: tuple[int, ...]) -> None:
        objective = self.problem.objective(states) + self.offset
        if self.search.offer(states, objective, self.back):
            self.known = states

    def _bound(self, joints: tuple[int, ...], rounds: int) -> bool:
        """Bounds with larger and larger joints while states go; True when that ends in a proof."""
        for joint in joints:
            changes = rounds if joint <= JOINTS[1] else min(rounds, 3)
            while self._affords(4.0 + changes * (self.problem.limit is not None), joint):
                worth = self.search.worth - self.offset
                start = None if self._large else self.prices  # guessed prices are too rough where joints are split a lot
                result = bound(self.problem, worth, joint, changes, start, self.clock.over)
                self.clock.spend(result.work)
                self.spent["bound"] += result.work
                self.stats["bounds"] += 1
                self.prices = max(result.quotes, key=lambda quote: quote.value).prices
                self._try(result)
                self.search.prove(result.value + self.offset)
                nothing_left = not result.reduced.feasible or not self.problem.costs
                if self.search.done or np.isinf(result.value) or nothing_left:
                    return True
                if result.kept < (0.7 if self._large else 1.0):  # a new problem costs a large one its plans
                    self._reduce(result.reduced)
                if result.kept > 0.97 or self._large:
                    break
        return False

    def _affords(self, sweeps: float, joint: int) -> bool:
        """Whether bounding with such joints is in proportion to the exploring done."""
        work = sweeps * joint * min(len(self.problem.costs), 40) + 2e3 * len(self.problem.costs)
        return self.clock.allows(work) and self.spent["bound"] + work <= BOUND_WORK + 0.3 * self.spent["explore"]

    def _try(self, result: Bound) -> None:
        """Answers from the priced choices of a bound: repaired, then improved by one-node moves."""
        if self._large:
            return
        if len(self.problem.usages) > LARGE_MEMORY:
            explorer = self._explorer()
            if explorer is None:
                return
            for quote in result.quotes:
                found = explorer.fit(np.array(quote.states), abs(self.problem.objective(quote.states)))
                if found is not None:
                    self._offer(tuple(found.tolist()))
            return
        memory = Memory(self.problem)
        around = Neighbourhood(self.problem, memory)
        for quote in result.quotes[-3:]:
            fits = quote.states if memory.fits(quote.states) else repair(around, quote.states, memory.limit)
            if fits is not None:
                self._offer(descend(around, fits))

    def _reduce(self, reduced: Shrunk) -> None:
        outer, inner = self.back, reduced.invert
        self.problem, self.offset, self.prices = reduced.problem, self.offset + reduced.offset, None
        self.known = None  # (5) leaves it out
        self.back = lambda states: outer(inner(states))

    def _explorer(self):
        """The explorer of the problem as it is now; None without numba, which is loaded only by problems that need it."""
        if self.explorer is None or self.explorer.problem is not self.problem:
            try:
                from .explore import Explorer
            except ImportError:
                self.stats["without"] = "numba"
                return None
            self.explorer = Explorer(self.problem, SWEEP_JOINT[self._large], GUESS_JOINT)
        return self.explorer

    def _explore(self, number: int, sweeps: int) -> None:
        """One run of so many sweeps; the last one before a time limit takes what time is left."""
        explorer, clock = self._explorer(), self.clock
        if explorer is None:  # bounds, moves and CP-SAT alone
            clock.spend(UNIT)
            return
        n_plans = max(4, min(MOST_PLANS, sweeps // 8))
        explorer.plan(n_plans - 1)
        sweeps = max(1, int(min(sweeps, clock.work * UNIT / explorer.work)))
        start, left = time.monotonic(), clock.seconds_left
        self.last_run = left < (6.0 if self._large else 2.5) * self.run_seconds  # the one after would not come to its end
        if self._large:  # few runs: those that begin with a guess, the last one at the heat that is best on the whole
            number *= 4 if self.last_run else 2

        def pace(turn: int) -> float:
            """Share of the run that is over: by sweeps, or by time where the time limit ends it."""
            if np.isinf(left):
                return turn / sweeps
            spent = (time.monotonic() - start) / max(1e-3, left)
            return spent if self.last_run else max(turn / sweeps, spent)

        known = self.known if self.last_run or number % 4 == 3 else None  # most runs look elsewhere
        for states in explorer.run(number, n_plans, pace, known):
            self._offer(states)
        self.prices = explorer.prices
        self.run_seconds = time.monotonic() - start if np.isfinite(left) else 0.0
        clock.spend(explorer.work * sweeps)
        self.spent["explore"] += explorer.work * sweeps
        self.stats["runs"] += 1

    def _core(self, most: int, work: float) -> bool:
        """CP-SAT on what is left, if that is little."""
        if cpsat.entries(self.problem) > most or self.clock.over():
            return False
        work = min(work, self.clock.work)
        seconds = None if self.clock.seconds is None else self.clock.seconds_left / 2
        answer = cpsat.solve_core(self.problem, work=work, seconds=seconds)
        memory = Memory(self.problem)
        if answer.states and memory.fits(answer.states):
            self._offer(answer.states)
        self.clock.spend(UNIT * work)
        self.search.prove(answer.bound + self.offset)
        return self.search.done or answer.status == "infeasible"


@dataclass(frozen=True)
class LeastMemory:
    """How little memory is possible.

    Attributes:
        bound_bytes: no choice of states has a lower peak.
        bytes: peak of `states`.
        step: the time step at which it peaks.
        states: the choice found.
    """

    bound_bytes: float
    bytes: float
    step: int
    states: tuple[int, ...]


def least_memory(problem: Problem) -> LeastMemory:
    """The least possible peak, whatever it costs: a lower bound and a choice that comes near it (often equals it)."""

    def allowed(table: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(table), 0.0, np.inf)

    tables = {id(e.cost): allowed(e.cost) for e in problem.edges}
    bare = replace(
        problem,
        costs=tuple(map(allowed, problem.costs)),
        edges=tuple(replace(e, cost=tables[id(e.cost)]) for e in problem.edges),
        limit=-np.inf,
    )
    small = shrink(bare, tie=True)
    if not small.feasible:
        return LeastMemory(np.inf, np.inf, 0, ())
    memory, elimination = Memory(small.problem), Elimination(small.problem, JOINTS[2])
    around = Neighbourhood(small.problem, memory)
    best, bound = None, 0.0
    if memory.n_steps:
        found = ((quote.value, quote.states) for quote in prices.least_peak(elimination, memory))
    else:
        sweep = elimination.run()
        found = iter([(sweep.value, sweep.states())])
    for value, guess in found:
        states: tuple[int, ...] | None = guess
        bound = max(bound, value)
        while states is not None and np.isfinite(small.problem.objective(states)):
            if best is not None and memory.peak(states) >= memory.peak(best):
                break
            best = states
            states = repair(around, states, memory.peak(states) * (1 - 1e-12) - 1e-9, 200)
        if best is not None and memory.peak(best) <= bound * (1 + 1e-12):
            break
    if best is None:
        return LeastMemory(bound, np.inf, 0, ())
    states = small.invert(best)
    profile = problem.memory(states)
    return LeastMemory(bound, float(profile.max(initial=0.0)), int(profile.argmax()) if len(profile) else 0, states)
