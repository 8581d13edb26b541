"""Tables of a cost network over the states of its ops, one array object per distinct content: the solver relies on shared identity.

Seconds of an array on its way from the layout it is made in to the layout it is read in, in picoseconds, rounded:

e[s, t] = reads * (reshard[s, t] + kernels[s, t]) - (1 - w) * hidden[s, t]

reshard     cheapest reshard path (`mesh/reshard.py`)
kernels     what XLA computes on the way: transposes in memory (`transposes.py`), casts, an addition before a reduce-scatter
hidden      the last collective of the path, as far as its overlap window reaches; w is the price of background communication
inf         where the consumer propagates the layout, or XLA builds another program than the table says
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import log2, prod
from typing import NamedTuple

import numpy as np

from shardplan.costs.array_edges import ArrayEdge, EdgeTemplate, LayoutList
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import PS, StateBlocks
from shardplan.costs.transposes import transpose_seconds
from shardplan.mesh.device import Device
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder

MIN_WINDOW_S = 1e-6
"""Compute shorter than this hides no collective."""

WindowSeconds = Mapping[tuple[int, int], float]
EdgeCost = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]
"""Picoseconds [s, t]: what an edge costs; of that, what of its collectives compute can hide, and its kernels (None: nothing)."""


class EdgeLayouts(NamedTuple):
    """What the table of an edge has of its template alone, whatever the prices; masks and seconds are [source, target]."""

    sources: LayoutList
    targets: LayoutList
    scattered: np.ndarray  # whether a partial source becomes sharded over an axis that it is partial over
    kernels: np.ndarray | None  # picoseconds per step of what XLA computes on the way; None: nothing
    forbidden: np.ndarray | None  # where no plan may bring the array from one layout to the other; None: nowhere
    equal: np.ndarray  # [strategy, strategy]: whether the layouts are the same
    strategies: tuple[np.ndarray, ...]  # index of the tables' entries, [strategy, strategy]

    def at(self, s: int, t: int) -> tuple[int, int]:
        """Where the tables have the strategy s of the producer and t of the consumer."""
        return self.sources.index[s], self.targets.index[t]


def edge_layouts(space: StrategySpace, template: EdgeTemplate, follows: bool) -> EdgeLayouts:
    """Of a template's edges whose consumer propagates the layout or not; found once."""
    key = (id(template), follows)
    if (found := space.edge_layouts.get(key)) is None:
        sources, targets = map(space.layout_lists, (template.result_layouts, template.operand_layouts))
        scattered, at = reduce_scattered(sources, targets), np.ix_(sources.index, targets.index)
        computed = _beyond_collectives(space.cluster.device, template, sources, targets, scattered)
        kernels = [np.broadcast_to(seconds * (template.reads * PS), scattered.shape) for seconds in computed]
        kernels = np.rint(np.sum(kernels, axis=0)) if kernels else None
        never = [mask for mask in _forbidden(template, sources, targets, scattered, follows) if mask.any()]
        forbidden = np.logical_or.reduce([np.broadcast_to(mask, scattered.shape) for mask in never]) if never else None
        found = EdgeLayouts(sources, targets, scattered, kernels, forbidden, sources.equal(targets)[at], at)
        space.edge_layouts[key] = found
    return found


@dataclass(frozen=True, eq=False)
class CostTables:
    """Edge and usage tables; keys of `cache` hold `id`s of objects that the space or this object keeps alive.

    Networks of one space share what their prices leave the same: `cache` begins with the tables that the network before this one
    looked up, and `StrategySpace.tables` keeps those that this one does.

    Attributes:
        pinned: ops whose layout is the user's: they follow nobody.
        window_seconds: overlap windows, (op, operand) -> seconds of one run: of any collective, and of one that scatters a gradient.
        resharders: per value, what prices its reshards.
        rounded: what makes whole picoseconds of a cost: to the nearest, or down in a bound.
    """

    space: StrategySpace
    blocks: StateBlocks
    pinned: frozenset[int]
    window_seconds: tuple[WindowSeconds, WindowSeconds]
    resharders: tuple[Resharder, ...]
    background_price: float
    before: Mapping = field(default_factory=dict)
    cache: dict = field(default_factory=dict)
    rounded: Callable[[np.ndarray], np.ndarray] = np.rint

    def edge(self, edge: ArrayEdge) -> EdgeCost:
        """Picoseconds of an array on its way, [state of the producer, state of the consumer]."""
        i, j, k, _, template = edge
        whole, scattered = (seconds.get((j, k), 0.0) for seconds in self.window_seconds)
        window = _rounded_ps(whole, template.reads), _rounded_ps(scattered, template.reads)
        aliasing = i in self.blocks.aliasing, j in self.blocks.aliasing
        follows = edge.follows(self.pinned)
        price = self.background_price if any(window) else 1.0  # of nothing that is hidden
        resharder = self.resharder(edge)
        key = (id(template), id(resharder), window, aliasing, follows, price)
        if (found := self.cache.get(key)) is None:
            if (found := self.before.get(key)) is None:
                found = self._over_states(template, resharder, window, follows, aliasing), resharder
            self.cache[key] = found  # with the resharder, so that its id is not used again
        return found[0]

    def resharder(self, edge: ArrayEdge) -> Resharder:
        """What prices the reshards of an array."""
        return self.space.facts.resharder(self.resharders, edge.consumer, edge.operand, edge.value)

    def _over_states(
        self, template: EdgeTemplate, resharder: Resharder, window: tuple[float, float], follows: bool, aliasing: tuple[bool, bool]
    ) -> EdgeCost:
        layouts = edge_layouts(self.space, template, follows)
        cost, hidden = self._over_layouts(template, layouts, resharder, window)
        at = layouts.strategies
        tables = cost[at], None if hidden is None else hidden[at], None if layouts.kernels is None else layouts.kernels[at]
        return _over_states(template, tables, layouts.equal, *aliasing)

    def _over_layouts(
        self, template: EdgeTemplate, layouts: EdgeLayouts, resharder: Resharder, window: tuple[float, float]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Cost and hidden part (None: nothing) in picoseconds, both [source, target], over distinct layouts.

        `window` is that of the array's collective in picoseconds per step, and of a gradient also if it is reduce-scattered.
        """
        per_step = template.reads * PS
        array = template.shape, template.itemsize, layouts.sources.layouts, layouts.targets.layouts
        cost, hidden = resharder.table(*array) * per_step, None
        if any(window):
            hidden = np.rint(resharder.table(*array, last=True) * per_step)
        if layouts.kernels is not None:
            cost = cost + layouts.kernels
        if hidden is not None:
            hidden = np.minimum(hidden, np.where(layouts.scattered, window[1], window[0]))
        cost = self.rounded(cost if hidden is None else cost - (1 - self.background_price) * hidden)
        if layouts.forbidden is not None:
            cost[layouts.forbidden] = np.inf
        return cost, hidden

    def retained(self, i: int, k: int, j: int) -> np.ndarray:
        """Edge of the op that read a copy as its operand k, and copy j, which may retain it: where it does, layouts agree."""
        of = self.space.strategies
        return self._agreement(of[i].operands[k], of[j].results[0], self.blocks.count(i), 1 + (j in self.blocks.aliasing), 1)

    def same_layout(self, i: int, j: int) -> np.ndarray:
        """Edge of two ops whose results have one layout."""
        of, aliasing = self.space.strategies, self.blocks.aliasing
        return self._agreement(of[i].results[0], of[j].results[0], 1 + (i in aliasing), 0, 1 + (j in aliasing))

    def _agreement(self, some: tuple[Layout, ...], others: tuple[Layout, ...], rows: int, free: int, columns: int) -> np.ndarray:
        """Blocks [some, others], 0 where layouts are the same, elsewhere inf; before them `free` columns of blocks with zeros."""
        key = ("agreement", id(some), id(others), rows, free, columns)
        if key not in self.cache:
            a, b = map(self.space.layout_lists, (some, others))
            equal = np.where(a.equal(b)[np.ix_(a.index, b.index)], 0.0, np.inf)
            self.cache[key] = np.tile(np.concatenate([*[np.zeros_like(equal)] * free, *[equal] * columns], axis=1), (rows, 1))
        return self.cache[key]

    def bytes(self, i: int, array: int, v: int) -> np.ndarray:
        """Bytes per device of value v, an array of op i (operands, then results), under each strategy, [s]."""
        value, of = self.space.graph.values[v], self.space.strategies[i]
        shards = of.shards[array]
        key = ("bytes", id(shards), value.bytes)
        if key not in self.cache:
            self.cache[key] = np.ceil(value.bytes / shards)
        return self.cache[key]


def _rounded_ps(seconds: float, reads: float) -> float:
    """Picoseconds per step, rounded to powers of the fourth root of two, so that repeated layers share tables."""
    return float(round(2 ** (round(4 * log2(seconds * reads * PS)) / 4))) if seconds > MIN_WINDOW_S else 0.0


def _beyond_collectives(
    device: Device, template: EdgeTemplate, sources: LayoutList, targets: LayoutList, scattered: np.ndarray
) -> Iterator[np.ndarray]:
    """Seconds [source, target] of what XLA computes on the way, per read."""
    latency, rate, shape = device.kernel_latency_s, device.memory_rate, template.shape
    yield from transpose_seconds(device, template, sources, targets)
    if template.coupled_state:
        # A sum that is scattered along any dim but the outermost has that dim outermost in memory, and XLA lays out the optimizer
        # state that is computed with it in the same order.
        order = template.coupled_state.order
        inner = [d for n, d in enumerate(order) if prod(shape[e] for e in order[:n]) > 1]
        seconds = sum(np.maximum(latency, 2 * n / targets.shards / rate) for n in template.coupled_state.bytes)
        yield np.where(sources.partial_axes[:, None] & targets.sharding_axes(inner), seconds, 0.0)
    if template.loop_bytes or (template.in_fusion and not (template.order and template.order.input_bytes)):
        # Parts gathered along any dim but the outermost lie one after the other. A product reads them so; an elementwise op would
        # hand the order on to all ops behind it, and XLA's fused normalisations need rows. The kernel that transposes them reads and
        # writes bytes that are moved anyway, but for those of a loop's operand, which is row-major (fact: layout-loop-operands); an
        # input is transposed before.
        inner = [d for d in range(len(shape)) if prod(shape[:d]) > 1]
        gathered = sources.sharding_axes(inner)[:, None] & ~targets.sharding_axes()
        yield np.where(gathered, np.maximum(latency, 2 * template.loop_bytes / targets.shards / rate), 0.0)
    if template.behind_bytes:
        yield np.where(sources.equal(targets), 0.0, np.maximum(latency, template.behind_bytes / targets.shards / rate))
    if template.addend_dims is not None:
        # XLA adds two partial sums and reduce-scatters the result: three arrays of a partial sum's size are read or written. Each
        # edge has half of what that takes beyond adding their shards.
        full, sharded = (prod(shape) * template.itemsize / n for n in (sources.shards[:, None], targets.shards))
        rows_sharded = sources.sharding_axes(template.addend_dims)[:, None] != 0
        yield np.where(scattered & ~rows_sharded, 1.5 * np.maximum(0.0, full - sharded) / rate, 0.0)


def _forbidden(
    template: EdgeTemplate, sources: LayoutList, targets: LayoutList, scattered: np.ndarray, follows: bool
) -> Iterator[np.ndarray]:
    """Bool [source, target]: where no plan may bring the array from one layout to the other."""
    partial, equal = sources.partial_axes[:, None], sources.equal(targets)
    if template.addend_dims is not None:
        yield (targets.partial_axes != 0) & ~equal
    if template.sum_dims:
        yield scattered & (sources.sharding_axes(template.sum_dims)[:, None] != 0)
    if follows:
        yield (partial == 0) & ~equal
    if template.accumulated_ratio:
        # XLA reduce-scatters a sum that a loop accumulated if its axes, in mesh order, shard one dim, and no cast is between.
        one_dim = [(targets.sharding_axes([d]) & partial) == partial for d in range(len(template.shape))]
        yield scattered & ~((template.accumulated_ratio == 1) & targets.in_mesh_order & np.any(one_dim, axis=0))
    if template.accumulates:
        # What is all-reduced in the loop is a partial sum in the compiled program, and all-reduced after the loop: so it is planned.
        sums = np.array([all(kind == "sum" for _, kind in x.partial) for x in sources.layouts])
        same = np.array([[x.dims == y.dims for y in targets.layouts] for x in sources.layouts])
        yield (partial != 0) & sums[:, None] & (targets.partial_axes == 0) & same
    if template.gathered_before:
        yield sources.shards[:, None] > targets.shards


def reduce_scattered(sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Bool [source, target]: whether a partial source becomes sharded over an axis that it is partial over."""
    return (sources.partial_axes[:, None] & targets.sharding_axes()) != 0


def _over_states(
    template: EdgeTemplate,
    tables: tuple[np.ndarray, np.ndarray | None, np.ndarray | None],
    equal: np.ndarray,
    maker_aliases: bool,
    reader_aliases: bool,
) -> EdgeCost:
    """Tables [strategy, strategy] of cost, hidden part and kernels (None: nothing) as [state, state], with blocks of states."""
    cost, hidden, kernels = (np.zeros_like(tables[0]) if x is None else x for x in tables)
    if reader_aliases:  # the same array only if layouts agree, a buffer of its own only if they do not
        cost = np.concatenate([np.where(equal, 0.0, np.inf), np.where(equal, np.inf, cost)], axis=1)
        hidden, kernels = (np.concatenate([np.zeros_like(x), x], axis=1) for x in (hidden, kernels))
    if template.to_retainable:  # an array that needs no collective is not retained
        cost = np.concatenate([cost, np.where(equal, np.inf, 0.0)], axis=1)
        hidden, kernels = (np.concatenate([x, np.zeros(equal.shape)], axis=1) for x in (hidden, kernels))
    if (rows := 1 + maker_aliases + template.from_retainable) > 1:
        cost, hidden, kernels = (np.tile(x, (rows, 1)) for x in (cost, hidden, kernels))
    return cost, hidden if hidden.any() else None, kernels if kernels.any() else None
