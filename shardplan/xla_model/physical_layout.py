"""Which orders of dims in memory an array may have around a collective, and which inputs of the step share its order.

XLA chooses one order of dims for all arrays of an elementwise computation. So whatever a gradient's physical layout costs, the
parameter and its moments pay as well: the optimizer computes with them together.

What moves along a dim is outermost there in memory (`costs/transposes.py`); `array_order` says in which orders an array may be. Those
that arrays have without collectives are in `physical_order.py`.

Facts: layout-elementwise-coupled, layout-product-groups, layout-input-transposed, layout-output-transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph
from shardplan.strategies.rule import Rule
from shardplan.xla_model.physical_order import Groups, is_product, operand_groups, result_groups


@dataclass(frozen=True)
class ArrayOrder:
    """What fixes the order of an array's dims in memory, where it is made and where it is read.

    Attributes:
        made: groups of dims of the product that makes it; () where no product does.
        read: the groups of all products that read it; if it leaves the step, all dims in one: XLA hands it out row-major.
        input_bytes: bytes of the input of the step, or of a loop's row, that is the array, but for casts of a row; else 0. An input
            has its own order, and is transposed by a kernel before it moves.
    """

    made: Groups = ()
    read: Groups = ()
    input_bytes: float = 0.0


def array_order(graph: Graph, rules: Sequence[Rule], v: int, at: int, k: int) -> ArrayOrder:
    """The order of value v as op `at` reads it as operand k."""
    maker = graph.maker(v)
    made = result_groups(graph.ops[maker]) if is_product(graph.ops[maker], rules[maker]) else ()
    reads, read = [(at, k)], set()
    for j, m in reads:
        if graph.ops[j].traits.copy:
            reads += graph.values[graph.ops[j].outputs[0]].consumers
        elif graph.ops[j].traits.step_output:
            read.add(tuple(range(len(graph.values[v].shape))))
        elif is_product(graph.ops[j], rules[j]):
            read.update(operand_groups(graph.ops[j], m))
    row = graph.values[graph.origin(v, lambda i: graph.ops[i].traits.copy or graph.ops[i].forwards_value)]
    is_row = graph.ops[row.producer[0]].traits.loop_slice
    input_bytes = row.bytes if is_row else graph.values[v].bytes if graph.ops[maker].traits.step_input else 0.0
    return ArrayOrder(made, tuple(sorted(read)), input_bytes)


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
