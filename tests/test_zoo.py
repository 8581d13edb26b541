"""The benchmarks' models have the sizes they claim, and are shapes only."""

import math
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import zoo

import shardplan

pytestmark = pytest.mark.usefixtures("first_plan")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2", 0.1245), ("gpt2-scan", 0.1245), ("gpt3-96-scan", 174.6), ("llama-8b", 8.030), ("llama-70b", 70.55)],
)
def test_has_as_many_parameters_as_published(name, billions):
    _, state, batch = zoo.ZOO[name]()
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state["params"])) == pytest.approx(billions * 1e9, rel=1e-3)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))


@pytest.mark.parametrize("name", [*zoo.QUALITY, "gpt2-scan"])
def test_state_comes_out_as_it_went_in(name):
    train_step, state, batch = (zoo.QUALITY.get(name) or zoo.ZOO[name])()
    after, loss = jax.eval_shape(train_step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    assert loss.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_a_vocabulary_that_no_axis_divides_costs_no_more_than_the_next_that_all_divide(shape):
    """GPT-2's 50257 words, in two layers, against 50304."""
    seconds = {}
    for vocab in (50257, 50304):
        step, state, batch = zoo.gpt2(scan=True, layers=2, vocab=vocab)
        mesh = jax.sharding.AbstractMesh(shape, ("x", "y")[: len(shape)])
        seconds[vocab] = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, batch).seconds["total"]
    assert seconds[50257] == pytest.approx(seconds[50304], rel=0.05)
