"""Train steps beyond language models, as shapes only: vision, recurrences, long contexts. See `zoo` for what they return."""

import jax
import jax.numpy as jnp
import optax

sds = jax.ShapeDtypeStruct


def trained(create_params, loss_fn, optimizer=None):
    """(train_step, state) of a loss over parameters."""
    optimizer = optimizer or optax.adamw(1e-3)

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def create_state():
        params = create_params()
        return {"params": params, "opt": optimizer.init(params)}

    return train_step, jax.eval_shape(create_state)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def conv(x, w, stride=1):
    return jax.lax.conv_general_dilated(x, w.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def attend(p, x, heads: int):
    """Softmax attention over the positions of x [b, t, d]."""
    b, t, d = x.shape
    q, k, v = ((x @ p[n].astype(x.dtype)).reshape(b, t, heads, d // heads) for n in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * (d // heads) ** -0.5
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v).reshape(b, t, d) @ p["out"].astype(x.dtype)


def attention_params(*shape):
    return {n: jnp.zeros(shape) for n in ("query", "key", "value", "out")}


def vit(layers=24, width=1024, heads=16, hidden=4096, side=256, patch=16, batch=512, classes=1000):
    """ViT-L/16 (arXiv:2010.11929) on pictures of 256 x 256, scanned over layers with `jax.checkpoint`, mean pooling."""
    n, pixels = (side // patch) ** 2, patch * patch * 3

    def create():
        blocks = attention_params(layers, width, width) | {
            "up": jnp.zeros((layers, width, hidden)), "down": jnp.zeros((layers, hidden, width)),
            "norm1": jnp.zeros((layers, width)), "norm2": jnp.zeros((layers, width)),
        }  # fmt: skip
        return {"into": jnp.zeros((pixels, width)), "positions": jnp.zeros((n, width)), "layers": blocks,
                "norm": jnp.zeros(width), "head": jnp.zeros((width, classes))}  # fmt: skip

    @jax.checkpoint
    def block(x, p):
        x = x + attend(p, norm(x, p["norm1"]), heads)
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)

    def loss_fn(params, batch):
        b, rows = batch["image"].shape[0], side // patch
        x = batch["image"].astype(jnp.bfloat16).reshape(b, rows, patch, rows, patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(b, n, pixels)
        x = x @ params["into"].astype(x.dtype) + params["positions"].astype(x.dtype)
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        return cross_entropy(norm(x, params["norm"]).mean(1) @ params["head"].astype(x.dtype), batch["label"])

    images = {"image": sds((batch, side, side, 3), jnp.float32), "label": sds((batch,), jnp.int32)}
    return *trained(create, loss_fn), images


def batch_norm(x, p):
    y = x.astype(jnp.float32)
    mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
    return ((y - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * p["scale"] + p["bias"]).astype(x.dtype)


def resnet(depths=(3, 4, 6, 3), batch=256, side=224, classes=1000):
    """ResNet-50 (arXiv:1512.03385) with batch normalisation in training mode, momentum SGD."""

    def kernel(k, m, n):
        return {"conv": jnp.zeros((k, k, m, n)), "scale": jnp.zeros(n), "bias": jnp.zeros(n)}

    def create():
        stages, m = [], 64
        for s, depth in enumerate(depths):
            stages.append([])
            for i in range(depth):
                n = 64 << s
                part = {"a": kernel(1, m, n), "b": kernel(3, n, n), "c": kernel(1, n, 4 * n)}
                stages[-1].append(part | ({"short": kernel(1, m, 4 * n)} if i == 0 else {}))
                m = 4 * n
        return {"stem": kernel(7, 3, 64), "stages": stages, "head": jnp.zeros((m, classes))}

    def layer(x, p, stride=1):
        return batch_norm(conv(x, p["conv"], stride), p)

    def bottleneck(x, p, stride):
        y = jax.nn.relu(layer(x, p["a"]))
        y = layer(jax.nn.relu(layer(y, p["b"], stride)), p["c"])
        return jax.nn.relu(y + (layer(x, p["short"], stride) if "short" in p else x))

    def loss_fn(params, batch):
        x = jax.nn.relu(layer(batch["image"].astype(jnp.bfloat16), params["stem"], 2))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for s, stage in enumerate(params["stages"]):
            for i, p in enumerate(stage):
                x = bottleneck(x, p, 2 if s and i == 0 else 1)
        return cross_entropy(x.mean((1, 2)) @ params["head"].astype(x.dtype), batch["label"])

    images = {"image": sds((batch, side, side, 3), jnp.float32), "label": sds((batch,), jnp.int32)}
    return *trained(create, loss_fn, optax.sgd(0.1, momentum=0.9)), images


def unet(widths=(128, 256, 512), side=64, batch=128, heads=8):
    """A U-Net that predicts noise, with attention at its coarsest level, as diffusion models use."""

    def block(m, n):
        return {"conv1": jnp.zeros((3, 3, m, n)), "conv2": jnp.zeros((3, 3, n, n)), "conv3": jnp.zeros((1, 1, m, n))}

    def create():
        w = widths
        down = [block(m, n) for m, n in zip((w[0], *w[:-1]), w, strict=True)]
        up = [block(m + n, n) for m, n in zip((w[-1], *w[:0:-1]), w[::-1], strict=True)]
        middle = {"attention": attention_params(w[-1], w[-1]), "norm": jnp.zeros(w[-1])}
        return {"stem": {"conv1": jnp.zeros((3, 3, 3, w[0]))}, "down": down, "middle": middle, "up": up,
                "last": {"conv1": jnp.zeros((3, 3, w[0], 3))}}  # fmt: skip

    def apply(x, p):
        y = jax.nn.silu(conv(jax.nn.silu(conv(x, p["conv1"])), p["conv2"]))
        return y + conv(x, p["conv3"])

    def loss_fn(params, batch):
        x, kept = conv(batch["image"].astype(jnp.bfloat16), params["stem"]["conv1"]), []
        for p in params["down"]:
            x = apply(x, p)
            kept.append(x)
            x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
        b, h, w, c = x.shape
        flat = x.reshape(b, h * w, c)
        x = (flat + attend(params["middle"]["attention"], norm(flat, params["middle"]["norm"]), heads)).reshape(b, h, w, c)
        for p in params["up"]:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = apply(jnp.concatenate([x, kept.pop()], axis=-1), p)
        return jnp.mean((conv(x, params["last"]["conv1"]).astype(jnp.float32) - batch["noise"]) ** 2)

    image = sds((batch, side, side, 3), jnp.float32)
    return *trained(create, loss_fn), {"image": image, "noise": image}


def lstm(layers=2, width=2048, length=256, batch=256, vocab=32768):
    """A word-level LSTM, scanned over time."""

    def create():
        cells = [{"into": jnp.zeros((width, 4 * width)), "hidden": jnp.zeros((width, 4 * width)), "bias": jnp.zeros(4 * width)}
                 for _ in range(layers)]  # fmt: skip
        return {"embed": jnp.zeros((vocab, width)), "cells": cells, "head": jnp.zeros((width, vocab))}

    def run(p, x):
        def cell(carry, row):
            h, c = carry
            i, f, g, o = jnp.split(row + h @ p["hidden"].astype(h.dtype), 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        rows = x @ p["into"].astype(x.dtype) + p["bias"].astype(x.dtype)
        start = jnp.zeros(x.shape[1:], x.dtype)
        return jax.lax.scan(cell, (start, start), rows)[1]

    def loss_fn(params, batch):
        x = params["embed"].astype(jnp.bfloat16)[batch["inputs"]].swapaxes(0, 1)
        for p in params["cells"]:
            x = run(p, x)
        return cross_entropy(x.swapaxes(0, 1) @ params["head"].astype(x.dtype), batch["targets"])

    shape = sds((batch, length), jnp.int32)
    return *trained(create, loss_fn), {"inputs": shape, "targets": shape}


def mamba(layers=8, width=1024, states=16, length=512, batch=64, vocab=32768):
    """A selective state space model (after arXiv:2312.00752): a diagonal recurrence with gates that depend on the input."""
    inner = 2 * width

    def create():
        blocks = {
            "norm": (width,), "into": (width, inner), "gate": (width, inner), "out": (inner, width),
            "rate": (inner, inner // 32), "decay": (inner // 32, inner), "write": (inner, states), "read": (inner, states),
            "log": (inner, states), "skip": (inner,),
        }  # fmt: skip
        return {"embed": jnp.zeros((vocab, width)), "layers": {k: jnp.zeros((layers, *s)) for k, s in blocks.items()},
                "norm": jnp.zeros(width), "head": jnp.zeros((width, vocab))}  # fmt: skip

    @jax.checkpoint
    def block(x, p):
        p = jax.tree.map(lambda w: w.astype(x.dtype), p)
        y = norm(x, p["norm"])
        u, z = jax.nn.silu(y @ p["into"]), jax.nn.silu(y @ p["gate"])
        step = jax.nn.softplus(u @ p["rate"] @ p["decay"])
        rates = -jnp.exp(p["log"])

        def at(h, row):
            u, step, write, read = row  # [b, i], [b, i], [b, n], [b, n]
            h = jnp.exp(step[..., None] * rates) * h + (step * u)[..., None] * write[:, None]
            return h, jnp.einsum("bin,bn->bi", h, read)

        rows = jax.tree.map(lambda a: a.swapaxes(0, 1), (u, step, u @ p["write"], u @ p["read"]))
        _, y = jax.lax.scan(jax.checkpoint(at), jnp.zeros((*u.shape[::2], states), x.dtype), rows)
        return x + ((y.swapaxes(0, 1) + u * p["skip"]) * z) @ p["out"]

    def loss_fn(params, batch):
        x = params["embed"].astype(jnp.bfloat16)[batch["inputs"]]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        return cross_entropy(norm(x, params["norm"]) @ params["head"].astype(x.dtype), batch["targets"])

    shape = sds((batch, length), jnp.int32)
    return *trained(create, loss_fn), {"inputs": shape, "targets": shape}


def long_context(layers=4, width=2048, heads=16, hidden=8192, length=1 << 17, vocab=32768, chunk=1024):
    """One sequence of 128k tokens: full attention, computed for a chunk of queries at a time and recomputed backwards."""

    def create():
        blocks = attention_params(layers, width, width) | {
            "up": jnp.zeros((layers, width, hidden)), "down": jnp.zeros((layers, hidden, width)),
            "norm1": jnp.zeros((layers, width)), "norm2": jnp.zeros((layers, width)),
        }  # fmt: skip
        return {"embed": jnp.zeros((vocab, width)), "layers": blocks, "norm": jnp.zeros(width), "head": jnp.zeros((width, vocab))}

    def attention(p, x):
        b, t, d = x.shape
        q, k, v = ((x @ p[n].astype(x.dtype)).reshape(b, t, heads, d // heads) for n in ("query", "key", "value"))

        @jax.checkpoint
        def rows(q):
            scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * (d // heads) ** -0.5
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)

        chunks = q.reshape(b, t // chunk, chunk, heads, d // heads).swapaxes(0, 1)
        y = jax.lax.map(rows, chunks).swapaxes(0, 1).reshape(b, t, d)
        return y @ p["out"].astype(x.dtype)

    @jax.checkpoint
    def block(x, p):
        x = x + attention(p, norm(x, p["norm1"]))
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"].astype(x.dtype)) @ p["down"].astype(x.dtype)

    def loss_fn(params, batch):
        x = params["embed"].astype(jnp.bfloat16)[batch["inputs"]]
        x, _ = jax.lax.scan(lambda x, p: (block(x, p), None), x, params["layers"])
        return cross_entropy(norm(x, params["norm"]) @ params["head"].astype(x.dtype), batch["targets"])

    shape = sds((1, length), jnp.int32)
    return *trained(create, loss_fn), {"inputs": shape, "targets": shape}
