"""State that no mesh axis divides is held filled up with zeros between steps: the same numbers, and never taken for an array."""

import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from clusters import NEAR
from jax import lax

import shardplan
from shardplan import checkpoints
from shardplan.plan.padded import Padded, is_padded

pytestmark = pytest.mark.usefixtures("first_plan")

VOCABULARY, WIDTH, HIDDEN, ROWS, LENGTH = 101, 34, 150, 30, 11
"""No size is a multiple of 4 or 8."""
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
PINS = {"**/table": jax.P("x"), "**/up": jax.P(None, "x")}
"""Of both programs."""


def create():
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"table": jax.random.normal(keys[0], (VOCABULARY, WIDTH)), "up": 0.1 * jax.random.normal(keys[1], (WIDTH, HIDDEN))}
    return {"params": params, "count": jnp.int32(0)}


def loss_fn(params, ids):
    x = params["table"][ids] @ params["up"] @ params["up"].T
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x) @ params["table"].T, ids).mean()


def train_step(state, ids):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], ids)
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), "count": state["count"] + 1}, loss


STATE = jax.eval_shape(create)


class Deep:
    """Adam, gradient accumulation in a loop, layers in a loop, recomputed."""

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))

    def create(self):
        keys = jax.random.split(jax.random.key(0), 3)
        layers = {
            "up": 0.1 * jax.random.normal(keys[0], (2, WIDTH, HIDDEN)),
            "down": 0.1 * jax.random.normal(keys[1], (2, HIDDEN, WIDTH)),
            "scale": jnp.ones((2, WIDTH)),
        }
        params = {"table": jax.random.normal(keys[2], (VOCABULARY, WIDTH)), "layers": layers}
        return {"params": params, "opt": self.tx.init(params), "count": jnp.int32(0)}

    def loss(self, params, ids):
        def layer(x, p):
            return x + jax.nn.gelu((x * p["scale"]) @ p["up"]) @ p["down"], None

        x, _ = lax.scan(jax.checkpoint(layer), params["table"][ids], params["layers"])
        logits = (x / jnp.abs(x).max(-1, keepdims=True)) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    def step(self, state, ids):
        def accumulate(grads, ids):
            value, more = jax.value_and_grad(self.loss)(state["params"], ids)
            return jax.tree.map(jnp.add, grads, more), value

        grads, values = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, state["params"]), ids.reshape(2, -1, LENGTH))
        updates, opt = self.tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "count": state["count"] + 1}, values.mean()


DEEP = Deep()


def make_mesh(shape, kind="Auto"):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("x", "y", "z")[: len(shape)], axis_types=(jax.sharding.AxisType[kind],) * len(shape))


def padded_step(shape=(8,), kind="Auto", fun=train_step, **options):
    options = {"pins": PINS, "pad_state": True, "donate_argnums": 0} | options
    return shardplan.auto(make_mesh(shape, kind), cluster=NEAR, search="propagation", **options)(fun)


def trained(step, n=3, state=None, make=create):
    state = step.init(make) if state is None else state
    for _ in range(n):
        state, loss = step(state, IDS)
    return state, loss


@functools.cache
def plainly_trained(fun=train_step, make=create):
    state, step = make(), jax.jit(fun)
    for _ in range(3):
        state, loss = step(state, IDS)
    return jax.tree.map(np.asarray, (state, loss))


def assert_same(got, want, atol=1e-4):
    for x, y in zip(jax.tree.leaves(shardplan.unpadded(got)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def assert_filled_with_zeros(state):
    found = [x for x in jax.tree.leaves(state, is_leaf=is_padded) if is_padded(x)]
    assert found
    for x in found:
        held = np.asarray(x.array)
        inside = tuple(map(slice, x.shape))
        assert held.shape != x.shape and np.count_nonzero(held) == np.count_nonzero(held[inside])


@pytest.mark.parametrize(("shape", "kind"), [((8,), "Explicit"), ((8,), "Auto"), ((2, 4), "Explicit"), ((2, 2, 2), "Auto")])
def test_same_numbers(shape, kind):
    axis = "y" if shape == (2, 4) else "x"
    pins = {"**/table": jax.P(axis), "**/layers/up": jax.P(None, None, axis), "**/layers/down": jax.P(None, axis)}
    step = padded_step(shape, kind, DEEP.step, pins=pins)
    plan = step.plan(jax.eval_shape(DEEP.create), IDS)
    n = plan.mesh.size(axis)
    held = {x.path: x.held_shape(plan.mesh) for x in plan.inputs}
    assert held["state/opt/1/0/mu/table"] == (-(-VOCABULARY // n) * n, WIDTH)
    state, loss = trained(step, make=DEEP.create)
    assert_same((state, loss), plainly_trained(DEEP.step, DEEP.create))
    assert_filled_with_zeros(state)
    assert len(step._steps) == 1


def test_without_the_option_nothing_is_padded():
    plan = padded_step(pins=None, pad_state=False).plan(STATE, IDS)
    assert not plan.pads_state
    with pytest.raises(shardplan.ShardingError, match="pad_state=True for what the step returns in its place, or pad dim 0 to 104"):
        padded_step(pad_state=False).plan(STATE, IDS)


def test_a_batch_is_never_padded():
    with pytest.raises(shardplan.ShardingError, match="does not divide"):
        padded_step(pins={"ids": jax.P(None, "x")}).plan(STATE, IDS)


def test_the_planner_pads_where_memory_is_short():
    """Unasked by pins; whole along a dim that does not divide, the state would not fit."""
    state = jax.eval_shape(DEEP.create)
    least = padded_step(fun=DEEP.step, pins=None, memory="heavy").plan(state, IDS)
    assert least.pads_state
    with pytest.raises(shardplan.ShardingError, match="ways out: pad_state=True, a larger mesh"):
        padded_step(fun=DEEP.step, pins=None, memory=least.memory().peak, pad_state=False).plan(state, IDS)


def test_predicted_bytes_are_those_of_the_filled_up_shards():
    step = padded_step()
    plan, state = step.plan(STATE, IDS), step.init(create)
    first = jax.devices()[0]
    held = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == first)
    assert held == sum(x.device_bytes(plan.mesh) for x in plan.inputs if x.path.startswith("state"))


def test_a_plan_file_says_what_is_padded(tmp_path):
    padded_step().plan(STATE, IDS).save(tmp_path / "plan.json")
    step = shardplan.auto(make_mesh((8,)), plan=tmp_path / "plan.json", donate_argnums=0)(train_step)
    assert_same(trained(step), plainly_trained())
    assert step.plan(STATE, IDS).pads_state
    assert "P('x', None), padded" in step.plan(STATE, IDS).explain()
    contract = json.loads((tmp_path / "plan.json").read_text())["contract"]
    assert contract["padded"] == {"state/params/table": [104, WIDTH], "state/params/up": [WIDTH, 152]}


def test_what_is_held_padded_is_no_array_for_other_functions():
    state, _ = trained(padded_step(), 1)
    params = state["params"]
    for use in (lambda t: jnp.sum(t), lambda t: t[IDS], lambda t: t.T, lambda t: jnp.ones(3) @ t, np.asarray):
        with pytest.raises(shardplan.ShardingError, match=r"way out: shardplan.unpadded\(state\)"):
            use(params["table"])
    with pytest.raises(shardplan.ShardingError, match="is held padded to"):
        jax.jit(loss_fn)(params, IDS)
    want = loss_fn(jax.tree.map(np.asarray, shardplan.unpadded(params)), IDS)
    np.testing.assert_allclose(jax.jit(loss_fn)(shardplan.unpadded(params), IDS), want, rtol=1e-4)
    np.testing.assert_allclose(jax.jit(lambda p: loss_fn(shardplan.unpadded(p), IDS))(params), want, rtol=1e-4)
    np.testing.assert_allclose(optax.global_norm(params), optax.global_norm(shardplan.unpadded(params)), rtol=1e-5)


def test_a_state_in_its_own_shapes_is_padded_once():
    """Of the host or sharded already; what was donated is gone."""
    step = padded_step()
    state = jax.device_put(create(), jax.NamedSharding(make_mesh((8,)), jax.P()))
    table = state["params"]["table"]
    with pytest.warns(shardplan.ShardingWarning, match="the call moved"):
        state, _ = step(state, IDS)
    assert table.is_deleted() and is_padded(state["params"]["table"])
    assert_same(trained(step, 2, state), plainly_trained())
    assert_same(trained(padded_step(), 3, jax.tree.map(np.asarray, create())), plainly_trained())


def test_a_state_with_the_padding_of_another_mesh_gets_its_own():
    state, _ = trained(padded_step((4,)), 1)
    host = jax.tree.map(np.asarray, state)
    step = padded_step((8,))
    assert host["params"]["up"].array.shape[-1] == 152 and host["params"]["table"].shape[0] == VOCABULARY
    assert_same(trained(step, 2, host), plainly_trained())


def test_an_evaluation_takes_the_padded_state():
    train = padded_step()
    state, _ = trained(train, 1)
    want = loss_fn(shardplan.unpadded(state)["params"], IDS)
    evaluate = shardplan.auto(make_mesh((8,)), cluster=NEAR, state_like=train.plan(STATE, IDS))(loss_fn)
    np.testing.assert_allclose(evaluate(state["params"], IDS), want, rtol=1e-4)
    plan = evaluate.plan(STATE["params"], IDS)
    assert {x.path: x.layout for x in plan.inputs}["params/table"].dims == (("x",), ())
    other = shardplan.auto(make_mesh((8,)), cluster=NEAR)(loss_fn)  # plans for arrays that divide
    np.testing.assert_allclose(other(state["params"], IDS), want, rtol=1e-4)


@pytest.mark.parametrize("pad_state", [True, False])
def test_a_checkpoint_is_restored_with_any_padding(tmp_path, pad_state):
    step = padded_step((8,))
    state, _ = trained(step, 1)
    want = jax.tree.map(np.asarray, shardplan.unpadded(state))
    other = padded_step((2, 3), pad_state=pad_state, pins={"**/table": jax.P("y" if pad_state else None)})
    plan = other.plan(STATE, IDS)
    assert plan.pads_state is pad_state
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False)) as manager:
        checkpoints.save(manager, 1, state, step.plan(STATE, IDS))
        restored = checkpoints.restore(manager, plan).state
        same = checkpoints.restore(manager, step.plan(STATE, IDS)).state
        assert (tmp_path / "1" / "state").exists()
    for found in (restored, same):
        for x, y in zip(jax.tree.leaves(shardplan.unpadded(found)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x, y)
    if pad_state:
        assert restored["params"]["table"].array.shape == (102, WIDTH)
        assert_filled_with_zeros(restored)
    other(restored, IDS)


def test_a_running_state_is_moved_to_another_padding():
    state, _ = trained(padded_step((8,)), 1)
    want = jax.tree.map(np.asarray, shardplan.unpadded(state))
    for shape, pad_state in (((2, 3), True), ((4, 2), False)):
        plan = padded_step(shape, pins={"**/table": jax.P("y")} if pad_state else None, pad_state=pad_state).plan(STATE, IDS)
        moved = shardplan.transfer(state, plan, donate=False)
        for x, y in zip(jax.tree.leaves(shardplan.unpadded(moved)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x, y)
        assert is_padded(moved["params"]["table"]) is pad_state


@pytest.mark.parametrize("pad_state", [True, False])
def test_functions_that_are_planned_together_share_a_padded_state(pad_state):
    """`together` whether or not the evaluation could hold state padded by itself."""
    evaluation = shardplan.auto(make_mesh((8,)), cluster=NEAR, search="propagation", pad_state=pad_state)(loss_fn)
    job = shardplan.together({padded_step(): 0.5, evaluation: 0.5}, (STATE, IDS), (STATE["params"], IDS))
    train, evaluate = job
    held = [{x.path.removeprefix("state/"): x.held_shape(plan.mesh) for x in plan.inputs} for plan in job.plans]
    assert held[0]["params/table"] == held[1]["params/table"] == (104, WIDTH)
    state, _ = trained(train, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardplan.ShardingWarning)  # nothing is moved
        found = evaluate(state["params"], IDS)
    np.testing.assert_allclose(found, loss_fn(shardplan.unpadded(state)["params"], IDS), rtol=1e-4)
    assert_same(trained(train, 2, state), plainly_trained())


def test_jits_other_verbs_take_either_shape():
    step = padded_step()
    state = step.init(create)  # before there is a plan: in its own shapes
    assert not any(map(is_padded, jax.tree.leaves(state, is_leaf=is_padded)))
    compiled = step.compile(STATE, IDS)
    assert step.eval_shape(STATE, IDS)[0] == STATE
    state, _ = step(state, IDS)
    step.lower(state, IDS)
    assert step.eval_shape(state, IDS)[0] == STATE
    (held, _), _ = step.plan(STATE, IDS).abstract()
    assert jax.tree.structure(held) == jax.tree.structure(state)
    assert [x.shape for x in jax.tree.leaves(held)] == [x.shape for x in jax.tree.leaves(state)]
    compiled(state, IDS)


def test_derivatives_are_those_of_the_plain_step():
    step = padded_step((2, 4), pins={"**/table": jax.P("y")}, donate_argnums=None)
    state, _ = step(create(), IDS)
    plain = shardplan.unpadded(state)

    def value(fun, params, state):
        return fun({**state, "params": params}, IDS)[1]

    got = jax.grad(lambda p: value(step, p, state))(state["params"])
    want = jax.grad(lambda p: value(train_step, p, plain))(plain["params"])
    assert_same(got, want, 1e-5)


def test_a_padded_array_is_a_node_of_the_tree():
    x = Padded(jnp.zeros((8, 2)), (5, 2))
    ((keys, _),) = jax.tree_util.tree_leaves_with_path({"w": x})
    assert jax.tree_util.keystr(keys, simple=True, separator="/") == "w/padded_from_5x2"
    assert jax.tree.map(lambda y: y + 1, x).shape == (5, 2)
    assert repr(x).endswith("shape=(5, 2))")
