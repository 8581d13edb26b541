"""The examples as plain JAX: without any plan they trace quickly, are the same on every run, and learn."""

import jax
import numpy as np
import pytest
from models import MODELS, loss_of

pytestmark = pytest.mark.usefixtures("first_plan")


def losses(name: str, steps: int) -> list[float]:
    create_state, train_step, batches = MODELS[name]()
    state, step, found = jax.jit(create_state)(jax.random.key(0)), jax.jit(train_step, donate_argnums=0), []
    for batch in batches(steps):
        state, out = step(state, batch)
        found.append(float(loss_of(out)))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls(name):
    found = losses(name, 20)
    assert np.isfinite(found).all()
    assert np.mean(found[-5:]) < 0.98 * np.mean(found[:5])


@pytest.mark.parametrize("name", MODELS)
def test_batches_are_the_same_every_time(name):
    _, _, batches = MODELS[name]()
    once, again, other = list(batches(2)), list(batches(2)), list(batches(2, seed=1))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    same = jax.tree.map(np.array_equal, once, other)
    assert not all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", MODELS)
def test_state_keeps_its_shapes(name):
    create_state, train_step, batches = MODELS[name]()
    state = jax.eval_shape(create_state, jax.random.key(0))
    after, _ = jax.eval_shape(train_step, state, next(batches(1)))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.leaves(after) == jax.tree.leaves(state)
