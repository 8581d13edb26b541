"""Jobs of several steps: one layout of the state that they share (`state_like`), and plans kept in a folder (`cache`)."""

import logging
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.pipeline import make_plan

pytestmark = pytest.mark.usefixtures("first_plan")

WIDTH = 256


def create_state(key):
    up, down = jax.random.split(key)
    p = {"up": 0.04 * jax.random.normal(up, (WIDTH, 4 * WIDTH)), "down": 0.02 * jax.random.normal(down, (4 * WIDTH, WIDTH))}
    return {"params": p, "moments": jax.tree.map(jnp.zeros_like, p)}


def loss_fn(params, batch):
    return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}, loss


def eval_step(params, batch):
    return loss_fn(params, batch)


def batch(rows=512):
    x = jnp.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)
    return {"x": x, "y": jnp.sin(x)}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def train(mesh):
    pins = {"params/up": P("model", "data"), "params/down": P("data", None)}  # what no evaluation would choose
    step = shardplan.auto(mesh, donate_argnums=0, pins=pins)(train_step)
    step.plan(jax.eval_shape(create_state, jax.random.key(0)), batch())
    return step


def layouts(plan):
    return {x.path: x.layout for x in plan.inputs}


def test_an_evaluation_takes_the_state_where_training_left_it(mesh, train):
    state, _ = train(train.init(create_state, jax.random.key(0)), batch())
    expected = float(eval_step(jax.device_get(state["params"]), batch(64)))
    plan = train.plan(state, batch())
    evaluate = shardplan.auto(mesh, state_like=plan)(eval_step)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardplan.ShardingWarning)
        loss = evaluate(state["params"], batch(64))
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    own = layouts(evaluate.plan(state["params"], batch(64)))
    assert {path: own[f"params/{path}"] for path in ("up", "down")} == {
        path: layouts(plan)[f"state/params/{path}"] for path in ("up", "down")
    }


def test_without_it_the_state_is_moved_and_the_warning_names_it(mesh, train):
    state, _ = train(train.init(create_state, jax.random.key(0)), batch())
    with pytest.warns(shardplan.ShardingWarning, match=r"auto\(mesh, state_like=plan\)"):
        shardplan.auto(mesh)(eval_step)(state["params"], batch(64))


def test_another_batch_shape_keeps_the_whole_state(mesh, train, tmp_path):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    plan = train.plan(shapes, batch())
    plan.save(tmp_path / "plan.json")
    other = shardplan.auto(mesh, donate_argnums=0, state_like=tmp_path / "plan.json")(train_step).plan(shapes, batch(64))
    same = [path for path in layouts(plan) if path.startswith("state/")]
    assert len(same) == 4 and {p: layouts(other)[p] for p in same} == {p: layouts(plan)[p] for p in same}


def test_own_pins_win(mesh, train):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    plan = train.plan(shapes, batch())
    step = shardplan.auto(mesh, state_like=plan, pins={"params/up": P(None, "model")})(eval_step)
    found = layouts(step.plan(shapes["params"], batch(64)))
    assert found["params/up"].spec() == (None, "model") and found["params/down"] == layouts(plan)["state/params/down"]


def test_a_reused_plan_of_an_evaluation_keeps_the_layouts_of_the_state(mesh, train, tmp_path):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    plan = train.plan(shapes, batch())
    evaluate = shardplan.auto(mesh, state_like=plan)(eval_step)
    found = evaluate.plan(shapes["params"], batch(64))
    again = evaluate.with_options(plan=found)
    assert again.plan(shapes["params"], batch(64)).dumps() == found.dumps()
    elsewhere = shardplan.auto(mesh, pins={"params/*": P()})(eval_step).plan(shapes["params"], batch(64))
    with pytest.raises(shardplan.ShardingError, match=r"plan= has params/down as P\(None, None\), state_like= as P\('data'"):
        evaluate.with_options(plan=elsewhere).plan(shapes["params"], batch(64))
    with pytest.warns(shardplan.ShardingWarning, match="made for another version of this step"):  # and what is planned again
        other = evaluate.with_options(plan=elsewhere).plan(shapes["params"], batch(32))
    assert layouts(other)["params/down"] == layouts(plan)["state/params/down"]


def test_what_an_evaluation_does_not_take_of_the_state_is_in_memory(mesh, train):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    plan = train.plan(shapes, batch())
    like = shardplan.auto(mesh, search="propagation", state_like=plan)(eval_step)
    moments = sum(4 * WIDTH * 4 * WIDTH / x.shards(plan.mesh) for path, x in layouts(plan).items() if path.startswith("state/moments/"))
    peak = like.with_options(memory="disable").plan(shapes["params"], batch(4096)).memory_report.peak
    fits = like.with_options(memory=peak + moments).plan(shapes["params"], batch(4096)).memory_report
    assert fits.peak <= peak == fits.limit
    says = r"(?s)no plan .* of .* hold the state that eval_step does not take"
    with pytest.raises(shardplan.ShardingError, match=says):
        like.with_options(memory=peak / 2 + moments).plan(shapes["params"], batch(4096))
    with pytest.raises(shardplan.ShardingError, match=r"state_like: .* hold the state that eval_step does not take"):
        like.with_options(memory=moments / 2).plan(shapes["params"], batch(4096))
    assert like.with_options(memory=peak).plan(shapes["params"], batch(64)).memory_report.limit == peak - moments
    pinned = like.with_options(memory=peak, pins={"params/up": P("model")}).plan(shapes["params"], batch(64))
    assert pinned.memory_report.limit == peak - moments  # an array with a pin of its own is no rest


def test_the_plan_of_an_evaluation_has_a_state_too(mesh):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    pins = {"params/up": P("data", "model"), "batch/x": P("model")}
    evaluated = shardplan.auto(mesh, search="propagation", pins=pins)(eval_step).plan(shapes["params"], batch())
    train = shardplan.auto(mesh, search="propagation", state_like=evaluated)(train_step).plan(shapes, batch())
    assert [layouts(train)[f"state/params/{w}"] for w in ("up", "down")] == [layouts(evaluated)[f"params/{w}"] for w in ("up", "down")]
    assert layouts(train)["batch/x"] != layouts(evaluated)["batch/x"] and train.memory_report.limit == evaluated.memory_report.limit
    with pytest.raises(
        shardplan.ShardingError, match=r"no input of the step is state of that plan\.\n  state: params/down, params/up\n"
    ):
        shardplan.auto(mesh, state_like=evaluated)(lambda batch: batch["x"] ** 2).plan(batch())


def test_a_state_that_is_not_shared_or_of_another_mesh_is_refused(mesh, train):
    plan = train.plan(jax.eval_shape(create_state, jax.random.key(0)), batch())
    with pytest.raises(shardplan.ShardingError, match="no input of the step is state of that plan"):
        shardplan.auto(mesh, state_like=plan)(lambda x: x @ x).plan(jnp.ones((8, 8)))
    other = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(shardplan.ShardingError, match="state_like is a plan for mesh data=2, model=4, the step is for mesh data=8"):
        shardplan.auto(other, state_like=plan)
    assert shardplan.auto(other)(shardplan.auto(mesh, state_like=plan)(eval_step)).options.state_like is None


# ---- the cache


def planned(mesh, folder, step=train_step, **options):
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    return shardplan.auto(mesh, cache=folder, **options)(step).plan(shapes, batch())


@pytest.fixture
def count(monkeypatch):
    """How often a step is planned."""
    calls = []

    def counted(*args):
        calls.append(1)
        return make_plan(*args)

    monkeypatch.setattr("shardplan.step.make_plan", counted)
    return calls


def test_a_step_is_planned_once(mesh, tmp_path, count, caplog):
    first = planned(mesh, tmp_path / "plans", donate_argnums=0)
    with caplog.at_level(logging.INFO, "shardplan"):
        again = planned(mesh, str(tmp_path / "plans"), donate_argnums=0)
    assert len(count) == 1 and again == first and again.dumps() == first.dumps()
    assert "a plan is taken from" in caplog.text
    (file,) = (tmp_path / "plans").iterdir()
    assert shardplan.Plan.load(file) == first


def test_a_kept_plan_that_is_asked_about_says_what_plans_it_again(mesh, tmp_path, count):
    first, kept = (planned(mesh, tmp_path, donate_argnums=0) for _ in range(2))
    with pytest.raises(shardplan.ShardingError, match=r"(?s)taken over from a file or the cache.*ways out: plan\.replan\(\)\.why\(\)"):
        kept.why("state/*/w1")
    again = kept.replan()
    assert len(count) == 2 and again.dumps() == first.dumps()
    path = next(x.path for x in again.inputs if len(x.shape) == 2)
    assert again.why(path).readers == first.why(path).readers


def test_a_kept_plan_runs(mesh, tmp_path, count):
    planned(mesh, tmp_path, donate_argnums=0)
    step = shardplan.auto(mesh, cache=tmp_path, donate_argnums=0)(train_step)
    state = create_state(jax.random.key(0))
    expected = float(jax.jit(train_step)(state, batch())[1])
    assert float(step(state, batch())[1]) == pytest.approx(expected, rel=1e-5) and len(count) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 1e9}, {"pins": {"params/up": P("data")}}, {"cluster": "h100"}, {"search": "propagation"}, {"compiler_options": None},
        {"donate_argnums": 0}, {"in_shardings": (None, P("data"))}, {"overlap": False}, {"compute_scale": 2.0},
        {"step": lambda state, batch: train_step(state, {k: jnp.tanh(v) for k, v in batch.items()})},
        {"mesh": jax.sharding.AbstractMesh((4, 2), ("data", "model"))},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_a_plan_depends_on_makes_another_file(mesh, tmp_path, count, change):
    planned(mesh, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shardplan.ShardingWarning)
        planned(change.pop("mesh", mesh), tmp_path, **change)
    assert len(count) == len([*tmp_path.iterdir()]) == 2


def test_a_damaged_file_is_replaced(mesh, tmp_path, count, caplog):
    first = planned(mesh, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(first.dumps()[:500])
    assert planned(mesh, tmp_path) == first and len(count) == 2 and "planned anew" in caplog.text
    assert shardplan.Plan.load(file) == first


def test_what_is_no_folder_is_refused(mesh, tmp_path):
    with pytest.raises(shardplan.ShardingError, match="cache=3 is no folder"):
        shardplan.auto(mesh, cache=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(shardplan.ShardingError, match="cannot be written"):
        planned(mesh, tmp_path / "file")


# ---- one step, other trees and other shapes


def create_train_state(key):
    """As flax programs write it: each call makes an optimizer, whose functions are part of the state's tree."""
    return TrainState.create(apply_fn=eval_step, params=create_state(key)["params"], tx=optax.adam(1e-3))


def flax_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def test_a_train_state_with_new_functions_in_its_tree_keeps_the_plan(mesh, count, caplog):
    step = shardplan.auto(mesh, pins={"state/params/up": P("model", "data")})(flax_step)
    plan = step.plan(jax.eval_shape(create_train_state, jax.random.key(0)), batch())
    state = step.init(create_train_state, jax.random.key(0))
    assert state.params["up"].sharding.spec == P("model", "data")
    with caplog.at_level(logging.INFO, "shardplan"):
        after, loss = step(state, batch())
    assert "flax_step is traced again for arguments of another tree or weak type; its plan is kept" in caplog.text
    expected = jax.jit(flax_step)(create_train_state(jax.random.key(0)), batch())[1]
    assert len(count) == 1 and float(loss) == pytest.approx(float(expected), rel=1e-5)
    again = step.plan(after, batch())
    assert again == plan and again.why("state/params/up")


def test_a_step_that_is_planned_again_says_so_in_one_line(mesh, caplog):
    step = shardplan.auto(mesh, search="propagation")(eval_step)
    shapes = jax.eval_shape(create_state, jax.random.key(0))["params"]
    with caplog.at_level(logging.WARNING, "shardplan"):
        step.plan(shapes, batch())
        assert caplog.text == ""
        step.plan(shapes, batch(64))
    (line,) = caplog.messages
    assert re.fullmatch(
        r"eval_step is planned again \(2 plans now\), in [\d.]+ s: batch/x float32\[64,256\], was float32\[512,256\]; "
        r"batch/y float32\[64,256\], was float32\[512,256\]",
        line,
    )


def test_a_jitted_step_keeps_its_static_and_donated_arguments(mesh):
    jitted = jax.jit(lambda w, rate: w * rate, static_argnames="rate", donate_argnums=0)
    plan = shardplan.auto(mesh)(jitted).plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), rate=3)
    assert plan.donated == ("w",) and [x.path for x in plan.inputs] == ["w"]
    assert shardplan.auto(mesh, donate_argnums=())(jitted).plan(jax.ShapeDtypeStruct((8, 8), jnp.float32), rate=3).donated == ()


def test_a_python_number_in_the_state_is_planned_once(mesh, count):
    def counting(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        rate = 0.1 / jnp.where(state["n"] < 3, 1, state["n"])
        params = jax.tree.map(lambda p, g: p - rate * g, state["params"], grads)
        return {"params": params, "n": jnp.where(jnp.isfinite(loss), state["n"] + 1, 0).astype(jnp.int32)}, loss

    step = shardplan.auto(mesh, pins={"state/params/up": P("model", "data")})(counting)
    state = plain = {"params": create_state(jax.random.key(0))["params"], "n": 0}
    for _ in range(2):
        (state, loss), (plain, expected) = step(state, batch()), jax.jit(counting)(plain, batch())
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert len(count) == 1 and len(step._steps) == 2 and state["params"]["up"].sharding.spec == P("model", "data")


def test_weakly_typed_arrays_in_the_state_are_planned_once(mesh, count):
    """As `jnp.full` makes of a Python number; what the step returns in their place is typed strongly."""

    def keeping_the_best(state, x):
        losses = jnp.mean((x - state["mean"]) ** 2, axis=-1)
        better = jnp.min(losses) < state["loss"]
        best = jnp.where(better, x[jnp.argmin(losses)], state["best"])
        return {"mean": state["mean"] + 0.1 * (best - state["mean"]), "best": best, "loss": jnp.minimum(state["loss"], jnp.min(losses))}

    state = plain = {"mean": jnp.full(WIDTH, 0.5), "best": jnp.full(WIDTH, jnp.nan), "loss": jnp.full((), jnp.inf)}
    assert all(x.weak_type for x in state.values())
    step = shardplan.auto(mesh, pins={"state/mean": P("model")})(keeping_the_best)
    for _ in range(2):
        state, plain = step(state, batch()["x"]), jax.jit(keeping_the_best)(plain, batch()["x"])
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5), state, plain)
    assert len(count) == 1 and len(step._steps) == 2
