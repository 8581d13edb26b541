"""Seconds of one kernel on one device: matrix products by their shape, everything else by what it moves and computes.

A product [b, m, k] x [b, k, n] is computed tile by tile of its result, on p multiprocessors at once, each tile by one of them:

    T = b ⌈m/r⌉ ⌈n/c⌉ tiles of r x c;   waves = ⌈T s / p⌉  if the contracted dim is split in s parts
    compute = waves · (k/s + fill) · 2 r c (1 + edge (1/r + 1/c)) ÷ (rate of one multiprocessor)  +  sums of s > 1 parts
    seconds = latency_s + max(compute, bytes ÷ memory rate)                 of the fastest (r, c) in `TILES` and s in `PARTS`

So products fall off smoothly where they are thin, small or odd: few tiles leave multiprocessors idle, short contracted dims pay for
filling. A convolution is a product, too, that contracts channels and windows (`convolution_sizes`). Kernels without products compute
no more than so many results a second, which is what counts for narrow ones:

    seconds = max(latency_s, bytes ÷ memory rate, elements ÷ elements_per_s)

where elements are results, or what takes as long: `COLUMN_READ`, `ROW_READ`, `MASKED_BYTE`, `UNTILED_BYTE`, `NARROW_UPDATE`.

`ProductRate` has the constants of a GPU and a dtype, fitted to measured products by benchmarks/fit_rates.py. Without them
every shape runs at `Device.flops_per_s`. Attention that is one kernel has a rate of its own (`attention_rate`). A step is priced by
this file alone, before it is compiled (`costs/roofline.py`) and after (`xla/hlo/schedule.py`).

Also known as tile and wave quantization: NVIDIA, "Matrix Multiplication Background User's Guide".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.mesh.device import Device, ProductRate

TILES = np.array([(256, 128), (128, 128), (64, 64)], float)
"""Rows and columns of a tile of the result that cuBLAS and Triton choose from."""

PARTS = np.array([1, 2, 4, 8, 16], float)
LEAST_PART = 64
"""Contracted elements that a part has at least."""

PART_BYTES = 32
"""Bytes of memory traffic that each element of each part's result is worth; float32 written and read, and waited for."""


COLUMN_READ = 0.57
"""What an element costs that a kernel reads to reduce columns, in results of elementwise kernels. Rows are read as fast as memory is.
Clocked on one H200 (benchmarks/one_gpu.py)."""

ROW_READ = 0.5
"""What an element costs that a kernel reads to reduce rows, if it keeps them on chip from one reduction to another, in results of
elementwise kernels. Clocked on one H200 (benchmarks/one_gpu.py): of softmax and layer norm memory takes longer, of the gradient of
layer norm, with four and five reductions, it does not."""

MASKED_BYTE = 0.41
"""What a byte costs that such a kernel moves where it masks rows with an array of fewer dims, as causal attention does, in results of
elementwise kernels: half the memory's rate. Clocked on one H200 (benchmarks/one_gpu.py)."""

NARROW_UPDATE = 6.4
"""What a scatter's update of 16 bits or less costs where indices are not sorted, in results of elementwise kernels.
Clocked on one H200 (benchmarks/one_gpu.py)."""


CHANNEL_BYTES = 64
"""Bytes of an input's channels that a convolution multiplies at a time; where there are fewer, zeros. Clocked on one H200
(benchmarks/one_gpu.py)."""


UNTILED_BYTE = 1.44
"""What a byte of the result costs where a kernel transposes without tiles (`xla_model/physical_layout.py`), in results of elementwise
kernels: a fifth of the memory's rate. Clocked on one H200 (benchmarks/one_gpu.py)."""


def elements_computed(largest: float, columns: float, rows: float, masked_bytes: float, untiled_bytes: float) -> float:
    """What the slowest part of a kernel without products takes, in elements that it computes one by one.

    Args:
        largest: elements of its largest result.
        columns: elements that it reads, if it reduces columns.
        rows: elements that it reads to reduce rows that stay on chip.
        masked_bytes: that it moves, if it masks such rows.
        untiled_bytes: of the largest array that it transposes without tiles.
    """
    return max(largest, COLUMN_READ * columns, ROW_READ * rows, MASKED_BYTE * masked_bytes, UNTILED_BYTE * untiled_bytes)


DEPTHWISE_MULTIPLY, NOT_SQUARE = 0.12, 33.0
"""What a multiplication costs in a convolution with one feature per group, which tensor cores do not compute, in results of elementwise
kernels; and how many times that if it is depthwise and its window is not square, for which cuDNN has no such kernel. Clocked on one
H200 (benchmarks/one_gpu.py): windows of 7 x 7; of 5 x 7 and 1 x 4 the middle, 1.8 times too slow and as much too fast."""


class Attention(NamedTuple):
    """What decides the rate of an attention kernel: elements of a head, keys that a query meets, causal masks, and the direction."""

    head_size: int
    keys: int
    causal: bool
    backward: bool


class Product(NamedTuple):
    """A product in a kernel: its dtype, its flops, and its [batch, rows, columns, contracted], where these are known.

    The products of an attention kernel are one, with `attention` in place of sizes. Sizes of a `convolution` are `convolution_sizes`.
    """

    dtype: str
    flops: float
    sizes: tuple[float, float, float, float] | None = None
    attention: Attention | None = None
    convolution: bool = False


def convolution_sizes(groups, results, features, flops, channels, element_bytes: float, filter_gradient: bool, window) -> tuple:
    """Batch, rows, columns and contracted elements of a convolution as a product; of numbers or arrays of them.

    Depthwise ones, of one channel and feature per group, fill no channels, but `NOT_SQUARE` counts.

    Args:
        groups: of features or of the batch.
        results: elements of the result; of a filter's gradient, the filter.
        features: of the result; of a filter's gradient, output channels.
        flops: a multiply-add is two.
        channels: that one group contracts; of a filter's gradient, input channels of the filter, which are rows then.
        element_bytes: of the operands.
        filter_gradient: whether cuDNN calls it so.
        window: elements of the filter along each spatial dim.
    """
    unit = CHANNEL_BYTES / element_bytes
    depthwise = 1.0 if len(window) > 1 and len({*window}) == 1 else NOT_SQUARE
    filled = np.where((channels <= 1) & (features <= groups), depthwise, np.ceil(channels / unit) * unit / channels)
    rows, contracted = results / features, flops / (2 * results)
    if filter_gradient:
        rows = rows * filled
    else:
        contracted = contracted * filled
    return groups, rows, features / groups, contracted


def product_seconds(device: Device, dtype: str, sizes: np.ndarray, moved: np.ndarray, convolution: bool = False) -> np.ndarray:
    """Seconds of products on one device.

    Args:
        device: what computes them.
        dtype: of their operands.
        sizes: batch, rows, columns, contracted elements, [s, 4].
        moved: bytes that each reads and writes, [s].
        convolution: whether they are convolutions, which keep the rate of short runs: clocked on one H200 (benchmarks/one_gpu.py).
    """
    rate = device.product_rate(dtype)
    if rate is not None and convolution:
        rate = replace(rate, sustained=1.0)
    if rate is None:
        compute = 2.0 * np.prod(sizes, axis=1, dtype=float) / device.flops_per_s(dtype)
        return np.maximum(np.maximum(compute, moved / device.memory_rate), device.kernel_latency_s)
    compute = compute_seconds(rate, sizes, device.peak(dtype) / device.sms, device.sms, device.memory_rate)
    if convolution:
        depthwise = device.computed_s(DEPTHWISE_MULTIPLY * np.prod(sizes, axis=1, dtype=float))
        compute = np.where(sizes[:, 2] <= 1, depthwise, compute)
    return rate.latency_s + np.maximum(compute, moved / device.memory_rate)


def compute_seconds(rate: ProductRate, sizes: np.ndarray, flops_per_s: float, multiprocessors: int, memory_rate: float) -> np.ndarray:
    """Seconds of the products alone, [s]; `flops_per_s` is the peak of one multiprocessor."""
    b, m, n, k = (x[:, None, None] for x in np.asarray(sizes, float).T)
    rows, columns = TILES[:, 0, None], TILES[:, 1, None]  # [tile, part]
    whole = 1 + rate.edge * (1 / TILES[0, 0] + 1 / TILES[0, 1])
    slower = (1 + rate.edge * (1 / rows + 1 / columns)) / whole
    tiles = b * np.ceil(m / rows) * np.ceil(n / columns)
    waves = np.ceil(tiles * PARTS / multiprocessors)
    seconds = waves * (k / PARTS + rate.fill) * (2 * rows * columns * slower / (flops_per_s * rate.efficiency * rate.sustained))
    seconds = seconds + (PARTS > 1) * (PART_BYTES * tiles * rows * columns * PARTS / memory_rate)
    return np.where((PARTS > 1) & (k / PARTS < LEAST_PART), np.inf, seconds).min(axis=(1, 2))


def attention_rate(device: Device, dtype: str, of: Attention) -> float:
    """FLOP/s of a fused attention kernel, each of its products counted once and masked ones not at all.

    Heads that are smaller than all measured ones take as long per pair of a query and a key, since so do their exponentials.
    """
    rate = device.attention.get("backward" if of.backward else "forward")
    if rate is None:
        return device.flops_per_s(dtype)
    efficiency = float(np.interp(of.head_size, (0, *rate.head_sizes), (0, *rate.efficiency)))
    short = rate.short_causal if of.causal else rate.short
    return device.peak(dtype) * efficiency * rate.sustained / (1 + short / of.keys)


def kernel_seconds(device: Device, products: Sequence[Product], bytes_: float, elements: float = 0.0) -> float:
    """Seconds of one kernel with any number of products in it; `elements` count where there is none."""
    if not products:
        return max(bytes_ / device.memory_rate, device.computed_s(elements), device.kernel_latency_s)
    if not device.products:
        return max(sum(p.flops / device.flops_per_s(p.dtype) for p in products), bytes_ / device.memory_rate, device.kernel_latency_s)
    seconds = 0.0
    for n, (dtype, flops, sizes, attention, convolution) in enumerate(products):
        moved = 0.0 if n else bytes_
        if sizes is None:
            rate = attention_rate(device, dtype, attention) if attention else device.flops_per_s(dtype)
            seconds += max(flops / rate, moved / device.memory_rate, device.kernel_latency_s)
        else:
            seconds += float(product_seconds(device, dtype, np.array([sizes]), np.array([moved]), convolution)[0])
    return seconds
