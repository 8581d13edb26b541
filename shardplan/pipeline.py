"""From a traced step to a plan, one arrow after the other.

    jaxpr --parse--> Graph --rules--> StrategySpace --price--> CostNetwork --search--> Candidate --decide--> EmitDecisions

A search prices and searches in turn (`search/slope_scaling.py`), so the middle arrows are its own.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace

import numpy as np

from shardplan.costs.options import Options
from shardplan.costs.pins import untie_pinned_state
from shardplan.costs.task import PlanningTask, Stopwatch
from shardplan.emit.decide import decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver.collector import paused_collector
from shardplan.ir.parse import Traced
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.ilp.solver.deadline import Deadline
from shardplan.plan.infeasible import no_plan_fits
from shardplan.plan.planned import Planned
from shardplan.search.bound import compute_floor, lower_bound
from shardplan.search.min_memory import saved_memory
from shardplan.search.objective import Candidates
from shardplan.searches import SEARCHES


@paused_collector()
def make_plan(traced: Traced, mesh: MeshShape, cluster: Cluster, options: Options) -> Planned:
    """Plan a step.

    Raises:
        ShardingError: when a pin cannot hold, or no plan fits the memory.
    """
    stopwatch = Stopwatch()
    graph = untie_pinned_state(traced.graph(), options)
    stopwatch.lap("graph")
    task = PlanningTask(graph, Resharder(mesh, cluster), options, stopwatch)
    memory = saved_memory(task) if options.memory_saving else options.memory
    plans = (pkgutil.resolve_name(SEARCHES[name])(task).plan(memory) for name in (options.search, "ilp"))
    found: Candidates = next(plan for plan in plans if plan is not None)
    chosen = found.simplest()
    if chosen is None or chosen.excess_bytes:
        raise ShardingError(no_plan_fits(task, found, memory))
    deadline = Deadline(options.time_limit and options.time_limit - stopwatch.elapsed, work=np.inf)
    proves = options.search == "ilp"
    bound = lower_bound(task, chosen, deadline) if proves else min(compute_floor(task), chosen.solution.objective)
    stopwatch.lap("bound")
    network, solution = chosen.proven(bound)
    strategies = network.strategies(solution.states)
    decisions = decide(network, strategies, network.retained(solution.states))
    stopwatch.lap("decisions")
    options = replace(options, memory=memory)
    return Planned(traced, network, solution, strategies, decisions, options, chosen.timeline, stopwatch.seconds)
