"""A plan travels: made without devices, it is taken over on devices, by another version of JAX, from an older file.

Also run on the newest jax.
`python tests/test_travel.py` writes `data/plan/travel.json` anew, with the oldest jax that is supported.
"""

import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from msgspec.structs import replace

import shardplan
from shardplan import ShardingWarning
from shardplan.cli import main
from shardplan.ir.parse import Traced
from shardplan.plan import Plan
from shardplan.signature import Call
from shardplan.step import TracedStep

pytestmark = pytest.mark.usefixtures("first_plan")

DATA = Path(__file__).parent / "data" / "plan"
ABSTRACT = AbstractMesh((2, 4), ("data", "model"))


def create(key):
    up, down = jax.random.split(key)
    return {"up": 0.1 * jax.random.normal(up, (256, 512)), "down": 0.1 * jax.random.normal(down, (512, 256))}


def loss(params, batch):
    hidden = jnp.maximum(batch["x"] @ params["up"], 0.0)
    logits = hidden @ params["down"]
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(logits.shape[0]), batch["y"]])


def step(params, batch, rate=0.1):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


def edited(params, batch):
    value, grads = jax.value_and_grad(lambda p, b: loss(p, b) + 0.1 * jnp.sum(jnp.tanh(p["up"])))(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def batch(n=256):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(n, 256)).astype(np.float32), "y": rng.integers(0, 256, n).astype(np.int32)}


def example():
    """What the command line plans."""
    return step, (jax.eval_shape(create, jax.random.key(0)), batch())


def meshes():
    explicit = jax.make_mesh((2, 4), ("data", "model"))
    gpus = ABSTRACT.update(abstract_device=jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"))
    return ABSTRACT, explicit, gpus, jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def traced(fun, mesh, *args) -> Traced:
    planned = shardplan.auto(mesh, cluster="h100")(fun)
    return TracedStep.of(fun, Call.of(args or example()[1], {}, *planned._static), planned.options).traced


@pytest.fixture
def forbid_solving(monkeypatch):
    import shardplan.step  # noqa: F401

    return lambda: monkeypatch.setattr(sys.modules["shardplan.step"], "make_plan", lambda *a: pytest.fail("it solved again"))


def runs_as_plain(plan, fun=step) -> None:
    planned = shardplan.auto(meshes()[1], plan=plan, cluster="h100")(fun)
    params = create(jax.random.key(0))
    got, want = planned(params, batch()), jax.jit(fun)(params, batch())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    saved = Plan.load(plan)
    assert [x.layout for x in planned.plan(params, batch()).inputs] == [x.layout for x in saved.inputs]


def test_the_fingerprint_is_the_same_on_every_mesh():
    assert len({traced(step, mesh).identity().fingerprint for mesh in meshes()}) == 1


def test_a_number_in_the_program_is_no_other_program():
    slower = traced(lambda params, batch: step(params, batch, 0.01), ABSTRACT)
    assert slower.identity().fingerprint == traced(step, ABSTRACT).identity().fingerprint


def test_a_plan_made_without_devices_is_taken_over_on_devices(tmp_path, forbid_solving):
    shardplan.auto(ABSTRACT, cluster="h100")(step).plan(*example()[1]).save(tmp_path / "plan.json")
    forbid_solving()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs_as_plain(tmp_path / "plan.json")


def test_a_plan_of_the_command_line_is_taken_over_on_devices(tmp_path, capsys, forbid_solving):
    path = tmp_path / "plan.json"
    words = f"plan {__file__}:example --mesh data=2,model=4 --cluster h100 --brief -o {path}"
    assert main(words.split()) == 0
    forbid_solving()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs_as_plain(path)


def test_a_plan_of_another_jax_is_taken_over(forbid_solving):
    plan = Plan.load(DATA / "travel.json")
    forbid_solving()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if plan.jax != jax.__version__ else "error", ShardingWarning)
        runs_as_plain(DATA / "travel.json")


def test_decisions_whose_ops_another_jax_traces_otherwise_are_named(forbid_solving, tmp_path):
    plan = Plan.load(DATA / "travel.json")
    product = next(d for d in plan.decisions if d.primitive == "dot_general")
    small = [replace(d, primitive="tan") if d.op == product.op else d for d in plan.decisions]
    replace(plan, jax="0.9.9", fingerprint="other", decisions=tuple(small)).save(tmp_path / "plan.json")
    forbid_solving()
    said = (
        rf"made with jax 0\.9\.9; jax {jax.__version__} traces the same step with other small ops: \d+ of {len(plan.decisions)} "
        rf"decisions are taken over, the others are left to XLA\.\n  not matched: .*tan at test_travel.py:{product.line}.*\n"
        "  way out: plan anew without plan="
    )
    with pytest.warns(ShardingWarning, match=said):
        runs_as_plain(tmp_path / "plan.json")


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="a file of version 2 knows ops by number, which differ between versions of JAX")
def test_a_plan_of_an_older_file_is_taken_over_where_every_decision_fits(forbid_solving):
    forbid_solving()
    with pytest.warns(ShardingWarning, match=r"from a file of an older format.*all its decisions fit.*\n  way out: save it again"):
        runs_as_plain(DATA / "travel_version2.json")


def test_another_program_is_planned_again_and_said_to_differ(tmp_path):
    shardplan.auto(ABSTRACT, cluster="h100")(step).plan(*example()[1]).save(tmp_path / "plan.json")
    with pytest.warns(ShardingWarning) as said:
        shardplan.auto(ABSTRACT, cluster="h100", plan=tmp_path / "plan.json")(edited).plan(*example()[1])
    text = str(said[0].message)
    assert text.startswith(
        "the plan was made for another version of this step: 4 of 4 inputs keep its layouts, the rest is planned again."
    )
    assert "in edited.<locals>.<lambda> is new: value, grads = jax.value_and_grad(lambda p, b: loss(p, b) + 0.1 * " in text


def test_an_input_of_another_shape_is_said_to_differ(tmp_path):
    shardplan.auto(ABSTRACT, cluster="h100")(step).plan(*example()[1]).save(tmp_path / "plan.json")
    more = batch(512)
    with pytest.warns(ShardingWarning, match=r"2 of 4 inputs keep.*\n  input batch/x is float32\[512,256\], was float32\[256,256\]\n"):
        shardplan.auto(ABSTRACT, cluster="h100", plan=tmp_path / "plan.json")(step).plan(example()[1][0], more)


# ---- differences


TEXT = """def step(params, batch):
    up, down = params['up'], params['down']
    hidden = jnp.maximum(batch['x'] @ up, 0.0)
    return jnp.mean((hidden @ down) ** 2)
"""


def planned_text(text, folder, name="model.py", **options):
    names: dict = {"jnp": jnp, "lax": jax.lax}
    path = folder / name
    path.write_text(text)
    exec(compile(text, str(path), "exec"), names)
    params, x = {"up": jax.ShapeDtypeStruct((256, 512), "float32"), "down": jax.ShapeDtypeStruct((512, 256), "float32")}, batch()
    return shardplan.auto(ABSTRACT, cluster="h100", **options)(names["step"]).plan(params, x)


def differ(a, b, folder, capsys) -> tuple[int, str]:
    a.save(folder / "a.json")
    b.save(folder / "b.json")
    return main(["diff", str(folder / "a.json"), str(folder / "b.json")]), capsys.readouterr().out


def test_a_comment_is_no_difference(tmp_path, capsys):
    commented = TEXT.replace("    hidden", "    # the middle\n    hidden")
    status, text = differ(planned_text(TEXT, tmp_path), planned_text(commented, tmp_path), tmp_path, capsys)
    assert status == 0 and "the plans shard everything the same way" in text and "different programs" not in text


def test_an_added_line_is_the_only_difference_of_programs(tmp_path, capsys):
    more = TEXT.replace("    return", "    hidden = lax.sin(hidden)\n    return")
    pins = {"params/up": jax.P(None, "model"), "params/down": jax.P("model"), "batch/x": jax.P("data")}
    a, b = (planned_text(t, tmp_path, pins=pins) for t in (TEXT, more))
    assert {key[2] for key, *_ in a.diff(b).decisions} <= {
        "sin",
        "max",
        "integer_pow",
        "pow",
        "div",
        "mul",
    }  # no product, no collective
    status, text = differ(a, b, tmp_path, capsys)
    assert status == bool(a.diff(b))
    assert "program   the plans are for different programs\n          model.py:4 in step is new: hidden = lax.sin(hidden)\n" in text


if __name__ == "__main__":
    shardplan.auto(ABSTRACT, cluster="h100")(step).plan(*example()[1]).save(DATA / "travel.json")
