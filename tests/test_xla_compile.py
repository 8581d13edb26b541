"""Compiling in a child: for CPUs, for clusters that are not here, and when it goes wrong."""

import importlib.util
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.mesh.device import gpu_of_device_kind, gpus
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.xla import check
from shardplan.xla.compiler import targets
from shardplan.xla.compiler.compile import CompilerMissingError, available, compile
from shardplan.xla.hlo.collectives import collectives
from shardplan.xla.hlo.diagnostics import rematerializations
from shardplan.xla.hlo.groups import layout_of

MESH = MeshShape(("data", "model"), (4, 2))
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds = jax.ShapeDtypeStruct


def abstract(data=4, model=2):
    return AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def mlp(mesh, batch=64):
    """Gradient step of a two-layer network: parameters split over `model`, batch over `data`."""

    def step(w1, w2, x):
        grads = jax.grad(lambda ws: jnp.sum((jax.nn.relu(x @ ws[0]) @ ws[1]) ** 2))((w1, w2))
        return jax.tree.map(lambda w, g: w - g, (w1, w2), grads)

    ws = (NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("model", None)))
    fn = jax.jit(step, in_shardings=(*ws, NamedSharding(mesh, P("data"))), out_shardings=ws, donate_argnums=(0, 1))
    return fn, sds((128, 256), jnp.float32), sds((256, 128), jnp.float32), sds((batch, 128), jnp.float32)


def test_cpu_devices_give_the_collectives_of_megatron():
    done = compile(*mlp(abstract()))
    assert done.ok and done.target is None and done.mesh == MESH
    assert done.flops == 5 * 2 * 16 * 128 * 128
    assert {(c.kind, c.reduction) for c in done.collectives} == {("all-reduce", "sum")}
    assert {c.axes: c.bytes for c in done.collectives} == {("model",): 16 * 128 * 4, ("data",): 2 * 128 * 128 * 4}
    assert done.memory.alias_bytes == 2 * 128 * 128 * 4
    assert done.memory.peak_bytes >= done.memory.argument_bytes


def test_same_program_as_jit_compiles_itself():
    fn, *args = mlp(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2))
    ours, theirs = compile(fn, *args), fn.lower(*args).compile()
    assert ours.collectives == collectives(theirs.as_text(), MESH)
    assert ours.memory.temp_bytes == theirs.memory_analysis().temp_size_in_bytes


def test_the_users_line_is_reported_and_our_own_frames_are_not():
    done = compile(*mlp(abstract()))
    sources = {p.source for c in done.collectives for p in c.parts}
    assert {re.sub(r".*/", "", s).split(":")[0] for s in sources} == {"test_xla_compile.py"}
    assert "xla/compiler/compile.py" not in done.text


@needs_gpu_compiler
@pytest.mark.parametrize(("target", "mesh"), [("h200:8", (4, 2)), ("h100:8x8", (8, 8)), ("b200:512", (64, 8))])
def test_clusters_that_are_not_here(target, mesh):
    done = compile(*mlp(abstract(*mesh), batch=16 * mesh[0]), target=target)
    assert done.ok, done.error
    assert (done.n_devices, str(done.target)) == (mesh[0] * mesh[1], str(targets.parse(target)))
    assert done.flops == 5 * 2 * 16 * 128 * (256 // mesh[1])
    assert sum(c.bytes for c in done.collectives if c.axes == ("data",)) == 2 * 128 * (256 // mesh[1]) * 4
    assert done.fits


@needs_gpu_compiler
def test_gpu_scatters_what_is_reduced_into_sharded_parameters():
    mesh = abstract(8, 1)
    split = NamedSharding(mesh, P("data"))
    fn = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), in_shardings=(split, split), out_shardings=split)
    done = compile(fn, sds((512, 128), jnp.float32), sds((64, 512), jnp.float32), target="h100")
    assert [(c.kind, c.bytes) for c in done.collectives] == [("all-gather", 512 * 128 * 4), ("reduce-scatter", 512 * 128 * 4)]


@needs_gpu_compiler
def test_products_that_xla_cannot_tile_in_triton_are_compiled_without():
    """bf16 attention over 197 tokens, projected from (token, head, feature): untuned, XLA finds no tiles for the projection."""

    def attend(w, projection):
        heads = jnp.einsum("bhts,bshe->bthe", w, jnp.ones((8, 197, 12, 64), w.dtype) * w[0, 0, 0, 0])
        return jax.lax.dot_general(heads, projection, (((2, 3), (0, 1)), ((), ())))

    args = sds((8, 12, 197, 197), jnp.bfloat16), sds((12, 64, 768), jnp.bfloat16)
    found = check(attend, *args, target="h100:1")
    assert found.ok and found.compiled.memory is not None and "output tile sizes" in found.compiled.retried
    assert re.search(
        r"\nsecond attempt, with xla_gpu_enable_triton_gemm=False: XLA failed at test_xla_compile.py:\d+:?\d* \(Couldn't", str(found)
    )
    asked = compile(attend, *args, target="h100:1", options={"xla_gpu_enable_triton_gemm": True})
    assert not asked.ok and not asked.retried and "output tile sizes" in asked.error


@needs_gpu_compiler
def test_what_does_not_fit_compiles_and_says_so():
    mesh = abstract(8, 1)
    fn = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(mesh, P("data")))
    done = compile(fn, sds((8, 2**16, 2**18), jnp.float32), target="a100:8")
    assert done.ok and done.fits is False
    assert done.memory.peak_bytes == 2 * 2**34 * 4


@needs_gpu_compiler
@pytest.mark.parametrize(("layers", "again"), [(6, False), (8, True)])
def test_only_what_does_not_fit_is_computed_again_and_is_reported(layers, again):
    """XLA itself would leave a fifth of the memory alone, and compute a product of six layers twice for that."""
    ws, x = [sds((4096, 4096), jnp.bfloat16)] * layers, sds((1 << 20, 4096), jnp.bfloat16)

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    report = check(jax.jit(jax.grad(loss)), ws, x, target="h100:1")
    done = report.compiled
    assert done.fits and done.memory.peak_bytes > 0.8 * gpus()["h100"].memory_bytes
    assert done.flops - done.recomputed_flops == (3 * layers - 1) * 2 * x.size * 4096
    assert (done.recomputed_flops > 0) == ("computed again by XLA" in str(report)) == again


@needs_gpu_compiler
def test_shard_map_on_an_abstract_mesh_alone():
    fn = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=abstract(), in_specs=P("data", "model"), out_specs=P(None, "model"))
    (c,) = compile(fn, sds((64, 32), jnp.float32), target="h100:8").collectives
    assert (c.kind, c.axes, c.bytes) == ("all-reduce", ("data",), 16 * 16 * 4)


def test_explicit_axes_under_set_mesh():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((64, 64)), P("data", None))
        done = compile(lambda x: jnp.sum(x), x)
    assert [(c.kind, c.axes) for c in done.collectives] == [("all-reduce", ("data",))]


# ---- when it goes wrong


def test_a_crash_is_a_result(monkeypatch, tmp_path):
    fatal = "F1121 04:00:34.698932   12502 kernel.cc:12] Check failed: there is a GPU"
    child = tmp_path / "child.py"
    child.write_text(f"import os, sys\nprint('before')\nprint({fatal!r}, file=sys.stderr, flush=True)\nos.abort()\n")
    monkeypatch.setattr(sys.modules[compile.__module__], "CHILD", str(child))
    done = compile(*mlp(abstract(), batch=256))
    assert not done.ok and done.memory is None
    assert done.error == f"the compiler crashed (SIGABRT): {fatal}"
    with pytest.raises(RuntimeError, match="there is no compiled module: the compiler crashed"):
        _ = done.collectives


def test_a_stack_trace_does_not_hide_the_error(monkeypatch, tmp_path):
    said = (
        "E1121 05:03:32.650470    2387 xtile.cc:576] LLVM Fatal Error: size mismatch\n"
        "F1121 05:03:32.650492    2387 error_handler.cc:44] *** Begin stack trace ***\n\t\n*** End stack trace ***\n"
    )
    child = tmp_path / "child.py"
    child.write_text(f"import sys\nsys.stderr.write({said!r})\nsys.exit(1)\n")
    monkeypatch.setattr(sys.modules[compile.__module__], "CHILD", str(child))
    error = compile(*mlp(abstract(), batch=512)).error
    assert error == f"the compiler crashed (exit status 1): {said.splitlines()[0]}"


def test_a_flag_of_the_user_that_xla_refuses_is_reported(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1" in compile(*mlp(abstract())).error


def test_a_time_limit_is_a_result():
    done = compile(*mlp(abstract(), batch=128), timeout_s=0.05)
    assert not done.ok and done.error == "the compiler was still running after 0.05 s; raise timeout_s"


def test_an_unknown_option_is_a_result():
    done = compile(*mlp(abstract()), options={"xla_no_such_option": True})
    assert not done.ok and "xla_no_such_option" in done.error


def test_missing_packages_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(CompilerMissingError, match=r'pip install "shardplan\[gpu-check\]"'):
        compile(*mlp(abstract()), target="h200:8")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("h300:8", "with one of a100, a100-40gb, h100, h100-500w, h200, b200"),
        ("h200:12", "do not fill nodes of 8"),
        ("h200:0", "has no devices"),
        ("h200:16", 'name target "h200:8", or shard it over an AbstractMesh of 16 devices'),
    ],
)
def test_targets_that_cannot_be(target, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        targets.parse(target, 8)


def test_an_unsharded_program_on_a_cluster():
    with pytest.raises(ValueError, match="nothing in it is sharded"):
        targets.parse("h200:8", 1)


def test_targets_are_read_in_nodes():
    assert [(t.nodes, t.per_node) for t in map(targets.parse, ("h100:8", "h100:64", "h100:2x4", "H100:4"))] == [
        (1, 8), (8, 8), (2, 4), (1, 4),
    ]  # fmt: skip
    assert str(targets.parse("b200", 72 * 8)) == "b200:72x8"
    assert targets.parse("a100-40gb:16").gpu.memory_bytes < gpus()["a100"].memory_bytes / 2
    assert gpu_of_device_kind("NVIDIA H100 80GB HBM3") is gpus()["h100"]
    assert gpu_of_device_kind("NVIDIA A100-SXM4-40GB") is gpus()["a100-40gb"]
    assert gpu_of_device_kind("cpu") is None


@pytest.mark.parametrize("gpu", gpus().values(), ids=lambda g: g.key)
def test_configurations_reach_the_published_peak(gpu):
    rates = re.findall(r"key: (\d+) value \{ clock_rate_ghz: ([\d.]+) units_per_core: 4 ops_per_clock: (\d+)", targets.config(gpu))
    peak = {int(k): gpu.sms * 4 * 2 * float(ghz) * int(ops) / 1e3 for k, ghz, ops in rates}
    assert peak[16] == pytest.approx(gpu.flops["bfloat16"] / 1e12, rel=1e-3)


# ---- XLA's own warnings

WARNED = (
    "W1121 04:00:34.698932   12502 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. "
    "The compiler cannot go from sharding {BEFORE} to "
    "{devices=[1,1,8,1]<=[4,2]T(1,0)} efficiently for HLO operation %sharding_constraint.0 = "
    "f32[16,4,16,2]{3,2,1,0} copy(%dynamic-slice), sharding={BEFORE}, metadata={op_name=\"jit(f)/sharding_constraint\" "
    "stack_frame_id=4}. As the last resort, SPMD will replicate the tensor and then partition it.\n"
)  # fmt: skip


@pytest.mark.parametrize("before", ["devices=[2,1,1,4]<=[4,2]T(1,0)", "mesh['data'=4,'model'=2], [{'model'}, {}, {}, {'data'}]"])
def test_rematerialization_warnings_in_both_spellings(before):
    (found,) = rematerializations(2 * WARNED.replace("BEFORE", before), MESH)
    assert str(found) == (
        "full rematerialization of f32[32,4,16,8], P('model', None, None, 'data') -> P(None, None, ('model', 'data'), None)"
    )


def test_rematerialization_names_the_users_line():
    mesh = abstract()

    def fn(x):
        y = jnp.sin(x).reshape(32, 4, 16, 8)
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("model", None, None, "data")))  # HERE
        return jax.lax.with_sharding_constraint(y.reshape(128, 128), NamedSharding(mesh, P(None, ("model", "data"))))

    done = compile(jax.jit(fn, in_shardings=NamedSharding(mesh, P("data", "model"))), sds((128, 128), jnp.float32))
    (found,) = done.rematerializations
    lines = pathlib.Path(__file__).read_text().splitlines()
    assert lines[int(found.source.rsplit(":", 1)[1]) - 1].endswith("# HERE")
    assert (str(found.array), found.before) == ("f32[32,4,16,8]", Layout((("model",), (), (), ("data",))))


@pytest.mark.parametrize(
    ("sharding", "spec"),
    [
        ("{replicated}", (None, None)),
        ("{devices=[4,2]<=[8]}", ("data", "model")),
        ("{devices=[2,4]<=[4,2]T(1,0)}", ("model", "data")),
        ("{devices=[1,8]<=[8]}", (None, ("data", "model"))),
        ("{devices=[4,1,2]<=[8] last_tile_dim_replicate}", ("data", None)),
        ("{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}", ("model", None)),
        ("{mesh['data'=4,'model'=2], [{'data', 'model'}, {}]}", (("data", "model"), None)),
    ],
)
def test_xla_shardings_read_as_layouts(sharding, spec):
    assert layout_of(sharding, MESH, 2) == Layout.from_spec(spec, 2)


def test_a_sharding_over_part_of_an_axis_is_no_layout():
    assert layout_of("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", MESH, 2) is None
