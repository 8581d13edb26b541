"""What products compute besides: XLA makes their kernels, of Triton, before any other.

    before    elementwise work on one array, inputs of the computation and numbers is computed again inside every product that reads it;
              so is a cast to a wider dtype, and one to a narrower dtype of an input that nothing else reads. Two bounds in a row, a max
              of a min, and a clamp are written before the product
    behind    a product writes a transpose of its result instead, or what elementwise work makes of it and of inputs of the step or of
              the loop, up to a cast to a wider dtype, if that is in memory: always where it gets narrower or such inputs are read as
              they are. What a product writes for a loop's next round is copied, which takes as long as the work: a kernel of its own

Facts: fusion-matmul-prologue, fusion-matmul-prologue-cast, fusion-matmul-prologue-clamp, fusion-matmul-epilogue, fusion-matmul-written,
fusion-matmul-carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shardplan._jax import itemsize
from shardplan.ir.graph import CAST, Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import array_operands, is_scalar_broadcast, seen_through
from shardplan.xla_model.merged_products import sharing_products
from shardplan.xla_model.physical_order import transposed_product


def prologues(graph: Graph, rules: Sequence[Rule]) -> dict[int, int]:
    """Value that XLA computes inside the products that read it -> the one array that it is computed of.

    Such a value is elementwise work on one array, inputs of the computation and numbers, or a cast of one array. Not so: a cast to a
    narrower dtype (`_narrows`), a selection, two bounds (`_clamps`), work that reads the array twice, as gelu's does, and work with
    another computed operand: a mean, a weight that was cast, a row of a stack. If the array is elementwise work itself and is written,
    only a cast is left to the product: other work moves as many bytes either way, and is taken to be part of the kernel before.
    """
    possible: dict[int, int] = {}
    for op in graph.ops:
        if (op.traits.matmul_prologue or op.primitive == CAST) and op.outs[0].shape and not _is_written_before(graph, rules, op):
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


def _is_written_before(graph: Graph, rules: Sequence[Rule], op: Op) -> bool:
    """Whether no product computes an op for itself, although it is elementwise: a cast to a narrower dtype, or two bounds."""
    return _narrows(graph, op) or (_clamps(graph, op) and not _follows_product(graph, rules, op))


def _follows_product(graph: Graph, rules: Sequence[Rule], op: Op) -> bool:
    """Whether an op ends a chain that a product's kernel can compute: each op reads the one before, which nothing else reads."""
    at = graph.values[op.outputs[0]].producer[0]
    while not (graph.ops[at].traits.matmul and rules[at].fusion == "none"):
        made = [v for v in array_operands(graph, graph.ops[at]) if not _is_input(graph, v)]
        if len(made) != 1 or len(graph.values[made[0]].consumers) != 1 or not _follows(graph, rules, at):
            return False
        at = graph.values[made[0]].producer[0]
    return True


def _narrows(graph: Graph, op: Op) -> bool:
    """Whether an op is a cast to a narrower dtype, but of an input of the step that it alone reads, for one reader."""
    if op.primitive != CAST or op.inputs[0] is None or itemsize(op.ins[0].dtype) <= itemsize(op.outs[0].dtype):
        return False
    source = graph.original(op.inputs[0])
    once = all(len({*graph.readers(v)}) == 1 for v in (source, op.outputs[0]))
    return not (once and graph.ops[graph.maker(source)].traits.step_input)


def _clamps(graph: Graph, op: Op) -> bool:
    """Whether an op bounds from both sides, or by a number what another bounds on the other side: XLA makes one op of both."""
    if op.traits.bounds_twice:
        return True
    other = {"max": "min", "min": "max"}.get(op.primitive)
    maker = None if (v := _only_array(graph, op)) is None else graph.ops[graph.maker(v)]
    return maker is not None and maker.primitive == other and _only_array(graph, maker) is not None


def _only_array(graph: Graph, op: Op) -> int | None:
    """The one operand of an op that is no number, if all others are."""
    arrays = [v for v in array_operands(graph, op) if not is_scalar_broadcast(graph, v)]
    return arrays[0] if len(arrays) == 1 else None


def _is_input(graph: Graph, v: int) -> bool:
    """Whether a value is an input of the step or of a loop's body, made of literals alone, or either broadcast."""
    op = graph.ops[graph.maker(v)]
    if op.traits.broadcast or (op.inputs and all(u is None for u in op.inputs)):
        return all(u is None or _is_input(graph, u) for u in op.inputs)
    return _is_input_as_it_is(op)


def _is_input_as_it_is(op: Op) -> bool:
    return op.traits.persistent or op.traits.loop_carry or op.traits.loop_const


def written_by_products(graph: Graph, rules: Sequence[Rule]) -> list[tuple[int, int, bool]]:
    """(result of a product, what its kernel writes instead, whether always or only if that is in memory at all), the furthest first.

    A transpose of it; or a chain of elementwise work, of which each reads the one before once and nothing else but inputs of the
    computation, as far as it gets no wider, with a cast that ends it: always if that is narrower, or behind something that reads such
    an input; products that may be merged do nothing else. A reshard between the two prevents either; prices add what the second then
    moves (`costs/tables.py`).
    """
    merged = {at for some in sharing_products(graph, rules) for at, _ in some}
    out: list[tuple[int, int, bool]] = []
    for at, (op, rule) in enumerate(zip(graph.ops, rules, strict=True)):
        if op.traits.matmul and rule.fusion == "none":
            v, (w, widened, carried) = op.outputs[0], _chain(graph, rules, op.outputs[0])
            if graph.values[w].itemsize < graph.values[v].itemsize + carried:
                out.append((v, w, True))
            elif widened != v and at not in merged and not _is_next_carry(graph, rules, widened):
                out.append((v, widened, False))
    transposed = ((transposed_product(graph, op), op.outputs[0]) for op in graph.ops if op.outputs)
    return [*out, *((v, w, True) for v, w in transposed if v is not None)]


def _chain(graph: Graph, rules: Sequence[Rule], v: int) -> tuple[int, int, bool]:
    """Of a product's result where the work behind it ends, without and with a wider cast, and whether that reads an input as it is."""
    w = end = v
    carried = False
    while len(graph.values[end].consumers) == 1 and _follows(graph, rules, at := graph.values[end].consumers[0][0]):
        op = graph.ops[at]
        if graph.values[op.outputs[0]].itemsize > graph.values[end].itemsize:
            return w, op.outputs[0] if op.primitive == CAST else w, carried
        end, carried = op.outputs[0], carried or _reads_input(graph, op)
        w = w if op.traits.copy else end
    return w, w, carried


def written_instead(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> dict[int, int]:
    """Result of a product that its kernel does not write -> what it writes."""
    found = ((v, w) for v, w, _ in reversed(written_by_products(graph, rules)) if written[w] and not written[v])
    return dict(found)


def by_products(graph: Graph, rules: Sequence[Rule], instead: Mapping[int, int]) -> dict[int, int]:
    """Op -> the product behind which its kernel computes it, for what ops read; a loop's next round reads what is written anyway.

    `instead` as of `written_instead`.
    """
    return {
        graph.values[u].producer[0]: graph.values[v].producer[0]
        for v, w in instead.items()
        if not _is_only_next_carry(graph, rules, w)
        for u in computed_on_the_way(graph, v, w)
    }


def _is_next_carry(graph: Graph, rules: Sequence[Rule], v: int) -> bool:
    """Whether a value is a loop's next carry, whatever else reads it."""
    return any(op.traits.loop_next for op in _last_readers(graph, rules, v))


def _is_only_next_carry(graph: Graph, rules: Sequence[Rule], v: int) -> bool:
    """Whether a value is a loop's next carry, and nothing else reads it."""
    readers = [*_last_readers(graph, rules, v)]
    return bool(readers) and all(op.traits.loop_next for op in readers)


def _last_readers(graph: Graph, rules: Sequence[Rule], v: int) -> Iterator[Op]:
    """The ops that read a value as it is, or behind views and copies."""
    reached = graph.reached(v, partial(seen_through, graph, rules))
    return (graph.ops[at] for at in reached if not seen_through(graph, rules, at))


def computed_on_the_way(graph: Graph, v: int, w: int) -> Iterator[int]:
    """The values behind v, a product's result, up to w, which its kernel writes instead."""
    while v != w:
        (v,) = graph.ops[graph.values[v].consumers[0][0]].outputs
        yield v


def _follows(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether a product's kernel can compute an op behind the product.

    It can if the op is elementwise, a cast or a transpose, and reads one computed array; other operands are scalars and inputs of the
    computation. A copy stands for nothing if its readers take any layout. Ops of the optimizer outside of loops do not count: the
    planner assumes that a collective stands between them and the product, as in all but few steps. This is no rule of XLA.
    """
    op = graph.ops[at]
    if op.traits.copy:
        return op.is_follower
    made = [v for v in array_operands(graph, op) if not is_scalar_broadcast(graph, v) and not _is_input(graph, v)]
    possible = op.traits.matmul_prologue or op.traits.transpose or op.primitive == CAST
    return possible and (op.phase != "update" or op.loop >= 0) and len(made) == 1


def _reads_input(graph: Graph, op: Op) -> bool:
    """Whether an op reads an array that is an input of the computation as it is, the step's or a loop's."""
    return any(_is_input_as_it_is(graph.ops[graph.maker(v)]) for v in array_operands(graph, op))
