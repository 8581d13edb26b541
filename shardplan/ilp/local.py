"""Which single changes of state still pay: descent under the hard limit, deterministic, from any choice of states.

A move gives one node another state. It is taken when it lowers (1) and every step of (2) stays within the limit; from a
choice that breaks the limit, moves first lower the broken steps at the least cost per byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .memory import Memory
from .problem import Problem


class Neighbourhood:
    """A problem prepared for moves."""

    def __init__(self, problem: Problem, memory: Memory):
        self.problem, self.memory = problem, memory
        self.near: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.costs]
        for e in problem.edges:
            self.near[e.i].append((e.j, e.cost.T))
            self.near[e.j].append((e.i, e.cost))
        self.uses: list[list] = [[] for _ in problem.costs]
        for u in problem.usages:
            self.uses[u.node].append(u)

    def costs_at(self, i: int, states) -> np.ndarray:
        """(1)'s terms at node i for each of its states, the others as they are."""
        total = self.problem.costs[i]
        for j, table in self.near[i]:
            total = total + table[states[j]]
        return total

    def change(self, i: int, old: int, new: int, lo: int, hi: int) -> np.ndarray:
        """Bytes a move adds at the steps lo..hi."""
        delta = np.zeros(hi - lo)
        for u in self.uses[i]:
            delta[u.lo - lo : u.hi - lo] += u.bytes[new] - u.bytes[old]
        return delta

    def span(self, i: int) -> tuple[int, int]:
        return min((u.lo for u in self.uses[i]), default=0), max((u.hi for u in self.uses[i]), default=0)


def descend(around: Neighbourhood, states: Sequence[int]) -> tuple[int, ...]:
    """One-node moves until none pays; never breaks a limit that holds."""
    chosen, limit = list(states), around.memory.limit
    profile = around.memory.profile(chosen)
    todo = dict.fromkeys(range(len(chosen)))
    while todo:
        i = next(iter(todo))
        del todo[i]
        costs = around.costs_at(i, chosen)
        lo, hi = around.span(i)
        for s in np.argsort(costs, kind="stable"):
            if s == chosen[i] or not costs[s] < costs[chosen[i]]:
                break
            delta = around.change(i, chosen[i], int(s), lo, hi)
            after = profile[lo:hi] + delta
            if ((after <= limit) | (delta <= 0)).all():
                chosen[i], profile[lo:hi] = int(s), after
                todo |= dict.fromkeys(j for j, _ in around.near[i])
                break
    return tuple(chosen)


def repair(around: Neighbourhood, states: Sequence[int], limit: float, moves: int = 2_000) -> tuple[int, ...] | None:
    """Moves that bring the highest step down, least cost per byte first; None when they get stuck above the limit."""
    chosen, memory = list(states), around.memory
    profile = memory.profile(chosen)
    for _ in range(moves):
        step = int(profile.argmax()) if len(profile) else 0
        if not len(profile) or profile[step] <= limit:
            return tuple(chosen)
        best: tuple | None = None
        for i in sorted({u.node for u in around.problem.usages if u.lo <= step < u.hi}):
            costs = around.costs_at(i, chosen)
            lo, hi = around.span(i)
            held = [u.bytes for u in around.uses[i] if u.lo <= step < u.hi]
            saved = np.sum([b[chosen[i]] - b for b in held], axis=0) if held else np.zeros(len(costs))
            for s in np.flatnonzero((saved > 0) & np.isfinite(costs)):
                price = (costs[s] - costs[chosen[i]]) / min(saved[s], profile[step] - limit)
                if best is None or price < best[0]:
                    after = profile[lo:hi] + around.change(i, chosen[i], int(s), lo, hi)
                    if after.max() < profile[step] or lo == hi:
                        best = (price, i, int(s), lo, hi, after)
        if best is None:
            return None
        _, i, s, lo, hi, after = best
        chosen[i], profile[lo:hi] = s, after
    return None
