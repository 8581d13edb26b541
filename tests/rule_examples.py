"""The rule table as text: every primitive on example shapes, and the examples the proofs run on.

    gather       (8,6), (4,1) -> (4,6)     a b, c 1 -> c b   reduce a

An example is a primitive, a function that makes it, and operands written like "f32[8,4]" (drawn from a fixed seed, floats in
(0.1, 0.9), integers in 0..3) or given as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal._loop.common import select_if_vmap_p
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from shardplan._jax import equations
from shardplan.strategies.rule import Rule
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.elementwise import ITERATED, PLAIN, PROLOGUES

DTYPES = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "f8": "float8_e4m3fn", "c64": "complex64",
    "i32": "int32", "i16": "int16", "i8": "int8", "i4": "int4", "u32": "uint32", "u8": "uint8", "bool": "bool", "key": "key",
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """One way a primitive appears.

    Attributes:
        primitive: its name.
        fn: a function that runs it, perhaps among others.
        operands: what `fn` takes: texts like "f32[8,4]" or arrays.
    """

    primitive: str
    fn: Callable
    operands: tuple

    def values(self) -> list:
        random = np.random.default_rng(0)
        return [draw(x, random) if isinstance(x, str) else x for x in self.operands]


def draw(text: str, random: np.random.Generator):
    """An array for "f32[8,4]": the same in every process."""
    name, dims = text.removesuffix("]").split("[")
    shape, dtype = tuple(int(n) for n in dims.split(",") if n), DTYPES[name]
    if dtype == "key":
        return jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    if name[0] in "iu" or name == "bool":
        return jnp.asarray(random.integers(0, 2 if name == "bool" else 4, shape), dtype)
    x = random.uniform(0.1, 0.9, shape)
    return jnp.asarray(x + 1j * random.uniform(0.1, 0.9, shape) if name == "c64" else x, dtype)


EXAMPLES: list[Example] = []


def add(primitive: str, fn: Callable, *operands) -> None:
    EXAMPLES.append(Example(primitive, fn, operands))


# ---- elementwise

NAMED = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor, "not": lax.bitwise_not}
UNARY_INT = "clz not population_count"
BINARY_INT = "and or shift_left shift_right_arithmetic shift_right_logical xor"
BINARY = "atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter polygamma pow rem zeta add sub"
OTHER = "mulhi polynomial clamp regularized_incomplete_beta select_n convert_element_type integer_pow reduce_precision"

SLOW = "igamma igamma_grad_a igammac polygamma zeta"  # to compile
for _name in [*PLAIN.split(), *PROLOGUES.split(), "mul", "div", "neg", *ITERATED.split(), "stop_gradient"]:
    _fn: Any = NAMED.get(_name, getattr(lax, _name, None))
    if _name in UNARY_INT.split():
        add(_name, _fn, "u32[8,4]")
    elif _name in BINARY_INT.split():
        add(_name, _fn, "i32[8,4]", "i32[8,4]")
    elif _name in ("real", "imag", "conj"):
        add(_name, _fn, "c64[8,4]")
    elif _name == "complex" or _name in BINARY.split():
        add(_name, _fn, *["f32[8]" if _name in SLOW.split() else "f32[8,4]"] * 2)
    elif _fn is not None and _name not in OTHER.split():
        add(_name, _fn, "f32[8,4]")

add("add", lax.add, "f32[8,4]", "f32[8,4]")
add("add", lambda x: x + 1, "bf16[8]")
add("add", jnp.add, "f32[8,4]", "f32[1,4]")
add("add_any", lambda x: jax.grad(lambda y: (jnp.sin(y) + jnp.cos(y)).sum())(x), "f32[8,4]")
add("clamp", lax.clamp, "f32[]", "f32[8,4]", "f32[]")
add("clamp", lax.clamp, "f32[8,4]", "f32[8,4]", "f32[8,4]")
add("convert_element_type", lambda x: x.astype("bfloat16"), "f32[8,4]")
add("convert_element_type", lambda x: x.astype("float8_e4m3fn"), "f32[8,4]")
add("copy", lambda x: jnp.array(x, copy=True), "f32[8,4]")
add("integer_pow", lambda x: x**3, "f32[8,4]")
add("mul", lambda x: x * 2, "f32[]")
add("name", lambda x: checkpoint_name(x, "kept"), "f32[8,4]")
add("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), "f32[8,4]")
for _name in ("nonbatchable", "nontraceable"):
    add(_name, getattr(equinox.internal, _name), "f32[8,4]")
add("nondifferentiable_backward", lambda x: equinox.internal.nondifferentiable_backward(x), "f32[8,4]")
add("select_if_vmap", select_if_vmap_p.bind, "bool[]", "f32[8,4]", "f32[8,4]")
add("regularized_incomplete_beta", lax.betainc, "f32[8]", "f32[8]", "f32[8]")
add("select_n", lax.select_n, "bool[8,4]", "f32[8,4]", "f32[8,4]")
add("select_n", lax.select_n, "bool[]", "f32[8,4]", "f32[8,4]")

# ---- shape

add("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 4), ()), "f32[]")
add("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 4, 6), (0, 2)), "f32[8,6]")
add("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (8, 4, 6), (0, 1, 2)), "f32[8,1,6]")
add("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, "int32"), "f32[8,4]")
add("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, "uint8"), "f32[8,4]")
add("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, "float32"), "u8[8,4]")
add("concatenate", lambda *x: lax.concatenate(x, 1), "f32[8,4]", "f32[8,2]")
add("concatenate", lambda *x: lax.concatenate(x, 0), "f32[8,4]", "f32[24,4]")
add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), "f32[8,4]", "i32[]")
add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (1, 4)), "f32[8,4]", "i32[]")
add("dynamic_slice", lambda x, i, j: lax.dynamic_slice(x, (i, j), (5, 2)), "bool[8,4]", np.uint8(9), "u8[]")
add("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i,), (3,)), "key[8]", "i32[]")
add("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[8,4]", "f32[2,4]", "i32[]")
add("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[8,4]", "f32[1,4]", "i32[]")
add("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "f32[8,4]", "f32[1,4]", np.int32(9))
add("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), "i8[24,4]", "i8[7,4]", "i32[]")
add("dynamic_update_slice", lambda x, u, i, j: lax.dynamic_update_slice(x, u, (i, j)), "f32[8,6]", "f32[3,5]", np.uint8(2), "u8[]")
add("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i,)), "key[8]", "key[3]", "i32[]")
add("iota", lambda: lax.iota("int32", 8))
add("iota", lambda: lax.broadcasted_iota("float32", (8, 4), 1))
add("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0))), "f32[8,4]")
add("pad", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, 0, 1))), "f32[8,4]")
add("pad", lambda x: lax.pad(x, 0.0, ((3, -3, 0), (0, 0, 0))), "f32[8,4]")
add("pad", lambda x: lax.pad(x, 0.0, ((-1, 2, 1), (0, 0, 0))), "f32[8,4]")
add("reshape", lambda x: x.reshape(8, 6), "f32[2,4,6]")
add("reshape", lambda x: x.reshape(2, 4, 6), "f32[8,6]")
add("reshape", lambda x: x.reshape(2, 4, 2, 3), "f32[8,6]")
add("reshape", lambda x: x.reshape(1, 8, 1, 4), "f32[8,4]")
add("reshape", lambda x: x.reshape(8, 10), "f32[16,5]")
add("reshape", lambda x: x.reshape(6, 4, 8), "f32[4,6,8]")
add("reshape", lambda x: x.reshape(1), "f32[]")
add("reshape", lambda x: lax.reshape(x, (8, x.size // 8), (2, 0, 1)), "f32[4,2,8]")
add("rev", lambda x: lax.rev(x, (1,)), "f32[8,4]")
add("slice", lambda x: lax.slice(x, (0, 1), (8, 3)), "f32[8,4]")
add("slice", lambda x: lax.slice(x, (0, 0), (8, 4), (1, 2)), "f32[8,4]")
add("slice", lambda x: lax.slice(x, (x.shape[0] // 4, 0), (x.shape[0] * 3 // 4, 4)), "f32[16,4]")
add("squeeze", lambda x: lax.squeeze(x, (1,)), "f32[8,1,4]")
add("stack", lambda *x: lax.stack(x, 1) if hasattr(lax, "stack") else jnp.stack(x, 1), "f32[8,4]", "f32[8,4]")
add("tile", lambda x: lax.tile(x, (1, 2)) if hasattr(lax, "tile") else jnp.tile(x, (1, 2)), "f32[8,4]")
add("transpose", lambda x: x.transpose(2, 0, 1), "f32[8,4,6]")
add("unstack", lambda x: lax.unstack(x, 1) if hasattr(lax, "unstack") else jnp.unstack(x, axis=1), "f32[8,4]")

# ---- reductions, cumulative ops, orderings

for _name in ("sum", "max", "min", "prod"):
    add(f"reduce_{_name}", lambda x, n=_name: getattr(jnp, n)(x, axis=1), "f32[8,4]")
add("reduce_sum", lambda x: x.sum((0, 2)), "f32[8,4,6]")
for _name in ("psum", "pmax", "pmin"):
    add(_name, jax.vmap(lambda x, n=_name: getattr(lax, n)(x, "rows"), axis_name="rows"), "f32[8,4]")
for _type in ("i16", "i4"):
    add("reduce_sum", lambda x: lax.reduce_sum(x, (1,)), f"{_type}[8,4]")
add("reduce_max", lambda x: x.max(), "i32[8,4]")
add("reduce_and", lambda x: x.all(0), "bool[8,4]")
add("reduce_or", lambda x: x.any(0), "bool[8,4]")
add("reduce_and", lambda x: lax.reduce_and(x, (1,)), "i32[8,4]")
add("reduce_or", lambda x: lax.reduce_or(x, (1,)), "u8[8,4]")
add("reduce_xor", lambda x: lax.reduce(x, np.int32(0), lax.bitwise_xor, (1,)), "i32[8,4]")
add("unvmap_any", equinox.internal.unvmap_any, "bool[8,4]")
add("unvmap_all", equinox.internal.unvmap_all, "bool[8]")
add("unvmap_max", equinox.internal.unvmap_max, "i32[8,4]")
add("argmax", lambda x: x.argmax(1), "f32[8,4]")
add("argmin", lambda x: x.argmin(1), "f32[8,4]")
add("reduce", lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (1,)), "f32[8,4]")
for _name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    add(_name, lambda x, n=_name: getattr(lax, n)(x, axis=1), "f32[8,4]")
    add(_name, lambda x, n=_name: getattr(lax, n)(x, axis=0, reverse=True), "bf16[8]")
for _name in ("cumsum", "cumprod", "cummax", "cummin"):
    add(_name, lambda x, n=_name: getattr(lax, n)(x, axis=0), "i8[24,2]")
    add(_name, lambda x, n=_name: getattr(lax, n)(x, axis=0), "c64[8]")
add("sort", lambda x: lax.sort(x, dimension=1), "f32[8,4]")
add("sort", lambda *x: lax.sort(x, dimension=0, num_keys=1), "f32[8,4]", "i32[8,4]")
add("top_k", lambda x: lax.top_k(x, 2), "f32[8,4]")
add("approx_top_k", lambda x: lax.approx_max_k(x, 2), "f32[8,4]")

# ---- products

add("dot_general", jnp.dot, "f32[8,4]", "f32[4,6]")
add("dot_general", jnp.dot, "f32[4]", "f32[4]")
add("dot_general", lambda x, y: jnp.einsum("bshd,bthd->bhst", x, y), "f32[4,8,2,6]", "f32[4,8,2,6]")
add("dot_general", lambda x, y: jnp.dot(x, y, preferred_element_type="float32"), "bf16[8,4]", "bf16[4,6]")
add("dot_general", lambda x, y: jnp.dot(x, y, preferred_element_type="int32"), "i8[8,4]", "i8[4,6]")
add("dot_general", lambda x, y: jnp.tensordot(x, y, 2), "c64[8,4,2]", "c64[4,2,6]")
add("dot_general", lambda x, y: lax.dot(x, y), "bool[8,4]", "bool[4,2]")
add(
    "scaled_dot",
    lambda x, y, *scales: lax.scaled_dot(x, y, lhs_scale=scales[0], rhs_scale=scales[1]),
    "bf16[8,16]",
    "bf16[16,6]",
    "bf16[8,4]",
    "bf16[8,6]",
)

_ragged, _rows = "ragged_dot_general", lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
add(_ragged, lambda x, y: lax.ragged_dot(x, y, jnp.array([3, 5], "int32")), "f32[8,4]", "f32[2,4,6]")
add(_ragged, lambda x, y: lax.ragged_dot(x, y, jnp.array([0, 2, 9, 0, 1, 0, 0, 3], "int32")), "f32[16,4]", "f32[8,4,6]")
add(_ragged, lambda x, y: lax.ragged_dot_general(x, y, jnp.array([0, 7, 0, 2], "int32"), _rows), "f32[16,4]", "f32[16,6]")


def conv(x, w, stride=(1, 1), padding: Any = "SAME", dims=("NHWC", "HWIO", "NHWC"), **kw):
    return lax.conv_general_dilated(x, w, stride, padding, dimension_numbers=dims, **kw)


_conv = "conv_general_dilated"
add(_conv, conv, "f32[4,6,6,8]", "f32[3,3,8,4]")
add(_conv, conv, "f32[4,6,6,8]", "f32[1,1,8,4]")
add(_conv, lambda x, w: conv(x, w, (2, 2), "VALID", ("NCHW", "OIHW", "NCHW")), "f32[4,8,6,6]", "f32[4,8,3,3]")
add(_conv, lambda x, w: conv(x, w, feature_group_count=8), "f32[4,6,6,8]", "f32[3,3,1,16]")
add(_conv, lambda x, w: conv(x, w, feature_group_count=2), "f32[4,6,6,8]", "f32[3,3,4,4]")
add(_conv, lambda x, w: conv(x, w, batch_group_count=2), "f32[4,6,6,8]", "f32[3,3,8,4]")
add(_conv, lambda x, w: conv(x, w, padding=((1, 2), (1, 2)), lhs_dilation=(2, 2)), "f32[4,6,6,8]", "f32[3,3,8,4]")
add(_conv, lambda x, w: conv(x, w, (2, 2)), "f32[2,8,16,2]", "f32[5,3,2,4]")
add(_conv, lambda x, w: conv(x, w, padding="VALID", rhs_dilation=(2, 1)), "f32[2,12,6,2]", "f32[3,3,2,4]")
_kernel = jax.ShapeDtypeStruct((3, 3, 2, 4), "float32")
add(_conv, lambda x, dy: jax.linear_transpose(lambda w: conv(x, w, (2, 1)), _kernel)(dy), "f32[2,48,24,2]", "f32[2,24,24,4]")

# ---- gather and scatter

ROWS = np.array([[5], [0], [9], [-1]], "int32")
POINTS = np.array([[5, 0], [0, 3], [9, 1], [2, -1]], "int32")
rows = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
points = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
windows = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
each = lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))

for _mode in ("clip", "fill"):
    add("gather", lambda x, i, m=_mode: lax.gather(x, i, rows, (1, 4), mode=m), "f32[8,4]", ROWS)
    add("gather", lambda x, i, m=_mode: lax.gather(x, i, points, (1, 1), mode=m), "f32[8,4]", POINTS)
add("gather", lambda x, i: lax.gather(x, i, rows, (1, 4), mode="promise_in_bounds"), "f32[8,4]", "i32[6,1]")
add("gather", lambda x, i: lax.gather(x, i, rows, (1, 2), mode="clip"), "f32[8,4]", ROWS)
add("gather", lambda x, i: lax.gather(x, i, windows, (1, 4), mode="clip"), "f32[8,4]", ROWS)
add("gather", lambda x, i: lax.gather(x, i, windows, (2, 4), mode="clip"), "f32[8,4]", ROWS)
add("gather", lambda x, i: lax.gather(x, i, each, (1, 1), mode="clip"), "f32[8,4]", "i32[8,6,1]")
add("gather", lambda x, i: x[i], "bool[8,4]", "i32[2,6]")
add("gather", lambda x, i: lax.gather(x, i, rows, (1, 4), mode="fill"), "f32[8,4]", np.array([[9]], "int8"))
add("gather", lambda x, i: lax.gather(x, i, rows, (1, 4), mode="clip"), "f32[8,4]", "i32[1,1]")
add("gather", lambda x, i: lax.gather(x, i, points, (1, 1), mode="fill"), "f32[8,4]", "u32[1,2]")
add("gather", lambda x, i: x[i], "key[8]", "i32[6]")
add("gather", lambda x, i: jnp.take_along_axis(x, i, 1), "f32[8,4]", "i32[8,1]")

srows = lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
spoints = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
swindows = lax.ScatterDimensionNumbers((1, 2), (), (0,))
seach = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))

for _name in ("", "_add", "_sub", "_mul", "_max", "_min"):
    _fn, _p = getattr(lax, f"scatter{_name}"), f"scatter{_name.replace('_', '-')}"
    add(_p, lambda x, i, u, f=_fn: f(x, i, u, srows, mode="clip"), "f32[8,4]", ROWS, "f32[4,4]")
    add(_p, lambda x, i, u, f=_fn: f(x, i, u, spoints, mode="fill"), "f32[8,4]", POINTS, "f32[4]")
    add(_p, lambda x, i, u, f=_fn: f(x, i, u, srows, mode="clip"), "f32[8,4]", ROWS[:1], "f32[1,4]")
add("scatter-add", lambda x, i, u: lax.scatter_add(x, i, u, srows, mode="clip"), "f32[8,4]", ROWS, "f32[4,2]")
add("scatter-add", lambda x, i, u: lax.scatter_add(x, i, u, swindows, mode="fill"), "f32[8,4]", ROWS, "f32[4,1,4]")
add("scatter-add", lambda x, i, u: lax.scatter_add(x, i, u, swindows, mode="clip"), "f32[8,4]", ROWS, "f32[4,2,4]")
add("scatter-add", lambda x, i, u: lax.scatter_add(x, i, u, seach, mode="fill"), "f32[8,4]", "i32[8,6,1]", "f32[8,6]")

# ---- windows

add("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), "f32[4,6,6,8]")
add("reduce_window_max", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1, 1), (1, 2, 1, 1), "SAME"), "f32[4,6,6,8]")
add("reduce_window_min", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 2), (1, 1), "SAME"), "f32[4,8]")
add("reduce_window_sum", lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (1,), ((4, 2),), (2,), (3,)), "f32[8]")
add("reduce_window_max", lambda x: lax.reduce_window(x, 0, lax.max, (7, 1), (2, 1), "SAME"), "i32[8,4]")
add("reduce_window", lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b + a * b, (1, 2), (1, 1), "SAME"), "f32[4,8]")
add(
    "reduce_window",
    lambda *x: lax.reduce_window(x, (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (3,), (1,), "SAME"),
    "f32[8]",
    "f32[8]",
)


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


add("select_and_scatter_add", jax.grad(lambda x: (max_pool(x) ** 2).sum()), "f32[4,6,6,8]")


def overlapping(x, stride):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3,), (stride,), "SAME")


add("select_and_scatter_add", jax.grad(lambda x: (overlapping(x, 2) ** 2).sum()), "f32[8]")
add("select_and_gather_add", lambda x: jax.jvp(lambda x: overlapping(x, 1), (x,), (x,))[1], "f32[8]")
add("select_and_gather_add", lambda x: jax.jvp(max_pool, (x,), (x,))[1], "f32[4,6,6,8]")

# ---- random numbers

_unchecked = partial(jax.random.wrap_key_data, impl="unsafe_rbg")

add("random_bits", lambda k: jax.random.bits(k, (8, 4)), "key[]")
add("random_bits", jax.vmap(lambda k: jax.random.bits(k, (4,))), "key[8]")
add("random_bits", lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="rbg"), (8, 4)), "u32[4]")
add("random_bits", jax.vmap(lambda k: jax.random.bits(jax.random.wrap_key_data(k, impl="rbg"), (8,))), "u32[8,4]")
add("random_clone", jax.random.clone, "key[8]")
add("random_fold_in", jax.random.fold_in, "key[]", "i32[]")
add("random_fold_in", jax.vmap(jax.random.fold_in), "key[8]", "i32[8]")
add("random_fold_in", jax.vmap(lambda k, i: jax.random.fold_in(_unchecked(k), i)), "u32[8,4]", "i32[8]")
add("random_gamma", jax.random.gamma, "key[]", "f32[4]")
add("random_gamma", jax.vmap(lambda k, a: jax.random.gamma(jax.random.wrap_key_data(k, impl="rbg"), a)), "u32[8,4]", "f32[8]")
add("random_seed", jax.vmap(jax.random.key), "i32[8]")
add("random_split", lambda k: jax.random.split(k, (4, 2)), "key[]")
add("random_split", jax.vmap(lambda k: jax.random.split(_unchecked(k), 8)), "u32[8,4]")
add("random_unwrap", jax.random.key_data, "key[8]")
add("random_wrap", jax.random.wrap_key_data, "u32[8,2]")
add("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 4)), "u32[4]")
add("rng_uniform", lambda: lax.rng_uniform(0.0, 1.0, (8, 4)))

# ---- linear algebra and transforms


def positive(x):
    return x @ x.mT + 4 * jnp.eye(x.shape[-1])


_square = "f32[4,6,6]"
add("cholesky_update", lax.linalg.cholesky_update, "f32[6,6]", "f32[6]")
add("cholesky", lambda x: lax.linalg.cholesky(positive(x)), _square)
add("eig", lax.linalg.eig, _square)
add("eigh", lambda x: lax.linalg.eigh(positive(x)), _square)
add("fft", jnp.fft.fft, "c64[8,4]")
add("fft", jnp.fft.rfft2, "f32[8,4,6]")
add("geqrf", lambda x: jnp.linalg.qr(x, mode="raw"), "f32[4,6,3]")
add("hessenberg", lax.linalg.hessenberg, _square)
add("householder_product", lax.linalg.householder_product, "f32[4,6,6]", "f32[4,6]")
add("lu", lax.linalg.lu, _square)
add("lu_pivots_to_permutation", lambda x: lax.linalg.lu_pivots_to_permutation(x, 6), "i32[8,4]")
add("ormqr", lax.linalg.ormqr, "f32[4,6,3]", "f32[4,3]", "f32[4,6,2]")
add("qr", lax.linalg.qr, "f32[4,6,3]")
add("schur", lax.linalg.schur, _square)
add("svd", lax.linalg.svd, "f32[4,6,3]")
add("symmetric_product", lax.linalg.symmetric_product, "f32[4,6,3]", "f32[4,6,6]")
add("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True), _square, "f32[4,6,8]")
add("triangular_solve", lambda a, b: lax.linalg.triangular_solve(a, b, left_side=False), _square, "f32[4,8,6]")
add("tridiagonal", lambda x: lax.linalg.tridiagonal(positive(x)), _square)
add("tridiagonal_solve", lax.linalg.tridiagonal_solve, "f32[4,6]", "f32[4,6]", "f32[4,6]", "f32[4,6,8]")


def scaled_by_kernel(x, y, *, grid, block, index, other):
    """x times y, block by block; `other` maps y's blocks."""

    def body(x, y, out):
        out[...] = x[...] * y[...]

    spec = pl.BlockSpec(block, index)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, shape, grid=grid, in_specs=[spec, pl.BlockSpec(*other)], out_specs=spec, interpret=True)(x, y)


HEADS = {"block": (None, None, 4), "grid": (2, 4), "index": lambda b, h: (b, h, 0)}
ROWS = {"block": (2, 4), "grid": (2, 3), "index": lambda i, j: (i, j)}
add("pallas_call", partial(scaled_by_kernel, **ROWS, other=((1, 4), lambda i, j: (0, j))), "f32[4,12]", "f32[1,12]")
add("pallas_call", partial(scaled_by_kernel, **HEADS, other=((None, None, 4), lambda b, h: (b, h // 2, 0))), "f32[2,4,4]", "f32[2,2,4]")

# ---- the table


def plain(rule: Rule) -> Rule:
    """The same rule with factors a, b, c, ... in order of appearance."""
    found = dict.fromkeys(a for dims in rule.operands + rule.results for d in dims for a in d)
    new = {old: f"{chr(97 + i % 26)}{i // 26 or ''}" for i, old in enumerate(found)}

    def tensors(side):
        return tuple(tuple(tuple(new[a] for a in d) for d in dims) for dims in side)

    reduce = {new[a]: k for a, k in rule.reduce.items()}
    halo = {new[a]: h for a, h in rule.halo.items()}
    arg_reduce = {new[a]: n for a, n in rule.arg_reduce.items()}
    return replace(
        rule,
        operands=tensors(rule.operands),
        results=tensors(rule.results),
        reduce=reduce,
        halo=halo,
        scan=frozenset(map(new.get, rule.scan)),
        arg_reduce=arg_reduce,
        head=frozenset(map(new.get, rule.head)),
        replicated=frozenset(map(new.get, rule.replicated)),
    )


def rules_table(examples: list[Example] | None = None) -> str:
    """One line per primitive and shape case, alphabetical: name, shapes, rule."""
    lines = set()
    for example in EXAMPLES if examples is None else examples:
        jaxpr = jax.make_jaxpr(example.fn)(*example.values()).jaxpr
        eqn = next((e for e in equations(jaxpr) if e.primitive.name == example.primitive), None)
        if eqn is not None:
            ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
            rule, _ = rule_for(example.primitive, ins, outs, eqn.params, strict=True)
            shapes = " -> ".join(", ".join(str(x.shape).replace(" ", "").replace(",)", ")") for x in side) for side in (ins, outs))
            lines.add((example.primitive, shapes, str(plain(rule))))
    widths = [max(len(line[i]) for line in lines) for i in range(2)]
    return "".join(f"{name:{widths[0]}}  {shapes:{widths[1]}}  {text}".rstrip() + "\n" for name, shapes, text in sorted(lines))
