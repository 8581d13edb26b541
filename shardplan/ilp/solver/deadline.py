"""When a search has to stop: at a wall-clock limit, at a deterministic work budget (table entries that it visits), or never."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

ENTRIES_PER_WORK = 4e8  # table entries per unit of work: about a second of one core
DEFAULT_WORK = 20.0  # work budget of a search without any limit

MARGIN, MARGIN_S = 0.015, 0.05
"""Share of a time limit, and seconds, kept back for what runs between two checks: searches of 0.4 to 300 s end within 2 % of it."""


class OutOfTimeError(Exception):
    """The wall-clock limit is reached. The step in progress is given up; incumbent and bound stay valid."""


class Deadline:
    """A wall-clock limit and a work budget.

    `check` raises within a step, at the wall-clock limit only, for work is counted between steps; `over` says so between steps.
    """

    def __init__(self, time_limit: float | None = None, work: float | None = None, patience: Callable[[], float] = lambda: 1.0):
        """Starts now, with a limit in seconds or, if it is None, without a look at the clock.

        `work` is by default `DEFAULT_WORK` without a time limit, unlimited with one. `patience` gives the share of the time limit that
        may be used, asked at every look at the clock.
        """
        self.start = time.monotonic()
        self.time_limit, self.patience = time_limit, patience
        self.work = (DEFAULT_WORK if time_limit is None else np.inf) if work is None else work  # units of work left
        self.spent = 0.0  # table entries spent so far

    def spend(self, entries: float) -> None:
        """Counts visited table entries as work."""
        self.work -= entries / ENTRIES_PER_WORK
        self.spent += entries

    def share(self, share: float) -> Deadline:
        """The same limits for `check`; `over` already after a share of what is left."""
        return _Share(self, share)

    @property
    def seconds_left(self) -> float:
        """Seconds that may still be used; inf without a time limit."""
        if self.time_limit is None:
            return np.inf
        usable = (1.0 - MARGIN) * self.time_limit - MARGIN_S
        return self.patience() * usable - (time.monotonic() - self.start)

    @property
    def used(self) -> float:
        """Share of the time limit that has passed; 0 without a limit."""
        return (time.monotonic() - self.start) / max(self.time_limit, 1e-9) if self.time_limit is not None else 0.0

    def over(self) -> bool:
        """Whether the time limit is reached or all work is spent."""
        return self.work <= 0 or self.seconds_left <= 0

    def check(self) -> None:
        """Raises `OutOfTimeError` at the wall-clock limit."""
        if self.seconds_left <= 0:
            raise OutOfTimeError


class _Share(Deadline):
    """`Deadline.share`: limits are the parent's, at a later point of its budget."""

    def __init__(self, parent: Deadline, share: float):
        self.parent, self.check = parent, parent.check
        self.least = [left * (1 - share) if np.isfinite(left) else -np.inf for left in (parent.work, parent.seconds_left)]

    @property
    def spent(self) -> float:
        return self.parent.spent

    def over(self) -> bool:
        work, seconds = self.least
        return self.parent.over() or self.parent.work < work or self.parent.seconds_left < seconds


UNLIMITED = Deadline(work=np.inf)  # never over
