"""`auto` mirrors `jax.jit`, plans once per signature, and says clearly what is wrong with what it was given."""

import functools
import logging
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental.pallas import pallas_call
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import PlanFileError, ShardingError, ShardingWarning
from shardplan.signature import unique

pytestmark = pytest.mark.usefixtures("first_plan")

F32 = np.float32


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


def create(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (16, 64)), "down": jax.random.normal(b, (64, 16))}


def loss(params, batch):
    return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def batch(n=32, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 16)).astype(F32), "y": rng.normal(size=(n, 16)).astype(F32)}


@pytest.fixture
def params():
    return create(jax.random.key(0))


def same(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=tolerance, atol=tolerance)


# ---- jit's ways of being called


def test_keyword_arguments(mesh, params):
    planned = shardplan.auto(mesh)(step)
    same(planned(params, batch=batch()), step(params, batch()))
    same(planned(batch=batch(), params=params), step(params, batch()))


def test_static_arguments_by_number_and_name(mesh, params):
    def scaled(params, batch, times, *, squared=False):
        value = loss(params, batch) * times
        return value**2 if squared else value

    planned = shardplan.auto(mesh, static_argnums=2, static_argnames="squared")(scaled)
    for times, squared in ((2, False), (3, True), (2, True), (2, False)):
        same(planned(params, batch(), times, squared=squared), scaled(params, batch(), times, squared=squared))
    with pytest.raises(ShardingError, match=r"static argument .* is not hashable.*\n.*way out"):
        planned(params, batch(), [2])


def test_donation_frees_the_argument(mesh):
    planned = shardplan.auto(mesh, donate_argnums=0)(step)
    state = planned.init(create, jax.random.key(0))
    planned(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    by_name = shardplan.auto(mesh, donate_argnames="params")(step)
    state = by_name.init(create, jax.random.key(0))
    by_name(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_each_keyword_argument_is_donated_or_not(mesh):
    planned = shardplan.auto(mesh, donate_argnames="params", static_argnames="rate")(lambda *, rate, params, batch: step(params, batch))
    state = planned.init(create, jax.random.key(0))
    data = jax.tree.map(jnp.asarray, batch())
    want = step(create(jax.random.key(0)), data)
    same(planned(batch=data, params=state, rate=2), want)
    assert all(x.is_deleted() for x in jax.tree.leaves(state)) and not any(x.is_deleted() for x in jax.tree.leaves(data))
    assert planned.plan(batch=data, params=want[0], rate=2).donated == ("params",)


def test_other_options_give_another_step(mesh, params):
    planned = shardplan.auto(mesh)(step)
    pinned = planned.with_options(pins={"up": P(None, "model")}, search="propagation")
    plan = pinned.plan(params, batch())
    assert plan.search == "propagation" and planned.plan(params, batch()).search == "ilp"
    assert next(x for x in plan.inputs if x.path == "params/up").layout.spec() == (None, "model")
    with pytest.raises(ShardingError, match="search='magic' is none of"):
        planned.with_options(search="magic")


def test_none_leaves_scalars_and_tuples(mesh):
    def fun(a, b):
        x, nothing, k = a
        return {"y": x * k + b, "n": nothing}

    x = np.arange(64, dtype=F32).reshape(8, 8)
    out = shardplan.auto(mesh)(fun)((x, None, 3), 2.0)
    assert out["n"] is None
    same(out["y"], x * 3 + 2)


def test_bound_methods_and_decorated_methods(mesh, params):
    class Trainer:
        rate = 0.1

        @shardplan.auto(mesh, static_argnums=0)
        def decorated(self, params, batch):
            return jax.tree.map(lambda p, g: p - self.rate * g, params, jax.grad(loss)(params, batch))

        def plain(self, params, batch):
            return jax.tree.map(lambda p, g: p - self.rate * g, params, jax.grad(loss)(params, batch))

    trainer = Trainer()
    want = trainer.plain(params, batch())
    same(trainer.decorated(params, batch()), want)
    same(shardplan.auto(mesh)(trainer.plain)(params, batch()), want)


def test_plans_once_per_signature(mesh, params):
    traces = []

    def counting(params, batch):
        traces.append(batch["x"].shape)
        return loss(params, batch)

    planned = shardplan.auto(mesh)(counting)
    for n in (32, 32, 64, 32, 64):
        same(planned(params, batch(n)), loss(params, batch(n)))
    assert len([s for s in traces if s == (32, 16)]) <= 2  # once to plan, once for its derivative rule at most
    assert planned.plan(params, batch(64)) is planned.plan(params, batch(64))


class Compiled(logging.Handler):
    """Counts programs of the step that jit compiles."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += record.getMessage().startswith("Compiling jit(step)")


@pytest.fixture
def compiled():
    handler, log = Compiled(), logging.getLogger("jax._src.interpreters.pxla")
    log.addHandler(handler)
    with jax.log_compiles():
        yield handler
    log.removeHandler(handler)


STATES = {
    "arrays": lambda planned: create(jax.random.key(0)),
    "numpy": lambda planned: jax.tree.map(np.asarray, create(jax.random.key(0))),
    "init": lambda planned: planned.init(create, jax.random.key(0)),
    "on one device": lambda planned: jax.device_put(create(jax.random.key(0)), jax.devices()[3]),
    "as planned": lambda planned: jax.device_put(params := create(jax.random.key(0)), planned.plan(params, batch()).in_shardings[0][0]),
}


@pytest.mark.filterwarnings("ignore:the call moved")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("pins", [{}, {"params/up": P(None, "model")}], ids=["free", "sharded"])
@pytest.mark.parametrize("made", STATES.values(), ids=STATES)
def test_the_step_is_compiled_once_wherever_its_state_was_made(kind, pins, made, compiled):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)
    planned = shardplan.auto(mesh, donate_argnums=0, pins=pins)(step)
    state = made(planned)
    for n in range(3):
        state, _ = planned(state, batch(seed=n))
    assert compiled.count == 1


OTHERS = {
    "rank": np.ones(64, F32),
    "tree": {"x": np.ones((64, 64), F32), "mask": np.ones(3, F32)},
    "dtype": np.ones((64, 64), np.float16),
}


def total(x):
    return sum(jnp.sum(jnp.tanh(leaf.astype(F32))) for leaf in jax.tree.leaves(x))


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_call_that_the_sharding_of_the_last_call_does_not_fit_is_planned_anew(mesh, other):
    planned, first = shardplan.auto(mesh, pins={"x": P(("data", "model"))})(total), np.ones((64, 64), F32)
    for x in (first, other, first):
        same(planned(x), total(x))


def test_a_last_batch_that_does_not_divide_is_planned_anew(mesh):
    planned, rows, last = shardplan.auto(mesh)(total), np.ones((1 << 16, 64), F32), np.ones((13, 64), F32)
    assert planned.plan(rows).inputs[0].layout.shards(planned.plan(rows).mesh) == 8
    for x in (rows, last, rows):
        same(planned(x), total(x))


def test_a_pin_that_a_later_call_cannot_meet_is_refused_in_words(mesh):
    planned = shardplan.auto(mesh, pins={"x": P("model")})(total)
    planned(np.ones((64, 64), F32))
    with pytest.raises(ShardingError, match="of size 13 over 4 devices, which does not divide"):
        planned(np.ones((13, 64), F32))


def test_trace_lower_compile(mesh, params):
    planned = shardplan.auto(mesh)(step)
    assert planned.trace(params, batch()).jaxpr.out_avals[-1].shape == ()
    assert "stablehlo" in planned.lower(params, batch()).as_text()
    compiled = planned.compile(params, batch())
    assert compiled.memory_analysis() is not None
    assert planned.eval_shape(params, batch())[1].shape == ()


def test_arguments_that_live_elsewhere_are_brought_over(mesh, params):
    planned = shardplan.auto(mesh)(step)
    want = step(params, batch())
    on_one = jax.device_put(params, jax.devices()[3])
    same(planned(on_one, batch()), want)
    other = jax.make_mesh((8,), ("z",))
    elsewhere = jax.device_put(params, jax.sharding.NamedSharding(other, P("z")))
    same(planned(elsewhere, jax.device_put(batch(), jax.devices()[1])), want)


def test_state_comes_out_as_it_went_in(mesh):
    planned = shardplan.auto(mesh, donate_argnums=0)(step)
    plan = planned.plan(jax.eval_shape(create, jax.random.key(0)), batch())
    state = planned.init(create, jax.random.key(0))
    for _ in range(2):
        for x, leaf in zip(jax.tree.leaves(state), plan.inputs[:2], strict=True):
            assert x.sharding.spec == P(*leaf.layout.spec())
        state, _ = planned(state, batch())


def test_init_never_holds_the_whole_on_one_device(mesh):
    planned = shardplan.auto(mesh)(step)
    for x in jax.tree.leaves(planned.init(create, jax.random.key(0))):
        assert max(s.data.size for s in x.addressable_shards) == x.size // 8
    same(planned.init(create, jax.random.key(0)), create(jax.random.key(0)), 1e-6)


def test_derivatives_are_those_of_the_plain_function(mesh, params):
    @jax.custom_jvp
    def straight_through(x):
        return jnp.round(x)

    straight_through.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))

    def fun(w):
        return jnp.sum(straight_through(w) ** 2)

    w = np.linspace(-3, 3, 64, dtype=F32)
    same(jax.grad(shardplan.auto(mesh)(fun))(w), jax.grad(fun)(w))
    same(jax.jit(lambda w: shardplan.auto(mesh)(fun)(w) * 2)(w), fun(w) * 2)


# ---- planning without devices, and reuse


def test_plans_on_an_abstract_mesh_from_shapes():
    abstract = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    planned = shardplan.auto(abstract, cluster="h100")(step)
    shapes = jax.eval_shape(create, jax.random.key(0))
    plan = planned.plan(shapes, batch())
    assert {x.path for x in plan.inputs} == {"params/up", "params/down", "batch/x", "batch/y"}
    with pytest.raises(ShardingError, match="AbstractMesh, which has no devices"):
        planned(create(jax.random.key(0)), batch())


def test_on_an_abstract_mesh_arrays_lower_as_their_shapes_do(params):
    planned = shardplan.auto(jax.sharding.AbstractMesh((2, 4), ("data", "model")), cluster="h100")(step)
    texts = [planned.lower(state, batch()).as_text() for state in (params, jax.eval_shape(create, jax.random.key(0)))]
    assert texts[0] == texts[1] and "num_partitions = 8" in texts[0]


def test_labels_are_unique_also_where_a_key_looks_like_a_numbered_one():
    assert unique(["a", "a", "a~2"]) == ("a", "a~3", "a~2")
    assert unique(["a", "b", "a", "a"]) == ("a", "b", "a~2", "a~3")

    def total(tree):
        return sum(x.sum() for x in jax.tree.leaves(tree))

    tree = {"a": {"b": np.ones(8, F32)}, "a/b": np.ones(8, F32), "a/b~2": np.ones(8, F32)}
    plan = shardplan.auto(jax.sharding.AbstractMesh((8,), ("x",)))(total).plan(tree)
    assert [x.path for x in plan.inputs] == ["tree/a/b", "tree/a/b~3", "tree/a/b~2"]


def test_same_input_gives_the_same_bytes(mesh, params):
    texts = [shardplan.auto(mesh)(step).plan(params, batch()).dumps() for _ in range(2)]
    assert texts[0] == texts[1]


def test_a_saved_plan_is_reused_without_solving(mesh, params, tmp_path, monkeypatch):
    shardplan.auto(mesh)(step).plan(params, batch()).save(tmp_path / "plan.json")
    monkeypatch.setattr(sys.modules["shardplan.step"], "make_plan", lambda *a: pytest.fail("it solved again"))
    planned = shardplan.auto(mesh, plan=tmp_path / "plan.json")(step)
    same(planned(params, batch()), step(params, batch()))


def test_a_plan_for_an_edited_step_keeps_what_matches(mesh, params, tmp_path):
    shardplan.auto(mesh, pins={"up": P("data", None)})(step).plan(params, batch()).save(tmp_path / "plan.json")

    def edited(params, batch):
        params, value = step({"up": params["up"], "down": params["down"]}, batch)
        return {**params, "extra": jnp.zeros((8,))}, value + 1

    more = {**params, "extra": jnp.zeros((8,))}
    planned = shardplan.auto(mesh, plan=tmp_path / "plan.json")(edited)
    with pytest.warns(ShardingWarning, match=r"another version of this step: 4 of 5 inputs keep.*\n.*params/extra"):
        plan = planned.plan(more, batch())
    assert next(x for x in plan.inputs if x.path == "params/up").layout.spec() == ("data", None)


def test_a_plan_for_moved_lines_is_used_without_solving(mesh, params, tmp_path, monkeypatch):
    names: dict = {"jax": jax, "jnp": jnp}
    text = "def step(params, batch):\n    up, down = params['up'], params['down']\n    return jnp.mean((batch['x'] @ up) @ down)\n"
    exec(compile(text, "model.py", "exec"), names)
    shardplan.auto(mesh)(names["step"]).plan(params, batch()).save(tmp_path / "plan.json")
    exec(compile("\n\n" + text, "model.py", "exec"), names)
    monkeypatch.setattr(sys.modules["shardplan.step"], "make_plan", lambda *a: pytest.fail("it solved again"))
    out = shardplan.auto(mesh, plan=tmp_path / "plan.json")(names["step"])(params, batch())
    same(out, names["step"](params, batch()))


def test_a_plan_for_a_step_that_donates_otherwise_is_used_with_a_warning(mesh, params, tmp_path):
    shardplan.auto(mesh, donate_argnums=0)(step).plan(params, batch()).save(tmp_path / "plan.json")
    with pytest.warns(ShardingWarning, match=r"donates params; this one donates nothing.*\n  ways out: donate_argnums as it was"):
        out = shardplan.auto(mesh, plan=tmp_path / "plan.json")(step)(params, batch())
    same(out, step(params, batch()))


def test_plans_for_another_mesh_or_model_are_refused(mesh, params, tmp_path):
    shardplan.auto(mesh)(step).plan(params, batch()).save(tmp_path / "plan.json")
    other = jax.make_mesh((8,), ("x",))
    with pytest.raises(PlanFileError, match="for mesh data=2, model=4, the step runs on mesh x=8"):
        shardplan.auto(other, plan=tmp_path / "plan.json")(step).plan(params, batch())
    with pytest.raises(PlanFileError, match="another model: none of its inputs"):
        shardplan.auto(mesh, plan=tmp_path / "plan.json")(lambda other_name: other_name * 2).plan(np.ones((8, 8), F32))


# ---- what the user knows better


def test_pins_hold_and_the_rest_is_planned_around_them(mesh, params):
    plan = shardplan.auto(mesh, pins={"**/up": P(None, "model"), "down": P(("data", "model"), None)})(step).plan(params, batch())
    found = {x.path: x.layout.spec() for x in plan.inputs}
    assert found["params/up"] == (None, "model") and found["params/down"] == (("data", "model"), None)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("placed", [None, P("data"), "born"], ids=str)
def test_under_another_jit_the_plan_holds(params, kind, placed):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    planned = shardplan.auto(mesh, pins={"params/up": P(None, "model")})(step)

    def two(planned, params, batch):
        params, _ = planned(params, batch)
        return jax.lax.scan(lambda p, _: planned(p, batch), params, None, length=1)

    want = two(step, params, batch())
    inputs = params, batch()
    if placed == "born":
        inputs = planned.init(lambda: params), batch()
    elif placed is not None:
        inputs = jax.device_put(inputs, jax.sharding.NamedSharding(mesh, placed))
    outer = jax.jit(lambda params, batch: two(planned, params, batch))
    same(jax.device_get(outer(*inputs)), want)
    assert "sharding_constraint" in str(outer.trace(*inputs).jaxpr)


def test_a_planned_step_inside_another_is_planned_with_it(params):
    """Its own plan is not asked for, nor are its layouts kept: pins of the outer step, for which they would be others, stand alone."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inner = shardplan.auto(mesh, pins={"params/up": P("model", None)}, static_argnums=2)(lambda params, batch, _: step(params, batch))

    def rounds(planned, params, batch):
        params, _ = planned(params, batch, "static")
        return jax.lax.scan(lambda p, _: planned(p, batch, "static"), params, None, length=3)

    outer = shardplan.auto(mesh, pins={"params/up": P(None, "model")})(lambda params, batch: rounds(inner, params, batch))
    same(outer(params, batch()), rounds(lambda p, b, _: step(p, b), params, batch()))
    plan = outer.plan(params, batch())
    assert not inner._steps and not any(d.primitive == "sharding_constraint" for d in plan.decisions)
    assert "sharding_constraint" in str(jax.make_jaxpr(lambda *xs: inner(*xs, "static"))(params, batch()))  # it plans itself elsewhere


@pytest.mark.parametrize("axes", ["data", ("data", "model")])
def test_the_specs_of_a_shard_map_are_pins(mesh, params, axes):
    def centred(params, batch):
        y = jax.shard_map(lambda y: y - jax.lax.pmean(y, axes), in_specs=P(None, axes), out_specs=P(None, axes))(batch["x"].T)
        return jnp.mean((y.T @ params["up"]) ** 2)

    step = jax.value_and_grad(centred)
    planned = shardplan.auto(mesh)(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = planned.plan(params, batch())
    assert not plan.unknown
    split = tuple(() if d == 0 else (axes,) if isinstance(axes, str) else axes for d in range(2))
    assert [x.dims for d in plan.decisions if d.primitive == "shard_map" for x in d.result_layouts if x] == [split]
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        want = jax.jit(step)(params, batch())
    same(planned(params, batch()), want)


def test_a_shard_map_on_an_explicit_mesh_is_told_how(mesh, params):
    assert not shardplan._jax.is_auto(mesh)

    def given(x):
        return jax.shard_map(lambda y: 2 * y, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    with pytest.raises(ShardingError, match=r"is given a mesh of its own(.|\n)*ways out: leave mesh= out"):
        shardplan.auto(mesh)(given)(np.ones((8, 8), F32))


def test_in_and_out_shardings_with_free_dims(mesh, params):
    free = P.UNCONSTRAINED
    planned = shardplan.auto(mesh, in_shardings=(None, {"x": P("data"), "y": P("data", free)}), out_shardings=(None, P()))(step)
    plan = planned.plan(params, batch())
    found = {x.path: x.layout.spec() for x in plan.inputs}
    assert found["batch/x"] == ("data", None) and found["batch/y"][0] == "data"
    same(planned(params, batch()), step(params, batch()))


@pytest.mark.parametrize("search", ["ilp", "propagation", "recursive"])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_an_axis_of_one_device_may_be_named_and_shards_nothing(kind, search):
    mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(kind,) * 2)

    def product(x, w):
        constrained = jax.lax.with_sharding_constraint(x @ w, P("data", "model"))
        return jnp.tanh(constrained)

    named = dict(pins={"w": P("model")}, in_shardings=(P("data", "model"), None), out_shardings=P(("data", "model")))
    planned = shardplan.auto(mesh, search=search, **named)(product)
    rng = np.random.default_rng(0)
    args = [rng.normal(size=(64, 64)).astype(F32) for _ in range(2)]
    np.testing.assert_allclose(planned(*args), np.tanh(args[0] @ args[1]), rtol=1e-5, atol=1e-5)
    assert planned.plan(*args).in_shardings[0][0].spec == P("data", None)


def test_an_unconstrained_argument_is_planned_as_none_is(mesh):
    x, free = np.ones((8, 8), F32), (None, P.UNCONSTRAINED)
    plans = [shardplan.auto(mesh, in_shardings=(one, P("data")), out_shardings=one)(jnp.dot).plan(x, x) for one in free]
    assert plans[0] == plans[1]


def test_the_users_own_constraint_is_kept(mesh, params):
    def constrained(params, batch):
        h = jax.lax.with_sharding_constraint(batch["x"] @ params["up"], P("model", None))
        return jnp.sum(h @ params["down"])

    planned = shardplan.auto(mesh)(constrained)
    same(planned(params, batch()), jnp.sum(batch()["x"] @ params["up"] @ params["down"]), 1e-3)
    decision = next(d for d in planned.plan(params, batch()).decisions if d.primitive == "sharding_constraint")
    assert decision.result_layouts[0].spec() == ("model", None)


@pytest.mark.parametrize("search", ["ilp", "propagation", "recursive"])
def test_the_users_own_constraint_may_be_a_hint_or_ignored(mesh, params, search):
    def constrained(params, batch):
        h = jax.lax.with_sharding_constraint(batch["x"] @ params["up"], P("model", "data"))
        return jnp.sum(h @ params["down"])

    def plain(params, batch):
        return jnp.sum(batch["x"] @ params["up"] @ params["down"])

    free = shardplan.auto(mesh, search=search)(plain).plan(params, batch()).seconds["total"]
    seconds = {}
    for word in ("keep", "hint", "ignore"):
        planned = shardplan.auto(mesh, search=search, user_shardings=word)(constrained)
        same(planned(params, batch()), plain(params, batch()), 1e-3)
        seconds[word] = planned.plan(params, batch()).seconds["total"]
    assert seconds["keep"] > 1.01 * free
    assert free <= seconds["hint"] <= seconds["ignore"] * (1 + 1e-9) <= 1.01 * free
    with pytest.raises(ShardingError, match="user_shardings='never' is none of 'keep', 'hint', 'ignore'"):
        shardplan.auto(mesh, user_shardings="never")


@pytest.mark.parametrize("search", ["ilp", "propagation", "recursive"])
def test_a_constraint_that_no_plan_can_meet_is_no_hint(mesh, search):
    """XLA pads where a dim does not divide; the constraints beside it are a start all the same."""

    def constrained(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), P(None, "model")) + jax.lax.with_sharding_constraint(
            jnp.cos(x), P("data", None)
        )

    x = np.linspace(0, 1, 16 * 9, dtype=F32).reshape(16, 9)
    with pytest.raises(ShardingError, match=r'(?s)with_sharding_constraint at .*ways? out:.* auto\(mesh, user_shardings="hint"\)'):
        shardplan.auto(mesh, search=search)(constrained).plan(x)
    same(shardplan.auto(mesh, search=search, user_shardings="hint")(constrained)(x), jnp.sin(x) + jnp.cos(x))


@pytest.mark.parametrize("search", ["ilp", "propagation", "recursive"])
@pytest.mark.parametrize("spec", [P(("model", "data")), P(("data", "model"))], ids=str)
def test_axes_of_one_dim_are_in_the_order_that_is_asked_for(mesh, spec, search):
    def constrained(x):
        return jax.lax.with_sharding_constraint(jnp.sin(x), spec) * jnp.arange(16.0)[:, None], jnp.cumsum(x, 0)

    x = np.linspace(0, 1, 16 * 8, dtype=F32).reshape(16, 8)
    planned = shardplan.auto(mesh, search=search, in_shardings=spec, out_shardings=(spec, None))(constrained)
    same(planned(x), (jnp.sin(x) * jnp.arange(16.0)[:, None], jnp.cumsum(x, 0)))
    plan = planned.plan(x)
    assert plan.in_shardings[0][0].spec == plan.out_shardings[0].spec == P(*spec, None)


def test_an_exchange_over_the_last_axis_moves_no_shard_elsewhere():
    """Experts over x: rows over (y, x) are exchanged over x alone, those over (x, y) over both axes or after a permute."""

    def experts(rows, w):
        return jnp.einsum("gecd,edf->gecf", rows, w)

    rows, w = jax.ShapeDtypeStruct((64, 16, 80, 1024), F32), jax.ShapeDtypeStruct((16, 1024, 4096), F32)
    abstract = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    last, first = (
        shardplan.auto(abstract, cluster="h100", in_shardings=(P(axes), P("x")))(experts).plan(rows, w)
        for axes in (("y", "x"), ("x", "y"))
    )
    steps = [(step.kind, step.axes) for d in last.decisions for reshard in d.reshards for step in reshard.collectives]
    assert steps == [("all-to-all", ("x",))]
    assert last.seconds["total"] < 0.98 * first.seconds["total"]


def test_a_dim_that_is_sharded_for_products_and_for_state_has_the_products_axis_first():
    """Rows of `down` over model for the product, over data for its gradient and update: scattered and gathered over data alone."""
    shapes = {"up": jax.ShapeDtypeStruct((8192, 32768), F32), "down": jax.ShapeDtypeStruct((32768, 8192), F32)}
    data = {name: jax.ShapeDtypeStruct((16384, 8192), F32) for name in ("x", "y")}
    make = functools.partial(shardplan.auto, jax.sharding.AbstractMesh((2, 4), ("data", "model")), cluster="h100")
    free, turned = (make(pins=pins)(step).plan(shapes, data) for pins in (None, {"params/down": P(("data", "model"))}))
    rows = {x.path: x.layout.dims[0] for x in free.inputs}
    assert rows["params/down"] == ("model", "data")
    assert free.seconds["total"] < 0.98 * turned.seconds["total"]


def test_slower_compute_weighs_communication_less(mesh, params):
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    one, ten = (shardplan.auto(abstract, cluster="h100", compute_scale=n)(step).plan(params, batch(1 << 13)) for n in (1, 1000))
    assert not one.comm_bytes and ten.comm_bytes  # small: whole on every device, until computing costs more than sending
    assert ten.cluster == "h100, compute x 1000"
    with pytest.raises(ShardingError, match="compute_scale=0 is no positive number"):
        shardplan.auto(mesh, compute_scale=0)


def test_memory_may_be_saved_for_its_own_sake():
    abstract = jax.sharding.AbstractMesh((8,), ("x",))
    state = {k: jax.ShapeDtypeStruct((1024, 1024), F32) for k in ("up", "down")}
    inputs = {k: jax.ShapeDtypeStruct((1024, 1024), F32) for k in ("x", "y")}
    plans = [
        shardplan.auto(abstract, cluster="h100", memory=word)(step).plan(state, inputs)
        for word in (float("inf"), "slight", "moderate", "heavy")
    ]
    peaks, seconds = [p.memory().peak for p in plans], [p.seconds["total"] for p in plans]
    assert sorted(peaks, reverse=True) == peaks and peaks[3] < peaks[0]
    assert sorted(seconds) == seconds and all(p.memory().peak <= p.memory().limit for p in plans[1:])
    saved = [peaks[0] - p.memory().limit for p in plans[1:]]  # of the way from the fastest plan's peak to the least
    assert saved[0] > 0 and saved == pytest.approx([saved[0] * n for n in (1, 2, 3)], rel=1e-6)
    with pytest.raises(ShardingError, match="'heavy' needs to know the fastest plan first"):
        shardplan.auto(abstract, memory="heavy", search="recursive")


def test_what_has_no_elements_stays_whole(mesh):
    def step(x):
        return jnp.pad(x[:, :0], ((0, 0), (0, 0))), x * 2, jnp.zeros((8, 0))

    got, want = shardplan.auto(mesh, in_shardings=(P("data"),))(step)(np.ones((8, 8), F32)), step(np.ones((8, 8), F32))
    assert [np.asarray(x).shape for x in got] == [x.shape for x in want]
    same(got, want)


def test_pins_on_what_has_no_elements_hold_in_every_layout():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(empty, x):
        kept = jax.lax.with_sharding_constraint(empty, P(None, "model")) + 1
        return kept, jnp.concatenate([x, kept])

    planned = shardplan.auto(mesh, in_shardings=(P("data", "model"), None), out_shardings=(P(None, "model"), None))(step)
    empty, x = np.zeros((0, 8), F32), np.ones((8, 8), F32)
    got = planned(empty, x)
    assert got[0].shape == (0, 8)
    same(got[1], x)
    with pytest.raises(ShardingError, match="names mesh axis 'modle'"):
        shardplan.auto(mesh, in_shardings=(P("modle"), None))(step).plan(empty, x)


def test_fix_answers_what_if(mesh, params):
    plan = shardplan.auto(mesh, cluster="h100")(step).plan(params, batch())
    fixed = plan.fix("up", P("data", None))
    assert next(x for x in fixed.inputs if x.path == "params/up").layout.spec() == ("data", None)
    assert fixed.seconds["total"] >= plan.seconds["total"] * (1 - 1e-9)
    assert not plan.diff(plan)


# ---- bad input: what, where, numbers, way out


BAD = {
    "axis": (
        {"pins": {"up": P("modle", None)}},
        r"pin 'up' on params/up float32\[16,64\].*'modle', the mesh has data=2, model=4",
    ),
    "rank": ({"pins": {"up": P(None, None, "model")}}, r"has 3 entries, the array 2 dims"),
    "twice": ({"pins": {"up": P("data", "data")}}, r"uses mesh axis 'data' twice"),
    "nothing": ({"pins": {"no/such": P()}}, r"pin 'no/such' matches no input of the step.\n  inputs: params/down, params/up"),
    "near": ({"pins": {"up/kernel": P()}}, r"pin 'up/kernel' matches no input of the step.\n  inputs: params/up, params/down"),
    "conflict": ({"pins": {"up": P("data", None), "params/*": P(None, "model")}}, r"conflicting pins on params/up"),
    "divide": ({"pins": {"batch/x": P("model", None)}}, r"shards dim 0 of size 30 over 4 devices.*\n.*pad dim 0 to 32"),
    "budget": (
        {"memory": 1000},
        r"no plan fits .* per device on mesh data=2, model=4.\n  lowest peak found: .*\[.*\].*\n  ways out: ",
    ),
    "amount": ({"memory": "lots"}, r"memory='lots' is no amount of memory"),
    "prefix": ({"in_shardings": (None,)}, r"in_shardings is no tree prefix"),
}


@pytest.mark.parametrize("options, text", BAD.values(), ids=BAD)
def test_bad_input_says_what_where_and_a_way_out(mesh, params, options, text):
    with pytest.raises(ShardingError, match=text):
        shardplan.auto(mesh, **options)(step).plan(params, batch(30))


def test_bad_options(mesh, params):
    with pytest.raises(ShardingError, match="none of 'ilp', 'propagation'"):
        shardplan.auto(mesh, search="magic")
    with pytest.raises(ShardingError, match="takes a mesh first"):
        shardplan.auto(step)
    with pytest.raises(ValueError, match="h100"):
        shardplan.auto(mesh, cluster="no-such")(step).plan(params, batch())
    with pytest.raises(ShardingError, match=r"argument batch/x is str 'hello', not an array"):
        shardplan.auto(mesh)(step).plan(params, {"x": "hello", "y": batch()["y"]})


def test_dims_that_divide_nothing_stay_whole_but_run(mesh):
    def odd(x):
        return jnp.tanh(x @ x.T).sum(0)

    x = np.random.default_rng(0).normal(size=(7, 13)).astype(F32)
    same(shardplan.auto(mesh)(odd)(x), odd(x), 1e-4)


@pytest.mark.parametrize("placed", [False, True])
def test_one_array_twice_in_a_donated_state_is_two_arrays(mesh, placed):
    def fun(state, x):
        new = state["params"] - x.sum()
        return {"params": new, "ema": 0.9 * state["ema"] + 0.1 * new}, x * 2

    w, x = jnp.ones((16, 8)), jnp.arange(128.0).reshape(16, 8)
    expected = fun(fun({"params": w, "ema": w}, x)[0], x)
    step = shardplan.auto(mesh, donate_argnums=0)(fun)
    where = step.plan({"params": w, "ema": w}, x).in_shardings[0][0]["params"]
    first = jax.device_put(w, where) if placed else w
    again = jax.device_put(first, where) if placed else first  # another object that may share the memory
    same(step(step({"params": first, "ema": again}, x)[0], x), expected)
    kept = jnp.arange(128.0).reshape(16, 8)
    expected = fun({"params": kept, "ema": kept + 1}, kept)
    same(step({"params": kept, "ema": kept + 1}, kept), expected)  # twice, and once not donated


def test_zero_sized_arrays(mesh):
    def fun(x, y):
        return jnp.concatenate([x, y]).sum(0), x * 2

    x, y = np.zeros((0, 8), F32), np.ones((8, 8), F32)
    same(shardplan.auto(mesh)(fun)(x, y), fun(x, y))


def test_a_layer_that_is_recomputed_by_hand_behind_one_barrier(mesh):
    def fun(x, w):
        y = jnp.tanh(x @ w)
        z = jnp.tanh(y @ w)
        y, v = jax.lax.optimization_barrier((y, w))
        return (z * jnp.tanh(y @ v)) @ v.T

    x, w = (np.random.default_rng(0).normal(size=(n, 32)).astype(F32) for n in (16, 32))
    for pins in {}, {"x": P("data"), "w": P(None, "model")}:
        same(shardplan.auto(mesh, pins=pins)(fun)(x, w), jax.jit(fun)(x, w), 1e-4)


def test_a_step_without_arguments_or_results(mesh):
    assert shardplan.auto(mesh)(lambda: jnp.arange(8))().tolist() == list(range(8))
    assert shardplan.auto(mesh)(lambda x: None)(np.ones(8, F32)) is None


@pytest.mark.parametrize("search", ["ilp", "propagation", "recursive"])
@pytest.mark.parametrize(("fun", "arguments"), [(lambda: (), ()), (lambda state: state, ({},)), (lambda x: None, (None,))])
def test_a_step_without_any_array_is_planned_and_runs(mesh, fun, arguments, search):
    step = shardplan.auto(mesh, search=search)(fun)
    assert step(*arguments) == jax.jit(fun)(*arguments)
    gpus = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(gpus, cluster="h100", memory="1MB", search=search)(fun).plan(*arguments)
    assert plan.inputs == plan.outputs == () and plan.seconds["total"] == 0 == plan.gap and plan.replan().dumps() == plan.dumps()
    assert shardplan.Plan.loads(plan.dumps()).explain() and plan.html() and not plan.baselines().rows


def test_effects_stay_and_unknown_primitives_are_told(mesh, capfd):
    def fun(x):
        jax.debug.print("sum {s}", s=x.sum())
        return jax.pure_callback(lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct((8, 8), F32), x)

    x = np.ones((8, 8), F32)
    with pytest.warns(
        ShardingWarning, match=r"'pure_callback' at test_auto.py:\d+: it runs replicated, \d+ % of the step on every dev"
    ):
        out = shardplan.auto(mesh)(fun)(x)
    same(out, x * 2)
    jax.effects_barrier()
    assert "sum 64" in capfd.readouterr().out


def kernel(x):
    def doubled(x, out):
        out[...] = x[...] * 2

    return pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def library(x):
    return jax.ffi.ffi_call("lapack_spotrf_ffi", [x, jax.ShapeDtypeStruct((), jnp.int32)])(x @ x.T, uplo=np.uint8(ord("L")))[0]


@pytest.mark.parametrize("opaque", [kernel, library])
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_what_the_planner_does_not_see_into_runs_whole(kind, opaque):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    x = jnp.eye(8) + jnp.ones((8, 8))
    jnp.linalg.cholesky(x)  # has jax load the library

    def fun(x):
        return opaque(jnp.sin(x) + 4 * jnp.eye(8)) @ x

    with pytest.warns(ShardingWarning, match="no rule for primitive '(pallas_call|ffi_call)'"):
        same(shardplan.auto(mesh)(fun)(x), fun(x))


def test_callbacks_that_take_no_time_are_one_warning_with_their_lines():
    def checked(x):
        for _ in range(2):
            x = jax.pure_callback(lambda x: x + 1, x, x)
        x = jax.pure_callback(lambda x: x + 1, x, x)
        x = jax.pure_callback(lambda x: x + 1, x, x)
        return jax.pure_callback(lambda x: x + 1, x, x)

    def fun(w, x):
        return checked(x[:1, :1]) + jnp.tanh(x @ w).sum()

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    args = [jax.ShapeDtypeStruct((n, 1 << 14), jnp.float32) for n in (1 << 14, 1 << 18)]
    with pytest.warns(ShardingWarning, match="no rule for primitive 'pure_callback'") as caught:
        plan = shardplan.auto(mesh, cluster="h100")(fun).plan(*args)
    (text,) = (str(w.message) for w in caught if "pure_callback" in str(w.message))
    lines = sorted({source for _, source in plan.unknown})
    assert len(lines) == 4 and all(line in text for line in lines[:3]) and " and on 1 more lines: it runs replicated" in text
    assert "way out: put what computes under jax.shard_map" in text and "register_rule" not in text


def accumulated(x):
    """A mutable array, written in a loop, read and frozen."""
    total = jax.new_ref(jnp.zeros_like(x[0]))

    def add(i, _):
        total[...] += jnp.sin(x[i])

    jax.lax.fori_loop(0, len(x), add, None)
    total[0] = total[1] * 2
    return jax.freeze(total) @ x.T


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("fun", [accumulated, jax.value_and_grad(lambda x: accumulated(x).sum())])
def test_mutable_arrays_inside_a_step_are_values_to_the_plan(fun, kind):
    x = jnp.arange(64.0).reshape(8, 8) / 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = shardplan.auto(jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2), pins={"x": P("a")})(fun)(x)
    for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(fun(x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_mutable_array_from_outside_is_refused(mesh):
    total, x = jax.new_ref(jnp.zeros(8)), jnp.ones(8)

    def write(total, x):
        total[...] += x
        return x

    why = r"the step takes a mutable array, Ref{float32\[8\]}, which a plan cannot place.\n  ways out: take the array"
    with pytest.raises(ShardingError, match=why):
        shardplan.auto(mesh)(write)(total, x)
    with pytest.raises(ShardingError, match="the step closes over a mutable array"):
        shardplan.auto(mesh)(lambda x: write(total, x))(x)


@jax.custom_batching.custom_vmap
def batched_apart(x):
    return x @ x.T


@batched_apart.def_vmap
def _(size, batched, x):
    return jnp.zeros((size, 8, 8)), True


@jax.custom_vjp
def remembered(x):
    return x @ x.T


remembered.defvjp(lambda x: (x @ x.T, x), lambda x, g: (g @ x,), optimize_remat=True)

OPENED = {
    "a composite": jax.lax.composite(lambda x: x @ x.T, "tests.product"),
    "a linear call": lambda x: jax.custom_derivatives.linear_call(lambda r, x: r @ x, lambda r, y: r.T @ y, x.T, x),
    "a batching of its own": batched_apart,
    "a gradient that keeps little": lambda x: jax.vjp(remembered, x)[0],
    "metadata": lambda x: set_xla_metadata(x @ x.T, tag="tests"),
}


@pytest.mark.parametrize("name", OPENED)
def test_what_wraps_a_program_is_planned_through(mesh, name):
    x = jnp.arange(64.0).reshape(8, 8) / 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned = shardplan.auto(mesh, pins={"x": P("data", "model")})(OPENED[name])
        np.testing.assert_allclose(planned(x), OPENED[name](x), rtol=1e-5)
    assert "dot_general" in {op.primitive for op in planned.plan(x).context.planned.graph.ops}


def test_a_planned_step_is_batched_as_its_author_said():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    xs = jnp.ones((3, 8, 8))
    np.testing.assert_array_equal(jax.vmap(shardplan.auto(mesh, pins={"x": P("data")})(lambda x: batched_apart(x)))(xs), 0 * xs)


def test_ordered_prints_are_refused_on_several_devices():
    """As by JAX, which names no way out."""

    def fun(x):
        jax.debug.print("{}", x.sum(), ordered=True)
        return x + 1

    for n in (1, 8):
        mesh = jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
        planned = shardplan.auto(mesh)(fun)
        if n == 1:
            same(planned(jnp.ones(8)), jnp.full(8, 2.0))
        else:
            with pytest.raises(ShardingError, match=r"on one device only, not on 8\.\n  way out: .* without ordered"):
                planned(jnp.ones(8))


def test_arrays_in_host_memory_are_moved_with_a_warning():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P(), memory_kind="pinned_host"))
    planned = shardplan.auto(mesh)(lambda w, x: w * jax.device_put(x, jax.memory.Space.Device))
    with pytest.warns(ShardingWarning, match=r"moved 1 of 2 arrays.*x was P\(.*\) in pinned_host"):
        same(planned(jnp.ones(8), x), x)


def test_ordered_effects_stay_in_order(mesh):
    seen = []

    def look(x):
        return io_callback(lambda x: seen.append(float(x)), None, x, ordered=True)

    def fun(x):
        for k in range(5):
            look(k * x.sum())
        return x @ x

    x = np.ones((8, 8), F32)
    same(shardplan.auto(mesh)(fun)(x), x @ x)
    jax.effects_barrier()
    assert seen == [64.0 * k for k in range(5)]


def test_known_programs_plan_without_warnings(mesh, params):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardplan.auto(mesh)(step).plan(params, batch())


@pytest.mark.parametrize(("into", "out"), [
    ((P("a", "b"), P()), None), ((P("a"), P("b")), None), ((None, P()), P("a", "b")), ((P(), P()), P("a", "b")),
    ((P("b", "a"), P()), P("a", "b")), ((P(), P("a")), P(None, "a")),
])  # fmt: skip
@pytest.mark.parametrize("inside", [None, P("a", "b"), P("b")])
def test_what_is_added_may_be_pinned_to_any_layouts_and_the_sum_to_another(into, out, inside):
    """The first argument looks like state that the result replaces; pinned apart, it is none."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, y = jnp.arange(256.0).reshape(16, 16), jnp.ones((16, 16))

    def add(x, y):
        z = x + y
        return z if inside is None else jax.lax.with_sharding_constraint(z, jax.NamedSharding(mesh, inside))

    step = shardplan.auto(mesh, in_shardings=into, out_shardings=out)(add)
    z = step(x, y)
    np.testing.assert_array_equal(z, x + y)
    for got, wanted in zip(step.plan(x, y).inputs, into, strict=True):
        assert wanted is None or got.layout.spec() == (*wanted, *[None] * (2 - len(wanted)))
    assert out is None or z.sharding.is_equivalent_to(jax.NamedSharding(mesh, out), 2)


TWICE = {
    "two constraints": lambda c, x, y: c(x * 2, P("a")) + c(y * 3, P(None, "b")),
    "a constraint on a constraint": lambda c, x, y: c(c(x, P("a")) * c(y, P(None, "a")), P("b")) + x,
    "one sum transposed": lambda c, x, y: c(x * 2, P("a")) + c(x * 2, P("a")).T,
    "several readers": lambda c, x, y: (x + y, x * y, x - y),
    "a loop": lambda c, x, y: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + s[2], s[2]), (0, x, y)),
    "a branch": lambda c, x, y: jax.lax.cond(x[0, 0] > 0, lambda: x + y, lambda: c(x, P("b")) - c(y, P("a"))),
}


@pytest.mark.parametrize("program", TWICE)
def test_what_is_pinned_apart_meets_all_the_same(program):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, y = jnp.arange(256.0).reshape(16, 16), jnp.ones((16, 16))

    def constrain(x, spec):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, spec))

    def run(x, y):
        return TWICE[program](constrain, x, y)

    step = shardplan.auto(mesh, in_shardings=(P("a"), P(None, "b")))(run)
    for got, want in zip(jax.tree.leaves(step(x, y)), jax.tree.leaves(run(x, y)), strict=True):
        np.testing.assert_array_equal(got, want)
    assert [leaf.layout.spec() for leaf in step.plan(x, y).inputs] == [("a", None), (None, "b")]


def test_names_that_the_mesh_lacks_are_let_go_where_plain_jit_does_not_ask_for_them(mesh):
    nn = pytest.importorskip("flax.linen")
    dense = nn.Dense(64, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor")))
    x = jnp.linspace(-1.0, 1.0, 512 * 64).reshape(512, 64)
    params = dense.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(dense.apply(params, x) ** 2)

    train = shardplan.auto(mesh)(jax.grad(loss))
    with pytest.warns(ShardingWarning, match=r"no axis for: .*tensor(.|\n)*way out: name axes of data=2, model=4") as told:
        got = train(params, x)
    assert told[0].filename == __file__
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, jax.jit(jax.grad(loss))(params, x))
    with pytest.raises(ShardingError, match=r"no axis for: .*tensor(.|\n)*plan on a mesh that has it"):
        shardplan.auto(mesh)(lambda x: jax.lax.with_sharding_constraint(x * 2, P("tensor")))(x)
