"""A cost network that no program undercuts: a lower bound of the seconds of every plan, whatever it combines and hides.

While a collective of a set E is on the network, the compute stream runs only kernels that neither wait for it nor are waited for by
it. Collectives run one at a time. So for every plan s, with H the kernels that are independent of some collective of E,

    seconds  >=  A(s) - H(s) + N_E(s)                                                                            (11)

A are seconds of kernels, of products that may be merged the least, N_E those of E on the network. With E empty it reads
seconds >= A(s). It holds for each loop by itself, and so does every weighted mean of such bounds, also over several sets E: the weights
y of collectives and z of kernels need no more than y + z <= 1 wherever the two are independent. Where a fraction f of the seconds in
which both streams are busy is lost, the step takes (1 - f) times those seconds and f times A(s) + N(s), of all collectives: weights are
means of both.

A weighted mean counts of the reshard of an array its seconds on the network and those of its staging kernels. The cheapest of all paths
under two weights is at least

    y >= z:   z (network + kernels) + (y - z) network        z > y:   y (network + kernels) + (z - y) kernels      (12)

each of these with its own cheapest path. Likewise for the latency, of which collectives that are combined pay one: its weight goes with
that of the kernels or apart from it, whichever gives the larger bound.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import PS, StateBlocks
from shardplan.costs.tables import CostTables
from shardplan.ilp.solver.problem import Edge, Problem
from shardplan.mesh.collective import CombinedCollectives
from shardplan.mesh.reshard import Kernels, Resharder
from shardplan.xla_model.combining import COMBINABLE

NETWORK, LATENCY, KERNELS, AROUND = range(4)
"""Columns of the weights of edges."""


class Weights(NamedTuple):
    """What a weighted mean of bounds (11) counts.

    Attributes:
        ops: [op], the fraction of its kernel's seconds.
        edges: [array edge, 4], the fractions of what its collectives take of the network without the latency that they may share, of
            this latency, of the kernels that stage them and of its slices, and of what XLA computes around all that.
    """

    ops: np.ndarray
    edges: np.ndarray

    @classmethod
    def mean(cls, some: Sequence[Weights], shares: Sequence[float]) -> Weights:
        """The mean of weights; shares add up to one."""
        pairs = list(zip(some, shares, strict=True))
        return cls(sum(p * w.ops for w, p in pairs), sum(p * w.edges for w, p in pairs))  # pyright: ignore[reportArgumentType]

    def rounded(self) -> Weights:
        """Rounded down to multiples of a power of two, so that few tables differ."""
        return Weights(*(np.floor(x * STEPS + 1e-6) / STEPS for x in self))

    def times(self, other: Weights) -> float:
        """The sum of all products."""
        return float(self.ops @ other.ops + (self.edges * other.edges).sum())


KERNELS_COUNTED: tuple[Kernels, ...] = ("none", "all", "only")
"""Of the paths of `BoundTables.tables`."""

STEPS = 1 << 10
"""Weights are multiples of its inverse."""


class Figures(NamedTuple):
    """Picoseconds per step of the ops and array edges of a plan, of each the least that any plan of its layouts takes.

    Attributes:
        ops: [op].
        edges: [array edge, 6]: on the network without shared latency, and with all of it what comes on top; network and staging
            kernels together, and what comes on top; staging kernels and slices alone; what is computed around it.
    """

    ops: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True, eq=False)
class BoundTables:
    """Picoseconds per step of nodes and array edges that no plan undercuts.

    Attributes:
        allowed: pinned op -> bool [s], which strategies remain.
        tables: of the cheapest paths by seconds on the network without latency and with it, by those and kernels, and by kernels alone.
        released: whether no op has to follow the layout of what it reads.
    """

    space: StrategySpace
    allowed: Mapping[int, np.ndarray]
    tables: tuple[CostTables, ...]
    released: bool

    @classmethod
    def of(
        cls,
        space: StrategySpace,
        resharder: Resharder,
        allowed: Mapping[int, np.ndarray],
        full: Collection[int] = (),
        threshold_bytes: float = inf,
        released: bool = False,
    ) -> BoundTables:
        """The tables of a strategy space.

        Args:
            full: groups (`CollectiveSite.joint`) whose latencies are shared by bytes instead: they fill several collectives.
            threshold_bytes: the most bytes of results that a plan combines.
            released: no op has to follow the layout of what it reads: a bound of more plans.
        """
        graph = space.graph
        pinned = frozenset(allowed) | {start for start, end in graph.same_layout if end in allowed}
        pinned = frozenset(range(len(graph.ops))) if released else pinned
        none, both, only = (_bounding(space, resharder, full, threshold_bytes, kernels) for kernels in KERNELS_COUNTED)
        some = (*none, *both, only[0])
        blocks = StateBlocks.of(graph, space.materialised, None)
        tables = (CostTables(space, blocks, pinned, ({}, {}), x, 1.0, rounded=np.floor) for x in some)
        return cls(space, allowed, tuple(tables), released)

    @property
    def blocks(self) -> StateBlocks:
        """Which states an op has; the same as of a network without memory limit."""
        return self.tables[0].blocks

    # ---- tables

    @cached_property
    def _kinds(self) -> tuple[list[np.ndarray], list[tuple[np.ndarray, ...]]]:
        """Numbers of the array edges that share tables, and these tables."""
        tables = self.tables[0]
        edges: dict[tuple, list[int]] = {}
        for n, edge in enumerate(self.space.array_edges):
            is_pinned = edge.producer in tables.pinned or edge.consumer in tables.pinned
            edges.setdefault((id(edge.template), id(tables.resharder(edge)), is_pinned), []).append(n)
        first = [self.space.array_edges[some[0]] for some in edges.values()]
        return [np.array(some) for some in edges.values()], [tuple(self._parts(edge)) for edge in first]

    @cached_property
    def _ends(self) -> np.ndarray:
        """[2, array edge], its producer and its consumer."""
        return np.array([(e.producer, e.consumer) for e in self.space.array_edges], np.int64).reshape(-1, 2).T

    def _parts(self, edge: ArrayEdge):
        """The tables of `Figures.edges`, and where they are finite."""
        found = [tables.edge(edge) for tables in self.tables]
        finite, around = np.isfinite(found[0][0]), found[0][2]
        around = np.zeros(finite.shape) if around is None else around
        sent, sent_late, both, both_late, kernels = (np.maximum(0.0, np.where(finite, x, 0.0) - around) for x, *_ in found)
        yield from (sent, np.maximum(0.0, sent_late - sent), both, np.maximum(0.0, both_late - both), kernels, around, finite)

    @cached_property
    def costly(self) -> np.ndarray:
        """Bool [array edge]: whether it costs anything in some layouts."""
        out = np.zeros(len(self.space.array_edges), bool)
        for some, parts in zip(*self._kinds, strict=True):
            out[some] = any(table.any() for table in parts[:6])
        return out

    def hold(self, states: Sequence[int]) -> bool:
        """Whether a plan, by its states in a network without memory limit, is one of those that are bounded."""
        made, read = np.array(states)[self._ends]
        return all(finite[made[some], read[some]].all() for some, (*_, finite) in zip(*self._kinds, strict=True))

    def figures(self, states: Sequence[int]) -> Figures:
        """Of a plan, by its states in a network without memory limit."""
        (made, read), graph, seconds = np.array(states)[self._ends], self.space.graph, self.space.least_seconds
        ops = [np.floor(of[s % len(of)] * op.runs * PS) for of, op, s in zip(seconds, graph.ops, states, strict=True)]
        edges = np.zeros((len(self.space.array_edges), 6))
        for some, parts in zip(*self._kinds, strict=True):
            for n, table in enumerate(parts[:6]):
                edges[some, n] = table[made[some], read[some]]
        return Figures(np.array(ops, float), edges)

    def problem(self, weights: Weights) -> Problem:
        """The weighted costs as a cost network without a memory limit; the same states as `build_network` without one."""
        space, graph, blocks, known = self.space, self.space.graph, self.blocks, {}
        costs, least = [], space.least_seconds
        for i, (op, weight) in enumerate(zip(graph.ops, weights.ops.tolist(), strict=True)):
            key = (id(least[i]), op.runs, blocks.count(i), weight, i if i in self.allowed else -1)
            if key not in known:
                cost = np.floor(least[i] * op.runs * PS * weight)
                known[key] = np.tile(np.where(self.allowed[i], cost, np.inf) if i in self.allowed else cost, blocks.count(i))
            costs.append(known[key])
        found: list[np.ndarray] = [costs[0]] * len(space.array_edges)
        rows = weights.edges.tolist()
        for some, parts in zip(*self._kinds, strict=True):
            made: dict[tuple, np.ndarray] = {}
            for n in some:
                if (row := tuple(rows[n])) not in made:
                    made[row] = _weighted(parts, *row)
                found[n] = made[row]
        edges = [Edge(e.producer, e.consumer, cost) for e, cost in zip(space.array_edges, found, strict=True)]
        edges += [Edge(i, j, self.tables[0].same_layout(i, j)) for i, j in graph.same_layout]
        edges += [Edge(i, j, self.tables[0].retained(i, k, j)) for j, (i, k) in graph.retainable_from.items()]
        return Problem(tuple(costs), tuple(edges), (), None)


def _weighted(parts: tuple[np.ndarray, ...], network: float, latency: float, kernels: float, around: float) -> np.ndarray:
    """(12)."""
    sent, sent_late, both, both_late, staged, beyond, finite = parts
    joint = min(network, kernels)
    late = np.where(both_late >= sent_late, min(latency, joint), max(0.0, latency + joint - network))
    cost = joint * both + late * both_late + (network - joint) * sent + (latency - late) * sent_late
    return np.where(finite, np.floor(cost + (kernels - joint) * staged + around * beyond), np.inf)


def slope(figures: Figures, weights: Weights) -> Weights:
    """What the value of a plan changes by as weights do: its value at any weights is at most their product with it.

    The value is concave and grows in proportion to the weights; this is a supergradient.
    """
    sent, sent_late, both, both_late, staged, beyond = figures.edges.T
    network, latency, kernels, _ = weights.edges.T
    more, extra = network >= kernels, both_late - sent_late  # `late` of (12) counts `extra`; which weights it grows with:
    apart = more & (extra < 0)
    with_latency = np.where(apart, latency + kernels > network, ~more | (latency < kernels))
    with_kernels = np.where(apart, with_latency, ~with_latency)
    by_network = np.where(more, sent, both - staged) - extra * (apart & with_latency)
    by_kernels = np.where(more, both - sent, staged) + extra * with_kernels
    return Weights(figures.ops, np.stack([by_network, sent_late + extra * with_latency, by_kernels, beyond], axis=1))


def _bounding(
    space: StrategySpace, resharder: Resharder, full: Collection[int], threshold_bytes: float, kernels: Kernels
) -> tuple[tuple[Resharder, ...], ...]:
    """Per value, resharders whose latencies are shared by all arrays that may be combined with it, and by none."""
    out: tuple[list[Resharder], ...] = ([], [])
    known: dict[tuple, tuple[Resharder, ...]] = {}
    for factors, site, _ in space.facts.moved:
        kinds = () if site.joint_size == 1 else COMBINABLE
        key = (factors, kinds, bool(kinds) and site.joint in full)
        if key not in known:
            most = threshold_bytes * max(1.0, *(factor for _, factor in factors), 1.0)
            shared = CombinedCollectives(inf, most if key[2] else inf)  # pyright: ignore[reportArgumentType]
            sending = resharder.sending(factors)
            late = shared if key[2] else CombinedCollectives(1)
            known[key] = tuple(sending.bounding(x, kinds, kernels) for x in (shared, late))
        for some, found in zip(out, known[key], strict=True):
            some.append(found)
    return tuple(map(tuple, out))
