"""Contradicting pins: where the regions of two pins meet, the plan names both and the cost of the reshard."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from plans import transformer

import shardplan
from shardplan import Cluster
from shardplan.plan import Plan
from shardplan.searches import SEARCHES
from shardplan.view.html import to_html

X, W = jax.ShapeDtypeStruct((4096, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
LONG = jax.ShapeDtypeStruct((16384, 1024), jnp.float32)
MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))


def planned(step, *args, search="propagation", **options):
    return shardplan.auto(MESH, cluster="h100", search=search, **options)(step).plan(*args)


def elementwise(x):
    return jnp.cos(jnp.sin(x))


@pytest.mark.parametrize("search", SEARCHES)
def test_contradicting_pins_are_named_with_their_line_bytes_and_seconds(search):
    plan = planned(elementwise, X, search=search, in_shardings=(P("model", None),), out_shardings=P(None, "model"))
    (found,) = plan.conflicts
    assert found.pins == ("x: in_shardings = P('model', None)", "result: out_shardings = P(None, 'model')")
    device, array_bytes = Cluster.preset("h100").device, found.bytes * 4 / 3
    transposed_s = max(device.kernel_latency_s, 2 * array_bytes / device.memory_rate)  # before the all-to-all, compute
    assert found.bytes == plan.comm_bytes and 0 < found.seconds == pytest.approx(plan.seconds["communication"] + transposed_s)
    assert (found.file, found.line) == ("test_regions.py", elementwise.__code__.co_firstlineno + 1)  # what makes the result
    text = plan.explain()
    assert "pins that disagree" in text and ", against ".join(found.pins) in text
    assert "Pins that disagree" in to_html(plan, page=False)


@pytest.mark.parametrize(("first", "last"), [(P("data"), P("data")), (P(), P("data")), (P("data"), P("data", "model"))])
def test_compatible_pins_are_no_conflict(first, last):
    plan = planned(elementwise, X, in_shardings=(first,), out_shardings=last)
    assert plan.conflicts == () and "pins that disagree" not in plan.explain() and "Pins that disagree" not in to_html(plan, page=False)


def test_a_reshard_without_two_pins_is_no_conflict():
    plan = planned(jnp.dot, X, W, in_shardings=(P("data", "model"), None))
    assert plan.comm_bytes and plan.conflicts == ()


def test_reductions_of_partial_sums_are_no_conflict():
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1 << 16), (1 << 16, 64)))
    plan = planned(jnp.dot, a, b, in_shardings=(P("data", "model"), P("model")), out_shardings=P("data"))
    assert plan.comm_bytes and plan.conflicts == ()


def test_a_constraint_may_contradict_its_own_gradient():
    def loss(w, x):
        h = jax.lax.with_sharding_constraint(jax.nn.relu(x @ w["up"]), P("data", None))
        return jnp.mean((h @ w["down"]) ** 2)

    pins = {"w/up": P(None, "model"), "w/down": P("model", None)}
    plan = planned(jax.grad(loss), {"up": W, "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32)}, LONG, pins=pins)
    names = {c.pins for c in plan.conflicts}
    assert any(one == other and one.startswith("with_sharding_constraint at ") for one, other in names)
    assert any("w/up: pin 'w/up' = P(None, 'model')" in pair for pair in names)
    assert sum(c.seconds for c in plan.conflicts) <= plan.seconds["communication"]
    assert {c.file.split("/")[-1] for c in plan.conflicts} == {"test_regions.py"} and "forward against backward" in plan.explain()


def test_conflicts_stay_with_the_file(tmp_path):
    plan = planned(elementwise, X, in_shardings=(P("model", None),), out_shardings=P(None, "model"))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").conflicts == plan.conflicts
    assert transformer().conflicts == ()
