"""Makes states feasible and improves them by single flips: 1-opt repair and descent under the memory limit, deterministic.

A flip gives one node another state. Also known as iterated conditional modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem

MAX_REFUSALS = 50  # flips that would only move the violated step elsewhere, before repair gives up


class LocalSearch:
    """A problem prepared for flips, and the current states."""

    def __init__(self, problem: Problem, deadline: Deadline = UNLIMITED):
        self.memory, self.start, self.deadline = problem.usage_table, problem.start, deadline
        self.owner = np.repeat(np.arange(len(problem.costs)), np.diff(self.start))
        self.forbidden = problem.big_m
        self.near = problem.flat.near
        self.unary = np.minimum(problem.cost_row, self.forbidden)

    def start_at(self, states: Sequence[int] | np.ndarray) -> None:
        """Sets the current states."""
        self.states = np.array(states, dtype=np.int64)  # s_i, [n]
        self.conditional = self.unary.copy()  # what (1) pays at a node if it takes a state while all others stay, [states of all nodes]
        for i, arcs in enumerate(self.near):
            for j, table in arcs:
                self.conditional[self.start[j] : self.start[j + 1]] += np.minimum(table[self.states[i]], self.forbidden)
        self.profile = self.memory.profile(self.states)  # bytes at every step, [T]

    @property
    def flip_gains(self) -> np.ndarray:
        """Change of (1) by the flip to each state, [states of all nodes]."""
        return self.conditional - self.conditional[self.start[:-1] + self.states][self.owner]

    def flip_within(self, x: int, capacity: np.ndarray, below: float = -np.inf) -> bool:
        """Flips to the state in row x if the profile then is within the capacity [T], or its peak below a value; returns whether."""
        i = int(self.owner[x])
        s, old = x - int(self.start[i]), self.states[i]
        profile = self.profile + self.memory.profile_change(i, old, s)
        if (profile > capacity).any() and not profile.max() < below:
            return False
        for j, table in self.near[i]:
            after, before = np.minimum(table[[s, old]], self.forbidden)
            self.conditional[self.start[j] : self.start[j + 1]] += after - before
        self.states[i], self.profile = s, profile
        return True

    def repair(self, limit: float, flips: int = 2_000) -> bool:
        """Lowers the steps above the limit, highest step first, least cost per byte first; returns whether the states fit."""
        for _ in range(flips):
            self.deadline.check()
            step = int(self.profile.argmax()) if len(self.profile) else 0
            if not len(self.profile) or self.profile[step] <= limit:
                return True
            held = self.memory.bytes_at(step)
            saved = held[self.start[:-1] + self.states][self.owner] - held
            gains = self.flip_gains
            with np.errstate(divide="ignore", invalid="ignore"):
                price = gains / np.minimum(saved, self.profile[step] - limit)
            price = np.where((saved > 0) & (gains < self.forbidden / 2), price, np.inf)
            cheapest = [x for x in np.argsort(price, kind="stable")[:MAX_REFUSALS].tolist() if np.isfinite(price[x])]
            peak, capacity = self.profile[step], np.maximum(self.profile, limit)
            if not any(self.flip_within(x, capacity, peak) for x in cheapest):
                return False
        return False

    def descend(self) -> None:
        """Flips until no single flip improves (1); a limit that holds keeps holding."""
        moved = True
        while moved:
            moved, gains = False, self.flip_gains
            for x in np.flatnonzero(gains < 0)[np.argsort(gains[gains < 0], kind="stable")].tolist():
                i = self.owner[x]
                if self.conditional[x] < self.conditional[self.start[i] + self.states[i]]:
                    self.deadline.check()
                    moved |= self.flip_within(x, np.maximum(self.profile, self.memory.limit))


def repair_and_descend(local: LocalSearch, states: Sequence[int]) -> tuple[int, ...] | None:
    """A feasible local optimum near the given states; None if repair fails."""
    local.start_at(states)
    if not local.repair(local.memory.limit):
        return None
    local.descend()
    return tuple(local.states.tolist())
