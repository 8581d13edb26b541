"""Overlap windows of a plan's collectives: how long each may be in flight while other work goes on."""

from __future__ import annotations

from collections.abc import Mapping

from shardplan.costs.pricing import CombinedGroups
from shardplan.costs.space import StrategySpace
from shardplan.mesh import collective
from shardplan.mesh.collective import CollectiveKey
from shardplan.xla_model.overlap_windows import OverlapWindows, Transfer, overlap_windows


def plan_windows(space: StrategySpace, combined: CombinedGroups | None) -> OverlapWindows:
    """The windows, if a plan combines these arrays; None: all arrays of a group move in the same way."""
    blocking_groups = {site.group for site in space.collective_sites if site.collective_class == "blocking"}
    found: dict[bool, dict[int, list[tuple[CollectiveKey, float]]]] = {
        False: {},
        True: {},
    }  # blocking -> op that makes an array -> its collectives, each with the bytes of its result
    for (group, key), arrays in combined or ():
        for at, size in arrays:
            found[group in blocking_groups].setdefault(at, []).append((key, size))
    overlapping, blocking = found[False], found[True]

    def seconds(collectives: tuple[tuple[CollectiveKey, float], ...] | str, size: float) -> float:
        """Of an array's collectives, or of one of this kind over all axes."""
        total = 0.0
        for (kind, axes), part in (((collectives, space.mesh.axes), 1.0),) if isinstance(collectives, str) else collectives:
            larger = size * part * (space.mesh.size(*axes) if kind == "reduce-scatter" else 1)
            total += collective.seconds(kind, larger, axes, space.mesh, space.cluster)
        return total

    def transfer(results: list[tuple[CollectiveKey, float]]) -> Transfer:
        """Collectives of one array, each with its result's share of the largest result, and the bytes of that per device."""
        largest = max(size for _, size in results)
        return tuple((key, size / (largest or 1.0)) for key, size in results), largest

    shards = 1 if combined is None else space.mesh.size(*space.mesh.axes)
    work = _min_seconds(space, {at: min(size for _, size in results) for at, results in overlapping.items()})
    scattered = {at for at, results in overlapping.items() if any(kind == "reduce-scatter" for (kind, _), _ in results)}
    transfers, blocks = ({at: transfer(results) for at, results in of.items()} for of in (overlapping, blocking))
    return overlap_windows(space.graph, space.collective_sites, work, transfers, seconds, shards, scattered, blocks)


def _min_seconds(space: StrategySpace, arrived: Mapping[int, float]) -> list[float]:
    """Seconds of every op in one run under its fastest strategy; the optimizer's shards are no smaller than those of the gradients.

    `arrived`: op that makes an array that is moved -> bytes of the smallest result per device.
    """
    graph = space.graph
    part = [0.0] * len(graph.ops)  # least part of the op's work that a device does
    for i, op in enumerate(graph.ops):
        makers = [graph.values[v].producer[0] for v in op.inputs if v is not None]
        if i in arrived and space.collective_sites[op.outputs[0]].collective_class == "gradient":
            part[i] = arrived[i] / graph.values[op.outputs[0]].bytes
        elif op.phase != "forward" and makers:
            part[i] = max(part[at] for at in makers)
    known: dict[tuple[int, float], float] = {}
    out = []
    for i, op in enumerate(graph.ops):
        least, seconds = part[i] if op.phase == "update" else 0.0, space.seconds[i]
        if (key := (id(seconds), least)) not in known:
            possible = space.strategies[i].work >= least * (1 - 1e-9)
            known[key] = float(seconds[possible].min() if possible.any() else seconds.max())
        out.append(known[key])
    return out
