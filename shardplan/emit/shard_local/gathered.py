"""Cumulative ops, arg-reductions and top-k along a sharded dim: each shard runs the op, then all join the small gathered results."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.emit.shard_local.halo import HaloDims


def cumulative(join: Callable, eqn, shards, halo_dims: HaloDims) -> list:
    """A shard's own scan, joined with the scanned totals of all shards before it (after it, if reversed)."""
    (own,) = _jax.bind(eqn, shards, context=False)
    for s in halo_dims[0]:
        reverse, q = eqn.params["reverse"], jax.lax.axis_index(s.axes)
        total = jax.lax.index_in_dim(own, 0 if reverse else -1, s.dim)
        totals = jax.lax.all_gather(total, s.axes, axis=s.dim, tiled=True)
        (scanned,) = _jax.bind(eqn, [totals], context=False)
        before = jax.lax.dynamic_index_in_dim(scanned, q + 1 if reverse else q - 1, s.dim)
        own = jnp.where(q == (s.shards - 1 if reverse else 0), own, join(own, before))
    return [own]


def arg_reduce(eqn, shards, halo_dims: HaloDims) -> list:
    """The arg-reduction of the shards' results; of equals the first, since shards stand in order."""
    (at,) = _jax.bind(eqn, shards, context=False)
    for s in halo_dims[0]:
        at = jnp.expand_dims(at, s.dim)
        local = jnp.take_along_axis(shards[0], at, s.dim), at + s.start().astype(at.dtype)
        values, positions = (jax.lax.all_gather(x, s.axes, axis=s.dim, tiled=True) for x in local)
        (shard,) = _jax.bind(eqn, [values], context=False)
        at = jnp.take_along_axis(positions, jnp.expand_dims(shard, s.dim), s.dim).squeeze(s.dim)
    return [at]


def top_k(eqn, shards, halo_dims: HaloDims) -> list:
    """The top k of the shards' top k, in order."""
    along = eqn.params.get("reduction_dimension", eqn.params.get("axis", -1))
    values, at = _jax.bind(eqn, shards, {"k": min(eqn.params["k"], shards[0].shape[along])}, context=False)
    for s in halo_dims[0]:
        local = values, at + s.start().astype(at.dtype)
        values, positions = (jax.lax.all_gather(x, s.axes, axis=s.dim, tiled=True) for x in local)
        values, chosen = _jax.bind(eqn, [values], context=False)
        at = jnp.take_along_axis(positions, chosen, s.dim)
    return [values, at]
