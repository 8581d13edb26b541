"""What a search has so far: the best answer, what none can beat, and what may still be spent."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from shardplan.ilp.solver.problem import Problem, Solution

Progress = Callable[[tuple[int, ...], float, float], None]
Back = Callable[[tuple[int, ...]], tuple[int, ...]]  # states of a smaller problem -> states of the given one

LARGE = 20_000  # states from which a problem counts as large
ROUNDING = 1e-9  # relative, where bytes are not whole numbers


@contextmanager
def uncollected() -> Iterator[None]:
    """Planning makes millions of objects and hardly a cycle; looking for cycles among them is a fifth of its time, in long pauses."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


class Incumbent:
    """The best answer and bound so far; answers are kept as states of the problem they were found in, with the way back.

    Answers above `upper_bound` are of no use.
    """

    def __init__(self, problem: Problem, progress: Progress | None, upper_bound: float = np.inf):
        self.problem, self.progress, self.upper_bound = problem, progress, upper_bound
        self.objective, self.bound = np.inf, -np.inf
        self.answer: tuple[tuple[int, ...], Back] = (), tuple
        self.whole = all((u.bytes == np.floor(u.bytes)).all() for u in problem.usages)  # costs are

    def offer(self, states: tuple[int, ...], objective: float, back: Back = tuple) -> bool:
        """Takes states that fit, if they are better, and cheap enough to be of use."""
        if not objective < self.objective or objective > self.upper_bound:
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
    def cutoff(self) -> float:
        """What a better answer may cost at most; where bytes are not whole, an answer must be better by more than rounding."""
        return min(self.upper_bound, self.objective - (1.0 if self.whole else ROUNDING * abs(self.objective)))
