"""The memory limit in presolve: removes redundant time steps, and states that fit at no choice of the other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.presolve.reductions import CHECK_EVERY, sum_by_key
from shardplan.ilp.solver.problem import Problem, Usage, sum_over_intervals


def peak_steps(usages: Sequence[Usage]) -> np.ndarray:
    """The time steps whose constraints (3) imply all others: the last start before an end. [steps], rising."""
    if not usages:
        return np.zeros(0, dtype=np.int64)
    starts = np.unique([u.lo for u in usages])
    if any(u.min_bytes < 0 for u in usages):  # negative bytes: every start and end counts
        return np.unique(np.concatenate([starts, [u.hi for u in usages]]))
    ends = np.unique([u.hi for u in usages])
    return starts[np.unique(np.searchsorted(starts, ends) - 1)]


class _ByteChange:
    """Change of every node's bytes from one step to another: per state [k], with its least and greatest entry, and their sums."""

    def __init__(self):
        self.of_node: dict[int, tuple[np.ndarray, float, float]] = {}
        self.low = self.high = 0.0

    def add(self, i: int, amount: np.ndarray, low: float, high: float) -> None:
        if i in self.of_node:
            before, old_low, old_high = self.of_node[i]
            self.low, self.high = self.low - old_low, self.high - old_high
            amount = before + amount
            low, high = float(amount.min()), float(amount.max())
        self.of_node[i] = amount, low, high
        self.low, self.high = self.low + low, self.high + high

    def then(self, later: _ByteChange) -> _ByteChange:
        """This change followed by a later one; one of the two is changed in place."""
        small, large = sorted((self, later), key=lambda c: len(c.of_node))
        for i, change in small.of_node.items():
            large.add(i, *change)
        return large


def irredundant_steps(usages: Sequence[Usage], lo: np.ndarray, hi: np.ndarray, n_steps: int, deadline: Deadline) -> np.ndarray:
    """Mask [n_steps] of the steps where some choice holds more bytes than at both remaining neighboring steps.

    `lo` and `hi` number the first step of each usage, and the one after its last.
    """
    events: list[list[tuple[int, np.ndarray, float, float]]] = [[] for _ in range(n_steps + 1)]
    for number, (u, a, b) in enumerate(zip(usages, lo.tolist(), hi.tolist(), strict=True)):
        if number % CHECK_EVERY == 0:
            deadline.check()
        events[a].append((u.node, u.bytes, u.min_bytes, u.max_bytes))
        events[b].append((u.node, -u.bytes, -u.max_bytes, -u.min_bytes))
    remaining: list[tuple[int, _ByteChange]] = []  # each with the change since the one before
    since = _ByteChange()
    for t in range(n_steps):
        deadline.check()
        for change in events[t]:
            since.add(*change)
        while remaining and since.low >= 0:
            since = remaining.pop()[1].then(since)
        if not remaining or since.high > 0:
            remaining.append((t, since))
            since = _ByteChange()
    mask = np.zeros(n_steps, dtype=bool)
    mask[[t for t, _ in remaining]] = True
    return mask


def remove_redundant_steps(problem: Problem, deadline: Deadline = UNLIMITED) -> tuple[Problem, np.ndarray]:
    """The problem with time renumbered to the steps at which the limit can be exceeded and that no other step implies.

    Also returns these in the old numbers. If there are none, the problem has no limit.
    """
    usages = [u for u in problem.usages if u.hi > u.lo]
    if problem.limit is None or not usages:
        return replace(problem, usages=(), limit=None), np.zeros(0, dtype=np.int64)
    deadline.check()
    steps = peak_steps(usages)
    lo, hi = (np.searchsorted(steps, [getattr(u, side) for u in usages]) for side in ("lo", "hi"))
    upper = np.zeros(len(steps) + 1)
    np.add.at(upper, lo, [u.max_bytes for u in usages])
    np.add.at(upper, hi, [-u.max_bytes for u in usages])
    remaining = np.cumsum(upper)[:-1] > problem.limit
    if all((u.bytes == np.rint(u.bytes)).all() for u in usages):  # sums of fractions are not exact
        remaining &= irredundant_steps(usages, lo, hi, len(steps), deadline)
    deadline.check()
    number = np.concatenate([[0], np.cumsum(remaining)])
    merged = sum_by_key(
        (u.node, (int(number[a]), int(number[b])), u.bytes)
        for u, a, b in zip(usages, lo, hi, strict=True)
        if number[b] > number[a] and u.bytes.any()
    )
    usages = tuple(Usage(i, a, b, amount) for (i, (a, b)), amount in merged.items())
    return replace(problem, usages=usages, limit=problem.limit if merged else None), steps[remaining]


def capacity_masks(problem: Problem) -> dict[int, np.ndarray]:
    """Masks of the states that fit with every other usage at its least bytes, of the nodes where some do not."""
    if problem.limit is None or np.isneginf(problem.limit):
        return {}
    slack = np.append(problem.limit - sum_over_intervals((u.lo, u.hi, u.min_bytes) for u in problem.usages), np.inf)
    least_slack = np.minimum.reduceat(slack, [t for u in problem.usages for t in (u.lo, u.hi)])[::2]
    masks: dict[int, np.ndarray | None] = dict.fromkeys(u.node for u in problem.usages)
    for u, room in zip(problem.usages, least_slack.tolist(), strict=True):
        if u.max_bytes - u.min_bytes > room:
            fits, before = u.bytes - u.min_bytes <= room, masks[u.node]
            masks[u.node] = fits if before is None else before & fits
    return {i: mask for i, mask in masks.items() if mask is not None}
