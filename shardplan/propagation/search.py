"""The search "propagation": states by sharding propagation, no proof."""

from __future__ import annotations

from shardplan.costs.network import CostNetwork
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.propagation.warm_start import warm_start
from shardplan.search.protocol import Search, time_left


class Propagation(Search):
    """Search "propagation"."""

    def search(self, network: CostNetwork, hint: tuple[int, ...], cutoff: float, deadline: Deadline) -> Solution:
        """Propagated states; the integer program's where those exceed the memory limit."""
        problem = network.problem
        start = warm_start(self.task, network, presolve(problem, tie=True), hint, always_propagate=True)
        self.task.stopwatch.lap("propagation")
        if not start.states or problem.fits(start.states):
            return start
        return solve(problem, hint=start.states, time_limit=time_left(deadline))
