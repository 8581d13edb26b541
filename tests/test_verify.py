"""Plans that learn from what XLA made of them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.mesh.cluster import group_link
from shardplan.mesh.collective import seconds_on_link
from shardplan.xla import available
from shardplan.xla.hlo.schedule import seconds

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds = jax.ShapeDtypeStruct
MESH = AbstractMesh((8,), ("data",))
STATE = {"up": sds((1024, 2048), jnp.float32), "down": sds((2048, 1024), jnp.float32)}
BATCH = sds((4096, 1024), jnp.float32)
SPLIT = {"x": jax.P("data")}


def step(w, x):
    def loss(w):
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["down"] - x) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def auto(cluster="h100", **options):
    return shardplan.auto(MESH, donate_argnums=0, cluster=cluster, **options)(step)


def momentum(state, x):
    w, value = step(state["w"], x)
    m = jax.tree.map(lambda m, new, old: 0.9 * m + new - old, state["m"], w, state["w"])
    return {"w": jax.tree.map(jnp.add, state["w"], m), "m": m}, value


def test_what_xla_adds_is_priced_and_planned_around():
    """Prices of a GPU, XLA for CPUs: of new weights from sharded momentum it gathers more than the plan, and a later plan less."""
    pins = {"x": jax.P("data"), "state/m/*": jax.P("data")}
    make = functools.partial(shardplan.auto, MESH, donate_argnums=0, cluster="a100", pins=pins, search="propagation")
    weights = {"up": sds((4096, 2048), jnp.float32), "down": sds((2048, 4096), jnp.float32)}
    inputs = {"w": weights, "m": weights}, sds((4096, 4096), jnp.float32)
    plan = make(verify=True)(momentum).plan(*inputs)
    found = plan.verified
    assert found is not None and 2 <= len(found.rounds) <= 3
    first, last = found.rounds[0], found.rounds[found.chosen]
    assert first.overruns and first.overruns[0].correction.reshards and first.overruns[0].seconds > 0
    assert found.rounds[1].plan.seconds["total"] >= first.plan.seconds["total"]
    assert first.plan.decisions == make()(momentum).plan(*inputs).decisions
    assert last.seconds.step_s < first.seconds.step_s and not last.overruns
    assert last.seconds.step_s == min(r.seconds.step_s for r in found.rounds)
    assert plan.decisions == last.plan.decisions and plan.context.planned is last.plan.context.planned
    text = str(found)
    assert text.startswith("round 1  planned ") and "µs more than planned: all-gather over data" in text and ", chosen" in text


def test_the_same_twice():
    one, two = (auto("a100", verify=True, pins=SPLIT).plan(STATE, BATCH) for _ in range(2))
    assert one == two and str(one.verified) == str(two.verified)


def test_a_plan_without_says_nothing():
    plan = auto().plan(STATE, BATCH)
    assert plan.verified is None
    assert plan.fix("w/up", jax.P("data")).verified is None


@pytest.mark.slow
@needs_gpu_compiler
def test_a_plan_that_holds_is_kept_after_one_round():
    plan = auto(verify="h100:8").plan(STATE, BATCH)
    assert len(plan.verified.rounds) == 1 and plan.verified.stopped == "XLA's program is as planned"


@pytest.mark.slow
@needs_gpu_compiler
def test_the_budget_is_tightened_by_what_xla_needs_more():
    pins = {"x": jax.P(), "w/up": jax.P(None, "data"), "w/down": jax.P("data")}
    plain = auto(pins=pins).check(STATE, BATCH, target="h100:8")
    assert plain.memory_ratio < 1, "the case is about a plan that promises too little"
    peak = plain.compiled.memory.peak_bytes
    plan = auto(verify="h100:8", pins=pins, memory=(plain.plan.memory().peak + peak) / 2).plan(STATE, BATCH)
    first, second = plan.verified.rounds[:2]
    assert not first.fits and second.budget < first.budget
    assert plan.verified.rounds[plan.verified.chosen].fits


@pytest.mark.slow
@needs_gpu_compiler
def test_seconds_are_those_of_the_emitted_program():
    found = auto(pins={"x": jax.P("data"), "w/*": jax.P()}).check(STATE, BATCH, target="h100:8")
    cluster = shardplan.Cluster.preset("h100")
    took = seconds(found.compiled, cluster)
    products = found.compiled.flops / cluster.device.flops_per_s("float32")
    assert products < took.compute_s < 5 * products
    sent = found.compiled.collectives  # how many are combined is the plan's choice
    node = cluster.axis(shardplan.MeshShape(("data",), (8,)), "data")
    assert took.collective_s == pytest.approx(sum(seconds_on_link("all-reduce", c.bytes, node, cluster) for c in sent), rel=0.01)
    assert took.exposed_s <= took.collective_s <= took.total_s
    slower = replace(cluster, intra=replace(cluster.intra, bytes_per_s=45e9, reduce_bytes_per_s=None))
    latencies = len(sent) * seconds_on_link("all-reduce", 0, node, cluster)
    assert seconds(found.compiled, slower).collective_s - latencies > 5 * (took.collective_s - latencies)


def test_groups_know_their_nodes():
    assert group_link(((0, 1, 2, 3), (4, 5, 6, 7)), 4) == shardplan.Cluster.preset("h100").axis(shardplan.MeshShape(("a",), (4,)), "a")
    across = group_link(((0, 4), (1, 5), (2, 6), (3, 7)), 4)
    assert (across.members, across.local, across.nodes) == (2, 1, 2)
    both = group_link((tuple(range(8)),), 4)
    assert (both.members, both.local, both.nodes) == (8, 4, 2)
