"""How a cost network is built: strategies priced as node costs, reshards as edges, live arrays as usages, repeated layers as ties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.network import CostNetwork, PricedProblem
from shardplan.costs.options import CostCorrections
from shardplan.costs.pricing import CombinedGroups, CombinedPrices, Pricing, ScheduleWindows, live
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import PS, StateBlocks
from shardplan.costs.tables import CostTables
from shardplan.ilp.solver.problem import Edge, Problem, Usage, sum_over_intervals
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.liveness import order_by_rules
from shardplan.xla_model.overlap_windows import OverlapWindows


def build_network(
    space: StrategySpace,
    resharder: Resharder,
    limit: float | None,
    allowed: Mapping[int, np.ndarray] | None = None,
    corrections: CostCorrections | None = None,
    pricing: Pricing = Pricing(),  # noqa: B008
    windows: OverlapWindows | None = None,
) -> CostNetwork:
    """The cost network of a strategy space.

    Args:
        space: the step, its strategies and their compute seconds.
        resharder: prices redistribution on the space's mesh.
        limit: bytes per device, or None.
        allowed: pinned op -> bool [s], which strategies remain.
        corrections: seconds of strategies and reshards beyond the model.
        pricing: what the network assumes of the whole plan.
        windows: overlap windows, by default those of a plan that combines what `pricing` says; empty ones give every array its
            shortest life.
    """
    graph, allowed = space.graph, allowed or {}
    pinned = frozenset(allowed) | {start for start, end in graph.same_layout if end in allowed}
    prices = (
        _prices(space, resharder, pricing.combined) if windows is None else CombinedPrices(space, resharder, pricing.combined, windows)
    )
    if pricing.order is not None:
        prices = prices.in_order(pricing.order)
    corrections = corrections or CostCorrections({}, {})
    return CostNetwork(
        space, StateBlocks.of(graph, space.materialised, limit), limit, allowed, pinned, corrections, pricing, prices, _priced
    )


def _priced(network: CostNetwork) -> PricedProblem:
    """The problem of a network: every strategy priced, every edge, every array in memory."""
    space, blocks, prices, price = network.space, network.blocks, network.prices, network.pricing.background_price
    graph, corrections = space.graph, network.corrections
    schedule = network.pricing.windows
    found = prices.windows if schedule is None else schedule
    windows = found.seconds, found.seconds if isinstance(found, ScheduleWindows) else found.scatter_seconds
    tables = CostTables(space, blocks, network.pinned, windows, prices.resharders, price, dict(space.tables))
    costs = _node_costs(space, blocks, network.allowed, corrections)
    edges: list[Edge] = []
    background: list[tuple[int, np.ndarray]] = []
    for edge in space.array_edges:
        cost, hidden, _ = tables.edge(edge)
        if hidden is not None:
            background.append((len(edges), hidden))
        edges.append(Edge(edge.producer, edge.consumer, _corrected(cost, edge, corrections) if corrections.reshards else cost))
    edges += [Edge(i, j, tables.same_layout(i, j)) for i, j in graph.same_layout]
    edges += [Edge(i, j, tables.retained(i, k, j)) for j, (i, k) in graph.retainable_from.items()]
    usages = tuple(_usages(network, tables)) if network.limit is not None else ()
    problem = Problem(tuple(costs), tuple(edges), usages, network.limit, _symmetry_classes(space, blocks, costs))
    space.tables.clear()
    space.tables.update(tables.cache)
    return PricedProblem(problem, tuple(background))


def restricted(network: CostNetwork, allowed: Mapping[int, np.ndarray]) -> CostNetwork:
    """The network in which pinned ops keep fewer strategies, as `build_network` makes it; what has a price is not priced again.

    Args:
        network: of ops that are pinned to these layouts or any others.
        allowed: op, one of those -> bool [s], which strategies remain.
    """
    assert allowed.keys() <= network.pinned

    def priced(own: CostNetwork) -> PricedProblem:
        known = network.priced
        costs = _node_costs(own.space, own.blocks, own.allowed, own.corrections)
        ties = _symmetry_classes(own.space, own.blocks, costs)
        return known._replace(problem=replace(known.problem, costs=tuple(costs), ties=ties))

    return replace(network, allowed={**network.allowed, **allowed}, build=priced)


def _prices(space: StrategySpace, resharder: Resharder, combined: CombinedGroups | None) -> CombinedPrices:
    """What follows from what a plan combines; the last two are kept: the price of background communication changes none of it."""
    known = space.priced
    if (key := (id(resharder), combined)) not in known:
        while len(known) > 1:
            known.pop(next(iter(known)))
        known[key] = CombinedPrices(space, resharder, combined)
    return known[key]


def replicated_bytes(space: StrategySpace) -> float:
    """Peak bytes of a device if every array were replicated, and no array waited for a collective."""
    held = zip(live(space, order_by_rules(space.graph)), space.graph.values, strict=True)
    return float(sum_over_intervals((*at, value.bytes) for at, value in held if at is not None).max(initial=0.0))


def _node_costs(
    space: StrategySpace, blocks: StateBlocks, allowed: Mapping[int, np.ndarray], corrections: CostCorrections
) -> list[np.ndarray]:
    """c_i[state]; one array for ops of one cost."""
    costs: list[np.ndarray] = []
    known: dict[tuple, np.ndarray] = {}
    for i, op in enumerate(space.graph.ops):
        key = (id(space.seconds[i]), op.runs, blocks.count(i), i if i in allowed else -1)
        if key not in known:
            cost = np.rint(space.seconds[i] * op.runs * PS)
            known[key] = np.tile(np.where(allowed[i], cost, np.inf) if i in allowed else cost, blocks.count(i))
        costs.append(known[key])
    for (i, s), seconds in corrections.strategies.items():
        costs[i] = costs[i] + np.where(np.arange(len(costs[i])) % len(space.strategies[i]) == s, np.rint(seconds * PS), 0.0)
    return costs


def _corrected(cost: np.ndarray, edge: ArrayEdge, corrections: CostCorrections) -> np.ndarray:
    """The picoseconds [state, state] of an array, with the corrections of its reshards."""
    for (at, operand, before, after), seconds in corrections.reshards.items():
        if (at, operand) == (edge.consumer, edge.operand):
            made, read = edge.template.result_layouts, edge.template.operand_layouts
            rows, columns = cost.shape[0] // len(made), cost.shape[1] // len(read)
            place = np.outer(np.tile([x == before for x in made], rows), np.tile([x == after for x in read], columns))
            cost = cost + np.where(place & np.isfinite(cost) & (cost > 0), np.rint(seconds * PS), 0.0)
    return cost


def _usages(network: CostNetwork, tables: CostTables) -> Iterator[Usage]:
    """u_i with their intervals; copies without states of their own have none."""
    for i, array, v, lo, hi, buffer, times in network.lifetimes:
        held, others = times * tables.bytes(i, array, v), network.blocks.count(i) - 1
        if buffer == "retained":
            yield Usage(i, lo, hi, np.concatenate([*[0 * held] * others, held]))
        elif buffer != "implicit":
            first = 0 * held if buffer == "own" else held
            yield Usage(i, lo, hi, np.concatenate([first, *[held] * others]) if others else held)


def _symmetry_classes(space: StrategySpace, blocks: StateBlocks, costs: list[np.ndarray]) -> tuple[int, ...]:
    """Per op, its class among repeated layers; members have the same states, and pins allow them the same ones.

    The pins of an op of one layout with the op count as its own.
    """
    never = {key: np.isinf(c) for key, c in {id(c): c for c in costs}.items()}
    masks = {key: mask.tobytes() if mask.any() else b"" for key, mask in never.items()}
    forbidden = [masks[id(c)] for c in costs]
    partner = {x: forbidden[y] for pair in space.graph.same_layout for x, y in (pair, pair[::-1])}
    first: dict[tuple, int] = {}
    return tuple(
        first.setdefault((layer, len(costs[i]), i in blocks.aliasing, i in blocks.retainable, forbidden[i], partner.get(i)), i)
        for i, layer in enumerate(space.layers)
    )
