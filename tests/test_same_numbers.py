"""The planned step gives the numbers of the plain one: every example, every mesh, every way of running.

The full product of options is `benchmarks/same_numbers.py`; here every model meets every mesh, and along the way every kind of
axis, every search, and inside as well as outside `jax.set_mesh`.
"""

import contextlib
import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import MODELS, loss_of
from sweeps import sweep

import shardplan

STEPS = 20
MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2))
# After 20 optimizer steps, relative to the largest entry of the array: sums over shards round in another order.
TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}
WAYS = tuple(itertools.product(("auto", "explicit"), (False, True), ("ilp", "propagation", "reloaded")))


def make_mesh(shape, kind):
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}[kind]
    return jax.make_mesh(shape, ("data", "model", "expert")[: len(shape)], axis_types=(types,) * len(shape))


def assert_same(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        scale = max(1e-3, float(np.abs(np.asarray(b, np.float64)).max(initial=0.0)))
        atol = TOLERANCE.get(str(a.dtype), 0.0) * scale
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path)
        )


def run(step, state, batches):
    losses = []
    for batch in batches:
        state, out = step(state, batch)
        losses.append(float(loss_of(out)))
    return state, losses


def plain_run(name):
    create, step, batches = MODELS[name]()
    data = list(batches(STEPS))
    state = jax.jit(create)(jax.random.key(0))
    return create, step, data, run(jax.jit(step), state, data)


@pytest.fixture(scope="module")
def plain():
    cache = {}
    return lambda name: cache.setdefault(name, plain_run(name)) if name not in cache else cache[name]


def cases():
    for k, (name, shape) in enumerate(itertools.product(MODELS, MESHES)):
        kind, inside, how = WAYS[(5 * k) % len(WAYS)]
        marks = () if shape == MESHES[k // len(MESHES) % 2] else pytest.mark.slow
        yield pytest.param(name, shape, kind, inside, how, marks=marks, id=f"{name}-{'x'.join(map(str, shape))}-{kind}-{inside}-{how}")


@pytest.mark.parametrize("name, shape, kind, inside, how", list(cases()))
def test_same_numbers(name, shape, kind, inside, how, plain, tmp_path):
    create, step, data, (want, want_losses) = plain(name)
    mesh = make_mesh(shape, kind)
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        planned = shardplan.auto(mesh, donate_argnums=0, search="propagation" if how == "propagation" else "ilp")(step)
        if how == "reloaded":
            shapes = jax.eval_shape(create, jax.random.key(0))
            planned.plan(shapes, data[0]).save(tmp_path / "plan.json")
            planned = shardplan.auto(mesh, donate_argnums=0, plan=tmp_path / "plan.json")(step)
        state = planned.init(create, jax.random.key(0))
        got, losses = run(planned, state, data)
    np.testing.assert_allclose(losses, want_losses, rtol=2e-3, atol=1e-4)
    assert_same(got, want)


def any_spec(x, axes: dict[str, int], random) -> jax.P | None:
    """A layout of an array drawn at random, or None to leave it to the planner."""
    free, entries = list(random.permutation(list(axes))), []
    for n in x.shape:
        taken = []
        while free and random.random() < 0.4 and n % np.prod([axes[a] for a in (*taken, free[0])]) == 0:
            taken.append(free.pop(0))
        entries.append(tuple(sorted(map(str, taken))) or None)
    return None if random.random() < 0.3 else jax.P(*entries)


@pytest.mark.parametrize("name", sweep(["gpt", "moe", "dlrm", "digits_cnn"], lambda name: name in ("gpt", "moe")))
def test_whatever_layouts_are_asked_for(name):
    """Inputs and outputs pinned at random, also state to one layout on its way in and to another on its way out."""
    create, step, batches = MODELS[name]()
    mesh, random = make_mesh((2, 4), "auto"), np.random.default_rng(sum(map(ord, name)))
    state, batch = jax.jit(create)(jax.random.key(0)), next(iter(batches(1)))
    trees = (state, batch), jax.eval_shape(step, state, batch)
    into, out = (jax.tree.map(lambda x: any_spec(x, dict(mesh.shape), random), tree) for tree in trees)
    planned = shardplan.auto(mesh, in_shardings=into, out_shardings=out)(step)
    assert_same(planned(state, batch), jax.jit(step)(state, batch))
    found = planned.plan(state, batch)
    for leaf, spec in zip(found.inputs, jax.tree.leaves(into, is_leaf=lambda s: s is None), strict=True):
        assert spec is None or leaf.layout.spec() == tuple(e[0] if e and len(e) == 1 else e for e in spec)


@pytest.mark.parametrize("pins", [{"**": P()}, {"x": P("data")}, {"w": P(None, "data")}])
def test_a_product_of_16_bits_is_rounded_as_the_program_has_it(pins):
    """Plain steps keep it in float32 on CPUs unless told not to."""

    def logits(w, x):
        return (x.astype("bfloat16") @ w).astype("float32")

    rng = np.random.default_rng(0)
    w, x = jax.numpy.asarray(rng.normal(size=(64, 64)), "bfloat16"), np.asarray(rng.normal(size=(64, 64)), "float32")
    got = shardplan.auto(make_mesh((8,), "auto"), pins=pins)(logits)(w, x)
    want = jax.jit(logits, compiler_options={"xla_allow_excess_precision": False})(w, x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("specs", [(P(None, None, "model"), P("data")), (P(None, "data"), P(None, "model"))])
def test_a_scan_of_one_trip(specs):
    def step(ws, x):
        def layer(h, w):
            h = h + jax.numpy.tanh(h @ w)
            return h, h.sum(1)

        def loss(ws):
            h, sums = jax.lax.scan(jax.checkpoint(layer), x, ws)
            return (h**2).mean() + sums.mean(), sums

        grads, sums = jax.grad(loss, has_aux=True)(ws)
        return ws - 0.1 * grads, sums

    ws, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((1, 64, 64), (32, 64))))
    planned = shardplan.auto(make_mesh((2, 4), "auto"), in_shardings=specs)(step)
    assert not planned.plan(ws, x).context.planned.graph.loops
    assert_same(planned(ws, x), jax.jit(step)(ws, x))


def test_a_scan_of_no_trip():
    """Such as over the layers, microbatches or timesteps of which there are none."""

    def step(w, x, rows):
        def loss(w):
            h, (sums, _) = jax.lax.scan(lambda h, row: (jax.numpy.tanh(h @ w + row), (h.sum(), jax.random.key(0))), x, rows)
            return (h @ w).mean() + sums.sum(), sums

        grads, sums = jax.grad(loss, has_aux=True)(w)
        return w - 0.1 * grads, sums

    w, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(((64, 64), (32, 64))))
    rows = jax.numpy.zeros((0, 64))
    planned = shardplan.auto(make_mesh((2, 4), "auto"), in_shardings=(P(None, "model"), P("data"), None))(step)
    assert not planned.plan(w, x, rows).context.planned.graph.loops
    assert_same(planned(w, x, rows), jax.jit(step)(w, x, rows))


def test_what_a_scan_of_no_trip_hands_on_is_no_weaker():
    step = functools.partial(jax.lax.scan, lambda total, row: (total + row.sum(), total), 0.0)
    results = [run(jax.numpy.zeros((0, 8))) for run in (jax.jit(step), shardplan.auto(make_mesh((8,), "auto"))(step))]
    assert [x.weak_type for x in results[0]] == [x.weak_type for x in results[1]]
