"""A small GPT in flax nnx, trained on a bundled novel: planned, run, explained, saved, and run again from the saved plan.

python examples/gpt.py          # or: make demo
"""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import DATA, OUT, curve, emulate_devices, local_mesh, text_batches, train

import shardplan


@dataclass(frozen=True)
class Config:
    layers: int = 6
    width: int = 128
    heads: int = 8
    length: int = 128
    batch: int = 16
    vocab: int = 128  # the novel is ASCII: one token per byte
    learning_rate: float = 3e-3
    warmup: int = 10
    steps: int = 100


DEMO = Config()
TINY = Config(layers=2, width=32, length=16, batch=16, warmup=2, steps=20, learning_rate=1e-2)


class Attention(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.query, self.key, self.value, self.out = (nnx.Linear(c.width, c.width, use_bias=False, rngs=rngs) for _ in range(4))
        self.heads = c.heads

    def __call__(self, x):
        b, t, d = x.shape
        q, k, v = (project(x).reshape(b, t, self.heads, d // self.heads) for project in (self.query, self.key, self.value))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(d // self.heads)
        causal = jnp.tril(jnp.ones((t, t), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        return self.out(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d))


class Block(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(c.width, rngs=rngs), nnx.LayerNorm(c.width, rngs=rngs)
        self.attention = Attention(c, rngs)
        self.up, self.down = nnx.Linear(c.width, 4 * c.width, rngs=rngs), nnx.Linear(4 * c.width, c.width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(c.vocab, c.width, rngs=rngs)
        self.positions = nnx.Embed(c.length, c.width, rngs=rngs)
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.LayerNorm(c.width, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(c: Config):
    schedule = optax.warmup_cosine_decay_schedule(0.0, c.learning_rate, c.warmup, c.steps, 0.1 * c.learning_rate)
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))

    def modules(rngs):
        model = GPT(c, rngs)
        return model, nnx.Optimizer(model, adamw, wrt=nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: modules(nnx.Rngs(0))))

    def create_state(key):
        return nnx.state(modules(nnx.Rngs(key)))

    def loss_fn(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"]).mean()

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    def batches(n, seed=0):
        return text_batches(n, c.batch, c.length, seed)

    return create_state, train_step, batches


def main():
    emulate_devices()
    mesh = local_mesh()
    create_state, train_step, batches = build(DEMO)
    key, data, few = jax.random.key(0), list(batches(DEMO.steps)), 20
    OUT.mkdir(exist_ok=True)

    step = shardplan.auto(mesh, donate_argnums=0)(train_step)
    plan = step.plan(jax.eval_shape(create_state, key), data[0])  # shapes are enough
    print(plan.explain())
    plan.save(OUT / "gpt_plan.json")
    (OUT / "gpt_plan.html").write_text(plan.html(), encoding="utf-8")

    losses, seconds = train(step, step.init(create_state, key), data)  # created sharded: no device ever holds all of the state
    print(f"\nTraining on {DATA.name}, {DEMO.steps} steps as planned:\n{curve(losses)}")

    plain = jax.jit(train_step, donate_argnums=0)
    plain_losses, plain_seconds = train(plain, jax.jit(create_state)(key), data[:few])
    print(f"\nseconds per step: {seconds:.3f} planned on {mesh.size} devices, {plain_seconds:.3f} plain jit on one")
    if mesh.size > 1 and jax.default_backend() == "cpu":
        print(f"(the {mesh.size} devices are emulated and share {os.cpu_count()} CPU cores: this shows overhead, not speed-up)")

    again = shardplan.auto(mesh, donate_argnums=0, plan=OUT / "gpt_plan.json")(train_step)
    again_losses, _ = train(again, again.init(create_state, key), data[:few])
    apart = np.max(np.abs(np.array(losses[:few]) / plain_losses - 1))
    print(f"first {few} losses: planned and plain jit differ by {apart:.1e} at most, relative;")
    same = "the same losses" if again_losses == losses[:few] else "OTHER losses"
    print(f"run again from {OUT.name}/gpt_plan.json without solving: {same}")
    print(f"written: {OUT.name}/gpt_plan.json, {OUT.name}/gpt_plan.html")


if __name__ == "__main__":
    main()
