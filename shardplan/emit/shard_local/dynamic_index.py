"""Slices and rows at positions known only when the step runs: every shard does what falls in it; under `shard_map`.

Fact: local-dynamic-index.

dynamic_slice          a b, , -> m b       reduce a    the rows that a shard holds, zeros for the others: the sum is the slice
gather                 a b, 1 1 -> 1 b     reduce a    the same
dynamic_update_slice   a b, m b, , -> a b              the rows of the update that fall in the shard, written in place
scatter                a b, 1 1, 1 b -> a b            the same
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.emit.shard_local.halo import HaloDims, along

NEUTRAL = {"scatter-add": -0.0, "scatter-sub": 0.0, "scatter-mul": 1.0}
"""Updates that change nothing, exactly."""


def clamped(x, low: int, high: int):
    """Integers of any width as int32 within `low` and `high`."""
    info = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(low, info.min), min(high, info.max)).astype("int32")


def slice_starts(starts: Sequence, whole, part) -> list:
    """Where a slice begins along every dim, clamped as JAX does; `whole` and `part` are the avals of the array and of the slice."""
    return [clamped(jnp.asarray(s), 0, n - m) for s, n, m in zip(starts, whole.shape, part.shape, strict=True)]


def window_start(at, last: int, mode):
    """Where a window begins along a dim: clamped to `last`, the last position where it fits, or else one position outside."""
    return clamped(at, 0, last) if mode == lax.GatherScatterMode.CLIP else clamped(at, -1, last + 1)


def dynamic_slice(eqn, shards, halo_dims: HaloDims) -> list:
    """The rows of the slice that the shard holds, zeros for the others."""
    (x, *starts), sharded = shards, {s.dim: s for s in halo_dims[0]}
    whole, part = eqn.invars[0].aval, eqn.outvars[0].aval
    at = slice_starts(starts, whole, part)
    cut = [d not in sharded and n != m for d, (n, m) in enumerate(zip(whole.shape, part.shape, strict=True))]
    sizes = [m if c else n for c, m, n in zip(cut, part.shape, x.shape, strict=True)]
    x = lax.dynamic_slice(x, [p if c else np.int32(0) for c, p in zip(cut, at, strict=True)], sizes)
    for d, dim in sharded.items():
        rows = at[d] - dim.start() + lax.iota("int32", part.shape[d])
        held = (rows >= 0) & (rows < x.shape[d])
        x = jnp.where(along(held, d, x.ndim), jnp.take(x, rows, axis=d, mode="clip"), jnp.zeros((), x.dtype))
    return [x]


def dynamic_update_slice(eqn, shards, halo_dims: HaloDims) -> list:
    """The shard with the rows of the update that fall in it."""
    x, update, *starts = shards
    at, mine = slice_starts(starts, eqn.invars[0].aval, eqn.invars[1].aval), True
    for dim in halo_dims[0]:  # a window of the shard, as wide as the update, that holds all of it that falls in the shard
        d, begin = dim.dim, at[dim.dim] - dim.start()
        width, wide = min(x.shape[d], update.shape[d]), update.shape[d]
        at[d] = jnp.clip(begin, 0, x.shape[d] - width)
        rows = at[d] - begin + lax.iota("int32", width)
        update = jnp.take(update, rows, axis=d, mode="clip")
        mine &= along((rows >= 0) & (rows < wide), d, x.ndim)
    return [lax.dynamic_update_slice(x, jnp.where(mine, update, lax.dynamic_slice(x, at, update.shape)), at)]


def gather(eqn, shards, halo_dims: HaloDims) -> list:
    """The elements that the shard holds, zeros for the others; XLA clamps where bounds are promised, and so does a shard."""
    (x, indices, *rest), sharded = shards, {s.dim: s for s in halo_dims[0]}
    p, shape = eqn.params, eqn.invars[0].aval.shape
    n, mine, local = p["dimension_numbers"], True, []
    for c, d in enumerate(n.start_index_map):
        last = shape[d] - p["slice_sizes"][d]
        fills = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        at = window_start(indices[..., c], last, p["mode"] if fills else lax.GatherScatterMode.CLIP)
        if d in sharded:
            begin, outside = sharded[d].start(), (at < 0) | (at > last)
            mine &= jnp.where(outside, begin == 0, (at >= begin) & (at < begin + x.shape[d]))
            at = jnp.where(outside, -1, at - begin)
        local.append(at)
    sizes = tuple(s if taken == w else taken for s, taken, w in zip(x.shape, p["slice_sizes"], shape, strict=True))
    (out,) = _jax.bind(eqn, [x, jnp.stack(local, -1) if local else indices, *rest], {"slice_sizes": sizes}, context=False)
    if mine is True:
        return [out]
    batch = [d for d in range(out.ndim) if d not in n.offset_dims]
    return [jnp.where(lax.broadcast_in_dim(mine, out.shape, batch), out, jnp.zeros((), out.dtype))]


def scatter(eqn, shards, halo_dims: HaloDims) -> list:
    """The shard with the updates that fall in it."""
    (x, indices, updates), sharded = shards, {s.dim: s for s in halo_dims[0]}
    p, (shape, sizes) = eqn.params, (v.aval.shape for v in (eqn.invars[0], eqn.invars[2]))
    n, local, mine = p["dimension_numbers"], [], True
    alone = prod(indices.shape[:-1]) == 1
    window = [d for d in range(x.ndim) if d not in (*n.inserted_window_dims, *n.operand_batching_dims)]
    for c, d in enumerate(n.scatter_dims_to_operand_dims):
        width = sizes[n.update_window_dims[window.index(d)]] if d in window else 1
        last = shape[d] - width
        at = window_start(indices[..., c], last, p["mode"])
        begin = sharded[d].start() if d in sharded else 0
        inside = (at >= begin) & (at - begin <= x.shape[d] - width)
        mine &= inside
        local.append(jnp.where(inside, at - begin, 0 if alone else -1))
    indices = jnp.stack(local, -1) if local else indices
    if alone:
        mine = lax.broadcast_in_dim(mine, updates.shape, [d for d in range(updates.ndim) if d not in n.update_window_dims])
        updates = jnp.where(mine, updates, _neutral_update(eqn.primitive.name, x, indices, updates.shape, n))
    return _jax.bind(eqn, [x, indices, updates], {"mode": lax.GatherScatterMode.FILL_OR_DROP}, context=False)


def _neutral_update(primitive: str, x, indices, shape, n):
    """The update that leaves a window as it is.

    An index outside the shard would drop the update, too. But XLA (jax 0.10.2) turns a scatter of one window into slices, and where
    the shard is itself a slice of an array, both into one, which begins before the shard.
    """
    if (name := primitive.replace("_", "-")) in NEUTRAL:
        return jnp.asarray(NEUTRAL[name], x.dtype)
    there = lax.GatherDimensionNumbers(*n)  # the same fields
    widths, points = iter(n.update_window_dims), (*n.inserted_window_dims, *n.operand_batching_dims)
    sizes = tuple(1 if d in points else shape[next(widths)] for d in range(x.ndim))
    return lax.gather(x, indices, there, sizes, mode="clip")
