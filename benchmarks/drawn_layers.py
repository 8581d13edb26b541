"""Layers that drawn training steps are made of: each function draws a layer's options and returns its parameters and what it computes.

    layer = attention(draw, width=512)
    layer.params                        {"query": (512, 8, 64), ...}, shapes
    layer(params, x, around)            x [b, t, 512] -> [b, t, 512]

`draw` writes down every ingredient that it draws. `around` holds what a layer reads beside its input: `memory`, the sequence that cross
attention looks at.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Shapes = dict
"""Names to shapes, or to more of the same."""


class Draw:
    """Random choices by a seed, the same in every process, and what was chosen.

    Attributes:
        sizes: draws sizes; apart from what draws ingredients, so that these are the same at every size.
        tiny: whether sizes are those that a CPU runs; `small` whether they are those that compile in seconds.
        exact: whether all is computed in float32, so that numbers can be compared.
        made: ingredients, in the order in which they were drawn.
    """

    def __init__(self, seed: int, size: str):
        self.random, self.sizes = random.Random(f"program {seed}"), random.Random(f"sizes {seed}")
        self.tiny, self.small = size in ("tiny", "exact"), size == "small"
        self.exact = size == "exact"
        self.made: list[str] = []

    def one_of(self, *options) -> Any:
        return self.random.choice(options)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def ingredient(self, *options: str) -> str:
        """One of these, written down."""
        self.made.append(found := self.one_of(*options))
        return found

    def also(self, name: str, probability: float) -> bool:
        """Whether the program has this, too, written down if so."""
        if found := self.chance(probability):
            self.made.append(name)
        return found


@dataclass(frozen=True)
class Layer:
    """A layer: its parameters' shapes, and its function of (parameters, input, around)."""

    params: Shapes
    apply: Callable = field(repr=False)

    def __call__(self, params, x, around):
        return self.apply(params, x, around)


def sequence_of(*layers: Layer) -> Layer:
    """One after the other."""

    def apply(p, x, around):
        for n, layer in enumerate(layers):
            x = layer(p[str(n)], x, around)
        return x

    return Layer({str(n): layer.params for n, layer in enumerate(layers)}, apply)


def residual(norm: Layer, layer: Layer, after: bool) -> Layer:
    """x + layer(norm(x)), or norm(x + layer(x))."""

    def apply(p, x, around):
        if after:
            return norm(p["norm"], x + layer(p["layer"], x, around), around)
        return x + layer(p["layer"], norm(p["norm"], x, around), around)

    return Layer({"norm": norm.params, "layer": layer.params}, apply)


# ---- norms and activations


def norm(draw: Draw, width: int, dims: int = 1, kinds=("layer norm", "rms norm", "layer norm", "rms norm", "group norm")) -> Layer:
    """A norm of x [..., width]; `dims` trailing dims before the width are positions (group and batch norm average over them)."""
    kind = draw.ingredient(*kinds)
    groups = math.gcd(width, 8)

    def apply(p, x, _):
        y = x.astype(jnp.float32)
        if kind == "layer norm":
            y = y - y.mean(-1, keepdims=True)
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-5)
        elif kind == "rms norm":
            y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-6)
        elif kind == "batch norm":
            over = tuple(range(y.ndim - 1))
            mean = y.mean(over)
            y = (y - mean) * jax.lax.rsqrt(jnp.square(y).mean(over) - mean * mean + 1e-3)
        else:
            z = y.reshape(*y.shape[:-1], groups, width // groups)
            over = (*range(z.ndim - 2 - dims, z.ndim - 2), z.ndim - 1)
            z = z - z.mean(over, keepdims=True)
            y = (z * jax.lax.rsqrt(jnp.square(z).mean(over, keepdims=True) + 1e-5)).reshape(y.shape)
        return (y * p["scale"] + p["bias"]).astype(x.dtype) if "bias" in p else (y * p["scale"]).astype(x.dtype)

    return Layer({"scale": (width,)} | ({} if kind == "rms norm" else {"bias": (width,)}), apply)


ACTIVATIONS = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu, "squared relu": lambda x: jnp.square(jax.nn.relu(x))}


def activation(draw: Draw) -> Callable:
    return ACTIVATIONS[draw.one_of(*ACTIVATIONS)]


def cast(p, x):
    """Parameters in the dtype of the computation."""
    return jax.tree.map(lambda w: w.astype(x.dtype), p)


# ---- attention


def rotated(x):
    """x [b, t, h, k] turned by position (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = (f(angle)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
    draw: Draw, width: int, heads: int, kinds=("dense attention", "grouped-query attention", "multi-query attention")
) -> Layer:
    """Softmax attention; grouped and multi-query share key and value heads, cross attention reads `around["memory"]`."""
    kind, k = draw.ingredient(*kinds), width // heads
    shared = {"grouped-query attention": next((g for g in (4, 2, 3, 8, 5, 7) if heads % g == 0), 1), "multi-query attention": heads}
    group = shared.get(kind, 1)
    causal = kind != "cross attention" and draw.also("causal mask", 0.6)
    rope, bias = kind != "cross attention" and k % 2 == 0 and draw.also("rotary positions", 0.4), draw.also("biases", 0.3)
    fused = kind == "dense attention" and draw.also("fused projections", 0.3)
    flat = not fused and draw.chance(0.4)  # heads as columns of a matrix, not as a dim of their own
    library = draw.also("library attention", 0.3) and not draw.tiny  # CPUs have no float16 products that sum in float32
    few = heads // group
    shapes = {"query": (width, heads, k), "key": (width, few, k), "value": (width, few, k), "out": (heads, k, width)}
    if fused:
        shapes = {"qkv": (3, width, heads, k), "out": (heads, k, width)}
    if flat:
        shapes = {n: (s[0], s[1] * s[2]) if n != "out" else (s[0] * s[1], s[2]) for n, s in shapes.items()}
    if bias:
        shapes |= {"bias_out": (width,)}

    def project(x, w, h):
        return (x @ w).reshape(*x.shape[:-1], h, k) if flat else jnp.einsum("btd,dhk->bthk", x, w)

    def scores_of(q, key, value):
        if library:
            return jax.nn.dot_product_attention(q, key, value, is_causal=causal)
        b, t, _, _ = q.shape
        q = q.reshape(b, t, few, group, k)
        s = jnp.einsum("btfgk,bsfk->bfgts", q, key).astype(jnp.float32) * k**-0.5
        s = jnp.where(jnp.tri(t, dtype=bool), s, -1e9) if causal else s
        return jnp.einsum("bfgts,bsfk->btfgk", jax.nn.softmax(s).astype(q.dtype), value).reshape(b, t, heads, k)

    def apply(p, x, around):
        p, memory = cast(p, x), around["memory"].astype(x.dtype) if kind == "cross attention" else x
        if fused:
            q, key, value = jnp.einsum("btd,xdhk->xbthk", x, p["qkv"])
        else:
            q, key, value = project(x, p["query"], heads), project(memory, p["key"], few), project(memory, p["value"], few)
        if rope:
            q, key = rotated(q), rotated(key)
        y = scores_of(q, key, value)
        y = y.reshape(*y.shape[:2], width) @ p["out"] if flat else jnp.einsum("bthk,hkd->btd", y, p["out"])
        return y + p["bias_out"] if bias else y

    return Layer(shapes, apply)


# ---- networks at each position


def mlp(draw: Draw, width: int, hidden: int) -> Layer:
    kind, act, bias = draw.ingredient("plain MLP", "gated MLP"), activation(draw), draw.chance(0.3)
    gated = kind == "gated MLP"
    shapes = {"up": (width, hidden), "down": (hidden, width)} | ({"gate": (width, hidden)} if gated else {})
    shapes |= {"bias_up": (hidden,), "bias_down": (width,)} if bias else {}

    def apply(p, x, _):
        p = cast(p, x)
        y = x @ p["up"] + (p["bias_up"] if bias else 0)
        y = act(x @ p["gate"]) * y if gated else act(y)
        return y @ p["down"] + (p["bias_down"] if bias else 0)

    return Layer(shapes, apply)


def experts(draw: Draw, width: int, hidden: int, n: int) -> Layer:
    """A mixture of n expert networks, k for each token: by capacity with one-hot products, by sorting each sequence, or all tokens."""
    kind = draw.ingredient("experts by capacity", "experts by sorting", "ragged experts by sorting")
    k, act = draw.one_of(1, 2, 2), activation(draw)
    shapes = {"router": (width, n), "up": (n, width, hidden), "down": (n, hidden, width)}

    def dispatched(p, x, y):
        """Networks on y [e, g, c, d]."""
        return jnp.einsum("egcf,efd->egcd", act(jnp.einsum("egcd,edf->egcf", y, p["up"])), p["down"])

    def by_capacity(p, x, gates, chosen):
        t = x.shape[1]
        capacity = max(1, math.ceil(1.25 * k * t / n))
        mask = jax.nn.one_hot(chosen, n, dtype=jnp.float32)  # [g, t, k, e]
        order = mask.swapaxes(1, 2).reshape(x.shape[0], k * t, n)
        slot = (jnp.cumsum(order, 1) - order).reshape(x.shape[0], k, t, n).swapaxes(1, 2)
        place = jax.nn.one_hot((slot * mask).sum(-1).astype(jnp.int32), capacity) * (slot < capacity).any(-1)[..., None]
        combine = jnp.einsum("gtk,gtke,gtkc->gtec", gates, mask, place)
        y = jnp.einsum("gtec,gtd->egcd", (combine > 0).astype(x.dtype), x)
        return jnp.einsum("gtec,egcd->gtd", combine.astype(x.dtype), dispatched(p, x, y))

    def by_sorting(p, x, gates, chosen):
        g, t, d = x.shape
        capacity = max(1, math.ceil(1.25 * k * t / n))
        flat = chosen.reshape(g, t * k)
        order = jnp.argsort(flat, axis=-1)
        expert = jnp.take_along_axis(flat, order, -1)
        first = jax.vmap(lambda row: jnp.searchsorted(row, jnp.arange(n)))(expert)
        at = jnp.arange(t * k) - jnp.take_along_axis(first, expert, -1)
        target = jnp.where(at < capacity, expert * capacity + at, n * capacity)
        rows = jnp.take_along_axis(x, (order // k)[..., None], 1)
        slots = jax.vmap(lambda r, where: jnp.zeros((n * capacity + 1, d), x.dtype).at[where].set(r))(rows, target)
        y = dispatched(p, x, slots[:, :-1].reshape(g, n, capacity, d).swapaxes(0, 1)).swapaxes(0, 1).reshape(g, n * capacity, d)
        y = jnp.concatenate([y, jnp.zeros((g, 1, d), y.dtype)], 1)
        back = jnp.take_along_axis(y, target[..., None], 1) * jnp.take_along_axis(gates.reshape(g, t * k), order, -1)[..., None].astype(
            x.dtype
        )
        return jax.vmap(lambda r, where: jnp.zeros((t, d), x.dtype).at[where].add(r))(back, order // k)

    def ragged(p, x, gates, chosen):
        d, flat = x.shape[-1], chosen.reshape(-1)
        order = jnp.argsort(flat)
        rows = x.reshape(-1, d)[order // k]
        sizes = jnp.zeros(n, jnp.int32).at[flat].add(1)
        y = jax.lax.ragged_dot(act(jax.lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)
        y = y * gates.reshape(-1)[order][:, None].astype(x.dtype)
        return jnp.zeros_like(x.reshape(-1, d)).at[order // k].add(y).reshape(x.shape)

    run = {"experts by capacity": by_capacity, "experts by sorting": by_sorting}.get(kind, ragged)

    def apply(p, x, _):
        p = cast(p, x)
        gates, chosen = jax.lax.top_k(jax.nn.softmax((x @ p["router"]).astype(jnp.float32)), k)
        return run(p, x, gates, chosen)

    return Layer(shapes, apply)


# ---- recurrences


def recurrence(draw: Draw, width: int) -> Layer:
    """A recurrence over positions: LSTM, GRU, a diagonal linear one by associative scan, or a selective state space."""
    return draw.one_of(_lstm, _gru, _linear_recurrence, _state_space)(draw, width)


def _over_time(cell, start, rows):
    return jax.lax.scan(cell, start, jax.tree.map(lambda a: a.swapaxes(0, 1), rows))[1].swapaxes(0, 1)


def _lstm(draw: Draw, width: int) -> Layer:
    draw.made.append("LSTM")

    def apply(p, x, _):
        p = cast(p, x)

        def cell(carry, row):
            h, c = carry
            i, f, g, o = jnp.split(row + h @ p["hidden"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], width), x.dtype)
        return _over_time(cell, (start, start), x @ p["into"] + p["bias"]) @ p["out"]

    return Layer({"into": (width, 4 * width), "hidden": (width, 4 * width), "bias": (4 * width,), "out": (width, width)}, apply)


def _gru(draw: Draw, width: int) -> Layer:
    draw.made.append("GRU")

    def apply(p, x, _):
        p = cast(p, x)

        def cell(h, row):
            zr, n = row[..., : 2 * width], row[..., 2 * width :]
            z, r = jnp.split(jax.nn.sigmoid(zr + h @ p["gates"]), 2, axis=-1)
            h = z * h + (1 - z) * jnp.tanh(n + (r * h) @ p["hidden"])
            return h, h

        return _over_time(cell, jnp.zeros((x.shape[0], width), x.dtype), x @ p["into"]) @ p["out"]

    return Layer({"into": (width, 3 * width), "gates": (width, 2 * width), "hidden": (width, width), "out": (width, width)}, apply)


def _linear_recurrence(draw: Draw, width: int) -> Layer:
    draw.made.append("linear recurrence")

    def apply(p, x, _):
        p = cast(p, x)
        decay = jax.nn.sigmoid((x @ p["decay"]).astype(jnp.float32) + 2)
        value = (x @ p["into"]).astype(jnp.float32) * (1 - decay)
        y = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, value), axis=1)[1]
        return (y.astype(x.dtype) * jax.nn.silu(x @ p["gate"])) @ p["out"]

    return Layer({n: (width, width) for n in ("into", "decay", "gate", "out")}, apply)


def _state_space(draw: Draw, width: int) -> Layer:
    draw.made.append("state space")
    inner, states = 2 * width, draw.one_of(8, 16)

    def apply(p, x, _):
        p = cast(p, x)
        u, z = jax.nn.silu(x @ p["into"]), jax.nn.silu(x @ p["gate"])
        step, rates = jax.nn.softplus(u @ p["rate"] @ p["decay"]), -jnp.exp(p["scale_log"])

        def at(h, row):
            u, step, write, read = row
            h = jnp.exp(step[..., None] * rates) * h + (step * u)[..., None] * write[:, None]
            return h, jnp.einsum("bin,bn->bi", h, read)

        y = _over_time(jax.checkpoint(at), jnp.zeros((x.shape[0], inner, states), x.dtype), (u, step, u @ p["write"], u @ p["read"]))
        return (y * z) @ p["out"]

    low = max(1, inner // 32)
    return Layer(
        {"into": (width, inner), "gate": (width, inner), "out": (inner, width), "rate": (inner, low), "decay": (low, inner),
         "write": (inner, states), "read": (inner, states), "scale_log": (inner, states)}, apply)  # fmt: skip
