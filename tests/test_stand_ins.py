"""Steps whose pytrees have classes that take nothing but arrays: the numbers and the types are those of plain jit."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import checkpoints
from shardplan.plan.stand_ins import StandIn, stood_back, stood_in

AUTO = (jax.sharding.AxisType.Auto,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    """Asks for the rank of its arrays."""

    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        if self.w.ndim != 2 or self.b.ndim != 1:
            raise ValueError("a matrix and a vector")


@jax.tree_util.register_pytree_node_class
class Scale:
    """Asks for the dtype of its array, and computes with it."""

    def __init__(self, x, period=5):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError("a number")
        self.x, self.period = x * 1, period

    def tree_flatten(self):
        return (self.x,), self.period

    @classmethod
    def tree_unflatten(cls, period, children):
        return cls(*children, period)


def create(key):
    return {"net": [Dense(jax.random.normal(key, (64, 64)), jnp.zeros(64)) for _ in range(2)], "scale": Scale(jnp.float32(8))}


def step(state, x):
    def loss(net):
        h = x
        for layer in net:
            h = jnp.tanh(h @ layer.w + layer.b)
        return (h**2).mean() * state["scale"].x

    value, grads = jax.value_and_grad(loss)(state["net"])
    net = jax.tree.map(lambda p, g: p - 0.1 * g / state["scale"].x, state["net"], grads)
    return {"net": net, "scale": Scale(state["scale"].x * 0.99)}, Scale(value)


X = jax.random.normal(jax.random.key(1), (32, 64))


@cache
def planned(kind=jax.sharding.AxisType.Auto, **options):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    options = {"pins": {"state/net/*/w": P(None, "model")}, "cluster": "h100"} | options
    return shardplan.auto(mesh, donate_argnums=0, **options)(step)


def assert_same(found, want):
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_numbers_and_types_are_those_of_plain_jit(kind):
    auto, want = planned(kind), create(jax.random.key(0))
    auto.plan(want, X)
    found = auto.init(create, jax.random.key(0))
    assert isinstance(found["net"][0], Dense) and found["net"][0].w.sharding.spec == P(None, "model")
    for _ in range(3):
        (found, value), (want, plain) = auto(found, X), jax.jit(step)(want, X)
        assert_same((jax.device_get(found), jax.device_get(value)), (want, plain))


def test_inputs_keep_their_paths():
    plan = planned().plan(create(jax.random.key(0)), X)
    assert [x.path for x in plan.inputs][3:] == ["state/net/1/b", "state/scale/0", "x"]
    assert [x.path for x in plan.outputs][-2:] == ["0/scale/0", "1/0"]
    assert isinstance(plan.in_shardings[0][0]["scale"], StandIn)


def test_a_state_travels(tmp_path):
    plan = planned().plan(create(jax.random.key(0)), X)
    assert_same(jax.device_get(shardplan.transfer(create(jax.random.key(0)), plan)), create(jax.random.key(0)))
    plan.save(tmp_path / "plan.json")
    again = planned(pins=None, plan=tmp_path / "plan.json")
    assert_same(jax.device_get(again(create(jax.random.key(0)), X)), jax.jit(step)(create(jax.random.key(0)), X))


def test_a_state_is_restored(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    auto = planned()
    plan = auto.plan(create(jax.random.key(0)), X)
    state = auto.init(create, jax.random.key(0))
    with ocp.CheckpointManager(tmp_path) as manager:
        checkpoints.save(manager, 1, state, plan)
        manager.wait_until_finished()
        assert_same(jax.device_get(checkpoints.restore(manager, plan).state), create(jax.random.key(0)))


def test_a_result_alone():
    auto = shardplan.auto(jax.make_mesh((8,), ("data",), axis_types=AUTO))(lambda x: Scale(x.sum()))
    for _ in range(3):
        found = auto(X)
        assert isinstance(found, Scale) and found.x == pytest.approx(float(X.sum()), abs=1e-3)


def test_other_trees_are_the_same_objects():
    tree = {"a": (X, None), "b": [X]}
    assert stood_in(tree) is tree and stood_back(tree) is tree
    inside = (tree, Scale(X))
    found = stood_in(inside)
    assert isinstance(found[1], StandIn) and found[0] == tree and jax.tree.leaves(found)[-1] is inside[1].x
    assert isinstance(stood_back(found)[1], Scale)


@jax.tree_util.register_pytree_node_class
class Scaled:
    """A factor that is rebuilt with arrays and plain objects alone, as jit does, and has a number in its structure."""

    def __init__(self, factor, period=2):
        if type(factor) is not object and not jnp.issubdtype(factor.dtype, jnp.floating):
            raise TypeError("factor is no float")
        self.factor, self.period = factor, period

    def tree_flatten(self):
        return (self.factor,), self.period

    @classmethod
    def tree_unflatten(cls, period, leaves):
        return cls(*leaves, period)


ROWS = jnp.ones((16, 8))


def test_a_class_that_checks_what_it_is_rebuilt_with_is_planned_and_run(tmp_path):
    def step(state, x, *, rate):
        w, scaled = state
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2) * scaled.factor[0])(w)
        return (w - rate * grad / scaled.factor[0], Scaled(scaled.factor * scaled.period, scaled.period)), loss

    def create(period=2):
        return jnp.ones((8, 16)), Scaled(jnp.arange(1.0, 17), period)

    mesh = jax.make_mesh((8,), ("data",), axis_types=AUTO)
    planned = shardplan.auto(mesh, in_shardings=(None, P("data")), cluster="h100", donate_argnums=0)(step)
    plan = planned.plan(create(), ROWS, rate=0.1)
    assert [leaf.path for leaf in plan.inputs] == ["state/0", "state/1/0", "x", "rate"]
    plan.save(tmp_path / "plan.json")
    for run in (planned, planned.with_options(plan=tmp_path / "plan.json")):
        want = got = create()
        for _ in range(3):
            (want, _), (got, _) = jax.jit(step)(want, ROWS, rate=0.1), run(got, ROWS, rate=0.1)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)
        first, given = run.init(create), create()
        assert run(first, ROWS, rate=0.1)[0][1].period == 2 and run(given, ROWS, rate=0.1) and given[0].is_deleted()
    (_, scaled), _ = planned(create(3), ROWS, rate=0.1)  # another structure of the same arrays is another step
    assert scaled.period == 3 and scaled.factor[1] == 6
