"""Seconds of one collective: a launch, the hops of its algorithm, and its bytes over the slowest link.

`bytes_` is always the **larger** buffer of one device (gathered, or not yet reduced or split):

    all-gather          output bytes            reduce-scatter       input bytes
    all-reduce          buffer bytes            all-to-all           buffer bytes (as large before as after)
    collective-permute  buffer bytes            slice                input bytes; what is kept is bytes_ ÷ members

With n members of a group, m of them in each of k nodes, S = bytes_, intra- and inter-node latency a, A and rate b, B
(B: one device's share of the node's adapters, so a group drives m of them while the node's other groups drive theirs),
every algorithm is a line in S (`AlphaBeta`), and the seconds are those of the fastest:

    all-gather, reduce-scatter   ring   (n-k)·a + (k-1)·A    + S·(n-1)/n ÷ min(b, m·B)
    all-reduce                   ring   2·((n-k)·a + (k-1)·A) + 2·S·(n-1)/n ÷ min(b, m·B)
                                 nodes  2·((m-1)·a + ⌈log2 k⌉·A) + S·max(2·(m-1)/m ÷ b, 2·(k-1)/k ÷ (m·B))
                                 switch as nodes, but the switch reduces: S ÷ its rate in place of 2·(m-1)/m·S ÷ b
    all-to-all                   pairs  ⌈log2 m⌉·a + ⌈log2 k⌉·A + S·max((m-1)/n ÷ b, (n-m)/n ÷ B)
    collective-permute                  a or A + S ÷ (b or B)
    slice                               reads and writes S/n of local memory

A round of a ring inside a node reaches b ÷ (1 + loss ÷ m), with the loss of rounds that add up or of those that do not (`Link`). Each
algorithm but a send runs by the faster of two protocols (`_both`).

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


AlphaBeta = tuple[float, float]
"""One algorithm of a collective, latency a and seconds per byte b: seconds = a + bytes * b. Also known as the Hockney model."""


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
    return tuple((a / combined.arrays, b + a * per_byte) for a, b in _algorithms(kind, link, cluster))


def staging_kernels(kind: str, cluster: Cluster, arrays: int = 1) -> tuple[float, float, float]:
    """Kernels that copy into and out of the buffer of a collective of `arrays` arrays, as XLA for GPU issues it.

    A combined all-reduce copies its arrays into one buffer and slices each out of it again; an all-to-all is transposed so that the
    part for each device is contiguous. Fact: combine-copies-all-reduces.

    Returns:
        (seconds per byte of one kernel for all arrays, which has no latency per array; seconds and seconds per byte of one kernel for
        each array, which takes the larger of the two).
    """
    latency_s, s_per_byte = cluster.device.kernel_latency_s, 2 / cluster.device.memory_rate
    if kind == "all-reduce" and arrays > 1:
        return s_per_byte, latency_s, s_per_byte
    return 0.0, latency_s if kind in ("all-to-all", "slice") else 0.0, s_per_byte if kind == "all-to-all" else 0.0


@functools.lru_cache(maxsize=4096)
def _algorithms(kind: str, link: AxisLink, cluster: Cluster) -> tuple[AlphaBeta, ...]:
    """The algorithms of an uncombined collective on a link."""
    if link.members == 1:
        return ((0.0, 0.0),)
    if kind == "slice":
        return ((MIN_LATENCY_S, 2 / link.members / cluster.device.memory_rate),)
    wanted = kind, link.members, link.nodes
    measured = [(x.latency_s, x.s_per_byte) for x in cluster.measured if (x.kind, x.members, x.nodes) == wanted]
    found = measured or [(cluster.launch_s + a, b) for a, b in _formulas(kind, link, cluster)]
    return tuple((max(a, MIN_LATENCY_S), b) for a, b in found)


def _formulas(kind: str, link: AxisLink, cluster: Cluster) -> list[AlphaBeta]:
    """Every algorithm without its launch, in the letters of the module's head."""
    n, m, k, intra, inter = link.members, link.local, link.nodes, cluster.intra, cluster.inter
    match kind:
        case "all-gather":
            return _ring(1, link, cluster, 1 + intra.ring_loss / m)
        case "reduce-scatter":
            return _ring(1, link, cluster, 1 + intra.sum_loss / m)
        case "all-reduce":
            hops, depth, between = m - 1, _log2(k), 2 * (k - 1) / k / m
            slower = 2 + (intra.sum_loss + intra.ring_loss) / m
            found = [*_ring(2, link, cluster, slower), *_both(cluster, 2 * hops, 2 * depth, hops / m * slower, between)]
            if intra.reduce_bytes_per_s is None or m == 1:
                return found
            switch = intra.rate / intra.reduce_bytes_per_s
            return [*found, *_both(cluster, 2 * hops, 2 * depth, switch, between)]
        case "all-to-all":
            return _both(cluster, _log2(m), _log2(k), (m - 1) / n, (n - m) / n)
        case "collective-permute":
            at = intra if k == 1 else inter
            slow = [] if at.send_bytes_per_s is None else [(at.latency_s, 1 / at.send_bytes_per_s)]
            return [*slow, (at.latency_s + at.send_latency_s, 1 / at.rate)]
    raise KeyError(kind)


def _ring(times: int, link: AxisLink, cluster: Cluster, slower: float) -> list[AlphaBeta]:
    """A ring through all members, walked some times; between nodes its m parts share the slowest link.

    `slower`: how many times as long as at the link's rate one round takes inside a node, of all times together.
    """
    n, m, k = link.members, link.local, link.nodes
    part = (n - 1) / n
    return _both(cluster, times * (n - k), times * (k - 1), part * slower if m > 1 else 0.0, times * part / m if k > 1 else 0.0)


def _both(cluster: Cluster, hops: int, network_hops: int, inside: float, between: float) -> list[AlphaBeta]:
    """An algorithm by the protocol for small messages and by that for large ones.

    Args:
        cluster: the machine.
        hops, network_hops: that it takes one after the other inside nodes and between them.
        inside, between: bytes that a device's links carry, per byte of the buffer.
    """
    intra, inter = cluster.intra, cluster.inter
    latency_s = hops * intra.latency_s + network_hops * inter.latency_s
    bulk_s = (inter if network_hops else intra).bulk_start_s + hops * intra.bulk_latency_s + network_hops * inter.bulk_latency_s
    bulk = latency_s + bulk_s, max(inside / intra.rate, between / inter.rate)
    if not bulk_s:
        return [bulk]
    return [(latency_s, max(inside / intra.rate / intra.small_rate, between / inter.rate / inter.small_rate)), bulk]


def _log2(n: int) -> int:
    """⌈log2 n⌉."""
    return (n - 1).bit_length()


def wire_bytes(kind: str, bytes_: float, members: int) -> float:
    """Bytes that one device sends in one run, by the ring algorithm: an all-reduce counts twice what a reduce-scatter does."""
    if kind == "slice":
        return 0.0
    share = (members - 1) / members
    if kind == "all-reduce":
        return 2 * share * bytes_
    return bytes_ if kind == "collective-permute" else share * bytes_
