"""Reduced-cost fixing (5): a lower bound of the problem, and the states and pairs of states that no better answer takes.

Pairs are fixed long before all pairs of a state are; and where a state of one node leaves a single state of the other, presolve
aggregates the follower. Also known as variable fixing by Lagrangian bounds; cost-based filtering (Focacci, Lodi and Milano, CP 1999).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem
from shardplan.ilp.solver.relax.dual import DualPoint, Relaxation, maximize_dual
from shardplan.ilp.solver.settings import DEFAULT, Settings

SPARSE = 0.5  # a bound ends once fixing leaves this share of the entries that TRW-S visits: it is cheaper on the rest


@dataclass(frozen=True)
class Bound:
    """A lower bound of a problem and what it fixes."""

    problem: Problem
    points: tuple[DualPoint, ...]  # all points of the dual that were evaluated
    work: float  # table entries visited
    messages: Messages  # of TRW-S, to start the next bound from; none if it was not needed

    @functools.cached_property
    def best(self) -> DualPoint:
        """The point of the highest value."""
        return max(self.points, key=lambda point: point.value)

    @property
    def value(self) -> float:
        """A lower bound of (1) under (2) and (3)."""
        return self.best.value

    @functools.cached_property
    def min_marginals(self) -> list[np.ndarray]:
        """Left side of (5) for every state of every node, [k_i] each: the greatest over all prices."""
        last = {point.prices.tobytes(): point for point in self.points}  # of points at the same prices the last had most rounds
        rows = [point.min_marginals() for point in last.values()]
        return [np.maximum.reduce(row) for row in zip(*rows, strict=True)]

    def surviving_states(self, cutoff: float) -> list[np.ndarray]:
        """Masks of the states that answers of at most this cost may take, [k_i] each."""
        return [marginal <= cutoff for marginal in self.min_marginals]

    def reduced_cost_fixing(self, problem: Problem, cutoff: float, surviving: list[np.ndarray] | None = None) -> Problem:
        """The problem with every state and pair of states forbidden that (5) excludes, and those that `surviving` leaves out.

        `problem` is the bounded one, or that one without its limit if no byte had a price.
        """
        surviving = self.surviving_states(cutoff) if surviving is None else surviving
        costs = tuple(np.where(mask, cost, np.inf) for mask, cost in zip(surviving, problem.costs, strict=True))
        edges = list(problem.edges)
        for number, marginal in self.best.elimination_pass.pair_min_marginals():
            e = edges[number]
            fixed = marginal - self.best.limit_cost > cutoff
            if fixed[np.ix_(surviving[e.i], surviving[e.j])].any():
                edges[number] = e._replace(cost=np.where(fixed, np.inf, e.cost))
        return replace(problem, costs=costs, edges=tuple(edges))


def bound(
    problem: Problem,
    cutoff: float,
    max_entries: int,
    changes: int,
    start: np.ndarray | None = None,
    messages: Messages | None = None,
    deadline: Deadline = UNLIMITED,
    settings: Settings = DEFAULT,
) -> Bound:
    """Bounds a problem until the bound exceeds `cutoff`, the greatest cost of a wanted answer, or the deadline is over.

    Bucket tables have at most `max_entries`; prices begin at `start` [T] and change at most `changes` times, TRW-S begins with
    `messages`.
    """
    relaxation = Relaxation(problem, max_entries, messages, deadline, settings)
    reach = max((float(c[np.isfinite(c)].max(initial=0.0)) for c in problem.costs), default=1.0) + 1.0
    points: list[DualPoint] = []

    def sparse(point: DualPoint) -> bool:
        if relaxation.trws is None or point.prices.any() or not np.isfinite(cutoff):
            return False
        left = [int((marginal <= cutoff).sum()) for marginal in point.min_marginals()]
        return 2 * sum(left[e.i] * left[e.j] for e in problem.edges) <= SPARSE * relaxation.trws.entries

    for point in maximize_dual(relaxation, reach, changes=changes, start=start, cutoff=cutoff):
        points.append(point)
        if point.value > cutoff or deadline.over() or (len(points) > 1 and sparse(point)):
            break
    sent = {} if relaxation.trws is None else relaxation.trws.sent_messages()
    return Bound(problem, tuple(points), relaxation.work + 4 * relaxation.elimination.size, sent)
