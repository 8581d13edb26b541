"""How many bytes a choice holds at every time step, and what prices on bytes add to the cost of a state.

With a price p_t >= 0 on every byte at step t, constraint (2) moves into the objective:

    L(p) = min_s  (1)(s) + sum_t p_t (memory_t(s) - limit)    <=    the optimum of (1)-(3)                        (4)

and the minimum is over an unconstrained network with node costs  c_i[s] + sum_(lo <= t < hi) p_t u_i[s].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardplan.ilp.solver.problem import Problem


class UsageTable:
    """The usages of a problem as flat arrays, sorted by node; none where there is no limit.

    Attributes:
        n_steps: T, one more than the last time step.
        most: no choice holds more bytes.
        start: [n + 1], where the states of each node begin among all states of all nodes.
    """

    def __init__(self, problem: Problem):
        usages = [] if problem.limit is None else sorted(problem.usages, key=lambda u: u.node)
        self.limit = np.inf if problem.limit is None else problem.limit
        self.n_steps = max((u.hi for u in usages), default=0)
        self.start = np.cumsum([0, *map(len, problem.costs)])
        self.node = np.array([u.node for u in usages], dtype=np.int64)
        self.lo = np.array([u.lo for u in usages], dtype=np.int64)
        self.hi = np.array([u.hi for u in usages], dtype=np.int64)
        self.bytes = np.concatenate([u.bytes for u in usages]) if usages else np.zeros(0)
        size = np.array([len(u.bytes) for u in usages], dtype=np.int64)
        self.row = np.cumsum(size) - size  # where each usage's bytes begin
        self._usage_of = np.repeat(np.arange(len(usages)), size)
        self._first = np.searchsorted(self.node, np.arange(len(problem.costs) + 1))
        largest = np.array([u.bytes.max() for u in usages])
        change = np.bincount(self.lo, largest, self.n_steps + 1) - np.bincount(self.hi, largest, self.n_steps + 1)
        self.most = float(np.cumsum(change).max(initial=0.0))
        self._state_of = np.arange(len(self.bytes)) - self.row[self._usage_of] + self.start[self.node[self._usage_of]]

    def usages_of(self, i: int) -> tuple[int, int]:
        """First and last (exclusive) usage of a node."""
        return int(self._first[i]), int(self._first[i + 1])

    def held(self, step: int) -> np.ndarray:
        """Bytes that every state of every node holds at one step, [states of all nodes]."""
        there = ((self.lo <= step) & (step < self.hi))[self._usage_of]
        return np.bincount(self._state_of[there], self.bytes[there], self.start[-1])

    def profile(self, states: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes at every step, [T]."""
        held = self.bytes[self.row + np.asarray(states)[self.node]] if len(self.node) else self.bytes
        change = np.bincount(self.lo, held, self.n_steps + 1) - np.bincount(self.hi, held, self.n_steps + 1)
        return np.cumsum(change)[: self.n_steps]

    def peak(self, states: Sequence[int] | np.ndarray) -> float:
        return float(self.profile(states).max(initial=0.0))

    def fits(self, states: Sequence[int] | np.ndarray) -> bool:
        return self.peak(states) <= self.limit

    def penalty(self, prices: np.ndarray, grain: float = 1.0) -> list[np.ndarray]:
        """What the prices [T] add to every node's costs, [k_i] each; bytes are rounded down to multiples of `grain`."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        per_byte = paid[self.hi] - paid[self.lo]
        held = self.bytes if grain == 1.0 else self.bytes // grain * grain
        flat = np.bincount(self._state_of, held * per_byte[self._usage_of], self.start[-1])
        return [flat[a:b] for a, b in pairwise(self.start)]

    def peaks(self, profile: np.ndarray, above: float) -> np.ndarray:
        """The highest step of every stretch of steps above a level."""
        over = np.concatenate([[False], profile > above, [False]])
        first, last = np.flatnonzero(over[1:] & ~over[:-1]), np.flatnonzero(over[:-1] & ~over[1:])
        return np.array([a + int(profile[a:b].argmax()) for a, b in zip(first, last, strict=True)], dtype=np.int64)
