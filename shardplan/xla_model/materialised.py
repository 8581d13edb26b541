"""Which values XLA for GPU writes to memory.

Elementwise ops, views and the reductions behind them fuse. A value that only fusions read never materialises; each of them computes it
again. Materialised are:

    inputs, loop carries and branch results; products, gathers, scatters and the like
    elementwise results that some reader cannot compute again, or that are cheaper to read than to compute again (`expensive.py`)
    products that are transposed in memory (`physical_order.py`)
    what a product's kernel writes (`product_kernels.py`)
    one array of the zeros that are read behind scatters into zeros

Facts: fusion-loop, fusion-broadcast-scalar, fusion-zeros-shared, fusion-reads-part, fusion-scatter-into-sum, fusion-stacked-rows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Fusion, Rule
from shardplan.xla_model.expensive import cheaper_to_read
from shardplan.xla_model.fusible import absorbs, seen_through
from shardplan.xla_model.fusion_estimate import ANY_DEVICE, FusionEstimate
from shardplan.xla_model.product_kernels import computed_on_the_way, prologues, written_by_products
from shardplan.xla_model.row_kernels import RowKernels
from shardplan.xla_model.summed_scatters import summed_scatters


def materialised(
    graph: Graph, rules: Sequence[Rule], sums: Sequence[bool], rows: RowKernels, estimate: FusionEstimate = ANY_DEVICE
) -> tuple[bool, ...]:
    """Per value, whether it is written to memory; views are not.

    Args:
        graph: the step.
        rules: per op.
        sums: per op, whether its result may be partial.
        rows: `row_kernels` of the graph.
        estimate: of the devices.
    """
    out = [True] * len(graph.values)
    prologue = {v: read for v, read in prologues(graph, rules).items() if v not in rows.orders.written}
    into_products = {v for v in prologue.values() if v not in prologue}
    scatters = summed_scatters(graph)
    for v in reversed(range(len(graph.values))):
        at, _ = graph.values[v].producer
        op, fusion = graph.ops[at], rules[at].fusion
        if op.traits.materialised or fusion == "view":
            out[v] = op.traits.materialised
            continue
        reached = [c for c in graph.reached(v, lambda at: seen_through(graph, rules, at)) if c not in graph.dead]
        if op.scalar_broadcast and not any(graph.ops[c].traits.stores_operand for c in reached):
            out[v] = False
        elif fusion == "loop" and not op.scalar_broadcast:
            readers = [c for c in reached if not seen_through(graph, rules, c)]
            out[v] = not all(_stacks_row(graph, rows, at, c) or absorbs(graph, rules, op, c, v in prologue) for c in readers)
            out[v] |= v in into_products
            out[v] |= v in rows.ends
            out[v] |= _moves_or_sums(op, fusion) and _needs_memory(graph, out, rows, v)
    for v, w, always in written_by_products(graph, rules):
        if out[v] and (always or out[w]):
            for u in (v, *computed_on_the_way(graph, v, w)):
                out[u] = u == w
    for v in (*rows.orders.later, *_shared_zeros(graph, scatters)):
        out[v] = True
    for at, found in scatters.items():
        out[graph.ops[at].outputs[0]] = out[found.zeros] = False
    once = cheaper_to_read(graph, rules, out, sums, rows, estimate)
    return tuple(written or v in once for v, written in enumerate(out))


def _stacks_row(graph: Graph, rows: RowKernels, at: int, c: int) -> bool:
    """Whether reader `c` puts what op `at` makes into a stack, as a row that its kernel computes; that keeps no rows on chip for it."""
    op, reader = graph.ops[at], graph.ops[c]
    return reader.traits.loop_stack and op.runs_in == reader.loop and not rows.behind[at]


def _moves_or_sums(op: Op, fusion: Fusion) -> bool:
    """Whether an op is a lookup, a concatenation or a sum of few elements that is elementwise work to a kernel."""
    return fusion == "loop" and (op.traits.gather or op.traits.concatenates or op.traits.reduction)


def _needs_memory(graph: Graph, written: Sequence[bool], rows: RowKernels, v: int) -> bool:
    """Whether a kernel that reads the result of a lookup, a concatenation or a sum does not compute it.

    One that keeps rows on chip looks nothing up, and concatenates no rows that it reduces; what is broadcast would be summed again for
    every element.
    """
    maker = graph.ops[graph.values[v].producer[0]].traits
    inside = graph.reached(v, lambda at: not any(written[w] for w in graph.ops[at].outputs))
    if maker.concatenates:
        return not rows.fused.isdisjoint(inside)
    return any(rows.behind[at] or (maker.reduction and graph.ops[at].traits.broadcast) for at in inside)


def _shared_zeros(graph: Graph, scatters: Collection[int]) -> list[int]:
    """Scalars broadcast like those that a scatter writes into, taken to be zeros, and read behind it: XLA makes one array of all.

    Of several the first stands for the array. But for numbers that the program says are none, and those of `scatters`, which write into
    something else. A reader that waits for no scatter makes them itself.
    """
    overwritten = {
        at: op.inputs[0]
        for at, op in enumerate(graph.ops)
        if op.traits.in_place and at not in scatters and op.inputs[0] is not None and _is_zeros(graph, op.inputs[0])
    }
    into = {graph.original(v) for v in overwritten.values()}
    behind: list[frozenset[Hashable]] = []  # per op, shapes and dtypes of the scatters into zeros that it waits for
    out: dict[Hashable, int] = {}
    for at, op in enumerate(graph.ops):
        waits = {behind[graph.values[v].producer[0]] for v in op.inputs if v is not None}
        behind.append(frozenset().union(*waits, [_typed(graph, graph.ops[at].outputs[0])] if at in overwritten else ()))
        for v in op.inputs if behind[at] else ():
            zeros = None if v is None else graph.original(v)
            if zeros is not None and zeros not in into and _is_zeros(graph, zeros) and _typed(graph, zeros) in behind[at]:
                out.setdefault(_typed(graph, zeros), zeros)
    return [*out.values()]


def _typed(graph: Graph, v: int) -> Hashable:
    return graph.values[v].shape, graph.values[v].dtype


def _is_zeros(graph: Graph, v: int) -> bool:
    """Whether a value may be zeros that XLA writes once: a scalar, not said to be another number, broadcast outside loops."""
    op = graph.ops[graph.maker(v)]
    return op.scalar_broadcast and op.loop < 0 and not op.operand_is_nonzero
