"""What `one_gpu.py` puts on the clock: single ops by kind and size, and whole training steps that fit one GPU of 80 GB.

An op is a function of arrays; a step is (state, batch) -> (state, loss). Shapes only: nothing here allocates an array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F32, BF16, I32 = jnp.float32, jnp.bfloat16, jnp.int32
KIB, MIB = 1 << 10, 1 << 20


class OneOp(NamedTuple):
    """An op of its own, compiled alone.

    Attributes:
        name: kind, then what was varied.
        run: a function of arrays.
        shapes: of these arrays; integers are drawn below `below`.
        below: bound of integers.
    """

    name: str
    run: Callable
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    below: int = 2


class OneStep(NamedTuple):
    """A training step; integers of its batch are drawn below `below`."""

    name: str
    make: Callable[[], tuple[Callable, Any, Any]]
    below: int


def of(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def named(dtype) -> str:
    return jnp.dtype(dtype).name


def ops() -> Iterator[OneOp]:
    """All ops, quick ones first."""
    yield from elementwise()
    yield from reductions()
    yield from moves()
    yield from rows_by_index()
    yield from orders()
    yield from layers()
    yield from drawn_bits()
    yield from convolutions()
    yield from dots()
    yield from chains()
    yield from drawn_dots()
    yield from attention()
    yield from routing()
    yield from updates()


def adam(p, g, m, v):
    """The update of a parameter, and its moments; a gradient in 16 bits is widened first."""
    g = g.astype(F32)
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m * lax.rsqrt(jnp.abs(v) + 1e-8), m, v


def elementwise() -> Iterator[OneOp]:
    for dtype in (F32, BF16):
        for n in (1 << k for k in range(10, 29, 2)):
            yield OneOp(f"add {named(dtype)} {n}", lambda x, y: x + y, (of(dtype, n),) * 2)
    n = 1 << 26
    maps = {
        "exp": jnp.exp, "tanh": jnp.tanh, "gelu": jax.nn.gelu, "erf-gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "silu": jax.nn.silu, "log": lambda x: jnp.log(jnp.abs(x) + 1), "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 1), "sin": jnp.sin,
        "power": lambda x: jnp.abs(x) ** 1.7, "divide": lambda x: 1 / (2 + jnp.abs(x)),
        "relu": jax.nn.relu, "softplus": jax.nn.softplus,
    }  # fmt: skip
    for name, f in maps.items():
        for dtype in (F32, BF16):
            yield OneOp(f"map {name} {named(dtype)} {n}", f, (of(dtype, n),))
    yield OneOp(f"cast f32-bf16 {n}", lambda x: x.astype(BF16), (of(F32, n),))
    yield OneOp(f"cast bf16-f32 {n}", lambda x: x.astype(F32), (of(BF16, n),))
    yield OneOp(f"fill {n}", lambda x, n=n: jnp.full((n,), x[0]), (of(F32, 1),))
    yield OneOp("row-bias bf16 65536x4096", lambda x, b: x + b, (of(BF16, 65536, 4096), of(BF16, 4096)))
    yield OneOp("column-scale bf16 65536x4096", lambda x, b: x * b[:, None], (of(BF16, 65536, 4096), of(BF16, 65536)))
    yield OneOp("broadcast bf16 4096 to 65536x4096", lambda b: jnp.broadcast_to(b, (65536, 4096)) + 1, (of(BF16, 4096),))
    yield OneOp("scalar-add f32 1", lambda x: x + 1, (of(F32, 1),))

    for n in (1 << 16, 1 << 20, 1 << 24, 1 << 27):
        yield OneOp(f"adam f32 {n}", adam, (of(F32, n),) * 4)


def reductions() -> Iterator[OneOp]:
    for dtype in (F32, BF16):
        for rows, columns in (
            (1 << 20, 64),
            (1 << 16, 1024),
            (1 << 14, 4096),
            (1 << 12, 1 << 15),
            (64, 1 << 20),
            (256, 1024),
            (8192, 256),
        ):
            shape = of(dtype, rows, columns)
            yield OneOp(f"reduce-rows {named(dtype)} {rows}x{columns}", lambda x: x.astype(F32).sum(1), (shape,))
            yield OneOp(f"reduce-columns {named(dtype)} {rows}x{columns}", lambda x: x.astype(F32).sum(0), (shape,))
        yield OneOp(f"reduce-middle {named(dtype)} 64x1024x1024", lambda x: x.astype(F32).sum(1), (of(dtype, 64, 1024, 1024),))
        yield OneOp(f"reduce-all {named(dtype)} {1 << 26}", lambda x: x.astype(F32).sum(), (of(dtype, 1 << 26),))
        yield OneOp(f"reduce-max-rows {named(dtype)} 16384x4096", lambda x: x.max(1), (of(dtype, 1 << 14, 4096),))
        yield OneOp(f"reduce-image {named(dtype)} 64x56x56x256", lambda x: x.astype(F32).sum((0, 1, 2)), (of(dtype, 64, 56, 56, 256),))
    yield OneOp("argmax f32 16384x32768", lambda x: x.argmax(-1), (of(F32, 16384, 32768),))
    yield OneOp("norm-squares f32 67108864", lambda x: jnp.sqrt((x * x).sum()), (of(F32, 1 << 26),))


def moves() -> Iterator[OneOp]:
    for dtype in (F32, BF16):
        t = named(dtype)
        yield OneOp(f"transpose {t} 8192x8192", lambda x: x.T + 0, (of(dtype, 8192, 8192),))
        yield OneOp(f"transpose {t} 1024x65536", lambda x: x.T + 0, (of(dtype, 1024, 65536),))
        yield OneOp(f"transpose {t} 1048576x64", lambda x: x.T + 0, (of(dtype, 1 << 20, 64),))
        yield OneOp(f"transpose {t} 512x512", lambda x: x.T + 0, (of(dtype, 512, 512),))
        yield OneOp(f"heads bthd-bhtd {t} 16x2048x16x128", lambda x: x.transpose(0, 2, 1, 3) + 0, (of(dtype, 16, 2048, 16, 128),))
        yield OneOp(f"heads bthd-bhtd {t} 16x2048x32x64", lambda x: x.transpose(0, 2, 1, 3) + 0, (of(dtype, 16, 2048, 32, 64),))
        yield OneOp(f"heads bthd-bhdt {t} 16x2048x16x128", lambda x: x.transpose(0, 2, 3, 1) + 0, (of(dtype, 16, 2048, 16, 128),))
        yield OneOp(f"images nhwc-nchw {t} 64x56x56x256", lambda x: x.transpose(0, 3, 1, 2) + 0, (of(dtype, 64, 56, 56, 256),))
        yield OneOp(f"concatenate {t} 2x16384x2048", lambda x, y: jnp.concatenate([x, y], -1), (of(dtype, 16384, 2048),) * 2)
        yield OneOp(f"pad {t} 64x56x56x256", lambda x: jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (of(dtype, 64, 56, 56, 256),))
        yield OneOp(f"slice {t} 16384x4096", lambda x: x[:, 1024:3072] + 0, (of(dtype, 16384, 4096),))
        yield OneOp(f"strided-slice {t} 16384x4096", lambda x: x[:, ::2] + 0, (of(dtype, 16384, 4096),))
        yield OneOp(f"reverse {t} 16384x4096", lambda x: x[:, ::-1] + 0, (of(dtype, 16384, 4096),))
        yield OneOp(f"roll {t} 16384x4096", lambda x: jnp.roll(x, 1, 1), (of(dtype, 16384, 4096),))
        yield OneOp(f"repeat {t} 64x32x32x256", lambda x: x.repeat(2, 1).repeat(2, 2), (of(dtype, 64, 32, 32, 256),))
        yield OneOp(f"split-halves {t} 16384x8192", lambda x: tuple(y + 0 for y in jnp.split(x, 2, -1)), (of(dtype, 16384, 8192),))


def rows_by_index() -> Iterator[OneOp]:
    """Gathers and scatters of rows: by rows' width, by how many, by how often the same is met."""

    def lookup(table, at):
        return table[at]

    def scattered(x, at, *, rows):
        return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[at].add(x)

    def set_(x, at, *, rows):
        return jnp.zeros((rows, *x.shape[1:]), x.dtype).at[at].set(x)

    def once(at, rows):
        return (at * 7919) % rows  # spread over the table

    for dtype in (F32, BF16):
        t = named(dtype)
        for width, n, rows in (
            (1, 1 << 20, 1 << 20), (8, 1 << 20, 1 << 20), (64, 1 << 20, 1 << 20), (128, 1 << 18, 1 << 22), (128, 1 << 20, 1 << 14),
            (1024, 1 << 14, 50304), (1024, 1 << 16, 50304), (4096, 1 << 14, 128256), (1024, 1 << 10, 50304),
        ):  # fmt: skip
            name, at = f"{t} {n} of {rows}x{width}", of(I32, n)
            yield OneOp(f"gather {name}", lookup, (of(dtype, rows, width), at), rows)
            yield OneOp(f"scatter-add {name}", lambda x, at, rows=rows: scattered(x, at, rows=rows), (of(dtype, n, width), at), rows)
        name, at = f"{t} {1 << 16} of {1 << 20}x128", of(I32, 1 << 16)
        yield OneOp(f"scatter-set {name}", lambda x, at: set_(x, at, rows=1 << 20), (of(dtype, 1 << 16, 128), at), 1 << 20)
        yield OneOp(
            f"scatter-few {t} {1 << 18} of 64x128", lambda x, at: scattered(x, at, rows=64), (of(dtype, 1 << 18, 128), at_n(18)), 64
        )
        yield OneOp(
            f"gather-take-along {t} 16384x32768",
            lambda x, at: jnp.take_along_axis(x, at[:, None], 1),
            (of(dtype, 16384, 32768), of(I32, 16384)),
            32768,
        )
        yield OneOp(
            f"segment-sum-sorted {t} 1048576x64 to 65536",
            lambda x, at: jax.ops.segment_sum(x, jnp.sort(at), 65536, indices_are_sorted=True),
            (of(dtype, 1 << 20, 64), of(I32, 1 << 20)),
            65536,
        )
    yield OneOp("one-hot 65536x1024", lambda at: jax.nn.one_hot(at, 1024, dtype=BF16), (of(I32, 65536),), 1024)
    yield OneOp(
        "dynamic-slice f32", lambda x, at: lax.dynamic_slice(x, (at[0], 0), (4096, 4096)) + 0, (of(F32, 16384, 4096), of(I32, 1)), 8
    )
    yield OneOp(
        "dynamic-update-slice f32",
        lambda x, y, at: lax.dynamic_update_slice(x, y, (at[0], 0)),
        (of(F32, 16384, 4096), of(F32, 1024, 4096), of(I32, 1)),
        8,
    )


def at_n(bits: int) -> jax.ShapeDtypeStruct:
    return of(I32, 1 << bits)


def orders() -> Iterator[OneOp]:
    for n in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        yield OneOp(f"sort f32 {n}", jnp.sort, (of(F32, n),))
    yield OneOp("sort-rows f32 4096x1024", jnp.sort, (of(F32, 4096, 1024),))
    yield OneOp("argsort i32 65536", jnp.argsort, (of(I32, 65536),), 64)
    yield OneOp("argsort i32 1048576", jnp.argsort, (of(I32, 1 << 20),), 64)
    yield OneOp("top-k f32 16384x64 2", lambda x: lax.top_k(x, 2), (of(F32, 16384, 64),))
    yield OneOp("top-k f32 4096x65536 8", lambda x: lax.top_k(x, 8), (of(F32, 4096, 65536),))
    for dtype in (F32, BF16):
        yield OneOp(f"cumsum-rows {named(dtype)} 16384x4096", lambda x: jnp.cumsum(x, 1), (of(dtype, 16384, 4096),))
        yield OneOp(f"cumsum-columns {named(dtype)} 4096x16384", lambda x: jnp.cumsum(x, 0), (of(dtype, 4096, 16384),))
        yield OneOp(f"cumsum {named(dtype)} 1048576", jnp.cumsum, (of(dtype, 1 << 20),))
    yield OneOp(
        "associative-scan f32 64x2048x256",
        lambda a, b: lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, b), axis=1),
        (of(F32, 64, 2048, 256),) * 2,
    )
    yield OneOp("scan-tiny 256 rounds", lambda x: lax.scan(lambda c, _: (jnp.tanh(c) * 0.9, None), x, None, 256)[0], (of(F32, 64, 64),))
    yield OneOp("scan-stacked 256 rounds", lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c), x[0], x), (of(F32, 256, 256, 1024),))
    yield OneOp("fft c64 256x65536", lambda x: jnp.abs(jnp.fft.fft(x)), (of(F32, 256, 65536),))
    yield OneOp(
        "cholesky f32 16x1024", lambda x: jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + 2048 * jnp.eye(1024)), (of(F32, 16, 1024, 1024),)
    )


def gradient(f: Callable) -> Callable:
    """The op's backward pass for a gradient as the last argument."""

    def run(*args):
        *ins, g = args
        y, pull = jax.vjp(f, *ins)
        return pull(g.astype(y.dtype))

    return run


def layers() -> Iterator[OneOp]:
    """Norms, softmax and losses: several kernels each."""

    def layer_norm(x, scale, bias):
        y = x.astype(F32)
        y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
        return (y * scale + bias).astype(x.dtype)

    def rms_norm(x, scale):
        y = x.astype(F32)
        return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def batch_norm(x, scale, bias):
        y = x.astype(F32)
        mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        return ((y - mean) * lax.rsqrt(square - mean * mean + 1e-5) * scale + bias).astype(x.dtype)

    def softmax(x):
        return jax.nn.softmax(x.astype(F32), -1).astype(x.dtype)

    def loss(x, at):
        logits = x.astype(F32)
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, at[:, None], -1)[:, 0]).mean()

    for dtype in (F32, BF16):
        t = named(dtype)
        for rows, width in ((16384, 768), (16384, 4096), (65536, 1024), (1024, 1024)):
            x, p = of(dtype, rows, width), of(F32, width)
            yield OneOp(f"layer-norm {t} {rows}x{width}", layer_norm, (x, p, p))
            yield OneOp(f"layer-norm-backward {t} {rows}x{width}", gradient(layer_norm), (x, p, p, x))
            yield OneOp(f"rms-norm {t} {rows}x{width}", rms_norm, (x, p))
            yield OneOp(f"rms-norm-backward {t} {rows}x{width}", gradient(rms_norm), (x, p, x))
        x, p = of(dtype, 64, 56, 56, 256), of(F32, 256)
        yield OneOp(f"batch-norm {t} 64x56x56x256", batch_norm, (x, p, p))
        yield OneOp(f"batch-norm-backward {t} 64x56x56x256", gradient(batch_norm), (x, p, p, x))
        for rows, width in ((1 << 17, 512), (1 << 17, 1024), (1 << 15, 4096)):
            x = of(dtype, rows, width)
            yield OneOp(f"softmax {t} {rows}x{width}", softmax, (x,))
            yield OneOp(f"softmax-backward {t} {rows}x{width}", gradient(softmax), (x, x))
        for rows, classes in ((8192, 50304), (16384, 32768), (65536, 1000)):
            args = (of(dtype, rows, classes), of(I32, rows))
            yield OneOp(f"cross-entropy {t} {rows}x{classes}", loss, args, 1000)
            yield OneOp(f"cross-entropy-gradient {t} {rows}x{classes}", jax.value_and_grad(loss), args, 1000)
        x = of(dtype, 128, 112, 112, 64)

        def pool(x):
            return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

        yield OneOp(f"max-pool {t} 128x112x112x64", pool, (x,))
        yield OneOp(f"max-pool-backward {t} 128x112x112x64", gradient(pool), (x, of(dtype, 128, 56, 56, 64)))


def drawn_bits() -> Iterator[OneOp]:
    for n in (1 << 16, 1 << 22, 1 << 26):
        yield OneOp(f"random-bits {n}", lambda x, n=n: jax.random.bits(jax.random.key(x[0]), (n,)), (of(I32, 1),))
    n = 1 << 26
    yield OneOp(f"random-normal {n}", lambda x: jax.random.normal(jax.random.key(x[0]), (n,)), (of(I32, 1),))
    yield OneOp(
        f"dropout bf16 {n}",
        lambda x, k: jnp.where(jax.random.bernoulli(jax.random.key(k[0]), 0.9, (n,)), x / 0.9, 0),
        (of(BF16, n), of(I32, 1)),
    )


def convolutions() -> Iterator[OneOp]:
    """Forward, and both gradients: by the image, by the kernel."""
    shapes = (  # batch, side, channels in, out, window, stride
        (128, 224, 3, 64, 7, 2), (128, 56, 64, 64, 3, 1), (128, 56, 64, 256, 1, 1), (128, 28, 128, 128, 3, 1),
        (128, 28, 512, 128, 1, 1),
        (128, 14, 256, 256, 3, 1), (128, 14, 1024, 512, 1, 2), (128, 7, 512, 512, 3, 1), (128, 56, 128, 128, 3, 2),
        (32, 64, 256, 256, 3, 1),
        (32, 64, 100, 200, 3, 1), (8, 16, 1280, 1280, 3, 1),
    )  # fmt: skip
    for b, side, m, n, k, stride in shapes:
        for dtype in (BF16, F32):

            def conv(x, w, stride=stride):
                return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

            name = f"{named(dtype)} {b}x{side}x{side}x{m}-{n} {k}x{k}/{stride}"
            x, w, y = of(dtype, b, side, side, m), of(dtype, k, k, m, n), of(dtype, b, side // stride, side // stride, n)
            yield OneOp(f"conv {name}", conv, (x, w))
            if dtype == BF16:
                yield OneOp(
                    f"conv-image {name}",
                    lambda w, g, x=x, f=conv: jax.vjp(lambda x: f(x, w), jnp.zeros(x.shape, x.dtype))[1](g),
                    (w, y),
                )
                yield OneOp(
                    f"conv-kernel {name}",
                    lambda x, g, w=w, f=conv: jax.vjp(lambda w: f(x, w), jnp.zeros(w.shape, w.dtype))[1](g),
                    (x, y),
                )

    def depthwise(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=256)

    yield OneOp("conv-depthwise bfloat16 64x56x56x256 7x7", depthwise, (of(BF16, 64, 56, 56, 256), of(BF16, 7, 7, 1, 256)))

    def along(x, w):
        return lax.conv_general_dilated(x, w, (1,), ((3, 0),), dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=2048)

    yield OneOp("conv-causal bfloat16 8x2048x2048 4", along, (of(BF16, 8, 2048, 2048), of(BF16, 4, 1, 2048)))


def dots() -> Iterator[OneOp]:
    """Products by dtype, and with what XLA fuses into them."""
    shapes = (
        (1, 16384, 768, 768), (1, 16384, 3072, 768), (1, 16384, 768, 3072), (1, 16384, 50304, 768), (1, 768, 768, 16384),
        (1, 8192, 4096, 4096), (1, 8192, 14336, 4096), (1, 4096, 4096, 8192), (1, 2048, 32768, 8192), (192, 1024, 1024, 64),
        (192, 1024, 64, 1024), (1, 1000, 1000, 1000), (1, 256, 8192, 2048), (1, 65536, 64, 256),
    )  # fmt: skip
    for b, m, n, k in shapes:
        name, x, w = f"{b}x{m}x{n}x{k}", (b, m, k), (b, k, n)

        def dot(x, w, dtype=BF16):
            return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=dtype)

        yield OneOp(f"dot bfloat16 {name}", dot, (of(BF16, *x), of(BF16, *w)))
        yield OneOp(f"dot tf32 {name}", lambda x, w, f=dot: f(x, w, F32), (of(F32, *x), of(F32, *w)))
        if (m, k) in ((16384, 768), (8192, 4096), (16384, 3072)):
            yield OneOp(f"dot bfloat16-float32 {name}", lambda x, w, f=dot: f(x, w, F32), (of(BF16, *x), of(BF16, *w)))
            yield OneOp(f"dot-cast-weight {name}", lambda x, w, f=dot: f(x, w.astype(BF16)), (of(BF16, *x), of(F32, *w)))
            yield OneOp(
                f"dot-bias-gelu {name}", lambda x, w, c, f=dot: jax.nn.gelu(f(x, w) + c), (of(BF16, *x), of(BF16, *w), of(BF16, n))
            )
            yield OneOp(f"dot-transposed {name}", lambda x, w: jnp.einsum("bmk,bnk->bmn", x, w), (of(BF16, *x), of(BF16, b, n, k)))
            yield OneOp(f"dot-left-transposed {name}", lambda x, w: jnp.einsum("bkm,bkn->bmn", x, w), (of(BF16, b, k, m), of(BF16, *w)))
    heads = of(BF16, 16, 1024, 12, 64)
    yield OneOp("attention-scores 16x1024x12x64", lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), (heads, heads))
    yield OneOp("attention-plain 16x1024x12x64", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), (heads,) * 3)
    yield OneOp(
        "attention-plain-backward 16x1024x12x64",
        gradient(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)),
        (heads,) * 4,
    )
    for shape in ((16, 1024, 12, 64), (4, 4096, 16, 128), (1, 16384, 16, 128)):
        for causal in (True, False):
            name = f"{'x'.join(map(str, shape))} {'causal' if causal else 'full'}"

            def fused(q, k, v, causal=causal):
                return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

            yield OneOp(f"attention-cudnn {name}", fused, (of(BF16, *shape),) * 3)
            yield OneOp(f"attention-cudnn-backward {name}", gradient(fused), (of(BF16, *shape),) * 4)
    ragged = (of(BF16, 16384, 1024), of(BF16, 8, 1024, 4096))
    yield OneOp("ragged-dot 8 groups 16384x4096x1024", lambda x, w: lax.ragged_dot(x, w, jnp.full((8,), 2048, I32)), ragged)
    yield OneOp(
        "ragged-dot-backward 8 groups 16384x4096x1024",
        gradient(lambda x, w: lax.ragged_dot(x, w, jnp.full((8,), 2048, I32))),
        (*ragged, of(BF16, 16384, 4096)),
    )


def chains() -> Iterator[OneOp]:
    """What goes on behind a product, and what goes before it: in its kernel or in one of its own."""
    after: dict[str, Callable] = {
        "tanh": lambda y, s: jnp.tanh(y), "relu-bias": lambda y, s: jax.nn.relu(y + s), "gelu": lambda y, s: jax.nn.gelu(y),
        "scale": lambda y, s: y * s, "transposed": lambda y, s: y.swapaxes(1, 2) + 0, "cast": lambda y, s: jnp.tanh(y.astype(F32)),
    }  # fmt: skip
    before: dict[str, Callable] = {
        "clamp": lambda x, s: jnp.clip(x, 0.005, 0.015), "gelu": lambda x, s: jax.nn.gelu(x), "scale": lambda x, s: x * s,
    }  # fmt: skip
    for b, m, n, k in ((1, 8192, 4096, 4096), (1, 16384, 768, 768), (1, 1024, 1024, 1024), (16, 1024, 1024, 64)):
        for dtype in (BF16, F32):
            name, x, w = f"{named(dtype)} {b}x{m}x{n}x{k}", of(dtype, b, m, k), of(dtype, b, k, n)
            for what, f in after.items():
                if dtype == BF16 or what != "cast":
                    yield OneOp(f"chain dot-{what} {name}", lambda x, w, s, f=f: f(x @ w, s), (x, w, of(dtype, n)))
            for what, f in before.items():
                yield OneOp(f"chain {what}-dot {name}", lambda x, w, s, f=f: f(x, s) @ w, (x, w, of(dtype, k)))
    x, w = of(BF16, 8192, 4096), of(BF16, 4096, 4096)
    yield OneOp("chain dot-residual 8192x4096x4096", lambda x, w: x + x @ w, (x, w))
    yield OneOp("chain dots-gated 8192x4096x4096", lambda x, w, v: jax.nn.silu(x @ w) * (x @ v), (x, w, w))


def drawn_dots() -> Iterator[OneOp]:
    """Products of drawn sizes, of some 1 GFLOP to 2 TFLOP: four of five have dims of multiples of 64, the others of any size."""
    rng = np.random.default_rng(0)
    for dtype, count in ((BF16, 40), (F32, 20)):
        for _ in range(count):
            b = int(2 ** rng.integers(0, 5)) if rng.random() < 0.25 else 1
            while True:
                m, n, k = (int(2 ** rng.uniform(6, 14.5)) for _ in range(3))
                if 1e9 < 2 * b * m * n * k < 2e12:
                    break
            if rng.random() < 0.8:
                m, n, k = (-(-size // 64) * 64 for size in (m, n, k))
            name = f"dot-drawn {named(dtype)} {b}x{m}x{n}x{k}"
            yield OneOp(name, lambda x, w: x @ w, (of(dtype, b, m, k), of(dtype, b, k, n)))


def attention() -> Iterator[OneOp]:
    """cuDNN's attention: short and long, wide and narrow heads, grouped queries, biases."""
    shapes = (  # batch, tokens, heads, elements of a head, heads of keys
        (32, 512, 16, 64, 16), (128, 128, 12, 64, 12), (8, 2048, 32, 128, 8), (2, 8192, 32, 128, 8), (4, 2048, 8, 256, 8),
        (16, 1024, 16, 80, 16),
    )  # fmt: skip
    for b, t, h, d, groups in shapes:
        q, k = of(BF16, b, t, h, d), of(BF16, b, t, groups, d)
        for causal in (True, False):

            def fused(q, k, v, causal=causal):
                return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

            name = f"{b}x{t}x{h}x{d} of {groups} {'causal' if causal else 'full'}"
            yield OneOp(f"attention-cudnn {name}", fused, (q, k, k))
            yield OneOp(f"attention-cudnn-backward {name}", gradient(fused), (q, k, k, q))
    q = of(BF16, 8, 1024, 12, 64)

    def biased(q, k, v, bias):
        return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn")

    yield OneOp("attention-cudnn-bias 8x1024x12x64", biased, (q, q, q, of(BF16, 8, 12, 1024, 1024)))


def routing() -> Iterator[OneOp]:
    """What experts and graphs do: sorts, top-k, counts, narrow rows."""
    for rows, columns in ((1, 1 << 14), (1, 1 << 18), (1, 1 << 22), (8192, 64), (1024, 4096)):
        yield OneOp(f"argsort-rows f32 {rows}x{columns}", lambda x: jnp.argsort(x, -1), (of(F32, rows, columns),))
        yield OneOp(
            f"sort-pairs i32 {rows}x{columns}", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1),
            (of(I32, rows, columns), of(F32, rows, columns)), 64,
        )  # fmt: skip
    for rows, columns, k in ((8192, 128, 2), (65536, 64, 8), (1024, 32768, 50), (64, 128256, 1)):
        for dtype in (F32, BF16):
            yield OneOp(f"top-k {named(dtype)} {rows}x{columns} {k}", lambda x, k=k: lax.top_k(x, k), (of(dtype, rows, columns),))
    for rows, columns in ((131072, 8), (16384, 64), (4096, 4096)):
        for dtype in (I32, F32):
            yield OneOp(f"cumsum-columns {named(dtype)} {rows}x{columns}", lambda x: jnp.cumsum(x, 0), (of(dtype, rows, columns),))
            yield OneOp(f"cumsum-rows {named(dtype)} {rows}x{columns}", lambda x: jnp.cumsum(x, 1), (of(dtype, rows, columns),))
    for n, rows, width in ((1 << 17, 1 << 10, 16), (1 << 20, 1 << 16, 16), (1 << 17, 1 << 15, 128), (1 << 14, 1 << 17, 1024)):
        at = of(I32, n)
        yield OneOp(
            f"segment-sum f32 {n}x{width} to {rows}",
            lambda x, at, rows=rows: jax.ops.segment_sum(x, at, rows),
            (of(F32, n, width), at),
            rows,
        )
        yield OneOp(f"take f32 {n} of {rows}x{width}", lambda x, at: jnp.take(x, at, axis=0), (of(F32, rows, width), at), rows)
    yield OneOp("counts 1048576 in 64", lambda at: jnp.bincount(at, length=64), (of(I32, 1 << 20),), 64)


def updates() -> Iterator[OneOp]:
    """Optimizers' kernels."""

    def mixed(p, g, m, v):
        p, m, v = adam(p, g, m, v)
        return p, m, v, p.astype(BF16)

    def lion(p, g, m):
        return p - 1e-3 * jnp.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g

    def factored(p, g, row, column):
        square = g * g + 1e-30
        row, column = 0.99 * row + 0.01 * square.mean(1), 0.99 * column + 0.01 * square.mean(0)
        return p - 1e-3 * g * lax.rsqrt(row / row.mean())[:, None] * lax.rsqrt(column)[None], row, column

    n = 1 << 26
    p, g = of(F32, n), of(BF16, n)
    yield OneOp(f"update adam-bf16-gradient {n}", adam, (p, g, p, p))
    yield OneOp(f"update adam-mixed {n}", mixed, (p, g, p, p))
    yield OneOp(f"update lion {n}", lion, (p, p, p))
    yield OneOp("update factored 8192x8192", factored, (of(F32, 8192, 8192), of(F32, 8192, 8192), of(F32, 8192), of(F32, 8192)))
    for count, size in ((100, 1 << 10), (100, 1 << 18)):
        many = (of(F32, size),) * count
        yield OneOp(f"update adam {count} x {size}", lambda *xs, n=count: [adam(*xs[i::n]) for i in range(n)], many * 4)
        yield OneOp(f"update norm-of {count} x {size}", lambda *xs: jnp.sqrt(sum((x * x).sum() for x in xs)), many)


# ---- whole steps


def steps() -> Iterator[OneStep]:
    """Whole training steps, those first that are most like people's."""
    import drawn_programs
    import nets
    import zoo

    def drawn(seed: int) -> OneStep:
        def make():
            p = drawn_programs.draw(seed, "small")
            return p.step, p.state, p.batch

        return OneStep(f"drawn-{seed}", make, 64)

    yield OneStep("gpt2", lambda: zoo.gpt2(batch=16), 50257)
    yield OneStep("llama-8b-2-layers", lambda: zoo.llama("8b", batch=4, seq=2048, layers=2), 128256)
    yield OneStep("gpt2-fused", lambda: zoo.gpt2(batch=16, attend=zoo.cudnn_attention), 50257)
    yield OneStep("resnet-50", lambda: nets.resnet(batch=128), 1000)
    yield OneStep(
        "moe", lambda: zoo.example("moe", layers=4, width=1024, heads=16, hidden=4096, length=512, batch=16, vocab=32768), 32768
    )
    yield OneStep("vit-l", lambda: nets.vit(batch=64), 1000)
    yield OneStep("dlrm", lambda: zoo.example("dlrm", tables=(1 << 20, 1 << 18, 1 << 16, 1024, 64), width=128, batch=1 << 14), 64)
    yield OneStep("unet", lambda: nets.unet(batch=32), 2)
    yield OneStep("classes", lambda: zoo.classifier(1 << 17), 1 << 17)
    yield drawn(703)
    yield OneStep("mamba", lambda: nets.mamba(layers=2, batch=16), 32768)
    yield OneStep("lstm", lambda: nets.lstm(batch=64), 32768)
    yield OneStep("gpt2-small-batch", lambda: zoo.gpt2(batch=2, seq=256), 50257)
    yield OneStep("llama-1b-scan", lambda: zoo.llama("1b", batch=4, seq=2048, layers=4), 128256)
    for seed in (700, 1202, 706, 1303, 901, 904, 1311, 903):
        yield drawn(seed)
