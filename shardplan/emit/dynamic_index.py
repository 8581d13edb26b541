"""Reads and writes at places known only when the step runs: every shard does what falls in it; under `shard_map`.

dynamic_slice          a b, , -> m b       reduce a    the rows that it holds, zeros for the others: the sum is the slice
gather                 a b, 1 1 -> 1 b     reduce a    the same
dynamic_update_slice   a b, m b, , -> a b              the rows of the update that are its own, written in place
scatter                a b, 1 1, 1 b -> a b            the same
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax.numpy as jnp
from jax import lax

from shardplan import _jax
from shardplan.emit.halo_exchange import Slide


def bounded(x, low: int, high: int):
    """Integers of any width as int32, none beyond `low` and `high`."""
    info = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(low, info.min), min(high, info.max)).astype("int32")


def begins(starts: Sequence, whole, part) -> list:
    """Where a slice begins along every dim, as JAX clamps it.

    Args:
        starts: what the op is told.
        whole, part: of the array and of the slice, anything with `.shape`.
    """
    return [bounded(jnp.asarray(s), 0, n - m) for s, n, m in zip(starts, whole.shape, part.shape, strict=True)]


def placed(at, last: int, mode):
    """Where a window begins along a dim, `last` the last place where it fits: moved there, as JAX clips, or one place outside."""
    return bounded(at, 0, last) if mode == lax.GatherScatterMode.CLIP else bounded(at, -1, last + 1)


def first(slide: Slide):
    """Where this shard begins."""
    return lax.axis_index(slide.axes) * (slide.n // slide.shards)


def along(x, dim: int, rank: int):
    """A vector along one dim of an array."""
    return x.reshape([-1 if d == dim else 1 for d in range(rank)])


def dynamic_slice(eqn, shards, slides: Sequence[Sequence[Slide]]) -> list:
    (x, *starts), split = shards, {s.dim: s for s in slides[0]}
    whole, part = eqn.invars[0].aval, eqn.outvars[0].aval
    at = begins(starts, whole, part)
    cut = [d not in split and n != m for d, (n, m) in enumerate(zip(whole.shape, part.shape, strict=True))]
    sizes = [m if c else n for c, m, n in zip(cut, part.shape, x.shape, strict=True)]
    x = lax.dynamic_slice(x, [p if c else 0 for c, p in zip(cut, at, strict=True)], sizes)
    for d, slide in split.items():
        rows = at[d] - first(slide) + lax.iota("int32", part.shape[d])
        held = (rows >= 0) & (rows < x.shape[d])
        x = jnp.where(along(held, d, x.ndim), jnp.take(x, rows, axis=d, mode="clip"), jnp.zeros((), x.dtype))
    return [x]


def dynamic_update_slice(eqn, shards, slides: Sequence[Sequence[Slide]]) -> list:
    x, update, *starts = shards
    at, mine = begins(starts, eqn.invars[0].aval, eqn.invars[1].aval), True
    for slide in slides[0]:  # a window of the shard, as wide as the update, that all of it that falls in the shard lies in
        d, begin = slide.dim, at[slide.dim] - first(slide)
        width, wide = min(x.shape[d], update.shape[d]), update.shape[d]
        at[d] = jnp.clip(begin, 0, x.shape[d] - width)
        rows = at[d] - begin + lax.iota("int32", width)
        update = jnp.take(update, rows, axis=d, mode="clip")
        mine &= along((rows >= 0) & (rows < wide), d, x.ndim)
    return [lax.dynamic_update_slice(x, jnp.where(mine, update, lax.dynamic_slice(x, at, update.shape)), at)]


def gather(eqn, shards, slides: Sequence[Sequence[Slide]]) -> list:
    (x, indices, *rest), split = shards, {s.dim: s for s in slides[0]}
    p, shape = eqn.params, eqn.invars[0].aval.shape
    n, mine, local = p["dimension_numbers"], True, []
    for c, d in enumerate(n.start_index_map):
        last = shape[d] - p["slice_sizes"][d]
        at = placed(indices[..., c], last, p["mode"])
        if d in split:
            begin, outside = first(split[d]), (at < 0) | (at > last)
            mine &= jnp.where(outside, begin == 0, (at >= begin) & (at < begin + x.shape[d]))
            at = jnp.where(outside, -1, at - begin)
        local.append(at)
    sizes = tuple(s if taken == w else taken for s, taken, w in zip(x.shape, p["slice_sizes"], shape, strict=True))
    (out,) = _jax.bind(eqn, [x, jnp.stack(local, -1) if local else indices, *rest], {"slice_sizes": sizes}, context=False)
    if mine is True:
        return [out]
    batch = [d for d in range(out.ndim) if d not in n.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, out.shape, batch), out, jnp.zeros((), out.dtype))]


def scatter(eqn, shards, slides: Sequence[Sequence[Slide]]) -> list:
    (x, indices, updates), split = shards, {s.dim: s for s in slides[0]}
    p, (shape, sizes) = eqn.params, (v.aval.shape for v in (eqn.invars[0], eqn.invars[2]))
    n, local, mine = p["dimension_numbers"], [], True
    alone = prod(indices.shape[:-1]) == 1
    window = [d for d in range(x.ndim) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for c, d in enumerate(n.scatter_dims_to_operand_dims):
        width = sizes[n.update_window_dims[window.index(d)]] if d in window else 1
        last = shape[d] - width
        at = placed(indices[..., c], last, p["mode"])
        begin = first(split[d]) if d in split else 0
        inside = (at >= begin) & (at - begin <= x.shape[d] - width)
        mine &= inside
        local.append(jnp.where(inside, at - begin, 0 if alone else -1))
    indices = jnp.stack(local, -1) if local else indices
    if alone:
        mine = lax.broadcast_in_dim(mine, updates.shape, [d for d in range(updates.ndim) if d not in n.update_window_dims])
        updates = jnp.where(mine, updates, _unchanged(eqn.primitive.name, x, indices, updates.shape, n))
    return _jax.bind(eqn, [x, indices, updates], {"mode": lax.GatherScatterMode.FILL_OR_DROP}, context=False)


def _unchanged(primitive: str, x, indices, shape, n):
    """The update after which a place is as before.

    One that falls nowhere would do, too, but XLA (jax 0.10.2) makes slices of it, and where the shard is itself a slice of an array one
    of both, which begins before the shard.
    """
    if primitive in ("scatter-add", "scatter-sub", "scatter-mul"):
        return jnp.asarray({"scatter-add": -0.0, "scatter-sub": 0.0, "scatter-mul": 1.0}[primitive], x.dtype)
    there = lax.GatherDimensionNumbers(
        n.update_window_dims,
        n.inserted_window_dims,
        n.scatter_dims_to_operand_dims,
        n.operand_batching_dims,
        n.scatter_indices_batching_dims,
    )
    sizes, widths = [1] * x.ndim, iter(n.update_window_dims)
    for d in range(x.ndim):
        if d not in (*n.inserted_window_dims, *n.operand_batching_dims):
            sizes[d] = shape[next(widths)]
    return lax.gather(x, indices, there, tuple(sizes), mode="clip")
