"""Drawn calls of products and windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from .draw import SIZES, SMALL, array, made, one_of, shape_of
from .elementwise import JOINS, each


def contraction(draw, batches=2, most=2):
    """Shapes of two operands and their dimension numbers, all dims in drawn order."""
    batch, inner, left, right = (shape_of(draw, 0, high, (*SMALL[:5], 8), 60) for high in (batches, most, 2, 2))
    roles = [("b", i) for i in range(len(batch))], [("c", i) for i in range(len(inner))]
    sides, shapes, sizes = [], [], {"b": batch, "c": inner}
    for free in (left, right):
        order = draw(st.permutations([*roles[0], *roles[1], *(("f", i) for i in range(len(free)))]))
        sides.append([[order.index(x) for x in kind] for kind in roles])
        shapes.append(tuple((sizes | {"f": free})[k][i] for k, i in order))
    numbers = tuple(tuple(tuple(side[k]) for side in sides) for k in (1, 0))
    return shapes, numbers


@made("dot_general")
def _(draw, name):
    (x, y), numbers = contraction(draw)
    dtype = one_of(draw, "float32", "bfloat16", "float16", "int8", "int32", "uint8", "complex64", "bool", "float8_e4m3fn", "int4")
    wide = {"int8": "int32", "int4": "int32"} | dict.fromkeys(("bfloat16", "float16", "float8_e4m3fn"), "float32")
    preferred = wide.get(dtype) if draw(st.booleans()) else None
    return (lambda x, y: lax.dot_general(x, y, numbers, preferred_element_type=preferred)), *(
        array(draw, shape, dtype, "sums") for shape in (x, y)
    )


@made("scaled_dot")
def _(draw, name):
    m, n, blocks, width, batch = (one_of(draw, *sizes) for sizes in ((8, 4, 3), (6, 4, 1), (2, 4, 1), (32, 16, 8), (0, 2, 8)))
    lead, dtype = (batch,) if batch else (), one_of(draw, "bfloat16", "float8_e4m3fn")
    shapes = (m, blocks * width), (blocks * width, n), (m, blocks), (blocks, n)
    d, b = len(lead), tuple(range(len(lead)))
    numbers = ((d + 1,), (d,)), (b, b)
    x, y, *scales = (array(draw, lead + s, t, "inner") for s, t in zip(shapes, (dtype, dtype, "bfloat16", "bfloat16"), strict=True))
    return (lambda x, y, p, q: lax.scaled_dot(x, y, lhs_scale=p, rhs_scale=q, dimension_numbers=numbers)), x, y, *scales


@made("ragged_dot_general")
def _(draw, name):
    groups, m, k, n = one_of(draw, 2, 4, 3), one_of(draw, 8, 6, 4), one_of(draw, 4, 8, 3), one_of(draw, 6, 8, 2)
    cuts = sorted(draw(st.lists(st.integers(0, m), min_size=groups - 1, max_size=groups - 1)))
    sizes = jnp.asarray(np.diff([0, *cuts, draw(st.integers(max(cuts, default=0), m))]), "int32")
    inner = draw(st.booleans())  # the ragged dim is contracted, as in a weight's gradient
    dims = lax.RaggedDotDimensionNumbers(((((0,), (0,)) if inner else ((1,), (1,))), ((), ())), (0,), () if inner else (0,))
    x, y = array(draw, (m, k)), array(draw, (m, n) if inner else (groups, k, n))
    return (lambda x, y, s: lax.ragged_dot_general(x, y, s, dims)), x, y, sizes


@made("conv_general_dilated")
def _(draw, name):
    spatial = one_of(draw, 1, 2, 0)
    batch, groups, inner, outer = one_of(draw, 2, 4, 8, 1, 3), one_of(draw, 1, 2, 4, 3), one_of(draw, 1, 2, 4, 3), one_of(draw, 1, 2, 4)
    grouped = one_of(draw, "feature", "batch")
    image = [one_of(draw, *((8, 6, 12, 5, 16, 4) if spatial == 1 else (8, 6, 4, 5))) for _ in range(spatial)]
    kernel = [one_of(draw, 3, 1, 2, 4) for _ in range(spatial)]
    if draw(st.integers(0, 4)) == 4:  # as in a filter's gradient
        kernel = [max(1, n - draw(st.integers(0, 2))) for n in image]
    strides, dilations, spreads = ([one_of(draw, 1, 2, 3) for _ in range(spatial)] for _ in range(3))
    padding = [(draw(st.integers(-1, 3)), draw(st.integers(-1, 3))) for _ in range(spatial)]
    for i, n in enumerate(image):  # at least one result
        lack = (kernel[i] - 1) * spreads[i] + 1 - ((n - 1) * dilations[i] + 1 + sum(padding[i]))
        padding[i] = (padding[i][0], padding[i][1] + max(0, lack))
    by_batch = grouped == "batch"
    lhs = [batch * (groups if by_batch else 1), inner * (1 if by_batch else groups), *image]
    rhs = [groups * outer, inner, *kernel]
    specs = [tuple(draw(st.permutations(range(2 + spatial)))) for _ in range(3)]

    def placed(sizes, spec):
        return tuple(sizes[spec.index(d)] for d in range(len(spec)))

    counts = {f"{grouped}_group_count": groups}
    dtype, preferred = one_of(draw, "float32", "bfloat16", "float16", "complex64", "int8"), None
    if dtype in ("bfloat16", "int8") and draw(st.booleans()):
        preferred = {"bfloat16": "float32", "int8": "int32"}[dtype]

    def fn(x, w):
        numbers = lax.ConvDimensionNumbers(*specs)
        return lax.conv_general_dilated(x, w, strides, padding, dilations, spreads, numbers, preferred_element_type=preferred, **counts)

    return fn, *(array(draw, placed(sizes, spec), dtype, "sums") for sizes, spec in zip((lhs, rhs), specs, strict=False))


# ---- windows


def window(draw, shape, dilated: bool = True) -> dict:
    rank = len(shape)
    sizes = {"window_dimensions": [one_of(draw, 1, 2, 3, 4) for _ in shape], "window_strides": [one_of(draw, 1, 2, 3) for _ in shape]}
    padding = [(draw(st.integers(-1 if dilated else 0, 2)), draw(st.integers(0, 2))) for _ in shape]
    base, spread = ([one_of(draw, 1, 2, 3) if dilated else 1 for _ in shape] for _ in range(2))
    for d in range(rank):  # at least one result
        reach = (sizes["window_dimensions"][d] - 1) * spread[d] + 1
        lack = reach - ((shape[d] - 1) * base[d] + 1 + sum(padding[d]))
        padding[d] = (padding[d][0], padding[d][1] + max(0, lack))
    return sizes | {"padding": padding} | ({"base_dilation": base, "window_dilation": spread} if dilated else {})


def extreme(dtype, sign: int):
    """The largest number of a type, or the least."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return sign * np.inf
    return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min


@made("reduce_window", "reduce_window reduce_window_sum reduce_window_max reduce_window_min")
def _(draw, name):
    shape, dtype = shape_of(draw, 1, 3, SIZES, 400), one_of(draw, "float32", "bfloat16", "int32", "int8", "float16", "uint8")
    params = window(draw, shape)
    if name != "reduce_window":
        how = {"sum": lax.add, "max": lax.max, "min": lax.min}[name.removeprefix("reduce_window_")]
        init = np.asarray(0 if how is lax.add else extreme(dtype, -1 if how is lax.max else 1), dtype)
        return (lambda x: lax.reduce_window(x, init, how, **params)), array(draw, shape, dtype, "sums")
    n = one_of(draw, 1, 2)
    join, init = one_of(draw, *JOINS)
    xs = (array(draw, shape, values="inner") for _ in range(n))
    return (lambda *xs: lax.reduce_window(xs, (init,) * n, each(join), **params)), *xs


@made("pooling's gradient", "select_and_scatter_add select_and_gather_add")
def _(draw, name):
    shape = shape_of(draw, 1, 3, SIZES, 400)
    params = window(draw, shape, dilated=False)
    if name == "select_and_scatter_add" and draw(st.booleans()):  # no more windows than strides
        params["padding"] = "SAME"
    init, how = one_of(draw, (-np.inf, lax.max), (np.inf, lax.min))

    def pool(x):
        return lax.reduce_window(x, np.float32(init), how, **params)

    # Of equals XLA takes the gradient of the first, but the derivative of any, in whichever order it loops.
    x = array(draw, shape, values="mixed" if name == "select_and_gather_add" else one_of(draw, "mixed", "ties"))
    out = jax.eval_shape(pool, x).shape
    if name == "select_and_gather_add":
        return (lambda x, t: jax.jvp(pool, (x,), (t,))[1]), x, array(draw, shape)
    return (lambda x, t: jax.vjp(pool, x)[1](t)[0]), x, array(draw, out)
