"""What the windows of a device's results see of a split dim, where part of that lies on other devices; under `shard_map`.

    x[1:13] of 16 over 4    0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15    held
                            1 2 3   | 4 5 6   | 7 8 9     | 10 11 12       seen: 7 from shard 1, 10 and 11 from shard 2, in one permute

Few permutes carry the pieces (`Halo.permutes`). What came stands behind a shard's own elements, and every position is looked up
there; several such dims are done one after the other, the one that leaves least first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from shardplan.strategies.rule import Halo, Rule, extents

FAR = 2**30
"""Farther than any window sees."""


@dataclass(frozen=True)
class Slide:
    """Windows over one split dim of an operand: `n` elements, `m` results, both split over the mesh axes into `shards`."""

    dim: int
    halo: Halo
    n: int
    m: int
    axes: tuple[str, ...]
    shards: int


def slides(rule: Rule, k: int, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], ins, outs) -> list[Slide]:
    """The dims of operand k that are split and that windows slide over, or that shards have to know their place along.

    Args:
        rule: the op's rule.
        k: number of the operand.
        axes: letter -> the mesh axes it is split over.
        sizes: letter -> how many shards they make.
        ins, outs: whole operands and results, anything with `.shape`.
    """
    split = [(d, dim[0]) for d, dim in enumerate(rule.operands[k]) if len(dim) == 1 and axes.get(dim[0])]
    halos = [(d, a, rule.halo[a][k]) for d, a in split if k in rule.halo.get(a, ())]
    halos += [(d, a, Halo()) for d, a in split if a in rule.local and a not in rule.halo]
    return [Slide(d, halo, *extents(rule, a, k, ins, outs), axes[a], sizes[a]) for d, a, halo in halos]


def seen(x, slides: Sequence[Slide], fill):
    """The positions that windows see along every slid dim (`Halo.span`), `fill` where there is no element.

    Args:
        x: the operand's shard.
        slides: its split and slid dims.
        fill: a number; or, with one such dim, an array of the result's shape.
    """
    for slide in sorted(slides, key=lambda s: s.halo.growth(s.n, s.m)):
        x = placed(*fetched(x, slide), slide, fill)
    return x


Pieces = list[tuple[int, list[int | None]]]
"""Runs of elements in a row, the shard's own first: their number, and per shard the first; None on shards that got nothing."""


def fetched(x, slide: Slide) -> tuple:
    """A shard with all that it reads of others behind it."""
    own, shards = slide.n // slide.shards, range(slide.shards)
    runs: list = [x]
    pieces: Pieces = [(own, [q * own for q in shards])]
    for permute in slide.halo.permutes(slide.n, slide.m, slide.shards):
        width = max(p.size for p in permute)
        first = {p.source: min(p.first, (p.source + 1) * own - width) for p in permute}
        sent = lax.dynamic_slice_in_dim(x, here([first.get(q, q * own) - q * own for q in shards], slide), width, slide.dim)
        runs.append(lax.ppermute(sent, slide.axes, [(p.source, p.target) for p in permute]))
        came = {p.target: first[p.source] for p in permute}
        pieces.append((width, [came.get(q) for q in shards]))
    return lax.concatenate(runs, slide.dim), pieces


def placed(x, pieces: Pieces, slide: Slide, fill):
    """The positions seen, looked up in the pieces that stand in a row along a dim of x."""
    halo, made = slide.halo, slide.m // slide.shards
    position = lax.iota("int32", halo.span(made)) * (halo.stride if halo.window == 1 else 1)
    row, known, start = jnp.zeros_like(position), jnp.zeros(position.shape, bool), 0
    for width, begins in pieces:
        # The first element's position, from where the shard's windows begin.
        away = [FAR if b is None else b * halo.dilation - q * made * halo.stride + halo.low for q, b in enumerate(begins)]
        at = position - here([max(-FAR, min(FAR, n)) for n in away], slide)
        inside = (at % halo.dilation == 0) & (at >= 0) & (at < width * halo.dilation)
        row = jnp.where(inside, start + at // halo.dilation, row)
        known, start = known | inside, start + width
    rows = jnp.take(x, row, axis=slide.dim, mode="clip")
    return jnp.where(known.reshape([-1 if d == slide.dim else 1 for d in range(x.ndim)]), rows, jnp.asarray(fill, x.dtype))


def here(numbers: Sequence[int], slide: Slide):
    """This shard's own of a number per shard."""
    return numbers[0] if len(set(numbers)) == 1 else jnp.asarray(numbers, "int32")[lax.axis_index(slide.axes)]
