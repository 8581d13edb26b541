"""Seconds of a compiled step on a cluster, read from the emitted HLO alone: one measure for every plan, whoever made it.

    total_s = compute_s + collective_s          nothing overlaps
    compute_s = sum over kernels of max(flops / peak(dtype), bytes / memory rate, kernel latency), times runs
    collective_s = sum over collectives of the cluster model's seconds for its bytes and its device groups, times runs

`exposed_s` is the part of `collective_s` during which XLA's own schedule runs no compute (`simulate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from shardplan.mesh.cluster import KINDS, AxisLink, Cluster
from shardplan.mesh.collective import seconds_on_link
from shardplan.mesh.layout import MeshShape
from shardplan.xla.compiler.compile import Compiled
from shardplan.xla.hlo.collectives import HloCollective
from shardplan.xla.hlo.schedule import KernelWork, simulate
from shardplan.xla.hlo.text import HloModule

SAME_PRICE = {"collective-broadcast": "collective-permute", "ragged-all-to-all": "all-to-all"}


@dataclass(frozen=True)
class CompiledSeconds:
    """Seconds of one step on one device."""

    compute_s: float
    collective_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """Seconds without overlap."""
        return self.compute_s + self.collective_s


def seconds(compiled: Compiled, cluster: Cluster) -> CompiledSeconds:
    """Seconds of the compiled step on `cluster`; RuntimeError when the compile failed."""
    return seconds_of(compiled.module, cluster, compiled.mesh)


def seconds_of(text: str | HloModule, cluster: Cluster, mesh: MeshShape | None = None) -> CompiledSeconds:
    """As `seconds`, of any compiled module's HLO."""
    device = cluster.device

    def work_s(work: KernelWork) -> float:
        if not work.flops and not work.bytes:
            return 0.0
        products = sum(n / device.flops_per_s(_dtype(dtype)) for dtype, n in work.flops)
        return max(products, work.bytes / device.memory_rate, device.kernel_latency_s)

    line = simulate(text, lambda c: collective_s(c, cluster), work_s, mesh)
    return CompiledSeconds(line.compute_s, line.collective_s, line.exposed_s)


DTYPES = {"bf16": "bfloat16", "f16": "float16", "f64": "float64", "s8": "int8", "u8": "uint8", "c128": "complex128"}
"""HLO's names of the dtypes that clusters list; all others count as float32, but for those of 8 bits."""


def _dtype(name: str) -> str:
    return "float8" if name.startswith("f8") else DTYPES.get(name, "float32")


def collective_s(c: HloCollective, cluster: Cluster) -> float:
    """Seconds of one run of an emitted collective, by its device groups."""
    kind = SAME_PRICE.get(c.kind, c.kind)
    assert kind in KINDS, kind
    return seconds_on_link(kind, c.bytes, link(c.groups, cluster.node_size), cluster)


def link(groups: tuple[tuple[int, ...], ...], node_size: int) -> AxisLink:
    """The link of device groups: members, the fewest that share a node, the most nodes that a group spans."""
    members = max(map(len, groups), default=1)
    on_nodes = [[len(list(some)) for _, some in groupby(sorted(d // node_size for d in group))] for group in groups]
    return AxisLink(members, min((min(n) for n in on_nodes if n), default=1), max(map(len, on_nodes), default=1))
