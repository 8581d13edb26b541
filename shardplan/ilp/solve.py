"""How a problem gets its answer: the chain of links on one page.

    shrink      exact reductions                                                           shrink.py
    eliminate   without a limit, or when the cheapest choice fits: done                    eliminate.py
    price       prices on bytes raise the bound; every priced choice, repaired and
                improved by moves under the hard limit, is a candidate                     prices.py, local.py
    fix         states whose priced cost exceeds the best answer go; shrink again          shrink.py
    CP-SAT      closes the gap on the core that is left                                    cpsat.py

Without a time limit no clock is read: every link stops by counting its work, so the answer is the same everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from . import cpsat, prices
from .eliminate import Elimination
from .local import Neighbourhood, descend, repair
from .memory import Memory
from .problem import Problem, Solution
from .shrink import Shrunk, shrink

Progress = Callable[[tuple[int, ...], float, float], None]
Back = Callable[[tuple[int, ...]], tuple[int, ...]]  # states of a smaller problem -> states of the given one

TABLE_CAP = 1 << 20  # entries of a joint table in an elimination
CORE_CAP = 400_000  # variables of the 0-1 program beyond which CP-SAT is not tried
WORK = 20.0  # default work limit


class Clock:
    """What may still be spent: seconds of wall clock if a limit was given, else work (about seconds, counted not measured)."""

    def __init__(self, seconds: float | None, work: float | None):
        self.start = time.monotonic()
        self.seconds = seconds
        self.work = (WORK if seconds is None else np.inf) if work is None else work

    def spend(self, work: float) -> None:
        self.work -= work

    def seconds_left(self) -> float | None:
        return None if self.seconds is None else self.seconds - (time.monotonic() - self.start)

    @property
    def over(self) -> bool:
        left = self.seconds_left()
        return self.work <= 0 or (left is not None and left <= 0)


class Search:
    """The best answer and bound so far, in terms of the problem as it was given."""

    def __init__(self, problem: Problem, progress: Progress | None):
        self.problem, self.progress = problem, progress
        self.states: tuple[int, ...] = ()
        self.objective, self.bound = np.inf, -np.inf
        self.whole = all((a == np.floor(a)).all() for a in _distinct([*problem.costs, *(e.cost for e in problem.edges)]))
        self.stats: dict = {}

    def offer(self, states: tuple[int, ...]) -> bool:
        """Takes states of the given problem if they fit and are better."""
        objective = self.problem.objective(states)
        if not objective < self.objective:
            return False
        if self.problem.limit is not None and self.problem.peak(states) > self.problem.limit:
            return False
        self.states, self.objective = states, objective
        self.report()
        return True

    def prove(self, bound: float) -> None:
        """Takes a lower bound if it is better; sums of whole numbers are whole, so it may be rounded up."""
        bound = float(bound)
        if self.whole and np.isfinite(bound):
            bound = float(np.ceil(bound - 1e-9 * max(1.0, abs(bound))))
        if min(bound, self.objective) > self.bound:
            self.bound = min(bound, self.objective)
            self.report()

    def report(self) -> None:
        if self.progress and self.found:
            gap = 0.0 if self.objective == self.bound else (self.objective - self.bound) / max(abs(self.objective), 1e-30)
            self.progress(self.states, self.bound, gap)

    @property
    def found(self) -> bool:
        return bool(np.isfinite(self.objective))

    @property
    def done(self) -> bool:
        return self.objective <= self.bound

    @property
    def worth(self) -> float:
        """Only choices below this cost are an improvement."""
        slack = 1e-9 * max(1.0, abs(self.objective))
        return self.objective - 1.0 + slack if self.whole and slack < 0.5 else self.objective + slack


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
        work_limit: counted work, about seconds; by default 20 without a time limit, none with one.
        hint: states to start from, and to return when nothing better is found (status "fallback").
        progress: called with (states, bound, gap) whenever one of them gets better.

    Returns:
        "optimal", "feasible" (with a gap), "infeasible" (proven) or "fallback".
    """
    clock, search = Clock(time_limit, work_limit), Search(problem, progress)
    if hint is not None:
        search.offer(tuple(hint))
    hinted = search.states
    small = shrink(problem, tie=True)
    search.stats["nodes"], search.stats["nodes after shrinking"] = len(problem.costs), len(small.problem.costs)
    proven = not small.feasible or _solve_small(small, search, clock)
    if proven and not search.found:
        return Solution("infeasible", (), np.inf, np.inf, small.tied, search.stats)
    if proven:
        search.prove(np.inf)
    if not search.found:
        least = least_memory(problem)
        search.offer(least.states)
        if not search.found:
            status = "infeasible" if least.bound_bytes > problem.limit else "fallback"
            return Solution(status, (), np.inf, np.inf if status == "infeasible" else search.bound, small.tied, search.stats)
    status = "optimal" if search.done else "fallback" if hint is not None and search.states == hinted else "feasible"
    return Solution(status, search.states, search.objective, search.bound, small.tied, search.stats)


def _solve_small(small: Shrunk, search: Search, clock: Clock) -> bool:
    """Runs the links on the shrunk problem; True when nothing better than the search's answer is left."""
    back, offset = small.invert, small.offset
    for _ in range(20):
        problem = small.problem
        memory, elimination = Memory(problem), Elimination(problem, TABLE_CAP)
        best = _price(problem, memory, elimination, search, clock, back, offset)
        if search.done or np.isinf(best.value):
            return True
        masks = [m + offset - _toll_constant(best, memory) <= search.worth for m in best.sweep.marginals()]
        clock.spend(3 * elimination.size / 1e8)
        kept, total = sum(int(m.sum()) for m in masks), sum(map(len, masks))
        if kept > 0.9 * total or clock.over:
            break
        costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(masks, problem.costs, strict=True))
        small = shrink(replace(problem, costs=costs))
        if not small.feasible:
            return True
        back, offset = _after(back, small.invert), offset + small.offset
    if clock.over or cpsat.entries(problem) > CORE_CAP:
        return False
    answer = cpsat.solve_core(
        problem,
        work=min(clock.work, 1e9),
        seconds=clock.seconds_left(),
        progress=lambda states, bound: search.offer(back(states)),
    )
    if answer.states:
        search.offer(back(answer.states))
    search.prove(answer.bound + offset)
    return search.done or answer.status == "infeasible"


def _price(
    problem: Problem, memory: Memory, elimination: Elimination, search: Search, clock: Clock, back: Back, offset: float
) -> prices.Quote:
    """Bound and candidates from prices on bytes; returns the quote with the best bound."""
    around = Neighbourhood(problem, memory)
    best: prices.Quote | None = None
    reach = max((float(c[np.isfinite(c)].max(initial=0.0)) for c in problem.costs), default=1.0) + 1.0
    for quote in prices.bargain(elimination, memory, problem.objective, reach):
        clock.spend(elimination.size / 1e8)
        if best is None or quote.value > best.value:
            best = quote
        search.prove(quote.value + offset)
        fitting = quote.states if memory.fits(quote.states) else repair(around, quote.states, memory.limit)
        if fitting is not None:
            search.offer(back(descend(around, fitting)))
        if search.done or clock.over:
            break
    assert best is not None
    return best


def _toll_constant(quote: prices.Quote, memory: Memory) -> float:
    return float(quote.prices.sum() * memory.limit) if quote.prices.any() else 0.0


def _after(outer, inner):
    return lambda states: outer(inner(states))


def _distinct(arrays) -> list:
    return list({id(a): a for a in arrays}.values())


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
    memory, elimination = Memory(small.problem), Elimination(small.problem, TABLE_CAP)
    around = Neighbourhood(small.problem, memory)
    best, bound = None, 0.0
    quotes = prices.least_peak(elimination, memory) if memory.n_steps else [elimination.run()]
    for quote in quotes:
        states = quote.states if memory.n_steps else quote.states()
        bound = max(bound, quote.value)
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
