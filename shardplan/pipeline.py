"""From a traced step to a plan, one arrow after the other.

    jaxpr --parse--> Graph --rules--> StrategySpace --price--> CostNetwork --search--> Candidate --judge--> Judged
    Candidates --simplest--> Judged --compiler options--> Judged --bound--> Candidate --decide--> EmitDecisions

A search prices, searches and judges in turn (`search/slope_scaling.py`, `search/objective.py`), so the arrows from price to judge are
its own. Of all plans that it judged the simplest of the fastest is taken; its bound holds for every plan (`search/bound.py`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from shardplan.costs.options import Options
from shardplan.costs.pins import pin_description, pins_by_op, untie_pinned_state
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.emit.decide import decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver.collector import paused_collector
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ir.parse import Traced
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.plan.infeasible import no_plan_fits, pins_contradict
from shardplan.plan.planned import Planned
from shardplan.search.bound import compute_floor, lower_bound
from shardplan.search.min_memory import least_memory, lowest_peak_plan, saved_memory
from shardplan.search.objective import Candidates, Judged, compiled, judge
from shardplan.search.protocol import Search
from shardplan.searches import SEARCHES
from shardplan.xla_model.compiler_options import thresholds


@paused_collector()
def make_plan(traced: Traced, mesh: MeshShape, cluster: Cluster, options: Options, near: Planned | None = None) -> Planned:
    """Plan a step.

    Args:
        near: the step as it was planned for the same mesh; where the options allow its states, no slower plan is taken.

    Raises:
        ShardingError: when a pin cannot hold, or no plan fits the memory.
    """
    stopwatch = Stopwatch()
    graph = untie_pinned_state(traced.graph, options)
    if not any(loop.trips > 1 for loop in graph.loops):
        options = replace(options, xla=tuple(dict.fromkeys(x.without_loops(options.own_xla) for x in options.xla)))
    stopwatch.lap("graph")
    task = PlanningTask(graph, Resharder(mesh, cluster), options, stopwatch)
    searches = {name: pkgutil.resolve_name(SEARCHES[name])(task) for name in (options.search, "ilp")}
    memory, known = options.memory, None
    if options.memory_saving:
        known, fastest = _found(task, searches, memory, None)
        memory = memory if fastest is None else saved_memory(known, fastest)
    less = None if memory is None else (1 - options.reserve) * memory
    found, chosen = _found(task, searches, less, near, known)
    if chosen is None and less != memory:
        found, chosen = _found(task, searches, memory, near, known)
    chosen = chosen or _lowest_peak(task, searches["ilp"], found, memory)
    if found.bound and chosen.network.space is not task.space:  # a plan that none of the space is, as followers reshard in it
        deadline = Deadline(None if options.time_limit is None else 0.0, work=np.inf)
        found.bound, _ = lower_bound(task, chosen, deadline)
    bound = max(found.bound, compute_floor(task))
    network, solution = chosen.proven(bound)
    network = network.in_order(chosen.memory.order).under(memory)
    strategies = network.strategies(solution.states)
    decisions = decide(network, strategies, network.retained(solution.states))
    stopwatch.lap("decisions")
    options = replace(options, memory=memory)
    return Planned(traced, network, solution, strategies, decisions, options, chosen.timeline, chosen.xla, stopwatch.seconds)


def _found(
    task: PlanningTask, searches: Mapping[str, Search], limit: float | None, near: Planned | None, known: Candidates | None = None
) -> tuple[Candidates, Judged | None]:
    """All plans that the first search that takes the task finds, and the known ones that fit; the one to take, None if none fits."""
    plans_of = (search.plan(limit) for search in searches.values())
    found = next(plans for plans in plans_of if plans is not None)
    if known is not None:
        found.adopt(x for x in known.judged.values() if limit is None or x.peak_bytes <= limit)
    least = None if near is None else _judged_again(task, found, near)
    found.combine_otherwise()
    return found, found.simplest(least)


def _judged_again(task: PlanningTask, found: Candidates, near: Planned) -> float | None:
    """Adds an earlier plan of the step to what was found; its seconds, or None where it is no plan of this task or does not fit."""
    limit = near.network.limit if near.network.blocks.aliasing else None  # the states are those of a network that was found under it
    whole = task.network(near.network.pricing, limit)
    if [len(of) for of in near.space.strategies] != [len(of) for of in whole.space.strategies]:
        return None
    states = whole.translate(near.network, near.solution.states)
    if not whole.allows(states):
        return None
    candidate = Candidate(whole, replace(near.solution, states=states, tied=False))
    judged = found.add(candidate, replace(judge(task, candidate, limit), limit=found.limit))
    return None if judged.excess_bytes else judged.timeline.total_s


def _lowest_peak(task: PlanningTask, search: Search, found: Candidates, limit: float | None) -> Judged:
    """A plan that fits after all.

    Raises:
        ShardingError: none was found.
    """
    plans, converged = (partial(of, deadline=Deadline(None, work=np.inf)) for of in (search.candidates, search.converged))
    lowest = None if limit is None else lowest_peak_plan(plans, converged, found, limit)
    if limit is None or lowest is None:
        raise ShardingError(pins_contradict())
    if lowest.peak_bytes > limit:
        ops = task.space.graph.ops
        pinned = [
            ops[i].label or pin_description(ops[i], pins) for i, pins in sorted(pins_by_op(task.space.graph, task.options).items())
        ]
        raise ShardingError(no_plan_fits(lowest.memory, limit, least_memory(found, lowest, limit), pinned))
    lowest = replace(lowest, limit=limit)
    return compiled(task, lowest, thresholds(lowest.xla) if task.options.chooses_xla else ())
