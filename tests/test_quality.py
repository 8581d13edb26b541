"""What experts write by hand, as the quality benchmark writes it, is what they write."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import experts
import quality

from shardplan.xla import available, compile

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
MESH = experts.twin(AbstractMesh((2, 4), ("data", "model")))
WAYS = {e.name: e for e in experts.experts(MESH, 8)}
BOTH = ("data", "model")
sds = jax.ShapeDtypeStruct


@pytest.mark.parametrize(
    ("way", "path", "shape", "spec"),
    [
        ("data", "params/layers/up", (16, 2048, 8192), P(None, None, None)),
        ("zero1", "opt/0/mu/layers/up", (16, 2048, 8192), P(None, None, BOTH)),
        ("zero1", "params/layers/up", (16, 2048, 8192), P(None, None, None)),
        ("fsdp", "params/blocks/3/up/w", (768, 3072), P(None, BOTH)),
        ("tensor", "params/layers/query", (16, 2048, 8, 4, 64), P(None, None, BOTH, None, None)),
        ("tensor", "params/layers/out", (16, 8, 4, 64, 2048), P(None, BOTH, None, None, None)),
        ("tensor", "params/blocks/3/up/b", (3072,), P(BOTH)),
        ("tensor", "params/blocks/3/down/b", (768,), P(None)),
        ("tensor", "0/blocks/0/1/up", (16, 1024, 4096), P(BOTH, None, None)),
        ("tables", "params/tables/0", (1 << 20, 128), P(BOTH, None)),
        ("fsdp,tensor", "params/layers/down", (16, 8192, 2048), P(None, ("model",), ("data",))),
        ("tensor,fsdp", "params/layers/down", (16, 8192, 2048), P(None, ("data",), ("model",))),
    ],
)
def test_a_parameter_is_split_as_experts_do(way, path, shape, spec):
    assert experts.param_spec(WAYS[way], path, shape, MESH) == spec


def step(state, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch @ p["up"]) @ p["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value


STATE = {"params": {"up": sds((1024, 4096), jnp.float32), "down": sds((4096, 1024), jnp.float32)}}
BATCH = sds((8192, 1024), jnp.float32)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("data", {"all-reduce"}),
        ("fsdp", {"all-gather", "reduce-scatter"}),
        ("tensor", {"all-reduce"}),
    ],
)
def test_emits_what_the_way_is_known_for(way, kinds):
    done = compile(experts.laid_out(WAYS[way], step, STATE, BATCH, MESH), STATE, BATCH, target="h100:8")
    assert done.ok, done.error
    assert {c.kind for c in done.collectives if c.bytes > 1e5} == kinds


def test_the_verdict_counts_only_what_fits():
    cell = {
        "shardplan": {"seconds": 1.0, "collectives": 0.1, "fits": True},
        "data": {"seconds": 0.5, "collectives": 0.1, "fits": False},
        "fsdp": {"seconds": 2.0, "collectives": 0.4, "fits": True},
    }
    assert quality.verdict(cell) == ("fsdp", 0.5) and quality.verdict(cell, "collectives") == ("fsdp", 0.25)
    assert quality.verdict(cell | {"fsdp": {"error": "crashed"}})[0] == "no other fits"


def test_a_row_keeps_old_figures_of_layouts_that_were_not_compiled_again():
    def cell(**seconds):
        return {"m h100:8": {name: {"seconds": s, "fits": True, "day": "today"} for name, s in seconds.items()}}

    old = quality.rows(cell(shardplan=0.001, data=0.002, fsdp=0.003))["m h100:8"]
    new = quality.over(old, quality.rows(cell(shardplan=0.001, data=0.004))["m h100:8"])
    assert (new["data"], new["fsdp"], new["tensor"]) == ("4", "(3)", "–")
    assert new["ours over the best other"] == "0.250", "an old figure counts no more"


def test_a_table_is_read_as_it_was_written(tmp_path, monkeypatch):
    page = tmp_path / "measurements.md"
    monkeypatch.setattr(quality.measurements, "PAGE", page)
    made = quality.rows({"m h100:2x8": {"shardplan": {"seconds": 0.001, "fits": True, "day": "today"}}})
    page.write_text(f"<!-- begin quality -->\n{quality.markdown(made)}\n<!-- end quality -->\n")
    assert quality.rows_of_page() == made
