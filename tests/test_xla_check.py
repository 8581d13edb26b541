"""Checking shardings written by hand, and what the compiled schedule hides."""

import gzip
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, check, overlaps, simulate
from shardplan.xla.hlo.diagnostics import buffers
from shardplan.xla.hlo.text import read
from shardplan.xla.report.check import expected

DATA = pathlib.Path(__file__).parent / "data" / "hlo"
MESH = MeshShape(("data", "model"), (4, 2))
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds = jax.ShapeDtypeStruct


def stored(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.hlo.gz").read_bytes()).decode()


def line_of(marker: str) -> str:
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"test_xla_check.py:{next(n for n, text in enumerate(lines, 1) if text.endswith('# ' + marker))}"


def places(report):
    return {(pathlib.Path(line.source).name, line.kind, line.phase) for line in report.lines}


def split(*entries):
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, P(*entries))


def loss(params, x):
    h = jax.nn.relu(x @ params["up"])  # UP
    return jnp.sum((h @ params["down"]) ** 2)  # DOWN


def megatron(**wanted):
    params = {"up": sds((64, 256), jnp.float32), "down": sds((256, 64), jnp.float32)}
    shardings = {"up": split(None, "model"), "down": split("model", None)}
    fn = jax.jit(jax.grad(loss), in_shardings=(shardings, split("data")), out_shardings=shardings)
    return check(fn, params, sds((32, 64), jnp.float32), **wanted)


def test_collectives_are_listed_by_the_line_that_causes_them():
    report = megatron()
    assert report.ok
    assert places(report) == {
        (line_of("DOWN"), "all-reduce", "forward"),
        (line_of("DOWN"), "all-reduce", "backward"),
        (line_of("UP"), "all-reduce", "backward"),
    }
    assert report.collective_bytes == 8 * 64 * 4 + 2 * 64 * 128 * 4
    down = next(line for line in report.lines if line.phase == "forward")
    assert (down.axes, down.count, down.code) == (("model",), 1, 'return jnp.sum((h @ params["down"]) ** 2)  # DOWN')


def test_balance_counts_products_done_twice():
    assert megatron().compiled.balance == 1
    fn = jax.jit(lambda x, w: x @ w, in_shardings=(split("data"), split()))
    report = check(fn, sds((32, 64), jnp.float32), sds((64, 64), jnp.float32), fail_on={"twice"})
    assert report.failures == ("devices do 2.00 times their share of the products",)


def test_replicated_arguments_are_named():
    fn = jax.jit(lambda p, x: x @ p["w"] + p["b"], in_shardings=({"b": split(), "w": split("model")}, split("data")))
    args = {"b": sds((64,), jnp.float32), "w": sds((512, 64), jnp.float32)}, sds((32, 512), jnp.float32)
    report = check(fn, *args, fail_on={"replicated"}, large_bytes=40_000)
    assert [(r.path, r.copies, r.bytes) for r in report.replicas] == [
        ("p['w']", 4, 65_536), ("x", 2, 16_384), ("p['b']", 8, 256),
    ]  # fmt: skip
    assert report.failures == ("p['w']  f32[512,64], 64 KiB on each device, the same on 4",)


def test_thresholds_in_bytes():
    report = megatron(max_bytes=1000, max_memory=1000)
    assert re.fullmatch(r"collectives move 67\.6 kB per device and step, more than 1 kB", report.failures[0])
    assert report.failures[1].startswith("a device needs")
    assert not report.ok


def test_rematerialization_fails_only_when_asked():
    def fn(x):
        y = jax.lax.with_sharding_constraint(jnp.sin(x).reshape(32, 4, 16, 8), split("model", None, None, "data"))  # HERE
        return jax.lax.with_sharding_constraint(y.reshape(128, 128), split(None, ("model", "data")))

    args = jax.jit(fn, in_shardings=split("data", "model")), sds((128, 128), jnp.float32)
    assert check(*args).ok
    report = check(*args, fail_on={"remat"})
    (failure,) = report.failures
    assert failure.startswith("full rematerialization of f32[32,4,16,8]") and failure.endswith(line_of("HERE"))
    assert "is replicated in full to get from P('model', None, None, 'data')" in str(report)


def test_unknown_words_are_refused():
    with pytest.raises(
        ValueError,
        match=r"fail_on has 'rmat', which it does not know.\n  way out: some of 'guess', 'memory', 'remat', 'replicated', 'twice'",
    ):
        megatron(fail_on={"rmat"})


def test_a_failed_compile_is_a_failure():
    report = megatron(options={"xla_no_such_option": True})
    assert "xla_no_such_option" in report.failures[0]
    assert str(report).startswith("compiling for 8 CPU devices failed, mesh data=4, model=2\n")


@pytest.mark.slow
@needs_gpu_compiler
def test_what_does_not_fit_fails():
    fn = jax.jit(lambda x: x * 2, in_shardings=split("data"))
    report = check(fn, sds((8, 2**16, 2**18), jnp.float32), target="a100:8", fail_on={"memory"})
    assert report.failures == ("a device needs 256 GiB and a100:8 has 79.3 GiB",)
    assert "DOES NOT FIT" in str(report)


def test_printed_report():
    text = re.sub(r"in \d+\.\d s", "in 0.1 s", str(megatron(max_bytes=1e4)))
    text = re.sub(r"(memory +|temporaries )[\d.]+ KiB", r"\1N KiB", text)
    assert text == PRINTED.replace("DOWN:", line_of("DOWN")).replace("UP:", line_of("UP"))


PRINTED = """\
compiled for 8 CPU devices in 0.1 s, mesh data=4, model=2
memory       N KiB per device: arguments 66 KiB, temporaries N KiB
products     655 kflop per device, 1.00 of its share
collectives  67.6 kB of buffers per device and step, 0 B of it while other work may run

  UP:  h = jax.nn.relu(x @ params["up"])  # UP
     all-reduce (sum) over data                          32.8 kB   32.8 kB  backward

  DOWN:  return jnp.sum((h @ params["down"]) ** 2)  # DOWN
     all-reduce (sum) over data                          32.8 kB   32.8 kB  backward
     all-reduce (sum) over model                         2.05 kB   2.05 kB  forward

held by several devices, the most wasteful first
  params['down']  f32[256,64], 32 KiB on each device, the same on 4
  params['up']  f32[64,256], 32 KiB on each device, the same on 4
  x  f32[32,64], 2 KiB on each device, the same on 2

failed
  collectives move 67.6 kB per device and step, more than 10 kB"""


@pytest.mark.slow
@needs_gpu_compiler
def test_the_peak_is_listed_tensor_by_tensor():
    def step(ws, x):
        def body(x, w):
            return jnp.tanh(x @ w), None  # BODY

        return jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2)

    fn = jax.jit(jax.grad(step), in_shardings=(split(), split("data")), out_shardings=split())
    done = check(fn, sds((12, 64, 64), jnp.float32), sds((1024, 64), jnp.float32), target="h200").compiled
    assert done.live_bytes <= done.memory.peak_bytes <= 1.25 * done.live_bytes  # the list may be of another moment
    saved = next(b for b in done.peak if b.array.shape == (12, 256, 64))
    assert pathlib.Path(saved.source).name == line_of("BODY")
    weights = next(b for b in done.peak if b.kind == "argument" and b.array.shape == (12, 64, 64))
    assert (weights.op_name, weights.copies, weights.global_shape) == ("ws", 8, (12, 64, 64))


def test_the_peak_reads_arguments_loop_carries_and_asynchronous_fusions():
    text = """HloModule m, is_scheduled=true, num_partitions=4

%FUSED (b: f32[8,16], v: f32[16], i: s32[]) -> f32[8,16] {
  %b = f32[8,16]{1,0} parameter(0)
  %v = f32[16]{0} parameter(1)
  %r = f32[1,16]{1,0} bitcast(%v)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = f32[8,16]{1,0} dynamic-update-slice(%b, %r, %i, %zero)
}

ENTRY %main (p: f32[8,16], x: f32[16], n: s32[]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0), metadata={op_name="p[\\'w\\']"}
  %x = f32[16]{0} parameter(1)
  %n = s32[] parameter(2)
  %t = f32[16]{0} tanh(%x), metadata={op_name="jit(f)/tanh" source_file="m.py" source_line=7}
  %start = ((f32[8,16]{1,0}, f32[16]{0}, s32[]), f32[8,16]{1,0}, u32[]) fusion-start(%p, %t, %n), calls=%FUSED
  ROOT %done = f32[8,16]{1,0} fusion-done(%start)
}
""".replace("FUSED", "fused_dynamic_update_slice.3")
    listed = (
        "HloLiveRange (max 9):\n  Live ranges at 3 (peak):\n    p{}: 512 bytes (cumulative: 512 bytes)\n"
        "    loop_dynamic_update_slice_fusion.8{}: 512 bytes (cumulative: 1024 bytes)\n  Stack trace\n"
    )
    update, argument = buffers(listed, "", read(text))
    assert (str(update.array), update.source, update.op_name) == ("f32[8,16]", "m.py:7", "jit(f)/tanh")
    assert (argument.kind, argument.op_name) == ("argument", "p['w']")
    over = (
        "allocation 0: size 512, parameter 0:\n value: <1 p @0> (size=512,offset=0): f32[8,16]{1,0}\n"
        " value: <7 loop_dynamic_update_slice_fusion.8 @0> (size=512,offset=0): f32[8,16]{1,0}\n"
    )
    assert len(buffers(listed, over, read(text))) == 1
    assert buffers("", "", read(text)) == ()


# ---- the schedule


def test_reduce_scatter_of_one_gradient_overlaps_the_next_product():
    found = {o.collective.kind: o for o in overlaps(stored("fsdp_gpu_0.10"), MESH)}
    assert found["reduce-scatter"].flops == 2 * 16 * 256 * 512
    assert any("gemm" in step for step in found["reduce-scatter"].steps)


@pytest.mark.parametrize("name", ["fsdp_gpu_0.10", "fsdp_gpu_0.12", "fsdp_cpu_0.12", "nested_gpu_0.10", "rare_gpu_0.12"])
def test_a_timeline_adds_up(name):
    module = read(stored(name))

    def at(network, work):
        return simulate(module, lambda c: network * c.bytes, lambda w: work * (w.bytes + w.flops), MESH)

    both, compute, network = at(1e-9, 1e-9), at(0, 1e-9), at(1e-9, 0)
    assert compute.total_s == compute.compute_s == both.compute_s
    assert compute.exposed_s == 0 and network.compute_s == 0
    assert max(both.compute_s, both.collective_s) <= both.total_s <= both.compute_s + both.collective_s + 1e-12
    assert both.exposed_s == pytest.approx(both.total_s - both.compute_s)


def test_timeline_hides_a_transfer_behind_the_work_between_start_and_done():
    text = """HloModule m, is_scheduled=true, num_partitions=2

ENTRY %main (x: f32[100], y: f32[100]) -> (f32[200], f32[100]) {
  %x = f32[100]{0} parameter(0)
  %y = f32[100]{0} parameter(1)
  %s = (f32[100]{0}, f32[200]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %a = f32[100]{0} negate(%y)
  %d = f32[200]{0} all-gather-done(%s)
  %b = f32[100]{0} negate(%a)
  ROOT %t = (f32[200]{0}, f32[100]{0}) tuple(%d, %b)
}
"""
    for transfer, exposed in ((3.0, 0.0), (8.0, 3.0)):
        line = simulate(text, lambda c, s=transfer: s, lambda w: 5.0)
        assert (line.total_s, line.compute_s, line.exposed_s) == (10 + exposed, 10, exposed)
    (overlap,) = overlaps(text)
    assert (overlap.steps, overlap.bytes) == (("a",), 800)


def test_public_names_exist():
    package = importlib.import_module("shardplan.xla")
    assert all(hasattr(package, name) for name in package.__all__)


def test_a_sum_that_an_addition_and_a_product_read_is_expected_once():
    def twice(x, w, u):
        y = x @ w
        return y + jnp.tanh(y @ u)

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 8192), (8192, 1024), (1024, 1024))]
    ins = P(None, "data"), P("data"), P()
    plan = shardplan.auto(AbstractMesh((8,), ("data",)), cluster="h100", in_shardings=ins, out_shardings=P())(twice).plan(*args)
    assert [(e.kind, e.bytes) for e in expected(plan)] == [("all-reduce", 2 * 4096 * 1024)]
