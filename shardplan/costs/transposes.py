"""Seconds of the kernels that transpose an array in memory around a collective: which dims it moves along decides.

    all-gather along d       the shards lie one after the other, so d is the outermost dim of the gathered array
    reduce-scatter along d   the partial sum has d outermost before it is scattered
    all-to-all from a to b   the sent blocks of b lie one after the other, then the received blocks of a

An elementwise kernel writes and reads any order while it computes. A product does as long as the dims of each of its groups (batch,
contracted, and each operand's own) keep their order: w[k, n] may have n outermost, x[b, s, k] may have k outermost, but not s, since
(b, s) are rows. Blocks of an all-to-all split a dim, which no product reads or writes. All else takes a kernel that transposes.

Facts: layout-gather-outermost, layout-product-groups, layout-all-to-all-blocks, layout-input-transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np

from shardplan.costs.array_edges import EdgeTemplate, LayoutList
from shardplan.mesh.device import Device
from shardplan.xla_model.physical_layout import Groups


def transpose_seconds(device: Device, template: EdgeTemplate, sources: LayoutList, targets: LayoutList) -> Iterator[np.ndarray]:
    """Seconds [source, target] per read: before the collective, and behind it."""
    order, shape = template.order, template.shape
    if order is None or len(shape) < 2:
        return
    before_at, after_at = _local_sizes(shape, sources)[:, None], _local_sizes(shape, targets)[None]
    had, gets = sources.dim_axes[:, None], targets.dim_axes[None]  # [source, 1, dim], [1, target, dim]
    still = np.bitwise_or.reduce(gets, axis=2)[..., None]
    gathered, left = (had & ~gets & ~still) != 0, (had & ~gets & still) != 0
    arrived = (gets & ~had & np.bitwise_or.reduce(had, axis=2)[..., None]) != 0
    scattered = (gets & sources.partial_axes[:, None, None]) != 0
    everything = (tuple(range(len(shape))),)
    for groups, moved, blocks, sizes, of, n in (
        (order.made, scattered, arrived, before_at, sources.shards[:, None], prod(shape) * template.itemsize),
        (order.read, gathered | scattered, left, after_at, targets.shards[None], prod(shape) * template.itemsize),
        (everything if order.input_bytes else (), gathered, arrived, before_at, sources.shards[:, None], order.input_bytes),
    ):
        if groups:
            transposed = np.any(moved & _behind(groups, sizes) | blocks & _behind(everything, sizes), axis=2)
            yield np.where(transposed, np.maximum(device.kernel_latency_s, 2 * n / of / device.memory_rate), 0.0)


def _local_sizes(shape: tuple[int, ...], of: LayoutList) -> np.ndarray:
    """[layout, dim], elements on one device."""
    return np.array(shape) / of.dim_shards


def _behind(groups: Iterable[Groups | tuple[int, ...]], sizes: np.ndarray) -> np.ndarray:
    """Bool [.., dim]: whether another dim of the same group lies further out."""
    out = np.zeros(sizes.shape, bool)
    for group in groups:
        for n, d in enumerate(group):
            out[..., d] |= np.any(sizes[..., list(group[:n])] > 1, axis=-1)
    return out
