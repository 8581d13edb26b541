"""Steps in the ways of flax nnx and equinox: what would train nothing is warned of, what is no array says how to keep it out."""

import warnings

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import shardplan
from shardplan.errors import ShardingError, ShardingWarning

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
X = jnp.linspace(-1, 1, 128).reshape(16, 8)
auto = shardplan.auto(MESH, cluster="h100")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def train(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_an_nnx_module_that_a_step_trains_and_does_not_return_is_warned_of():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.warns(
        ShardingWarning, match=r"changes argument .*down/bias.* and \d+ more in place and does not return.*\n  way out: nnx.split"
    ):
        auto(train).plan(model, optimizer, X)


def test_an_nnx_module_that_is_read_or_returned_is_not_warned_of():
    def trained(model, x):
        grads = nnx.grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        auto(lambda model, x: model(x)).plan(Net(nnx.Rngs(0)), X)
        auto(trained).plan(Net(nnx.Rngs(0)), X)


def test_functions_held_by_a_module_are_parted_from_its_arrays():
    model = eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))
    with pytest.raises(
        ShardingError, match=r"argument m/activation is .*, not an array\.\n  ways out: .*eqx.partition\(module, eqx.is_arr"
    ):
        auto(lambda m, x: jax.vmap(m)(x)).plan(model, X)
    arrays, rest = eqx.partition(model, eqx.is_array)
    assert auto(lambda arrays, x: jax.vmap(eqx.combine(arrays, rest))(x)).plan(arrays, X).inputs


class Trainer:
    rate = 0.1

    @auto
    def step(self, params, x):
        return params - self.rate * x

    def plain(self, params, x):
        return params - self.rate * x


def test_a_method_is_planned_bound_or_with_a_static_self():
    with pytest.raises(
        ShardingError, match=r"argument self is Trainer .*\n  ways out: auto\(mesh, static_argnums=0\), or a bound method"
    ):
        Trainer().step(X, X)
    assert auto(Trainer().plain).plan(X, X).inputs
    assert shardplan.auto(MESH, static_argnums=0, cluster="h100")(Trainer.plain).plan(Trainer(), X, X).inputs


def test_equinoxs_loops_under_vmap_and_prints_are_sharded_without_a_warning():

    def one(x):
        def body(carry):
            x, n = carry
            return 0.5 * x + jnp.cos(x), n + 1

        return eqxi.while_loop(lambda c: jnp.sum(c[0]) < 5, body, (x, 0), max_steps=4, kind="bounded")[0].sum()

    def step(x):
        jax.debug.print("{x}", x=x.sum())
        return jax.grad(lambda x: jax.vmap(one)(x).sum())(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardingWarning)
        plan = shardplan.auto(MESH, pins={"x": jax.P("data")}, cluster="h100")(step).plan(X)
    assert not plan.unknown
    assert {"unvmap_any", "nonbatchable", "debug_print"} <= {op.primitive for op in plan.context.planned.graph.ops}
