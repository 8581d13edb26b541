"""Training steps with fused kernels, at full width as shapes, or small to run: transformers of one form with kernels of their own.

cuDNN's attention by `jax.nn.dot_product_attention`, Pallas' attention and norms from `jax.experimental.pallas.ops.gpu`, and experts by
`jax.lax.ragged_dot` that drop no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.pallas.ops.gpu import attention as pallas_attention
from jax.experimental.pallas.ops.gpu import layer_norm as pallas_layer_norm
from jax.experimental.pallas.ops.gpu import rms_norm as pallas_rms_norm


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, the type that it computes in, and whether kernels are interpreted, as they run without a GPU.

    With a large `eps` Adam's steps follow the gradients; with a small one they double where a tiny gradient is rounded otherwise.
    """

    layers: int = 4
    batch: int = 32
    length: int = 1024
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    hidden: int = 4096
    experts: int = 16
    vocab: int = 32768
    dtype: str = "bfloat16"
    interpret: bool = False
    eps: float = 1e-8

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.width // self.heads


FULL = Sizes()
SMALL = Sizes(2, 8, 32, 128, 8, 8, 128, 8, 64, "float32", True, 1e-2)


@dataclass(frozen=True)
class Fused:
    """A model: its kernels by role, and whether its attention is causal.

    Attributes:
        attend: (sizes, q [b, t, heads, head], k and v [b, t, kv heads, head], tokens of every sequence [b]) -> as q.
        norm: (sizes, x [b, t, width], scale [width], bias [width]) -> as x.
        dropless: whether a block's second half are experts that drop no token.
        grouped: whether groups of query heads share a key-value head.
    """

    attend: Callable
    norm: Callable
    dropless: bool = False
    grouped: bool = False


# ---- kernels


def plain_norm(sizes: Sizes, x, scale, bias):
    y = x.astype("float32")
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * scale + bias).astype(x.dtype)


def plain_attention(sizes: Sizes, q, k, v, lengths):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def cudnn(sizes: Sizes, q, k, v, **options):
    """In a type of 16 bits, which is all that cuDNN's kernel takes."""
    q, k, v = (x.astype("bfloat16" if sizes.dtype == "bfloat16" else "float16") for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options).astype(sizes.dtype)


def cudnn_causal(sizes: Sizes, q, k, v, lengths):
    return cudnn(sizes, q, k, v, is_causal=True)


def cudnn_of_lengths(sizes: Sizes, q, k, v, lengths):
    return cudnn(sizes, q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


def block_sizes(sizes: Sizes):
    return pallas_attention.BlockSizes(*(min(64, sizes.length // 2),) * 6)


def pallas_causal(sizes: Sizes, q, k, v, lengths):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    return pallas_attention.mha(q, k, v, None, causal=True, block_sizes=block_sizes(sizes), interpret=sizes.interpret)


def pallas_of_lengths(sizes: Sizes, q, k, v, lengths):
    segments = (jnp.arange(q.shape[1]) < lengths[:, None]).astype("int32")
    return pallas_attention.mha(q, k, v, segments, block_sizes=block_sizes(sizes), interpret=sizes.interpret)


def layer_norm_kernel(sizes: Sizes, x, scale, bias):
    return pallas_layer_norm.layer_norm(x, scale.astype(x.dtype), bias.astype(x.dtype), interpret=sizes.interpret)


def rms_norm_kernel(sizes: Sizes, x, scale, bias):
    return pallas_rms_norm.rms_norm(x, scale.astype(x.dtype), bias.astype(x.dtype), interpret=sizes.interpret)


MODELS = {
    "gpt-cudnn": Fused(cudnn_causal, plain_norm),
    "grouped-cudnn": Fused(cudnn_causal, plain_norm, grouped=True),
    "encoder-cudnn": Fused(cudnn_of_lengths, plain_norm),
    "gpt-pallas": Fused(pallas_causal, plain_norm),
    "encoder-pallas": Fused(pallas_of_lengths, layer_norm_kernel),
    "grouped-pallas": Fused(pallas_causal, rms_norm_kernel, grouped=True),
    "dropless-experts": Fused(plain_attention, plain_norm, dropless=True),
}


# ---- the model


def experts(p, x, chosen_of_each: int = 2):
    """Every token's best experts; tokens of an expert are consecutive rows of ragged products."""
    flat = x.reshape(-1, x.shape[-1])
    gates, chosen = jax.lax.top_k(jax.nn.softmax((flat @ p["router"]).astype("float32")), chosen_of_each)
    order = jnp.argsort(chosen.reshape(-1))
    rows, sizes = flat[order // chosen_of_each], jnp.bincount(chosen.reshape(-1), length=p["up"].shape[0]).astype("int32")
    y = jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(rows, p["up"], sizes)), p["down"], sizes)
    y = y * gates.reshape(-1)[order][:, None].astype(x.dtype)
    return jnp.zeros_like(flat).at[order // chosen_of_each].add(y).reshape(x.shape)


def layer(model: Fused, sizes: Sizes, x, p, lengths):
    b, t, _ = x.shape
    p = jax.tree.map(lambda w: w.astype(x.dtype), p)
    y = model.norm(sizes, x, p["scale1"], p["bias1"])
    q, k, v = ((y @ p[name]).reshape(b, t, -1, sizes.head) for name in ("query", "key", "value"))
    x = x + model.attend(sizes, q, k, v, lengths).reshape(b, t, -1) @ p["out"]
    y = model.norm(sizes, x, p["scale2"], p["bias2"])
    return x + (experts(p, y) if model.dropless else jax.nn.gelu(y @ p["up"]) @ p["down"])


def build(name: str, sizes: Sizes = FULL):
    """(create_state(key), train_step(state, batch), batch(key)) of a model."""
    model, optimizer = MODELS[name], optax.adamw(1e-3, eps=sizes.eps)
    width, key_width = sizes.width, sizes.head * (sizes.kv_heads if model.grouped else sizes.heads)
    expert = (sizes.experts,) * model.dropless
    shapes = {
        "query": (width, width), "key": (width, key_width), "value": (width, key_width), "out": (width, width),
        "up": (*expert, width, sizes.hidden), "down": (*expert, sizes.hidden, width),
    } | ({"router": (width, sizes.experts)} if model.dropless else {})  # fmt: skip

    def create_state(key):
        table, *keys = jax.random.split(key, 1 + len(shapes))
        drawn = zip(shapes.items(), keys, strict=True)
        layers = {name: jax.random.normal(k, (sizes.layers, *shape)) / np.sqrt(shape[-2]) for (name, shape), k in drawn}
        layers |= {
            f"{what}{n}": jnp.full((sizes.layers, width), what == "scale", "float32") for what in ("scale", "bias") for n in (1, 2)
        }
        params = {"table": jax.random.normal(table, (sizes.vocab, width)) * 0.1, "layers": layers}
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params, batch):
        x = params["table"].astype(sizes.dtype)[batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, p: (layer(model, sizes, x, p, batch["lengths"]), None), x, params["layers"])
        logits = (x @ params["table"].T.astype(sizes.dtype)).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batch(key):
        shape = sizes.batch, sizes.length
        tokens, targets = (jax.random.randint(k, shape, 0, sizes.vocab) for k in jax.random.split(key))
        lengths = jax.random.randint(key, shape[:1], sizes.length // 2, sizes.length + 1)
        return {"tokens": tokens, "targets": targets, "lengths": lengths}

    return create_state, train_step, batch
