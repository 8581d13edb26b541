"""Memory of a choice at every time step, and the Lagrangian penalty (4) that prices on bytes add to the cost of a state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardplan.ilp.solver.problem import Problem


class UsageTable:
    """The usages of a problem as flat arrays, sorted by node; empty without a limit.

    Attributes:
        n_steps: T, one more than the last time step.
        max_bytes: upper bound of the bytes of any choice at any step.
        start: [n + 1], first state of each node in the row of all nodes' states.
        node, lo, hi, row: [usages], each usage's node, interval and first entry in `bytes`.
        bytes: bytes per state of all usages in a row.
    """

    def __init__(self, problem: Problem):
        usages = [] if problem.limit is None else sorted(problem.usages, key=lambda u: u.node)
        self.limit = np.inf if problem.limit is None else problem.limit
        self.n_steps = max((u.hi for u in usages), default=0)
        self.start = np.cumsum([0, *map(len, problem.costs)])
        self.node, self.lo, self.hi = (np.array([getattr(u, name) for u in usages], dtype=np.int64) for name in ("node", "lo", "hi"))
        self.bytes = np.concatenate([u.bytes for u in usages]) if usages else np.zeros(0)
        size = np.array([len(u.bytes) for u in usages], dtype=np.int64)
        self.row = np.cumsum(size) - size
        self._usage_of = np.repeat(np.arange(len(usages)), size)
        self._first = np.searchsorted(self.node, np.arange(len(problem.costs) + 1))
        self.max_bytes = float(self._at_steps(slice(None), np.array([u.bytes.max() for u in usages])).max(initial=0.0))
        self._state_of = np.arange(len(self.bytes)) - self.row[self._usage_of] + self.start[self.node[self._usage_of]]

    def _at_steps(self, usages: slice, amounts: np.ndarray) -> np.ndarray:
        """Bytes at every step, [T], if each of these usages holds its amount."""
        n = self.n_steps + 1
        return np.cumsum(np.bincount(self.lo[usages], amounts, n) - np.bincount(self.hi[usages], amounts, n))[: self.n_steps]

    def bytes_at(self, step: int) -> np.ndarray:
        """Bytes that every state of every node holds at one step, [states of all nodes]."""
        there = ((self.lo <= step) & (step < self.hi))[self._usage_of]
        return np.bincount(self._state_of[there], self.bytes[there], self.start[-1])

    def profile(self, states: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bytes at every step, [T]."""
        return self._at_steps(slice(None), self.bytes[self.row + np.asarray(states)[self.node]] if len(self.node) else self.bytes)

    def profile_change(self, i: int, old: int, new: int) -> np.ndarray:
        """What node i's move from state `old` to `new` adds to the bytes at every step, [T]."""
        usages = slice(self._first[i], self._first[i + 1])
        return self._at_steps(usages, self.bytes[self.row[usages] + new] - self.bytes[self.row[usages] + old])

    def peak(self, states: Sequence[int] | np.ndarray) -> float:
        """Bytes at the highest step."""
        return float(self.profile(states).max(initial=0.0))

    def penalty(self, prices: np.ndarray, quantum: float = 1.0) -> list[np.ndarray]:
        """Sum over lo <= t < hi of p_t u_i[s], of every node's states, [k_i] each; bytes are rounded down to multiples of `quantum`."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        per_byte = paid[self.hi] - paid[self.lo]
        held = self.bytes if quantum == 1.0 else self.bytes // quantum * quantum
        flat = np.bincount(self._state_of, held * per_byte[self._usage_of], self.start[-1])
        return [flat[a:b] for a, b in pairwise(self.start)]


def local_peaks(profile: np.ndarray, level: float) -> np.ndarray:
    """The highest step of every maximal run of steps above a level."""
    above = np.concatenate([[False], profile > level, [False]])
    first, last = np.flatnonzero(above[1:] & ~above[:-1]), np.flatnonzero(above[:-1] & ~above[1:])
    return np.array([a + int(profile[a:b].argmax()) for a, b in zip(first, last, strict=True)], dtype=np.int64)
