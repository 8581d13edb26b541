"""Sharding propagation: which state each node takes when its neighbours have taken theirs.

Pinned nodes have one state. From there breadth first over producers and consumers, a node takes the state that adds the least cost:
its own and that of the edges to every neighbour that has one. Where pins leave it open, the propagation starts at the node with the
most neighbours (in a transformer the residual stream), once from each of its states. Then sweeps over all nodes choose each state
again, given all neighbours, until nothing changes.

Also known as iterated conditional modes (the sweeps) and, in MindSpore, as sharding propagation, where the first visitor decides once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Problem, Solution

SWEEPS = 12
"""Most sweeps over all nodes."""


def propagate(problem: Problem, presolved: Presolved | None = None) -> Solution:
    """States of every node, in time linear in the size of the network.

    Args:
        problem: the network; followers are merged and repeated layers tied before the propagation.
        presolved: `presolve(problem, tie=True)`, if it is there already.

    Returns:
        "feasible" with the cheapest propagation that fits the limit, or that of least peak if none does; "infeasible" without states
        if the pins contradict each other. The bound is the trivial one, 0.
    """
    presolved = presolved or presolve(problem, tie=True)
    best: tuple[tuple, tuple[int, ...]] | None = None
    if presolved.feasible:
        adjacency = _Adjacency(presolved.problem.costs, presolved.problem.flat.near)
        for start in adjacency.starts():
            states = presolved.invert(adjacency.propagate(start))
            excess = max(0.0, problem.peak(states) - problem.limit) if problem.limit is not None else 0.0
            rank = (excess, problem.objective(states))
            if np.isfinite(rank[1]) and (best is None or rank < best[0]):
                best = rank, states
    if best is None:
        return Solution("infeasible", (), np.inf, 0.0, tied=presolved.tied)
    return Solution("feasible", best[1], best[0][1], 0.0, tied=presolved.tied)


@dataclass(frozen=True, eq=False)
class _Adjacency:
    """Node costs [k], and per node its (neighbour, edge cost [k, k_neighbour])."""

    costs: tuple[np.ndarray, ...]
    near: list[list[tuple[int, np.ndarray]]]

    def starts(self) -> list[tuple[int, int]]:
        """(node, state) to begin with."""
        if not self.costs:
            return [(-1, 0)]
        open_ = [i for i, c in enumerate(self.costs) if len(c) > 1] or [0]
        busiest = max(open_, key=lambda i: (len(self.near[i]), -i))
        return [(busiest, int(s)) for s in np.flatnonzero(np.isfinite(self.costs[busiest]))]

    def propagate(self, start: tuple[int, int]) -> tuple[int, ...]:
        """States of all nodes, from a node and its state."""
        n = len(self.costs)
        states = np.full(n, -1, dtype=np.int64)
        for root in (start[0], *range(n)):
            if root < 0 or states[root] >= 0:
                continue
            states[root] = start[1] if root == start[0] else self.cheapest(root, states)
            queue = deque([root])
            while queue:
                for j, _ in self.near[queue.popleft()]:
                    if states[j] < 0:
                        states[j] = self.cheapest(j, states)
                        queue.append(j)
        for sweep in range(SWEEPS):
            changed = False
            for i in range(n) if sweep % 2 else reversed(range(n)):
                new = self.cheapest(i, states)
                changed |= new != states[i]
                states[i] = new
            if not changed:
                break
        return tuple(int(s) for s in states)

    def cheapest(self, i: int, states: np.ndarray) -> int:
        """The cheapest state of a node, given those of its neighbours; -1 stands for none yet."""
        cost = self.costs[i]
        for j, table in self.near[i]:
            if states[j] >= 0:
                cost = cost + table[:, states[j]]
        return int(cost.argmin())
