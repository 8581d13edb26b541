"""Which single changes of state still pay: descent under the hard limit, deterministic, from any choice of states.

A move gives one node another state. It is taken when it lowers (1) and every step of (2) stays within the limit; from a
choice that breaks the limit, moves first lower the highest step at the least cost per byte.

`field[x]`, for x a state of node i, is what (1) would pay at i if i took that state while all others stay: the change of cost
of a move is a difference of two fields.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem
from shardplan.ilp.solver.usage import UsageTable

REFUSED = 50  # moves that would only shift a broken step elsewhere, before giving up


class LocalSearch:
    """A problem prepared for moves, and the choice that they change.

    Attributes:
        states: s_i, [n].
        profile: bytes at every step, [T].
    """

    def __init__(self, problem: Problem, memory: UsageTable, deadline: Deadline = UNLIMITED):
        self.problem, self.memory, self.deadline = problem, memory, deadline
        self.start = memory.start
        self.owner = np.repeat(np.arange(len(problem.costs)), np.diff(self.start))
        self.forbidden = problem.big_m
        self.near = problem.flat.near
        self.own = np.minimum(np.concatenate(problem.costs), self.forbidden) if problem.costs else np.zeros(0)

    def settle(self, states: Sequence[int] | np.ndarray) -> None:
        """Starts from these states."""
        self.states = np.array(states, dtype=np.int64)
        self.field = self.own.copy()
        for i, near in enumerate(self.near):
            for j, table in near:
                self.field[self.start[j] : self.start[j + 1]] += np.minimum(table[self.states[i]], self.forbidden)
        self.profile = self.memory.profile(self.states)

    @property
    def gains(self) -> np.ndarray:
        """What (1) changes by under the move to each state."""
        return self.field - self.field[self.start[:-1] + self.states][self.owner]

    def after(self, i: int, s: int) -> np.ndarray:
        """The profile if i took s."""
        return self.profile + self.memory.profile_change(i, self.states[i], s)

    def move(self, i: int, s: int, after: np.ndarray) -> None:
        old = self.states[i]
        for j, table in self.near[i]:
            after_j, before_j = np.minimum(table[[s, old]], self.forbidden)
            self.field[self.start[j] : self.start[j + 1]] += after_j - before_j
        self.states[i], self.profile = s, after

    def relieve(self, limit: float, moves: int = 2_000) -> bool:
        """Brings the steps above the limit down, least cost per byte first, highest step first; whether it fits now."""
        for _ in range(moves):
            self.deadline.check()
            step = int(self.profile.argmax()) if len(self.profile) else 0
            if not len(self.profile) or self.profile[step] <= limit:
                return True
            held = self.memory.bytes_at(step)
            saved = held[self.start[:-1] + self.states][self.owner] - held
            gains = self.gains
            with np.errstate(divide="ignore", invalid="ignore"):
                price = gains / np.minimum(saved, self.profile[step] - limit)
            price = np.where((saved > 0) & (gains < self.forbidden / 2), price, np.inf)
            for x in np.argsort(price, kind="stable")[:REFUSED].tolist():
                if np.isinf(price[x]):
                    return False
                i = int(self.owner[x])
                s = x - int(self.start[i])
                after = self.after(i, s)
                if after.max() < self.profile[step] or (after <= np.maximum(self.profile, limit)).all():
                    self.move(i, s, after)
                    break
            else:
                return False
        return False

    def descend(self) -> None:
        """Moves until none pays; never breaks a limit that holds."""
        moved = True
        while moved:
            moved, gains = False, self.gains
            for x in np.flatnonzero(gains < 0)[np.argsort(gains[gains < 0], kind="stable")].tolist():
                i = int(self.owner[x])
                s = x - int(self.start[i])
                if self.field[x] >= self.field[self.start[i] + self.states[i]]:
                    continue
                self.deadline.check()
                after = self.after(i, s)
                if (after <= np.maximum(self.profile, self.memory.limit)).all():
                    self.move(i, s, after)
                    moved = True


def fit(moves: LocalSearch, states: Sequence[int]) -> tuple[int, ...] | None:
    """States near the given ones that fit, repaired and improved by moves; None when moves get stuck above the limit."""
    moves.settle(states)
    if not moves.relieve(moves.memory.limit):
        return None
    moves.descend()
    return tuple(moves.states.tolist())
