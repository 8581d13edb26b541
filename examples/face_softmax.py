"""Face recognition's huge softmax: a small network that embeds a picture, and one class vector per person to compare it with.

With a million people the class matrix and its logits are far larger than everything else; sharding the people over the
devices needs only a maximum and a sum per picture between them. The loss is CosFace's (arXiv:1801.09414): cosines, scaled,
less a margin for the right person. The pictures are made up, deterministically: a smooth pattern per person, with noise.

    python examples/face_softmax.py
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class Config:
    side: int = 16
    channels: int = 16
    embedding: int = 64
    people: int = 32768
    batch: int = 256
    scale: float = 16.0
    margin: float = 0.2
    learning_rate: float = 0.5


DEMO = Config()
TINY = Config(side=8, channels=8, embedding=16, people=512, batch=32, learning_rate=0.2)
BIG = Config(side=112, channels=64, embedding=512, people=1 << 20, batch=1024)


def unit(x):
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def build(c: Config):
    sgd = optax.sgd(c.learning_rate, momentum=0.9)
    channels = (1, c.channels, 2 * c.channels)

    def create_state(key):
        conv1, conv2, project, people = jax.random.split(key, 4)
        features = (c.side // 4) ** 2 * channels[-1]
        params = {
            "conv": [
                jax.random.normal(k, (3, 3, m, n)) * (2 / (9 * m)) ** 0.5
                for k, m, n in zip((conv1, conv2), channels[:-1], channels[1:], strict=True)
            ],
            "project": jax.random.normal(project, (features, c.embedding)) * features**-0.5,
            "people": jax.random.normal(people, (c.people, c.embedding)) * c.embedding**-0.5,
        }
        return {"params": params, "opt": sgd.init(params)}

    def embed(params, x):
        for kernel in params["conv"]:
            x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(x)
        return unit(x.reshape(x.shape[0], -1) @ params["project"])

    def loss_fn(params, batch):
        cosine = embed(params, batch["image"]) @ unit(params["people"]).T
        right = jax.nn.one_hot(batch["person"], c.people, dtype=cosine.dtype)
        logits = c.scale * (cosine - c.margin * right)
        return -jnp.mean(jnp.sum(right * jax.nn.log_softmax(logits), axis=-1))

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = sgd.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def batches(n, seed=0):
        faces = np.random.default_rng(1)
        codes = faces.normal(size=(c.people, 12)).astype(np.float32)
        grid = np.linspace(0, np.pi, c.side, dtype=np.float32)
        waves = np.stack([np.outer(np.cos(i * grid), np.cos(j * grid)) for i in range(3) for j in range(4)])
        frequency = 1 / np.arange(1, c.people + 1)
        rng = np.random.default_rng(seed)
        for _ in range(n):
            person = rng.choice(c.people, c.batch, p=frequency / frequency.sum()).astype(np.int32)
            noise = rng.normal(size=(c.batch, c.side, c.side)).astype(np.float32)
            image = np.einsum("bk,kxy->bxy", codes[person], waves) / 3 + 0.3 * noise
            yield {"image": image[..., None].astype(np.float32), "person": person}

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("face recognition", build, DEMO, steps=40, axes=("devices",))
