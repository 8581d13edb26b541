"""Ops along sharded dims: a shard fetches the halo that its results read, then runs the op on it; small results are gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.emit.shard_local.halo import HaloDim, HaloDims, gather_halo
from shardplan.strategies.halo import Halo


def slice_(eqn, shards, halo_dims: HaloDims) -> list:
    """The rows of the slice that a shard of the result has."""
    p, done = eqn.params, {s.dim for s in halo_dims[0]}
    x = gather_halo(shards[0], halo_dims[0], 0)
    cuts = zip(p["start_indices"], p["limit_indices"], p["strides"] or (1,) * x.ndim, x.shape, strict=True)
    local = zip(*((0, n, 1) if d in done else (a, min(b, n), step) for d, (a, b, step, n) in enumerate(cuts)), strict=True)
    return _jax.bind(eqn, [x], dict(zip(("start_indices", "limit_indices", "strides"), local, strict=True)), context=False)


def pad(eqn, shards, halo_dims: HaloDims) -> list:
    """A shard's part of the padded array; sharded dims have their padding in the halo."""
    x, value = shards
    edges = _without(eqn.params["padding_config"], halo_dims[0], (0, 0, 0))
    return _jax.bind(eqn, [gather_halo(x, halo_dims[0], value), value], {"padding_config": edges}, context=False)


def rev(eqn, shards, halo_dims: HaloDims) -> list:
    """The mirrored shard: a halo with a negative stride reverses sharded dims."""
    done = {s.dim for s in halo_dims[0]}
    dimensions = tuple(d for d in eqn.params["dimensions"] if d not in done)
    return _jax.bind(eqn, [gather_halo(shards[0], halo_dims[0], 0)], {"dimensions": dimensions}, context=False)


def concatenate(eqn, shards, halo_dims: HaloDims) -> list:
    """A shard's part of the joined array: each operand in turn fills in what it has."""
    if not halo_dims[0]:
        return _jax.bind(eqn, shards, context=False)
    (dim,) = halo_dims[0]
    joined = jnp.zeros([dim.made if d == dim.dim else n for d, n in enumerate(shards[0].shape)], shards[0].dtype)
    for x, dims in zip(shards, halo_dims, strict=True):
        joined = gather_halo(x, dims, joined)
    return [joined]


def convolution(eqn, shards, halo_dims: HaloDims, groups: Mapping[str, int]) -> list:
    """A convolution over a shard's halo, with as many groups (`feature_group_count`, `batch_group_count`) as a device has."""
    p, dilated = eqn.params, {s.dim: _keep_dilation(s) for s in halo_dims[0]}
    strided = {s.dim for s in halo_dims[0] if s.halo.window == 1}  # a halo of single points has the strides taken
    local: dict[str, list] = {name: list(p[name]) for name in ("padding", "lhs_dilation", "window_strides", "rhs_dilation")}
    for i, d in enumerate(p["dimension_numbers"].lhs_spec[2:]):
        if d in dilated:
            _, local["padding"][i], local["lhs_dilation"][i] = dilated[d]
        if d in strided:
            local["window_strides"][i] = local["rhs_dilation"][i] = 1
    x = gather_halo(shards[0], [s for s, *_ in dilated.values()], 0)
    return _jax.bind(eqn, [x, *shards[1:]], {name: tuple(each) for name, each in local.items()} | dict(groups), context=False)


def _keep_dilation(dim: HaloDim) -> tuple[HaloDim, tuple[int, int], int]:
    """(halo without the zeros between dilated elements, padding, dilation left to the op, so that it multiplies no zeros).

    Only where the windows of all shards begin at the same offset; else the zeros are part of the halo.
    """
    halo = dim.halo
    span, low, dilation = halo.span(dim.made), halo.low % halo.dilation, halo.dilation
    elements = (span - 1 - low) // dilation + 1
    if halo.window == 1 or dilation == 1 or dim.made * halo.stride % dilation or elements < 1:
        return dim, (0, 0), 1
    dense = Halo(elements, dim.made * halo.stride // dilation, halo.low // dilation)
    return replace(dim, halo=dense, m=dim.shards), (low, span - low - (elements - 1) * dilation - 1), dilation


def windows(eqn, shards, halo_dims: HaloDims, fills: Sequence) -> list:
    """A window op over the halos of its first operands, each with one of `fills` beyond the array's ends."""
    arrays = [gather_halo(x, dims, fill) for x, dims, fill in zip(shards, halo_dims, fills, strict=False)]
    strided = [s for s in halo_dims[0] if s.halo.window == 1]
    neutral = ("padding", halo_dims[0], (0, 0)), ("base_dilation", halo_dims[0], 1), ("window_strides", strided, 1)
    params = {name: _without(eqn.params[name], done, value) for name, done, value in neutral}
    return _jax.bind(eqn, [*arrays, *shards[len(fills) :]], params, context=False)


def reduce_window(eqn, shards, halo_dims: HaloDims) -> list:
    """The last half of the operands are the initial values, and stand beyond the array's ends."""
    return windows(eqn, shards, halo_dims, shards[len(shards) // 2 :])


def select_and_gather_add(eqn, shards, halo_dims: HaloDims) -> list:
    """Beyond the array's ends, tangents are zeros and values are such that no window selects them."""
    return windows(eqn, shards, halo_dims, (0, _never_selected(eqn)))


def select_and_scatter_add(eqn, shards, halo_dims: HaloDims) -> list:
    """All windows that read a shard's elements are scattered to their halo; the shard is a slice of that."""
    source, x = (gather_halo(x, dims, fill) for x, dims, fill in zip(shards, halo_dims, (0, _never_selected(eqn)), strict=True))
    for s in halo_dims[0]:  # one element per window, from the first window that reads this shard
        stride = eqn.params["window_strides"][s.dim]
        source = jax.lax.slice_in_dim(source, s.halo.low % stride, None, stride, s.dim)
    (out,) = _jax.bind(eqn, [source, x], {"padding": _without(eqn.params["padding"], halo_dims[0], (0, 0))}, context=False)
    for s in halo_dims[1]:
        out = jax.lax.slice_in_dim(out, s.halo.low, s.halo.low + s.held, axis=s.dim)
    return [out]


def _never_selected(eqn) -> float:
    dtype, largest = eqn.invars[1].aval.dtype, eqn.params["select_prim"].name == "ge"
    low, high = (-jnp.inf, jnp.inf) if jnp.issubdtype(dtype, jnp.inexact) else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    return low if largest else high


def _without(params: Sequence, done: Sequence[HaloDim], neutral) -> tuple:
    """A parameter per dim, `neutral` for the dims whose halo already has its effect."""
    return tuple(neutral if d in {s.dim for s in done} else p for d, p in enumerate(params))


# ---- small results, gathered


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
    for s in (s for s in halo_dims[0] if s.dim == along % values.ndim):
        local = values, at + s.start().astype(at.dtype)
        values, positions = (jax.lax.all_gather(x, s.axes, axis=s.dim, tiled=True) for x in local)
        values, chosen = _jax.bind(eqn, [values], context=False)
        at = jnp.take_along_axis(positions, chosen, s.dim)
    return [values, at]
