"""Seconds that products save as one kernel, and how many of them at most, whatever is merged.

Products that share an operand are one product, whose other operands lie side by side (`xla_model/merged_products.py`), or are copied
there. It reads the shared operand once, fills the multiprocessors with the tiles of all results, and pays the latency of one kernel.
Of any merged product

    seconds  >=  latency_s + sum over its parts of  2 b m n (k + fill) / rate

so that each of q products that may be merged takes at least latency_s / q and its own part of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardplan._jax import itemsize
from shardplan.costs.roofline import moved_bytes
from shardplan.costs.split_products import Sizes, Written, local_sizes, merged_sizes, product_seconds, split_product, written_by
from shardplan.ir.graph import Op
from shardplan.mesh import rates
from shardplan.mesh.device import Device
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.enumerate import OpStrategies
from shardplan.xla_model.merged_products import FRAGMENT, MERGED_PRODUCT_BYTES
from shardplan.xla_model.traffic import KernelTraffic


class PricedProduct(NamedTuple):
    """A product, and its strategies."""

    op: Op
    strategies: OpStrategies
    traffic: KernelTraffic

    @property
    def dtype(self) -> str:
        """Of its operands."""
        return str(self.op.ins[0].dtype)

    def operand_bytes(self, k: int) -> np.ndarray:
        """Bytes [s] of an operand, or behind these of the result."""
        x = (*self.op.ins, *self.op.outs)[k]
        return float(math.prod(x.shape)) * itemsize(x.dtype) / self.strategies.shards[k]


def saved_seconds(products: Sequence[tuple[PricedProduct, int]], shared: int, mesh: MeshShape, device: Device) -> float:
    """Seconds that products, each with its strategy, take less as one kernel than each by itself; `shared` is their common operand."""
    kernels, of_shared = [], []
    for product, s in products:
        op, strategies, traffic = product
        of_shared.append(float(traffic.operand_reads[shared] * product.operand_bytes(shared)[s]))
        sizes = local_sizes(op, strategies, s, mesh)
        written = written_by(op, strategies, s, sizes, traffic.summed_by)
        kernels.append((sizes, float(moved_bytes(op, strategies, traffic)[s]), (written,)))
    moved = sum(x for _, x, _ in kernels) - sum(of_shared) + max(of_shared)
    merged = merged_sizes([sizes for sizes, *_ in kernels], shared), moved, tuple(x for *_, (x,) in kernels)
    of = products[0][0].dtype, itemsize(products[0][0].op.ins[0].dtype), device
    saved_s = sum(_kernel_s(*kernel, *of) for kernel in kernels) - _kernel_s(*merged, *of)
    if any(sizes[2 - shared] % FRAGMENT for sizes, *_ in kernels):
        joined = sum(float(product.operand_bytes(1 - shared)[s]) for product, s in products)
        saved_s -= rates.kernel_seconds(device, (), 2 * joined)
    return saved_s


@lru_cache(4096)
def _kernel_s(sizes: Sizes, moved: float, written: tuple[Written, ...], dtype: str, element_bytes: float, device: Device) -> float:
    """Seconds of one kernel as XLA splits it, and of the sums of its parts."""
    split = split_product(sizes, element_bytes, moved, written, device)
    return float(rates.product_seconds(device, dtype, np.array([split.sizes]), np.array([split.moved]))[0]) + split.extra_s


def most_saved(group: Sequence[PricedProduct], mesh: MeshShape, device: Device) -> list[np.ndarray]:
    """Per product of a group that may be merged, the most seconds [s] that its kernel takes less for it than it takes by itself."""
    sizes = [sum(product.operand_bytes(k) for k in range(3)) for product in group]
    least = [float(np.min(some)) for some in sizes]
    first, second = sorted(least)[:2]
    out = []
    for n, (op, strategies, traffic) in enumerate(group):
        merges = np.minimum(sizes[n], second if least[n] == first else first) <= MERGED_PRODUCT_BYTES
        alone_s = product_seconds(op, strategies, mesh, device, moved_bytes(op, strategies, traffic), traffic.summed_by)
        out.append(merges * np.maximum(0.0, alone_s - _least_s(group[n], mesh, device, len(group))))
    return out


def _least_s(product: PricedProduct, mesh: MeshShape, device: Device, kernels: int) -> np.ndarray:
    """Seconds [s] that a product takes at least as part of a kernel of up to so many."""
    rate = device.product_rate(product.dtype)
    sizes = np.array([local_sizes(product.op, product.strategies, s, mesh) for s in range(len(product.strategies))], float)
    results, contracted = sizes[:, :3].prod(1), sizes[:, 3]
    if rate is None:
        return 2 * results * contracted / device.flops_per_s(product.dtype)
    flops_per_s = device.peak(product.dtype) * rate.efficiency * rate.sustained
    return rate.latency_s / kernels + 2 * results * (contracted + rate.fill) / flops_per_s
