"""The search "ilp": states of least cost by the integer program; plans of all other searches are candidates, too.

    1 pricing loop      networks at what the last plan combines (`search/slope_scaling.py`)
    2 other searches    propagation, axis by axis, and step 1 on coarser meshes, whose plans are judged on all axes
    3 once more         step 1 from what the best plan combines, if step 2 found that
    4 schedules         networks at what the best plans combine and at the overlap windows of their schedules
                        (`costs/schedule_windows.py`), as long as that finds better plans

Every plan on the way is judged by the objective (`search/objective.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing
from shardplan.costs.schedule_windows import schedule_windows
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.errors import ShardingError
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.propagation.axis_by_axis import axis_by_axis
from shardplan.propagation.search import Propagation, warm_start
from shardplan.search.min_memory import min_peak_memory
from shardplan.search.objective import Candidates, Judged
from shardplan.search.overlap_price import cheapest_price
from shardplan.search.protocol import Search, time_left
from shardplan.search.slope_scaling import Coarse, slope_scaling

MANY_OPS = 10_000
"""Above so many ops repeated layers are untied only if the memory limit makes ties costly; step 4 ends at the first start in vain."""

UNTIED_WORK = 3.0
"""Work limit (about seconds) of planning repeated layers untied."""

UNTIED_GAIN = 1e-3
"""An untied plan without a proof must be cheaper by this fraction: layers that agree are simpler."""

PATIENCE = 3
"""Step 4 ends when the prices of so many schedules in a row brought no better plan."""


class IntegerProgram(Search):
    """Search "ilp"."""

    def search(self, network: CostNetwork, hint: tuple[int, ...], deadline: Deadline) -> Solution:
        """The optimal states, or the best within the limits; repeated layers take the same states."""
        problem, options = network.problem, self.task.options
        self.task.stopwatch.lap("network")
        if (known := self.task.optima.get(priced := (network.pricing, problem.limit))) is not None:
            return known
        presolved = presolve(problem, tie=True)
        start = warm_start(self.task, network, presolved, hint).states or None
        self.task.stopwatch.lap("propagation")
        left, progress = time_left(deadline), options.progress
        solution = solve(problem, hint=start, time_limit=left, progress=progress, presolved=presolved)
        if solution.status == "fallback" and not solution.states and deadline.over():  # least memory is better than an error
            states = min_peak_memory(problem)
            if states and problem.fits(states):
                solution = replace(solution, states=states, objective=problem.objective(states))
        if solution.status == "optimal":
            self.task.optima[priced] = solution
        self.task.stopwatch.lap("solve")
        return solution

    def untied(self, network: CostNetwork, hint: tuple[int, ...], deadline: Deadline) -> Solution:
        """States in which repeated layers may differ, if that pays; of many ops only where the memory limit makes ties costly."""
        problem = network.problem
        found = Solution("fallback", (), np.inf, 0.0)
        if len(hint) > MANY_OPS and problem.limit is None:
            return found
        tied_cost, left = problem.objective(hint), time_left(deadline)
        if len(hint) <= MANY_OPS or solve(replace(problem, usages=(), limit=None), time_limit=left).objective < tied_cost:
            own = solve(replace(problem, ties=()), hint=hint, time_limit=time_left(deadline), work_limit=UNTIED_WORK)
            proven = own.status == "optimal" and own.objective == tied_cost
            found = own if proven or own.objective < (1 - UNTIED_GAIN) * tied_cost else found
        self.task.stopwatch.lap("solve")
        return found

    def candidates(self, limit: float | None, deadline: Deadline) -> Candidates:
        """The plans of all steps."""
        found = super().candidates(limit, deadline)
        own = found.best
        if deadline.over():
            return found
        if (plan := Propagation(self.task).first(limit, deadline)).solution.states:
            found.add(plan)
        for network, solution in axis_by_axis(self.task, limit, self.task.exposed_fraction) if not deadline.over() else ():
            found.add(self._on_all_axes(Candidate(network, solution), limit))
            if deadline.over():
                break
        for task in self.task.coarser():
            if not deadline.over():
                self._add_coarse_plans(found, task, deadline)
        self.task.stopwatch.lap("other searches")
        if found.best is not None and found.best is not own and not deadline.over():
            slope_scaling(found, self.search, None, deadline, found.best.network.pricing.combined, complete=False)
        self._price_at_schedules(found, deadline)
        return found

    def _price_at_schedules(self, found: Candidates, deadline: Deadline) -> None:
        """Step 4: plans at the prices of a judged plan's own schedule, of the best one first, then of the next best."""
        patience = PATIENCE if len(self.task.space.graph.ops) <= MANY_OPS else 1
        started: list[Judged] = []
        in_vain = 0
        while self.task.overlaps and in_vain < patience and not deadline.over():
            best, start = found.best, min((x for x in found.judged.values() if x not in started), key=lambda x: x.rank, default=None)
            if start is None or start.excess_bytes:
                break
            started.append(start)
            pricing = Pricing(combined=start.network.pricing.combined, windows=schedule_windows(start.program))
            hint = start.states if start.network.space is self.task.space else ()

            def at(price: float, pricing=pricing, hint=hint) -> Candidate:
                network = self.task.network(replace(pricing, background_price=price), found.limit)
                return Candidate(network, self.search(network, hint, deadline))

            plan = cheapest_price(at, self.task.exposed_fraction, deadline)
            if plan.solution.states:
                found.add(plan)
            in_vain = in_vain + 1 if found.best is best else 0

    def _on_all_axes(self, plan: Candidate, limit: float | None) -> Candidate:
        """A plan of a space with fewer strategies, in the space of all, if that allows it."""
        network, solution = plan
        whole = self.task.network(network.pricing, limit)
        states = whole.translate(network, solution.states)
        if whole.allows(states):
            return Candidate(whole, replace(solution, states=states))
        return plan

    def _add_coarse_plans(self, found: Candidates, task: PlanningTask, deadline: Deadline) -> None:
        """Step 1 on a coarser mesh; no plans where pins hold for some of its merged axes only."""
        coarse = Coarse(task, lambda plan: self._on_all_axes(plan, found.limit))
        try:
            slope_scaling(found, IntegerProgram(task).search, None, deadline, complete=False, coarse=coarse)
        except ShardingError:
            return
