"""Slices read and written at dynamic positions along sharded dims: every shard handles those that fall in it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import FAR, H100, NEAR
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.emit.shard_local.dynamic_index import scatter
from shardplan.emit.shard_local.halo import HaloDim
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.halo import Halo
from shardplan.testing import difference
from shardplan.xla import available
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")


def array(*shape, dtype="float32"):
    x = np.arange(np.prod(shape)).reshape(shape)
    return jnp.asarray(x % 3 == 0 if dtype == "bool" else x, dtype)


def emitted(step, *args):
    return [(c.kind, p.array.bytes) for c in collectives(step.compile(*args).as_text(), MeshShape(("x", "y"), (4, 2))) for p in c.parts]


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(request.param,) * 2)


@pytest.mark.parametrize("rows", [1, 3, 5, 13, 31])
@pytest.mark.parametrize("spec", [P("x"), P(("x", "y")), P("y", "x")])
def test_an_update_is_written_where_it_falls_and_nothing_moves(spec, rows, mesh):
    cache, update = array(32, 8), -1.0 - array(rows, 5)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(spec, P(), P()), out_shardings=spec)(
        lambda cache, update, at: lax.dynamic_update_slice(cache, update, (at, 2))
    )
    for at in (-100, -1, 0, 3, 7, 8, 12, 29, 31, 100):
        args = cache, update, jnp.int32(at)
        np.testing.assert_array_equal(step(*args), lax.dynamic_update_slice(cache, update, (args[2], 2)))
    assert emitted(step, *args) == []


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool"])
@pytest.mark.parametrize("rows", [1, 3, 13])
@pytest.mark.parametrize("spec", [P("x"), P(("x", "y")), P("y", "x")])
def test_a_slice_is_the_sum_of_what_shards_hold_of_it(spec, rows, dtype, mesh):
    x = array(32, 8, dtype=dtype)

    def run(x, at):
        return lax.dynamic_slice(x, (at, jnp.int8(2)), (rows, 5))

    step = shardplan.auto(mesh, cluster=FAR, in_shardings=(spec, P()), out_shardings=P())(run)
    for at in (-100, -1, 0, 3, 7, 8, 12, 29, 31, 100):
        np.testing.assert_array_equal(step(x, jnp.int8(at)), run(x, jnp.int8(at)))
    planned = [(c.kind, c.bytes) for d in step.plan(x, jnp.int8(0)).decisions for m in d.reshards for c in m.collectives]
    assert emitted(step, x, jnp.int8(0)) == planned
    assert {kind for kind, _ in planned} == {"all-reduce"}


POSITIONS = {
    "slice": lambda x, i, j: lax.dynamic_slice(x, (i, j), (13, 5)),
    "slice of one dim": lambda x, i, j: lax.dynamic_slice(x, (i, 0 * j), (13, 8)),
    "update": lambda x, i, j: lax.dynamic_update_slice(x, -x[:13, :5], (i, j)),
    "rows": lambda x, i, j: x.at[jnp.stack([i, j])].get(mode="fill"),
    "added rows": lambda x, i, j: x.at[jnp.stack([i, j])].add(x[:2], mode="drop"),
}


@pytest.mark.parametrize("position", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("case", POSITIONS)
def test_positions_of_any_width_do_with_integers_of_64_bits(case, position, mesh):
    run = POSITIONS[case]
    with jax.enable_x64(True):
        x, at = array(32, 8), (np.asarray(7, position), np.asarray(2, position))
        step = shardplan.auto(mesh, cluster=FAR, in_shardings=(P("x"), P(), P()), out_shardings=P())(run)
        np.testing.assert_array_equal(step(x, *at), jax.jit(run)(x, *at))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_one_row_of_a_sharded_table_is_looked_up_where_it_lies(mode, mesh):
    """XLA makes a slice of it, and gathers the table for that."""
    table = array(32, 8)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(P("x"), P()), out_shardings=P())(lambda t, i: t.at[i].get(mode=mode))
    for i in (0, 7, 8, 31, 32, 127):
        at = jnp.asarray([i], "int8")
        np.testing.assert_array_equal(step(table, at), table.at[at].get(mode=mode))
    assert {kind for kind, _ in emitted(step, table, at)} == {"all-reduce"}


HOWS = ["set", "add", "subtract", "multiply", "max", "min"]


@pytest.mark.parametrize("how", HOWS)
def test_one_row_of_a_replicated_table_is_written_on_the_shard_that_has_it(how):
    """XLA (jax 0.10.2) makes one slice of the shard, a slice, and of a row before it, which is not there: it is not asked for that."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    table, row = array(32, 8), jnp.full(8, 100.0)

    def write(table, row):
        table = jnp.sin(table)
        for spec in P(), P("x"):
            table = lax.with_sharding_constraint(table, jax.NamedSharding(mesh, spec))
        return getattr(table.at[0], how)(row)

    shardings = dict(in_shardings=(P(), P()), out_shardings=P("x"))
    step = shardplan.auto(mesh, cluster=NEAR, **shardings)(write)
    assert difference(step(table, row), write(table, row)) is None


@pytest.mark.parametrize("how", HOWS)
def test_one_row_is_written_where_it_lies_and_nothing_moves(how, mesh):
    table, row = array(32, 8), jnp.full(8, 100.0)
    shardings = dict(in_shardings=(P("x"), P(), P()), out_shardings=P("x"))
    step = shardplan.auto(mesh, cluster=H100, **shardings)(lambda t, i, row: getattr(t.at[i], how)(row))
    for i in (0, 7, 8, 31, 32, 100):
        np.testing.assert_array_equal(step(table, jnp.int8(i), row), getattr(table.at[jnp.int8(i)], how)(row))
    assert emitted(step, table, jnp.int8(0), row) == []


@pytest.mark.parametrize("name", ["scatter-add", "scatter_add"])
def test_one_row_outside_the_shard_is_not_added_whatever_the_primitive_is_called(name, monkeypatch):
    """JAX has written the primitive's name both ways; a lookup of the shard's own row as the update would add that row twice."""
    table, row, at = array(32, 8), jnp.full(8, 100.0), jnp.int32(9)
    monkeypatch.setattr(lax.scatter_add_p, "name", name)
    (eqn,) = (e for e in jax.make_jaxpr(lambda t, i, r: t.at[i].add(r))(table, at, row).eqns if e.primitive is lax.scatter_add_p)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    halos = [[HaloDim(0, Halo(), 32, 32, ("x",), 8)], [], []]
    run = jax.shard_map(
        lambda *shards: scatter(eqn, shards, halos)[0], mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"), check_vma=False
    )
    assert difference(jax.jit(run)(table, at[None], row), table.at[9].add(row)) is None


def test_a_cache_sharded_along_the_sequence_takes_several_tokens_at_a_time(mesh):
    """Attention over a cache that is filled three tokens a turn, with the one before last read again; and its gradient."""

    def decode(w, cache, x):
        def turn(carry, at):
            cache, x = carry
            cache = lax.dynamic_update_slice(cache, jnp.tanh(x @ w), (at, 0))
            seen = jnp.where(jnp.arange(len(cache))[:, None] < at + 3, cache, 0)
            weights = jax.nn.softmax(x @ seen.T)
            x = weights @ seen + lax.dynamic_slice(cache, (at + 1, 0), (1, 4))
            return (cache, x), x.sum()

        (cache, x), sums = lax.scan(turn, (cache, x), jnp.arange(0, 15, 3))
        return (sums**2).sum() + (cache * x.sum()).sum()

    random = np.random.default_rng(0)
    w, cache, x = (jnp.asarray(random.normal(0, 1, s), "float32") for s in ((4, 4), (32, 4), (3, 4)))
    for run in (decode, jax.value_and_grad(decode, argnums=(0, 1, 2))):
        step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(P(), P(("x", "y")), P()))(run)
        for got, want in zip(jax.tree.leaves(step(w, cache, x)), jax.tree.leaves(jax.jit(run)(w, cache, x)), strict=True):
            assert difference(got, want) is None


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_xla_moves_the_planned_bytes():
    """Tokens are counted off, a cache sharded along the sequence is written and read; all stays sharded."""

    def step(cache, x, at):
        places = jnp.cumsum((x > 0).astype("int32"), 0)
        cache = lax.dynamic_update_slice(cache, x[:16] * places[:16], (at, 0))
        cache = cache.at[at + 20].set(0.0)
        return cache, places, lax.dynamic_slice(cache, (at, 0), (3, 1024)), cache[at + 5]

    args = (jax.ShapeDtypeStruct(s, t) for s, t in (((65536, 1024), "float32"), ((65536, 1024), "float32"), ((), "int32")))
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rows = P(("x", "y"))
    planned = shardplan.auto(mesh, cluster="h100", in_shardings=(rows, rows, P()), out_shardings=(rows, rows, P(), P()))(step)
    report = planned.check(*args, target="h100:8")
    assert 0.99 < report.collectives_ratio < 1.01, str(report)


@pytest.mark.parametrize("to", [P(("a", "b"), None, "c"), P(("a", "b")), P("a", "b", "c"), P("a", "b")])
@pytest.mark.parametrize("at", [P("a"), P(None, "a")])
def test_rows_of_a_table_sharded_along_both_dims_reach_any_layout(at, to):
    """XLA aborts on some of these if the result is constrained but the partial sum is not."""
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    table, rows = array(4096, 16), array(8, 16, dtype="int32") * 37 % 4096
    step = shardplan.auto(mesh, cluster=FAR, in_shardings=(P("b", "c"), at), out_shardings=to)(lambda t, i: t.at[i].get(mode="clip"))
    np.testing.assert_array_equal(step(table, rows), table[rows])
    moves = ((d, m) for d in step.plan(table, rows).decisions for m in d.reshards)
    sums = [(d.operand_layouts[m.operand][0], m.before) for d, m in moves if m.before.partial]
    assert sums and all(first == replace(before, partial=()) for first, before in sums)
