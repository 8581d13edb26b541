"""Seconds of one collective: a launch, the hops of its algorithm, and its bytes over the slowest link.

`bytes_` is always the **larger** buffer of one device (gathered, or not yet reduced or split):

    all-gather          output bytes            reduce-scatter       input bytes
    all-reduce          buffer bytes            all-to-all           buffer bytes (as large before as after)
    collective-permute  buffer bytes            slice                input bytes; what is kept is bytes_ ÷ members

With n members of a group, m of them in each of k nodes, S = bytes_, intra- and inter-node latency a, A and rate b, B
(B: one device's share of the node's adapters, so a group drives m of them while the node's other groups drive theirs),
every algorithm is an `AlphaBeta` line in S, and the seconds are those of the fastest:

    all-gather, reduce-scatter   ring   (n-k)·a + (k-1)·A    + S·(n-1)/n ÷ min(b, m·B)
    all-reduce                   ring   2·((n-k)·a + (k-1)·A) + 2·S·(n-1)/n ÷ min(b, m·B)
                                 nodes  2·((m-1)·a + ⌈log2 k⌉·A) + S·max(2·(m-1)/m ÷ b, 2·(k-1)/k ÷ (m·B))
                                 switch as nodes, but the switch reduces: S ÷ its rate in place of 2·(m-1)/m·S ÷ b
    all-to-all                   pairs  ⌈log2 m⌉·a + ⌈log2 k⌉·A + S·max((m-1)/n ÷ b, (n-m)/n ÷ B)
    collective-permute                  a or A + S ÷ (b or B)
    slice                               reads and writes S/n of local memory

Sources: rings and their (n-1)/n: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005; bus bandwidth: NCCL tests, doc/PERFORMANCE.md; chains in nodes and trees between them: Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, as NCCL's src/graph/tuning.cc
prices them. A measured cluster (`Cluster.measured`) replaces the algorithms of what it measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.mesh.cluster import KINDS, AxisLink, Cluster
from shardplan.mesh.layout import MeshShape

MIN_LATENCY_S = 1e-12
"""Least latency of any algorithm: where costs tie, on empty tensors too, no collective is the cheapest."""


class CollectiveKey(NamedTuple):
    """What collectives must agree in to be combined: their kind, and the mesh axes they run over."""

    kind: str
    axes: tuple[str, ...]


class AlphaBeta(NamedTuple):
    """One algorithm of a collective: seconds = latency_s + bytes * s_per_byte. Also known as the alpha-beta or Hockney model."""

    latency_s: float
    s_per_byte: float


class StagingKernels(NamedTuple):
    """Kernels that copy into and out of a collective's buffer, per array.

    Attributes:
        shared_s_per_byte: of one kernel for all arrays of a combined collective, which has no latency per array.
        latency_s, s_per_byte: of one kernel for each array: at least the first, and the second times its bytes.
    """

    shared_s_per_byte: float = 0.0
    latency_s: float = 0.0
    s_per_byte: float = 0.0


@dataclass(frozen=True)
class CombinedCollectives:
    """Arrays whose collectives of one `CollectiveKey` are issued as one, or as several of `max_bytes` each.

    Attributes:
        arrays: how many.
        max_bytes: bytes of results per device of one combined collective; inf where all arrays together stay below the threshold.
    """

    arrays: int
    max_bytes: float = math.inf


UNCOMBINED = CombinedCollectives(1)


def seconds(kind: str, bytes_: float, axes: Sequence[str], mesh: MeshShape, cluster: Cluster) -> float:
    """Seconds of one collective over `axes` jointly.

    Args:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute" or "slice".
        bytes_: bytes per device of the larger buffer (see the module's head).
        axes: mesh axes that make up one group; all groups run at once.
        mesh: names and sizes of the axes.
        cluster: the machine.
    """
    return min(a + bytes_ * b for a, b in algorithms(kind, tuple(axes), mesh, cluster))


def seconds_on_link(kind: str, bytes_: float, link: AxisLink, cluster: Cluster) -> float:
    """As `seconds`, for a collective whose device groups are known instead of its mesh axes."""
    return min(a + bytes_ * b for a, b in _algorithms(kind, link, cluster))


def algorithms(
    kind: str, axes: tuple[str, ...], mesh: MeshShape, cluster: Cluster, combined: CombinedCollectives = UNCOMBINED
) -> tuple[AlphaBeta, ...]:
    """The algorithms of a collective; its seconds are those of the fastest.

    A combined collective's latency is shared: each array pays an equal part of the first one's, and by its bytes for the further
    collectives beyond `max_bytes` of results (for a reduce-scatter the result is what a device keeps).

    Raises:
        ValueError: `kind` is no collective.
    """
    link = cluster.axis(mesh, axes)
    if kind != "slice" and kind not in KINDS:
        raise ValueError(f"collective {kind!r} is none of {', '.join(KINDS)}, slice")
    per_byte = 1 / (link.members if kind == "reduce-scatter" else 1) / combined.max_bytes
    return tuple(AlphaBeta(a / combined.arrays, b + a * per_byte) for a, b in _algorithms(kind, link, cluster))


def staging_kernels(kind: str, cluster: Cluster, arrays: int = 1) -> StagingKernels:
    """The kernels that run around a collective of `arrays` arrays, as XLA for GPU issues it.

    A combined all-reduce copies its arrays into one buffer and slices each out of it again; an all-to-all is transposed so that the
    part for each device is contiguous.
    """
    latency_s, s_per_byte = cluster.device.kernel_latency_s, 2 / cluster.device.memory_rate
    if kind == "all-to-all":
        return StagingKernels(latency_s=latency_s, s_per_byte=s_per_byte)
    if kind == "slice":
        return StagingKernels(latency_s=latency_s)
    return StagingKernels(s_per_byte, latency_s, s_per_byte) if arrays > 1 and kind == "all-reduce" else StagingKernels()


@functools.lru_cache(maxsize=4096)
def _algorithms(kind: str, link: AxisLink, cluster: Cluster) -> tuple[AlphaBeta, ...]:
    """The algorithms of an uncombined collective on a link."""
    if link.members == 1:
        return (AlphaBeta(0.0, 0.0),)
    if kind == "slice":
        return (AlphaBeta(MIN_LATENCY_S, 2 / link.members / cluster.device.memory_rate),)
    measured = tuple(
        AlphaBeta(max(x.latency_s, MIN_LATENCY_S), x.s_per_byte)
        for x in cluster.measured
        if (x.kind, x.members, x.nodes) == (kind, link.members, link.nodes)
    )
    if measured:
        return measured
    return tuple(AlphaBeta(max(cluster.launch_s + a, MIN_LATENCY_S), b) for a, b in _ALGORITHMS[kind](link, cluster))


def _ring(link: AxisLink, c: Cluster) -> AlphaBeta:
    n, m, k = link.members, link.local, link.nodes
    rate = c.intra.rate if k == 1 else min(c.intra.rate, m * c.inter.rate)
    return AlphaBeta((n - k) * c.intra.latency_s + (k - 1) * c.inter.latency_s, (n - 1) / n / rate)


def _gather(link: AxisLink, c: Cluster) -> tuple[AlphaBeta, ...]:
    return (_ring(link, c),)


def _all_reduce(link: AxisLink, c: Cluster) -> tuple[AlphaBeta, ...]:
    m, k = link.local, link.nodes
    a, b = _ring(link, c)
    latency = 2 * ((m - 1) * c.intra.latency_s + _log2(k) * c.inter.latency_s)
    inside, between = 2 * (m - 1) / m / c.intra.rate, 2 * (k - 1) / k / (m * c.inter.rate)
    found = [AlphaBeta(2 * a, 2 * b), AlphaBeta(latency, max(inside, between))]
    if c.intra.reduce_bytes_per_s is not None and m > 1:
        found.append(AlphaBeta(latency, max(1 / c.intra.reduce_bytes_per_s, between)))
    return tuple(found)


def _all_to_all(link: AxisLink, c: Cluster) -> tuple[AlphaBeta, ...]:
    n, m, k = link.members, link.local, link.nodes
    latency = _log2(m) * c.intra.latency_s + _log2(k) * c.inter.latency_s
    return (AlphaBeta(latency, max((m - 1) / n / c.intra.rate, (n - m) / n / c.inter.rate)),)


def _permute(link: AxisLink, c: Cluster) -> tuple[AlphaBeta, ...]:
    level = c.intra if link.nodes == 1 else c.inter
    return (AlphaBeta(level.latency_s, 1 / level.rate),)


def _log2(n: int) -> int:
    """⌈log2 n⌉."""
    return (n - 1).bit_length()


_ALGORITHMS = {
    "all-gather": _gather,
    "reduce-scatter": _gather,
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
}
