"""Which strategy each op takes when its neighbours have taken theirs: sharding propagation.

What the user pinned is already decided. From there outwards over producers and consumers, breadth first, an op takes the strategy
that adds the fewest seconds: its compute and the reshards to every neighbour that has chosen. Where pins leave it open, the
propagation starts at the array with the most neighbours (in a transformer the residual stream) and is tried once from each
layout of it. Then sweeps over all ops choose each one again, given all its neighbours, until nothing changes.

MindSpore calls this sharding propagation; there the first visitor decides, once.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Problem, Solution

SWEEPS = 12


def propagate(problem: Problem, presolved: Presolved | None = None) -> Solution:
    """Choose a state for every node, linear in the size of the network.

    Args:
        problem: the network; followers are merged and repeated layers tied before the propagation.
        small: `presolve(problem, tie=True)`, if that is there already.

    Returns:
        "feasible" with the cheapest propagation that fits the limit, or the one with the least peak when none does;
        "infeasible" with no states when the pins contradict each other. The bound is the trivial one, 0.
    """
    presolved = presolved or presolve(problem, tie=True)
    best: tuple[tuple, tuple[int, ...]] | None = None
    if presolved.feasible:
        network = _Network(presolved.problem)
        for start in network.starts():
            states = presolved.invert(network.propagate(start))
            over = max(0.0, problem.peak(states) - problem.limit) if problem.limit is not None else 0.0
            rank = (over, problem.objective(states))
            if np.isfinite(rank[1]) and (best is None or rank < best[0]):
                best = rank, states
    if best is None:
        return Solution("infeasible", (), np.inf, 0.0, tied=presolved.tied)
    return Solution("feasible", best[1], best[0][1], 0.0, tied=presolved.tied)


class _Network:
    def __init__(self, problem: Problem):
        self.costs = problem.costs
        self.near = problem.flat.near

    def starts(self) -> list[tuple[int, int]]:
        """(node, state) to begin with."""
        if not self.costs:
            return [(-1, 0)]
        open_ = [i for i, c in enumerate(self.costs) if len(c) > 1] or [0]
        busiest = max(open_, key=lambda i: (len(self.near[i]), -i))
        return [(busiest, int(s)) for s in np.flatnonzero(np.isfinite(self.costs[busiest]))]

    def propagate(self, start: tuple[int, int]) -> tuple[int, ...]:
        n = len(self.costs)
        states = np.full(n, -1, dtype=np.int64)

        def choose(i: int) -> int:
            cost = self.costs[i]
            for j, table in self.near[i]:
                if states[j] >= 0:
                    cost = cost + table[:, states[j]]
            return int(cost.argmin())

        for root in (start[0], *range(n)):
            if root < 0 or states[root] >= 0:
                continue
            states[root] = start[1] if root == start[0] else choose(root)
            queue = deque([root])
            while queue:
                for j, _ in self.near[queue.popleft()]:
                    if states[j] < 0:
                        states[j] = choose(j)
                        queue.append(j)
        for sweep in range(SWEEPS):
            changed = False
            for i in range(n) if sweep % 2 else reversed(range(n)):
                new = choose(i)
                changed |= new != states[i]
                states[i] = new
            if not changed:
                break
        return tuple(int(s) for s in states)
