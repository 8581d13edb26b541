"""Drawn calls of ops that move data, gathers and scatters."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax

from .draw import ALL, FLOATS, INTS, SIZES, SMALL, array, axes_of, made, one_of, shape_of


@made("dims", "transpose squeeze broadcast_in_dim reshape rev iota tile stack unstack")
def _(draw, name):
    shape = shape_of(draw, 1, 4)
    x, rank = array(draw, shape, one_of(draw, *ALL)), len(shape)
    axis = draw(st.integers(0, rank - 1))
    if name == "transpose":
        order = tuple(draw(st.permutations(range(rank))))
        return (lambda x: lax.transpose(x, order)), x
    if name == "squeeze":
        places = axes_of(draw, rank + 1, 1, 3)
        x = jnp.expand_dims(x, [d for d in places if d <= rank])
        ones = tuple(d for d in range(x.ndim) if x.shape[d] == 1)
        return (lambda x: lax.squeeze(x, ones)), x
    if name == "broadcast_in_dim":
        added = draw(st.integers(0, 2))
        stretched = tuple(1 if draw(st.booleans()) else n for n in shape)
        places = tuple(sorted(draw(st.permutations(range(rank + added)))[:rank]))
        extra = [shape[places.index(d)] if d in places else one_of(draw, *SMALL) for d in range(rank + added)]
        return (lambda x: lax.broadcast_in_dim(x, extra, places)), array(draw, stretched, one_of(draw, *ALL))
    if name == "reshape":
        primes = [p for n in shape for p in prime_factors(n)]
        cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
        new = [int(np.prod(primes[a:b], dtype=int)) for a, b in zip([0, *cuts], [*cuts, len(primes)], strict=True)]
        new, order = draw(st.permutations(new)), one_of(draw, None, tuple(draw(st.permutations(range(rank)))))
        return (lambda x: lax.reshape(x, new, order)), x
    if name == "rev":
        dims = axes_of(draw, rank)
        return (lambda x: lax.rev(x, dims)), x
    if name == "iota":
        dtype = one_of(draw, "int32", "float32", "int8", "bfloat16", "complex64")
        return ((lambda: lax.broadcasted_iota(dtype, shape, axis)),)
    if name == "tile":
        reps = tuple(one_of(draw, 1, 2, 3) for _ in shape)
        return (lambda x: lax.tile(x, reps) if hasattr(lax, "tile") else jnp.tile(x, reps)), x
    if name == "stack":
        return (lambda *xs: lax.stack(xs, axis) if hasattr(lax, "stack") else jnp.stack(xs, axis)), x, x + x if x.dtype != bool else ~x
    return (lambda x: lax.unstack(x, axis) if hasattr(lax, "unstack") else jnp.unstack(x, axis=axis)), x


def prime_factors(n: int) -> list[int]:
    """Prime ones."""
    return next(([p, *prime_factors(n // p)] for p in range(2, n + 1) if n % p == 0), [])


@made("cuts", "slice pad concatenate split")
def _(draw, name):
    shape = shape_of(draw)
    x, rank = array(draw, shape, one_of(draw, *ALL)), len(shape)
    axis = draw(st.integers(0, rank - 1))
    if name == "slice":
        kept = [sorted((draw(st.integers(0, n - 1)), draw(st.integers(1, n)))) if draw(st.booleans()) else (0, n) for n in shape]
        starts, stops = zip(*((a, max(b, a + 1)) for a, b in kept), strict=True)
        strides = one_of(draw, None, tuple(one_of(draw, 1, 2, 3) for _ in shape))
        return (lambda x: lax.slice(x, starts, stops, strides)), x
    if name == "concatenate":
        others = [one_of(draw, *SIZES) for _ in range(draw(st.integers(1, 2)))]
        xs = [array(draw, tuple(n if d == axis else m for d, m in enumerate(shape)), x.dtype.name) for n in others]
        return (lambda *xs: lax.concatenate(xs, axis)), x, *xs
    if name == "split":
        cut = draw(st.integers(0, shape[axis]))
        return (lambda x: lax.split(x, (cut, shape[axis] - cut), axis)), x
    edges = []
    for n in shape:
        low, high, gap = draw(st.integers(-2, 3)), draw(st.integers(-2, 3)), draw(st.integers(0, 2))
        edges.append((low, max(high, 1 - low - (n + (n - 1) * gap)), gap) if draw(st.booleans()) else (0, 0, 0))
    return (lambda x, v: lax.pad(x, v, edges)), x, array(draw, (), x.dtype.name)


@made("places", "dynamic_slice dynamic_update_slice")
def _(draw, name):
    shape, dtype = shape_of(draw), one_of(draw, *ALL)
    part = [draw(st.integers(1, n)) if draw(st.booleans()) else n for n in shape]
    starts = array(draw, (len(shape),), one_of(draw, "int32", "uint8", "int8", "uint32"), "any")
    starts = jnp.where(jnp.asarray([draw(st.booleans()) for _ in shape]), starts, starts % 8)
    x, update = array(draw, shape, dtype, "any"), array(draw, tuple(part), dtype)
    if name == "dynamic_slice":
        return (lambda x, *i: lax.dynamic_slice(x, i, part)), x, *starts
    return (lambda x, u, *i: lax.dynamic_update_slice(x, u, i)), x, update, *starts


# ---- gather and scatter


def looked_up(draw):
    """Dims of an array that is looked up, each with its role: batching, inserted (one element, not in the window), window.

    Returns:
        Sizes; roles; how much of each is taken; dims that are indexed, in drawn order; the shape of the indices; where batching
        dims stand in it.
    """
    shape = shape_of(draw, 1, 3, SIZES, 300)
    roles = [one_of(draw, "inserted", "window", "batching") for _ in shape]
    batching = [d for d, r in enumerate(roles) if r == "batching"]
    others = [d for d, r in enumerate(roles) if r != "batching"]
    indexed = list(draw(st.permutations([d for d in others if draw(st.integers(0, 3)) < 3])))
    taken = [1] * len(shape)
    for d, n in enumerate(shape):
        if roles[d] == "window":  # all of an array's own dims, one element of those indexed; now and then a part
            taken[d] = draw(st.integers(1, n)) if draw(st.integers(0, 3)) == 3 else 1 if d in indexed else n
    batch = [*batching, *((None,) * draw(st.integers(0, 2)))]
    order = list(draw(st.permutations(range(len(batch)))))
    grid = [shape[batch[i]] if batch[i] is not None else one_of(draw, *SMALL, 8) for i in order]
    at = tuple(order.index(i) for i in range(len(batching)))
    return shape, roles, taken, indexed, (*grid, len(indexed)), at


def indices(draw, grid, shape, taken, indexed, mode: str):
    dtype = one_of(draw, "int32", "int32", "uint8", "int8", "uint32")
    found = array(draw, grid, "int32") * 2
    limits = jnp.asarray([shape[d] - taken[d] for d in indexed], "int32")
    if mode == "promise_in_bounds" or dtype[0] == "u":
        found = jnp.abs(found)
    return (jnp.minimum(found, limits) if mode == "promise_in_bounds" else found).astype(dtype)


MODES = ("clip", "fill", "promise_in_bounds")


@made("gather")
def _(draw, name):
    shape, roles, taken, indexed, grid, at = looked_up(draw)
    mode, dtype = one_of(draw, *MODES), one_of(draw, *ALL)
    batching = tuple(d for d, r in enumerate(roles) if r == "batching")
    inserted = tuple(d for d, r in enumerate(roles) if r == "inserted")
    n_window, rank = roles.count("window"), len(grid) - 1 + roles.count("window")
    offset = tuple(sorted(draw(st.permutations(range(rank)))[:n_window]))
    numbers = lax.GatherDimensionNumbers(offset, inserted, tuple(indexed), batching, at)
    i = indices(draw, grid, shape, taken, indexed, mode)
    return (lambda x, i: lax.gather(x, i, numbers, taken, mode=mode)), array(draw, shape, dtype, one_of(draw, "mixed", "any")), i


@made("scatter", "scatter scatter-add scatter-sub scatter-mul scatter-max scatter-min")
def _(draw, name):
    shape, roles, taken, indexed, grid, at = looked_up(draw)
    assume(indexed)  # XLA for CPU gets scatters without an index wrong, whole ones too
    kinds = {"scatter": ALL, "scatter-max": (*FLOATS, *INTS), "scatter-min": (*FLOATS, *INTS)}
    mode, dtype = one_of(draw, *MODES), one_of(draw, *kinds.get(name, (*FLOATS, *INTS, "complex64")))
    batching = tuple(d for d, r in enumerate(roles) if r == "batching")
    inserted = tuple(d for d, r in enumerate(roles) if r == "inserted")
    rest = iter([taken[d] for d, r in enumerate(roles) if r == "window"])
    batch, n_window = iter(grid[:-1]), roles.count("window")
    rank = len(grid) - 1 + n_window
    places = tuple(sorted(draw(st.permutations(range(rank)))[:n_window]))
    updates = tuple(next(rest) if d in places else next(batch) for d in range(rank))
    numbers = lax.ScatterDimensionNumbers(places, inserted, tuple(indexed), batching, at)
    i = indices(draw, grid, shape, taken, indexed, mode)
    fn = getattr(lax, name.replace("-", "_"))
    return (lambda x, i, u: fn(x, i, u, numbers, mode=mode)), array(draw, shape, dtype), i, array(draw, updates, dtype, "sums")
