"""Products that XLA splits along the contracted dim: how often, and seconds on one device.

A product whose result has few tiles leaves multiprocessors idle. XLA splits its contracted dim in s parts, each a product of its own
that writes float32; a contracted dim that the parts do not divide is padded first, one kernel per operand. Copies and parts are held
as well as operands and result; a copy instead of what a fused kernel makes for the product alone. A fused kernel that reads
the result sums the parts while it reads them; several do if the parts are few. Elsewhere, and where partial sums of several devices are
sent, a kernel of its own does. With T tiles of the result, k contracted elements and p multiprocessors, s is the power of two that
minimises

    k_s max(1, s T/p) + 4 T s     for s > 1,     k     for s = 1

where k_s are the elements of a part, whole blocks of `BLOCK`; found from compiled programs.

Facts: product-split-contracted, product-padded-copies, product-parts-summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from shardplan._jax import itemsize
from shardplan.ir.graph import Op
from shardplan.mesh import rates
from shardplan.mesh.device import Device
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import kernel_seconds
from shardplan.strategies.enumerate import OpStrategies
from shardplan.xla_model.ragged import contracts_rows, groups_of

TILE = 128
"""Rows and columns of a tile of the result."""

BLOCK = 32
"""Contracted elements that one step of a product takes, in the choice of s."""

SPLITS = (2, 4, 8, 16, 32, 64, 128)
MANY = 32
"""Parts that XLA sums by a reduction, which several kernels do not compute again."""

ALIGNED_BYTES = 16
"""Each part of the contracted dim has a multiple of these bytes."""


@cache
def contracted_splits(batch: int, m: int, n: int, k: int, element_bytes: float, multiprocessors: int) -> tuple[int, int]:
    """(number of parts, contracted elements after padding) of a product [batch, m, k] x [batch, k, n]."""
    tiles = batch * math.ceil(m / TILE) * math.ceil(n / TILE)
    best, parts, padded = float(k), 1, k
    for s in SPLITS:
        part, unit = math.ceil(k / s / BLOCK) * BLOCK, s * max(1, round(ALIGNED_BYTES / element_bytes))
        cost = part * max(1.0, s * tiles / multiprocessors) + 4.0 * tiles * s
        if cost < best or (cost == best and parts > 1):
            best, parts, padded = cost, s, math.ceil(k / unit) * unit
    return parts, padded


Sizes = tuple[int, int, int, int]
"""Batch, rows, columns and contracted elements of a product."""


def product_sizes(op: Op, left: Sequence[int], right: Sequence[int], groups: int = 1) -> Sizes:
    """Of a `dot_general` of operands of these shapes, or of a ragged one, which multiplies masked copies of its rows per group."""
    numbers = op.params["ragged_dot_dimension_numbers" if op.traits.grouped_matmul else "dimension_numbers"]
    (contracted, (batch, _)) = numbers.dot_dimension_numbers if op.traits.grouped_matmul else numbers
    b, k = math.prod(left[d] for d in batch), math.prod(left[d] for d in contracted[0])
    if op.traits.grouped_matmul and contracts_rows(op):
        return groups * b, math.prod(left) // max(1, b * k), math.prod(right) // max(1, b * k), k
    return b, math.prod(left) // max(1, b * k), math.prod(right) // max(1, groups * b * k), groups * k


def local_sizes(op: Op, strategies: OpStrategies, s: int, mesh: MeshShape) -> Sizes:
    """Of a product on one device under strategy s."""
    left, right = (of[s].local_shape(x.shape, mesh) for x, of in zip(op.ins[:2], strategies.operands[:2], strict=True))
    return product_sizes(op, left, right, _groups(op, strategies, s, mesh) if op.traits.grouped_matmul else 1)


def local_groups(op: Op, strategies: OpStrategies, mesh: MeshShape) -> np.ndarray:
    """Groups [s] of a ragged product on one device."""
    return np.array([float(_groups(op, strategies, s, mesh)) for s in range(len(strategies))])


def _groups(op: Op, strategies: OpStrategies, s: int, mesh: MeshShape) -> int:
    at, dim = groups_of(op)
    return (*strategies.operands, *strategies.results)[at][s].local_shape((*op.ins, *op.outs)[at].shape, mesh)[dim]


def merged_sizes(sizes: Sequence[Sizes], shared: int) -> Sizes:
    """Sizes of the one kernel that products are which share their left (0) or right (1) operand: the others lie side by side."""
    batch, rows, columns, contracted = sizes[0]
    if shared:
        return batch, sum(m for _, m, _, _ in sizes), columns, contracted
    return batch, rows, sum(n for _, _, n, _ in sizes), contracted


def product_parts(op: Op, sizes: Sizes, device: Device) -> int:
    """In how many parts XLA splits the contracted dim of a product, or of several that are one kernel, with these sizes."""
    return contracted_splits(*sizes, itemsize(op.ins[0].dtype), device.sms)[0] if device.sms else 1


def parts_of(op: Op, strategies: OpStrategies, mesh: MeshShape, device: Device) -> np.ndarray:
    """`product_parts` of a product under each strategy, [s]."""
    return np.array([product_parts(op, local_sizes(op, strategies, s, mesh), device) for s in range(len(strategies))])


class Written(NamedTuple):
    """What a product's kernel writes for one of the products that are merged in it, on one device.

    Attributes:
        elements, itemsize: of the result.
        summed_by: how many fused kernels can sum the parts.
        partial: whether it is a partial sum of several devices.
    """

    elements: float
    itemsize: float
    summed_by: int = 0
    partial: bool = False


class SplitProduct(NamedTuple):
    """A product as XLA splits it: sizes and bytes of its kernel, and seconds of the sums of its parts."""

    sizes: Sizes
    moved: float
    extra_s: float


def split_product(sizes: Sizes, element_bytes: float, moved: float, written: Sequence[Written], device: Device) -> SplitProduct:
    """How XLA splits a product with operands of `element_bytes` an element that reads and writes `moved` bytes."""
    b, m, n, k = sizes
    parts, padded = contracted_splits(b, m, n, k, element_bytes, device.sms) if device.sms else (1, k)
    if parts == 1:
        return SplitProduct(sizes, moved, 0.0)
    kernels = [2 * element_bytes * b * k * rows for rows in (m, n)] if padded != k else []
    extra_s = 0.0
    for of in written:
        partial, result = 4.0 * parts * of.elements, of.itemsize * of.elements
        moved = max(0.0, moved - result) + partial
        here = of.summed_by == 1 or (of.summed_by > 1 and parts < MANY)
        if here and not of.partial:  # the first reads the parts, and writes the result for others
            extra_s += max(0.0, partial - result + (of.summed_by > 1) * result) / device.memory_rate
        else:
            kernels.append(partial + result)
    extra_s += sum(kernel_seconds(device, (), x) for x in kernels)
    return SplitProduct((parts * b, m, n, padded // parts), moved, extra_s)


class HeldParts(NamedTuple):
    """What a split product holds while it runs, per strategy [s]."""

    operands: np.ndarray  # bytes of the padded copy of an operand over those of the operand; 0 where it is not padded
    result: np.ndarray  # bytes of the parts over those of the result; 0 where there is one


def held_parts(op: Op, strategies: OpStrategies, mesh: MeshShape, device: Device) -> HeldParts:
    """Padded copies and parts of a product on one device."""
    found = []
    for s in range(len(strategies)):
        *_, k = sizes = local_sizes(op, strategies, s, mesh)
        parts, padded = contracted_splits(*sizes, itemsize(op.ins[0].dtype), device.sms) if device.sms and k else (1, k)
        found.append((padded / k, 4.0 * parts / itemsize(op.outs[0].dtype)) if parts > 1 else (1.0, 0.0))
    operands, result = np.array(found, float).reshape(-1, 2).T
    return HeldParts(np.where(operands > 1, operands, 0.0), result)


def product_seconds(
    op: Op, strategies: OpStrategies, mesh: MeshShape, device: Device, moved: np.ndarray, summed_by: int = 0
) -> np.ndarray:
    """Seconds [s] of a product as XLA splits it, with the sums of its parts.

    Args:
        op, strategies, mesh, device: the product, and where it runs.
        moved: bytes [s] that it reads and writes.
        summed_by: how many fused kernels can sum the parts.
    """
    found, element_bytes = [], itemsize(op.ins[0].dtype)
    for s, bytes_ in enumerate(moved.tolist()):
        sizes = local_sizes(op, strategies, s, mesh)
        written = written_by(op, strategies, s, sizes, summed_by)
        found.append(split_product(sizes, element_bytes, float(bytes_), (written,), device))
    split, split_moved, extra_s = (np.array(x) for x in zip(*found, strict=True))
    return rates.product_seconds(device, str(op.ins[0].dtype), split, split_moved) + extra_s


def written_by(op: Op, strategies: OpStrategies, s: int, sizes: Sizes, summed_by: int) -> Written:
    """What a product writes under strategy s, of these local sizes."""
    b, m, n, _ = sizes
    return Written(b * m * n, itemsize(op.outs[0].dtype), summed_by, bool(strategies.results[0][s].partial))
