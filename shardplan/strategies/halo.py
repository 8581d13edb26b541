"""What a shard needs of its neighbours along a split dim that windows slide over.

    conv     n h w c, i j c o -> n h w o    halo h=3    window of 3: one row from the shard before and one from the shard after
    pooling  n h w c -> n h w c             halo h=2/2  windows of 2, each 2 further: none

XLA sends the shares that lack to whoever lacks them, one collective-permute for every shard they come from; with several such dims
split, one dim after the other, the rows already fetched included (measured: `benchmarks/rules_on_xla.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardplan import _jax
from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.rule import Rule


@dataclass(frozen=True)
class Exchange:
    """One collective-permute: rows of an operand that go to other shards along some axes; bytes per device."""

    operand: int
    axes: tuple[str, ...]
    bytes: float
    seconds: float


def exchanges(
    rule: Rule,
    letters: Sequence[str | None],
    ins: Sequence,
    outs: Sequence,
    layouts: Sequence[Layout],
    mesh: MeshShape,
    cluster: Cluster,
) -> list[Exchange]:
    """What one strategy exchanges.

    Args:
        rule: the op's rule.
        letters: the strategy: per mesh axis the letter it is put on.
        ins, outs: avals of operands and results.
        layouts: of the operands.
        mesh: names and sizes of the axes.
        cluster: the machine.
    """
    out, split = [], [h for h in rule.halo if h in letters]
    for k in range(len(ins)) if split else ():
        held = prod(layouts[k].local_shape(tuple(ins[k].shape), mesh)) * _jax.itemsize(ins[k].dtype)
        for h in split:
            if k not in rule.halo[h].operands:
                continue
            axes = tuple(axis for axis, x in zip(mesh.axes, letters, strict=True) if x == h)
            n, m = extents(rule, h, ins, outs)
            own = n // mesh.size(*axes)
            rows = rule.halo[h].hops(n, m, mesh.size(*axes)).values()
            moved = [held / own * r for r in rows]
            out += [Exchange(k, axes, b, collective.seconds("collective-permute", b, axes, mesh, cluster)) for b in moved]
            held += sum(moved)
    return out


def extents(rule: Rule, letter: str, ins: Sequence, outs: Sequence) -> tuple[int, int]:
    """Sizes of a windowed letter's dim: where windows slide over it, and elsewhere."""
    halo = rule.halo[letter]
    slid, other = [], []
    for dims, x, k in zip(rule.operands + rule.results, (*ins, *outs), range(len(ins) + len(outs)), strict=True):
        for dim, size in zip(dims, x.shape, strict=True):
            if dim == (letter,):
                (slid if k in halo.operands else other).append(size)
    return slid[0], other[0]
