"""The cost network of a graph: one node per op, one state per strategy, one edge per array handed from op to op.

    c_i[s]      = runs_i x compute seconds of op i under strategy s                                     (node)
    e_ij[s, t]  = reads_j x seconds of the cheapest way from the layout in which strategy s of i makes
                  the array to the layout in which strategy t of j takes it                             (edge)
                = 0 if equal else inf, where j *follows* i (one layout through a fusion), and for tied ops
                  (loop carries, state that comes out as it went in)
    u_i[s]      = bytes of the arrays op i makes, one device's share under strategy s, while they live   (usage)

An elementwise op, view or reduction follows its operand's producer when it can take every layout the producer can make: a
reshard there would break a fusion, and one before or after it does as well. Partial results may be resolved anywhere. What a big op
reads is gathered into a copy before it, never on its own edge: there its bytes are counted.

A large array that is read through a copy beside other readers (`live.py`) gets two states per layout: "the same array", free of
memory but only where the layouts agree, and "a copy". A copy that somebody read in an earlier phase has one more state per layout,
"kept": no collective, but only where the earlier reader took that layout, and its memory from there on.

Costs are rounded to whole picoseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.costs.corrections import CostCorrections
from shardplan.costs.pricing import CombinedGroups, Pricing
from shardplan.costs.space import StrategySpace
from shardplan.costs.step_seconds import StepSeconds
from shardplan.costs.tables import PS, Tables
from shardplan.ilp.solver.problem import Edge, Problem, Usage, sum_over_intervals
from shardplan.mesh import collective
from shardplan.mesh.collective import CollectiveKey
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder, ReshardStep
from shardplan.xla_model.combining import COMBINABLE
from shardplan.xla_model.liveness import Interval, live_intervals, takes_over_buffer
from shardplan.xla_model.overlap_windows import OverlapWindows, overlap_windows

SMALL = 1e-3
"""Copies smaller than this share of the memory limit are not told apart from their originals."""


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """A problem and how to read its answer.

    Attributes:
        problem: nodes are the graph's ops, in order.
        doubled: ops whose states s and s + k are strategy s without and with a buffer of its own; in the last k states of a share
            with an `earlier` reader the copy is kept from there.
        resharders: per value, what prices its reshards.
        background: (edge, picoseconds of it that other work hides).
        pricing: what `problem` assumes of the whole plan.
        unpriced: copies that the problem takes for the originals: small ones, and without a limit all.
    """

    space: StrategySpace
    problem: Problem
    doubled: frozenset[int]
    unpriced: tuple[Usage, ...]
    resharders: tuple[Resharder, ...]
    background: tuple[tuple[int, np.ndarray], ...]
    pricing: Pricing

    def step_seconds(self, states) -> StepSeconds:
        """What a step takes under these states, in whole picoseconds but for the background."""
        problem = self.problem
        compute = sum(float(c[s]) for c, s in zip(problem.costs, states, strict=True))
        paid = [float(e.cost[states[e.i], states[e.j]]) for e in problem.edges]
        edges = problem.edges
        behind = sum(float(hidden[states[edges[n].i], states[edges[n].j]]) for n, hidden in self.background)
        inline = sum(paid) - self.pricing.background_price * behind
        return StepSeconds(compute, inline, behind, sum(float(c.min()) for c in problem.costs))

    def strategies(self, states) -> tuple[int, ...]:
        """The strategy number of every op."""
        return tuple(s % len(c) for s, c in zip(states, self.space.strategies, strict=True))

    def retained(self, states) -> frozenset[int]:
        """Shares that take the copy of an earlier phase."""
        n = self.space.strategies
        return frozenset(j for j in self.space.graph.retainable_from if states[j] >= len(n[j]) * (1 + (j in self.doubled)))

    def path(self, v: int, before: Layout, after: Layout) -> tuple[ReshardStep, ...]:
        """The collectives that bring value v from one layout to another."""
        value = self.space.graph.values[v]
        return self.resharders[v].path(value.shape, value.itemsize, before, after)

    def reshards(self, j: int, strategies: Sequence[int], kept: Collection[int]) -> Iterator[tuple[int, tuple[ReshardStep, ...]]]:
        """(operand, collectives) that bring op j its operands, in one run; nothing is moved for shares that are `kept`."""
        values, choices = self.space.graph.values, self.space.strategies
        for k, v in enumerate(self.space.graph.ops[j].inputs if j not in kept else ()):
            if v is not None:
                i, r = values[v].producer
                before, after = choices[i].results[r][strategies[i]], choices[j].operands[k][strategies[j]]
                if before != after and (steps := self.path(v, before, after)):
                    yield k, steps

    def combined_groups(self, states) -> CombinedGroups:
        """What these states move together."""
        graph, strategies, kept = self.space.graph, self.strategies(states), self.retained(states)
        moved: dict[tuple[int, CollectiveKey], dict[int, float]] = {}
        for j, op in enumerate(graph.ops):
            for k, steps in self.reshards(j, strategies, kept):
                v = op.inputs[k]
                assert v is not None
                place = self.space.collective_sites[v]
                waited = place.collective_class == "blocking" and op.phase != "update" and op.loop < 0
                for step in steps if place.group_size > 1 or waited else ():
                    if step.kind in COMBINABLE or waited:
                        size = graph.values[v].bytes / step.after.shards(self.space.mesh)
                        moved.setdefault((place.group, (step.kind, step.axes)), {})[place.origin] = size
        return tuple((way, tuple(sorted(sizes.items()))) for way, sizes in sorted(moved.items()))

    def translate(self, other: CostNetwork, states) -> tuple[int, ...]:
        """The states in which every op does what it does in `states` of another network of the same graph."""
        number: dict[int, dict] = {}
        out = []
        for found, wide, s in zip(other.space.strategies, self.space.strategies, states, strict=True):
            at = number.setdefault(id(wide), {x: n for n, x in enumerate(wide.factors)})
            block, s = divmod(s, len(found))
            out.append(block * len(wide) + at[found.factors[s]])
        return tuple(out)

    def allocations(self, states) -> list[tuple[int, int, int, float]]:
        """(op, lo, hi, bytes) of everything a device has in memory at the times lo <= t < hi."""
        graph, choices = self.space.graph, self.space.strategies
        out = [(u.node, u.lo, u.hi, float(u.bytes[states[u.node]])) for u in self.problem.usages]
        chosen = self.strategies(states)
        for u in self.unpriced:
            v, held = graph.ops[u.node].inputs[0], choices[u.node].results[0][chosen[u.node]]
            i, r = (u.node, 0) if v is None else graph.values[v].producer  # a number written in the program is held by its reader
            if v is None or held != choices[i].results[r][chosen[i]]:
                out.append((u.node, u.lo, u.hi, float(u.bytes[states[u.node]])))
        return out

    def peak(self, states) -> float:
        """The most bytes that a device has in memory at any time, of everything."""
        return float(sum_over_intervals((lo, hi, n) for _, lo, hi, n in self.allocations(states)).max(initial=0.0))


def build_network(
    space: StrategySpace,
    resharder: Resharder,
    limit: float | None,
    allowed: Mapping[int, np.ndarray] | None = None,
    corrections: CostCorrections | None = None,
    pricing: Pricing = Pricing(),  # noqa: B008
) -> CostNetwork:
    """The network of a space.

    Args:
        space: graph, strategies and compute seconds.
        resharder: prices redistribution on the space's mesh.
        limit: bytes per device, or None.
        allowed: for pinned ops, which strategies remain: bool [s].
        corrections: what some choices cost beyond the model.
        pricing: what the network assumes of the whole plan.
    """
    graph, choices = space.graph, space.strategies
    doubled = _doubled(space, limit)

    def blocks(i: int) -> int:
        """How many states each strategy of op i has."""
        return 1 + (i in doubled) + (i in graph.retainable_from)

    costs = []
    cache: dict = {}
    for i, op in enumerate(graph.ops):
        key = (id(space.seconds[i]), op.runs, blocks(i))
        if allowed is not None and i in allowed:
            key = (*key, i)
        if key not in cache:
            cost = np.rint(space.seconds[i] * op.runs * PS)
            if allowed is not None and i in allowed:
                cost = np.where(allowed[i], cost, np.inf)
            cache[key] = np.tile(cost, blocks(i))
        costs.append(cache[key])

    for (i, s), extra in (corrections.strategies if corrections else {}).items():
        costs[i] = costs[i] + np.where(np.arange(len(costs[i])) % len(choices[i]) == s, np.rint(extra * PS), 0.0)

    pinned = frozenset(allowed or ())
    pinned |= {start for start, end in graph.same_layout if end in pinned}
    wait = _waits(space, pricing.combined)
    live = _live(space, wait)
    tables = Tables(space, resharder, doubled, pricing, pinned, wait)
    charged: dict[tuple[int, int], list[tuple[Layout, Layout, float]]] = {}
    for (j, k, before, after), extra in (corrections.reshards if corrections else {}).items():
        charged.setdefault((j, k), []).append((before, after, extra))
    edges, background = [], []
    for i, j, k, v, way in space.ways:
        table, hidden = tables.handed(i, j, k, v, way)
        for before, after, extra in charged.get((j, k), ()):
            table = table + tables.chosen(way, before, after, table) * np.rint(extra * PS)
        if hidden is not None:
            background.append((len(edges), hidden))
        edges.append(Edge(i, j, table))
    edges += [Edge(i, j, tables.tied(i, j)) for i, j in graph.same_layout]
    edges += [Edge(i, j, tables.retained(i, k, j)) for j, (i, k) in graph.retainable_from.items()]

    usages, unpriced = [], []
    for v, interval in enumerate(live):
        if interval is None or interval[0] >= interval[1]:
            continue
        i, r = graph.values[v].producer
        alias = graph.ops[i].traits.alias and not takes_over_buffer(graph, i)
        held, told = tables.held(i, r, v), not alias or i in doubled
        nothing = [0 * held] * (blocks(i) - 1)
        own = np.tile(held, blocks(i)) if not told else np.concatenate([0 * held, *[held] * len(nothing)]) if nothing else held
        (usages if told else unpriced).append(Usage(i, *interval, own))
        if i in graph.retainable_from:
            at, _ = graph.retainable_from[i]
            before = live[graph.ops[at].outputs[0]] if graph.ops[at].traits.copy else None
            since = before[1] if before else at + 1
            if since < interval[0]:
                (usages if told else unpriced).append(Usage(i, since, interval[0], np.concatenate([*nothing, held])))
    ties = _split_unequal(
        space.layers, costs, [(i in doubled, i in graph.retainable_from) for i in range(len(costs))], graph.same_layout
    )
    names = tuple(f"{op.primitive} at {op.source}" if not op.label else op.label for op in graph.ops)
    assert all(len(c) == len(choices[i]) * blocks(i) for i, c in enumerate(costs))
    problem = Problem(tuple(costs), tuple(edges), tuple(usages), limit, names, ties)
    return CostNetwork(space, problem, doubled, tuple(unpriced), tables.resharders, tuple(background), pricing)


def replicated_bytes(space: StrategySpace) -> float:
    """The most bytes that a device would hold at any time if nothing were split, and nothing waited."""
    held = ((*at, value.bytes) for at, value in zip(_live(space), space.graph.values, strict=True) if at is not None)
    return float(sum_over_intervals(held).max(initial=0.0))


def _live(space: StrategySpace, wait: OverlapWindows | None = None) -> list[Interval | None]:
    """When each value is in memory, reshards waiting or not."""
    in_place = [rule.fusion in ("loop", "view") for rule in space.rules]
    return live_intervals(space.graph, space.materialised, in_place, wait)


def _waits(space: StrategySpace, combined: CombinedGroups | None) -> OverlapWindows:
    """How long reshards may take, if a plan moves these arrays together."""
    line = {place.group for place in space.collective_sites if place.collective_class == "blocking"}
    moved: dict[int, list[tuple[CollectiveKey, float]]] = {}
    awaited: dict[int, list[tuple[CollectiveKey, float]]] = {}
    for (crowd, way), arrays in combined or ():
        for at, size in arrays:
            (awaited if crowd in line else moved).setdefault(at, []).append((way, size))

    def takes(way: tuple[tuple[CollectiveKey, float], ...] | str, size: float) -> float:
        """Of all collectives on a way, by what part of `size` each makes; of a way of which only the kind is known, over all axes."""
        found = 0.0
        for (kind, axes), part in (((way, space.mesh.axes), 1.0),) if isinstance(way, str) else way:
            bytes_ = size * part * (space.mesh.size(*axes) if kind == "reduce-scatter" else 1)
            found += collective.seconds(kind, bytes_, axes, space.mesh, space.cluster)
        return found

    def whole(steps: list[tuple[CollectiveKey, float]]) -> tuple[tuple[tuple[CollectiveKey, float], ...], float]:
        most = max(size for _, size in steps)
        return tuple((way, size / (most or 1.0)) for way, size in steps), most

    shards = 1 if combined is None else space.mesh.size(*space.mesh.axes)
    work = _work(space, {at: min(size for _, size in steps) for at, steps in moved.items()})
    scattered = {at for at, steps in moved.items() if any(kind == "reduce-scatter" for (kind, _), _ in steps)}
    ways, lines = ({at: whole(steps) for at, steps in of.items()} for of in (moved, awaited))
    return overlap_windows(space.graph, space.collective_sites, work, ways, takes, shards, scattered, lines)


def _work(space: StrategySpace, sizes: Mapping[int, float]) -> list[float]:
    """Seconds of every op in one run under its fastest strategy; of what is computed with gradients, as these arrive.

    Args:
        sizes: by the op that makes an array that is moved, the bytes of the result on a device.
    """
    graph = space.graph
    part = [0.0] * len(graph.ops)  # of the work, what a device does at least
    for i, op in enumerate(graph.ops):
        made = [graph.values[v].producer[0] for v in op.inputs if v is not None]
        if i in sizes and space.collective_sites[op.outputs[0]].collective_class == "gradient":
            part[i] = sizes[i] / graph.values[op.outputs[0]].bytes
        elif op.phase != "forward" and made:
            part[i] = max(part[at] for at in made)
    least: dict[tuple[int, float], float] = {}
    out = []
    for i, op in enumerate(graph.ops):
        key = id(space.seconds[i]), part[i] if op.phase == "update" else 0.0
        if key not in least:
            split = space.strategies[i].work >= key[1] * (1 - 1e-9)
            least[key] = float(space.seconds[i][split].min() if split.any() else space.seconds[i].max())
        out.append(least[key])
    return out


def _doubled(space: StrategySpace, limit: float | None) -> frozenset[int]:
    graph = space.graph
    return frozenset(
        i
        for i, op in enumerate(graph.ops)
        if limit is not None
        and op.traits.alias
        and op.inputs[0] is not None
        and not takes_over_buffer(graph, i)
        and graph.values[op.outputs[0]].bytes > SMALL * limit
    )


def _split_unequal(ties, costs, kinds, tied) -> tuple[int, ...]:
    """Members of a class must have the same states: pins, also those of what they are tied to, and boundary effects set some apart."""
    forbidden = [b"" if np.isfinite(c).all() else np.isinf(c).tobytes() for c in costs]
    beside = {x: forbidden[y] for pair in tied for x, y in (pair, pair[::-1])}
    first: dict = {}
    return tuple(first.setdefault((c, len(costs[i]), kinds[i], forbidden[i], beside.get(i)), i) for i, c in enumerate(ties))
