"""Which scatters XLA for GPU writes into what their result is added to, instead of zeros.

    zeros -> scatter-add(zeros, at, rows) -> x + scattered        x is written, then the rows are added to it in place

No zeros are written, and the sum moves nothing. What else reads x needs a copy of it: the kernel that makes x writes it twice, or
another one copies an input or what a library or a product wrote. The gradients of a softmax's logits at labels are such sums, and
those of an embedding that a product reads, too.

Facts: fusion-scatter-into-sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.ir.graph import Graph
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import is_scalar_broadcast


class SummedScatter(NamedTuple):
    """The addition of a scatter's result, the zeros that are not written, and the value that the rows are added to."""

    addition: int
    zeros: int
    into: int


def summed_scatters(graph: Graph) -> dict[int, SummedScatter]:
    """Scatter -> the addition that alone reads its result."""
    out: dict[int, SummedScatter] = {}
    taken = set[int]()
    for at, op in enumerate(graph.ops):
        zeros = op.inputs[0] if op.traits.scatter == "add" and at not in graph.dead else None
        if zeros is None or not is_scalar_broadcast(graph, zeros):
            continue
        readers = {*graph.readers(v := op.outputs[0])} - graph.dead
        addition = readers.pop() if len(readers) == 1 else -1
        if addition < 0 or addition in taken or not (add := graph.ops[addition]).traits.addition or add.loop != op.loop:
            continue
        others = [u for u in add.inputs if u is not None and graph.original(u) != v]
        same = len(others) == 1 and graph.values[others[0]].shape == graph.values[v].shape
        if same and not is_scalar_broadcast(graph, others[0]):
            taken.add(addition)
            out[at] = SummedScatter(addition, graph.original(zeros), others[0])
    return out


def with_summed_scatters(rules: Sequence[Rule], scatters: Mapping[int, SummedScatter]) -> tuple[Rule, ...]:
    """The rules as kernels see them: no fused kernel holds an addition that a scatter makes."""
    additions = {found.addition for found in scatters.values()}
    return tuple(replace(rule, fusion="none") if at in additions else rule for at, rule in enumerate(rules))


def copies(graph: Graph, rules: Sequence[Rule], found: SummedScatter) -> int:
    """How many times the bytes of the array that rows are added to are moved for other readers: 0, 1, or 2 by a kernel that copies."""
    maker = graph.maker(found.into)
    readers = {*graph.readers(graph.original(found.into))} - graph.dead
    kept = graph.ops[maker].traits.persistent and maker not in graph.donated
    if readers <= {found.addition} and not kept:
        return 0
    return 1 if rules[maker].fusion == "loop" else 2
