"""Calls of every primitive with everything drawn: shapes that mesh axes divide or do not, types, values and parameters.

    @made("sort")
    def _(draw, name):                      -> a function and its operands
        ...
        return (lambda *xs: lax.sort(xs, dimension=d)), *operands

`CASES` has a hypothesis strategy per primitive, `FAMILIES` one per family of them. Sizes that 8 devices divide come first, so the
simplest case of a family is one that is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardplan._jax import equations

SIZES = (8, 4, 6, 2, 3, 12, 16, 5, 1, 9)
SMALL = (4, 2, 6, 3, 1, 5)
FLOATS = ("float32", "bfloat16", "float16")
FINER = (*FLOATS, "float8_e4m3fn", "float8_e5m2")
INTS = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "int4", "uint4")
NUMBERS = (*FINER, *INTS, "complex64")
ALL = (*NUMBERS, "bool")


@dataclass(frozen=True)
class Case:
    """A call of one primitive, perhaps among others."""

    primitive: str
    fn: Callable
    args: tuple

    def __repr__(self) -> str:
        try:
            return f"{self.primitive}: {jax.make_jaxpr(self.fn)(*self.args)}"
        except NotImplementedError as error:  # a derivative that this jax lacks
            return f"{self.primitive}: {error}"

    @property
    def is_made(self) -> bool:
        """Whether the primitive is among what the function traces to."""
        return any(e.primitive.name == self.primitive for e in equations(jax.make_jaxpr(self.fn)(*self.args).jaxpr))


CASES: dict[str, st.SearchStrategy[Case]] = {}
"""Primitive -> calls of it."""

FAMILIES: dict[str, st.SearchStrategy[Case]] = {}
"""The same of primitives that are drawn alike."""


def made(family: str, names: str = ""):
    """Registers a function from (draw, primitive) to (function, *operands) for the primitives named, default the family's name."""

    def register(make):
        @st.composite
        def cases(draw, name):
            fn, *args = make(draw, name)
            return Case(name, fn, tuple(args))

        found = {name: cases(name) for name in names.split() or [family]}
        CASES.update(found)
        FAMILIES[family] = st.one_of(*found.values())
        return make

    return register


# ---- what is drawn


def one_of(draw, *options):
    return draw(st.sampled_from(options))


def shape_of(draw, low: int = 1, high: int = 3, sizes=SIZES, most: int = 1500) -> tuple[int, ...]:
    """Of rank low..high and at most so many elements."""
    shape = draw(st.lists(st.sampled_from(sizes), min_size=low, max_size=high))
    while np.prod(shape, dtype=int) > most:
        shape[int(np.argmax(shape))] = 2
    return tuple(shape)


def array(draw, shape, dtype: str = "float32", values: str = "mixed"):
    """Values drawn from a drawn seed.

    Args:
        values: "mixed" numbers of both signs; "inner" ones in (0.1, 0.9); "ties" few different ones; "any" also infinities, NaN and
            the largest integers; "sums" what may be added up in any order: "mixed", or "inner" where a type has few digits.
    """
    random = np.random.default_rng(draw(st.integers(0, 99)))
    if values == "sums":
        values = "inner" if dtype in FINER[1:] else "mixed"
    if dtype == "bool":
        return jnp.asarray(random.integers(0, 2, shape), bool)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        low, high = (info.min, info.max) if values == "any" else (max(info.min, -3), min(info.max, 4))
        return jnp.asarray(random.integers(int(low), int(high), shape, endpoint=True), dtype)

    def real():
        if values == "inner":
            return random.uniform(0.1, 0.9, shape)
        if values == "ties":
            return random.integers(-2, 3, shape).astype(float)
        x = random.normal(0, 1, shape)
        return np.where(random.random(shape) < 0.1, random.choice([np.nan, np.inf, -np.inf, -0.0], shape), x) if values == "any" else x

    if dtype == "complex64":
        x = np.empty(shape, dtype)
        x.real, x.imag = real(), real()
        return jnp.asarray(x)
    return jnp.asarray(real(), dtype)


def axes_of(draw, rank: int, low: int = 1, high: int = 9) -> tuple[int, ...]:
    """Some dims, in order."""
    kept = draw(st.sets(st.integers(0, rank - 1), min_size=min(low, rank), max_size=min(high, rank))) if rank else set()
    return tuple(sorted(kept))


def keys(draw, shape=(), kinds=("threefry2x32", "rbg")):
    key = jax.random.key(draw(st.integers(0, 99)), impl=one_of(draw, *kinds))
    return jax.random.split(key, shape) if shape else key


# ---- elementwise

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


@made("types", "convert_element_type reduce_precision integer_pow clamp select_n copy name optimization_barrier stop_gradient")
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
    if name == "optimization_barrier":
        return (lambda *xs: lax.optimization_barrier(xs)), x, array(draw, shape_of(draw), "int32")
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


# ---- products


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


# ---- shape


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


# ---- linear algebra, transforms


@made("fft")
def _(draw, name):
    kind = one_of(draw, "FFT", "IFFT", "RFFT", "IRFFT")
    n = one_of(draw, 1, 2, 3)
    shape = shape_of(draw, 1, 2, (8, *SMALL), 24) + tuple(one_of(draw, 4, 6, 8, 3, 5) for _ in range(n))
    lengths = (*shape[-n:-1], (shape[-1] - 1) * 2 if kind == "IRFFT" else shape[-1])
    return (lambda x: lax.fft(x, kind, lengths)), array(draw, shape, "float32" if kind == "RFFT" else "complex64")


def positive(x):
    return x @ x.mT.conj() + 4 * jnp.eye(x.shape[-1])


@made(
    "linear algebra",
    """cholesky eigh eig svd qr lu lu_pivots_to_permutation triangular_solve tridiagonal_solve tridiagonal schur hessenberg
    householder_product symmetric_product ormqr cholesky_update geqrf""",
)
def _(draw, name):
    batch, n, k = shape_of(draw, 1, 2, (8, 4, 2, 3, 6), 24), one_of(draw, 4, 3, 2, 1), one_of(draw, 4, 8, 2, 3)
    dtype, lin = one_of(draw, "float32", "complex64"), lax.linalg
    x, flag = array(draw, (*batch, n, n), dtype) + 3 * jnp.eye(n), draw(st.booleans())
    tall = array(draw, (*batch, n + k, n), dtype)
    match name:
        case "cholesky" | "eigh" | "tridiagonal":
            return (lambda x: getattr(lin, name)(positive(x))), x
        case "svd":
            return (lambda x: lin.svd(x, full_matrices=flag)), tall
        case "qr":
            return (lambda x: lin.qr(x, full_matrices=flag)), tall
        case "geqrf":
            return (lambda x: jnp.linalg.qr(x, mode="raw")), tall
        case "lu":
            return lin.lu, array(draw, (*batch, n, k), dtype)
        case "lu_pivots_to_permutation":
            return (lambda x: lin.lu_pivots_to_permutation(x, n + 2)), jnp.abs(array(draw, (*batch, n), "int32")) % n
        case "triangular_solve":
            flags = {f: draw(st.booleans()) for f in ("lower", "transpose_a", "conjugate_a", "unit_diagonal")}
            b = array(draw, (*batch, n, k) if flag else (*batch, k, n), dtype)
            return (lambda a, b: lin.triangular_solve(a, b, left_side=flag, **flags)), x, b
        case "tridiagonal_solve":
            rows = (array(draw, (*batch, n + 1), values="inner") for _ in range(3))
            return (lambda x, y, z, b: lin.tridiagonal_solve(x, y + 2, z, b)), *rows, array(draw, (*batch, n + 1, k))
        case "householder_product":
            return lin.householder_product, tall, array(draw, (*batch, n), dtype, "inner")
        case "ormqr":
            return lin.ormqr, tall, array(draw, (*batch, n), dtype, "inner"), array(draw, (*batch, n + k, 2), dtype)
        case "symmetric_product":
            return lin.symmetric_product, array(draw, (*batch, n, k)), array(draw, (*batch, n, n))
        case "cholesky_update":
            return lin.cholesky_update, array(draw, (n, n)), array(draw, (n,))
    return getattr(lin, name), x


# ---- random numbers


@made(
    "random",
    "random_bits random_split random_fold_in random_seed random_wrap random_unwrap random_clone random_gamma rng_bit_generator",
)
def _(draw, name):
    shape, lead = shape_of(draw, 1, 2, SIZES, 64), shape_of(draw, 0, 1, SMALL)
    impl = one_of(draw, "threefry2x32", "rbg", "unsafe_rbg")
    match name:
        case "random_bits" | "random_split":
            fn = (lambda k: jax.random.bits(k, shape, "uint8")) if name == "random_bits" else (lambda k: jax.random.split(k, shape))
            return (jax.vmap(fn) if lead else fn), keys(draw, lead, (impl,))
        case "random_fold_in":
            fn = jax.vmap(jax.random.fold_in) if lead else jax.random.fold_in
            return fn, keys(draw, lead, (impl,)), array(draw, lead, "uint32")
        case "random_seed":
            return jax.vmap(lambda s: jax.random.key(s, impl=impl)), array(draw, shape[:1], "int32")
        case "random_wrap":
            words = array(draw, (*shape, 2 if impl == "threefry2x32" else 4), "uint32", "any")
            return (lambda x: jax.random.wrap_key_data(x, impl=impl)), words
        case "random_unwrap" | "random_clone":
            return (jax.random.key_data if name == "random_unwrap" else jax.random.clone), keys(draw, shape, (impl,))
        case "random_gamma":
            return jax.random.gamma, keys(draw, (), (impl,)), array(draw, shape, values="inner")
    return (lambda k: lax.rng_bit_generator(k, shape)), array(draw, (4,), "uint32", "any")


# ---- regions: bodies of some ops, each of which keeps the shape


def body(draw, shape, depth: int = 1) -> Callable:
    """A few drawn ops on one array."""
    axis = draw(st.integers(0, len(shape) - 1))
    w = array(draw, (shape[-1], shape[-1]), values="inner") / shape[-1]
    steps = {
        "tanh": jnp.tanh,
        "product": lambda x: x @ w,
        "softmax": lambda x: jax.nn.softmax(x, axis),
        "reversed": lambda x: lax.rev(x, (axis,)),
        "shifted": lambda x: jnp.roll(x, 1, axis),
        "summed": lambda x: x - x.sum(axis, keepdims=True) / shape[axis],
        "first": lambda x: x.at[0].add(x[-1]),
        "sorted": lambda x: jnp.sort(x, axis),
        "counted": lambda x: jnp.cumsum(x, axis) / shape[axis],
        "best": lambda x: x + x.argmax(axis, keepdims=True),
        "turned": lambda x: x.reshape(-1)[::-1].reshape(shape),
    }
    run = [steps[one_of(draw, *steps)] for _ in range(draw(st.integers(1, 3)))]
    if depth and draw(st.booleans()):
        run.append(region(draw, shape, one_of(draw, "scan", "while", "cond"), depth - 1))

    def fn(x):
        for step in run:
            x = step(x)
        return x

    return fn


def region(draw, shape, name: str, depth: int = 1) -> Callable:
    """A loop or a branch of drawn bodies, from an array to one of its shape."""
    run, length = body(draw, shape, depth), draw(st.integers(1, 4))
    match name:
        case "scan":
            reverse = draw(st.booleans())

            def scanned(x):
                last, rows = lax.scan(lambda c, row: ((y := run(c + row)), y), x * 0, jnp.stack([x] * length), reverse=reverse)
                return last + rows.sum(0)

            return scanned
        case "while":
            return lambda x: lax.while_loop(lambda c: c[0] < length, lambda c: (c[0] + 1, run(c[1])), (0, x))[1]
    others = [run, *(body(draw, shape, depth) for _ in range(draw(st.integers(1, 2))))]
    return lambda x: lax.switch(jnp.int32(jnp.abs(x).sum() * 7) % len(others), others, x)


@made("regions", "scan while cond")
def _(draw, name):
    shape = shape_of(draw, 1, 2, (8, 4, 6, 3, 16))
    fn = region(draw, shape, name)
    both = jax.value_and_grad(lambda x: (fn(x) ** 2).sum()) if name != "while" and draw(st.booleans()) else fn
    return both, array(draw, shape, values="inner")


# ---- gradients: programs of several primitives, which the sweep plans and the tests leave out

FORWARD = {name: CASES[name] for name in ("conv_general_dilated", "gather", "scatter-add", "reduce_window_sum", "reduce_window_max")}


@made("gradients", " ".join(FORWARD))
def _(draw, name):
    case = draw(FORWARD[name])
    kinds = ("float32", "bfloat16", "float16")
    floats = tuple(i for i, x in enumerate(case.args) if x.dtype in kinds)
    assume(floats and all(x.dtype in kinds or jnp.issubdtype(x.dtype, jnp.integer) for x in case.args))
    assume(all(x.dtype in kinds for x in jax.tree.leaves(jax.eval_shape(case.fn, *case.args))))

    def loss(*xs):
        return sum((x.astype("float32") ** 2).sum() for x in jax.tree.leaves(case.fn(*xs)))

    return jax.grad(loss, floats), *case.args


CASES.update(FORWARD)
