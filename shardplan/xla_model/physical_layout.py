"""Which arrays XLA transposes in memory, since it chooses one order of dims for all arrays of an elementwise computation.

The dims that one operand brings into a product, and its batch dims, lie in its result one after the other:

    dot(a[m, k], b[k, n])   -> [m, n]      rows of m
    dot(b[n, k], a[k, m])   -> [n, m] -> transpose -> [m, n]      here m is the minor dim
    add of both             -> XLA transposes the later product in memory

So whatever a gradient's physical layout costs, the parameter and its moments pay as well: the optimizer computes with them together.

What moves along a dim is outermost there in memory (`costs/transposes.py`); `array_order` says in which orders an array may be.

Facts: layout-product-order, layout-elementwise-coupled, layout-transpose-into-product, layout-product-groups, layout-input-transposed,
layout-untiled-transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule


def transposed_product(graph: Graph, op: Op) -> int | None:
    """The product that XLA writes in the order of `op`, a transpose of two dims and its only reader; None for other ops."""
    v = op.inputs[0] if op.traits.transpose and len(op.ins[0].shape) == 2 else None
    if v is None or len(graph.values[v].consumers) > 1 or not graph.ops[graph.values[v].producer[0]].traits.matmul:
        return None
    return v


def transposed_in_memory(graph: Graph, rules: Sequence[Rule]) -> set[int]:
    """Values that XLA writes only to transpose them: products that meet an earlier product in another order in an elementwise op.

    The later of the two products is transposed, behind the last op that computes with nothing else.
    """
    orders: dict[int, tuple[int, frozenset[tuple[int, int]]]] = {}  # value -> the product it is made of, and its adjacent dims
    later: set[int] = set()
    for at, op in enumerate(graph.ops):
        if op.traits.matmul and rules[at].fusion == "none":
            orders[op.outputs[0]] = op.outputs[0], frozenset(_adjacent_dims(op))
        elif op.traits.transpose and op.inputs[0] in orders:
            made, pairs = orders[op.inputs[0]]
            place = op.params["permutation"].index
            orders[op.outputs[0]] = made, frozenset((place(a), place(b)) for a, b in pairs)
        elif op.traits.copy or rules[at].fusion == "loop":
            same_shape = (v for v, x in zip(op.inputs, op.ins, strict=True) if v in orders and x.shape == op.outs[0].shape)
            found = sorted((orders[v] for v in same_shape if v is not None), key=lambda r: r[0])
            if found:
                orders[op.outputs[0]] = found[0]
                later.update(made for made, pairs in found if any((b, a) in found[0][1] for a, b in pairs))
    return {_last_of_chain(graph, v) for v in later}


def _last_of_chain(graph: Graph, v: int) -> int:
    """The last value of the chain of ops that compute with nothing but v; copies do not count."""
    last = v
    while len(graph.values[v].consumers) == 1:
        op = graph.ops[graph.values[v].consumers[0][0]]
        if [u for u in op.inputs if u is not None] != [v]:
            break
        v = op.outputs[0]
        last = last if op.traits.copy else v
    return last


def _adjacent_dims(op: Op) -> list[tuple[int, int]]:
    """Pairs of dims of a product's result that lie one after the other in memory."""
    return [pair for group in _result_groups(op) for pair in pairwise(d for d in group if op.outs[0].shape[d] > 1)]


Groups = tuple[tuple[int, ...], ...]
"""Dims of an array, in groups that a product reads or writes as one dim each."""


def _result_groups(op: Op) -> Groups:
    """Batch dims, and those that each operand brings into a product."""
    contracted, (batch, _) = op.params["dimension_numbers"]
    free = [len(x.shape) - len(c) - len(batch) for x, c in zip(op.ins, contracted, strict=True)]
    ends = (0, len(batch), len(batch) + free[0], sum(free) + len(batch))
    return tuple(tuple(range(*pair)) for pair in pairwise(ends))


def _operand_groups(op: Op, k: int) -> Groups:
    """Batch, contracted and own dims of a product's operand."""
    contracted, batch = (tuple(both[k]) for both in op.params["dimension_numbers"])
    return batch, contracted, tuple(d for d in range(len(op.ins[k].shape)) if d not in batch + contracted)


@dataclass(frozen=True)
class ArrayOrder:
    """What fixes the order of an array's dims in memory, where it is made and where it is read.

    Attributes:
        made: groups of dims of the product that makes it; () where no product does.
        read: the groups of all products that read it.
        input_bytes: bytes of the input of the step, or of a loop's row, that is the array, but for casts of a row; else 0. An input
            has its own order, and is transposed by a kernel before it moves.
    """

    made: Groups = ()
    read: Groups = ()
    input_bytes: float = 0.0


def array_order(graph: Graph, rules: Sequence[Rule], v: int, at: int, k: int) -> ArrayOrder:
    """The order of value v as op `at` reads it as operand k."""
    maker = graph.maker(v)
    made = _result_groups(graph.ops[maker]) if _is_product(graph, rules, maker) else ()
    reads, read = [(at, k)], set()
    for j, m in reads:
        if graph.ops[j].traits.copy:
            reads += graph.values[graph.ops[j].outputs[0]].consumers
        elif _is_product(graph, rules, j):
            read.update(_operand_groups(graph.ops[j], m))
    row = graph.values[graph.origin(v, lambda i: graph.ops[i].traits.copy or graph.ops[i].forwards_value)]
    is_row = graph.ops[row.producer[0]].traits.loop_slice
    input_bytes = row.bytes if is_row else graph.values[v].bytes if graph.ops[maker].traits.step_input else 0.0
    return ArrayOrder(made, tuple(sorted(read)), input_bytes)


def _is_product(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    return graph.ops[at].traits.matmul and rules[at].fusion == "none"


@dataclass(frozen=True)
class CoupledState:
    """Inputs of the step that the optimizer computes with together with an array."""

    order: tuple[int, ...]  # the array's dims in their order there
    bytes: tuple[float, ...]  # bytes of each input, in rising order


def coupled_state(graph: Graph, elementwise: Sequence[bool]) -> list[CoupledState | None]:
    """Per value, the inputs that elementwise ops of the optimizer compute with together with it; None where there are none."""
    found: list[tuple[tuple[int, ...], frozenset[int]] | None] = [None] * len(graph.values)  # (order, values)
    made_of = _inputs_in_update(graph, elementwise)
    for op, plain in zip(reversed(graph.ops), reversed(elementwise), strict=True):
        if op.traits.transpose:
            if (before := op.inputs[0]) is not None and (after := found[op.outputs[0]]):
                found[before] = tuple(op.params["permutation"][d] for d in after[0]), after[1]
        elif op.traits.copy or plain:
            arrays = [v for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.shape == op.outs[0].shape]
            own = {u for v in arrays for u in made_of[v]} if op.phase == "update" else ()
            later = [m for v in op.outputs if (m := found[v])]
            order = later[0][0] if later else tuple(range(len(op.outs[0].shape)))
            inputs = frozenset(own).union(*(others for _, others in later))
            for v in arrays if inputs else ():
                here = found[v] or (order, frozenset())
                found[v] = here[0], here[1] | inputs
    return [m and CoupledState(m[0], tuple(sorted(graph.values[v].bytes for v in m[1]))) for m in found]


def _inputs_in_update(graph: Graph, elementwise: Sequence[bool]) -> list[frozenset[int]]:
    """Per value, the inputs of the step of its shape that it is, or that the optimizer computes it from, elementwise."""
    found: list[frozenset[int]] = []
    for op, plain in zip(graph.ops, elementwise, strict=True):
        for v in op.outputs:
            arrays: list[int] = []
            if op.traits.copy or (plain and op.phase == "update"):
                arrays = [u for u, x in zip(op.inputs, op.ins, strict=True) if u is not None and x.shape == graph.values[v].shape]
            found.append(frozenset([v]) if op.traits.step_input else frozenset().union(*(found[u] for u in arrays)))
    return found


LEAST_TILE = 16
"""Elements below which a fusion of XLA for GPU transposes one by one (fact: layout-untiled-transpose)."""


def is_untiled(op: Op) -> bool:
    """Whether an op transposes the last dim, and what takes its place is few elements; dims that lay side by side count together."""
    if not op.traits.transpose:
        return False
    shape = op.ins[0].shape
    dims = [d for d in op.params["permutation"] if shape[d] > 1]
    if not dims or dims[-1] == max(dims):
        return False
    order, first = sorted(dims), len(dims) - 1
    while first and order.index(dims[first]) == order.index(dims[first - 1]) + 1:
        first -= 1
    return prod(shape[d] for d in dims[first:]) < LEAST_TILE
