"""Sums that a loop only adds up are paid once, after the loop."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.costs.tables import edge_layouts
from shardplan.ir.parse import parse
from shardplan.mesh.layout import Layout
from shardplan.xla import available
from shardplan.xla.report.check import expected
from shardplan.xla_model.accumulation import accumulated_operands

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
sds = jax.ShapeDtypeStruct
MESH = AbstractMesh((8,), ("data",))
WHOLE = P()
W, BATCH = sds((1024, 1024), jnp.float32), sds((16, 8192, 1024), jnp.float32)


def step(w, batch):
    """Gradients of 16 microbatches, added up in a scan."""

    def add(total, x):
        return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(w), batch)
    return w - 0.1 * total


def planned(w=W, split=WHOLE, function=step, mesh=MESH):
    pins = {"w": split, "batch": P(None, mesh.axis_names)}
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0, pins=pins)(function).plan(w, BATCH)


def reductions(plan):
    return [e for e in expected(plan) if e.kind == "all-reduce" and e.bytes > 1e6]


def test_one_reduction_after_all_microbatches():
    plan = planned()
    (sent,) = reductions(plan)
    assert sent.bytes == W.size * 4 and sent.runs == 1
    assert plan.seconds["communication"] < 2 * 4 * W.size / 275e9 + 1e-3


@pytest.mark.slow
@needs_gpu_compiler
def test_xla_reduces_once_too():
    found = planned().check("h100:8")
    (sent,) = [c for c in found.compiled.collectives if c.bytes > 1e6]
    assert (sent.kind, sent.runs) == ("all-reduce", 1)
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@needs_gpu_compiler
def test_into_sharded_parameters_the_sum_is_scattered_once():
    found = planned(split=P("data")).check("h100:8")
    (sent,) = [c for c in found.compiled.collectives if c.kind != "all-gather" and c.bytes > 1e6]
    assert (sent.kind, sent.runs) == ("reduce-scatter", 1)
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)


def test_no_plan_reduces_in_the_loop_what_xla_reduces_after_it():
    space = planned().context.planned.space
    edges = [e for e in space.array_edges if (e.consumer, e.operand) in space.accumulated_operands]
    for edge in edges:
        found = edge_layouts(space, edge.template, follows=False)
        assert found.forbidden is not None
        partial, whole = Layout(((), ()), (("data", "sum"),)), Layout(((), ()))
        rows = found.sources.layouts.index(partial), found.sources.layouts.index(whole)
        of = [[bool(found.forbidden[row, found.targets.layouts.index(x)]) for x in (partial, whole)] for row in rows]
        assert of[0] == [False, True] and not of[1][1]
    assert edges


def in_bf16(w, batch):
    """The same, of gradients in bf16 that are added up in f32."""

    def add(total, x):
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x.astype(jnp.bfloat16) @ w).astype(jnp.float32) ** 2))(w.astype(jnp.bfloat16))
        return total + grads.astype(jnp.float32), None

    total, _ = jax.lax.scan(add, jnp.zeros_like(w), batch)
    return w - 0.1 * total


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("mesh", [MESH, AbstractMesh((2, 4), ("data", "model"))])
def test_behind_a_cast_the_sum_is_reduced_in_the_dtype_before_and_sliced_afterwards(mesh):
    found = planned(split=P(mesh.axis_names), function=in_bf16, mesh=mesh).check("h100:8")
    for collectives in (expected(found.plan), found.compiled.collectives):
        (sent,) = [c for c in collectives if c.kind != "all-gather" and c.bytes > 1e6]
        assert (sent.kind, sent.runs, sent.bytes) == ("all-reduce", 1, 2 * W.size)
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("split", [P(("data", "model")), P("data", "model"), P("model")])
def test_over_two_axes_it_is_paid_once_too(split):
    found = planned(split=split, mesh=AbstractMesh((2, 4), ("data", "model"))).check("h100:8")
    for collectives in (expected(found.plan), found.compiled.collectives):
        assert {c.runs for c in collectives if c.bytes > 1e6} == {1}
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("split", [P(), P("data")])
def test_the_initial_value_of_the_carry_is_counted_once(split):
    def more(w, batch):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w), None

        return jax.lax.scan(add, 3.0 * w, batch)[0]

    w, batch = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((256, 256), (4, 1 << 14, 256))))
    mesh = jax.make_mesh((8,), ("data",))
    step = shardplan.auto(mesh, cluster="h100", pins={"w": split, "batch": P(None, "data")})(more)
    found = step.plan(w, batch).context.planned
    carry = next(i for i, op in enumerate(found.graph.ops) if op.primitive == "loop_carry" and op.outs[0].shape == w.shape)
    assert found.result_layout(carry).partial == (("data", "sum"),)
    assert jnp.allclose(step(w, batch), more(w, batch), rtol=1e-3, atol=1e-2)


def test_a_carry_that_the_loop_reads_is_reduced_in_every_iteration():
    def reads(w, batch):
        def add(total, x):
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ (w + total)) ** 2))(w), None

        return jax.lax.scan(add, jnp.zeros_like(w), batch)[0]

    assert accumulated_operands(parse(jax.make_jaxpr(step)(W, BATCH)))
    assert not accumulated_operands(parse(jax.make_jaxpr(reads)(W, BATCH)))
