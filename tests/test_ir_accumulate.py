"""Sums that a loop only adds up are paid once, after the loop."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.ir.accumulate import accumulated
from shardplan.ir.parse import parse
from shardplan.xla import available
from shardplan.xla.planned import expected

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds = jax.ShapeDtypeStruct
MESH = AbstractMesh((8,), ("data",))
W, BATCH = sds((1024, 1024), jnp.float32), sds((16, 8192, 1024), jnp.float32)


def step(w, batch):
    """Gradients of 16 microbatches, added up in a scan."""

    def add(total, x):
        return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(w), batch)
    return w - 0.1 * total


def planned():
    pins = {"w": P(), "batch": P(None, "data")}
    return shardplan.auto(MESH, cluster="h100", donate_argnums=0, pins=pins)(step).plan(W, BATCH)


def reductions(plan):
    return [e for e in expected(plan) if e.kind == "all-reduce" and e.bytes > 1e6]


def test_one_reduction_after_all_microbatches():
    plan = planned()
    (sent,) = reductions(plan)
    assert sent.bytes == W.size * 4 and sent.runs == 1
    assert plan.seconds["communication"] < 2 * 4 * W.size / 275e9 + 1e-3


@needs_gpu_compiler
def test_xla_reduces_once_too():
    found = planned().check("h100:8")
    (sent,) = [c for c in found.compiled.collectives if c.bytes > 1e6]
    assert (sent.kind, sent.runs) == ("all-reduce", 1)
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)


def test_a_carry_that_the_loop_reads_is_reduced_in_every_round():
    def reads(w, batch):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ (w + total)) ** 2))(w), None

        return jax.lax.scan(add, jnp.zeros_like(w), batch)[0]

    assert accumulated(parse(jax.make_jaxpr(step)(W, BATCH)))
    assert not accumulated(parse(jax.make_jaxpr(reads)(W, BATCH)))
