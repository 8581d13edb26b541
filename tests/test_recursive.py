"""Recursive search: one mesh axis after the other."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from models import MODELS
from sweeps import sweep

import shardplan
from shardplan import ShardingError
from shardplan.units import format_percent

S = jax.ShapeDtypeStruct


def planned(name, sizes, **options):
    create, step, batches = MODELS[name]()
    mesh = jax.sharding.AbstractMesh(sizes, ("a", "b", "c", "d")[: len(sizes)])
    options = {"cluster": "h100", "search": "recursive", **options}
    state = jax.eval_shape(create, jax.random.key(0))
    return shardplan.auto(mesh, donate_argnums=0, **options)(step).plan(state, next(iter(batches(1))))


CASES = sweep([("hybrid_mlp", (2, 4)), ("dlrm", (4, 2)), ("moe", (2, 2, 2))], lambda case: case[0] == "moe")


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_axis_by_axis_comes_within_five_percent_of_the_best_plan(name, sizes):
    best, found = planned(name, sizes, search="ilp"), planned(name, sizes)
    assert best.seconds["bound"] <= found.seconds["total"] <= 1.05 * best.seconds["total"]
    assert found.status == "feasible" and found.gap == pytest.approx(1 - found.seconds["bound"] / found.seconds["total"])
    assert found.seconds["bound"] <= best.seconds["bound"] and "from the optimum (recursive search" in str(found)


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (64, 32, 32)])
def test_plans_many_axes_and_many_devices(sizes):
    x, w = S((1 << 17, 8192), jnp.bfloat16), {"up": S((8192, 65536), jnp.bfloat16), "down": S((65536, 8192), jnp.bfloat16)}

    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]).astype(jnp.float32) ** 2))(w)
        return jax.tree.map(lambda a, b: a - b, w, g), loss

    mesh = jax.sharding.AbstractMesh(sizes, ("a", "b", "c", "d")[: len(sizes)])
    plan = shardplan.auto(mesh, cluster="h100", search="recursive")(step).plan(w, x)
    reached = shardplan.Cluster.preset("h100").device.flops_per_s("bfloat16")
    least = 5 * 2 * x.size * 65536 / (reached * mesh.size)  # flops of the five products over what all devices reach
    assert least < plan.seconds["compute"] < 1.1 * least + 2e-4  # the rest: bytes of the weights, kernel latencies


def test_memory_is_respected_on_the_way():
    free = planned("hybrid_mlp", (2, 2, 2), memory=float("inf"))
    budget = 0.7 * free.memory().peak
    plan = planned("hybrid_mlp", (2, 2, 2), memory=budget)
    assert plan.search == "recursive" and plan.memory().peak <= budget
    assert plan.seconds["total"] >= free.seconds["bound"]
    with pytest.raises(ShardingError, match="lowest peak found"):
        planned("hybrid_mlp", (2, 2, 2), memory=0.02 * budget)


def test_pins_hold_from_the_first_axis_on():
    plan = planned("hybrid_mlp", (2, 2, 2), in_shardings=(None, P(("a", "c"))))
    batch = [x.layout.dims[0] for x in plan.inputs if x.kind == "batch"]
    assert batch and set(batch) == {("a", "c")}


def test_searches_are_compared_by_one_objective():
    plan = planned("hybrid_mlp", (2, 4), search="ilp")
    found = plan.compare()
    assert list(found.plans) == ["ilp", "propagation", "recursive"]
    assert found.bound == plan.seconds["bound"] and plan.gap - 1e-9 <= found.gap("ilp") <= found.gap("recursive") <= found.gap(
        "propagation"
    )
    head, *rows = str(found).splitlines()
    assert head.split() == ["search", "step", "communication", "memory", "from", "the", "bound", "planned", "in"]
    assert [row.split()[0] for row in rows] == list(found.plans) and format_percent(plan.gap) in rows[0]
    with pytest.raises(ShardingError, match="search='magic' is none of 'ilp', 'propagation', 'recursive'"):
        plan.compare(["magic"])
