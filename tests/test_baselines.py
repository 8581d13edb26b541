"""A plan beside the classical layouts of its step: `Plan.baselines`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from models import MODELS
from sweeps import sweep

import shardplan
from shardplan.costs.build import build_network, restricted
from shardplan.ilp.solver import solve
from shardplan.mesh.reshard import Resharder
from shardplan.search.classical import classical_inputs, with_inputs
from shardplan.search.objective import NEAR_TIE
from shardplan.view.instrument import Instrument

MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
WIDTH, HEADS, VOCAB, BATCH, LENGTH = 1024, 8, 8192, 16, 256


def attend(x, p):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k) / 8)
    return jnp.einsum("bthe,hed->btd", jnp.einsum("bhts,bshe->bthe", scores, v), p["o"])


def loss_fn(p, batch):
    x = p["t"][batch["in"]]
    x = x + attend(x, p)
    x = x + jax.nn.gelu(x @ p["a"]) @ p["b"]
    logits = x @ p["h"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["out"][..., None], -1))


def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["p"], batch)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
    return {"p": jax.tree.map(lambda p, m: p - 0.1 * m, state["p"], m), "m": m}, loss


def arguments():
    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    heads = array(WIDTH, HEADS, WIDTH // HEADS)
    p = {"t": array(VOCAB, WIDTH), "a": array(WIDTH, 4 * WIDTH), "b": array(4 * WIDTH, WIDTH), "h": array(WIDTH, VOCAB)}
    p |= dict.fromkeys("qkv", heads) | {"o": array(HEADS, WIDTH // HEADS, WIDTH)}
    tokens = array(BATCH, LENGTH, dtype=jnp.int32)
    return {"p": p, "m": p}, {"in": tokens, "out": tokens}


def planned(**options):
    return shardplan.auto(MESH, cluster="h100", donate_argnums=0, **options)(step).plan(*arguments())


@pytest.fixture(scope="module")
def plan():
    return planned()


def row(plan, name):
    return next(x for x in plan.baselines().rows if x.name == name)


def test_tensor_parallelism_is_megatrons_whatever_the_names(plan):
    found = row(plan, "data over data × tensor over model").layouts
    assert found["state/p/a"] == (None, "model") and found["state/p/b"] == ("model", None)  # columns, then rows
    assert found["state/p/q"] == (None, "model", None) and found["state/p/o"] == ("model", None, None)  # heads
    assert found["state/p/t"] == ("model", None) and found["state/p/h"] == (None, "model")  # vocabulary
    assert found["state/m/a"] == found["state/p/a"] and found["batch/in"] == ("data", None)


def test_the_others_are_what_their_names_say(plan):
    both = ("data", "model")
    data, zero, fsdp = (row(plan, name).layouts for name in ("data parallel", "ZeRO-1", "FSDP"))
    assert {x for path, x in data.items() if path.startswith("state")} == {(None, None), (None, None, None)}
    assert zero["state/p/a"] == (None, None) and zero["state/m/a"] == (None, both)
    assert fsdp["state/p/a"] == fsdp["state/m/a"] == (None, both) and fsdp["batch/in"] == (both, None)
    mixed = row(plan, "FSDP over data × tensor over model").layouts
    assert mixed["state/p/a"] == ("data", "model") and mixed["state/m/b"] == ("model", "data")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data parallel", "FSDP over data × tensor over model"])
def test_a_baseline_is_on_the_plans_objective(plan, name):
    """Planned by the user with the same pins, the step is no slower, and faster only by what a whole search improves."""
    found = row(plan, name)
    pinned = planned(pins={path: jax.sharding.PartitionSpec(*x) for path, x in found.layouts.items()})
    assert 0.9 * found.seconds <= pinned.seconds["total"] <= (1 + NEAR_TIE) * found.seconds


@pytest.mark.slow
def test_the_plan_is_no_slower_and_its_first_lines_say_what_it_saves(plan):
    found = plan.baselines()
    assert len(found.rows) == 10 and found.best is found.rows[0] and found.saving >= -NEAR_TIE
    lines = str(plan).splitlines()
    assert lines[4] == f"saves   {found.saving_text}" and found.best.name in lines[4]
    assert f"saves {found.saving_text}" in plan.html().replace("&nbsp;", " ")
    text = str(found)
    assert text.splitlines()[1].startswith("this plan ") and text.count("\n") == 11
    assert str(planned().baselines()) == text


@pytest.mark.slow
def test_what_does_not_fit_says_so(plan):
    plan = planned(memory=1.01 * plan.memory().peak)
    found = plan.baselines()
    assert not row(plan, "data parallel").fits and "does not fit" in str(found)
    assert [x.fits for x in found.rows] == sorted((x.fits for x in found.rows), reverse=True)
    assert all(x.peak_bytes > plan.memory().limit for x in found.rows if not x.fits)


def test_a_step_without_state_has_no_baselines():
    plan = shardplan.auto(MESH, cluster="h100")(lambda x: (x @ x).sum()).plan(jax.ShapeDtypeStruct((512, 512), jnp.float32))
    assert plan.baselines().rows == () and plan.saving == "" and "no baselines" in str(plan.baselines())


def test_a_plan_from_a_file_says_what_it_saves(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = shardplan.Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(plan) and f"\nsaves   {plan.saving}" in str(loaded)
    assert str(loaded.baselines()) == str(plan.baselines()) and not any(row.layouts for row in loaded.baselines().rows)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text() != loaded.dumps() == plan.dumps()
    assert f"saves {plan.saving}" in loaded.html().replace("&nbsp;", " ")
    taken = shardplan.auto(MESH, cluster="h100", donate_argnums=0, plan=loaded)(step).plan(*arguments())
    assert taken.saving == plan.saving and Instrument(taken).data()["saves"] == plan.saving


def test_a_plan_of_an_older_file_does_not_know_what_it_saves(plan):
    older = shardplan.Plan.loads(plan.dumps())  # as one of version 3, it has no baselines
    assert str(older) == str(plan).replace(f"\nsaves   {plan.saving}", "") and not older.saving
    with pytest.raises(shardplan.ShardingError, match=r"baselines\(\) needs a plan that remembers its program"):
        older.baselines()


@pytest.mark.slow
def test_of_a_longer_step_the_first_lines_compare_the_layouts_that_are_no_mixes(monkeypatch):
    fresh = planned()
    monkeypatch.setattr("shardplan.plan.plan.QUICK_OPS", 0)
    assert Instrument(fresh).data()["saves"] == ""  # not planned to show it
    assert (
        fresh.saving.endswith(", the fastest of 4 unmixed classical layouts")
        and str(fresh).splitlines()[4] == f"saves   {fresh.saving}"
    )
    assert Instrument(fresh).data()["saves"] == fresh.saving
    pure, rows = fresh._fastest_pure.best, {row.name: row for row in fresh.baselines().rows}
    assert pure == rows[pure.name] and pure.seconds == min(row.seconds for row in rows.values() if "×" not in row.name)
    assert fresh.saving == fresh.baselines().saving_text and " of 10 classical" in fresh.saving


@pytest.mark.parametrize("limit", [None, 1e9])
def test_layouts_of_the_inputs_are_taken_out_of_one_network_as_if_each_had_its_own(plan, limit):
    """Costs, edges and ties of repeated layers are those of a network of these pins."""
    space, resharder = plan.context.planned.space, Resharder(plan.mesh, plan.context.planned.space.cluster)
    inputs = {i: np.ones(len(space.strategies[i]), bool) for i in space.graph.args}
    some = {i: np.arange(len(mask)) % 3 == 0 for i, mask in inputs.items()}
    found = restricted(build_network(space, resharder, limit, inputs), some).problem
    own = build_network(space, resharder, limit, some).problem
    assert [c.tolist() for c in found.costs] == [c.tolist() for c in own.costs] and found.ties == own.ties
    assert all((a.i, a.j) == (b.i, b.j) and np.array_equal(a.cost, b.cost) for a, b in zip(found.edges, own.edges, strict=True))
    assert [x.bytes.tolist() for x in found.usages] == [x.bytes.tolist() for x in own.usages] and found.limit == own.limit


@pytest.mark.parametrize("limit", [None, 3e8])
def test_the_classical_layout_of_least_cost_is_found_at_once(plan, limit):
    """One network with a node more costs what the cheapest of the networks of each layout does."""
    space = plan.context.planned.space
    network = build_network(space, Resharder(plan.mesh, space.cluster), limit)
    found, alone = solve(with_inputs(network, [of for _, of in classical_inputs(network.space)])), []
    for _, layouts in classical_inputs(space):
        costs = list(network.problem.costs)
        for a, dims in layouts.items():
            mask = [x.dims == dims for x in space.strategies[a].results[0]]
            costs[a] = np.where(np.tile(mask, network.blocks.count(a)), costs[a], np.inf)
        alone.append(solve(replace(network.problem, costs=tuple(costs))))
    states = found.states[:-1]
    assert found.status == "optimal" and len(alone) == 10
    assert found.objective == network.problem.objective(states) == min(x.objective for x in alone)
    assert alone[found.states[-1]].objective == found.objective and network.problem.fits(states)


NAMES = ("digits_cnn", "dlrm", "face_softmax", "gpt", "hybrid_mlp", "moe")


@pytest.mark.parametrize(
    ("name", "shape"), sweep([(n, s) for n in NAMES for s in ((8,), (2, 4))], lambda x: x != ("face_softmax", (8,)))
)
def test_no_classical_layout_is_predicted_faster_than_the_plan(name, shape):
    """By more than what counts as equal."""
    create, train_step, batches = MODELS[name]()
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: next(iter(batches(1))))
    mesh = jax.sharding.AbstractMesh(shape, ("data", "model")[: len(shape)])
    found = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(train_step).plan(*shapes)
    assert found.baselines().rows and found.baselines().saving >= -NEAR_TIE


def test_a_step_that_takes_no_time_saves_none():
    """Of arrays without elements, on a machine without latencies."""
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = shardplan.auto(mesh, cluster=NEAR)(lambda x: x + 1).plan(jax.ShapeDtypeStruct((0, 8), jnp.float32))
    assert plan.seconds["total"] == 0 and plan.baselines().saving in (0, None)
    assert "step" in plan.explain()
