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
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.emit.decide import decide
from shardplan.errors import ShardingError
from shardplan.ilp.solver.collector import paused_collector
from shardplan.ir.parse import Traced
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.plan.infeasible import no_plan_fits
from shardplan.plan.planned import Planned
from shardplan.search.min_memory import min_average_memory, min_peak_memory, saved_memory
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
    found: Candidate = next(plan for plan in plans if plan is not None)
    network, solution = found
    if not solution.states or not np.isfinite(solution.objective):
        if states := min_average_memory(network.problem):  # prices of the plan of least memory
            network = task.network(replace(network.pricing, combined=network.combined_groups(states)), memory)
        raise ShardingError(no_plan_fits(network, () if network.problem.limit is None else min_peak_memory(network.problem)))
    strategies = network.strategies(solution.states)
    decisions = decide(network, strategies, network.retained(solution.states))
    stopwatch.lap("decisions")
    options = replace(options, memory=memory)
    return Planned(traced, network, solution, strategies, decisions, options, task.exposed_fraction, stopwatch.seconds)
