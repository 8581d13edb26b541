"""Which strategy each op takes when its neighbours have taken theirs: sharding propagation.

From the pinned ops (or the batch) outwards over producers and consumers, breadth first: an op takes the strategy that adds the
fewest seconds, counting its compute and the reshards to every neighbour that has already chosen. Then sweeps over all ops, there
and back, re-choose each one given all its neighbours until nothing changes: the first visitor does not win for ever.

MindSpore calls this sharding propagation; there an op chosen once stays chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from shardplan.ilp.problem import Problem, Solution

SWEEPS = 8


def propagate(problem: Problem, seeds: Sequence[int]) -> Solution:
    """Choose a state for every node.

    Args:
        problem: the network; its memory limit is not looked at.
        seeds: nodes to start from, in order. A seed starts at its cheapest state, and among equals at the most split one
            (least bytes), which for the batch means data parallel.

    Returns:
        status "feasible" with the trivial bound, or "infeasible" states removed by infinite costs were unavoidable.
    """
    n = len(problem.costs)
    near: list[list[tuple[int, np.ndarray, bool]]] = [[] for _ in range(n)]
    for e in problem.edges:
        near[e.i].append((e.j, e.cost, False))
        near[e.j].append((e.i, e.cost, True))
    held = [np.zeros(len(c)) for c in problem.costs]
    for u in problem.usages:
        held[u.node] = held[u.node] + u.bytes

    states = np.full(n, -1, dtype=np.int64)

    def choose(i: int) -> int:
        cost = problem.costs[i]
        for j, table, flipped in near[i]:
            if states[j] >= 0:
                cost = cost + (table[states[j]] if flipped else table[:, states[j]])
        best = np.flatnonzero(cost == cost.min())
        return int(best[np.argmin(held[i][best])]) if len(best) > 1 else int(best[0])

    for root in (*seeds, *range(n)):
        if states[root] >= 0:
            continue
        states[root] = choose(root)
        queue = deque([root])
        while queue:
            for j, _, _ in near[queue.popleft()]:
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
    answer = tuple(int(s) for s in states)
    return Solution("feasible", answer, problem.objective(answer), 0.0)


