"""Seconds of one collective: a launch, the hops of its algorithm, and its bytes over the slowest link.

`bytes_` is always the **larger** buffer of one device (gathered, or not yet reduced or split):

    all-gather          output bytes            reduce-scatter       input bytes
    all-reduce          buffer bytes            all-to-all           buffer bytes (as large before as after)
    collective-permute  buffer bytes            slice                input bytes; what is kept is bytes_ ÷ members

With n members of a group, m of them in each of k nodes, S = bytes_, intra- and inter-node latency a, A and rate b, B
(B: one device's share of the node's adapters, so a group drives m of them while the node's other groups drive theirs),
every algorithm is a line in S, and the seconds are those of the fastest:

    all-gather, reduce-scatter   ring   (n-k)·a + (k-1)·A    + S·(n-1)/n ÷ min(b, m·B)
    all-reduce                   ring   2·((n-k)·a + (k-1)·A) + 2·S·(n-1)/n ÷ min(b, m·B)
                                 nodes  2·((m-1)·a + ⌈log2 k⌉·A) + S·max(2·(m-1)/m ÷ b, 2·(k-1)/k ÷ (m·B))
                                 switch as nodes, but the switch adds up: S ÷ its rate in place of 2·(m-1)/m·S ÷ b
    all-to-all                   pairs  ⌈log2 m⌉·a + ⌈log2 k⌉·A + S·max((m-1)/n ÷ b, (n-m)/n ÷ B)
    collective-permute                  a or A + S ÷ (b or B)
    slice                               reads and writes S/n of local memory

Sources: rings and their (n-1)/n: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 19(1), 2005; bus bandwidth: NCCL tests, doc/PERFORMANCE.md; chains in nodes and trees between them: Sanders,
Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, as NCCL's src/graph/tuning.cc
prices them. A measured cluster (`Cluster.measured`) replaces the lines of what it measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.mesh.cluster import KINDS, AxisLink, Cluster
from shardplan.mesh.layout import MeshShape

Line = tuple[float, float]  # seconds = line[0] + bytes_ * line[1]

LEAST_S = 1e-12
"""Least constant of any line: where costs tie, on empty tensors too, doing nothing wins."""

COMBINED_BYTES = 30 << 20
"""Bytes of results up to which XLA makes collectives into one (`xla_gpu_all_gather_combine_threshold_bytes` and its like)."""


def wider(dtype: str) -> tuple[tuple[str, float], ...]:
    """Kinds of collectives that XLA for GPUs runs on a type of this many times the bytes: integers that no device adds as they are."""
    if dtype in ("int16", "uint16"):
        return ("all-reduce", 2.0), ("reduce-scatter", 2.0)
    if dtype in ("int4", "uint4"):
        return ("all-reduce", 2.0), ("reduce-scatter", 2.0), ("all-to-all", 2.0)
    return ()


def seconds(kind: str, bytes_: float, axes: Sequence[str], mesh: MeshShape, cluster: Cluster) -> float:
    """Seconds of one collective over `axes` jointly.

    Args:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute" or "slice".
        bytes_: bytes per device of the larger buffer (see the module's head).
        axes: mesh axes that make up one group; all groups run at once.
        mesh: names and sizes of the axes.
        cluster: the machine.
    """
    return min(a + bytes_ * b for a, b in lines(kind, tuple(axes), mesh, cluster))


def over(kind: str, bytes_: float, link: AxisLink, cluster: Cluster) -> float:
    """As `seconds`, of a collective whose groups are known and not its mesh axes."""
    return min(a + bytes_ * b for a, b in _lines(kind, link, cluster))


@dataclass(frozen=True)
class Crowd:
    """Arrays whose collectives XLA makes into one, as far as they have no more than `COMBINED_BYTES` of results.

    Attributes:
        arrays: how many.
        large: whether they may have more.
    """

    arrays: int
    large: bool = True


ALONE = Crowd(1, large=False)


def lines(kind: str, axes: tuple[str, ...], mesh: MeshShape, cluster: Cluster, crowd: Crowd = ALONE) -> tuple[Line, ...]:
    """The algorithms of a collective, each as (seconds at 0 bytes, seconds per byte of `bytes_`).

    Each array of a crowd pays an equal part of one latency, and in a large crowd by its bytes what more there are: of a reduce-scatter
    the result is what a device keeps.
    """
    link = cluster.axis(mesh, axes)
    if kind != "slice" and kind not in KINDS:
        raise ValueError(f"collective {kind!r} is none of {', '.join(KINDS)}, slice")
    per_byte = crowd.large / (link.members if kind == "reduce-scatter" else 1) / COMBINED_BYTES
    return tuple((a / crowd.arrays, b + a * per_byte) for a, b in _lines(kind, link, cluster))


def around(kind: str, cluster: Cluster, among: int = 1) -> tuple[float, float, float]:
    """Of the kernels that XLA puts around a collective: seconds per byte of one that many arrays share; least seconds, and seconds
    per byte, of one for each array.

    It puts the arrays of a merged all-reduce into one buffer and cuts each out of it again, and rearranges what is exchanged so that
    the part of each device lies together.
    """
    device = cluster.device
    least, per_byte = device.kernel_latency_s, 2 / device.memory_rate
    if kind == "all-to-all":
        return 0.0, least, per_byte
    if kind == "slice":
        return 0.0, least, 0.0
    return (per_byte, least, per_byte) if among > 1 and kind == "all-reduce" else (0.0, 0.0, 0.0)


@functools.lru_cache(maxsize=4096)
def _lines(kind: str, link: AxisLink, cluster: Cluster) -> tuple[Line, ...]:
    if link.members == 1:
        return ((0.0, 0.0),)
    if kind == "slice":
        return ((LEAST_S, 2 / link.members / cluster.device.memory_rate),)
    measured = tuple(
        (max(x.latency_s, LEAST_S), x.s_per_byte)
        for x in cluster.measured
        if (x.kind, x.members, x.nodes) == (kind, link.members, link.nodes)
    )
    if measured:
        return measured
    return tuple((max(cluster.launch_s + a, LEAST_S), b) for a, b in _ALGORITHMS[kind](link, cluster))


def _ring(link: AxisLink, c: Cluster) -> Line:
    n, m, k = link.members, link.local, link.nodes
    rate = c.intra.rate if k == 1 else min(c.intra.rate, m * c.inter.rate)
    return (n - k) * c.intra.latency_s + (k - 1) * c.inter.latency_s, (n - 1) / n / rate


def _gather(link: AxisLink, c: Cluster) -> tuple[Line, ...]:
    return (_ring(link, c),)


def _all_reduce(link: AxisLink, c: Cluster) -> tuple[Line, ...]:
    m, k = link.local, link.nodes
    a, b = _ring(link, c)
    latency = 2 * ((m - 1) * c.intra.latency_s + _log2(k) * c.inter.latency_s)
    inside, between = 2 * (m - 1) / m / c.intra.rate, 2 * (k - 1) / k / (m * c.inter.rate)
    found = [(2 * a, 2 * b), (latency, max(inside, between))]
    if c.intra.reduce_bytes_per_s is not None and m > 1:
        found.append((latency, max(1 / c.intra.reduce_bytes_per_s, between)))
    return tuple(found)


def _all_to_all(link: AxisLink, c: Cluster) -> tuple[Line, ...]:
    n, m, k = link.members, link.local, link.nodes
    latency = _log2(m) * c.intra.latency_s + _log2(k) * c.inter.latency_s
    return ((latency, max((m - 1) / n / c.intra.rate, (n - m) / n / c.inter.rate)),)


def _permute(link: AxisLink, c: Cluster) -> tuple[Line, ...]:
    level = c.intra if link.nodes == 1 else c.inter
    return ((level.latency_s, 1 / level.rate),)


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
