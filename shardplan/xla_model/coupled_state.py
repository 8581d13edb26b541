"""Which inputs the optimizer computes with together with a gradient: the parameter and its moments.

XLA gives all arrays of one elementwise computation one physical layout. So whatever a gradient's physical layout costs, each of these
arrays pays as well.

Fact: layout-elementwise-coupled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph


@dataclass(frozen=True)
class CoupledState:
    """Inputs of the step that the optimizer computes with together with an array.

    Attributes:
        order: the array's dims in their order there.
        bytes: bytes of each input, in rising order.
    """

    order: tuple[int, ...]
    bytes: tuple[float, ...]


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
