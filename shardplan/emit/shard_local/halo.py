"""Halo exchange: the elements of a sharded dim that the windows of a shard's results read, under `shard_map`.

    x[1:13] of 16 over 4    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15    shards of x
                            1 2 3   | 4 5 6   | 7 8 9     | 10 11 12       read: 7 comes from shard 1, 10 and 11 from 2, in one permute

Few collective-permutes carry all pieces (`Halo.permutes`). A shard concatenates what it receives to its own elements and looks every
position up there. Several such dims are exchanged one after the other, the one that leaves fewest elements first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from shardplan.strategies.halo import Halo
from shardplan.strategies.rule import Rule, exchanged_sizes

FAR = 2**30
"""Positions; beyond every window, and still an int32."""


@dataclass(frozen=True)
class HaloDim:
    """A sharded dim of an operand over which windows slide, or along which a shard has to know its position.

    Attributes:
        dim: its number.
        halo: how results read it.
        n, m: elements of the whole operand and of the whole result along it.
        axes: the mesh axes that both are sharded over.
        shards: devices along these axes.
    """

    dim: int
    halo: Halo
    n: int
    m: int
    axes: tuple[str, ...]
    shards: int

    @property
    def held(self) -> int:
        """Elements of the operand per shard."""
        return self.n // self.shards

    @property
    def made(self) -> int:
        """Elements of the result per shard."""
        return self.m // self.shards

    def start(self):
        """Position of this shard's first element, int32."""
        return lax.axis_index(self.axes) * self.held

    def of_this_shard(self, numbers: Sequence[int]):
        """This shard's entry of one number per shard."""
        return numbers[0] if len(set(numbers)) == 1 else jnp.asarray(numbers, "int32")[lax.axis_index(self.axes)]


HaloDims = Sequence[Sequence[HaloDim]]
"""Per operand."""


def along(x, dim: int, rank: int):
    """A vector, broadcastable along one dim of an array."""
    return x.reshape([-1 if d == dim else 1 for d in range(rank)])


def halo_dims(rule: Rule, k: int, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], ins, outs) -> list[HaloDim]:
    """The sharded dims of operand k that windows slide over, or along which shards have to know their position.

    `axes` are the mesh axes of every factor, `sizes` its numbers of shards; `ins` and `outs` the avals of operands and results.
    """
    sharded = [(d, dim[0]) for d, dim in enumerate(rule.operands[k]) if len(dim) == 1 and axes.get(dim[0])]
    halos = [(d, a, rule.halo[a][k]) for d, a in sharded if k in rule.halo.get(a, ())]
    halos += [(d, a, Halo()) for d, a in sharded if a in rule.shard_local and a not in rule.halo]
    return [HaloDim(d, halo, *exchanged_sizes(rule, a, k, ins, outs), axes[a], sizes[a]) for d, a, halo in halos]


def gather_halo(x, dims: Sequence[HaloDim], fill):
    """All positions of a shard that windows read along its halo dims (`Halo.span`).

    `fill` stands where there is no element: a number; or, with one halo dim, an array of the result's shape.
    """
    for dim in sorted((d for d in dims if (d.halo, d.n) != (Halo(), d.m)), key=lambda d: d.halo.growth(d.n, d.m)):
        x = place_halo(*exchange_halo(x, dim), dim, fill)
    return x


Pieces = list[tuple[int, list[int | None]]]
"""Runs of consecutive elements, the shard's own first: (number of elements, per shard the first one's position or None for no run)."""


def exchange_halo(x, dim: HaloDim) -> tuple[jax.Array, Pieces]:
    """(a shard and behind it all that it reads of others, the pieces of which that consists)."""
    held, shards = dim.held, range(dim.shards)
    runs: list = [x]
    pieces: Pieces = [(held, [q * held for q in shards])]
    for permute in dim.halo.permutes(dim.n, dim.m, dim.shards):
        width = max(p.size for p in permute)
        first = {p.source: min(p.first, (p.source + 1) * held - width) for p in permute}
        starts = dim.of_this_shard([first.get(q, q * held) - q * held for q in shards])
        sent = lax.dynamic_slice_in_dim(x, starts, width, dim.dim)
        runs.append(lax.ppermute(sent, dim.axes, [(p.source, p.target) for p in permute]))
        received = {p.target: first[p.source] for p in permute}
        pieces.append((width, [received.get(q) for q in shards]))
    return lax.concatenate(runs, dim.dim), pieces


def place_halo(x, pieces: Pieces, dim: HaloDim, fill):
    """The positions that windows read, in order, looked up in the concatenated pieces."""
    halo = dim.halo
    position = lax.iota("int32", halo.span(dim.made)) * (halo.stride if halo.window == 1 else 1)
    row, known, start = jnp.zeros_like(position), jnp.zeros(position.shape, bool), 0
    for width, firsts in pieces:
        # Position of the piece's first element, counted from where the shard's windows begin.
        offsets = [FAR if at is None else at * halo.dilation - q * dim.made * halo.stride + halo.low for q, at in enumerate(firsts)]
        at = position - dim.of_this_shard([max(-FAR, min(FAR, n)) for n in offsets])
        inside = (at % halo.dilation == 0) & (at >= 0) & (at < width * halo.dilation)
        row = jnp.where(inside, start + at // halo.dilation, row)
        known, start = known | inside, start + width
    rows = jnp.take(x, row, axis=dim.dim, mode="clip")
    return jnp.where(along(known, dim.dim, x.ndim), rows, jnp.asarray(fill, x.dtype))
