"""The state of a planned step in the rest of a program: plain JAX takes it as it is, on the mesh that the README writes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
SPREAD = {"state/up": P("data", "model"), "state/down": P(("data", "model"), None)}


def create(key):
    up, down = jax.random.split(key)
    return {"up": 0.1 * jax.random.normal(up, (64, 128)), "down": 0.1 * jax.random.normal(down, (128, 64))}


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def step(state, x):
    value, grads = jax.value_and_grad(loss)(state, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def sample(state, key):
    return jax.random.categorical(key, jnp.ones((4, 64)) @ state["up"])


X = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
AFTERWARDS = {
    "evaluation": lambda s: jax.jit(loss)(s, X),
    "evaluation without jit": lambda s: loss(s, X),
    "gradients": lambda s: jax.jit(jax.grad(loss))(s, X),
    "optax.global_norm": optax.global_norm,
    "optimizer": lambda s: optax.adam(1e-3).update(s, optax.adam(1e-3).init(s))[0],
    "sampling": lambda s: jax.jit(sample)(s, jax.random.key(1)),
    "sampling without jit": lambda s: sample(s, jax.random.key(1)),
    "indexing": lambda s: s["up"][3, 5:9],
    "reshaping": lambda s: s["down"].reshape(-1)[::7],
    "mixing with new arrays": lambda s: jax.tree.map(jnp.add, s, create(jax.random.key(2))),
    "on the host": lambda s: jax.tree.map(np.asarray, s),
}


@pytest.fixture(scope="module")
def states():
    """The state after two steps, by plan and by plain JAX."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    planned = shardplan.auto(mesh, pins=SPREAD)(step)
    planned.plan(jax.eval_shape(create, jax.random.key(0)), X)
    state, plain = planned.init(create, jax.random.key(0)), create(jax.random.key(0))
    for _ in range(2):
        (state, _), (plain, _) = planned(state, X), jax.jit(step)(plain, X)
    assert {k: x.sharding.spec for k, x in state.items()} == {"up": P("data", "model"), "down": P(("data", "model"), None)}
    return state, plain


@pytest.mark.parametrize("name", AFTERWARDS)
def test_plain_jax_takes_the_trained_state(states, name):
    got, want = map(AFTERWARDS[name], states)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
