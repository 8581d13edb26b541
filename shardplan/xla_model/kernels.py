"""Which ops one GPU kernel runs, and how many bytes it reads and writes.

A kernel is a group of fused ops between materialised values. What stands behind a reduction, a product or a collective waits for it in
a later kernel, and reads again what an earlier one read:

    y -> cast -+-> sum ------+            kernel 1 reads y, writes the sum
               +-> minus <---+-> cast     kernel 2 reads y and the sum, writes the normalised y

Facts: fusion-multi-output, fusion-reads-part, fusion-in-place-update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir.graph import Graph, Op, components
from shardplan.strategies.rule import Rule
from shardplan.xla_model.physical_layout import transposed_product

FUSIBLE = ("loop", "view", "reduce")

Kernel = tuple
"""Group of ops, how many kernels it waits for, phase, loop, and the shapes and dims of its reductions."""


@dataclass(frozen=True)
class KernelTraffic:
    """What an op moves between memory and the device in one run.

    Attributes:
        operand_reads, result_writes: how many times the bytes of the operand, or of the result, are read or written.
        kernel_bytes: bytes that the kernel moves which the op stands for, of all shards; None if it stands for none.
    """

    operand_reads: tuple[int, ...]
    result_writes: tuple[int, ...]
    kernel_bytes: float | None


def kernel_traffic(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> tuple[KernelTraffic, ...]:
    """What every op moves: each kernel reads an array once, on behalf of the first op that needs it.

    Args:
        graph: the step.
        rules: per op.
        written: per value, whether it materialises.
        sums: per op, whether its result may be partial.
    """
    own, inside = kernels(graph, rules, written, sums)
    found = ((transposed_product(graph, op), op.outputs[0]) for op in graph.ops if op.outputs)
    transposed = {v: w for v, w in found if v is not None and written[w]}
    by_product = frozenset(transposed.values())
    seen: set[tuple[Kernel, int]] = set()  # what a kernel has read or made
    moved: dict[Kernel, float] = {}
    stands: dict[Kernel, int] = {}
    counts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for at, op in enumerate(graph.ops):
        operands, results = [0] * len(op.inputs), [0] * len(op.outputs)
        idle = op.traits.moves_nothing
        for k, v in enumerate(op.inputs):
            if v is None or idle or rules[at].fusion == "view" or (k == 0 and op.traits.in_place):
                continue
            root = read_array(graph, rules, v)
            new = [kernel for kernel in inside[at] if (kernel, root) not in seen] if written[root] else []
            part = k == 0 and op.traits.reads_part
            (results if part else operands)[k] += len(new)
            for kernel in new:
                seen.add((kernel, root))
                moved[kernel] = moved.get(kernel, 0.0) + graph.values[op.outputs[0] if part else root].bytes
        for k, v in enumerate(op.outputs):
            if v in transposed:
                results[k] += 1
            elif v in by_product:
                seen.add((own[at], v))
            elif written[v] and not idle:
                stands.setdefault(own[at], at)
                seen.add((own[at], v))
                if op.traits.writes_part:
                    part, times = op.traits.writes_part
                    operands[part] += times
                else:
                    results[k] += 1
                    moved[own[at]] = moved.get(own[at], 0.0) + graph.values[v].bytes
        counts.append((tuple(operands), tuple(results)))
    kernel = {at: moved.get(key, 0.0) for key, at in stands.items()}
    return tuple(KernelTraffic(operands, results, kernel.get(at)) for at, (operands, results) in enumerate(counts))


def kernels(
    graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]
) -> tuple[list[Kernel], list[set[Kernel]]]:
    """Per op, the kernel in which it writes; and those that compute it: its own where it writes, all its readers' where it does not.

    One kernel reduces arrays of one shape over the same dims; what is written on the way is written by any of its reductions.
    """
    groups, levels = _groups(graph, rules, written), _levels(graph, rules, written, sums)
    homes: list[Kernel] = []
    over = [_reduction(op) if rule.fusion == "reduce" else None for op, rule in zip(graph.ops, rules, strict=True)]
    first: dict[Kernel, tuple] = {}
    for at, op in enumerate(graph.ops):
        alone = op.traits.reads_part and not any(_fuses(graph, rules, reader) for v in op.outputs for reader in graph.readers(v))
        homes.append((-1 - at if alone else groups[at], levels[at], op.phase, runs_in(op)))
        if reduced := over[at]:
            first.setdefault(homes[at], reduced)
    own = [(*key, reduced or first.get(key)) for key, reduced in zip(homes, over, strict=True)]
    inside: list[set[Kernel]] = [set() for _ in graph.ops]
    for at in reversed(range(len(graph.ops))):
        for v in graph.ops[at].outputs:
            if not written[v]:
                inside[at].update(*(inside[reader] for reader, _ in graph.values[v].consumers))
            elif not graph.ops[at].traits.moves_nothing:
                inside[at].add(own[at])
    return own, inside


def runs_in(op: Op) -> int:
    """The loop in which an op is computed; rows are sliced in the loop that reads them."""
    return op.held_during if op.traits.loop_slice else op.loop


def read_array(graph: Graph, rules: Sequence[Rule], v: int) -> int:
    """The array whose bytes are read when v is: views are looked through, and copies, which are priced as reshards."""
    return graph.origin(v, lambda at: rules[at].fusion == "view")


def _reduction(op: Op) -> tuple:
    """What reductions of one kernel have in common: shapes and dims."""
    over = next((op.params[name] for name in ("axes", "dimensions", "dimension_numbers", "window_dimensions") if name in op.params), ())
    return tuple(x.shape for x in op.ins), str(over)


def _fuses(graph: Graph, rules: Sequence[Rule], reader: int) -> bool:
    """Whether an op may be part of a kernel that writes what it reads."""
    return rules[reader].fusion in FUSIBLE and not graph.ops[reader].traits.border


def _groups(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> list[int]:
    """Per op, its group: the producer and the readers of a value inside fusions."""
    pairs = (
        (value.producer[0], reader)
        for v, value in enumerate(graph.values) if value.shape
        for reader, _ in value.consumers
        if not written[v] or (rules[value.producer[0]].fusion == "loop" and _fuses(graph, rules, reader))
    )  # fmt: skip
    return components(len(graph.ops), pairs)


def _levels(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> list[int]:
    """Per op, the number of reductions, products and partial sums that it waits for, one behind the other."""
    out = [0] * len(graph.ops)
    for at, op in enumerate(graph.ops):
        for v in op.inputs:
            if v is not None:
                before = graph.values[v].producer[0]
                ends_kernel = written[v] and (rules[before].fusion in ("reduce", "none") or sums[before])
                out[at] = max(out[at], out[before] + ends_kernel)
    return out
