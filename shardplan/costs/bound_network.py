"""A cost network that no program undercuts: a lower bound of the seconds of every plan, whatever it combines and hides.

While a collective of a set E is on the network, the compute stream runs only ops that neither wait for it nor are waited for by it.
Collectives run one at a time. So for every plan s, with H the ops that are independent of some collective of E,

    seconds  >=  compute                                            A(s)                                          (11)
    seconds  >=  compute without H + seconds of E on the network    A(s) - H(s) + N_E(s)                          (12)

with all arrays of a group sharing one latency. Both sides are sums over nodes and edges of the cost network. (12) with all collectives
and no compute, N(s), is a bound, too. Any of them holds for each loop by itself, and so does every weighted mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import PS, StateBlocks
from shardplan.costs.tables import CostTables
from shardplan.ilp.solver.problem import Edge, Problem
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.combining import COMBINABLE, byte_factors


@dataclass(frozen=True, eq=False)
class Weights:
    """What one weighted mean of (11) and (12) counts of every op and edge.

    Attributes:
        ops: per op, the fraction of its kernel's seconds.
        edges: per array edge, the fraction of its collectives' seconds on the network.
        beyond: per array edge, the fraction of what is computed around its collectives.
    """

    ops: Sequence[float]
    edges: Sequence[float]
    beyond: Sequence[float]

    def mean(self, others: Weights, share: float) -> Weights:
        """(1 - share) times these and `share` times others."""
        pairs = ((self.ops, others.ops), (self.edges, others.edges), (self.beyond, others.beyond))
        return Weights(*([(1 - share) * a + share * b for a, b in zip(*pair, strict=True)] for pair in pairs))


@dataclass(frozen=True, eq=False)
class BoundTables:
    """Picoseconds per step of nodes and array edges that no plan undercuts.

    Attributes:
        allowed: pinned op -> bool [s], which strategies remain.
        tables: prices collectives alone, latencies shared by all arrays of a group, and what is computed around them.
    """

    space: StrategySpace
    allowed: Mapping[int, np.ndarray]
    tables: CostTables

    @classmethod
    def of(cls, space: StrategySpace, resharder: Resharder, allowed: Mapping[int, np.ndarray]) -> BoundTables:
        """The tables of a strategy space."""
        graph = space.graph
        pinned = frozenset(allowed) | {start for start, end in graph.same_layout if end in allowed}
        return cls(space, allowed, CostTables(space, StateBlocks.of(graph, None), pinned, ({}, {}), _bounding(space, resharder), 1.0))

    def problem(self, weights: Weights) -> Problem:
        """The weighted costs as a cost network without a memory limit; the same states as `build_network` without one."""
        space, graph, blocks, known = self.space, self.space.graph, self.tables.blocks, {}
        costs = []
        for i, op in enumerate(graph.ops):
            key = (id(space.seconds[i]), op.runs, blocks.count(i), weights.ops[i], i if i in self.allowed else -1)
            if key not in known:
                cost = np.floor(space.seconds[i] * op.runs * PS * weights.ops[i])
                known[key] = np.tile(np.where(self.allowed[i], cost, np.inf) if i in self.allowed else cost, blocks.count(i))
            costs.append(known[key])
        edges = [Edge(e.producer, e.consumer, self._edge(e, *w)) for e, w in self._weighted(weights)]
        edges += [Edge(i, j, self.tables.same_layout(i, j)) for i, j in graph.same_layout]
        edges += [Edge(i, j, self.tables.retained(i, k, j)) for j, (i, k) in graph.retainable_from.items()]
        return Problem(tuple(costs), tuple(edges), (), None)

    def _weighted(self, weights: Weights):
        return zip(self.space.array_edges, zip(weights.edges, weights.beyond, strict=True), strict=True)

    def _edge(self, edge: ArrayEdge, network: float, beyond: float) -> np.ndarray:
        both, _, kernels = self.tables.edge(edge)
        if network == beyond == 1.0:
            return both
        key, cache = ("bound", id(both), network, beyond), self.tables.cache
        if key not in cache:
            around = 0.0 if kernels is None else kernels
            sent = np.maximum(0.0, np.where(np.isfinite(both), both, 0.0) - around)
            cache[key] = np.where(np.isfinite(both), np.floor(network * sent + beyond * around), np.inf)
        return cache[key]

    def sent(self, edge: ArrayEdge, states: Sequence[int]) -> float:
        """Picoseconds per step of an edge's collectives on the network."""
        both, _, kernels = self.tables.edge(edge)
        at = states[edge.producer], states[edge.consumer]
        return max(0.0, float(both[at]) - (0.0 if kernels is None else float(kernels[at])))

    def value(self, weights: Weights, states: Sequence[int]) -> float:
        """Picoseconds of the weighted mean under these states."""
        return self.problem(weights).objective(states)


def _bounding(space: StrategySpace, resharder: Resharder) -> tuple[Resharder, ...]:
    """Per value, a resharder whose latencies are shared by all arrays that may be combined with it."""
    arrays = Counter(space.collective_sites[edge.value].joint for edge in space.array_edges)
    out = []
    known: dict[tuple, Resharder] = {}
    for v, (value, site) in enumerate(zip(space.graph.values, space.collective_sites, strict=True)):
        factors = byte_factors(value.dtype, space.facts.partial_bytes_ratio(v))
        kinds = () if site.joint_size == 1 else ("all-reduce", "reduce-scatter") if site.collective_class == "gradient" else COMBINABLE
        key = (factors, kinds, arrays[site.joint] if kinds else 1)
        if key not in known:
            known[key] = resharder.sending(factors).bounding(key[2], kinds)
        out.append(known[key])
    return tuple(out)
