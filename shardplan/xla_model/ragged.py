"""The masked copies of the rows of ragged products: of which operands, and from when to when they are in memory.

XLA multiplies all rows by every group's right-hand side. It writes a copy of the rows per group in which the rows of other groups are
zero; where a product contracts the rows, of both operands. Copies that are masked by the same sizes of groups are written by one kernel
if they are of one size and none of them waits for a product that reads another: it runs when the last of their arrays is there, and the
products wait for it. So what was masked for the forward pass and is read by the backward pass is held between them.

    rows    |= masked, forward ==|
    hidden              |= masked, forward and backward =======|      one kernel, in the forward pass
    gradient of the result                      |= masked =====|      for both operands' gradients and rows', one kernel

Rule 23 of docs/xla_model.md. Facts: product-ragged-masked, product-ragged-one-kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op


class MaskedCopy(NamedTuple):
    """The masked copies of operand `operand` of op `op`, one per group, in memory at times lo <= t < hi."""

    op: int
    operand: int
    lo: int
    hi: int


def masked_operands(op: Op) -> tuple[int, ...]:
    """Of which operands of a ragged product masked copies are written."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    return (0, 1) if numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0] else (0,)


def groups_of(op: Op) -> int:
    """How many groups a ragged product has."""
    return op.ins[2].shape[-1]


def masked_copies(graph: Graph) -> tuple[MaskedCopy, ...]:
    """Those of all ragged products of a step, in program order."""
    products = [at for at, op in enumerate(graph.ops) if op.traits.grouped_matmul and at not in graph.dead]
    behind = _products_behind(graph, products)
    kernels: dict[int, list[_MaskKernel]] = {at: [] for at in products}  # those that write a product's copies
    alike: dict[tuple, list[_MaskKernel]] = {}  # by what the copies of one kernel have in common
    found: list[tuple[int, int, _MaskKernel]] = []
    for at in products:
        op = graph.ops[at]
        for k in masked_operands(op):
            v, sizes = op.inputs[k], op.inputs[2]
            if v is None or sizes is None:
                continue
            some = alike.setdefault((op.loop, graph.original(sizes), math.prod(op.ins[k].shape), op.ins[k].dtype), [])
            before = _before(behind[v], kernels)
            kernel = next((x for x in reversed(some) if x not in before), None)
            if kernel is None:
                some.append(kernel := _MaskKernel(at))
            kernel.runs_at = max(kernel.runs_at, graph.values[v].producer[0] + 1)
            kernel.behind += behind[v]
            kernels[at].append(kernel)
            found.append((at, k, kernel))
    runs_at = {at: max(at, *(x.runs_at for x in kernels[at])) for at, _, _ in found}
    return tuple(MaskedCopy(at, k, kernel.runs_at, runs_at[at] + 1) for at, k, kernel in found)


@dataclass(eq=False)
class _MaskKernel:
    """A kernel that writes masked copies: when it runs, and the ragged products that it waits for."""

    runs_at: int
    behind: list[int] = field(default_factory=list)


def _products_behind(graph: Graph, products: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Value that a ragged product reads -> the ragged products that it is computed from."""
    bit = {at: 1 << n for n, at in enumerate(products)}
    found = [0] * len(graph.values)
    for at, op in enumerate(graph.ops if products else ()):
        of = bit.get(at, 0)
        for v in op.inputs:
            of |= 0 if v is None else found[v]
        for v in op.outputs:
            found[v] = of
    read = {v for at in products for v in graph.ops[at].inputs if v is not None}
    return {v: tuple(at for at in products if bit[at] & found[v]) for v in read}


def _before(products: Iterable[int], kernels: Mapping[int, Sequence[_MaskKernel]]) -> set[_MaskKernel]:
    """The kernels that run before one of these products ends."""
    todo = [kernel for p in products for kernel in kernels[p]]
    seen = set(todo)
    for kernel in todo:
        for earlier in (x for p in kernel.behind for x in kernels[p]):
            if earlier not in seen:
                seen.add(earlier)
                todo.append(earlier)
    return seen
