"""Which reductions of rows run inside the kernels that read their results, each of which keeps whole rows on chip.

Elsewhere what needs a reduction waits for it in a later kernel (`kernel_groups.py`). With Triton, XLA for GPU makes one kernel of what
reads a row, reduces it, and combines the result with the same row:

    x -> max -> x - max                     the seed: the one use of a reduction is elementwise with the array that it reduces
         -> exp -> sum -> exp / sum         and what follows grows it: elementwise work, and reductions of rows that it makes

    softmax, layer norm       one kernel reads x and writes the result
    and their gradients       one kernel reads x and the result's gradient; it computes the forward pass of the row again
    root mean square norm     one kernel alone; several with its gradient: the reduction has two uses and seeds nothing
    sums added to a state,    several kernels: between a reduction and its row stand only numbers and work on one array,
    the mean of a vector      and not even numbers between a scalar and its vector
    softmax of a transpose    several kernels: the dim that is reduced is not the last in memory (`physical_order.py`)

Three things leave the kernel: a reduction of exponentials that several kernels read, for computing them once more costs more than to
write a number per row; what a reduction of another kind reads, which is written first; and every result, for a kernel writes one.

Facts: fusion-rows, fusion-rows-exponentials, fusion-rows-columns, fusion-rows-seed, fusion-rows-end,
fusion-rows-joined, fusion-casts-back, reduction-few-elements.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

from shardplan.ir.graph import CAST, Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import array_operands, is_scalar_broadcast, seen_through
from shardplan.xla_model.physical_order import Dims, PhysicalOrders

ROW_ELEMENTS = 1 << 14
"""Longest row that one kernel keeps on chip (fact: fusion-rows)."""


WARP = 32
SMALL_COLUMNS = (WARP, inf), (2 * WARP, WARP), (4 * WARP, 8), (8 * WARP, 3)
"""Columns of fewer elements that lie in rows of fewer elements: no blocks of threads reduce them (fact: reduction-few-elements)."""


@dataclass(frozen=True)
class RowKernels:
    """What the kernels that keep rows on chip hold.

    Attributes:
        fused: numbers of the reductions inside them.
        behind: per op, whether it is such a reduction or elementwise work, views and copies behind one.
        statistics: what the reductions make, and elementwise work on it before it meets a row again.
        ends: what such kernels write for reductions of other kinds.
        orders: in which order dims lie in memory, which decides what a row is.
    """

    fused: frozenset[int]
    behind: tuple[bool, ...]
    statistics: frozenset[int]
    ends: frozenset[int]
    orders: PhysicalOrders


def row_kernels(graph: Graph, rules: Sequence[Rule], orders: PhysicalOrders, alone: frozenset[int] = frozenset()) -> RowKernels:
    """The kernels of a step; the reductions `alone` write their results."""
    behind, fused, statistics, ends = [False] * len(graph.ops), set[int](), set[int](), set[int]()
    at = -1
    while (at := at + 1) < len(graph.ops):
        op = graph.ops[at]
        makers = [graph.values[v].producer[0] for v in op.inputs if v is not None and v not in ends]
        follows = any(behind[i] and graph.ops[i].loop == op.loop for i in makers)
        if at in graph.dead:
            continue
        if reduces_rows(op, orders) and rules[at].fusion == "reduce":
            if at not in alone and not _reduces_joined(graph, op) and (follows or _is_seed(graph, rules, at)):
                behind[at] = True
                fused.add(at)
                statistics.add(op.outputs[0])
        elif _is_elementwise(graph, rules, at) and follows:
            behind[at] = True
            if statistics.issuperset(array_operands(graph, op)) and not op.traits.broadcast:
                statistics.update(op.outputs)
            if rules[at].fusion == "loop" and _is_reduced_otherwise(graph, rules, orders, op):
                end = _narrowest(graph, rules, behind, op.outputs[0])
                ends.add(end)
                for i in range(graph.values[end].producer[0] + 1, at + 1):  # once more, for what reads the end
                    behind[i] = False
                    fused.discard(i)
                    statistics.difference_update(graph.ops[i].outputs)
                    ends.difference_update(graph.ops[i].outputs)
                at = graph.values[end].producer[0]
    return RowKernels(frozenset(fused), tuple(behind), frozenset(statistics), frozenset(ends), orders)


def _reduces_joined(graph: Graph, op: Op) -> bool:
    """Whether rows that are reduced are concatenated: XLA reduces the parts (fact: fusion-rows-joined)."""
    joined = None if op.inputs[0] is None else graph.ops[graph.maker(op.inputs[0])]
    return joined is not None and joined.traits.concatenates and joined.params.get("dimension") in op.params["axes"]


def _is_reduced_otherwise(graph: Graph, rules: Sequence[Rule], orders: PhysicalOrders, op: Op) -> bool:
    """Whether blocks of threads reduce what an op makes, other than along rows."""
    reached = (at for v in op.outputs for at in graph.reached(v, partial(seen_through, graph, rules)) if at not in graph.dead)
    reductions = (graph.ops[at] for at in reached if rules[at].fusion == "reduce")
    return any(not (reduces_rows(reader, orders) or computed_one_by_one(reader, orders)) for reader in reductions)


def _narrowest(graph: Graph, rules: Sequence[Rule], behind: Sequence[bool], v: int) -> int:
    """Where a kernel that keeps rows on chip ends, if another reduces v: at the narrowest array on the way to v.

    What others read, too, is the farthest that it may be. A cast back to the dtype from which an array has just been cast takes both
    away (fact: fusion-casts-back).
    """
    best = v
    while True:
        op = graph.ops[graph.values[v].producer[0]]
        arrays = array_operands(graph, op)
        if len(arrays) != 1 or not behind[at := graph.values[v := arrays[0]].producer[0]]:
            return best
        shared = len({*graph.readers(v)} - graph.dead) > 1
        maker = graph.ops[graph.maker(v)]
        back = op.primitive == maker.primitive == CAST and op.outs[0].dtype == maker.ins[0].dtype
        narrower = graph.values[v].bytes < graph.values[best].bytes
        if (shared or (narrower and not back)) and rules[at].fusion == "loop":
            best = v
        if shared:
            return best


def rows_read(graph: Graph, rows: RowKernels, inside: Sequence[Collection[Hashable]]) -> dict[Hashable, float]:
    """Kernel that keeps rows on chip from one reduction to another -> elements that its reductions read, each its own.

    `inside` are per op the kernels that compute it.
    """
    sizes: dict[Hashable, list[float]] = {}
    for at, op in enumerate(graph.ops):
        for kernel in inside[at] if reduces_rows(op, rows.orders) else ():
            sizes.setdefault(kernel, []).append(float(op.ins[0].size))
    return {kernel: sum(sizes[kernel]) for at in sorted(rows.fused) for kernel in inside[at] if len(sizes[kernel]) > 1}


def masks(graph: Graph, op: Op) -> bool:
    """Whether an op selects elements by an array that was broadcast."""
    predicate = op.inputs[0] if op.traits.selects else None
    return predicate is not None and graph.ops[graph.values[graph.original(predicate)].producer[0]].traits.broadcast


def reduces_rows(op: Op, orders: PhysicalOrders) -> bool:
    """Whether an op reduces the last dim alone, which is the minor one, of no more elements than a kernel keeps on chip."""
    if not op.traits.reduction or len(op.outputs) != 1:
        return False
    shape, last = op.ins[0].shape, len(op.ins[0].shape) - 1
    if tuple(op.params.get("axes", ())) != (last,) or orders.minor(op) != last:
        return False
    return 1 < shape[-1] <= ROW_ELEMENTS and op.outs[0].dtype.kind in "fV"


def reduces_columns(op: Op, orders: PhysicalOrders) -> bool:
    """Whether an op reduces dims by a fixed function, and keeps the minor one."""
    return op.traits.reduction and orders.minor(op) not in op.params.get("axes", ())


def reduced_apart(op: Op, orders: PhysicalOrders) -> Dims:
    """The dims of an operand in memory, if dims that are reduced lie apart there; else ()."""
    if not op.traits.reduction or (v := op.inputs[0]) is None:
        return ()
    order, over = orders.orders[v], op.params.get("axes", ())
    places = [n for n, d in enumerate(order) if d in over]
    return order if places and places[-1] - places[0] >= len(places) else ()


def with_small_reductions(graph: Graph, rules: Sequence[Rule], rows: RowKernels) -> tuple[Rule, ...]:
    """The rules as kernels see them: what reduces few elements, and stays on chip with no row, is elementwise work."""
    pairs = enumerate(zip(graph.ops, rules, strict=True))
    return tuple(
        replace(rule, fusion="loop")
        if rule.fusion == "reduce" and at not in rows.fused and computed_one_by_one(op, rows.orders)
        else rule
        for at, (op, rule) in pairs
    )


def computed_one_by_one(op: Op, orders: PhysicalOrders) -> bool:
    """Whether threads reduce an element of the result each, as part of elementwise work: blocks of threads would have little to share.

    So they do with rows shorter than a warp that do not fill one evenly, and with short or narrow columns.
    """
    if not op.traits.reduction or len(op.outputs) != 1 or (v := op.inputs[0]) is None:
        return False
    shape, over = op.ins[0].shape, op.params.get("axes", ())
    return few_elements([Dim(shape[d], d in over) for d in orders.orders[v]])


class Dim(NamedTuple):
    """A dim of an array that is reduced."""

    size: int
    reduced: bool


def few_elements(dims: Sequence[Dim]) -> bool:
    """Whether threads reduce an element of the result each, of an array with these dims, the outermost first."""
    dims = [dim for dim in dims if dim.size > 1]
    places = [n for n, dim in enumerate(dims) if dim.reduced]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return False
    reduced, behind = (math.prod(dim.size for dim in some) for some in (dims[places[0] : places[-1] + 1], dims[places[-1] + 1 :]))
    if behind == 1:
        return reduced < WARP and WARP % reduced > 0
    return any(reduced < most and behind < width for most, width in SMALL_COLUMNS)


def _is_elementwise(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    op = graph.ops[at]
    return op.traits.copy or (rules[at].fusion in ("loop", "view") and not op.traits.border)


def _is_seed(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether the one use of a reduction's result is elementwise work with the array that it reduces."""
    op = graph.ops[at]
    sources, size = set(_unary_sources(graph, rules, op.inputs[0])), op.ins[0].size
    v = op.outputs[0]
    while True:
        readers = [reader for reader in graph.readers(v) if reader not in graph.dead]
        if len(readers) != 1 or not _is_elementwise(graph, rules, readers[0]) or graph.ops[readers[0]].loop != op.loop:
            return False
        reader = graph.ops[readers[0]]
        others = [u for u in array_operands(graph, reader) if graph.original(u) != v]
        if others and reader.outs[0].size == size:
            return any(not sources.isdisjoint(_unary_sources(graph, rules, u)) for u in others)
        if not all(is_scalar_broadcast(graph, u) for u in others) or (reader.outs[0].size == 1 and reader.traits.scaling):
            return False
        v = reader.outputs[0]


def _unary_sources(graph: Graph, rules: Sequence[Rule], v: int | None) -> Iterator[int]:
    """A value and what it is made of by elementwise work on one array, back to the first with several."""
    while v is not None:
        yield v
        at = graph.values[v].producer[0]
        op = graph.ops[at]
        if not _is_elementwise(graph, rules, at) or op.traits.broadcast:
            return
        arrays = {graph.original(u) for u in array_operands(graph, op) if not is_scalar_broadcast(graph, u)}
        v = arrays.pop() if len(arrays) == 1 else None
