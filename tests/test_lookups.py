"""Lookups as libraries write them (`jnp.take` fills what is out of bounds) are planned as XLA does them: gather, reshard, select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan._jax import bind, equations
from shardplan.emit.shard_local import forms
from shardplan.mesh.layout import Layout
from shardplan.xla import available

AXES = {"axis_names": ("data", "model"), "axis_types": (AxisType.Auto,) * 2}
sds = jax.ShapeDtypeStruct


def loss(table, w, ids):
    h = jnp.take(table, ids, axis=0)
    return jnp.nanmean((jnp.tanh(h @ w) - h) ** 2), h


def step(table, w, ids):
    (value, h), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(table, w, ids)
    return table - grads[0], w - grads[1], value, h


@pytest.mark.parametrize("table", [P("model"), P(("data", "model")), P("model", "data")])
def test_what_is_out_of_bounds_is_filled_on_a_sharded_table(table):
    mesh = jax.make_mesh((2, 4), **AXES)
    random = np.random.default_rng(0)
    rows, w = (random.normal(size=shape).astype("float32") for shape in ((32, 8), (8, 8)))
    ids = np.array([[0, 7, 8, -1], [31, 32, -32, 1000], [-33, 16, 24, 2], [3, 3, 31, 9]], "int32")
    outs = (None, None, None, P("data", None, "model"))
    out = shardplan.auto(mesh, pins={"table": table, "ids": P("data")}, out_shardings=outs)(step)(rows, w, ids)
    for x, y in zip(out, step(rows, w, ids), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert np.isnan(out[3]).any() and not np.isnan(out[0]).any()


@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_xla_scatters_the_rows_of_a_sharded_table_as_planned():
    mesh = AbstractMesh((2, 4), **AXES)
    rows = NamedSharding(mesh, P(("data", "model"), None, None))

    def lookup(table, ids):  # the table is too large to be gathered, its rows are wanted on all devices
        h = jax.lax.with_sharding_constraint(jnp.take(table, ids, axis=0), rows)
        return jnp.tanh(h).sum()

    args = sds((65536, 512), jnp.float32), sds((64, 256), jnp.int32)
    plan = shardplan.auto(mesh, cluster="h100", pins={"table": P("model"), "ids": P("data")})(lookup).plan(*args)
    found = plan.check("h100:8").comparison
    assert not found.of("dearer") and not found.of("unplanned") and found.ratio > 0.98, str(found)
    emitted = {(m.collective.kind, m.collective.bytes) for f in found.findings for m in f.emitted}
    assert ("reduce-scatter", 4 * 32 * 256 * 512) in emitted


def table_step(table, w, ids):
    return jax.grad(lambda table: ((table[ids] @ w) ** 2).sum())(table)


@pytest.mark.parametrize("table", [((), ()), (("a",), ()), ((), ("a",))], ids=str)
@pytest.mark.parametrize("rows", [("c", "b"), ("b", "c")], ids=str)
def test_devices_add_their_own_rows_to_their_part_of_the_table_once(table, rows):
    """Indices beyond the table are dropped, negative ones count from the end, and what the table held is added on one device."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    random = np.random.default_rng(0)
    held, added = random.normal(size=(8, 4)).astype("float32"), random.normal(size=(16, 4)).astype("float32")
    at = np.array([[0], [7], [-1], [8], [3], [3], [100], [-9], [1], [2], [4], [5], [6], [7], [0], [3]], "int32")
    (eqn,) = [e for e in equations(jax.make_jaxpr(added_up)(held, at[:, 0], added).jaxpr) if e.primitive.name == "scatter-add"]
    layouts = [Layout(table), Layout((rows, ())), Layout((rows, table[1]))]
    values = held, at, added

    def run(*values):
        placed = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*of.dims))) for x, of in zip(values, layouts, strict=True))
        return forms.run(eqn, list(placed), layouts, [None], mesh, ("b", "c"))[0]

    np.testing.assert_allclose(jax.jit(run)(*values), bind(eqn, values)[0], rtol=1e-5, atol=1e-6)
    assert "shard_map" in str(jax.make_jaxpr(run)(*values))


def added_up(held, at, added):
    return held.at[at].add(added)


ROWS, IN_OTHER_ORDER = P(("data", "model")), P(("model", "data"))


@pytest.mark.parametrize(("ids", "outs"), [(IN_OTHER_ORDER, ROWS), (ROWS, IN_OTHER_ORDER), (IN_OTHER_ORDER, IN_OTHER_ORDER)], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_rows_are_added_up_in_whichever_order_axes_shard_them_and_the_table(ids, outs, kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    random = np.random.default_rng(0)
    table, w = (random.normal(size=shape).astype("float32") for shape in ((32, 8), (8, 8)))
    where = random.integers(0, 32, (64, 64)).astype("int32")
    step = shardplan.auto(mesh, cluster=NEAR, pins={"ids": ids, "table": P(), "w": P()}, out_shardings=outs)(table_step)
    np.testing.assert_allclose(step(table, w, where), table_step(table, w, where), rtol=2e-4, atol=1e-4)
    assert ("shard_map" in str(jax.make_jaxpr(step)(table, w, where))) == (ids != outs)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("ids", [ROWS, IN_OTHER_ORDER], ids=str)
def test_xla_scatters_the_gradient_of_a_table_in_whichever_order_axes_shard_its_rows(ids):
    args = sds((4096, 512), jnp.float32), sds((512, 512), jnp.float32), sds((256, 256), jnp.int32)
    auto = shardplan.auto(AbstractMesh((2, 4), **AXES), cluster="h100", pins={"table": P(), "w": P(), "ids": ids}, out_shardings=ROWS)
    found = auto(table_step).check(*args, target="h100:8")
    assert found.collectives_ratio == pytest.approx(1, abs=0.01)
    assert {m.collective.kind for f in found.comparison.findings for m in f.emitted if m.collective.bytes > 1e6} == {"reduce-scatter"}
