"""Compute seconds of an op under each strategy: a roofline over the kernels that XLA makes.

    seconds[s] = max(flops[s] / peak(dtype), bytes[s] / memory rate, elements of a kernel of its own / their rate, its latency)
                 + what a fused kernel's bytes fall short of its elements and its latency

Matrix products, convolutions and attention kernels take the seconds of their shape on one device (`mesh/rates.py`). `bytes` are
those that the op's kernels read and write on its behalf (`xla_model/bytes_moved.py`).

Also known as the roofline model: Williams, Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardplan._jax import itemsize
from shardplan.costs.convolution_calls import call_seconds
from shardplan.costs.split_products import local_groups, parts_of, product_seconds
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.device import Device
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import NARROW_UPDATE, UNTILED_BYTE, attention_rate, kernel_seconds
from shardplan.strategies.enumerate import OpStrategies
from shardplan.strategies.signature import Signature
from shardplan.xla_model.ragged import masked_operands
from shardplan.xla_model.row_kernels import Dim
from shardplan.xla_model.split_reductions import split_reduction
from shardplan.xla_model.traffic import KernelTraffic, LibraryCall, MaskedRows

BLOCK_ELEMENTS, ROW_ELEMENTS = 1 << 12, 1 << 14
"""Elements per result that one block of threads reduces, and along rows (fact: reduction-two-kernels)."""


def compute_seconds(
    graph: Graph,
    mesh: MeshShape,
    cluster: Cluster,
    signatures: Sequence[Signature],
    traffic: Sequence[KernelTraffic],
    exchanged: Sequence[np.ndarray | None],
) -> tuple[np.ndarray, ...]:
    """Per op, seconds [s] of its kernels in one run on one device; one array for ops of one signature and traffic (both per op)."""
    known: dict[tuple[int, KernelTraffic], np.ndarray] = {}
    out = []
    for op, signature, moves, of in zip(graph.ops, signatures, traffic, exchanged, strict=True):
        if (key := (signature.number, moves)) not in known:
            known[key] = _op_seconds(op, signature, mesh, cluster, moves)
            if moves.call and of is not None:
                known[key] = known[key] + (of > 0) * _halo_copy_seconds(op, signature, cluster.device, moves.call)
        out.append(known[key])
    for loop in graph.loops:
        if loop.trips > 1 and loop.start < loop.stop:  # a kernel counts the rounds
            rounds = loop.rounds / graph.ops[loop.start].runs  # per run of an op that may belong to a loop inside
            out[loop.start] = out[loop.start] + rounds * cluster.device.kernel_latency_s
    return tuple(out)


def _op_seconds(op: Op, signature: Signature, mesh: MeshShape, cluster: Cluster, moves: KernelTraffic) -> np.ndarray:
    rule, strategies, device = signature.rule, signature.strategies, cluster.device
    moved = moved_bytes(op, strategies, moves)
    for k in masked_operands(op) if op.traits.grouped_matmul else ():  # a copy per group, which kernels of their own write
        moved += _masked_elements(op, strategies, mesh, k) * itemsize(op.ins[k].dtype)
    if moves.row_bytes:  # the sums of all shards are known only when a kernel ends
        partial = strategies.shards[0] > strategies.shards[len(op.ins)]
        moved += partial * moves.row_bytes / strategies.shards[0]
    if rule.scan:  # a second pass adds the totals of the shards before
        moved *= [1 if rule.scan.isdisjoint(factors) else 2 for factors in strategies.factors]
    if rule.bytes is not None:
        moved = rule.bytes * strategies.work
    seconds = moved / device.memory_rate
    if rule.flops and op.ins:
        dtype = str(op.ins[0].dtype) if hasattr(op.ins[0], "dtype") else "float32"
        if (op.traits.matmul or op.traits.grouped_matmul) and rule.fusion == "none" and moved.any():
            seconds = product_seconds(op, strategies, mesh, device, moved, moves.summed_by)
            seconds = seconds + _masking_seconds(op, strategies, mesh, device, moves.masked)
        elif moves.call:
            seconds = call_seconds(op, rule, strategies, mesh, device, moves.call, moved)
        else:
            rate = attention_rate(device, dtype, rule.attention) if rule.attention else device.flops_per_s(dtype)
            seconds = np.maximum(rule.flops * strategies.work / rate, seconds)
    if rule.fusion == "none" and moved.any():
        elements = 0.0 if rule.flops else _elements(op, strategies, any(moves.result_writes))
        seconds = np.maximum(seconds, np.maximum(device.kernel_latency_s, device.computed_s(elements)))
    elif moves.kernel_bytes is not None:
        least = np.maximum(device.kernel_latency_s, device.computed_s(moves.kernel_elements * strategies.work))
        seconds = seconds + np.maximum(0.0, least - moves.kernel_bytes * strategies.work / device.memory_rate)
    if moves.partial_moves:
        sums = np.array([layout.partial != () for layout in strategies.results[0]])
        bytes_ = float(op.outs[0].size) * itemsize(op.outs[0].dtype) / strategies.shards[len(op.ins)]
        seconds = seconds + sums * np.maximum(device.kernel_latency_s, moves.partial_moves * bytes_ / device.memory_rate)
    if any(moves.result_writes):
        seconds = seconds + _more_reduction_seconds(op, strategies, mesh, device, moves.apart)
    if moves.copied:
        copied = float(op.outs[0].size) * itemsize(op.outs[0].dtype) / strategies.shards[len(op.ins)]
        seconds = seconds + np.maximum(device.kernel_latency_s, 2 * copied / device.memory_rate)
    if moves.zeros:
        stack = float(op.outs[0].size) * itemsize(op.outs[0].dtype) / strategies.shards[len(op.ins)]
        least = device.kernel_latency_s * moves.zeros.alone
        seconds = seconds + np.maximum(least, moves.zeros.moves * stack / device.memory_rate) / moves.zeros.rounds
    for k, untiled in moves.transposed:
        of = float(math.prod(op.ins[k].shape)) / strategies.shards[k]
        bytes_ = of * itemsize(op.ins[k].dtype)
        least = np.maximum(device.kernel_latency_s, device.computed_s(UNTILED_BYTE * bytes_ if untiled else of))
        seconds = seconds + np.maximum(least, 2 * bytes_ / device.memory_rate)
    return seconds


def _halo_copy_seconds(op: Op, signature: Signature, device: Device, call: LibraryCall) -> float | np.ndarray:
    """Seconds [s] of writing a convolution's input with its halo, which its filter's gradient reads, too.

    A kernel that writes the input with its padding writes the halo as well (fact: convolution-halo-copy).
    """
    if not signature.rule.halo.keys().isdisjoint(signature.rule.reduce) or any(k == 0 for k, _ in call.copied):
        return 0.0
    held = float(math.prod(op.ins[0].shape)) * itemsize(op.ins[0].dtype) / signature.strategies.shards[0]
    return np.array([kernel_seconds(device, (), 2 * x) for x in held])


def moved_bytes(op: Op, strategies: OpStrategies, moves: KernelTraffic) -> np.ndarray:
    """Bytes [s] that an op's kernels read of its operands and write of its results."""
    moved = np.zeros(len(strategies))
    for x, shards, times in zip(op.ins + op.outs, strategies.shards, moves.operand_reads + moves.result_writes, strict=True):
        if times:
            moved += times * (float(math.prod(x.shape)) * itemsize(x.dtype)) / shards
    return moved


def _masking_seconds(
    op: Op, strategies: OpStrategies, mesh: MeshShape, device: Device, masked: Sequence[MaskedRows]
) -> float | np.ndarray:
    """Seconds [s] of writing the masked copies of a ragged product's rows: their part of a kernel that writes several.

    Of a product that is not split they are written alone, and transposed by another kernel for the product that reads the other order.
    """
    seconds, unsplit = 0.0, None
    for k, together, turned in masked:
        rows, per_byte = float(math.prod(op.ins[k].shape)) / strategies.shards[k], itemsize(op.ins[k].dtype) / device.memory_rate
        written = _masked_elements(op, strategies, mesh, k)
        least = np.maximum(device.kernel_latency_s, device.computed_s(written))
        part = np.maximum((written + rows) * per_byte, least / together)
        if turned:
            unsplit = parts_of(op, strategies, mesh, device) == 1 if unsplit is None else unsplit
            alone = np.maximum((written + rows) * per_byte, least) + np.maximum(2 * written * per_byte, least)
            part = np.where(unsplit, alone - part, part)  # the other product counts its part of one kernel
        seconds = seconds + part
    return seconds


def _masked_elements(op: Op, strategies: OpStrategies, mesh: MeshShape, k: int) -> np.ndarray:
    """Elements [s] of the masked copies of operand k of a ragged product, one per group."""
    return local_groups(op, strategies, mesh) * float(math.prod(op.ins[k].shape)) / strategies.shards[k]


def _elements(op: Op, strategies: OpStrategies, written: bool) -> np.ndarray:
    """Results [s] that an op's own kernels compute; narrow updates of a scatter take as long as several.

    `written`: whether they are results of its own; a scatter's may be something else that it updates.
    """
    arrays, at = list(zip((*op.ins, *op.outs), strategies.shards, strict=True)), op.traits.writes_part
    of = arrays[at[0] : at[0] + 1] if at else arrays[len(op.ins) :] if written or not op.traits.scatter else arrays[-2:-1]
    results = sum(float(x.size) / shards for x, shards in of)
    if op.traits.scatter and itemsize(op.ins[-1].dtype) < 4 and not op.params.get("indices_are_sorted"):
        results = results + NARROW_UPDATE * op.ins[-1].size / strategies.shards[len(op.ins) - 1]
    return results + np.zeros(len(strategies))


def reduced_twice(op: Op, strategies: OpStrategies) -> np.ndarray:
    """Whether there is too much for one block of threads to reduce, bool [s]: a second kernel reduces what the blocks make."""
    axes = op.params.get("axes")
    if not axes or not op.traits.reduction:
        return np.zeros(len(strategies), bool)
    (x, *_), (y, *_) = op.ins, op.outs
    most = ROW_ELEMENTS if len(x.shape) - 1 in axes else BLOCK_ELEMENTS
    return x.size / strategies.shards[0] > most * y.size / strategies.shards[len(op.ins)]


def _more_reduction_seconds(op: Op, strategies: OpStrategies, mesh: MeshShape, device: Device, apart: Sequence[int]) -> np.ndarray:
    """Seconds [s] of what reduces the results of a reduction's first kernel, if there is too much for one block of threads.

    Several reductions may share the first kernel; the second is each one's own. `apart`: dims in memory, if those reduced lie apart.
    """
    axes = op.params.get("axes")
    if not axes or not op.traits.reduction:
        return np.zeros(len(strategies))
    (x, *_), (y, *_) = op.ins, op.outs
    seconds = device.kernel_latency_s * reduced_twice(op, strategies)
    for s, layout in enumerate(strategies.operands[0] if apart else ()):
        shape = layout.local_shape(x.shape, mesh)
        if (found := split_reduction([Dim(shape[d], d in axes) for d in apart])) is not None:
            more = (found.elements - y.size / strategies.shards[len(op.ins)][s]) * itemsize(y.dtype) / device.memory_rate
            long = found.reduced > (ROW_ELEMENTS if found.rows else BLOCK_ELEMENTS)
            seconds[s] = device.kernel_latency_s * long + more + max(more, device.kernel_latency_s * found.alone)
    return seconds
