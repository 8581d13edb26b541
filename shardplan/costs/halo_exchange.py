"""Which collectives bring a shard what it needs of other shards along a sharded factor.

    conv     n h w c, i j c o -> n h w o    halo h=3        window of 3: one row from the shard before and one from the shard after
    pooling  n h w c -> n h w c             halo h=2/2      windows of 2, each 2 further: nothing

    slice    n h -> n h                     halo h=1        the elements cut off shift the rest: a part of the shard after
    cumsum   n h -> n h                     scan h          the totals of all shards before: every shard gathers all totals
    argmax   n h -> n                       arg_reduce h    the winner: every shard gathers each shard's winner and its index
    random   k -> n                         head k          the first element: an all-reduce, to which other shards add nothing

A halo takes one collective-permute per distance that its rows come from; an op that runs on shards by itself (`Rule.shard_local`,
`emit/shard_local/forms.py`) uses as few as it can. Several sharded dims are exchanged one after the other: XLA sends on all rows that
have arrived by then, an op that runs on shards those that its windows see (measured: `benchmarks/rules_on_xla.py`).

Also known as ghost cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardplan._jax import itemsize
from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import AxisFactors
from shardplan.strategies.rule import Rule, exchanged_sizes


@dataclass(frozen=True)
class Exchange:
    """One collective: parts of an operand over mesh axes; bytes per device of its larger buffer, seconds of one run."""

    operand: int
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float


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
            out += [Exchange(k, kind, over, n, collective.seconds(kind, n, over, mesh, cluster)) for kind, over, n in found]
    return out


_Sharded = Sequence[tuple[str, int, int]]
"""Factor, and its sizes in the operand and the result (`exchanged_sizes`)."""
_Collective = tuple[str, tuple[str, ...], float]
"""(kind, axes, bytes)."""


def _gathers(rule: Rule, sharded: _Sharded, size: float, axes, mesh: MeshShape, index_ratio: float) -> Iterator[_Collective]:
    """Totals, winners and first elements; `size` are the bytes of the operand's shard."""
    for h, n, _ in sharded:
        own = n // (shards := mesh.size(*axes[h]))
        if h in rule.scan:
            yield "all-gather", axes[h], size * shards / own
        if h in rule.head:
            yield "all-reduce", axes[h], size / own
        if h in rule.arg_reduce:
            winners = size * shards * min(rule.arg_reduce[h], own) / own
            yield "all-gather", axes[h], winners
            yield "all-gather", axes[h], winners * index_ratio


def _permutes(rule: Rule, k: int, sharded: _Sharded, size: float, axes, mesh: MeshShape) -> Iterator[_Collective]:
    """The halos of operand k, dim after dim; what has arrived is sent on along the next dim."""
    halos = [(rule.halo[h][k], axes[h], n, m) for h, n, m in sharded if k in rule.halo.get(h, ())]
    for halo, over, n, m in sorted(halos, key=lambda x: x[0].growth(*x[2:])) if rule.shard_local else halos:
        shards = mesh.size(*over)
        row = size / (n // shards)
        if rule.shard_local:
            rows = [max(x.size for x in permute) for permute in halo.permutes(n, m, shards)]
        else:
            rows = list(halo.hops(n, m, shards).values())
        yield from (("collective-permute", over, row * r) for r in rows)
        size = row * halo.span(m // shards) if rule.shard_local else size + sum(row * r for r in rows)
