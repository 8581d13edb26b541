"""How a cost network is built: strategies priced as node costs, reshards as edges, live arrays as usages, repeated layers as ties."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardplan.costs.network import PS, CostNetwork, StateBlocks
from shardplan.costs.options import CostCorrections
from shardplan.costs.pricing import CombinedGroups, Pricing, plan_windows, resharders
from shardplan.costs.space import ArrayEdge, StrategySpace
from shardplan.costs.tables import CostTables
from shardplan.ilp.solver.problem import Edge, Problem, Usage, sum_over_intervals
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.liveness import Interval, live_intervals, takes_over_buffer
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
    graph, allowed, corrections = space.graph, allowed or {}, corrections or CostCorrections({}, {})
    blocks, (priced, live, of) = StateBlocks.of(graph, limit), _priced(space, resharder, pricing.combined)
    if windows is not None:
        priced, live = windows, _live_intervals(space, windows)
    pinned = frozenset(allowed) | {start for start, end in graph.same_layout if end in allowed}
    tables = CostTables(space, blocks, pinned, priced, of, pricing.background_price, dict(space.tables))
    costs = _node_costs(space, blocks, allowed, corrections)
    edges: list[Edge] = []
    background: list[tuple[int, np.ndarray]] = []
    kernels: list[tuple[int, np.ndarray]] = []
    for edge in space.array_edges:
        cost, hidden, computed = tables.edge(edge)
        if hidden is not None:
            background.append((len(edges), hidden))
        if computed is not None:
            kernels.append((len(edges), computed))
        edges.append(Edge(edge.producer, edge.consumer, _corrected(cost, edge, corrections) if corrections.reshards else cost))
    edges += [Edge(i, j, tables.same_layout(i, j)) for i, j in graph.same_layout]
    edges += [Edge(i, j, tables.retained(i, k, j)) for j, (i, k) in graph.retainable_from.items()]
    usages, implicit_copies = _usages(space, blocks, tables, live)
    problem = Problem(tuple(costs), tuple(edges), tuple(usages), limit, _symmetry_classes(space, blocks, costs))
    space.tables.clear()
    space.tables.update(tables.cache)
    return CostNetwork(space, problem, blocks, tuple(implicit_copies), of, tuple(background), tuple(kernels), pricing)


def _priced(
    space: StrategySpace, resharder: Resharder, combined: CombinedGroups | None
) -> tuple[OverlapWindows, list[Interval | None], tuple[Resharder, ...]]:
    """Overlap windows, live intervals and, per value, what prices its reshards, where a plan combines these arrays.

    Those of the last two networks are kept: the price of background communication changes none of them.
    """
    known = space.priced
    if (key := (id(resharder), combined)) not in known:
        windows = plan_windows(space, combined)
        found = windows, _live_intervals(space, windows), resharders(space, resharder, combined), resharder
        while len(known) > 1:
            known.pop(next(iter(known)))
        known[key] = found
    return known[key][:3]


def replicated_bytes(space: StrategySpace) -> float:
    """Peak bytes of a device if every array were replicated, and no array waited for a collective."""
    live = zip(_live_intervals(space), space.graph.values, strict=True)
    return float(sum_over_intervals((*at, value.bytes) for at, value in live if at is not None).max(initial=0.0))


def _live_intervals(space: StrategySpace, windows: OverlapWindows | None = None) -> list[Interval | None]:
    in_place = [rule.fusion in ("loop", "view") for rule in space.rules]
    return live_intervals(space.graph, space.materialised, in_place, windows)


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


def _usages(
    space: StrategySpace, blocks: StateBlocks, tables: CostTables, live: list[Interval | None]
) -> tuple[list[Usage], list[Usage]]:
    """u_i with their intervals, and those of copies without states of their own."""
    graph = space.graph
    usages: list[Usage] = []
    implicit_copies: list[Usage] = []
    for v, interval in enumerate(live):
        if interval is None or interval[0] >= interval[1]:
            continue
        i, r = graph.values[v].producer
        explicit = not graph.ops[i].traits.alias or takes_over_buffer(graph, i) or i in blocks.aliasing
        found = usages if explicit else implicit_copies
        held, others = tables.bytes(i, r, v), blocks.count(i) - 1
        first = 0 * held if explicit else held  # the first of several blocks is the same array
        found.append(Usage(i, *interval, np.concatenate([first, *[held] * others]) if others else held))
        if i in graph.retainable_from:
            at, _ = graph.retainable_from[i]
            earlier = live[graph.ops[at].outputs[0]] if graph.ops[at].traits.copy else None
            since = earlier[1] if earlier else at + 1
            if since < interval[0]:
                found.append(Usage(i, since, interval[0], np.concatenate([*[0 * held] * others, held])))
    return usages, implicit_copies


def _symmetry_classes(space: StrategySpace, blocks: StateBlocks, costs: list[np.ndarray]) -> tuple[int, ...]:
    """Per op, its class among repeated layers; members have the same states, and pins allow them the same ones.

    The pins of an op of one layout with the op count as its own.
    """
    forbidden = [b"" if np.isfinite(c).all() else np.isinf(c).tobytes() for c in costs]
    partner = {x: forbidden[y] for pair in space.graph.same_layout for x, y in (pair, pair[::-1])}
    first: dict[tuple, int] = {}
    return tuple(
        first.setdefault((layer, len(costs[i]), i in blocks.aliasing, i in blocks.retainable, forbidden[i], partner.get(i)), i)
        for i, layer in enumerate(space.layers)
    )
