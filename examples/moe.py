"""A mixture-of-experts transformer in equinox, on the bundled novel: each token goes to two of many expert networks.

Dispatch is GShard's (arXiv:2006.16668): one-hot einsums over groups of tokens, each expert taking up to `capacity` tokens
of a group. The experts' weights are most of the model, so experts are sharded over devices and tokens travel to them.

    python examples/moe.py
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from harness import text_batches


@dataclass(frozen=True)
class Config:
    layers: int = 2
    width: int = 128
    heads: int = 8
    experts: int = 16
    hidden: int = 256  # of one expert
    length: int = 128
    batch: int = 16  # a sequence is a group
    vocab: int = 128
    slack: float = 1.25  # capacity over an even share
    learning_rate: float = 2e-3

    @property
    def capacity(self) -> int:
        return int(self.slack * 2 * self.length / self.experts)


DEMO = Config()
TINY = Config(layers=1, width=32, experts=8, hidden=64, length=16, learning_rate=1e-2)
BIG = Config(layers=4, width=2048, heads=16, experts=64, hidden=8192, length=2048, batch=64, vocab=32768)


class Attention(eqx.Module):
    qkv: jax.Array
    out: jax.Array

    def __init__(self, c: Config, key):
        k1, k2 = jax.random.split(key)
        self.qkv = jax.random.normal(k1, (3, c.width, c.heads, c.width // c.heads)) * c.width**-0.5
        self.out = jax.random.normal(k2, (c.heads, c.width // c.heads, c.width)) * c.width**-0.5

    def __call__(self, x):
        q, k, v = jnp.einsum("btd,xdhk->xbthk", x, self.qkv)
        return jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), self.out)


class Experts(eqx.Module):
    router: jax.Array
    up: jax.Array
    down: jax.Array
    capacity: int = eqx.field(static=True)

    def __init__(self, c: Config, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.router = jax.random.normal(k1, (c.width, c.experts)) * c.width**-0.5
        self.up = jax.random.normal(k2, (c.experts, c.width, c.hidden)) * (2 / c.width) ** 0.5
        self.down = jax.random.normal(k3, (c.experts, c.hidden, c.width)) * c.hidden**-0.5
        self.capacity = c.capacity

    def route(self, x):
        """Where each token goes: weights[group, token, expert, slot], and how unevenly the experts are used."""
        experts = self.router.shape[1]
        gates = jax.nn.softmax(x @ self.router)
        taken = jnp.zeros((x.shape[0], 1, experts))
        combine = 0.0
        left = gates
        for _ in range(2):
            chosen = jax.nn.one_hot(left.argmax(-1), experts)
            slot = jnp.cumsum(chosen, axis=1) - chosen + taken
            fits = chosen * (slot < self.capacity)
            combine += (gates * fits)[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), self.capacity)
            taken += chosen.sum(axis=1, keepdims=True)
            left = left * (1 - chosen)
        used = jax.nn.one_hot(gates.argmax(-1), experts).mean(axis=1)
        return combine, experts * jnp.mean(jnp.sum(gates.mean(axis=1) * used, axis=-1))

    def __call__(self, x):
        combine, uneven = self.route(x)
        tokens = jnp.einsum("gsec,gsd->egcd", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.gelu(jnp.einsum("egcd,edf->egcf", tokens, self.up))
        return jnp.einsum("gsec,egcd->gsd", combine, jnp.einsum("egcf,efd->egcd", hidden, self.down)), uneven


class Model(eqx.Module):
    tokens: jax.Array
    positions: jax.Array
    blocks: list[tuple[Attention, Experts]]
    head: jax.Array

    def __init__(self, c: Config, key):
        k1, k2, k3, *keys = jax.random.split(key, 3 + 2 * c.layers)
        self.tokens = jax.random.normal(k1, (c.vocab, c.width)) * 0.5
        self.positions = jax.random.normal(k2, (c.length, c.width)) * 0.1
        self.blocks = [(Attention(c, a), Experts(c, b)) for a, b in zip(keys[::2], keys[1::2], strict=True)]
        self.head = jax.random.normal(k3, (c.width, c.vocab)) * c.width**-0.5

    def __call__(self, tokens):
        x, uneven = self.tokens[tokens] + self.positions, 0.0
        for attention, experts in self.blocks:
            x = x + attention(norm(x))
            y, this = experts(norm(x))
            x, uneven = x + y, uneven + this
        return norm(x) @ self.head, uneven


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def build(c: Config):
    adam = optax.adam(c.learning_rate)

    def create_state(key):
        model = Model(c, key)
        return model, adam.init(eqx.filter(model, eqx.is_array))

    def loss_fn(model, batch):
        logits, uneven = model(batch["inputs"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + 0.01 * uneven, loss

    def train_step(state, batch):
        model, opt = state
        (_, loss), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, batch)
        updates, opt = adam.update(grads, opt, model)
        return (eqx.apply_updates(model, updates), opt), loss

    def batches(n, seed=0):
        return text_batches(n, c.batch, c.length, seed)

    return create_state, train_step, batches


if __name__ == "__main__":
    from harness import run

    run("mixture of experts", build, DEMO, steps=20)
