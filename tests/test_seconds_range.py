"""The range of predicted seconds: from the errors of what was measured, wider where nothing was, and a part of plan files."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan import Cluster
from shardplan.plan.seconds_range import NOT_MEASURED

S = jax.ShapeDtypeStruct
MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
X = S((8192, 4096), jnp.bfloat16)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w)).astype(jnp.float32)))(w)


def planned(cluster):
    return shardplan.auto(MESH, cluster=cluster, search="propagation", memory="disable")(step).plan(S((4096, 4096), jnp.bfloat16), X)


def width(plan) -> float:
    return math.log(plan.seconds["high"] / plan.seconds["low"]) / 2


@pytest.mark.parametrize("gpu", ["h100", "a100-40gb", "b200", "cpu"])
def test_the_total_is_in_its_range_which_is_at_least_the_error_of_whole_steps(gpu):
    plan, cluster = planned(gpu), Cluster.preset(gpu)
    low, total, high = (plan.seconds[x] for x in ("low", "total", "high"))
    assert low < total < high and low * high == pytest.approx(total**2)
    assert width(plan) >= (NOT_MEASURED if cluster.step_error is None else cluster.step_error)


def test_the_range_is_wider_the_less_is_measured():
    h100 = Cluster.preset("h100")
    unknown = dataclasses.replace(h100, device=dataclasses.replace(h100.device, products={}))
    strange = dataclasses.replace(unknown, step_error=None, collective_error=None)
    plans = [planned(x) for x in (h100, unknown, strange)]
    assert width(plans[0]) < width(plans[1]) < width(plans[2])
    assert [p.unmeasured[:1] for p in plans] == [(), ("products of bfloat16",), ("products of bfloat16",)]
    assert plans[2].unmeasured[-1] == "whole steps"


def test_explain_says_what_was_not_measured():
    measured, unknown = (planned(x).explain().splitlines() for x in ("h100", "b200"))
    assert "range   not measured for this device, so wide: whole steps" in unknown
    assert not any(line.startswith("range") for line in measured)
    assert measured[2].startswith("step    ") and "–" in measured[2].split(" = ")[0]


def test_a_range_is_stored_and_older_files_have_none(tmp_path):
    plan = planned("b200")
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json").unmeasured == ("whole steps",)
    text = json.loads((tmp_path / "plan.json").read_text())
    del text["seconds"]["interference"]
    (tmp_path / "older.json").write_text(json.dumps(text))
    assert shardplan.Plan.load(tmp_path / "older.json").seconds["low"] == plan.seconds["low"]
    del text["seconds"]["low"], text["seconds"]["high"], text["unmeasured"]
    (tmp_path / "older.json").write_text(json.dumps(text))
    older = shardplan.Plan.load(tmp_path / "older.json")
    assert "(" not in str(older).splitlines()[2].split("=")[0] and older.decisions == plan.decisions
