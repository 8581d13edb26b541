"""Llama blocks in plain JAX, on the bundled novel: scanned over layers, each layer rematerialised with `jax.checkpoint`.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. One layer's weights are one slice of each array in
`params["layers"]`, so the planner sees the layer once and decides it once, whatever the depth.

    python examples/llama.py
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from harness import text_batches


@dataclass(frozen=True)
class Config:
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 384
    length: int = 128
    batch: int = 16
    vocab: int = 128
    learning_rate: float = 2e-3
    dtype: str = "float32"  # of the computation; parameters are float32


DEMO = Config()
TINY = Config(layers=2, width=32, kv_heads=2, hidden=96, length=16, learning_rate=1e-2)


def rms_norm(x, scale):
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-5).astype(x.dtype) * scale


def rotate(x):
    """Rotary positions: the halves of each head's vector, turned by an angle growing with the position. x: [b, t, ..., k]."""
    t, k = x.shape[1], x.shape[-1]
    angle = jnp.arange(t)[:, None] * 10000.0 ** (-jnp.arange(k // 2) / (k // 2))
    angle = angle.reshape(t, *[1] * (x.ndim - 3), k // 2)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(p, x):
    """Each key-value head g serves the r query heads of its group."""
    q = rotate(jnp.einsum("btd,dgrk->btgrk", x, p["query"]))
    k = rotate(jnp.einsum("btd,dgk->btgk", x, p["key"]))
    v = jnp.einsum("btd,dgk->btgk", x, p["value"])
    scores = jnp.einsum("btgrk,bsgk->bgrts", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
    t = x.shape[1]
    weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -1e9)).astype(x.dtype)
    return jnp.einsum("btgrk,grkd->btd", jnp.einsum("bgrts,bsgk->btgrk", weights, v), p["out"])


def feed_forward(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def layer(x, p):
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    x = x + attention(p, rms_norm(x, p["norm1"]))
    return x + feed_forward(p, rms_norm(x, p["norm2"]))


def create_params(c: Config, key):
    group, size = c.heads // c.kv_heads, c.width // c.heads
    shapes = {
        "query": (c.width, c.kv_heads, group, size),
        "key": (c.width, c.kv_heads, size),
        "value": (c.width, c.kv_heads, size),
        "out": (c.kv_heads, group, size, c.width),
        "gate": (c.width, c.hidden),
        "up": (c.width, c.hidden),
        "down": (c.hidden, c.width),
    }
    embed, head, *keys = jax.random.split(key, 2 + len(shapes))
    fan_in = {name: c.width for name in shapes} | {"down": c.hidden}
    layers = {
        name: jax.random.normal(k, (c.layers, *shape)) * fan_in[name] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {
        "embed": jax.random.normal(embed, (c.vocab, c.width)) * 0.5,
        "layers": layers | {"norm1": jnp.ones((c.layers, c.width)), "norm2": jnp.ones((c.layers, c.width))},
        "norm": jnp.ones(c.width),
        "head": jax.random.normal(head, (c.width, c.vocab)) * c.width**-0.5,
    }


def build(c: Config):
    adamw = optax.adamw(c.learning_rate, weight_decay=0.01)

    def create_state(key):
        params = create_params(c, key)
        return {"params": params, "opt": adamw.init(params)}

    def loss_fn(params, batch):
        x = params["embed"].astype(c.dtype)[batch["inputs"]]
        block = jax.checkpoint(layer)
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        logits = rms_norm(x, params["norm"].astype(c.dtype)) @ params["head"].astype(c.dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["targets"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = adamw.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batches(n, seed=0):
        return text_batches(n, c.batch, c.length, seed)

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("Llama", build, DEMO, steps=20)
