"""From a traced step to a plan: the arrows between the rooms, one after the other, and nothing else.

jaxpr -> Graph -> Space -> Network -> Solution -> Decisions -> Plan
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shardplan.costs.network import CostNetwork, build_network, whole_bytes
from shardplan.costs.options import Options
from shardplan.costs.pins import allowed_strategies, untie_pinned_state
from shardplan.costs.space import make_strategy_space
from shardplan.costs.tables import CombinedGroups
from shardplan.emit.decide import decide
from shardplan.errors import ShardingError
from shardplan.ilp.min_memory import min_average_memory, min_peak_memory
from shardplan.ilp.overlap_price import judged
from shardplan.ilp.slope_scaling import settled
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.incumbent import uncollected
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Graph
from shardplan.ir.parse import parse
from shardplan.ir.traced import Traced
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.plan.infeasible import no_plan_fits
from shardplan.plan.planned import Planned
from shardplan.propagation import propagate, recursive

APART_WORK, APART_OPS = 3.0, 20_000
"""Counted work, about seconds, for repeated layers that are not planned alike; and how many ops may be, where memory does not ask."""

ALIKE = 1e-3
"""Repeated layers stay alike where that costs no more than this part of a step."""

MANY_AXES = 3
"""Mesh axes from which an answer without a proof is held against recursive search."""


@uncollected()
def make_plan(traced: Traced, mesh: MeshShape, cluster: Cluster, options: Options) -> Planned:
    """Plan a step.

    Raises:
        ShardingError: when a pin cannot hold, or no plan fits the memory.
    """
    clock = _Clock()
    graph = untie_pinned_state(parse(traced.jaxpr, traced.in_labels, traced.out_labels, traced.tied, traced.donated), options)
    clock.lap("graph")
    resharder, exposed_fraction = Resharder(mesh, cluster), 1.0 - cluster.overlap * options.overlap
    if options.search == "recursive":
        found = _recursive(graph, resharder, options, exposed_fraction)
        clock.lap("solve")
        if found:
            return _planned(traced, found[0], judged(*found, exposed_fraction, exposed_fraction)[0], options, exposed_fraction, clock)
    space = make_strategy_space(graph, mesh, cluster)
    clock.lap("strategies")
    allowed = allowed_strategies(space, options=options)
    if options.memory_saving:
        options = replace(options, memory=_thrifty(functools.partial(build_network, space, resharder, allowed=allowed), options))

    @functools.lru_cache(maxsize=2)
    def network(limit: float | None, background_price: float, combined: CombinedGroups | None) -> CostNetwork:
        made = build_network(
            space, resharder, limit, allowed, charges=options.charges, background_price=background_price, combined=combined
        )
        clock.lap("network")
        return made

    @functools.cache
    def users(limit: float | None, background_price: float) -> tuple[int, ...]:
        """The states that the program's own constraints ask for."""
        kept = allowed_strategies(space, options=replace(options, constraints="keep"))
        return propagate(build_network(space, resharder, limit, kept, background_price=background_price).problem).states

    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def over() -> bool:
        return left() == 0.0

    def search(at: CostNetwork, before: tuple[int, ...], most: float = np.inf) -> Solution:
        limit = at.problem.limit

        def fits(states: tuple[int, ...]) -> bool:
            return limit is None or at.problem.peak(states) <= limit

        presolved = presolve(at.problem, tie=True)
        wanted = users(limit, at.background_price) if options.constraints == "hint" else ()
        known = [(at.problem.objective(states) if states and fits(states) else np.inf, states) for states in (wanted, before)]
        again = options.search != "propagation" and known[-1][0] < np.inf  # the plan before is hint enough
        hint = Solution("feasible", (), np.inf, 0.0) if again else propagate(at.problem, presolved)
        for objective, states in known:
            if objective < hint.objective:
                hint = replace(hint, states=states, objective=objective)
        clock.lap("propagation")
        if options.search == "propagation":
            return hint if not hint.states or fits(hint.states) else solve(at.problem, hint=hint.states, time_limit=left())
        solution = solve(
            at.problem, hint=hint.states or None, cutoff=most, time_limit=left(), progress=options.progress, presolved=presolved
        )
        many = sum(n > 1 for _, n in mesh) >= MANY_AXES
        if solution.status in ("feasible", "fallback") and many and options.search != "recursive" and not over():
            solution = _axis_by_axis(at, solution, graph, resharder, replace(options, memory=limit))
        if solution.status == "fallback" and not solution.states and over():  # better than an error
            states = min_peak_memory(at.problem)
            if states and fits(states):
                solution = replace(solution, states=states, objective=at.problem.objective(states))
        clock.lap("solve")
        return solution

    def apart(at: CostNetwork, alike: tuple[int, ...]) -> Solution:
        """Repeated layers each on their own, where that pays; of many ops only where the limit makes layers that are alike costly."""
        paid, few = at.problem.objective(alike), len(alike) <= APART_OPS
        found = Solution("fallback", (), np.inf, 0.0)
        if few or solve(replace(at.problem, usages=(), limit=None), time_limit=left()).objective < paid:
            own = solve(replace(at.problem, ties=()), hint=alike, time_limit=left(), work_limit=APART_WORK)
            proven = own.status == "optimal" and own.objective == paid
            found = own if proven or own.objective < (1 - ALIKE) * paid else found
        clock.lap("solve")
        return found

    loose = None if options.search == "propagation" else apart

    def settle(limit: float | None) -> tuple[CostNetwork, Solution]:
        return settled(
            functools.partial(network, limit), search, loose, lambda network: min_peak_memory(network.problem), exposed_fraction, over
        )

    limit = options.memory
    roomy = limit is not None and whole_bytes(space) <= limit  # copies need not be told from originals, which takes longer
    found, solution = settle(None if roomy else limit)
    if limit is not None and roomy and solution.states:
        fits, limited = found.peak(solution.states) <= limit, replace(found, problem=replace(found.problem, limit=limit))
        found, solution = (limited, solution) if fits else settle(limit)
    if not solution.states or not np.isfinite(solution.objective):
        states = min_average_memory(found.problem)
        raise ShardingError(
            no_plan_fits(network(limit, found.background_price, found.combined_collectives(states)) if states else found)
        )
    return _planned(traced, found, solution, options, exposed_fraction, clock)


def _thrifty(network: Callable[..., CostNetwork], options: Options) -> float:
    """The budget between what the fastest plan needs and what the leanest does."""

    def peak(found: CostNetwork, states: tuple[int, ...]) -> float:
        return network(limit=found.problem.limit, combined=found.combined_collectives(states)).peak(states)

    free = network(limit=None)
    fastest = peak(free, solve(free.problem).states)
    told = network(limit=fastest)
    least = peak(told, min_average_memory(told.problem))
    budget = fastest - options.memory_saving * max(0.0, fastest - least)
    return budget if options.memory is None else min(budget, options.memory)


def _recursive(graph: Graph, resharder: Resharder, options: Options, background_price: float) -> tuple[CostNetwork, Solution] | None:
    return recursive(graph, resharder, options.memory, functools.partial(allowed_strategies, options=options), background_price)


def _axis_by_axis(network: CostNetwork, solution: Solution, graph: Graph, resharder: Resharder, options: Options) -> Solution:
    """The better of an answer without a proof and what recursive search finds."""
    found = _recursive(graph, resharder, options, network.background_price)
    states = network.translate(found[0], found[1].states) if found else ()
    objective = network.problem.objective(states) if states else np.inf
    fits = bool(states) and (options.memory is None or network.problem.peak(states) <= options.memory)
    better = fits and (not solution.states or objective < solution.objective)
    return replace(solution, status="feasible", states=states, objective=objective) if better else solution


def _planned(
    traced: Traced, network: CostNetwork, solution: Solution, options: Options, exposed_fraction: float, clock: _Clock
) -> Planned:
    strategies = network.strategies(solution.states)
    decided = decide(network, strategies, network.retained(solution.states))
    clock.lap("decisions")
    return Planned(traced, network, solution, strategies, decided, options, exposed_fraction, clock.seconds)


class _Clock:
    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    def lap(self, name: str):
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.start
        self.start = now
