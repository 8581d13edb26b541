"""The masked copies of the rows of ragged products: of which operands, and from when to when they are in memory.

XLA multiplies all rows by every group's right-hand side. It writes a copy of the rows per group in which the rows of other groups are
zero; where a product contracts the rows, of both operands. Copies that are masked by the same sizes of groups are written by one kernel
if they are of one size and none of them waits for a product that reads another: it runs when the last of their arrays is there, and the
products wait for it. So what is masked for the forward and for the backward pass of one computation is held between them. Of two
expert layers, up and down, as one program:

    rows of up    |= masked =|
    rows of down             |= masked for both passes =========|
    gradients                       |= of down's result twice, rows of up =|
                                                                |= of up's result twice ===|

A row's copies lie side by side for a product of rows, [rows, groups, columns], and those of a group for one that contracts the rows,
[groups, rows, columns]. Where both read an array, one kernel writes both orders if the latter product is split in parts; else only the
second order, which another kernel transposes for the first.

Which are of one size is taken of the whole arrays. On a device they may be sharded to different ones: then they are written and held
apart, and the plan counts too much memory.

Rule 23 of docs/xla_model.md. Facts: product-ragged-masked, product-ragged-one-kernel, product-ragged-transposed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op
from shardplan.xla_model.traffic import MaskedRows


class MaskedCopy(NamedTuple):
    """The masked copies of operand `operand` of op `op`, one per group, in memory at times lo <= t < hi; other ops may read them, too.

    One kernel writes those of `together` operands. `turned`: a product of rows reads the same array's copies, in the other order.
    """

    op: int
    operand: int
    lo: int
    hi: int
    together: int
    turned: bool = False


def contracts_rows(op: Op) -> bool:
    """Whether a ragged product contracts the rows that are in groups, as the gradient of the weights does."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    return numbers.lhs_ragged_dimensions[0] in numbers.dot_dimension_numbers[0][0]


def masked_operands(op: Op) -> tuple[int, ...]:
    """Of which operands of a ragged product masked copies are written."""
    return (0, 1) if contracts_rows(op) else (0,)


def groups_of(op: Op) -> tuple[int, int]:
    """Which dim of which tensor of a ragged product, operands first, are its groups; groups of batches are in the sizes alone."""
    if contracts_rows(op):
        return len(op.ins), 0
    dims = op.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    return (1, dims[0]) if dims else (2, len(op.ins[2].shape) - 1)


def masked_copies(graph: Graph) -> tuple[MaskedCopy, ...]:
    """Those of all ragged products of a step, each once, in the order of their first readers."""
    products = [at for at, op in enumerate(graph.ops) if op.traits.grouped_matmul and at not in graph.dead]
    behind = _products_behind(graph, products)
    kernels: dict[int, list[_MaskKernel]] = {at: [] for at in products}  # those that write a product's copies
    similar: dict[tuple, list[_MaskKernel]] = {}  # by what the copies of one kernel have in common
    readers: dict[tuple[_MaskKernel, int, bool], list[tuple[int, int]]] = {}  # of each array of copies, the first one stands for it
    for at in products:
        op = graph.ops[at]
        for k in masked_operands(op):
            v, sizes = op.inputs[k], op.inputs[2]
            if v is None or sizes is None:
                continue
            some = similar.setdefault((op.loop, graph.original(sizes), math.prod(op.ins[k].shape), op.ins[k].dtype), [])
            before = _before(behind[v], kernels)
            kernel = next((x for x in reversed(some) if x not in before), None)
            if kernel is None:
                some.append(kernel := _MaskKernel(at))
            kernel.runs_at = max(kernel.runs_at, graph.values[graph.original(v)].producer[0] + 1)
            kernel.behind += behind[v]
            kernels[at].append(kernel)
            readers.setdefault((kernel, graph.original(v), contracts_rows(op)), []).append((at, k))
    runs_at = {at: max([at, *(x.runs_at for x in kernels[at])]) for at in products}
    together, by_rows = Counter(kernel for kernel, *_ in readers), {v for _, v, contracts in readers if not contracts}
    last = {key: max(runs_at[at] for at, _ in of) for key, of in readers.items()}
    return tuple(
        MaskedCopy(*of[0], key[0].runs_at, last[key] + 1, together[key[0]], key[2] and key[1] in by_rows) for key, of in readers.items()
    )


def masked_by_op(graph: Graph) -> dict[int, tuple[MaskedRows, ...]]:
    """Ragged product -> the masked copies that are written for it first."""
    found: dict[int, tuple[MaskedRows, ...]] = {}
    for copy in masked_copies(graph):
        found[copy.op] = (*found.get(copy.op, ()), MaskedRows(copy.operand, copy.together, copy.turned))
    return found


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
