"""The best answer and the best lower bound of a search so far, and the cutoff that follows from them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardplan.ilp.solver.problem import Problem, Solution

Progress = Callable[[tuple[int, ...], float, float], None]
"""Called with (states, bound, gap)."""

Invert = Callable[[tuple[int, ...]], tuple[int, ...]]
"""States of a presolved problem -> states of the given problem."""

ROUNDING = 1e-9
"""Relative rounding error of a bound where bytes are not integers, so that penalties are not exact."""


class Incumbent:
    """The best answer and the best lower bound so far.

    Attributes:
        upper_bound: answers that cost more are of no use.
        objective: cost of the best answer, inf if there is none.
        bound: the best lower bound.
        answer: the best answer in the states of its subproblem, and their inversion; most are never inverted.
    """

    def __init__(self, problem: Problem, progress: Progress | None, upper_bound: float = np.inf):
        self.progress, self.upper_bound = progress, upper_bound
        self.objective, self.bound = np.inf, -np.inf
        self.answer: tuple[tuple[int, ...], Invert] = (), tuple
        self.exact = all((u.bytes == np.floor(u.bytes)).all() for u in problem.usages)

    def offer(self, states: tuple[int, ...], objective: float, invert: Invert = tuple) -> bool:
        """Takes feasible states if they are better than the incumbent and within `upper_bound`; returns whether."""
        if not objective < self.objective or objective > self.upper_bound:
            return False
        self.answer, self.objective = (states, invert), objective
        self._report()
        return True

    def prove(self, value: float) -> None:
        """Takes a lower bound if it is better. Objectives are integers, so an exact bound is rounded up."""
        if np.isfinite(value):
            value = float(np.ceil(value)) if self.exact else value - ROUNDING * abs(value)
        if min(value, self.objective) > self.bound:
            self.bound = min(value, self.objective)
            self._report()

    def _report(self) -> None:
        if self.progress and self.found:
            self.progress(self.states, self.bound, Solution("feasible", (), self.objective, self.bound).gap)

    @property
    def states(self) -> tuple[int, ...]:
        """The best answer in states of the given problem."""
        states, invert = self.answer
        return invert(states)

    @property
    def found(self) -> bool:
        """Whether there is an answer."""
        return bool(np.isfinite(self.objective))

    @property
    def optimal(self) -> bool:
        """Whether the bound proves the answer optimal."""
        return self.objective <= self.bound

    @property
    def cutoff(self) -> float:
        """The greatest cost that a better answer may have."""
        return min(self.upper_bound, self.objective - (1.0 if self.exact else ROUNDING * abs(self.objective)))
