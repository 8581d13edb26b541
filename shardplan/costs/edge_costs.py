"""Seconds of an array on its way from the layout it is made in to the layout it is read in: the table of an edge.

e[s, t] = reads * (reshard[s, t] + transposes[s, t] + addition[s, t]) - (1 - w) * hidden[s, t]       picoseconds, rounded

reshard     cheapest reshard path (`mesh/reshard.py`)
transposes  physical-layout transposes that XLA adds behind a collective
addition    what XLA adds up before it reduce-scatters
hidden      the last collective of the path, as far as its overlap window reaches; w is the price of background communication
inf         where the consumer propagates the layout, or XLA builds another program than the table says
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from shardplan.costs.edge_templates import EdgeTemplate
from shardplan.costs.layout_lists import LayoutList
from shardplan.costs.step_seconds import PS
from shardplan.mesh.cluster import Device
from shardplan.mesh.reshard import Resharder


class EdgeCost(NamedTuple):
    """Picoseconds [s, t]: what the edge costs, and what of its collectives compute can hide (None: nothing)."""

    cost: np.ndarray
    hidden: np.ndarray | None


class WindowPS(NamedTuple):
    """Overlap window of an array's collective in picoseconds per step; of a gradient also if it is reduce-scattered."""

    collective: float
    reduce_scatter: float


def edge_table(
    template: EdgeTemplate,
    sources: LayoutList,
    targets: LayoutList,
    resharder: Resharder,
    window: WindowPS,
    follows: bool,
    background_price: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Cost and hidden part in picoseconds, both [source, target], over distinct layouts.

    Args:
        template: the array, made in `sources` and read in `targets`.
        resharder: prices its reshards.
        window: its overlap window.
        follows: whether the consumer propagates the array's layout.
        background_price: `Pricing.background_price`.
    """
    device = resharder.cluster.device
    per_step = template.reads * PS
    array = template.shape, template.itemsize, sources.layouts, targets.layouts
    equal, scattered = sources.equal(targets), reduce_scattered(sources, targets)
    cost = resharder.table(*array) * per_step
    hidden = np.zeros_like(cost)
    if any(window):
        hidden = np.rint(resharder.table(*array, last=True) * per_step)
        hidden = np.minimum(hidden, np.where(scattered, window.reduce_scatter, window.collective))
    if template.coupled_state:
        cost = cost + _state_transposes(device, template, sources, targets) * per_step
    if template.in_fusion:
        cost = cost + _gather_transpose(device, template, sources, targets) * per_step
    if template.addend_dims is not None:
        rows_sharded = sources.sharding_axes(template.addend_dims)[:, None] != 0
        cost = cost + np.where(rows_sharded, 0.0, _unsharded_addition(device, template, sources, targets)) * per_step
        cost = np.where((targets.partial_axes != 0) & ~equal, np.inf, cost)
    if template.sum_dims:
        rows_sharded = sources.sharding_axes(template.sum_dims)[:, None] != 0
        cost = np.where(rows_sharded & scattered, np.inf, cost)
    cost = np.rint(cost - (1 - background_price) * hidden)
    if follows:
        cost = np.where((sources.partial_axes == 0)[:, None] & ~equal, np.inf, cost)
    if template.accumulated_ratio:
        cost = np.where(_not_scattered_after_loop(sources, targets, template.accumulated_ratio == 1), np.inf, cost)
    if template.gathered_copy:
        cost = np.where(sources.shards[:, None] > targets.shards, np.inf, cost)
    return cost, hidden


def _state_transposes(device: Device, template: EdgeTemplate, sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Seconds of transposing the optimizer state that is computed with a reduce-scattered sum.

    A sum that is scattered along any dim but the outermost has that dim outermost in memory, and XLA lays out the state in
    the same order.
    """
    shape, state = template.shape, template.coupled_state
    assert state is not None
    inner = [d for n, d in enumerate(state.order) if prod(shape[e] for e in state.order[:n]) > 1]
    latency, rate = device.kernel_latency_s, device.memory_rate
    seconds = sum(np.maximum(latency, 2 * n / targets.shards / rate) for n in state.bytes)
    return np.where(sources.partial_axes[:, None] & targets.sharding_axes(inner), seconds, 0.0)


def _gather_transpose(device: Device, template: EdgeTemplate, sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Seconds of transposing an array that is gathered along any dim but the outermost, for a reader inside a fusion.

    The parts that are gathered lie one after the other. A product reads them so; an elementwise op would hand the order on to all
    ops behind it, and XLA's fused normalisations need rows. The kernel reads and writes bytes that are moved anyway, but for those
    that a loop slices rows from.
    """
    inner = [d for d in range(len(template.shape)) if prod(template.shape[:d]) > 1]
    gathered = sources.sharding_axes(inner)[:, None] & ~targets.sharding_axes()
    moved = 2 * template.sliced_bytes / targets.shards / device.memory_rate
    return np.where(gathered, np.maximum(device.kernel_latency_s, moved), 0.0)


def _unsharded_addition(device: Device, template: EdgeTemplate, sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Seconds of half an addition of two partial sums, beyond those of adding their shards.

    XLA adds the partial sums and reduce-scatters the result: three arrays of a partial sum's size are read or written.
    """
    full, sharded = (prod(template.shape) * template.itemsize / n for n in (sources.shards[:, None], targets.shards))
    seconds = 1.5 * np.maximum(0.0, full - sharded) / device.memory_rate
    return np.where(reduce_scattered(sources, targets), seconds, 0.0)


def reduce_scattered(sources: LayoutList, targets: LayoutList) -> np.ndarray:
    """Bool [source, target]: whether a partial source becomes sharded over an axis that it is partial over."""
    return (sources.partial_axes[:, None] & targets.sharding_axes()) != 0


def _not_scattered_after_loop(sources: LayoutList, targets: LayoutList, same_dtype: bool) -> np.ndarray:
    """Bool [source, target]: whether XLA all-reduces a sum that a loop accumulated where the target wants it reduce-scattered.

    XLA reduce-scatters it if one dim is sharded over all axes of the sum, and no cast is in between.
    """
    axes = sources.partial_axes[:, None]
    one_dim = [(targets.sharding_axes([d]) & axes) == axes for d in range(targets.layouts[0].rank)]
    return reduce_scattered(sources, targets) & ~(same_dtype & np.any(one_dim, axis=0))
