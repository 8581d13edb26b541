"""Makes states feasible and improves them by single flips: 1-opt repair and descent under the memory limit, deterministic.

A flip gives one node another state. Repair lowers the highest step at the least cost per byte; descent takes every flip that lowers
(1) and keeps (3). `conditional[x]`, for x a state of node i, is what (1) pays at i if i takes that state while all others stay, so the
gain of a flip is a difference of two entries. Also known as iterated conditional modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem
from shardplan.ilp.solver.usage import UsageTable

MAX_REFUSALS = 50
"""Flips that would only move the violated step elsewhere, before repair gives up."""


class LocalSearch:
    """A problem prepared for flips, and the current states.

    Attributes:
        states: s_i, [n].
        conditional: cost of every state of every node given all others, [states of all nodes].
        profile: bytes at every step, [T].
    """

    def __init__(self, problem: Problem, memory: UsageTable, deadline: Deadline = UNLIMITED):
        self.problem, self.memory, self.deadline = problem, memory, deadline
        self.start = memory.start
        self.owner = np.repeat(np.arange(len(problem.costs)), np.diff(self.start))
        self.forbidden = problem.big_m
        self.near = problem.flat.near
        self.unary = np.minimum(np.concatenate(problem.costs), self.forbidden) if problem.costs else np.zeros(0)

    def start_at(self, states: Sequence[int] | np.ndarray) -> None:
        """Sets the current states."""
        self.states = np.array(states, dtype=np.int64)
        self.conditional = self.unary.copy()
        for i, arcs in enumerate(self.near):
            for j, table in arcs:
                self.conditional[self.start[j] : self.start[j + 1]] += np.minimum(table[self.states[i]], self.forbidden)
        self.profile = self.memory.profile(self.states)

    @property
    def flip_gains(self) -> np.ndarray:
        """Change of (1) by the flip to each state, [states of all nodes]."""
        return self.conditional - self.conditional[self.start[:-1] + self.states][self.owner]

    def profile_after(self, i: int, s: int) -> np.ndarray:
        """The profile if node i took state s."""
        return self.profile + self.memory.profile_change(i, self.states[i], s)

    def flip(self, i: int, s: int, profile: np.ndarray) -> None:
        """Gives node i state s; `profile` is the profile then."""
        old = self.states[i]
        for j, table in self.near[i]:
            after, before = np.minimum(table[[s, old]], self.forbidden)
            self.conditional[self.start[j] : self.start[j + 1]] += after - before
        self.states[i], self.profile = s, profile

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
            for x in np.argsort(price, kind="stable")[:MAX_REFUSALS].tolist():
                if np.isinf(price[x]):
                    return False
                i = int(self.owner[x])
                s = x - int(self.start[i])
                after = self.profile_after(i, s)
                if after.max() < self.profile[step] or (after <= np.maximum(self.profile, limit)).all():
                    self.flip(i, s, after)
                    break
            else:
                return False
        return False

    def descend(self) -> None:
        """Flips until no single flip improves (1); a limit that holds keeps holding."""
        moved = True
        while moved:
            moved, gains = False, self.flip_gains
            for x in np.flatnonzero(gains < 0)[np.argsort(gains[gains < 0], kind="stable")].tolist():
                i = int(self.owner[x])
                s = x - int(self.start[i])
                if self.conditional[x] >= self.conditional[self.start[i] + self.states[i]]:
                    continue
                self.deadline.check()
                after = self.profile_after(i, s)
                if (after <= np.maximum(self.profile, self.memory.limit)).all():
                    self.flip(i, s, after)
                    moved = True


def repair_and_descend(local: LocalSearch, states: Sequence[int]) -> tuple[int, ...] | None:
    """A feasible local optimum near the given states; None if repair fails."""
    local.start_at(states)
    if not local.repair(local.memory.limit):
        return None
    local.descend()
    return tuple(local.states.tolist())
