"""A recommendation model after DLRM: embedding tables that dwarf the rest of the network, so they are what must be sharded.

The click log is made up, deterministically: ids have hidden tastes; a click is likelier where the tastes of its ids add up.

    python examples/dlrm.py
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Config:
    tables: tuple[int, ...] = (65536, 32768, 32768, 8192, 1024, 64)  # rows of each
    width: int = 32
    dense: int = 16
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (128, 64)
    batch: int = 2048
    learning_rate: float = 0.05


DEMO = Config()
TINY = Config(tables=(512, 256, 64, 8), width=16, bottom=(32,), top=(32,), batch=64)
BIG = Config(
    tables=(1 << 25, 1 << 24, 1 << 24, 1 << 22, 1 << 20, 1 << 16, 1024, 64),
    width=128,
    bottom=(512, 256),
    top=(1024, 1024, 512),
    batch=1 << 15,
)


def mlp_params(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)} for k, m, n in shapes]


def mlp(layers, x):
    for layer in layers:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


def build(c: Config):
    adagrad = optax.adagrad(c.learning_rate)
    vectors = len(c.tables) + 1
    pairs = np.triu_indices(vectors, 1)

    def create_state(key):
        bottom, top, head, *tables = jax.random.split(key, 3 + len(c.tables))
        features = c.width + len(pairs[0])
        params = {
            "tables": [jax.random.normal(k, (rows, c.width)) * c.width**-0.5 for k, rows in zip(tables, c.tables, strict=True)],
            "bottom": mlp_params(bottom, (c.dense, *c.bottom, c.width)),
            "top": mlp_params(top, (features, *c.top)),
            "head": jax.random.normal(head, (c.top[-1],)) * c.top[-1] ** -0.5,
        }
        return {"params": params, "opt": adagrad.init(params)}

    def loss_fn(params, batch):
        x = mlp(params["bottom"], batch["dense"])
        ids = batch["ids"]
        looked_up = [table[ids[:, i]] for i, table in enumerate(params["tables"])]
        stacked = jnp.stack([x, *looked_up], axis=1)
        crossed = jnp.einsum("bif,bjf->bij", stacked, stacked)[:, pairs[0], pairs[1]]
        logits = mlp(params["top"], jnp.concatenate([x, crossed], axis=1)) @ params["head"]
        return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = adagrad.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batches(n, seed=0):
        tastes = np.random.default_rng(1)
        taste = [tastes.normal(size=rows) for rows in c.tables]
        weight = tastes.normal(size=c.dense) / c.dense**0.5
        rng = np.random.default_rng(seed)
        for _ in range(n):
            dense = rng.normal(size=(c.batch, c.dense)).astype(np.float32)
            # a few ids are popular, most are rare
            ids = np.stack([(rows * rng.random(c.batch) ** 4).astype(np.int32) for rows in c.tables], axis=1)
            score = dense @ weight + sum(t[ids[:, i]] for i, t in enumerate(taste)) / len(taste) ** 0.5
            click = rng.random(c.batch) < 1 / (1 + np.exp(-3 * score))
            yield {"dense": dense, "ids": ids, "click": click.astype(np.float32)}

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("DLRM", build, DEMO, steps=40, axes=("devices",))
