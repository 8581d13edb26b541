"""A flax linen CNN with batch normalisation on scikit-learn's digits: a small model, so data parallelism is expected.

python examples/digits_cnn.py
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits


@dataclass(frozen=True)
class Config:
    channels: int = 32
    hidden: int = 128
    batch: int = 256
    learning_rate: float = 0.05


DEMO = Config()
TINY = Config(channels=8, hidden=32, batch=32)


class CNN(nn.Module):
    c: Config

    @nn.compact
    def __call__(self, x, train: bool):
        for channels in (self.c.channels, 2 * self.c.channels):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.c.hidden)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


class State(train_state.TrainState):
    batch_stats: Any


def build(c: Config):
    model, sgd = CNN(c), optax.sgd(c.learning_rate, momentum=0.9, nesterov=True)

    def create_state(key):
        variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
        return State.create(apply_fn=model.apply, params=variables["params"], tx=sgd, batch_stats=variables["batch_stats"])

    def train_step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, (logits, updates["batch_stats"])

        (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}

    def batches(n, seed=0):
        digits = load_digits()
        images, labels = (digits.images / 16).astype(np.float32)[..., None], digits.target.astype(np.int32)
        rng = np.random.default_rng(seed)
        for _ in range(n):
            rows = rng.integers(0, len(labels), c.batch)
            yield {"image": images[rows], "label": labels[rows]}

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("digits CNN", build, DEMO, axes=("data",))
