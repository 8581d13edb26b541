"""Dims that windows slide over: what neighbours exchange, by hand, in numbers, and as XLA does it."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan._jax import equations
from shardplan.emit.shard_local.forms import FORMS
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.plan.schedule import StepSchedule
from shardplan.strategies.halo import Halo
from shardplan.strategies.rules import rule_for
from shardplan.testing import check_rule, difference
from shardplan.xla import available
from shardplan.xla.hlo import schedule
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")


@pytest.mark.parametrize(
    ("halo", "n", "m", "shards", "hops"),
    [
        (Halo(window=3, low=1), 16, 16, 4, {-1: 1, 1: 1}),
        (Halo(window=3, stride=2, low=0), 16, 8, 4, {-1: 1}),
        (Halo(window=2, stride=2), 16, 8, 4, {}),
        (Halo(window=7, low=3), 16, 16, 8, {-2: 1, -1: 2, 1: 2, 2: 1}),
        (Halo(window=3, low=1, dilation=2), 8, 16, 4, {-1: 1}),
        (Halo(window=3), 12, 10, 2, {-1: 1, 1: 1}),
    ],
)
def test_a_shard_needs_what_its_windows_reach(halo, n, m, shards, hops):
    assert halo.hops(n, m, shards) == hops


@pytest.mark.parametrize(
    ("halo", "n", "m", "shards", "sent"),
    [
        (Halo(low=-1), 16, 12, 4, [[(1, 2, 1), (2, 3, 2)]]),  # x[1:13]
        (Halo(low=0), 16, 8, 4, [[(0, 1, 2), (1, 2, 2)], [(1, 3, 2)]]),  # x[:8]: a shard sends one piece at a time
        (Halo(low=4), 16, 16, 4, [[(0, 1, 4), (1, 2, 4), (2, 3, 4)]]),  # shifted by a whole shard
        (Halo(stride=-1, low=-15), 16, 16, 4, [[(0, 3, 4), (1, 2, 4), (2, 1, 4), (3, 0, 4)]]),  # reversed: shards swap
        (Halo(stride=2), 16, 8, 4, []),  # x[::2]
        (Halo(dilation=2), 16, 32, 4, []),  # spread out
    ],
)
def test_pieces_are_sent_in_few_permutes(halo, n, m, shards, sent):
    permutes = halo.permutes(n, m, shards)
    assert [sorted((x.source, x.target, x.size) for x in permute) for permute in permutes] == sent


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_permutes_bring_every_shard_what_it_reads_and_no_shard_two_pieces_at_once(data):
    shards, own, made = data.draw(st.sampled_from([2, 3, 8])), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    halo = Halo(*(data.draw(st.integers(*ends)) for ends in ((1, 4), (1, 3), (-9, 9), (1, 3))))
    n, m = own * shards, made * shards
    held = [set(range(q * own, (q + 1) * own)) for q in range(shards)]
    for permute in halo.permutes(n, m, shards):
        assert len({x.source for x in permute}) == len({x.target for x in permute}) == len(permute)
        for x in permute:
            assert x.source * own <= x.first < x.stop <= (x.source + 1) * own
            held[x.target] |= set(range(x.first, x.stop))
    for i, e in itertools.product(range(m), range(n)):
        if 0 <= e * halo.dilation - i * halo.stride + halo.low < halo.window:
            assert e in held[i // made]


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_windows_of_any_kind_are_sharded_correctly(window, stride, low, high, dilation, spread):
    """A convolution and a maximum along one dim, every way the numbers allow; 8 devices."""
    x = jnp.sin(jnp.arange(48.0)).reshape(2, 24, 1)
    w = jnp.cos(jnp.arange(2.0 * window)).reshape(window, 1, 2)
    sizes = {"window_strides": (stride,), "padding": ((low, high),)}
    dims = ("NWC", "WIO", "NWC")
    check_rule(
        lambda x, w: lax.conv_general_dilated(
            x, w, lhs_dilation=(dilation,), rhs_dilation=(spread,), dimension_numbers=dims, **sizes
        ), x, w,
    )  # fmt: skip
    shape = (window,), (stride,), ((low, high),), (dilation,), (spread,)
    check_rule(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, *shape), x[0, :, 0])


def conv(x, w, stride=1):
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def step(params, images, smooth=True):
    """One step of a small image model on one image: rows and columns can be sharded."""

    def loss(params):
        x = jnp.tanh(conv(images, params[0]))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jnp.tanh(conv(x, params[1], 2))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") if smooth else x
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def values(channels=(3, 5, 7)):
    random = np.random.default_rng(0)
    params = [jnp.asarray(random.normal(0, 0.2, (3, 3, a, b)), "float32") for a, b in itertools.pairwise(channels)]
    return params, jnp.asarray(random.normal(0, 1, (1, 64, 64, channels[0])), "float32")


def moved(x):
    """Slices, pads, reversals and joins of the first dim; overlapping windows, whose gradient scatters."""
    x = jnp.concatenate([x[8:40], lax.rev(x, (0,)), x[:48:3]])  # 32 + 64 + 16 rows
    x = lax.pad(x, 2.0, ((-1, 1, 0), (0, 0, 0)))
    x = jnp.tanh(lax.pad(x, 1.0, ((3, -2, 1), (0, 0, 0))))  # 224 rows
    x = lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 1), "SAME")
    return jnp.sin(x[:, ::2]).sum() * x[1:49].mean() + (x[16:64] * jnp.arange(4.0)).sum()


@pytest.mark.parametrize("pin", [P("x"), P("x", "y"), P(("x", "y"))])
def test_elements_moved_along_a_sharded_dim_are_fetched_from_their_shards(pin):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (64, 4)), "float32")
    planned = shardplan.auto(mesh, cluster=NEAR, pins={"x": pin})(jax.value_and_grad(moved))
    for got, want in zip(planned(x), jax.jit(jax.value_and_grad(moved))(x), strict=True):
        assert difference(got, want) is None
    found = planned.plan(x).context.planned
    split = {
        op.primitive
        for op, s, choices, rule in zip(found.graph.ops, found.strategies, found.space.strategies, found.space.rules, strict=True)
        if rule.shard_local and set(choices.factors[s]) & set(rule.halo)
    }
    assert split >= {"slice", "pad", "rev", "concatenate", "select_and_scatter_add"}


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x[3:35],
        lambda x: x[16:48:2],
        lambda x: lax.pad(x, 2.0, ((-3, 4, 1), (0, 0, 0))),
        lambda x: x[::-1],
        lambda x: lax.concatenate([x, jnp.sin(x[:32])], 0),
        lambda x: jax.grad(lambda x: jnp.sin(lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (2, 1), "SAME")).sum())(x),
    ],
)
def test_the_compiled_program_has_the_planned_permutes(op):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (64, 5)), "float32")
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P("x"), out_shardings=P("x"))(op)
    assert difference(step(x), jax.jit(op)(x)) is None
    planned = [(c.kind, c.bytes) for d in step.plan(x).decisions for m in d.reshards for c in m.collectives]
    emitted = [(c.kind, p.array.bytes) for c in collectives(step.compile(x).as_text(), MeshShape(("x",), (8,))) for p in c.parts]
    assert sorted(emitted) == sorted(planned) and {kind for kind, _ in planned} == {"collective-permute"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_loops_and_branches_fetch_too(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (64, 3)), "float32")

    def shifted(x, rows=1):
        return lax.pad(x, 0.0, ((rows, -rows, 0), (0, 0, 0)))

    def run(x):
        x, sums = lax.scan(lambda x, _: (jnp.tanh(shifted(x) + x[::-1]), x[16:48].sum()), x, None, length=3)
        x = lax.cond(sums[0] > 0, jax.checkpoint(lambda x: shifted(jnp.sin(x), 3)), lambda x: x[::-1], x)
        return (x * sums[1]).sum()

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(("x", "y")))(jax.value_and_grad(run))
    for got, want in zip(step(x), jax.jit(jax.value_and_grad(run))(x), strict=True):
        assert difference(got, want) is None
    fetched = {d.primitive for d in step.plan(x).decisions for m in d.reshards for c in m.collectives if c.kind == "collective-permute"}
    assert fetched >= {"pad", "rev"}


def test_a_pad_that_spreads_rows_apart_where_they_are_needs_no_neighbour_and_compiles():
    """XLA aborts on this one: rows 2 apart, the first and the last place cut off."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.arange(24.0).reshape(12, 2)

    def spread(x):
        return lax.pad(x, 7.0, ((-1, -1, 2), (0, 0, 0)))

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P("x"), out_shardings=P("x"))(spread)
    np.testing.assert_array_equal(step(x), spread(x))
    assert collectives(step.compile(x).as_text()) == ()


def test_dims_that_cannot_be_fetched_are_replicated():
    def is_replicated(fn, *args):
        eqn = next(e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name in FORMS)
        return rule_for(eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)[0].replicated

    def pool(window, stride, padding):
        return jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (window,), (stride,), padding).sum())

    x = jnp.zeros(48)
    assert is_replicated(lambda keys: keys[2:10], jax.random.split(jax.random.key(0), 16))
    assert is_replicated(pool(3, 2, "VALID"), x)  # 23 windows
    assert is_replicated(pool(1, 2, "VALID"), x)  # gaps
    assert not is_replicated(pool(3, 2, "SAME"), x) and not is_replicated(lambda x: x[2:10], x)


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 4, "y": 2}])
def test_windows_over_several_arrays_of_sharded_rows(axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (64, 8)), "float32")

    def latest(x):
        """The largest of each window and where it is; and the derivative of the largest."""

        def larger(a, b):
            first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
            return tuple(jnp.where(first, *pair) for pair in zip(a, b, strict=True))

        def pool(x):
            return lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (2, 1), "SAME")

        at = lax.broadcasted_iota("int32", x.shape, 0)
        both = lax.reduce_window((x, at), (-jnp.inf, np.int32(99)), larger, (3, 3), (2, 1), "SAME")
        return both, jax.jvp(pool, (x,), (jnp.sin(x),))[1]

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(tuple(axes)), out_shardings=P(tuple(axes)))(latest)
    for got, want in zip(jax.tree.leaves(step(x)), jax.tree.leaves(jax.jit(latest)(x)), strict=True):
        assert difference(got, want) is None


def summed(x, init, arrays):
    """Windows of sums along the rows, of one array or of two."""
    if arrays == 1:
        return lax.reduce_window(x, init, lax.add, (3, 1), (1, 1), "SAME")
    return lax.reduce_window((x, x), (init, init), lambda a, b: (a[0] + b[0], a[1] + b[1]), (3, 1), (1, 1), "SAME")


@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize("init", [0.0, 3.0])
def test_windows_take_their_initial_value_in_once(arrays, init):
    """XLA's partitioner takes it in for what lies beyond the array, too."""
    x = jnp.arange(64.0).reshape(16, 4)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P("x"), out_shardings=P("x"))(lambda x: summed(jnp.sin(x), init, arrays))
    want = jax.jit(lambda x: summed(jnp.sin(x), init, arrays))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), step(x), want)


@pytest.mark.parametrize("pin", [P(None, "x"), P(None, "x", "y"), P(None, None, ("x", "y"))])
def test_rows_and_columns_of_images_are_sharded_and_nothing_changes(pin):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    args = values()
    planned = shardplan.auto(mesh, cluster=NEAR, pins={"images": pin})(step)
    for got, want in itertools.zip_longest(jax.tree.leaves(planned(*args)), jax.tree.leaves(jax.jit(step)(*args))):
        assert difference(got, want) is None
    assert any(c.kind == "collective-permute" for d in planned.plan(*args).decisions for m in d.reshards for c in m.collectives)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_xla_exchanges_the_planned_halos():
    mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    params, _ = values((8, 64, 64))
    images = jax.ShapeDtypeStruct((1, 2048, 2048, 8), "float32")
    planned = shardplan.auto(mesh, cluster="h100", pins={"images": P(None, "x", "y")}, static_argnums=2)(step)
    report = planned.check(params, images, False, target="h100:8")
    emitted = [int(p.array.bytes) for c in report.compiled.collectives if c.kind == "collective-permute" for p in c.parts]
    moves = [c for d in planned.plan(params, images, False).decisions for m in d.reshards for c in m.collectives]
    exchanged = [int(c.bytes) for c in moves if c.kind == "collective-permute"]
    first, second, back = 2048 * 8 * 4, 1024 * 64 * 4, 512 * 64 * 4  # bytes of a row
    assert Counter(emitted) == {first: 2, second: 1, back: 1}
    assert Counter(exchanged) == Counter(emitted)  # filters' gradients read what was fetched before


def convolutions(params, x):
    """Two layers whose filters slide over rows, and their gradients: the first reads an input of the step."""

    def loss(params):
        h = x
        for w in params:
            h = jax.nn.relu(lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return jnp.mean(h.astype("float32") ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def planned_convolutions(target: str):
    """The plan of one large image, sharded by rows."""
    filters, images = (jax.ShapeDtypeStruct(of, "bfloat16") for of in ((3, 3, 64, 64), (1, 2048, 2048, 64)))
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = shardplan.auto(mesh, cluster=target, pins={"x": P(None, "x")}, compiler_options=None)(convolutions)
    return step.plan([filters] * 2, images)


def permutes(plan) -> list[tuple[str, int]]:
    """(phase of the op, bytes) of what shards exchange."""
    moves = ((d.phase, c) for d in plan.decisions for m in d.reshards for c in m.collectives)
    return [(phase, int(c.bytes)) for phase, c in moves if c.kind == "collective-permute"]


def test_a_filters_gradient_reads_the_halo_that_the_convolution_fetched():
    plan = planned_convolutions("h100")
    row = 2048 * 64 * 2
    assert permutes(plan) == [("forward", row)] * 4 + [("backward", row)] * 2  # two layers' inputs, and one gradient of such
    assert plan.comm_bytes == pytest.approx(6 * row + 2 * 7 / 8 * 2 * 9 * 64 * 64 * 2, rel=1e-3)


def test_exchanged_rows_are_collectives_that_the_schedule_may_hide(tmp_path):
    plan = planned_convolutions("h100")
    exchanged = [x for d in plan.decisions for m in d.reshards for x in m.collectives if x.kind == "collective-permute"]
    assert plan.seconds["communication"] >= sum(x.seconds for x in exchanged) > 0
    kernels = plan.context.planned.kernel_seconds
    assert plan.seconds["compute"] == pytest.approx(sum(kernels), rel=0.02)
    spans = [x for x in StepSchedule(plan.context.planned).spans if x.name.startswith("collective-permute")]
    assert len(spans) == len(exchanged)
    assert all(x.lane == "network" and x.sent_bytes for x in spans)
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json") == plan


def test_what_a_scan_gathers_stands_behind_its_kernel():
    """The totals of all shards before, of a cumulative sum."""
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = shardplan.auto(mesh, cluster="h100", in_shardings=P("x"), out_shardings=P("x"))(lambda x: jnp.cumsum(x, axis=0))
    plan = step.plan(jax.ShapeDtypeStruct((1 << 20, 64), "float32"))
    spans = StepSchedule(plan.context.planned).spans
    (gather,) = [x for x in spans if x.lane == "network"]
    assert gather.name.startswith("all-gather")
    assert any(x.lane == "compute" and x.end_s <= gather.start_s + 1e-9 for x in spans)


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_xla_sends_the_planned_halos_beside_other_kernels_as_planned():
    plan = planned_convolutions("h100")
    report = plan.check(target="h100:8")
    emitted = [int(p.array.bytes) for c in report.compiled.collectives if c.kind == "collective-permute" for p in c.parts]
    assert sorted(n for _, n in permutes(plan)) == sorted(emitted)
    found, predicted = schedule.seconds(report.compiled, Cluster.preset("h100")), plan.seconds
    assert predicted["communication"] == pytest.approx(found.collective_s, rel=0.05)
    assert predicted["communication"] - predicted["hidden"] == pytest.approx(found.exposed_s, rel=0.1)


def test_a_reversed_kernel_reads_the_copy_that_was_gathered_for_the_forward_pass():
    """A convolution's gradient reverses the kernel; ops with windows share copies as products do, and the copy may be kept."""

    def train(params, x):
        def loss(params):
            h = x
            for w in params:
                h = lax.conv_general_dilated(h, w.astype("bfloat16"), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                h = jax.nn.relu(h)
            return jnp.mean(h.astype("float32") ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = [jax.ShapeDtypeStruct((3, 3, 512, 512), "float32")] * 4
    x = jax.ShapeDtypeStruct((64, 32, 32, 512), "bfloat16")
    pins = {"params/**": P(None, None, "x"), "x": P("x")}
    plan = shardplan.auto(AbstractMesh((8,), ("x",)), cluster="h100", donate_argnums=0, pins=pins)(train).plan(params, x)
    gathered = [d.primitive for d in plan.decisions for m in d.reshards for c in m.collectives if c.kind == "all-gather"]
    assert gathered == ["conv_general_dilated"] * 4


@pytest.mark.parametrize("sizes", [(16, 16), (8, 24)])
def test_a_sharded_dim_is_sliced_by_pieces_and_not_gathered(sizes):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.arange(32.0 * 8).reshape(8, 32)

    def run(x):
        gate, up = lax.split(x, sizes, axis=1)
        return 2.0 * gate, up + 1.0

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(None, "x"), out_shardings=P(None, "x"))(run)
    for got, want in zip(step(x), run(x), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {c.kind for c in collectives(step.compile(x).as_text(), MeshShape(("x", "y"), (4, 2)))} == {"collective-permute"}


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@pytest.mark.parametrize("select", [lax.ge_p, lax.le_p])
def test_windows_of_integers_select_nothing_beyond_the_ends(dtype, select):
    params = {"window_dimensions": (3,), "window_strides": (1,), "padding": ((1, 1),), "select_prim": select}
    rng = np.random.default_rng(0)
    source, x = (jnp.asarray(rng.integers(100, 120, 16), dtype) for _ in range(2))
    for values in (x, -x):
        (report,) = check_rule(lambda s, x: primitives.select_and_scatter_add_p.bind(s, x, **params), source, values)
        assert report.shardings


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_an_input_is_copied_once_with_its_halo():
    """Of two convolutions, the filters' gradients and one input's gradient, three: with a row of each neighbour."""
    plan = planned_convolutions("h100")
    done = plan.check(target="h100:8").compiled
    copies = [i for i in done.module if i.opcode == "fusion" and any(258 in x.shape and x.size == 258 * 2048 * 64 for x in i.arrays)]
    assert len(copies) == 3
    assert plan.seconds["compute"] == pytest.approx(schedule.seconds(done, Cluster.preset("h100")).compute_s, rel=0.05)
    assert plan.memory().peak == pytest.approx(done.memory.peak_bytes, rel=0.15)  # filters' gradients run last
