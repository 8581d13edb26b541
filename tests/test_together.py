"""Jobs: functions of one state are planned with one layout of it, that of the least weighted seconds (`shardplan.together`)."""

import re
import warnings

import jax
import jax.numpy as jnp
import msgspec
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_jobs import batch, create_state, eval_step, layouts, train_step

import shardplan

pytestmark = pytest.mark.usefixtures("first_plan")

SHAPES = jax.eval_shape(create_state, jax.random.key(0))
CALLS = (SHAPES, batch()), (SHAPES["params"], batch(64))


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def steps(on, **options):
    return shardplan.auto(on, donate_argnums=0, **options)(train_step), shardplan.auto(on, **options)(eval_step)


def planned(train=0.95, evaluate=0.05, on=None, **options):
    first, second = steps(on or mesh(), **options)
    return shardplan.together({first: train, second: evaluate}, *CALLS)


@pytest.fixture(scope="module")
def job():
    return planned()


@pytest.fixture(scope="module")
def of_evaluations():
    return planned(0.01, 0.99)


def test_the_weights_decide_which_layout_the_state_has(job, of_evaluations):
    trained, evaluated = (layouts(x.plans[0])["state/params/up"] for x in (job, of_evaluations))
    assert trained != evaluated
    for x in (job, of_evaluations):
        own, shared = (layouts(plan) for plan in reversed(x.plans))
        assert all(own[f"params/{w}"] == shared[f"state/params/{w}"] for w in ("up", "down"))


def test_no_order_in_which_one_function_decides_takes_less(job, of_evaluations):
    train, evaluate = steps(mesh())
    own = train.plan(*CALLS[0]), evaluate.plan(*CALLS[1])
    seconds = [[own[0], evaluate.with_options(state_like=own[0]).plan(*CALLS[1])]]
    pins = {f"state/{path}": x.spec() for path, x in layouts(own[1]).items() if path.startswith("params/")}
    seconds += [[train.with_options(pins=pins).plan(*CALLS[0]), own[1]]]
    for found, weights in ((job, (0.95, 0.05)), (of_evaluations, (0.01, 0.99))):
        least = min(sum(w * plan.seconds["total"] for w, plan in zip(weights, plans, strict=True)) for plans in seconds)
        assert found.bound <= found.seconds <= least * (1 + 1e-9)
        assert found.seconds == pytest.approx(sum(w * plan.seconds["total"] for w, plan in zip(weights, found.plans, strict=True)))


def test_what_no_function_alone_would_choose_is_found_array_by_array():
    def first(state, x):
        return {"a": state["a"] - jax.grad(lambda a: jnp.mean((x @ a) ** 2))(state["a"]), "b": 0.9 * state["b"]}

    def second(state, x):
        return jnp.mean((x @ state["b"]) ** 2) + jnp.mean(state["a"] ** 2)

    on, wide, high = jax.sharding.AbstractMesh((2, 4), ("data", "model")), (8192, 32768), (32768, 8192)
    array = {shape: jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (wide, high, (64, 32768), (16384, 8192))}
    a, b = (shardplan.auto(on, cluster="h100")(fun) for fun in (first, second))
    state = {"a": array[high], "b": array[wide]}
    job = shardplan.together({a: 1, b: 1}, (state, array[64, 32768]), (state, array[16384, 8192]))
    assert [x.name for x in job.layouts] == ["found array by array", "as first has it", "as second has it"]
    assert job.gap < 0.06 and job.seconds < 0.9 * job.layouts[1].seconds and "found array by array" in str(job)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_steps_run_on_one_state_with_the_numbers_of_plain_jit(kind):
    train, evaluate = planned(0.01, 0.99, mesh(kind), search="propagation")
    state, plain = train.init(create_state, jax.random.key(0)), create_state(jax.random.key(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error", shardplan.ShardingWarning)  # nothing is moved
        for rows in (512, 64):  # the last batch is planned when it comes, for the state where it is
            (state, loss), (plain, expected) = train(state, batch(rows)), jax.jit(train_step)(plain, batch(rows))
            found = evaluate(state["params"], batch(rows // 8))
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
            assert float(found) == pytest.approx(float(eval_step(plain["params"], batch(rows // 8))), rel=1e-5)


def test_the_same_job_has_the_same_plans_and_names_its_weights(job, tmp_path):
    again = planned()
    assert [plan.dumps() for plan in again.plans] == [plan.dumps() for plan in job.plans] and str(again) == str(job)
    line = next(x for x in job.plans[1].explain().splitlines() if x.startswith("job"))
    text = r"job     \S+ \S+ a call on average, one layout of the state: 5 % eval_step \S+ \S+, 95 % train_step \S+ \S+"
    assert re.fullmatch(text, line)
    job.plans[1].save(tmp_path / "eval.json")
    assert shardplan.Plan.load(tmp_path / "eval.json") == job.plans[1]
    reused = shardplan.auto(mesh(), plan=tmp_path / "eval.json")(eval_step)
    assert reused.plan(*CALLS[1]).inputs == job.plans[1].inputs


def test_what_is_asked_of_a_plan_of_a_job_keeps_its_state_and_its_job():
    train, _ = job = planned(0.01, 0.99, search="propagation")
    plan = job.plans[0]
    train(create_state(jax.random.key(0)), batch())  # so that no faster plan is adopted
    state = {path: x for path, x in layouts(plan).items() if path.startswith("state/")}
    batches = plan.fix("batch/x", P(None, "model"))
    asked = (
        batches,
        batches.fix("batch/y", P(None, "model")),
        plan.replan(),
        plan.what_if("batch/x", plan.why("batch/x").choices[0].text),
    )
    for changed in (*asked, asked[-1].fix("batch/y", P("model"))):
        assert {**layouts(changed), **state} == layouts(changed) and changed.job[1] == plan.job[1]
        assert changed.job[0] == msgspec.structs.replace(plan.job[0], seconds=changed.seconds["total"])
    moved = plan.fix("state/moments/up", P())
    assert moved.job == () and {**layouts(moved), **state, "state/moments/up": layouts(moved)["state/moments/up"]} == layouts(moved)
    assert plan.replan(memory="disable").job == ()
    assert layouts(train.plan(*CALLS[0])) == {**layouts(train.plan(*CALLS[0])), **state} and train.plan(*CALLS[0]).job


def test_a_faster_plan_that_is_found_later_is_one_of_the_job():
    first, second = steps(mesh(), search="propagation")
    call = SHAPES, batch(1024)
    train, _ = job = shardplan.together({first: 0.01, second: 0.99}, call, CALLS[1])
    before = job.plans[0]
    with pytest.warns(shardplan.ShardingWarning, match="the step runs by a faster plan"):
        found = before.compare(["ilp"]).plans["ilp"]
    now = train.plan(*call)
    assert now.dumps() == found.dumps() and now.job[0].seconds == now.seconds["total"] < before.seconds["total"]
    assert all(layouts(now)[path] == x for path, x in layouts(before).items() if path.startswith("state/"))


def test_one_step_is_planned_for_two_shapes_of_a_batch():
    step, evaluate = steps(mesh(), search="propagation")
    job = shardplan.together({step: (0.9, 0.05), evaluate: 0.05}, CALLS[0], (SHAPES, batch(64)), CALLS[1])
    assert [part.name for part in job.parts] == ["train_step float32[512,256]", "train_step float32[64,256]", "eval_step"]
    train, _ = job
    assert train.plan(*CALLS[0]) is job.plans[0] and train.plan(SHAPES, batch(64)) is job.plans[1]
    first, second = (layouts(plan) for plan in job.plans[:2])
    assert all(first[path] == second[path] for path in first if path.startswith("state/"))
    assert "(" in str(job) or "train_step float32[64,256]" in str(job)


def test_the_rest_of_the_state_is_in_memory_while_a_part_of_it_is_used():
    def planned_for_many(memory):
        train, evaluate = steps(mesh(), search="propagation", memory=memory)
        return shardplan.together({train: 0.9, evaluate: 0.1}, CALLS[0], (SHAPES["params"], batch(8192)))

    moments = 2 * 4 * 1024 * 256 / 8  # on one of eight devices
    peak = planned_for_many("disable").plans[1].memory_report.peak
    assert planned_for_many(peak + moments).plans[1].memory_report.peak == peak
    says = r"(?s)eval_step: no plan .* hold the state that eval_step does not take"
    with pytest.raises(shardplan.ShardingError, match=says) as error:
        planned_for_many(peak + moments / 2)
    assert "memory=" in str(error.value)


def test_of_several_parts_of_the_state_that_fit_the_one_that_is_passed_is_meant():
    train, evaluate = steps(mesh(), search="propagation", pins={"moments/up": P("data", "model")})
    evaluate = evaluate.with_options(pins=None)
    job = shardplan.together({train: 1, evaluate: 1}, CALLS[0], (SHAPES["moments"], batch(64)))
    assert layouts(job.plans[1])["params/up"].spec() == ("data", "model")
    other = shardplan.together(
        {train: 1, evaluate: 1}, CALLS[0], (jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), SHAPES["params"]), batch(64))
    )
    assert layouts(other.plans[1])["params/up"] == layouts(other.plans[0])["state/params/up"]


MISTAKES = [
    (lambda a, b: (3, *CALLS), "takes a mapping of steps to weights first, not int"),
    (lambda a, b: ({}, *CALLS), "takes a mapping of steps to weights first, not an empty one"),
    (lambda a, b: ({train_step: 1, b: 1}, *CALLS), "takes steps of auto, and train_step is none.\n  way out: auto(mesh)(train_step)"),
    (lambda a, b: ({a: 0, b: 1}, *CALLS), "the weight 0 of train_step is no number above 0"),
    (lambda a, b: ({a: "0.9", b: 1}, *CALLS), "the weight '0.9' of train_step is no number above 0"),
    (lambda a, b: ({a: 1, b: 1}, CALLS[0]), "has 2 weights and the arguments of 1 calls"),
    (lambda a, b: ({a: 1}, CALLS[0]), "plans two functions or more"),
    (lambda a, b: ({a: 1, b: 1}, CALLS[0], list(CALLS[1])), "the arguments of eval_step are a list, not a tuple"),
    (lambda a, b: ({a: 1, b.with_options(mesh=jax.make_mesh((8,), ("x",))): 1}, *CALLS),
     "train_step is for mesh data=2, model=4, eval_step for x=8"),
    (lambda a, b: ({a: 1, shardplan.auto(mesh())(lambda x: x @ x): 1}, CALLS[0], (jnp.ones((8, 8)),)),
     "it is not in it.\n  not there:  float32[8,8]"),
    (
        lambda a, b: ({a: 1, b: 1}, CALLS[0], ({**SHAPES["params"], "head": jnp.ones(3)}, batch(64))),
        "is no part of the state, the first argument of train_step: 1 of 3 arrays are not in it.\n  not there: head float32[3]",
    ),
    (
        lambda a, b: ({a.with_options(pins={"params/up": P("data")}): 1, b.with_options(pins={"params/up": P("model")}): 1}, *CALLS),
        "no layout of the state was found with which all functions have a plan",
    ),
]  # fmt: skip


@pytest.mark.parametrize("call, says", MISTAKES, ids=lambda x: x[:24] if isinstance(x, str) else "")
def test_what_cannot_be_is_said(call, says):
    with pytest.raises(shardplan.ShardingError) as error:
        shardplan.together(*call(*steps(mesh(), search="propagation")))
    assert says in str(error.value) and ("way out: " in str(error.value) or "ways out: " in str(error.value))
