"""The range of a plan's predicted seconds, by the errors of the measurements that its prices were fitted to.

    total · exp(± √(e_step² + Σ (share_k · e_k)²))

for the kinds k: products of a dtype, attention kernels, other kernels, and collectives: exposed ones, and what hidden ones slow
kernels by. share_k is the part of the step that kind k takes, and e_k the 90th percentile of |log(predicted ÷ measured)| of its
fit: errors within one kind are taken as the same, errors of different kinds as independent. e_step is that of whole published steps
on the GPU. So about nine of ten steps lie within, if they are like those that were measured.
"""

from __future__ import annotations

import math
from collections import defaultdict

from shardplan.mesh.cluster import Cluster
from shardplan.plan.planned import Planned

NOT_MEASURED = 0.3
"""Error of what nothing was measured of: that of the systems that `docs/measurements.md` predicts worst."""

MEASURED_HERE = 0.2
"""Error of what `calibrate` measured on the machine itself; an estimate."""

OTHER_KERNELS = 0.2
"""Error of kernels without products: of the bandwidth that they reach, and of which ops XLA fuses; an estimate."""

WORTH_NAMING = 0.05
"""Least part of a step of which it is said that it was not measured."""


def seconds_range(planned: Planned) -> tuple[float, float, tuple[str, ...]]:
    """Low and high seconds of a step, and in words what was not measured on its GPU."""
    cluster, total_s = planned.space.cluster, planned.timeline.total_s
    shares = {kind: seconds / total_s for kind, seconds in _seconds_by_kind(planned).items()} if total_s else {}
    squares, unknown = 0.0, []
    for kind, share in shares.items():
        error = _error(cluster, kind)
        squares += (share * (NOT_MEASURED if error is None else error)) ** 2
        if error is None and share >= WORTH_NAMING:
            unknown.append(kind)
    if cluster.step_error is None:
        unknown.append("whole steps")
    error = math.sqrt(squares + (NOT_MEASURED if cluster.step_error is None else cluster.step_error) ** 2)
    return total_s * math.exp(-error), total_s * math.exp(error), tuple(unknown)


def _seconds_by_kind(planned: Planned) -> dict[str, float]:
    space, out = planned.space, defaultdict[str, float](float)
    for op, seconds, chosen in zip(planned.graph.ops, space.kernel_seconds, planned.strategies, strict=True):
        kind = "other kernels"
        if op.traits.fused_attention:
            kind = "attention kernels"
        elif op.traits.product:
            kind = f"products of {space.cluster.device.family(str(op.ins[0].dtype))}"
        out[kind] += float(seconds[chosen]) * op.runs
    out["collectives"] = planned.timeline.exposed_s + planned.timeline.interference_s
    return dict(out)


def _error(cluster: Cluster, kind: str) -> float | None:
    """The error of a kind; None if nothing was measured."""
    if kind == "other kernels":
        return OTHER_KERNELS
    if cluster.measured:
        return MEASURED_HERE
    if kind == "collectives":
        return cluster.collective_error
    if kind == "attention kernels":
        return max((rate.p90_error for rate in cluster.device.attention.values()), default=None)
    rate = cluster.device.product_rate(kind.removeprefix("products of "))
    return None if rate is None or not rate.rows else rate.p90_error
