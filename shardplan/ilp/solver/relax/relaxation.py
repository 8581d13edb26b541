"""What the network costs at least, for any node costs: elimination, on shifted costs where joints have to be split."""

from __future__ import annotations

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Problem
from shardplan.ilp.solver.relax.buckets import Elimination, Pass
from shardplan.ilp.solver.relax.trws import Messages, Shift

SMALL, EXACT = 2_000, 2e6  # states up to which, and entries of all joint tables up to which no joint is split
ROOM = 4e7  # entries of all joint tables, at most: a bound keeps what some ten sweeps send between these, up to a gigabyte
CALL = 2_500.0  # table entries that the overhead of an array operation is worth


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
        self.shift = None if self.exact else Shift(problem, messages=messages, deadline=deadline)
        self.total = sum(max(-low, high) for low, high in problem.ranges) + 1.0
        self.work = 0.0

    def run(self, costs, rounds: int, unit: float) -> Pass:
        """Elimination after so many rounds of shifting.

        Args:
            costs: node costs, multiples of `unit`.
            unit: a power of two; messages become multiples of it, which keeps the sums exact.
        """
        self.work += self.elimination.size + 4 * CALL * len(self.elimination.buckets)
        if self.shift is None:
            return self.elimination.run(costs)
        self.shift.rounds(costs, rounds)
        self.work += rounds * (self.shift.entries + 4 * CALL * len(self.problem.edges))
        return self.elimination.run(*self.shift.shifted(costs, unit))

    def messages(self) -> Messages:
        """Where shifting has got to."""
        return {} if self.shift is None else self.shift.told()


def _elimination(problem: Problem, cap: int, deadline: Deadline) -> Elimination:
    """Without split joints where that is little work; else with joints of at most `cap` entries, fewer if all take too much room."""
    if problem.n_states <= SMALL:
        whole = Elimination(problem, int(EXACT), deadline)
        if whole.exact and whole.size <= EXACT:
            return whole
    while (split := Elimination(problem, cap, deadline)).size > ROOM and cap > 1:
        cap //= 4
    return split
