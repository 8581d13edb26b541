"""The search "ilp": states of least cost by the integer program; plans of all other searches are candidates, too.

    1 pricing loop      networks at what the last plan combines (`search/slope_scaling.py`)
    2 bound             of all plans (`search/bound.py`), and the plans that it leads to
    3 other searches    propagation, axis by axis, and step 1 on coarser meshes, whose plans are judged on all axes; for few
                        ops step 1 with less memory
    4 once more         step 1 from what the best plan combines, if step 2 or 3 found that; from then on plans of few ops are judged
                        with the combine threshold of the best one, too
    5 schedules         networks at what the best plans combine and at the overlap windows of their schedules
                        (`costs/schedule_windows.py`), as long as that finds better plans
    6 improvement       changes of the best plans, one at a time (`search/improvement.py`)
    7 classical         the cheapest classical layout of the inputs (`search/classical.py`), and each of one kind of parallelism over
                        all axes at the prices of the best plan's own schedule; if one is the best, 4 and 5 from it. Last, as it may
                        lead the steps before it astray

The objective judges every plan on the way (`search/objective.py`). Once the best plan is near enough to the bound, no step follows.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate
from shardplan.errors import ShardingError
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.propagation.axis_by_axis import axis_by_axis
from shardplan.propagation.search import Propagation, warm_start
from shardplan.search.bound import lower_bound
from shardplan.search.classical import classical_inputs, with_inputs
from shardplan.search.improvement import improve, own_network
from shardplan.search.min_memory import min_peak_memory
from shardplan.search.objective import NEAR_TIE, Candidates, Judged
from shardplan.search.overlap_price import cheapest_price
from shardplan.search.protocol import Search, time_left
from shardplan.search.slope_scaling import Coarse, slope_scaling

MANY_OPS = 10_000
"""Above so many ops repeated layers are untied only if the memory limit makes ties costly; step 5 ends at the first start in vain."""

UNTIED_WORK = 3.0
"""Work limit (about seconds) of planning repeated layers untied."""

UNTIED_GAIN = 1e-3
"""An untied plan without a proof must be cheaper by this fraction: layers that agree are simpler."""

NEAR_OF_MANY = 0.05
"""A step of more than `MANY_OPS` ops is not searched further once its plan is so near to the bound; others `NEAR_TIE`."""

FEW_OPS = 1_500
"""Steps of up to so many ops are searched in all steps but the last on coarser meshes, too, others in step 1; see step 4, too."""

LESS_MEMORY, LESS_MEMORY_OPS = 0.8, 500
"""With this part of the memory limit (without one, of the best plan's peak) steps of up to so many ops are searched, too."""

COARSE_PLANS = 3
"""The best plans of such a search on a coarser mesh are judged on all axes."""

CLASSICAL_WORK = 1.0
"""Work limit (about seconds) of planning for the classical layouts."""

PROVING = 2
"""Plans that are judged of those that the bound leads to: the last ones, under the best weights."""

PATIENCE = 3
"""Step 5 ends when the prices of so many schedules in a row brought no better plan."""


class IntegerProgram(Search):
    """Search "ilp"."""

    def search(self, network: CostNetwork, hint: tuple[int, ...], deadline: Deadline) -> Solution:
        """The optimal states, or the best within the limits; repeated layers take the same states."""
        problem, options = network.problem, self.task.options
        self.task.stopwatch.lap("network")
        if (known := self.task.optima.get(priced := (network.pricing, problem.limit))) is not None:
            return known
        presolved = presolve(problem, tie=True)
        start = warm_start(self.task, network, presolved, hint)
        self.task.stopwatch.lap("propagation")
        left, progress = time_left(deadline), options.progress
        solution = solve(problem, hint=start.states if start.found else None, time_limit=left, progress=progress, presolved=presolved)
        if solution.status == "fallback" and not solution.found and deadline.over():  # least memory is better than an error
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
        """The plans of all steps, up to the one that comes near enough to the bound."""
        found = super().candidates(limit, deadline)
        first = found.best
        once_more = partial(self._once_more, first=first)
        others = self._propagated, self._by_axis, self._coarse, self._with_less_memory
        for step in (self._bound, *others, once_more, self._price_at_schedules, self._improve, self._classical):
            if found.best is None or deadline.over() or self._near_enough(found):
                break
            step(found, deadline)
        return found

    def _near_enough(self, found: Candidates) -> bool:
        """Whether no other plan that fits can be faster by much."""
        enough = NEAR_TIE if len(self.task.space.graph.ops) <= MANY_OPS else NEAR_OF_MANY
        best = found.best
        return best is not None and not best.excess_bytes and PS * best.timeline.total_s <= (1 + enough) * found.bound

    def _bound(self, found: Candidates, deadline: Deadline) -> None:
        """Step 2."""
        assert found.best is not None
        if not self.task.bounds:
            self.task.bounds.append(lower_bound(self.task, found.best, deadline))
            self.task.stopwatch.lap("bound")
        found.bound, plans = self.task.bounds[-1]
        for plan in plans[-PROVING:] if not self.task.merged else ():
            found.add_if_it_computes_less(plan)

    def _propagated(self, found: Candidates, deadline: Deadline) -> None:
        """Step 3: sharding propagation."""
        if (plan := Propagation(self.task).first(found.limit, deadline)).solution.found:
            found.add(plan)

    def _by_axis(self, found: Candidates, deadline: Deadline) -> None:
        """Step 3: the plans on the way of the search axis by axis."""
        for network, solution in () if self.task.merged else axis_by_axis(self.task, found.limit, self.task.interference):
            found.add(self._on_all_axes(Candidate(network, solution), found.limit))
            if deadline.over():
                break

    def _coarse(self, found: Candidates, deadline: Deadline) -> None:
        """Step 3: coarser meshes; no plans where pins hold for some of their merged axes only."""
        for task in self.task.coarser():
            if deadline.over():
                break
            with suppress(ShardingError):
                if len(self.task.space.graph.ops) <= FEW_OPS:
                    plans = IntegerProgram(task).candidates(found.limit, deadline).judged.values()
                    for plan in sorted(plans, key=lambda x: x.rank)[:COARSE_PLANS]:
                        found.add(self._on_all_axes(Candidate(plan.network, plan.solution), found.limit))
                else:
                    coarse = Coarse(task, lambda plan: self._on_all_axes(plan, found.limit))
                    slope_scaling(found, IntegerProgram(task).search, None, deadline, complete=False, coarse=coarse)
        self.task.stopwatch.lap("other searches")

    def _with_less_memory(self, found: Candidates, deadline: Deadline) -> None:
        """Step 3: a lower memory limit. Not to retain an array may be quicker, which no price says where there is room for it."""
        best = found.best
        assert best is not None
        if len(self.task.space.graph.ops) <= LESS_MEMORY_OPS and not self.task.merged:
            found.adopt(self.converged(LESS_MEMORY * (found.limit or best.peak_bytes), deadline).judged.values())
        self.task.stopwatch.lap("other searches")

    def _once_more(self, found: Candidates, deadline: Deadline, first: Judged | None) -> None:
        """Step 4, from a best plan that is not the `first` one."""
        assert found.best is not None
        if found.best is not first:
            slope_scaling(found, self.search, None, deadline, found.best.network.pricing.combined, complete=False)
        if len(self.task.space.graph.ops) <= FEW_OPS:
            found.combine_otherwise()

    def _price_at_schedules(self, found: Candidates, deadline: Deadline) -> None:
        """Step 5: plans at the prices of a judged plan's own schedule, of the best one first, then of the next best."""
        patience = PATIENCE if len(self.task.space.graph.ops) <= MANY_OPS else 1
        started: list[Judged] = []
        in_vain = 0
        while self.task.overlaps and in_vain < patience and not deadline.over():
            best, start = found.best, min((x for x in found.judged.values() if x not in started), key=lambda x: x.rank, default=None)
            if start is None or start.excess_bytes:
                break
            started.append(start)
            order = None if found.limit is None else start.memory.order
            pricing = Pricing(combined=start.network.pricing.combined, windows=start.windows, order=order)
            hint = start.states if start.network.space is self.task.space else ()

            def at(price: float, pricing=pricing, hint=hint) -> Candidate:
                network = self.task.network(replace(pricing, background_price=price), found.limit)
                return Candidate(network, self.search(network, hint, deadline))

            plan = cheapest_price(at, self.task.interference, deadline)
            if plan.solution.found:
                found.add(plan)
            in_vain = in_vain + 1 if found.best is best else 0

    def _improve(self, found: Candidates, deadline: Deadline) -> None:
        """Step 6, where it is not the plan of a coarser mesh that would be changed."""
        if not self.task.merged:
            improve(found, deadline)

    def _classical(self, found: Candidates, deadline: Deadline) -> None:
        """Step 7."""
        if self.task.merged:
            return
        before, layouts = found.best, list(classical_inputs(self.task.space))
        assert before is not None
        priced, own = self.task.network(Pricing(self.task.interference), found.limit), own_network(self.task, before, found.limit)
        cheapest = (priced, [of for _, of in layouts])
        for network, choices in (cheapest, *((own, [of]) for classical, of in layouts if classical.pure)) if layouts else ():
            solution = solve(with_inputs(network, choices), time_limit=time_left(deadline), work_limit=CLASSICAL_WORK)
            if solution.found:
                solution = replace(solution, status="feasible", states=solution.states[:-1], bound=0.0)
                found.add_if_it_computes_less(Candidate(network, solution))
        self.task.stopwatch.lap("other searches")
        if found.best is not before:
            self._once_more(found, deadline, first=before)
            self._price_at_schedules(found, deadline)

    def _on_all_axes(self, plan: Candidate, limit: float | None) -> Candidate:
        """A plan of a space with fewer strategies, in the space of all, if that allows it."""
        network, solution = plan
        whole = self.task.network(network.pricing, limit)
        states = whole.translate(network, solution.states)
        if whole.allows(states):
            return Candidate(whole, replace(solution, states=states))
        return plan
