"""Train steps of full-size models, as shapes only: what the planning benchmarks plan. Nothing here allocates an array.

Every function returns `(train_step, state, batch)`, the last two trees of `jax.ShapeDtypeStruct`. Parameters and optimizer are
float32, the computation is bfloat16.
"""

import dataclasses
import functools
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import nets
import optax

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import llama as _llama

# Llama 3.2 1B, Llama 3.1 8B and 70B (arXiv:2407.21783), Llama 2 7B (arXiv:2307.09288): layers, width, query heads,
# key-value heads, hidden, vocabulary. The output matrix is never tied to the embedding, as it is in Llama 3.2 1B.
LLAMA = {
    "1b": (16, 2048, 32, 8, 8192, 128256),
    "7b": (32, 4096, 32, 32, 11008, 32000),
    "8b": (32, 4096, 32, 8, 14336, 128256),
    "70b": (80, 8192, 64, 8, 28672, 128256),
}


def tokens(batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": shape, "targets": shape}


def layer_norm(x, p):
    y = x.astype(jnp.float32)
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def linear(x, p):
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def attention(q, k, v):
    t, size = q.shape[1], q.shape[3]
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * size**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.tri(t, dtype=bool), scores, -1e9)).astype(q.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


cudnn_attention = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def block(x, p, heads: int, attend=attention):
    b, t, d = x.shape
    y = layer_norm(x, p["norm1"])
    q, k, v = (linear(y, p[name]).reshape(b, t, heads, d // heads) for name in ("query", "key", "value"))
    x = x + linear(attend(q, k, v).reshape(b, t, d), p["out"])
    return x + linear(jax.nn.gelu(linear(layer_norm(x, p["norm2"]), p["up"])), p["down"])


def gpt2(layers=12, scan=False, batch=32, seq=1024, d=768, heads=12, vocab=50304, remat=False, attend=attention):
    """GPT-2's training step (124M parameters as given), unrolled or scanned over layers; AdamW, clipping, cosine schedule."""
    adamw = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 6e-4, 700, 100_000), b2=0.95, weight_decay=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def dense(m, n):
        return {"w": jnp.zeros((m, n)), "b": jnp.zeros(n)}

    def norm():
        return {"scale": jnp.ones(d), "bias": jnp.zeros(d)}

    def create_state():
        def layer(_):
            square = {name: dense(d, d) for name in ("query", "key", "value", "out")}
            return square | {"up": dense(d, 4 * d), "down": dense(4 * d, d), "norm1": norm(), "norm2": norm()}

        blocks = jax.vmap(layer)(jnp.arange(layers)) if scan else [layer(i) for i in range(layers)]
        params = {"tokens": jnp.zeros((vocab, d)), "positions": jnp.zeros((seq, d)), "blocks": blocks, "norm": norm()}
        return {"params": params, "opt": optimizer.init(params)}

    def loss_fn(params, batch):
        table = params["tokens"].astype(jnp.bfloat16)
        x = table[batch["inputs"]] + params["positions"].astype(jnp.bfloat16)

        def apply(x, p):
            return block(x, p, heads, attend)

        if remat:
            apply = jax.checkpoint(apply)
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params["blocks"])
        else:
            for p in params["blocks"]:
                x = apply(x, p)
        logits = (layer_norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return train_step, jax.eval_shape(create_state), tokens(batch, seq)


def gpt3_96(layers=96, scan=False, batch=256, seq=2048, d=12288, heads=96, vocab=50304, remat=False):
    """The 175B GPT-3's shape (arXiv:2005.14165, table 2.1)."""
    return gpt2(layers, scan, batch, seq, d, heads, vocab, remat)


def llama(size="8b", batch=64, seq=4096, layers=None):
    """Llama 3's shapes, scanned over layers with `jax.checkpoint`: the example's code at full size."""
    depth, width, heads, kv_heads, hidden, vocab = LLAMA[size]
    config = _llama.Config(layers or depth, width, heads, kv_heads, hidden, seq, batch, vocab, dtype="bfloat16")
    create_state, train_step, _ = _llama.build(config)
    return train_step, jax.eval_shape(create_state, jax.random.key(0)), tokens(batch, seq)


def example(name: str, **sizes):
    """An example at other sizes; the batch as its own `batches` makes it."""
    module = importlib.import_module(name)
    create_state, train_step, batches = module.build(dataclasses.replace(module.DEMO, **sizes))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(iter(batches(1))))
    return train_step, jax.eval_shape(create_state, jax.random.key(0)), batch


ZOO = {
    "gpt2": gpt2,
    "gpt2-scan": lambda: gpt2(scan=True),
    "gpt3-96": gpt3_96,
    "gpt3-96-scan": lambda: gpt3_96(scan=True),
    "llama-1b": lambda: llama("1b"),
    "llama-8b": lambda: llama("8b"),
    "llama-70b": lambda: llama("70b"),
}


def classifier(classes: int, batch=1 << 13, width=1024):
    """A classifier with a huge output layer."""
    module = importlib.import_module("hybrid_mlp")
    create_state, train_step, _ = module.build(module.Config(inputs=width, hidden=width, classes=classes, batch=batch))
    shapes = {"x": jax.ShapeDtypeStruct((batch, width), jnp.float32), "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}
    return train_step, jax.eval_shape(create_state, jax.random.key(0)), shapes


QUALITY = {
    "gpt2": lambda: gpt2(batch=64),
    "llama-1b": lambda: llama("1b", batch=64, seq=2048),
    "moe": lambda: example("moe", layers=4, width=1024, heads=16, hidden=4096, length=512, batch=64, vocab=32768),
    "dlrm": lambda: example("dlrm", tables=(1 << 23, 1 << 22, 1 << 20, 1 << 16, 1024, 64), width=128, batch=1 << 15),
    "classes": lambda: classifier(1 << 19),
    "vit-l": nets.vit,
    "resnet-50": nets.resnet,
    "unet": nets.unet,
    "lstm": nets.lstm,
    "mamba": nets.mamba,
    "long": nets.long_context,
    "llama-8b": lambda: llama("8b", batch=64, seq=4096),
    "llama-70b": lambda: llama("70b", batch=64, seq=4096),
    "gpt2-xl": lambda: gpt2(layers=48, batch=64, d=1600, heads=25),
    "classes-8m": lambda: classifier(1 << 23),
}
"""What plans are held against experts' layouts on."""
