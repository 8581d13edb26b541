"""How long XLA's latency-hiding scheduler believes kernels and collectives to take: the order follows its estimates, the seconds ours.

                                 from Hopper on                                      before, where asked to hide latency
    fused kernel                 bytes / memory rate, no latency of a kernel         1,000 units
    kernel that keeps rows       nothing                                             1
    product                      a table of products measured in short runs, as our  1
                                 rates without what power takes; other rates for
                                 batches (`batch_s`) and for sums in float32 of
                                 narrower operands (`sums_s`); of float16 without
                                 these eight times what it is of bfloat16
    convolution                  10 us                                               1,000
    collective within a node     the bytes per second of the nearest size in a       5,000
                                 table of measured ones, whatever noise they have
    collective between nodes     launch + rounds of a ring (`ring_s`)                5,000

A unit is a microsecond. Facts: estimate-kernels, estimate-collectives, options-latency-hiding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from math import ceil, prod
from typing import Literal

import msgspec
import numpy as np

from shardplan.mesh import collective
from shardplan.mesh.cluster import AxisLink, Cluster
from shardplan.mesh.device import ProductRate, gpu_of_device_kind
from shardplan.mesh.rates import compute_seconds
from shardplan.xla_model.compiler_options import hides_unasked

KernelKind = Literal["fused", "rows", "product", "float16 product", "float32 product", "float32 sums", "convolution"]

NODE = 8
"""GPUs that XLA takes a node to have."""
SMALLEST_BYTES, SIZES = 1 << 10, 21
"""Bytes of the first entry of `collective_estimates.json`, and how many there are: each is twice as large as the one before."""
PRODUCTS: dict[str, tuple[str, float]] = {"product": ("bfloat16", 1.05), "float32 product": ("float32", 1.0)}
"""Kind of product -> the dtype of its operands, and XLA's seconds over ours of a short run."""
FLOAT16_TIMES = 8.0
"""Seconds of a product of float16 over those of the same product of bfloat16, on every GPU."""
SUMS_FLOPS_PER_S, SUM_S = {"b200": 22.2e12}, 11e-6
"""Products of narrower operands with sums in float32: FLOP/s by GPU, others 12.3e12, and seconds of each product of a batch; read off
XLA's log for 30 products on each of H100, H200 and B200, half of which are within 12 % of it, and nine in ten within 45 %."""
LEAST_DIM, SHORT_RUN_S = 256, 0.7e-6
"""Smallest dims in XLA's table of products, and what its seconds have more than ours: of 86 batches read off XLA's log for an H100 half
are within 8 % of `batch_s`, and nine in ten within 16 %."""
UNKNOWN_S, KERNEL_S = 5e-3, 1e-3
"""What it takes a collective and a kernel for where it has no estimate."""


@dataclass(frozen=True)
class _Ring:
    """Constants of XLA's ring between nodes: seconds to launch, of a round trip, to prepare a chunk; bytes of one, and per second."""

    launch_s: float = 45e-6
    trip_s: float = 31e-6
    chunk_s: float = 6e-6
    chunk_bytes: int = 4 << 20
    bytes_per_s: float = 50e9 / 1.025


_RINGS = {"h100": _Ring(bytes_per_s=25e9 / 1.025), "h100-500w": _Ring(bytes_per_s=25e9 / 1.025)}


def kernel_estimate_s(kind: KernelKind, seconds: float, size: float, cluster: Cluster, product: Sequence[float] = ()) -> float:
    """Seconds that XLA expects of a kernel that takes `seconds` by our measure.

    Args:
        kind: of the kernel.
        seconds: by our measure.
        size: bytes that count where its seconds are only a kernel's latency.
        cluster: the machine.
        product: batch, rows, columns and contracted elements, of products.
    """
    if not hides_unasked(cluster.device.name):
        return KERNEL_S if kind in ("fused", "convolution") else 1e-6
    if kind == "rows":
        return 1e-8
    if kind == "convolution":
        return 1e-5
    if kind == "float32 sums":
        return sums_s(product, cluster)
    if kind == "float16 product":
        return FLOAT16_TIMES * kernel_estimate_s("product", seconds, size, cluster, product)
    if kind == "product" and product and product[0] > 1:
        return batch_s(product, cluster)
    device = cluster.device
    if kind in PRODUCTS:
        dtype, times = PRODUCTS[kind]
        rate = device.product_rate(dtype)
        return times * seconds * (rate.sustained if rate else 1.0)
    small_s = size / device.memory_rate
    return device.bytes_efficiency * (seconds if seconds > device.kernel_latency_s else min(small_s, seconds))


def batch_s(product: Sequence[float], cluster: Cluster) -> float:
    """Of a batch of products: XLA's table has single ones, of dims of `LEAST_DIM` elements and more, and goes by their FLOP/s."""
    device = cluster.device
    batch, *dims = product
    filled = tuple(max(n, LEAST_DIM) for n in dims)
    rate = device.product_rate("bfloat16")
    if rate is None:
        return 2 * prod(product) / device.flops_per_s("bfloat16")
    alone = _alone_s(filled, replace(rate, sustained=1.0), device.peak("bfloat16") / device.sms, device.sms, device.memory_rate)
    return batch * alone * prod(dims) / prod(filled)


@cache
def _alone_s(dims: tuple[float, ...], rate: ProductRate, flops_per_s: float, multiprocessors: int, memory_rate: float) -> float:
    return SHORT_RUN_S + float(compute_seconds(rate, np.array([[1, *dims]]), flops_per_s, multiprocessors, memory_rate)[0])


def sums_s(product: Sequence[float], cluster: Cluster) -> float:
    """Of a product of narrower operands that sums in float32, by its batch, rows, columns and contracted elements."""
    gpu = gpu_of_device_kind(cluster.device.name)
    return 2 * prod(product) / SUMS_FLOPS_PER_S.get(gpu.key if gpu else "", 12.3e12) + product[0] * SUM_S


def collective_estimate_s(kind: str, size: float, link: AxisLink, groups: int, cluster: Cluster) -> float:
    """Seconds that XLA expects of a collective.

    Args:
        kind: of the collective.
        size: bytes per device of the larger buffer.
        link: of its groups.
        groups: how many there are.
        cluster: the machine.
    """
    if not hides_unasked(cluster.device.name):
        return UNKNOWN_S
    if link.nodes == 1:
        if kind not in (table := _measured_us(cluster)):
            return collective.seconds_on_link(kind, size, link, cluster)
        return _nearest_s(table[kind], size, link.members)
    nodes, communicators = (link.members // NODE, 1) if link.local == NODE else (link.members, groups)
    if kind == "collective-permute":
        nodes, communicators = 2, NODE
    if NODE % communicators:
        return UNKNOWN_S
    return ring_s(kind, size, nodes, nodes * NODE // communicators, cluster)


def _nearest_s(table: Mapping[int, Sequence[float]], size: float, members: int) -> float:
    """Seconds at the bytes per second of the entry whose size is nearest, of the nearest number of devices."""
    measured = table[min(table, key=lambda n: abs(n - members))]
    n = min(range(SIZES), key=lambda n: (abs((SMALLEST_BYTES << n) - size), -n))
    return 1e-6 * measured[n] * size / (SMALLEST_BYTES << n)


def _measured_us(cluster: Cluster) -> Mapping[str, Mapping[int, Sequence[float]]]:
    """Kind -> number of devices -> microseconds by size, as XLA has them measured on GPUs like these."""
    tables, gpu = _tables(), gpu_of_device_kind(cluster.device.name)
    return tables.us.get(gpu.key if gpu else "", tables.us["h100"])


class _Tables(msgspec.Struct, frozen=True):
    """The content of `collective_estimates.json`."""

    source: str
    bytes: str
    us: dict[str, dict[str, dict[int, tuple[float, ...]]]]


@cache
def _tables() -> _Tables:
    return msgspec.json.decode((resources.files("shardplan.xla_model") / "collective_estimates.json").read_bytes(), type=_Tables)


def ring_s(kind: str, size: float, nodes: int, members: int, cluster: Cluster) -> float:
    """Seconds of a ring of `members` GPUs on as many as `nodes` nodes; twice for an all-reduce; of an all-to-all to all others."""
    gpu = gpu_of_device_kind(cluster.device.name)
    ring = _RINGS.get(gpu.key if gpu else "", _Ring())
    parts = members - 1 if kind == "all-to-all" else members
    part = size if kind == "collective-permute" else size / parts
    rounds = members - members // nodes if kind == "all-to-all" else (members - 1) / (members / nodes)
    each = part / ring.bytes_per_s + ceil(part / ring.chunk_bytes) * ring.chunk_s + ring.trip_s
    times = 2 if kind == "all-reduce" else 1
    return ring.launch_s + times * rounds * each + 2 * size / cluster.device.bytes_per_s
