"""The search "propagation", states without a proof; and the states that every search starts from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.network import CostNetwork
from shardplan.costs.pins import allowed_strategies
from shardplan.costs.pricing import Pricing
from shardplan.costs.task import PlanningTask
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.propagation.propagate import propagate
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


def warm_start(
    task: PlanningTask, network: CostNetwork, presolved: Presolved, hint: tuple[int, ...], always_propagate: bool = False
) -> Solution:
    """The cheapest states known before a search: the plan before, the program's own constraints, or propagation.

    Args:
        task, network: what is searched.
        presolved: `presolve(network.problem, tie=True)`.
        hint: states of the plan before, or ().
        always_propagate: propagate even if `hint` fits.

    Returns:
        "feasible", without states if nothing is known. States that exceed the limit come from propagation only.
    """
    problem = network.problem
    known = [
        (problem.objective(states) if states and problem.fits(states) else np.inf, states)
        for states in (_constraint_states(task, network), hint)
    ]
    hinted = known[-1][0] < np.inf and not always_propagate
    start = Solution("feasible", (), np.inf, 0.0) if hinted else propagate(problem, presolved)
    for cost, states in known:
        if cost < start.objective:
            start = replace(start, states=states, objective=cost)
    return start


def _constraint_states(task: PlanningTask, network: CostNetwork) -> tuple[int, ...]:
    """States that meet the program's own constraints where these are hints; () where they are not."""
    if task.options.constraints != "hint":
        return ()
    key = limit, price = network.problem.limit, network.pricing.background_price
    if key not in task.constraint_states:
        allowed = allowed_strategies(task.space, options=replace(task.options, constraints="keep"))
        constrained = build_network(task.space, task.resharder, limit, allowed, pricing=Pricing(price))
        task.constraint_states[key] = propagate(constrained.problem).states
    return task.constraint_states[key]
