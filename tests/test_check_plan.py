"""A plan held against what XLA made of it."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import shardplan
from shardplan.units import format_bytes
from shardplan.xla import CompilerMissingError, available, compare
from shardplan.xla.report.check import expected

pytestmark = pytest.mark.usefixtures("first_plan")

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds, BF16 = jax.ShapeDtypeStruct, jnp.bfloat16
MESH = AbstractMesh((2, 4), ("data", "model"))
STATE = {"up": sds((1024, 8192), jnp.float32), "down": sds((8192, 1024), jnp.float32)}
BATCH = sds((4096, 1024), jnp.float32)


def loss(w, x):
    h = jax.nn.relu(x @ w["up"])  # UP
    return jnp.mean((h @ w["down"] - x) ** 2)  # DOWN


def step(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def auto(mesh=MESH, **options):
    return shardplan.auto(mesh, donate_argnums=0, cluster="h100", **options)(step)


MEGATRON = {"x": jax.P("data"), "up": jax.P(None, "model"), "down": jax.P("model", None)}


@pytest.fixture(scope="module")
def megatron():
    return auto(pins=MEGATRON).plan(STATE, BATCH)


def line_of(marker: str) -> str:
    with open(__file__) as source:
        return next(f"{Path(__file__).name}:{n}" for n, text in enumerate(source, 1) if text.rstrip().endswith(f"# {marker}"))


def test_expects_the_planned_collectives_and_no_slices(megatron):
    wanted = expected(megatron)
    assert {(e.kind, e.axes) for e in wanted} <= {
        ("all-reduce", ("data",)), ("all-reduce", ("model",)), ("all-gather", ("data",)), ("reduce-scatter", ("data",)),
        ("all-reduce", ("data", "model")),
    }  # fmt: skip
    assert all(e.group_size == megatron.mesh.size(*e.axes) for e in wanted)
    sent = [e for e in wanted if e.axes == ("model",) and e.bytes > 1e6]
    assert [e.bytes for e in sent] == [BATCH.size * 4 / 2]  # h @ down, one shard of the batch


def test_the_plan_and_its_check_say_one_figure_for_what_is_sent(megatron):
    sent = sum(e.wire_bytes for e in expected(megatron))
    assert sent == pytest.approx(megatron.comm_bytes) and f"{format_bytes(sent)} sent per device" in str(megatron)


def test_sums_are_expected_where_they_are_made(megatron):
    (sent,) = [e for e in expected(megatron) if e.axes == ("model",) and e.bytes > 1e6]
    assert sent.source == line_of("DOWN")


def test_on_emulated_devices_without_devices(megatron):
    found = megatron.check()
    assert found.ok and found.compiled.n_devices == 8 and found.compiled.target is None
    assert found.flops_ratio == pytest.approx(1)
    assert not found.comparison.of("missing")
    text = str(found)
    assert re.match(r"compiled for 8 CPU devices in [\d.]+ s, mesh data=2, model=4\n +planned +XLA\ncollectives ", text)


def test_thresholds_are_those_of_check(megatron):
    found = megatron.check(max_memory=1e6)
    assert not found.ok and found.failures[0].startswith("a device needs")
    assert str(found).endswith(found.failures[0])
    with pytest.raises(ValueError, match="fail_on has 'rmat'"):
        megatron.check(fail_on={"rmat"})


def test_the_step_itself_checks_and_reused_plans_too(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    planned = auto(mesh)
    first = planned.check(STATE, BATCH)
    planned.plan(STATE, BATCH).save(tmp_path / "plan.json")
    again = auto(mesh, plan=tmp_path / "plan.json").check(STATE, BATCH)
    assert again.comparison.planned_bytes == first.comparison.planned_bytes
    assert again.comparison.emitted_bytes == first.comparison.emitted_bytes
    assert again.flops is None and again.memory_ratio == first.memory_ratio
    read = shardplan.Plan.load(tmp_path / "plan.json")
    with pytest.raises(shardplan.ShardingError, match=r"one was read from a file\.\n  way out: auto\(mesh, plan=file\)"):
        read.check()


def test_a_missing_compiler_is_reported(megatron, monkeypatch):
    monkeypatch.setattr(sys.modules["shardplan.xla.compiler.compile"], "available", lambda: False)
    with pytest.raises(CompilerMissingError, match=r'pip install "shardplan\[gpu-check\]"'):
        megatron.check("h100:8")


def test_keyword_arguments():
    def renamed(w, *, batch):
        return step(w, batch)

    planned = shardplan.auto(MESH, cluster="h100")(renamed)
    assert planned.check(STATE, batch=BATCH).ok


def test_what_the_forward_pass_gathered_the_backward_pass_keeps():
    """`up` is gathered once, `down` once for both passes."""
    params, batch = {"up": sds((512, 2048), jnp.float32), "down": sds((2048, 512), jnp.float32)}, sds((1 << 17, 512), jnp.float32)
    pins = {"w/up": jax.P("data"), "w/down": jax.P("data"), "x": jax.P("data")}
    found = auto(AbstractMesh((8,), ("data",)), pins=pins).check(params, batch)
    gathers = [e for e in expected(found.plan) if e.kind == "all-gather"]
    assert [e.bytes for e in gathers] == [512 * 2048 * 4] * 2
    assert len([c for c in found.compiled.collectives if c.kind == "all-gather"]) == 2


def test_importing_shardplan_leaves_the_compilers_room_alone():
    code = (
        "import sys, shardplan; assert not any(m.startswith('shardplan.xla.') for m in sys.modules); assert callable(shardplan.check)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        shardplan.chek  # type: ignore[attr-defined]  # noqa: B018


@needs_gpu_compiler
def test_for_absent_gpus_everything_is_as_planned(megatron):
    found = megatron.check("h100:8")
    assert found.ok
    assert {f.verdict for f in found.comparison.findings} == {"same"}
    assert found.collectives_ratio == pytest.approx(1, abs=0.03)
    assert found.memory_ratio == pytest.approx(1, abs=0.2)
    assert found.flops_ratio == pytest.approx(1)


@needs_gpu_compiler
def test_the_planners_own_choice_too():
    found = auto().check(STATE, BATCH, target="h100:8")
    assert not found.comparison.of("unplanned") and not found.comparison.of("dearer")
    assert found.collectives_ratio == pytest.approx(1, abs=0.1)
    assert compare(expected(found.plan), found.compiled).ratio == found.collectives_ratio


@needs_gpu_compiler
def test_a_gradient_goes_to_two_dims_by_two_scatters():
    pins = {"x": jax.P(("data", "model")), "up": jax.P("data", "model"), "down": jax.P("data", "model")}
    found = auto(pins=pins).check(STATE, sds((1 << 17, 1024), jnp.float32), target="h100:8")
    assert {(e.kind, e.axes) for e in expected(found.plan) if e.bytes > 1e6} >= {
        ("all-gather", ("data",)), ("all-gather", ("model",)), ("reduce-scatter", ("data",)), ("reduce-scatter", ("model",)),
    }  # fmt: skip
    assert {f.verdict for f in found.comparison.findings} == {"same"}


@needs_gpu_compiler
def test_a_table_looked_up_and_turned_for_a_product_is_gathered_once_and_its_gradients_are_added_before_they_are_scattered():
    def train(table, words, goal):
        def loss(table):
            return jnp.sum((table[words] @ table.T - goal).astype(jnp.float32) ** 2)

        return table - 0.1 * jax.grad(loss)(table)

    over, args = jax.P("data"), (sds((4096, 1024), BF16), sds((256, 128), jnp.int32), sds((256, 128, 4096), BF16))
    report = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, in_shardings=(over, over, over))(train)
    report = report.check(*args, target="h100:8")
    assert sorted(c.kind for c in report.compiled.collectives) == ["all-gather", "reduce-scatter"]
    assert report.collectives_ratio == pytest.approx(1)


@needs_gpu_compiler
def test_a_weight_gathered_for_a_loop_is_there_for_the_loop_of_the_backward_pass():
    def train(w, xs):
        def loss(w):
            return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w),) * 2, xs[0], xs)[1].astype(jnp.float32) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    args = sds((2048, 2048), BF16), sds((16, 4096, 2048), BF16)
    report = shardplan.auto(
        AbstractMesh((8,), ("data",)), cluster="h100", donate_argnums=0, in_shardings=(jax.P("data"), jax.P(None, "data"))
    )(train).check(*args, target="h100:8")
    for collectives in (expected(report.plan), report.compiled.collectives):
        assert [c.kind for c in collectives].count("all-gather") == 1


@needs_gpu_compiler
def test_a_product_is_not_sharded_over_an_axis_that_the_plan_leaves_idle():
    def train(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jax.nn.relu(x @ w) ** 2))(w)

    over, args = jax.P("model"), (sds((1024, 1024), jnp.float32), sds((1 << 13, 1024), jnp.float32))
    report = shardplan.auto(AbstractMesh((8, 8), ("data", "model")), cluster="h100", donate_argnums=0, in_shardings=(over, over))(
        train
    ).check(*args, target="h100:8x8")
    assert report.flops_ratio == pytest.approx(1) and {f.verdict for f in report.comparison.findings} == {"same"}
