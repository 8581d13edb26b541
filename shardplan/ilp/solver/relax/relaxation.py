"""What the network costs at least, for any node costs: elimination, on shifted costs where joints have to be split."""

from __future__ import annotations

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem
from shardplan.ilp.solver.relax.buckets import BucketElimination, EliminationPass
from shardplan.ilp.solver.relax.trws import TRWS, Messages

EXACT_STATES, EXACT_ENTRIES = 2_000, 2e6  # states up to which, and entries of all joint tables up to which no joint is split
MAX_TABLE_ENTRIES = 4e7  # entries of all joint tables, at most: a bound keeps what some ten sweeps send between these, up to a gigabyte
CALL_ENTRIES = 2_500.0  # table entries that the overhead of an array operation is worth


class Relaxation:
    """A problem without (2), prepared for any node costs.

    Attributes:
        exact: values are optima, not only lower bounds of them.
        warm: shifting begins with messages from before.
        total: no sum of entries, one of each table, is larger.
        work: table entries visited so far.
    """

    def __init__(self, problem: Problem, cap: int, messages: Messages | None = None, deadline: Deadline = UNLIMITED):
        self.problem = problem
        self.elimination, self.warm = _elimination(problem, cap, deadline), bool(messages)
        self.exact = self.elimination.exact
        self.trws = None if self.exact else TRWS(problem, messages=messages, deadline=deadline)
        self.total = sum(max(-low, high) for low, high in problem.finite_ranges) + 1.0
        self.work = 0.0

    def run(self, costs, rounds: int, unit: float) -> EliminationPass:
        """Elimination after so many rounds of shifting.

        Args:
            costs: node costs, multiples of `unit`.
            unit: a power of two; messages become multiples of it, which keeps the sums exact.
        """
        self.work += self.elimination.size + 4 * CALL_ENTRIES * len(self.elimination.buckets)
        if self.trws is None:
            return self.elimination.run(costs)
        self.trws.iterate(costs, rounds)
        self.work += rounds * (self.trws.entries + 4 * CALL_ENTRIES * len(self.problem.edges))
        return self.elimination.run(*self.trws.commit(costs, unit))

    def messages(self) -> Messages:
        """Where shifting has got to."""
        return {} if self.trws is None else self.trws.sent_messages()


def _elimination(problem: Problem, cap: int, deadline: Deadline) -> BucketElimination:
    """Without split joints where that is little work; else with joints of at most `cap` entries, fewer if all take too much room."""
    if problem.n_states <= EXACT_STATES:
        whole = BucketElimination(problem, int(EXACT_ENTRIES), deadline)
        if whole.exact and whole.size <= EXACT_ENTRIES:
            return whole
    while (split := BucketElimination(problem, cap, deadline)).size > MAX_TABLE_ENTRIES and cap > 1:
        cap //= 4
    return split
