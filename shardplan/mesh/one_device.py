"""The rates of one GPU by shape, measured here: products, attention kernels, memory, the optimizer's update.

    python -m shardplan.mesh.calibrate --one-gpu --out gpu.json     some minutes; then auto(mesh, cluster="gpu.json")

Products and attention are fitted as published ones are (`fit_rates.py`), so shapes that were not measured have prices, too. What a step
at the power limit keeps of the rates is that of the largest product after `SUSTAINED_S` seconds of nothing else. Links are those of the
preset of the GPU: one GPU says nothing of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.mesh.cluster import Cluster
from shardplan.mesh.device import AttentionRate, Device, ProductRate
from shardplan.mesh.fit_rates import ATTENTION, CONSTANTS, START, attention_rates, fit_products, least_errors, residuals
from shardplan.mesh.rates import Attention, attention_rate

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "float8": jnp.float8_e4m3fn}
"""Dtype of a device's rates -> that of the operands. float32 is measured as JAX multiplies it by default: in TF32."""
SUSTAINED_S = 4.0
OPTIMIZER_ARRAYS = 7
"""Arrays that the update of adam reads and writes: weight, gradient and two moments; all but the gradient again."""


class Clock(Protocol):
    """Times ops on one device."""

    def __call__(self, op: Callable, arrays: tuple[Any, ...], effort_s: float | None = None) -> float:
        """Seconds of one run of `op(*arrays)`; after `effort_s` seconds of nothing else, where given."""
        ...


Progress = Callable[[Iterable[str]], Iterator[str]]


@dataclass(frozen=True)
class Shapes:
    """What is measured.

    Attributes:
        products: [batch, rows, columns, contracted].
        heads: elements of a head.
        keys: tokens of a sequence.
        tokens: of all sequences of an attention kernel together.
        width: elements of all heads together.
        elements: of each array of the optimizer's update.
    """

    products: tuple[tuple[int, int, int, int], ...]
    heads: tuple[int, ...]
    keys: tuple[int, ...]
    tokens: int
    width: int
    elements: int


SHAPES = Shapes(
    products=(
        *((1, n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)),
        *((1, 8192, n, 8192) for n in (64, 256, 1024)),
        *((1, 8192, 8192, n) for n in (64, 256, 1024)),
        (1, 1000, 3000, 5000), (4, 2048, 2048, 2048), (32, 512, 512, 128), (1, 16384, 4096, 4096),
    ),
    heads=(64, 128),
    keys=(512, 2048, 8192),
    tokens=16384,
    width=2048,
    elements=1 << 26,
)  # fmt: skip


def measured(base: Cluster, clock: Clock, launch_s: float, shapes: Shapes = SHAPES, progress: Progress = iter) -> Cluster:
    """The cluster `base`, with the rates of its device as measured here.

    Args:
        base: preset of the GPU: peaks, multiprocessors, links.
        clock: times ops on the one device.
        launch_s: least seconds of a kernel.
        shapes: what is measured.
        progress: goes through the names of the measurements and shows how far they are.
    """
    device = base.device
    jobs: dict[str, Callable[[], float]] = {"memory, optimizer": lambda: update_rate(clock, shapes.elements)}
    for dtype, sizes in itertools.product(DTYPES, shapes.products):
        if dtype in device.flops:
            jobs[f"product, {dtype}, {sizes}"] = lambda dtype=dtype, sizes=sizes: product_s(clock, dtype, sizes)
    largest = max(shapes.products, key=math.prod)
    jobs["product at the power limit"] = lambda: product_s(clock, "bfloat16", largest, SUSTAINED_S)
    kernels = [
        Attention(*x) for x in itertools.product(shapes.heads, shapes.keys, (False, True), (False, True)) if x[1] <= shapes.tokens
    ]
    for of in kernels:
        jobs[f"attention, {of}"] = lambda of=of: attention_s(clock, of, shapes)
    found = {name: jobs[name]() for name in progress(jobs)}

    memory_rate = min(found["memory, optimizer"], device.bytes_per_s)
    kept = found[f"product, bfloat16, {largest}"] / found["product at the power limit"]
    sustained = {"sustained": round(min(1.0, kept), 4), "source": "measured by shardplan.mesh.calibrate --one-gpu"}
    products: dict[str, ProductRate] = {}
    for dtype in DTYPES:
        seconds = [found[name] for sizes in shapes.products if (name := f"product, {dtype}, {sizes}") in found]
        if seconds:
            of = {"peak": device.peak(dtype), "multiprocessors": device.sms, "memory_rate": memory_rate, "itemsize": _itemsize(dtype)}
            start = replace(products.get("bfloat16", START), rows=0, source="")
            products[dtype] = fit_products(start, CONSTANTS, np.array(shapes.products, float), np.array(seconds), **of)
    return replace(
        base,
        name=f"measured {base.name}",
        device=replace(
            device,
            bytes_efficiency=memory_rate / device.bytes_per_s,
            kernel_latency_s=launch_s,
            products={dtype: replace(rate, **sustained) for dtype, rate in products.items()},
            attention=_attention(device, {of: found[f"attention, {of}"] for of in kernels}, shapes, sustained) or device.attention,
        ),
        source=f"device: measured by shardplan.mesh.calibrate --one-gpu, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. {base.source}",
        device_kinds=(),
    )


# ---- measurements


def product_s(clock: Clock, dtype: str, sizes: tuple[int, int, int, int], effort_s: float | None = None) -> float:
    """Seconds of one product."""
    b, m, n, k = sizes
    to = jnp.bfloat16 if dtype == "float8" else DTYPES[dtype]
    x, w = (_drawn((b, *shape), DTYPES[dtype]) for shape in ((m, k), (k, n)))
    dims = (((2,), (1,)), ((0,), (0,)))

    def product(x, w):
        return jax.lax.dot_general(x, w, dims, preferred_element_type=to)

    return clock(product, (x, w), effort_s)


def attention_s(clock: Clock, of: Attention, shapes: Shapes) -> float:
    """Seconds of cuDNN's forward kernel, for `backward` of both; NaN where they do not run."""
    batch, heads = shapes.tokens // of.keys, max(1, shapes.width // of.head_size)
    q, k, v, out = (_drawn((batch, of.keys, heads, of.head_size), jnp.bfloat16) for _ in range(4))

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=of.causal, implementation="cudnn")

    def both(q, k, v, out):
        attended, pull = jax.vjp(attend, q, k, v)
        return attended, pull(out)

    try:
        return clock(both, (q, k, v, out)) if of.backward else clock(attend, (q, k, v))
    except Exception:  # no cuDNN here, a head that it does not take: whatever it is, this GPU has no such kernel
        return math.nan


def update_rate(clock: Clock, elements: int) -> float:
    """Bytes per second that the update of adam reads and writes."""
    arrays = tuple(_drawn((elements,), np.float32) for _ in range(4))

    def update(p, g, m, v):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 1e-3 * m * jax.lax.rsqrt(v + 1e-8), m, v

    return OPTIMIZER_ARRAYS * 4 * elements / clock(update, arrays)


def _drawn(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Random values: zeros take less power, and so run faster than a step's."""
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def _itemsize(dtype: str) -> float:
    return float(np.dtype(DTYPES[dtype]).itemsize)


def _attention(device: Device, seconds: dict[Attention, float], shapes: Shapes, sustained: dict) -> dict[str, AttentionRate]:
    """The rates of attention kernels; none if none ran."""
    ahead = {of: seconds[of._replace(backward=False)] if of.backward else 0.0 for of in seconds}  # a part of both kernels' time
    ran = {of: t - ahead[of] for of, t in seconds.items() if t > ahead[of]}
    if not ran:
        return {}
    heads = sorted({float(of.head_size) for of in ran})
    peak = device.peak("bfloat16")
    reached = np.array([_flops(of, shapes) / t for of, t in ran.items()])

    def rates(constants) -> Device:
        return replace(device, attention=attention_rates(ATTENTION | constants, heads))

    def errors(constants) -> np.ndarray:
        found = rates(constants)
        return np.log(reached / [attention_rate(found, "bfloat16", of) for of in ran])

    constants, off = least_errors({f"{head:g}": reached.max() / peak for head in heads} | ATTENTION, errors)
    return {way: replace(x, **residuals(off), **sustained) for way, x in rates(constants).attention.items()}


def _flops(of: Attention, shapes: Shapes) -> float:
    """Of two products forward, five backward; half of them under a causal mask."""
    heads = max(1, shapes.width // of.head_size)
    return 2.0 * (5 if of.backward else 2) * shapes.tokens * of.keys * heads * of.head_size * (0.5 if of.causal else 1.0)
