"""What no answer can beat, and which states no better answer takes.

With prices p on bytes (prices.py), elimination gives L(p) <= optimum, and for every state the least priced cost of a choice
through it. A state whose priced cost is above the best answer's cost cannot be part of a better one:

    min over s with s_i = a of  (1)(s) + sum_t p_t (memory_t(s) - limit)  >  best answer        =>  drop a of node i     (5)

and the same holds for a pair of states of an edge. On real networks, where silly states cost orders of magnitude more, (5) with a good
answer deletes nearly everything, also when the elimination has to split joints. Pairs go long before all pairs of a state do, and where
a state of one node leaves a single one of the other, the other follows. What is left is shrunk again, and bounded again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem
from shardplan.ilp.solver.relax.dual import DualPoint, maximize_dual
from shardplan.ilp.solver.relax.relaxation import Relaxation
from shardplan.ilp.solver.usage import UsageTable

FEW = 0.5  # of the entries that a round of shifting visits: shifting on, where no byte has a price, is cheaper on what is left


@dataclass(frozen=True)
class Bound:
    """Outcome of one round.

    Attributes:
        problem: what was bounded.
        memory: its usages.
        best: the highest of the quotes; its value is a lower bound of (1) under (2)-(3).
        points: the priced choices met.
        work: table entries visited.
        messages: where shifting has got to.
    """

    problem: Problem
    memory: UsageTable
    best: DualPoint
    points: tuple[DualPoint, ...]
    work: float
    messages: Messages

    @property
    def value(self) -> float:
        return self.best.value

    @functools.cached_property
    def min_marginals(self) -> list[np.ndarray]:
        """Left side of (5) for every state of every node, the greatest over the prices met: heavy states show at high prices."""
        last = {point.prices.tobytes(): point for point in self.points}  # at the same prices, the one shifted longest
        rows = [point.min_marginals() for point in last.values()]
        return [np.maximum.reduce(row) for row in zip(*rows, strict=True)]

    def surviving_states(self, cutoff: float) -> list[np.ndarray]:
        """Masks of the states that answers of at most this cost may take."""
        return [min_marginals <= cutoff for min_marginals in self.min_marginals]

    def reduced_cost_fixing(self, problem: Problem, cutoff: float, kept: list[np.ndarray] | None = None) -> Problem:
        """What (5) leaves for answers of at most this cost: all other states and pairs of states are forbidden.

        Args:
            problem: the one that was bounded, or that one without its limit if no byte had a price.
            kept: masks of states, of those that (5) leaves, by default all of these.
        """
        kept = self.surviving_states(cutoff) if kept is None else kept
        costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(kept, problem.costs, strict=True))
        edges = list(problem.edges)
        for number, least in self.best.elimination_pass.pairs():
            e = edges[number]
            gone = least - self.best.limit_cost > cutoff
            if gone[np.ix_(kept[e.i], kept[e.j])].any():
                edges[number] = replace(e, cost=np.where(gone, np.inf, e.cost))
        return replace(problem, costs=costs, edges=tuple(edges))


def bound(
    problem: Problem,
    cutoff: float,
    cap: int,
    rounds: int,
    start: np.ndarray | None = None,
    messages: Messages | None = None,
    deadline: Deadline = UNLIMITED,
) -> Bound:
    """A lower bound, and what is left of the problem for answers that cost at most `cutoff`.

    Args:
        worth: a better answer costs at most this much.
        cap: entries of a joint table.
        rounds: how often prices may be changed.
        start: prices to begin with.
        messages: of shifting, to begin with.
        deadline: no further round once it is over.
    """
    memory, relaxation = UsageTable(problem), Relaxation(problem, cap, messages, deadline)
    reach = max((float(c[np.isfinite(c)].max(initial=0.0)) for c in problem.costs), default=1.0) + 1.0
    points: list[DualPoint] = []

    def few(point: DualPoint) -> bool:
        if relaxation.trws is None or point.prices.any() or not np.isfinite(cutoff):
            return False
        left = [int((min_marginals <= cutoff).sum()) for min_marginals in point.min_marginals()]
        return 2 * sum(left[e.i] * left[e.j] for e in problem.edges) <= FEW * relaxation.trws.entries

    for point in maximize_dual(relaxation, memory, reach, rounds=rounds, start=start, cutoff=cutoff):
        points.append(point)
        if point.value > cutoff or deadline.over() or (len(points) > 1 and few(point)):
            break
    best = max(points, key=lambda point: point.value)
    return Bound(problem, memory, best, tuple(points), relaxation.work + 4 * relaxation.elimination.size, relaxation.messages())
