"""Which arrays XLA transposes in memory, since it chooses one order of dims for all arrays of an elementwise computation.

The dims that one operand brings into a product, and its batch dims, lie in its result one after the other:

    dot(a[m, k], b[k, n])   -> [m, n]      rows of m
    dot(b[n, k], a[k, m])   -> [n, m] -> transpose -> [m, n]      here m is the minor dim
    add of both             -> XLA transposes the later product in memory

So whatever a gradient's physical layout costs, the parameter and its moments pay as well: the optimizer computes with them together.

Facts: layout-product-order, layout-elementwise-coupled, layout-transpose-into-product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    (left, right), (batch, batch_right) = op.params["dimension_numbers"]
    free = [len(x.shape) - len(c) - len(b) for x, c, b in zip(op.ins, (left, right), (batch, batch_right), strict=True)]
    ends, shape = (0, len(batch), len(batch) + free[0], sum(free) + len(batch)), op.outs[0].shape
    return [pair for start, stop in pairwise(ends) for pair in pairwise(d for d in range(start, stop) if shape[d] > 1)]


@dataclass(frozen=True)
class CoupledState:
    """Inputs of the step that the optimizer computes with together with an array."""

    order: tuple[int, ...]  # the array's dims in their order there
    bytes: tuple[float, ...]  # bytes of each input, in rising order


def coupled_state(graph: Graph, elementwise: Sequence[bool]) -> list[CoupledState | None]:
    """Per value, the inputs that elementwise ops of the optimizer compute with together with it; None where there are none."""
    found: list[tuple[tuple[int, ...], frozenset[int]] | None] = [None] * len(graph.values)  # (order, values)
    for op, plain in zip(reversed(graph.ops), reversed(elementwise), strict=True):
        if op.traits.transpose:
            if (before := op.inputs[0]) is not None and (after := found[op.outputs[0]]):
                found[before] = tuple(op.params["permutation"][d] for d in after[0]), after[1]
        elif op.traits.copy or plain:
            arrays = [v for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.shape == op.outs[0].shape]
            own = {graph.original(v) for v in arrays if graph.ops[graph.maker(v)].traits.step_input and op.phase == "update"}
            later = [m for v in op.outputs if (m := found[v])]
            order = later[0][0] if later else tuple(range(len(op.outs[0].shape)))
            inputs = frozenset(own).union(*(others for _, others in later))
            for v in arrays if inputs else ():
                here = found[v] or (order, frozenset())
                found[v] = here[0], here[1] | inputs
    return [m and CoupledState(m[0], tuple(sorted(graph.values[v].bytes for v in m[1]))) for m in found]
