"""What is known, before it is priced, of every array that one op makes and another one reads.

Thousands of arrays of repeated layers share a few edge templates, each read off the graph once and priced once per cost network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from shardplan.costs.layout_lists import LayoutList, LayoutLists
from shardplan.ir.graph import Graph
from shardplan.mesh.layout import Layout
from shardplan.strategies.enumerate import OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.xla_model.copies import SMALL_BYTES
from shardplan.xla_model.coupled_state import CoupledState


@dataclass(frozen=True, eq=False)
class EdgeTemplate:
    """One object for all arrays between which the planner sees no difference.

    Attributes:
        result_layouts: [s], layouts that the producer makes the array in.
        operand_layouts: [t], layouts that the consumer reads it in.
        shape: of the whole array.
        itemsize: bytes per element.
        reads: reads per step.
        is_follower: the consumer takes the layout that the array has; partial sums may be completed on the way.
        gathered_copy: the producer is a large copy for big ops: it is gathered where it is made, where its bytes count, and not behind.
        coupled_state: what the optimizer computes with together with the array, if this may be a partial sum.
        in_fusion: it is read inside a fusion.
        sliced_bytes: bytes from which a loop slices rows, or 0.
        accumulated_ratio: of a sum that a loop accumulates, bytes of the partial sums over bytes of the sum; else 0.
        addend_dims: of a partial sum that is only added to another partial sum: dims along which one of them scatters rows. If none of
            these is sharded, XLA adds the two before it reduce-scatters them. None for other arrays.
        sum_dims: of what two partial sums add up to, the same dims.
        from_retainable, to_retainable: whether producer or consumer may retain an earlier phase's array.
    """

    result_layouts: tuple[Layout, ...]
    operand_layouts: tuple[Layout, ...]
    shape: tuple[int, ...]
    itemsize: float
    reads: float
    is_follower: bool
    gathered_copy: bool
    coupled_state: CoupledState | None
    in_fusion: bool
    sliced_bytes: float
    accumulated_ratio: float
    addend_dims: tuple[int, ...] | None
    sum_dims: tuple[int, ...]
    from_retainable: bool
    to_retainable: bool


class ArrayEdge(NamedTuple):
    """Op `producer` makes `value`, op `consumer` reads it as its operand `operand`."""

    producer: int
    consumer: int
    operand: int
    value: int
    template: EdgeTemplate


def array_edges(
    graph: Graph,
    rules: Sequence[Rule],
    strategies: Sequence[OpStrategies],
    coupled_state: Sequence[CoupledState | None],
    accumulated_sums: Mapping[int, int],
    lists: LayoutLists,
) -> Iterator[ArrayEdge]:
    """Every operand of every op, in program order.

    Args:
        graph: the step.
        rules, strategies: per op.
        coupled_state: per value.
        accumulated_sums: sum that a loop accumulates -> the value in the loop that is summed.
        lists: of all layouts.
    """

    @cache
    def readable(made: LayoutList, read: LayoutList) -> bool:
        """Whether every complete layout that is made can be read as it is."""
        return bool(np.isin(made.ids[made.partial_axes == 0], read.ids).all())

    known: dict[tuple, EdgeTemplate] = {}
    addend_dims: list[tuple[int, ...] | None] = []
    for j, op in enumerate(graph.ops):
        readers = tuple(graph.readers(op.outputs[0])) if op.traits.copy else (j,)
        in_fusion = any(rules[at].fusion in ("loop", "reduce") for at in readers)
        sliced = any(graph.ops[at].traits.loop_slice for at in readers)
        makers = (graph.values[v].producer for v in op.inputs if v is not None)
        sums = all(lists(strategies[i].results[r]).partial_axes.any() for i, r in makers)
        addend_dims.append(_addend_dims(graph, j) if sums else None)
        for k, v in enumerate(op.inputs):
            if v is None:
                continue
            value = graph.values[v]
            i, r = value.producer
            maker, made, read = graph.ops[i], strategies[i].results[r], strategies[j].operands[k]
            facts = (
                value.shape,
                value.itemsize,
                op.reads,
                _is_follower(graph, rules, i, j) and readable(lists(made), lists(read)),
                maker.traits.copy and not maker.is_follower and value.bytes > SMALL_BYTES,
                coupled_state[v] if lists(made).partial_axes.any() else None,
                in_fusion,
                value.bytes if sliced else 0.0,
                partial_bytes_ratio(graph, accumulated_sums, v) if v in accumulated_sums else 0.0,
                addend_dims[j],
                addend_dims[i] or (),
                i in graph.retainable_from,
                j in graph.retainable_from,
            )
            if (key := (id(made), id(read), *facts)) not in known:
                known[key] = EdgeTemplate(made, read, *facts)
            yield ArrayEdge(i, j, k, v, known[key])


def _addend_dims(graph: Graph, j: int) -> tuple[int, ...] | None:
    """`EdgeTemplate.addend_dims` of both operands of op j, if they are partial sums."""
    values = [graph.values[v] for v in graph.ops[j].inputs if v is not None]
    if not graph.ops[j].traits.addition or len(values) != 2 or any(len(value.consumers) > 1 for value in values):
        return None
    scatters = [op for value in values if (op := graph.ops[value.producer[0]]).traits.scatter == "add"]
    return tuple(d for op in scatters for d in op.params["dimension_numbers"].scatter_dims_to_operand_dims)


def partial_bytes_ratio(graph: Graph, accumulated_sums: Mapping[int, int], v: int) -> float:
    """Bytes of a value's partial sums over its own: a loop accumulates in the dtype in which they are made."""
    return graph.values[accumulated_sums.get(v, v)].itemsize / (graph.values[v].itemsize or 1)


def _is_follower(graph: Graph, rules: Sequence[Rule], i: int, j: int) -> bool:
    """Whether op j propagates the layout of op i's result wherever it can.

    An elementwise op, view or reduction does so behind elementwise ops and views: a reshard there would break a fusion, and one before
    or after it serves as well.
    """
    maker, reader = graph.ops[i], graph.ops[j]
    fused = rules[i].fusion in ("loop", "view") and not maker.traits.border
    if reader.traits.copy:
        return reader.is_follower and fused
    if not rules[j].is_follower or reader.traits.border:
        return False
    only_reader = maker.traits.step_input and len(graph.values[maker.outputs[0]].consumers) == 1
    return fused or only_reader or maker.traits.copy
