"""Which values XLA for GPU writes to memory, and which are only seen inside fusions.

Elementwise ops, views and the reductions behind them fuse. A value that only fusions read never materialises; each of them computes it
again. Materialised are:

    inputs, loop carries and branch results; products, gathers, scatters and the like
    partial sums that are copied: written, reduced by a collective, read again
    elementwise results that some reader cannot compute again, or that are cheaper to read than to compute again
    products that are transposed in memory (`physical_layout.py`)

Facts: fusion-loop, fusion-recompute-cheaper, fusion-matmul-prologue, fusion-broadcast-scalar, fusion-zeros-shared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.kernels import FUSIBLE, kernels, read_array, runs_in
from shardplan.xla_model.physical_layout import transposed_in_memory, transposed_product


def materialised(graph: Graph, rules: Sequence[Rule], sums: Sequence[bool]) -> tuple[bool, ...]:
    """Per value, whether it is written to memory; views of what is written elsewhere are not.

    Args:
        graph: the step.
        rules: per op.
        sums: per op, whether its result may be partial.
    """
    out = [True] * len(graph.values)
    prologue = _prologues(graph, rules)
    for v in reversed(range(len(graph.values))):
        at, _ = graph.values[v].producer
        op, fusion = graph.ops[at], rules[at].fusion
        if op.traits.materialised or fusion == "view":
            out[v] = op.traits.materialised
            continue
        reached = list(graph.reached(v, lambda at: _seen_through(graph, rules, at)))
        if op.scalar_broadcast and not any(graph.ops[c].traits.stores_operand for c in reached):
            out[v] = False
        elif sums[at] and any(graph.ops[c].traits.copy for c in reached):
            continue  # partial sums are written, reduced and read again
        elif fusion == "loop" and not op.scalar_broadcast:
            readers = [c for c in reached if not _seen_through(graph, rules, c)]
            stacked = len(readers) == 1 and graph.ops[readers[0]].traits.loop_stack  # computed as the row is written
            out[v] = not stacked and not all(_absorbs(graph, rules, op, reader, v in prologue) for reader in readers)
    for op in graph.ops:
        if (v := transposed_product(graph, op)) is not None and out[op.outputs[0]]:
            out[v] = False
    for v in (*transposed_in_memory(graph, rules), *_shared_zeros(graph)):
        out[v] = True
    cheaper_to_read = _cheaper_to_read(graph, rules, out, sums)
    return tuple(written or v in cheaper_to_read for v, written in enumerate(out))


def _seen_through(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    """Whether a fusion that reads the result may as well read the operand: a copy or a view."""
    return graph.ops[at].traits.copy or (rules[at].fusion == "view" and not graph.ops[at].traits.border)


def _absorbs(graph: Graph, rules: Sequence[Rule], producer: Op, at: int, prologue: bool) -> bool:
    """Whether op `at` computes what `producer` makes inside its own kernel."""
    reader, fuses = graph.ops[at], rules[at].fusion in FUSIBLE
    inside = reader.traits.copy or not reader.traits.border
    return inside and runs_in(producer) == reader.loop and (fuses or (prologue and reader.traits.matmul))


def _prologues(graph: Graph, rules: Sequence[Rule]) -> set[int]:
    """Values that XLA computes inside the products that read them: one array after elementwise work that reads it once.

    A change of dtype on the way, a selection or a second use of the array (gelu's) is written before the product.
    """
    out: set[int] = set()
    for op in graph.ops:
        if op.traits.matmul_prologue and op.outs[0].shape:
            arrays = [graph.original(v) for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.size == op.outs[0].size]
            made = [(v, graph.values[v].producer[0]) for v in arrays]
            made = [(v, at) for v, at in made if not graph.ops[at].traits.broadcast]
            if len(made) == 1 and all(v in out or rules[at].fusion != "loop" for v, at in made):
                out.add(op.outputs[0])
    return out


def _shared_zeros(graph: Graph) -> list[int]:
    """Scalars broadcast like those that a scatter writes into, all taken to be zeros: XLA makes one array of both, and a copy."""
    updated: dict[tuple[Hashable, Hashable, bool], list[int]] = {}  # (shape, dtype, whether a scatter writes into it) -> values
    for op in graph.ops:
        if op.scalar_broadcast and op.loop < 0:
            into = any(graph.ops[reader].traits.in_place for reader in graph.readers(op.outputs[0]))
            updated.setdefault((op.outs[0].shape, op.outs[0].dtype, into), []).append(op.outputs[0])
    return [v for (shape, dtype, into), some in updated.items() if not into and (shape, dtype, True) in updated for v in some]


def _cheaper_to_read(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> set[int]:
    """Values that are written once, since computing them again in every kernel that reads them would read more.

    Of k kernels, each reads the sources, or one reads them and writes the value, which the others read:
    k * sources  >  sources + value + (k - 1) * value.
    """
    _, inside = kernels(graph, rules, written, sums)
    out: set[int] = set()
    sources: list[dict[int, float]] = []
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        found: dict[int, float] = {}
        for u in op.inputs:
            if u is not None:
                root = read_array(graph, rules, u)
                found |= {root: graph.values[root].bytes} if written[root] or root in out else sources[root]
        sources.append(found)
        if written[v] or rules[at].fusion != "loop" or op.scalar_broadcast:
            continue
        k = len(inside[at])
        if (k - 1) * (sum(found.values()) - value.bytes) > value.bytes:
            out.add(v)
    return out
