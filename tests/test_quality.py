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


def test_the_page_takes_all_cells_or_none(tmp_path, monkeypatch):
    page = tmp_path / "measurements.md"
    empty = "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in ("quality", "fidelity-clusters"))
    page.write_text(empty)
    monkeypatch.setattr(quality.measurements, "PAGE", page)
    figures = dict.fromkeys(("sent", "collectives", "unplanned", "memory", "peak", "live", "products", "compute"), 1.0)
    layouts = ["shardplan", *(e.name for e in quality.experts_on("h100:8"))]
    seconds = {name: 0.002 for name in layouts} | {"shardplan": 0.001}
    cell = {name: {"seconds": s, "fits": name != "data", "fidelity": figures} for name, s in seconds.items()}
    store = {f"{model} {target}": cell for target in quality.TARGETS for model in quality.zoo.QUALITY}
    with pytest.raises(ValueError, match="gpt2 h100:2x8"):
        quality.write_page({key: c for key, c in store.items() if key != "gpt2 h100:2x8"})
    assert page.read_text() == empty
    quality.write_page(store)
    assert "| gpt2 | 2x8 | 1 | 2! | 2 |" in page.read_text() and "| dlrm | 8x8 | 0 | 1.00 |" in page.read_text()
    assert "45 cells, ours behind by more than 1 % in 0, geometric mean 0.500, largest 0.500." in page.read_text()
