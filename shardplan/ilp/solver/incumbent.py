"""What a search has so far: the best answer, what none can beat, and what may still be spent."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from shardplan.ilp.solver.problem import Problem, Solution

Progress = Callable[[tuple[int, ...], float, float], None]
Check = Callable[[], None]  # raises OutOfTime when there is no more time
Back = Callable[[tuple[int, ...]], tuple[int, ...]]  # states of a smaller problem -> states of the given one

WORK = 20.0  # default work limit
UNIT = 4e8  # table entries per unit of work: about a second
LARGE = 20_000  # states from which a problem counts as large
ROUNDING = 1e-9  # relative, where bytes are not whole numbers


class OutOfTime(Exception):
    """The time limit is reached: what was begun is given up, what the record has is kept."""


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


class Clock:
    """What may still be spent: seconds of wall clock if a limit was given, else work (about seconds, counted not measured).

    `patience` says what part of the seconds there is, as things stand.
    """

    def __init__(self, seconds: float | None, work: float | None, patience: Callable[[], float] = lambda: 1.0):
        self.start = time.monotonic()
        self.seconds, self.patience = seconds, patience
        self.work = (WORK if seconds is None else np.inf) if work is None else work
        self.spent = 0.0  # table entries

    def spend(self, entries: float) -> None:
        self.work -= entries / UNIT
        self.spent += entries

    def part(self, share: float) -> Clock:
        """A clock of its own for a share of what is left."""
        return Clock(None if self.seconds is None else share * self.seconds_left, share * self.work)

    @property
    def seconds_left(self) -> float:
        if self.seconds is None:
            return np.inf
        return self.patience() * (0.985 * self.seconds - 0.05) - (time.monotonic() - self.start)

    @property
    def used(self) -> float:
        """The share of the time that is over; 0 where there is no limit."""
        return (time.monotonic() - self.start) / max(self.seconds, 1e-9) if self.seconds is not None else 0.0

    def over(self) -> bool:
        return self.work <= 0 or self.seconds_left <= 0

    def check(self) -> None:
        """Asked in the midst of a link; raises OutOfTime at the time limit. Work is counted between links only."""
        if self.seconds_left <= 0:
            raise OutOfTime

    def share(self, part: float) -> Callable[[], bool]:
        """A clock for a part of what is left: says whether that part is over."""
        work, seconds = (left * (1 - part) if np.isfinite(left) else -np.inf for left in (self.work, self.seconds_left))
        return lambda: self.over() or self.work < work or self.seconds_left < seconds


class Record:
    """The best answer and bound so far; answers are kept as states of the problem they were found in, with the way back.

    `most` is what an answer may cost to be of use at all.
    """

    def __init__(self, problem: Problem, progress: Progress | None, most: float = np.inf):
        self.problem, self.progress, self.most = problem, progress, most
        self.objective, self.bound = np.inf, -np.inf
        self.answer: tuple[tuple[int, ...], Back] = (), tuple
        self.whole = all((u.bytes == np.floor(u.bytes)).all() for u in problem.usages)  # costs are

    def offer(self, states: tuple[int, ...], objective: float, back: Back = tuple) -> bool:
        """Takes states that fit, if they are better, and cheap enough to be of use."""
        if not objective < self.objective or objective > self.most:
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
        """What a better answer may cost at most; where bytes are not whole, an answer must be better by more than rounding."""
        return min(self.most, self.objective - (1.0 if self.whole else ROUNDING * abs(self.objective)))
