"""Which collectives bring a shard what it needs of other shards along a sharded factor.

    conv     n h w c, i j c o -> n h w o    halo h=3        window of 3: one row from the shard before and one from the shard after
    pooling  n h w c -> n h w c             halo h=2/2      windows of 2, each 2 further: nothing

    slice    n h -> n h                     halo h=1        the elements cut off shift the rest: a part of the shard after
    cumsum   n h -> n h                     scan h          the totals of all shards before: every shard gathers all totals
    argmax   n h -> n                       arg_reduce h    the winner: every shard gathers each shard's winner and its index
    random   k -> n                         head k          the first element: an all-reduce, to which other shards add nothing

A halo takes one collective-permute per distance that its rows come from; an op that runs on shards by itself (`Rule.shard_local`,
`emit/shard_local/forms.py`) uses as few as it can. Several sharded dims are exchanged one after the other: XLA sends on all rows that
have arrived by then, an op that runs on shards those that its windows see (measured: `benchmarks/rules_on_xla.py`). Permutes that
bring the same elements of an array to the same shards are one (`shared_collectives.py`).

Also known as ghost cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardplan._jax import itemsize
from shardplan.ir.graph import Graph
from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import AxisFactors
from shardplan.strategies.rule import Rule, exchanged_sizes
from shardplan.strategies.signature import Signature


@dataclass(frozen=True)
class Exchange:
    """One collective: parts of an operand over mesh axes.

    Attributes:
        bytes: per device, of its larger buffer.
        seconds: of one run.
        stage: collectives of one stage are independent of each other, and wait for those of the stage before.
        moved: what it brings where; of one array in one layout, exchanges that bring the same are one. None of what an op makes itself.
    """

    operand: int
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float
    stage: int
    moved: tuple | None

    @property
    def of_results(self) -> bool:
        """Whether it joins what shards have computed; else it brings what they compute with."""
        return self.moved is None


def exchanges(
    rule: Rule, factors: AxisFactors, ins: Sequence, outs: Sequence, layouts: Sequence[Layout], mesh: MeshShape, cluster: Cluster
) -> list[Exchange]:
    """The exchanges of one strategy: of avals `ins` and `outs`, operands in `layouts`, per mesh axis the factor that it shards."""
    axes = {h: tuple(axis for axis, x in zip(mesh.axes, factors, strict=True) if x == h) for h in rule.exchanged if h in factors}
    out = []
    for k, dims in enumerate(rule.operands if axes else ()):
        sharded = [(h, *exchanged_sizes(rule, h, k, ins, outs)) for h in axes if (h,) in dims]
        if sharded:
            size = prod(layouts[k].local_shape(tuple(ins[k].shape), mesh)) * itemsize(ins[k].dtype)
            index_ratio = itemsize(outs[-1].dtype) / itemsize(ins[k].dtype) if rule.arg_reduce else 0.0
            found = (*_gathers(rule, sharded, size, axes, mesh, index_ratio), *_permutes(rule, k, sharded, size, axes, mesh))
            for kind, over, n, stage, moved in found:
                out.append(Exchange(k, kind, over, n, collective.seconds(kind, n, over, mesh, cluster), stage, moved))
    return out


def exchange_seconds(graph: Graph, mesh: MeshShape, cluster: Cluster, signatures: Sequence[Signature]) -> tuple[np.ndarray | None, ...]:
    """Per op, seconds [s] of its exchanges in one run, None without any; one array for ops of one signature (per op)."""
    known: dict[int, np.ndarray | None] = {}
    for op, of in zip(graph.ops, signatures, strict=True):
        if of.rule.exchanged and of.number not in known:
            pairs = zip(of.strategies.factors, zip(*of.strategies.operands, strict=True), strict=True)
            some = (exchanges(of.rule, at, op.ins, op.outs, layouts, mesh, cluster) for at, layouts in pairs)
            found = np.array([sum(x.seconds for x in exchange) for exchange in some])
            known[of.number] = found if found.any() else None
    return tuple(known.get(of.number) for of in signatures)


_Sharded = Sequence[tuple[str, int, int]]
"""Factor, and its sizes in the operand and the result (`exchanged_sizes`)."""
_Collective = tuple[str, tuple[str, ...], float, int, tuple | None]
"""(kind, axes, bytes, stage, moved)."""


def _gathers(rule: Rule, sharded: _Sharded, size: float, axes, mesh: MeshShape, index_ratio: float) -> Iterator[_Collective]:
    """Totals, winners and first elements; `size` are the bytes of the operand's shard."""
    for h, n, _ in sharded:
        own = n // (shards := mesh.size(*axes[h]))
        if h in rule.scan:
            yield "all-gather", axes[h], size * shards / own, 0, None
        if h in rule.head:
            yield "all-reduce", axes[h], size / own, 0, None
        if h in rule.arg_reduce:
            winners = size * shards * min(rule.arg_reduce[h], own) / own
            yield "all-gather", axes[h], winners, 0, None
            yield "all-gather", axes[h], winners * index_ratio, 0, None


def _permutes(rule: Rule, k: int, sharded: _Sharded, size: float, axes, mesh: MeshShape) -> Iterator[_Collective]:
    """The halos of operand k, dim after dim; what has arrived is sent on along the next dim."""
    halos = [(rule.operands[k].index((h,)), rule.halo[h][k], axes[h], n, m) for h, n, m in sharded if k in rule.halo.get(h, ())]
    arrived: tuple = ()
    for stage, (dim, halo, over, n, m) in enumerate(sorted(halos, key=lambda x: x[1].growth(*x[3:])) if rule.shard_local else halos):
        shards = mesh.size(*over)
        row = size / (n // shards)
        if rule.shard_local:
            rows = [(max(x.size for x in permute), permute) for permute in halo.permutes(n, m, shards)]
        else:
            rows = [(r, (distance, r)) for distance, r in halo.hops(n, m, shards).items()]
        yield from (("collective-permute", over, row * r, stage, (*arrived, dim, over, moved)) for r, moved in rows)
        size = row * halo.span(m // shards) if rule.shard_local else size + sum(row * r for r, _ in rows)
        arrived = (*arrived, dim, over, halo, m)
