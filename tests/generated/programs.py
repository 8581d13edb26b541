"""Drawn calls of linear algebra, random numbers, loops and branches, and of gradients of other calls."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from hypothesis import assume
from hypothesis import strategies as st
from jax import lax

from .draw import CASES, SIZES, SMALL, array, keys, made, one_of, shape_of


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
