"""Edge and usage tables of a cost network (`build.py`): what each array costs on its way from op to op, and what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2, prod
from typing import NamedTuple

import numpy as np

from shardplan.costs.edge_templates import EdgeTemplate
from shardplan.costs.pricing import Pricing, resharders
from shardplan.costs.space import StrategySpace
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.coupled_state import CoupledState
from shardplan.xla_model.overlap_windows import OverlapWindows

PS = 1e12
"""Picoseconds per second: costs of a planner's problem are whole picoseconds."""

LEAST_SLACK_S = 1e-6
"""Work shorter than this hides nothing."""


@dataclass(frozen=True, eq=False)
class _Layouts:
    """A list of layouts as arrays.

    Attributes:
        layouts: the distinct ones.
        at: [entry of the list] -> which of them.
        names, dims: [layout], equal numbers for equal layouts, and for layouts that split alike.
        shards, partial: [layout].
    """

    layouts: tuple[Layout, ...]
    at: np.ndarray
    names: np.ndarray
    dims: np.ndarray
    shards: np.ndarray
    partial: np.ndarray

    def equal(self, others: _Layouts) -> np.ndarray:
        """[layout, other]"""
        return self.names[:, None] == others.names


class Priced(NamedTuple):
    """Costs of an edge, and what of them other work hides, picoseconds; None for nothing."""

    cost: np.ndarray
    hidden: np.ndarray | None


class Tables:
    """Edge and usage tables, one array object per distinct content."""

    def __init__(
        self,
        space: StrategySpace,
        resharder: Resharder,
        doubled: frozenset[int],
        pricing: Pricing,
        pinned: frozenset[int],
        overlap_windows: OverlapWindows,
    ):
        self.space, self.doubled, self.pricing, self.pinned, self.overlap_windows = space, doubled, pricing, pinned, overlap_windows
        self.resharders = resharders(space, resharder, pricing.combined)
        self.cache: dict = {}
        self.lists: dict[int, _Layouts] = {}
        self.names: dict = {}

    def _distinct(self, layouts: tuple[Layout, ...]) -> _Layouts:
        """What is to know of a list of layouts."""
        if id(layouts) not in self.lists:
            number: dict[Layout, int] = {}
            at = np.array([number.setdefault(x, len(number)) for x in layouts], dtype=np.int64)
            names, dims = ([self.names.setdefault(x, len(self.names)) for x in of] for of in (number, [x.dims for x in number]))
            shards = [x.shards(self.space.mesh) for x in number]
            partial = np.array([bool(x.partial) for x in number])
            self.lists[id(layouts)] = _Layouts(tuple(number), at, np.array(names), np.array(dims), np.array(shards), partial)
        return self.lists[id(layouts)]

    def hides(self, j: int, k: int, reads: float) -> tuple[float, float]:
        """Picoseconds per step of the way to operand k of op j that other work hides at most, and if it is scattered.

        Rounded to powers of the fourth root of two, so that layers that are alike have the same tables.
        """
        each = self.overlap_windows.seconds.get((j, k), 0.0), self.overlap_windows.scatter_seconds.get((j, k), 0.0)
        summed, scattered = (np.rint(2 ** (round(4 * log2(s * reads * PS)) / 4)) if s > LEAST_SLACK_S else 0.0 for s in each)
        return summed, scattered

    def handed(self, i: int, j: int, k: int, v: int, way: EdgeTemplate) -> Priced:
        """Edge of the array v that op i makes and op j takes as operand k."""
        hides = self.hides(j, k, way.reads)
        copies = i in self.doubled, j in self.doubled
        follows = way.follows and i not in self.pinned and j not in self.pinned
        resharder = self.resharders[v]
        key = (id(way), id(resharder), hides, copies, follows)
        if key not in self.cache:
            self.cache[key] = self._handed(way, resharder, hides, copies, follows)
        return self.cache[key]

    def _handed(
        self, way: EdgeTemplate, resharder: Resharder, hides: tuple[float, float], copies: tuple[bool, bool], follows: bool
    ) -> Priced:
        sources, targets = self._distinct(way.made), self._distinct(way.taken)
        asked, equal = (way.shape, way.itemsize, sources.layouts, targets.layouts), sources.equal(targets)
        table = resharder.table(*asked) * (way.reads * PS)
        sent = np.zeros_like(table)
        if any(hides):
            sent = np.rint(resharder.table(*asked, last=True) * (way.reads * PS))
            summed, scattered = hides
            sent = np.minimum(sent, np.where(self._scattered(sources, targets), scattered, summed))
        if way.beside:
            table = table + self._turning(way.shape, way.beside, sources, targets) * (way.reads * PS)
        if way.ordered:
            table = table + self._put_in_order(way.shape, way.sliced, sources, targets) * (way.reads * PS)
        if way.added is not None:
            alone = self._axes(sources.layouts, way.added)[:, None] != 0
            table = table + np.where(alone, 0.0, self._adding(way.shape, way.itemsize, sources, targets)) * (way.reads * PS)
            table = np.where(targets.partial & ~equal, np.inf, table)
        if way.both:
            alone = self._axes(sources.layouts, way.both)[:, None] != 0
            table = np.where(alone & self._scattered(sources, targets), np.inf, table)
        table = np.rint(table - (1 - self.pricing.background_price) * sent)
        if follows:
            table = np.where(~sources.partial[:, None] & ~equal, np.inf, table)
        if way.summed:
            table = np.where(self._cut(sources, targets, way.summed == 1), np.inf, table)
        if way.copied:
            table = np.where(sources.shards[:, None] > targets.shards, np.inf, table)
        each = np.ix_(sources.at, targets.at)
        table, sent, equal = table[each], sent[each], equal[each]
        if copies[1]:
            table = np.concatenate([np.where(equal, 0.0, np.inf), np.where(equal, np.inf, table)], axis=1)
            sent = np.concatenate([np.zeros_like(sent), sent], axis=1)
        if way.keeps:  # a copy that is none is not kept
            table = np.concatenate([table, np.where(equal, np.inf, 0.0)], axis=1)
            sent = np.concatenate([sent, np.zeros(equal.shape)], axis=1)
        if (rows := 1 + copies[0] + way.kept) > 1:
            table, sent = (np.tile(x, (rows, 1)) for x in (table, sent))
        return Priced(table, sent if sent.any() else None)

    def _turning(self, shape: tuple[int, ...], turned: CoupledState, sources: _Layouts, targets: _Layouts) -> np.ndarray:
        """Seconds [source, target] of turning what a sum is computed with that is scattered along any dim but the first.

        XLA lays an array out so that its parts on the devices lie one after the other, and what is computed with it in the same way.
        """
        device = self.space.cluster.device
        later = [d for n, d in enumerate(turned.order) if prod(shape[e] for e in turned.order[:n]) > 1]
        seconds = sum(np.maximum(device.kernel_latency_s, 2 * n / targets.shards / device.memory_rate) for n in turned.bytes)
        return np.where(self._sums(sources.layouts)[:, None] & self._axes(targets.layouts, later), seconds, 0.0)

    def _put_in_order(self, shape: tuple[int, ...], sliced: float, sources: _Layouts, targets: _Layouts) -> np.ndarray:
        """Seconds [source, target] of turning what is gathered along any dim but the first, for readers inside fusions.

        What is gathered lies one part after the other. A product reads it so; elementwise work would hand the order on to all that is
        computed with it, and XLA's fused normalisations are for rows. It takes a kernel; the bytes are read and written anyway, but
        for those that a loop cuts rows from (`sliced` of them in all).
        """
        device = self.space.cluster.device
        later = [d for d in range(len(shape)) if prod(shape[:d]) > 1]
        gathered = self._axes(sources.layouts, later)[:, None] & ~self._axes(targets.layouts, range(len(shape)))
        seconds = np.maximum(device.kernel_latency_s, 2 * sliced / targets.shards / device.memory_rate)
        return np.where(gathered, seconds, 0.0)

    def _adding(self, shape: tuple[int, ...], itemsize: float, sources: _Layouts, targets: _Layouts) -> np.ndarray:
        """Seconds [source, target] of half an addition of two sums that are scattered, beyond that of their shards.

        XLA adds such sums as they are and scatters the result: three arrays as large as a sum on a device are read or written.
        """
        whole, split = (prod(shape) * itemsize / x for x in (sources.shards[:, None], targets.shards))
        seconds = 1.5 * np.maximum(0.0, whole - split) / self.space.cluster.device.memory_rate
        return np.where(self._scattered(sources, targets), seconds, 0.0)

    def _cut(self, sources: _Layouts, targets: _Layouts, scatters: bool) -> np.ndarray:
        """[source, target] -> whether the target splits what a loop added up in a way in which XLA scatters no such sum.

        Args:
            scatters: whether it does where one dim is split over all axes of the sum, and not if a cast is in between.
        """
        rank = targets.layouts[0].rank
        every = self._sums(sources.layouts)[:, None]
        whole = [(self._axes(targets.layouts, [d]) & every) == every for d in range(rank)]
        return self._scattered(sources, targets) & ~(scatters & np.any(whole, axis=0))

    def _scattered(self, sources: _Layouts, targets: _Layouts) -> np.ndarray:
        """[source, target] -> whether a sum is split over an axis that it is partial over."""
        return (self._sums(sources.layouts)[:, None] & self._axes(targets.layouts, range(targets.layouts[0].rank))) != 0

    def _sums(self, layouts: Iterable[Layout]) -> np.ndarray:
        """[layout] -> the mesh axes over which these are partial, as bits."""
        number = self.space.mesh.axes.index
        return np.array([sum(1 << number(a) for a in x.partial_axes) for x in layouts], np.int64)

    def _axes(self, layouts: Iterable[Layout], dims: Iterable[int]) -> np.ndarray:
        """[layout] -> the mesh axes that split these dims, as bits."""
        number = self.space.mesh.axes.index
        return np.array([sum(1 << number(a) for d in dims for a in x.dims[d]) for x in layouts], np.int64)

    def chosen(self, way: EdgeTemplate, before: Layout, after: Layout, table: np.ndarray) -> np.ndarray:
        """Where in the edge's `table` a reshard from `before` to `after` takes place: 1, elsewhere 0."""
        rows, columns = table.shape[0] // len(way.made), table.shape[1] // len(way.taken)
        place = np.outer(np.tile([x == before for x in way.made], rows), np.tile([x == after for x in way.taken], columns))
        return np.where(place & np.isfinite(table) & (table > 0), 1.0, 0.0)

    def retained(self, i: int, k: int, j: int) -> np.ndarray:
        """Edge of the op that took a copy as its operand k and the share that may keep that copy: where it does, layouts agree."""
        graph, space = self.space.graph, self.space
        taken, held = space.strategies[i].operands[k], space.strategies[j].results[0]
        rows, columns = 1 + (i in self.doubled) + (i in graph.retainable_from), 1 + (j in self.doubled)
        key = ("kept", id(taken), id(held), rows, columns)
        if key not in self.cache:
            equal = self._where_equal(taken, held)
            self.cache[key] = np.tile(np.concatenate([*[np.zeros_like(equal)] * columns, equal], axis=1), (rows, 1))
        return self.cache[key]

    def tied(self, i: int, j: int) -> np.ndarray:
        """Edge of two ops that must have one layout: what i makes is what j makes."""
        a, b = self.space.strategies[i].results[0], self.space.strategies[j].results[0]
        key = ("tied", id(a), id(b), i in self.doubled, j in self.doubled)
        if key not in self.cache:
            self.cache[key] = np.tile(self._where_equal(a, b), (1 + (i in self.doubled), 1 + (j in self.doubled)))
        return self.cache[key]

    def _where_equal(self, some: tuple[Layout, ...], others: tuple[Layout, ...]) -> np.ndarray:
        """[some, others] -> 0 where they are the same layout, elsewhere inf."""
        a, b = self._distinct(some), self._distinct(others)
        return np.where(a.equal(b)[np.ix_(a.at, b.at)], 0.0, np.inf)

    def held(self, i: int, r: int, v: int) -> np.ndarray:
        """Bytes per device of result r of op i under each strategy."""
        value, layouts = self.space.graph.values[v], self.space.strategies[i].results[r]
        key = ("held", id(layouts), value.bytes)
        if key not in self.cache:
            found = self._distinct(layouts)
            self.cache[key] = np.ceil(value.bytes / found.shards)[found.at]
        return self.cache[key]
