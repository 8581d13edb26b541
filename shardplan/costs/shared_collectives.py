"""Which collectives of a plan are one, because XLA merges what is equal.

    reshards    equal steps of one array in one loop, in both passes, or in the update; not of what is regathered behind a barrier
    exchanges   what brings the same elements of an array, in one layout, to the same shards: of a convolution and its filter's gradient

A collective belongs to the first op of the program that needs it.

Facts: cse-merges-equal-reshards, cse-merges-equal-sums, cse-merges-equal-halos.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import numpy as np

from shardplan.costs.halo_exchange import Exchange
from shardplan.costs.network import CostNetwork
from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep


def shared_key(graph: Graph, j: int, v: int) -> tuple[int, int, bool]:
    """What two readers of an array must agree in to share a collective: op j reads value v."""
    return v, graph.ops[j].loop, graph.ops[j].phase == "update"


def regathered(graph: Graph, j: int, v: int, regathers: Mapping[int, int]) -> int:
    """How many times the array that op j reads as value v was gathered and freed before; `regathers` as of the network."""
    itself = graph.ops[j].traits.copy or graph.ops[j].traits.recompute_barrier
    return regathers.get(j if itself else graph.values[v].producer[0], 0)


def own_moves(
    network: CostNetwork, strategies: Sequence[int] | np.ndarray, retained: Collection[int], ops: Collection[int] | None = None
) -> Iterator[tuple[int, int, int, tuple[ReshardStep, ...]]]:
    """`CostNetwork.moves` without the collectives at the begin of a path that an earlier reader of the array has."""
    graph, regathers, done = network.space.graph, network.regathers(strategies, retained), set[tuple]()
    for j, k, v, steps in network.moves(strategies, retained, ops):
        copy = regathered(graph, j, v, regathers)
        paths = [(*shared_key(graph, j, v), copy, steps[: n + 1]) for n in range(len(steps))]
        yield j, k, v, steps[sum(path in done for path in paths) :]
        done.update(paths)


def exchange_key(graph: Graph, j: int, v: int, layout: Layout, regathers: Mapping[int, int], x: Exchange) -> Hashable:
    """What two exchanges must agree in to be one: op j, which exchanges x, reads value v in a layout; `regathers` as of the network."""
    return graph.original(v), layout, graph.ops[j].loop, regathers.get(graph.values[v].producer[0], 0), x.moved


def own_exchanges(
    network: CostNetwork, strategies: Sequence[int] | np.ndarray, retained: Collection[int], ops: Collection[int] | None = None
) -> Iterator[tuple[int, Exchange]]:
    """(op, exchange) in program order without those that an earlier op has made; with `ops`, of arrays that these make or read."""
    space, graph, regathers, done = network.space, network.space.graph, network.regathers(strategies, retained), set[Hashable]()
    near = (graph.ops[i] for i in ops or ())
    arrays = {graph.original(v) for op in near for v in (*op.inputs, *op.outputs) if v is not None}
    for j in space.exchanging:
        for x in space.exchanges(j, int(strategies[j])):
            v = graph.ops[j].inputs[x.operand]
            if v is None or (ops is not None and graph.original(v) not in arrays):
                continue
            key = exchange_key(graph, j, v, space.strategies[j].operands[x.operand][strategies[j]], regathers, x)
            if x.of_results or key not in done:
                done.add(key)
                yield j, x
