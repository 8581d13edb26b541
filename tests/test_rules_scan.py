"""Cumulative ops sharded along the dim they scan: every shard joins its own scan with the totals of the shards before it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.layout import MeshShape
from shardplan.testing import difference
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")

OPS = {"cumsum": lax.cumsum, "cumprod": lax.cumprod, "cummax": lax.cummax, "cummin": lax.cummin, "cumlogsumexp": lax.cumlogsumexp}


def values(dtype: str):
    """Numbers of both signs; of real ones then some with infinities, NaN and zeros of both signs among them."""
    random = np.random.default_rng(0)
    if dtype == "int8":
        return jnp.asarray(random.integers(0, 100, (32, 6)), dtype)
    x = random.uniform(0.7, 1.3, (32, 12)) * random.choice((-1, 1), (32, 12))
    if dtype == "complex64":
        return jnp.asarray(x + 1j * random.uniform(-0.3, 0.3, x.shape), dtype)
    for column, number in enumerate((-np.inf, np.inf, np.nan, -0.0, -np.inf)):
        x[5 * column, column] = number
    x[:9, 0], x[20:, 3], x[3, 4] = -np.inf, 0.0, np.inf
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 2, "y": 4}])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "complex64"])
def test_same_numbers(dtype, axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    x = values(dtype)
    names = [n for n in OPS if n != "cumlogsumexp" or "float" in dtype]

    def run(x):
        return {(n, reverse): OPS[n](x, axis=0, reverse=reverse) for n in names for reverse in (False, True)}

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(tuple(axes)), out_shardings=P(tuple(axes)))(run)
    got, want = step(x), jax.jit(run)(x)
    assert {k: difference(got[k], want[k]) for k in want} == dict.fromkeys(want)
    assert {c.kind for c in collectives(step.compile(x).as_text())} == {"all-gather"}


def test_the_compiled_program_has_the_planned_collectives():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (64, 5)), "float32")
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(("x", "y")), out_shardings=P(("x", "y")))(lambda x: lax.cumsum(x, axis=0))
    planned = [(c.kind, c.bytes, c.axes) for d in step.plan(x).decisions for m in d.reshards for c in m.collectives]
    found = collectives(step.compile(x).as_text(), MeshShape(("x", "y"), (2, 4)))
    assert planned == [("all-gather", 8 * 5 * 4, ("x", "y"))]
    assert [(c.kind, p.array.bytes) for c in found for p in c.parts] == [("all-gather", 8 * 5 * 4)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_experts_places_and_their_gradients_under_a_loop(kind):
    """Tokens sharded over devices count how many before them chose each expert, as routing does."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    random = np.random.default_rng(0)
    x, w = jnp.asarray(random.normal(0, 1, (64, 8)), "float32"), jnp.asarray(random.normal(0, 1, (8, 4)), "float32")

    def loss(w, x):
        def layer(x, _):
            gates = jax.nn.softmax(x @ w)
            place = jnp.cumsum(jax.nn.one_hot(gates.argmax(1), 4, dtype="int32"), 0)
            state = lax.cumlogsumexp(gates, axis=0, reverse=True) + lax.cumsum(gates, axis=0) / 64
            return x + (state * (place < 20)) @ w.T, place.max()

        x, places = lax.scan(layer, x, None, length=3)
        return (x**2).mean(), places

    run = jax.value_and_grad(loss, has_aux=True)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(None, P(("x", "y"))))(run)
    for got, want in zip(jax.tree.leaves(step(w, x)), jax.tree.leaves(jax.jit(run)(w, x)), strict=True):
        assert difference(got, want) is None
    split = {d.primitive for d in step.plan(w, x).decisions for m in d.reshards for c in m.collectives if c.kind == "all-gather"}
    assert split >= {"cumsum"}


def test_a_sharded_scan_is_priced_by_its_totals():
    """Rows so long that a gather of all would cost more than anything: on a real machine the dim stays sharded."""
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    x = jax.ShapeDtypeStruct((1 << 20, 64), "float32")
    plan = shardplan.auto(mesh, cluster="h100", in_shardings=P("x"), out_shardings=P("x"))(lambda x: lax.cumsum(x, axis=0)).plan(x)
    (move,) = [c for d in plan.decisions for m in d.reshards for c in m.collectives]
    assert (move.kind, move.bytes) == ("all-gather", 8 * 64 * 4)


def test_the_empty_ends_of_an_associative_scan_move_nothing():
    """JAX slices, multiplies and joins arrays without elements there: nothing is read for them, and what they are joined with stays."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    rows = P(("x", "y"))

    def scanned(decay, x):
        def outputs(decay, x):
            y = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=1)[1]
            joined = jnp.concatenate([y[:, :0], y, y[:, 8:] + 1, jnp.zeros((16, 0, 4)), y * 2], axis=1)
            return jnp.tanh(joined) + jnp.pad(y[:, :0], ((0, 0), (16, 0), (0, 0)), constant_values=0.5)

        y, back = jax.vjp(outputs, decay, x)
        return y, back(y)

    decay, x = (jnp.asarray(np.random.default_rng(n).uniform(0.1, 0.9, (16, 8, 4)), "float32") for n in range(2))
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(rows, rows), out_shardings=(rows, (rows, rows)))(scanned)
    assert not [c for d in step.plan(decay, x).decisions for m in d.reshards for c in m.collectives]
    assert not collectives(step.compile(decay, x).as_text(), MeshShape(("x", "y"), (4, 2)))
    for got, want in zip(jax.tree.leaves(step(decay, x)), jax.tree.leaves(scanned(decay, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
