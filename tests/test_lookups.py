"""Lookups as libraries write them (`jnp.take` fills what is out of bounds) are planned as XLA does them: gather, reshard, select."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
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
