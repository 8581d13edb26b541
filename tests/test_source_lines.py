"""Every op, constraint and finding names a line of the user's step, also of what library functions do that JAX has jitted."""

from pathlib import PurePath

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import _jax

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
HERE = PurePath(__file__).name
sds = jax.ShapeDtypeStruct


def loss_fn(params, batch):
    h = jnp.take(params["embedding"], batch["x"], axis=0)
    h = jnp.where(batch["x"][..., None] > 5, h, 0)
    h = jnp.roll(h, 1, axis=1)
    logits = jnp.clip(h @ params["head"], -5, 5)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def step(params, batch):
    value, grads = jax.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.fixture(scope="module")
def plan():
    params = {"embedding": sds((512, 64), jnp.float32), "head": sds((64, 512), jnp.float32)}
    batch = {name: sds((8, 16), jnp.int32) for name in "xy"}
    pins = {"params/embedding": P("model"), "params/head": P(None, "model"), "batch/*": P("data")}
    return shardplan.auto(MESH, cluster="h100", donate_argnums=0, pins=pins)(step).plan(params, batch)


def lines(names):
    """(file, line) of what is named, as text."""
    return {(PurePath(file).name, line) for file, line, _ in names}


def test_ops_inside_jitted_library_functions_have_the_line_that_calls_them(plan):
    graph = plan.context.planned.graph
    found = {op.primitive: op.source.line for op in graph.ops if op.phase == "forward" and not op.traits.step_input}
    start = loss_fn.__code__.co_firstlineno
    assert found["gather"] in (start + 1, start + 5) and found["select_n"] in (start + 2, start + 5)
    assert {PurePath(op.source.file).name for op in graph.ops if not op.traits.step_input} == {HERE}


def test_constraints_and_ops_of_the_emitted_step_have_them_too(plan):
    function, args = plan.context.program(plan)
    inner = _jax.inner_jaxpr(function.trace(*args).jaxpr.eqns[0])
    assert inner is not None
    own = [e for e in inner.jaxpr.eqns if not (e.primitive.name == "sharding_constraint" and e.invars[0] in inner.jaxpr.invars)]
    assert len(own) > 50 and lines(_jax.source(e) for e in own) <= {(HERE, n) for n in range(1, step.__code__.co_firstlineno + 4)}


def test_what_xla_emits_joins_what_is_planned_and_names_a_line_of_the_step(plan):
    found = plan.check()  # XLA for CPU sums where the plan scatters, on the same lines
    last = step.__code__.co_firstlineno + 3
    sources = [f.source.rsplit(":", 1) for f in found.comparison.findings]
    assert len(sources) >= 4 and all(PurePath(file).name == HERE and int(line) <= last for file, line in sources)
    assert not found.comparison.of("unplanned") and not found.comparison.of("missing")
