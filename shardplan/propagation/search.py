"""Sharding propagation: which state each node takes when its neighbours have taken theirs.

Pinned nodes have one state. From there breadth first over producers and consumers, a node takes the state that adds the least cost:
its own and that of the edges to every neighbour that has one. Where pins leave it open, the propagation starts at the node with the
most neighbours (in a transformer the residual stream), once from each of its states. Then sweeps over all nodes choose each state
again, given all neighbours, until nothing changes.

Also known as iterated conditional modes (the sweeps) and, in MindSpore, as sharding propagation, where the first visitor decides once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from shardplan.costs.build import build_network
from shardplan.costs.network import CostNetwork
from shardplan.costs.pins import hinted_strategies
from shardplan.costs.pricing import Pricing
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.presolve.presolve import Presolved, presolve
from shardplan.ilp.solver.problem import Problem, Solution
from shardplan.search.objective import Candidates
from shardplan.search.protocol import Search, time_left

SWEEPS = 12
"""Most sweeps over all nodes."""


class Propagation(Search):
    """Search "propagation"."""

    def search(self, network: CostNetwork, hint: tuple[int, ...], deadline: Deadline) -> Solution:
        """Propagated states; the integer program's where those exceed the memory limit."""
        problem = network.problem
        self.task.stopwatch.lap("network")
        start = warm_start(self.task, network, presolve(problem, tie=True), hint, always_propagate=True)
        self.task.stopwatch.lap("propagation")
        if not start.found or problem.fits(start.states):
            return start
        return solve(problem, hint=start.states, time_limit=time_left(deadline))

    def candidates(self, limit: float | None, deadline: Deadline) -> Candidates:
        """The propagated plan of the first network: one pricing, one answer."""
        found = Candidates.none(self.task, limit)
        if (plan := self.first(limit, deadline)).solution.found:
            found.add(plan)
        return found

    def first(self, limit: float | None, deadline: Deadline) -> Candidate:
        """The first network and its propagated states."""
        network = self.task.network(Pricing(self.task.interference), limit)
        return Candidate(network, self.search(network, (), deadline))


def warm_start(
    task: PlanningTask, network: CostNetwork, presolved: Presolved, hint: tuple[int, ...], always_propagate: bool = False
) -> Solution:
    """The cheapest states known before a search: `hint`, those of the plan before or (); the program's own constraints; or propagation.

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
        allowed = hinted_strategies(task.space, options=task.options)
        constrained = build_network(task.space, task.resharder, limit, allowed, pricing=Pricing(price))
        task.constraint_states[key] = propagate(constrained.problem).states
    return task.constraint_states[key]


def propagate(problem: Problem, presolved: Presolved | None = None) -> Solution:
    """States of every node, in time linear in the size of the network.

    Args:
        problem: the network.
        presolved: `presolve(problem, tie=True)`, if it is there already.

    Returns:
        "feasible" with the cheapest propagation that fits the limit, or that of least peak if none does; "infeasible" without states
        if the pins contradict each other. The bound is the trivial one, 0.
    """
    presolved = presolved or presolve(problem, tie=True)
    best: tuple[tuple, list[int]] | None = None
    for root, state in _starts(presolved.problem) if presolved.feasible else ():
        states = _from(presolved.problem, root, state)
        excess = max(0.0, problem.peak(presolved.invert(states)) - problem.limit) if problem.limit is not None else 0.0
        rank = (excess, presolved.problem.objective(states) + presolved.offset)  # costs are whole, so the same as of `problem`
        if np.isfinite(rank[1]) and (best is None or rank < best[0]):
            best = rank, states
    if best is None:
        return Solution("infeasible", (), np.inf, 0.0, tied=presolved.tied)
    return Solution("feasible", presolved.invert(best[1]), best[0][1], 0.0, tied=presolved.tied)


def _starts(problem: Problem) -> list[tuple[int, int]]:
    """(node, state) to begin with."""
    if not (costs := problem.costs):
        return [(-1, 0)]
    undecided = [i for i, c in enumerate(costs) if len(c) > 1] or [0]
    busiest = max(undecided, key=lambda i: (len(problem.flat.near[i]), -i))
    return [(busiest, int(s)) for s in np.flatnonzero(np.isfinite(costs[busiest]))]


def _from(problem: Problem, root: int, state: int) -> list[int]:
    """States of all nodes, from a root in a state."""
    costs, near = problem.costs, problem.flat.near
    states = np.full(len(costs), -1, dtype=np.int64)  # -1: none yet

    def cheapest(i: int) -> int:
        cost = costs[i]
        for j, table in near[i]:
            if states[j] >= 0:
                cost = cost + table[:, states[j]]
        return int(cost.argmin())

    for node in (root, *range(len(costs))):
        if node < 0 or states[node] >= 0:
            continue
        states[node] = state if node == root else cheapest(node)
        queue = deque([node])
        while queue:
            for j, _ in near[queue.popleft()]:
                if states[j] < 0:
                    states[j] = cheapest(j)
                    queue.append(j)
    for sweep in range(SWEEPS):
        before = states.copy()
        for i in range(len(costs)) if sweep % 2 else reversed(range(len(costs))):
            states[i] = cheapest(i)
        if np.array_equal(before, states):
            break
    return states.tolist()
