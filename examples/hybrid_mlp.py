"""The hybrid MLP of OneFlow's tutorial: a few small hidden layers under one very wide output layer.

Splitting the batch is cheap for the hidden layers, whose weights are small, and dear for the output layer, whose gradient
would have to be summed over all devices. So experts shard the batch below and the classes above. Here nothing is
configured: the planner finds it.

    python examples/hybrid_mlp.py
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Config:
    inputs: int = 64
    hidden: int = 256
    layers: int = 3
    classes: int = 8192
    batch: int = 1024
    learning_rate: float = 3e-3


DEMO = Config()
TINY = Config(inputs=16, hidden=32, classes=512, batch=64)
BIG = Config(inputs=1024, hidden=1024, classes=1 << 17, batch=1 << 13)


def build(c: Config):
    adam = optax.adam(c.learning_rate)

    def create_state(key):
        sizes = [c.inputs] + [c.hidden] * c.layers + [c.classes]
        keys = jax.random.split(key, len(sizes) - 1)
        params = [
            {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
            for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
        ]
        return {"params": params, "opt": adam.init(params)}

    def loss_fn(params, batch):
        *hidden, output = params
        x = batch["x"]
        for layer in hidden:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ output["w"] + output["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = adam.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batches(n, seed=0):
        """Each class is a point; an example is its class's point with noise. A few classes are frequent, most are rare."""
        points = np.random.default_rng(1).normal(size=(c.classes, c.inputs)).astype(np.float32)
        frequency = 1 / np.arange(1, c.classes + 1)
        rng = np.random.default_rng(seed)
        for _ in range(n):
            label = rng.choice(c.classes, c.batch, p=frequency / frequency.sum()).astype(np.int32)
            noise = rng.normal(size=(c.batch, c.inputs)).astype(np.float32)
            yield {"x": points[label] + 0.3 * noise, "label": label}

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("hybrid MLP", build, DEMO, axes=("devices",))
