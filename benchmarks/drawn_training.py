"""From a drawn loss to a training step: mixed precision, optimizer, gradient accumulation, frozen parts, averages of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from drawn_layers import Draw, Shapes

Batch = dict[str, tuple[tuple[int, ...], Any, int]]
"""Name -> (shape, dtype, number of different integers, or 0)."""

OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda: optax.adamw(1e-3),
    "clipped adam": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 1000))
    ),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sgd": lambda: optax.sgd(1e-2),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "lamb": lambda: optax.lamb(1e-3),
    "adamw with bfloat16 moments": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
}


@dataclass(frozen=True)
class Model:
    """A loss over parameters.

    Attributes:
        shapes: of the parameters; `frozen`: of those that are not trained.
        loss: (parameters, batch, dtype) -> number.
        batch: what a batch holds; the first dim of each is the examples.
    """

    shapes: Shapes
    loss: Callable
    batch: Batch
    frozen: Shapes = field(default_factory=dict)


def trained(d: Draw, model: Model, devices: int):
    """(step, create_state, create_batch) of a loss."""
    name = d.ingredient("adamw", *OPTIMIZERS)
    precision = d.ingredient("bfloat16 computation", "bfloat16 computation", "float32", "bfloat16 parameters", "scaled float16")
    dtype = {"float32": jnp.float32, "scaled float16": jnp.float16}.get(precision, jnp.bfloat16)
    dtype = jnp.float32 if d.exact else dtype
    held = jnp.bfloat16 if precision == "bfloat16 parameters" else jnp.float32
    scale = 128.0 if precision == "scaled float16" else 1.0
    parts = _accumulated(d, model, devices)
    average = d.also("averaged parameters", 0.1)
    optimizer = OPTIMIZERS[name]()
    if d.also("frozen parts", 0.12):  # every other leaf, by the order of their names
        optimizer = optax.chain(optimizer, _every_other_zero())

    def total(params, frozen, batch):
        return model.loss(params | frozen, batch, dtype) * scale

    def gradients(params, frozen, batch):
        if parts == 1:
            return jax.value_and_grad(total)(params, frozen, batch)

        def add(carry, some):
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(total)(params, frozen, some)), None

        start = jnp.zeros((), jnp.float32), jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
        summed, _ = jax.lax.scan(add, start, batch)
        return jax.tree.map(lambda g: g / parts, summed)

    def train_step(state, batch):
        params = state["params"]
        loss, grads = gradients(params, state.get("frozen", {}), batch)
        grads = jax.tree.map(lambda g, w: (g / scale).astype(w.dtype), grads, params) if scale != 1 or parts > 1 else grads
        updates, opt = optimizer.update(grads, state["opt"], params)
        params = optax.apply_updates(params, updates)
        after = state | {"params": params, "opt": opt}
        if average:
            after["average"] = jax.tree.map(lambda a, w: 0.99 * a + 0.01 * w.astype(a.dtype), state["average"], params)
        return after, loss / scale

    def create_state(key):
        params, frozen = _created(model.shapes, key, held), _created(model.frozen, key, held)
        state = {"params": params, "opt": optimizer.init(params)} | ({"frozen": frozen} if frozen else {})
        return state | ({"average": jax.tree.map(lambda w: w.astype(jnp.float32), params)} if average else {})

    def leading(shape):
        return (parts, shape[0] // parts, *shape[1:]) if parts > 1 else shape

    def create_batch(key):
        of = zip(model.batch.items(), jax.random.split(key, len(model.batch)), strict=True)
        return {
            name: jax.random.randint(k, leading(s), 0, high, t) if high else jax.random.normal(k, leading(s), t)
            for (name, (s, t, high)), k in of
        }

    return train_step, create_state, create_batch


def _accumulated(d: Draw, model: Model, devices: int) -> int:
    """Number of parts that a step's batch is read in; 1 where it does not divide."""
    examples = next(iter(model.batch.values()))[0][0]
    found = [n for n in (4, 8, 2) if examples % n == 0 and examples // n >= devices]
    return d.sizes.choice(found) if d.also("gradient accumulation", 0.2) and found else 1


def _every_other_zero() -> optax.GradientTransformation:
    """Updates of every other leaf are zero: that part is frozen."""

    def update(updates, state, params=None):
        leaves, tree = jax.tree.flatten(updates)
        return jax.tree.unflatten(tree, [jnp.zeros_like(u) if n % 2 else u for n, u in enumerate(leaves)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _created(shapes: Shapes, key, dtype):
    """Arrays of these shapes: norms' scales one, biases zero, the rest random and small."""

    def one(path, shape):
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if words[-1] == "scale":
            return jnp.ones(shape, dtype)
        if words[-1].startswith("bias"):
            return jnp.zeros(shape, dtype)
        inner = shape[1:] if "scanned" in words else shape
        fan = max(1, math.prod(inner[:-1]) if len(inner) != 3 else inner[-2])
        made = jax.random.fold_in(key, sum(map(ord, "/".join(words))))
        return (jax.random.normal(made, shape) * min(0.5, 0.7 * fan**-0.5)).astype(dtype)

    return jax.tree_util.tree_map_with_path(one, shapes, is_leaf=lambda x: isinstance(x, tuple))
