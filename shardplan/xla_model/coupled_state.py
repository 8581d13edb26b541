"""What the optimizer computes with beside an array: a parameter and its moments, beside its gradient.

XLA lays these out as it lays out the array. So what a gradient's layout in memory costs, each of them pays, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph


@dataclass(frozen=True)
class CoupledState:
    """Inputs of the step that the optimizer computes with beside an array.

    Attributes:
        order: the array's dims in their order there.
        bytes: of each of them, in rising order.
    """

    order: tuple[int, ...]
    bytes: tuple[float, ...]


def coupled_state(graph: Graph, elementwise: Sequence[bool]) -> list[CoupledState | None]:
    """Per value, what elementwise ops of the update compute with beside it; None where that is nothing.

    Args:
        elementwise: per op.
    """
    found: list[tuple[tuple[int, ...], frozenset[int]] | None] = [None] * len(graph.values)  # (order, values)
    for op, plain in zip(reversed(graph.ops), reversed(elementwise), strict=True):
        if op.primitive == "transpose":
            if (before := op.inputs[0]) is not None and (after := found[op.outputs[0]]):
                found[before] = tuple(op.params["permutation"][d] for d in after[0]), after[1]
        elif op.primitive == "share" or plain:
            arrays = [v for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.shape == op.outs[0].shape]
            own = {graph.original(v) for v in arrays if graph.ops[graph.maker(v)].primitive == "arg" and op.phase == "update"}
            later = [m for v in op.outputs if (m := found[v])]
            order = later[0][0] if later else tuple(range(len(op.outs[0].shape)))
            inputs = frozenset(own).union(*(others for _, others in later))
            for v in arrays if inputs else ():
                here = found[v] or (order, frozenset())
                found[v] = here[0], here[1] | inputs
    return [m and CoupledState(m[0], tuple(sorted(graph.values[v].bytes for v in m[1]))) for m in found]
