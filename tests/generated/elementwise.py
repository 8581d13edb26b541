"""Drawn calls of elementwise ops, and of reductions and ops that run along a dim."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .draw import ALL, FLOATS, INTS, NUMBERS, SMALL, array, axes_of, made, one_of, shape_of

NAMED = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "not": lax.bitwise_not}


def op(name: str) -> Callable:
    return NAMED.get(name) or getattr(lax, name)


@made(
    "elementwise of one",
    """abs acos acosh asin asinh atan atanh cbrt ceil cos cosh erf erf_inv erfc exp exp2 expm1 floor is_finite log log1p logistic neg
    round rsqrt sign sin sinh sqrt square tan tanh lgamma digamma bessel_i0e bessel_i1e""",
)
def _(draw, name):
    return op(name), array(draw, shape_of(draw, 0), one_of(draw, *FLOATS), one_of(draw, "inner", "any"))


@made("elementwise of two", "add sub mul div max min pow rem atan2 nextafter eq ne lt le gt ge")
def _(draw, name):
    kinds = ("float32",) if name == "nextafter" else FLOATS if name in ("atan2", "pow", "rem") else (*FLOATS, *INTS)
    shape, dtype = shape_of(draw), one_of(draw, *kinds)
    other = one_of(draw, shape, (), tuple(1 if draw(st.booleans()) else n for n in shape))
    return (lambda x, y: op(name)(x, jnp.broadcast_to(y, shape) if y.ndim else jnp.full(shape, y))), *(
        array(draw, s, dtype, one_of(draw, "mixed", "ties")) for s in (shape, other)
    )


@made(
    "elementwise of integers",
    "and or xor not shift_left shift_right_arithmetic shift_right_logical clz population_count add sub mul max min",
)
def _(draw, name):
    shape, dtype = shape_of(draw), one_of(draw, *INTS)
    n = 1 if name in ("not", "clz", "population_count") else 2
    return op(name), *(array(draw, shape, dtype, "any") for _ in range(n))


@made("elementwise of complex numbers", "real imag conj complex add mul div exp eq tanh neg add_any abs sign")
def _(draw, name):
    shape = shape_of(draw)
    if name == "add_any":
        return (lambda x: jax.linear_transpose(lambda y: lax.complex(y, y), x.real)(x)[0]), array(draw, shape, "complex64")
    dtype = "float32" if name == "complex" else "complex64"
    return op(name), *(array(draw, shape, dtype) for _ in range(2 if name in ("complex", "add", "mul", "div", "eq") else 1))


@made("special functions", "igamma igammac igamma_grad_a polygamma zeta regularized_incomplete_beta")
def _(draw, name):
    shape = shape_of(draw, 1, 2, SMALL)
    fn = lax.betainc if name == "regularized_incomplete_beta" else getattr(lax, name)
    return fn, *(array(draw, shape, values="inner") + (name == "zeta") for _ in range(3 if fn is lax.betainc else 2))


@made("types", "convert_element_type reduce_precision integer_pow clamp select_n copy name stop_gradient")
def _(draw, name):
    shape, dtype = shape_of(draw), one_of(draw, *ALL)
    if name == "convert_element_type":
        dtype = one_of(draw, *(t for t in ALL if t != "complex64"))
        to = one_of(draw, *(t for t in ALL if t != dtype))
        return (lambda x: lax.convert_element_type(x, to)), array(draw, shape, dtype, "ties")
    if name == "clamp":
        dtype = one_of(draw, *FLOATS, *INTS)
        bounds = shape if draw(st.booleans()) else ()
        low, high = (array(draw, bounds, dtype) for _ in range(2))
        return lax.clamp, jnp.minimum(low, high), array(draw, shape, dtype), jnp.maximum(low, high)
    if name == "select_n":
        n = one_of(draw, 2, 3)
        which = jnp.abs(array(draw, one_of(draw, shape, ()), "int32")) % n
        return lax.select_n, which.astype(bool) if n == 2 else which, *(array(draw, shape, dtype) for _ in range(n))
    if name in ("reduce_precision", "integer_pow"):
        x, n = array(draw, shape, one_of(draw, *FLOATS)), one_of(draw, 3, 2, 5)
        return (lambda x: lax.reduce_precision(x, 5, n)) if name == "reduce_precision" else (lambda x: lax.integer_pow(x, n)), x
    x = array(draw, shape, dtype)
    if name == "stop_gradient":
        return lax.stop_gradient, x
    return (lambda x: jnp.array(x, copy=True)) if name == "copy" else (lambda x: checkpoint_name(x, "kept")), x


@made("bitcast_convert_type")
def _(draw, name):
    bits = {32: ("float32", "int32", "uint32"), 16: ("bfloat16", "float16", "int16")}
    bits |= {8: ("int8", "uint8", "float8_e4m3fn"), 4: ("int4", "uint4")}
    old, new = one_of(draw, *bits), one_of(draw, *bits)
    shape = shape_of(draw) + ((new // old,) if new > old else ())
    dtype, to = one_of(draw, *bits[old]), one_of(draw, *bits[new])
    return (lambda x: lax.bitcast_convert_type(x, to)), array(draw, shape, dtype)


# ---- reductions and what runs along a dim


@made("reductions", "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin")
def _(draw, name):
    shape, bits, ordered = shape_of(draw), name in ("reduce_and", "reduce_or", "reduce_xor"), name in ("argmax", "argmin")
    kinds = ("int32", "uint8", "uint32", "int16", "bool") if bits else (*FLOATS, *INTS) if ordered else NUMBERS
    values = one_of(draw, "mixed", "ties", *(("any",) if ordered or bits else ()))  # collectives lose NaN in a maximum
    x, axes = array(draw, shape, one_of(draw, *kinds), "sums" if name == "reduce_sum" else values), axes_of(draw, len(shape))
    if ordered:
        index = one_of(draw, "int32", "uint8", "int16")
        return (lambda x: op(name)(x, axes[0], index)), x
    return (lambda x: op(name)(x, axes)), x


JOINS = (lambda a, b: a + b + a * b, np.float32(0)), (lax.mul, np.float32(1)), (lax.max, np.float32(-1))
"""Functions of two numbers, and what changes none of (0.1, 0.9)."""


def each(join: Callable) -> Callable:
    """The same function of tuples, element by element."""
    return lambda a, b: tuple(join(x, y) for x, y in zip(a, b, strict=True))


@made("reduce")
def _(draw, name):
    shape, n = shape_of(draw), one_of(draw, 1, 2)
    axes = axes_of(draw, len(shape))
    join, init = one_of(draw, *JOINS)
    return (lambda *xs: lax.reduce(xs, (init,) * n, each(join), axes)), *(array(draw, shape, values="inner") for _ in range(n))


@made("over named dims", "psum pmax pmin")
def _(draw, name):
    x = array(draw, shape_of(draw, 2), one_of(draw, "float32", "int32", "bfloat16", "complex64" if name == "psum" else "float16"))
    names = one_of(draw, ("i",), ("i", "j"))
    fn = jax.vmap(lambda x: op(name)(x, names if len(names) > 1 else "i"), axis_name="i", in_axes=one_of(draw, 0, 1))
    return (jax.vmap(fn, axis_name="j") if x.ndim > 2 or len(names) > 1 else fn), x[None] if len(names) > 1 and x.ndim == 2 else x


@made("cumulative", "cumsum cumprod cummax cummin cumlogsumexp")
def _(draw, name):
    shape = shape_of(draw)
    added = name in ("cumsum", "cumprod")
    kinds = FLOATS if name == "cumlogsumexp" else (*FLOATS, *INTS[:6], *(("complex64",) if added else ()))
    values = "sums" if added else one_of(draw, "mixed", *(("any",) if name in ("cummax", "cummin") else ()))
    axis, reverse = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    return (lambda x: op(name)(x, axis=axis, reverse=reverse)), array(draw, shape, one_of(draw, *kinds), values)


@made("sort")
def _(draw, name):
    shape, n = shape_of(draw), one_of(draw, 1, 2, 3)
    kinds = (*FLOATS, *INTS[:6], "bool", "complex64")
    xs = [array(draw, shape, one_of(draw, *kinds), one_of(draw, "ties", "any")) for _ in range(n)]
    d, num_keys = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, n))
    return (lambda *xs: lax.sort(xs, dimension=d, num_keys=num_keys)), *xs


@made("choices", "top_k approx_top_k")
def _(draw, name):
    shape = shape_of(draw)
    axis = draw(st.integers(0, len(shape) - 1)) if name == "top_k" or len(shape) == 1 else len(shape) - 1
    k, kinds = draw(st.integers(1, shape[axis])), FLOATS if name == "approx_top_k" else (*FLOATS, *INTS[:6])
    x = array(draw, shape, one_of(draw, *kinds), one_of(draw, "mixed", "ties"))
    if name == "top_k":
        return (lambda x: lax.top_k(x, k, axis=axis)), x
    fn, whole = one_of(draw, lax.approx_max_k, lax.approx_min_k), draw(st.booleans())
    return (lambda x: fn(x, k, reduction_dimension=axis, aggregate_to_topk=whole)), x
