"""Drawn training steps: the same of a seed in every process, of all ingredients, and with the numbers of plain jit when planned."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import drawn
import drawn_programs
import structure
from sweeps import sweep

import shardplan

SEEDS = (0, 1, 2, 4, 5)
sds = jax.ShapeDtypeStruct

INGREDIENTS = """
    dense attention; grouped-query attention; multi-query attention; cross attention; causal mask; rotary positions; learned positions;
    fused projections; library attention; plain MLP; gated MLP; experts by capacity; experts by sorting; ragged experts by sorting;
    layer norm; rms norm; group norm; batch norm; norms after; LSTM; GRU; linear recurrence; state space; 1-d convolution;
    2-d convolution; 3-d convolution; 2-d transposed convolution; depthwise convolution; grouped convolution; strides; dilated windows;
    dilated inputs; even windows; uneven padding; no padding; channels first; inverted bottleneck; max pooling; mean pooling;
    embedding tables; tied embeddings; huge softmax; margin softmax; teacher and student; next token; classes; regression; contrast;
    label smoothing; z loss; huber loss; several labels; images to images; gradient accumulation; frozen parts; averaged parameters;
    scanned; unrolled; both; checkpoint; bfloat16 computation; bfloat16 parameters; scaled float16; float32; adamw; clipped adam;
    momentum; sgd; lion; adafactor; rmsprop; adagrad; lamb; adamw with bfloat16 moments; sizes that do not divide
"""


def text(seed: int) -> str:
    program = drawn_programs.draw(seed)
    jaxpr = jax.make_jaxpr(program.step)(program.state, program.batch)
    return hashlib.sha256(f"{program.about}{jaxpr.in_avals}{len(jaxpr.eqns)}".encode()).hexdigest()


def test_a_seed_draws_the_same_in_every_process():
    code = "import test_drawn; print(test_drawn.text(3), test_drawn.text(27))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True).stdout
    assert found.split() == [text(3), text(27)]


def test_every_ingredient_is_drawn():
    made = set().union(*map(drawn_programs.ingredients, range(300)))
    assert drawn_programs.ingredients(5) == drawn_programs.draw(5).made
    wanted = {name.strip() for name in INGREDIENTS.split(";")}
    assert not wanted - made


@pytest.mark.parametrize("seed", range(0, 24, 4))
def test_nothing_is_allocated_and_state_keeps_its_types(seed):
    program = drawn_programs.draw(seed)
    assert all(isinstance(x, sds) for x in jax.tree.leaves((program.state, program.batch)))
    after, loss = jax.eval_shape(program.step, program.state, program.batch)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), program.state)
    assert loss.shape == ()


# Of the largest entry of an array after one step, computed in float32: sums over shards round in another order.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
ONE_UPDATE = 3e-3
"""What optimizers by signs and ratios may change a parameter by whose gradient is only rounding; moments have no such slack."""


def off(program: drawn_programs.Drawn, mesh) -> float:
    """The largest difference of the planned step from plain jit, 1 being all that is allowed."""
    keys = jax.random.split(jax.random.key(program.seed))
    state, batch = jax.jit(program.create_state)(keys[0]), jax.jit(program.create_batch)(keys[1])
    want, want_loss = jax.jit(program.step)(state, batch)
    got, loss = shardplan.auto(mesh)(program.step)(state, batch)
    worst = abs(float(loss) - float(want_loss)) / max(abs(float(want_loss)), 1e-3) / TOLERANCE["float32"]
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(want))
    for part in want:
        pairs = list(zip(*map(jax.tree.leaves, (got[part], want[part])), strict=True))
        largest = [float(np.abs(np.asarray(y, np.float64)).max(initial=0.0)) for _, y in pairs]
        for (x, y), size in zip(pairs, largest, strict=True):
            limit = TOLERANCE.get(str(y.dtype), 0.0) * max(size, 1e-3 * max(largest)) + (0.0 if part == "opt" else ONE_UPDATE)
            worst = max(worst, float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0.0)) / (limit or 1e-9))
    return worst


@pytest.mark.parametrize("seed", sweep(SEEDS, bool))
def test_a_planned_step_has_the_numbers_of_plain_jit(seed):
    shape = ((2, 4), (8,), (2, 2, 2))[seed % 3]
    mesh = jax.make_mesh(shape, drawn_programs.AXES[len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    assert off(drawn_programs.draw(seed, "exact"), mesh) <= 1


# ---- experts find their layouts by structure, names said nothing


MESH = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def two_products(state, batch):
    def loss(p):
        scores = jnp.einsum("btd,dhk->bthk", jnp.tanh(p["a"][batch]) @ p["b"] @ p["c"], p["d"])
        return jnp.mean((jnp.einsum("bthk,hkd->btd", scores, p["e"]) @ p["f"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value


SHAPES = {"a": (96, 32), "b": (32, 64), "c": (64, 32), "d": (32, 4, 16), "e": (4, 16, 32), "f": (32, 8192)}


@pytest.mark.parametrize(
    ("way", "wanted"),
    [
        ("data", {}),
        ("data,tensor", {"a": P("model", None), "b": P(None, "model"), "c": P("model", None), "d": P(None, "model", None),
                         "e": P("model", None, None), "f": P(None, "model")}),
        ("tables", {"a": P(("data", "model"), None), "f": P(None, ("data", "model"))}),
        ("fsdp,tensor", {"b": P("data", "model"), "c": P("model", "data")}),
    ],
)  # fmt: skip
def test_tensor_parallel_pairs_heads_and_vocabularies_are_found_by_structure(way, wanted):
    state = {"params": {name: sds(shape, jnp.float32) for name, shape in SHAPES.items()}}
    read = structure.Structure(two_products, state, sds((16, 8), jnp.int32), MESH)
    laid = read.laid_out(next(w for w in structure.ways(MESH, 8) if w.name == way))

    def plain(spec):
        return tuple(e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in spec)

    found = {name: plain(spec) for name, spec in laid.specs[0]["params"].items() if any(spec)}
    assert {name: found[name] for name in wanted} == {name: plain(spec) for name, spec in wanted.items()}
    assert way.startswith("fsdp") or found.keys() == wanted.keys()
    assert plain(laid.specs[1]) == ((("data", "model"),) if way in ("data", "tables") else ("data",))


def test_a_program_that_failed_is_counted_and_ours_that_did_not_compile_is_behind():
    def compiled(seconds):
        return {"seconds": seconds, "compute": seconds, "exposed": 0.0, "peak": 1.0, "sent": 1.0, "bytes": 1.0, "fits": True}

    plan = {"compute": 1.0, "exposed": 0.0, "total": 1.0, "peak": 1.1}
    good = {"seed": 0, "plan": plan, "layouts": {drawn.OURS: compiled(1.0), "data": compiled(2.0)}, "errors": [], "took": 1.0}
    crashed = {"seed": 1, "layouts": {"data": compiled(2.0)}, "errors": ["compiling shardplan: it crashed"], "took": 1.0}
    assert drawn.ratio(good) == 0.5 and drawn.ratio(crashed) == float("inf")
    assert drawn.fidelity(good) == {"compute": 1.0, "total": 1.0, "peak": 1.1, "bytes": 1.0}
    text = drawn.summary([good, crashed])
    assert "1 with errors" in text and "behind the best other in 1 of 2" in text and "errors in compiling shardplan: 1" in text
