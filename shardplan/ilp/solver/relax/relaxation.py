"""The relaxation without the memory limit: a lower bound of (1) for any node costs, by TRW-S and bucket elimination."""

from __future__ import annotations

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Messages, Problem
from shardplan.ilp.solver.relax.buckets import BucketElimination, EliminationPass
from shardplan.ilp.solver.relax.trws import TRWS
from shardplan.ilp.solver.settings import DEFAULT, Settings

CALL_ENTRIES = 2_500.0
"""Table entries that the overhead of one array operation costs."""


class Relaxation:
    """A problem without (3), prepared for any node costs.

    Attributes:
        exact: values are minima, not only lower bounds of them.
        trws: reparametrizes the costs first; None if the elimination is exact.
        warm: TRW-S starts from messages of an earlier bound.
        total: upper bound of the absolute sum of one entry of each table.
        work: table entries visited so far.
    """

    def __init__(
        self,
        problem: Problem,
        max_entries: int,
        messages: Messages | None = None,
        deadline: Deadline = UNLIMITED,
        settings: Settings = DEFAULT,
    ):
        self.problem, self.settings = problem, settings
        self.elimination, self.warm = _elimination(problem, max_entries, deadline, settings), bool(messages)
        self.exact = self.elimination.exact
        self.trws = None if self.exact else TRWS(problem, messages=messages, deadline=deadline)
        self.total = sum(max(-low, high) for low, high in problem.finite_ranges) + 1.0
        self.work = 0.0

    def run(self, costs, rounds: int, unit: float) -> EliminationPass:
        """One elimination pass with node costs [k_i], after TRW-S if the elimination is not exact.

        Costs are, and messages are rounded to, multiples of `unit`, a power of two, which keeps sums exact.
        """
        self.work += self.elimination.size + 4 * CALL_ENTRIES * len(self.elimination.buckets)
        if self.trws is None:
            return self.elimination.run(costs)
        self.trws.iterate(costs, rounds)
        self.work += rounds * (self.trws.entries + 4 * CALL_ENTRIES * len(self.problem.edges))
        return self.elimination.run(*self.trws.commit(costs, unit))

    def messages(self) -> Messages:
        """The messages of TRW-S; none if it was not needed."""
        return {} if self.trws is None else self.trws.sent_messages()


def _elimination(problem: Problem, max_entries: int, deadline: Deadline, settings: Settings) -> BucketElimination:
    """Exact elimination of a small problem, if cheap; else mini-buckets, smaller ones where all tables would exceed their total."""
    if problem.n_states <= settings.exact_states:
        exact = BucketElimination(problem, int(settings.exact_entries), deadline)
        if exact.exact and exact.size <= settings.exact_entries:
            return exact
    while (elimination := BucketElimination(problem, max_entries, deadline)).size > settings.total_entries and max_entries > 1:
        max_entries //= 4
    return elimination
