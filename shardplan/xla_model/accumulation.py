"""What a loop only accumulates: sums over devices that XLA reduces once, after the loop, instead of in every iteration.

    carry' = carry + f(x)          f(x) partial over `data`: XLA accumulates partial sums and reduces the carry when the loop ends

So a carry that nobody else reads inside the loop may be partial, on top of its initial value. Gradients of weights that a scan uses in
every iteration (microbatches, time steps) cost one all-reduce, or one reduce-scatter where the sum is used sharded. XLA moves an
all-reduce that stands inside the loop, too, so no plan has one there (`costs/tables.py`); a reduce-scatter is paid in every iteration.

Facts: accumulate-reduces-after-loop, accumulate-scatters-inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from shardplan.ir.graph import Graph


def accumulated_operands(graph: Graph) -> dict[tuple[int, int], tuple[int, int]]:
    """(op, operand) that a loop adds to a carry, and does nothing else with -> (loop_carry, loop_next) of that carry."""
    out: dict[tuple[int, int], tuple[int, int]] = {}
    for start, end in graph.same_layout:
        (v,), loop = graph.ops[end].inputs, graph.ops[end].loop
        if not graph.ops[start].traits.loop_carry or v is None:
            continue
        at = graph.maker(v)
        makers = [None if v is None else graph.maker(v) for v in graph.ops[at].inputs]
        alone = start in makers and all(reader == at for reader in graph.readers(graph.ops[start].outputs[0]))
        if not (alone and graph.ops[at].traits.addition and graph.ops[at].loop == loop):
            continue
        k = 1 - makers.index(start)
        while (v := graph.ops[at].inputs[k]) is not None:
            out[at, k] = start, end
            at, k, shared = graph.values[v].producer[0], 0, len(graph.values[v].consumers) > 1
            if shared or not graph.ops[at].forwards_value or graph.ops[at].loop != loop:
                break
    return out


def mark_accumulation(graph: Graph) -> Graph:
    """The graph with `Op.accumulates` set for the carries that may be partial and for the ops that hand partial sums to them.

    Casts are among these ops, although they round every part.
    """
    found = accumulated_operands(graph)
    marked = {*chain(*found.values()), *(at for at, _ in found if graph.ops[at].forwards_value)}
    return replace(graph, ops=tuple(replace(op, accumulates=True) if at in marked else op for at, op in enumerate(graph.ops)))


def accumulated_sums(graph: Graph, found: Mapping[tuple[int, int], tuple[int, int]]) -> dict[int, int]:
    """Value that a `loop_next` makes of such a carry -> the value in the loop that is accumulated, before casts and the like.

    `found` are the `accumulated_operands`, of which each carry's last is farthest from it.
    """
    sums = ((graph.ops[end].outputs[0], graph.ops[at].inputs[k]) for (at, k), (_, end) in found.items())
    return {made: v for made, v in sums if v is not None}
