"""Seconds of a convolution on one device: cuDNN's call, as a product (`rates.convolution_sizes`), and the copies before it.

Where no rates of products are known, it has the rate of large products instead.
"""

from __future__ import annotations

import math

import numpy as np

from shardplan._jax import itemsize
from shardplan.ir.graph import Op
from shardplan.mesh.device import Device
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import convolution_sizes, kernel_seconds, product_seconds
from shardplan.strategies.enumerate import OpStrategies
from shardplan.strategies.rule import Rule
from shardplan.xla_model.traffic import LibraryCall


def call_seconds(
    op: Op, rule: Rule, strategies: OpStrategies, mesh: MeshShape, device: Device, call: LibraryCall, moved: np.ndarray
) -> np.ndarray:
    """Seconds [s] of a `conv_general_dilated` that becomes `call`, which reads and writes `moved` bytes [s]."""
    dtype, flops = str(op.ins[0].dtype), (rule.flops or 0.0) * call.flops * strategies.work
    if device.products and flops.all():
        sizes = np.broadcast_arrays(*local_sizes(op, rule, strategies, mesh, call, flops))
        seconds = product_seconds(device, dtype, np.stack(sizes, axis=1), moved, convolution=True)
    else:
        seconds = np.maximum(flops / device.flops_per_s(dtype), moved / device.memory_rate)
    for k, times in call.copied:
        copied = times * float(math.prod(op.ins[k].shape)) * itemsize(op.ins[k].dtype) / strategies.shards[k]
        seconds = seconds + [kernel_seconds(device, (), of) for of in copied]
    return seconds


def local_sizes(op: Op, rule: Rule, strategies: OpStrategies, mesh: MeshShape, call: LibraryCall, flops: np.ndarray) -> tuple:
    """`convolution_sizes` [s] of a call on one device."""

    def shards(factor: str) -> np.ndarray:
        pairs = (zip(of, mesh.sizes, strict=True) for of in strategies.factors)
        return np.array([math.prod(n for x, n in some if x == factor) for some in pairs], float)

    groups = op.params["feature_group_count"] * op.params["batch_group_count"] / shards("g")
    results = op.outs[0].size * call.sizes[2] / strategies.shards[len(op.ins)]
    features = op.outs[0].shape[op.params["dimension_numbers"][2][1]] / shards("o") / shards("g")
    gradient = call.kind == "filter gradient"
    channels = rule.sizes[of := "n" if gradient else "c"] / shards(of)  # a filter's gradient has its input channels in place of a batch
    filters, dims = (op.outs[0], 2) if gradient else (op.ins[1], 1)
    window = [filters.shape[d] for d in op.params["dimension_numbers"][dims][2:]]
    return convolution_sizes(groups, results, features, flops, channels, itemsize(op.ins[0].dtype), gradient, window)
