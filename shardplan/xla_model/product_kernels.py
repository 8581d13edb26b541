"""What products compute besides: XLA makes their kernels, of Triton, before any other.

    before    elementwise work on one array, inputs of the computation and numbers is computed again inside every product that reads it;
              so is a cast to a wider dtype, and one to a narrower dtype of an input that nothing else reads
    behind    a product writes a transpose of its result instead, or what elementwise work on it alone makes in a narrower dtype, with a
              loop's carry added in none that is wider

Facts: fusion-matmul-prologue, fusion-matmul-prologue-cast, fusion-matmul-epilogue, fusion-matmul-carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from shardplan._jax import itemsize
from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.kernel_groups import seen_through
from shardplan.xla_model.physical_order import transposed_product

CAST = "convert_element_type"


def prologues(graph: Graph, rules: Sequence[Rule]) -> dict[int, int]:
    """Value that XLA computes inside the products that read it -> the one array that it computes it of, reading it once.

    A cast to a narrower dtype, a selection or a second use of the array (gelu's) is written before the product, and so is work with
    anything that is no input of the computation as it is: a mean, a weight that is cast, a row of a stack. Of what then follows only a
    cast is left to the product: other work moves as many bytes either way, and belongs to the kernel before.
    """
    possible: dict[int, int] = {}
    for op in graph.ops:
        if (op.traits.matmul_prologue or op.primitive == CAST) and op.outs[0].shape and not _narrows(graph, op):
            arrays = [graph.original(v) for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.size == op.outs[0].size]
            made = [v for v in arrays if not graph.ops[graph.maker(v)].traits.broadcast]
            others = [v for v in op.inputs if v is not None and all(graph.original(v) != u for u in made)]
            if len(made) != 1 or not all(_is_input(graph, v) for v in others):
                continue
            if op.primitive == CAST or made[0] in possible or rules[graph.maker(made[0])].fusion != "loop":
                possible[op.outputs[0]] = made[0]
    out: dict[int, int] = {}
    for v in sorted(possible, reverse=True):
        reached = (graph.ops[at] for at in graph.reached(v, partial(seen_through, graph, rules)))
        if any(op.traits.matmul or not out.keys().isdisjoint(op.outputs) for op in reached):
            out[v] = possible[v]
    return out


def _narrows(graph: Graph, op: Op) -> bool:
    """Whether an op is a cast to a narrower dtype, but of an input of the step that it alone reads, for one reader."""
    if op.primitive != CAST or op.inputs[0] is None or itemsize(op.ins[0].dtype) <= itemsize(op.outs[0].dtype):
        return False
    source = graph.original(op.inputs[0])
    once = all(len({*graph.readers(v)}) == 1 for v in (source, op.outputs[0]))
    return not (once and graph.ops[graph.maker(source)].traits.step_input)


def _is_input(graph: Graph, v: int) -> bool:
    """Whether a value is an input of the step or of a loop's body, made of literals alone, or either broadcast."""
    op = graph.ops[graph.maker(v)]
    if op.traits.broadcast or (op.inputs and all(u is None for u in op.inputs)):
        return all(u is None or _is_input(graph, u) for u in op.inputs)
    return op.traits.persistent or op.traits.loop_carry or op.traits.loop_const


def written_by_products(graph: Graph, rules: Sequence[Rule]) -> dict[int, tuple[int, bool]]:
    """Result of a product -> what its kernel writes instead, and whether always, or only if that is in memory at all.

    A transpose of it; or a chain of elementwise work on it alone, of which each reads the one before, if that ends in a narrower dtype,
    or in no wider one behind an addition to a loop's carry or the like.
    A reshard between the two prevents either; prices add what the second then moves (`costs/tables.py`).
    """
    found = ((transposed_product(graph, op), op.outputs[0]) for op in graph.ops if op.outputs)
    out = {v: (w, False) for v, w in found if v is not None}
    for op, rule in zip(graph.ops, rules, strict=True):
        if op.traits.matmul and rule.fusion == "none":
            v = w = end = op.outputs[0]
            carried = 0
            while len(graph.values[end].consumers) == 1 and _follows(graph, rules, at := graph.values[end].consumers[0][0]):
                if graph.values[graph.ops[at].outputs[0]].itemsize > graph.values[end].itemsize:
                    break
                end, carried = graph.ops[at].outputs[0], carried + len(_carries(graph, graph.ops[at]))
                w = w if graph.ops[at].traits.copy else end
            if graph.values[w].itemsize < graph.values[v].itemsize + (carried > 0):
                out[v] = w, True
    return out


def computed_on_the_way(graph: Graph, v: int, w: int) -> Iterator[int]:
    """The values behind v, a product's result, up to w, which its kernel writes instead."""
    while v != w:
        (v,) = graph.ops[graph.values[v].consumers[0][0]].outputs
        yield v


def _follows(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether an op is elementwise work on one array, scalars and carries of a loop, or a copy."""
    op = graph.ops[at]
    if op.traits.copy:
        return op.is_follower
    made = [graph.ops[graph.values[v].producer[0]] for v in op.inputs if v is not None and graph.values[v].shape]
    arrays = [maker for maker in made if not maker.scalar_broadcast]
    return rules[at].fusion == "loop" and not op.traits.border and len(arrays) - len(_carries(graph, op)) == len(op.outputs) == 1


def _carries(graph: Graph, op: Op) -> list[int]:
    """The operands of an op that are a loop's carry as it is, an input of the computation: products' kernels read no others."""
    return [v for v in op.inputs if v is not None and graph.values[v].shape and graph.ops[graph.maker(v)].traits.loop_carry]
