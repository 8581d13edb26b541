"""Tables of a cost network over the states of its ops, one array object per distinct content: the solver relies on shared identity."""

from __future__ import annotations

from math import log2

import numpy as np

from shardplan.costs.edge_costs import EdgeCost, WindowPS, edge_table
from shardplan.costs.edge_templates import ArrayEdge, EdgeTemplate
from shardplan.costs.pricing import Pricing, resharders
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import StateBlocks
from shardplan.costs.step_seconds import PS
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.overlap_windows import OverlapWindows

MIN_WINDOW_S = 1e-6
"""Compute shorter than this hides no collective."""


class CostTables:
    """Edge and usage tables; cache keys hold `id`s of objects that the space or this object keeps alive."""

    def __init__(
        self,
        space: StrategySpace,
        resharder: Resharder,
        blocks: StateBlocks,
        pricing: Pricing,
        pinned: frozenset[int],
        windows: OverlapWindows,
    ):
        self.space, self.blocks, self.pinned, self.windows = space, blocks, pinned, windows
        self.background_price = pricing.background_price
        self.resharders = resharders(space, resharder, pricing.combined)
        self.lists = space.layout_lists
        self.cache: dict = {}

    def edge(self, edge: ArrayEdge) -> EdgeCost:
        """Picoseconds of an array on its way, [state of the producer, state of the consumer]."""
        i, j, k, v, template = edge
        window = self.window(j, k, template.reads)
        aliasing = i in self.blocks.aliasing, j in self.blocks.aliasing
        follows = template.is_follower and i not in self.pinned and j not in self.pinned
        resharder = self.resharders[v]
        key = (id(template), id(resharder), window, aliasing, follows)
        if key not in self.cache:
            sources, targets = self.lists(template.result_layouts), self.lists(template.operand_layouts)
            each = np.ix_(sources.index, targets.index)
            cost, hidden = edge_table(template, sources, targets, resharder, window, follows, self.background_price)
            self.cache[key] = _over_states(template, cost[each], hidden[each], sources.equal(targets)[each], *aliasing)
        return self.cache[key]

    def window(self, j: int, k: int, reads: float) -> WindowPS:
        """Overlap window of operand k of op j; rounded to powers of the fourth root of two, so that repeated layers share tables."""
        each = self.windows.seconds.get((j, k), 0.0), self.windows.scatter_seconds.get((j, k), 0.0)
        return WindowPS(*(np.rint(2 ** (round(4 * log2(s * reads * PS)) / 4)) if s > MIN_WINDOW_S else 0.0 for s in each))

    def retained(self, i: int, k: int, j: int) -> np.ndarray:
        """Edge of the op that read a copy as its operand k, and copy j, which may retain it: where it does, layouts agree."""
        equal = self._where_equal(self.space.strategies[i].operands[k], self.space.strategies[j].results[0])
        key = ("retained", id(equal), self.blocks.count(i), j in self.blocks.aliasing)
        if key not in self.cache:
            free = [np.zeros_like(equal)] * (1 + (j in self.blocks.aliasing))
            self.cache[key] = np.tile(np.concatenate([*free, equal], axis=1), (self.blocks.count(i), 1))
        return self.cache[key]

    def same_layout(self, i: int, j: int) -> np.ndarray:
        """Edge of two ops whose results have one layout."""
        equal = self._where_equal(self.space.strategies[i].results[0], self.space.strategies[j].results[0])
        key = ("same layout", id(equal), tiles := (1 + (i in self.blocks.aliasing), 1 + (j in self.blocks.aliasing)))
        if key not in self.cache:
            self.cache[key] = np.tile(equal, tiles)
        return self.cache[key]

    def bytes(self, i: int, r: int, v: int) -> np.ndarray:
        """Bytes per device of value v, result r of op i, under each strategy, [s]."""
        value, layouts = self.space.graph.values[v], self.space.strategies[i].results[r]
        key = ("bytes", id(layouts), value.bytes)
        if key not in self.cache:
            found = self.lists(layouts)
            self.cache[key] = np.ceil(value.bytes / found.shards)[found.index]
        return self.cache[key]

    def _where_equal(self, some: tuple[Layout, ...], others: tuple[Layout, ...]) -> np.ndarray:
        """[some, others] -> 0 where they are the same layout, elsewhere inf."""
        if (key := ("equal", id(some), id(others))) not in self.cache:
            a, b = self.lists(some), self.lists(others)
            self.cache[key] = np.where(a.equal(b)[np.ix_(a.index, b.index)], 0.0, np.inf)
        return self.cache[key]


def _over_states(
    template: EdgeTemplate, cost: np.ndarray, hidden: np.ndarray, equal: np.ndarray, maker_aliases: bool, reader_aliases: bool
) -> EdgeCost:
    """Tables [strategy, strategy] as tables [state, state], with the blocks of `StateBlocks`."""
    if reader_aliases:  # the same array only if layouts agree, a buffer of its own only if they do not
        cost = np.concatenate([np.where(equal, 0.0, np.inf), np.where(equal, np.inf, cost)], axis=1)
        hidden = np.concatenate([np.zeros_like(hidden), hidden], axis=1)
    if template.to_retainable:  # an array that needs no collective is not retained
        cost = np.concatenate([cost, np.where(equal, np.inf, 0.0)], axis=1)
        hidden = np.concatenate([hidden, np.zeros(equal.shape)], axis=1)
    if (rows := 1 + maker_aliases + template.from_retainable) > 1:
        cost, hidden = (np.tile(x, (rows, 1)) for x in (cost, hidden))
    return EdgeCost(cost, hidden if hidden.any() else None)
