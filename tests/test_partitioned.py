"""`custom_partitioning` calls: sharded as their Shardy rule says and their `partition` serves, with the numbers of the plain step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from on_shards import on_shards

import shardplan
from shardplan import ShardingWarning
from shardplan._jax import equations
from shardplan.strategies.rules import rule_for
from shardplan.testing import check_rule, difference
from shardplan.xla import available

pytestmark = pytest.mark.usefixtures("first_plan")


def partitioned(function, rule, *, moved=lambda s: s, **kinds):
    """The function, run per shard in the layouts it is asked for, each first changed by `moved`."""

    def partition(mesh, args, result):
        return mesh, function, *(jax.tree.map(lambda x: moved(x.sharding), of) for of in (result, args))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule, **kinds)
    return call


def joined(function, rule, join, **kinds):
    """The function, its results joined by `join(result, axes)` over the shards of the last dim of its first operand."""

    def partition(mesh, args, result):
        axes = (*args[0].sharding.spec, *[None] * args[0].ndim)[args[0].ndim - 1]
        run = (lambda *xs: jax.tree.map(lambda x: join(x, axes), function(*xs))) if axes else function
        return mesh, run, *(jax.tree.map(lambda x: x.sharding, of) for of in (result, args))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule, **kinds)
    return call


def softmax(x):
    return jax.nn.softmax(x * 2)


def flat(x):
    return x.reshape(x.shape[0], -1)


def product(x, w):
    return x @ w


def norm_backward(x, g):
    """Gradients of a product of every row with a vector, and the vector's, which sums over the rows."""
    return g * 2, (x * g).sum((0, 1))


def rows_joined(x, g):
    """The same on shards of rows, in a call of its own."""
    dx, dw = norm_backward(x, g)
    return dx, jax.jit(lambda x: jax.lax.psum(x, "a"))(dw)


def norm_partition(mesh, args, result):
    run = rows_joined if args[0].sharding.spec[0] else norm_backward
    return mesh, run, *(jax.tree.map(lambda x: x.sharding, of) for of in (result, args))


def with_scale(reduced, join):
    """Rows are reduced, on shards joined; the scale, next to them, is whole on every device."""

    def function(x, scale):
        return reduced(x, (0, 1)), scale * 2

    def partition(mesh, args, result):
        axes = args[0].sharding.spec[0]
        run = (lambda x, scale: (join(reduced(x, (0, 1)), axes), scale * 2)) if axes else function
        return mesh, run, *(jax.tree.map(lambda x: x.sharding, of) for of in (result, args))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule="a b i, s -> i, s", need_replication_factors=("b", "i", "s"))
    return call


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def by_types(mesh, operands, results):
    assert len(results) == 1
    batch = " ".join(f"b{i}" for i in range(operands[0].rank - 1))
    return f"{batch} i -> {batch} i", {"need_replication_factors": ("i",)}


X = array(4, 8, 16)
NORM_BACKWARD = custom_partitioning(norm_backward)
NORM_BACKWARD.def_partition(norm_partition, sharding_rule="a b i, a b i -> a b i, i")


def whole_rows(function, rule=None):
    """The function; its `partition` shards leading dims as the first operand is sharded, and never the last dim."""

    def partition(mesh, args, result):
        rows = NamedSharding(mesh, P(*(*args[0].sharding.spec, *[None] * args[0].ndim)[: args[0].ndim - 1]))
        return mesh, function, jax.tree.map(lambda _: rows, result), (rows, *[NamedSharding(mesh, P())] * (len(args) - 1))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule)
    return call


REDUCED = {"reduction_factors": ("i",)}
CASES = {
    "leading dims": (partitioned(softmax, "... i -> ... i", need_replication_factors=("i",)), (X,), "...0 ...1"),
    "made from types": (partitioned(softmax, by_types), (X,), "b0 b1"),
    "product": (joined(product, "a b i, i j -> a b j", jax.lax.psum, **REDUCED), (X, array(16, 8)), "a b i j"),
    "product that is not summed": (partitioned(product, "a b i, i j -> a b j", **REDUCED), (X, array(16, 8)), "a b j"),
    "no rule, rows": (whole_rows(softmax), (X,), "f0 f1"),
    "no rule, rows of the first operand": (whole_rows(lambda x, w: softmax(x) * w), (X, array(16, seed=1)), "f0 f1"),
    "maximum": (joined(lambda x: x.max(-1), "a b i -> a b", jax.lax.pmax, **REDUCED), (X,), "a b i"),
    "maximum, and what is whole": (with_scale(jnp.max, jax.lax.pmax), (X, array(4, seed=1)), "a"),
    "summed over rows alone": (NORM_BACKWARD, (X, array(4, 8, 16, seed=1)), "a i"),
    "compound": (partitioned(flat, "a b i -> a (b i)"), (X,), "a b i"),
    "permuted": (partitioned(lambda x: x[:, ::-1], "a b i -> a b i", permutation_factors=("b",)), (X,), "a i"),
    "two results": (partitioned(lambda x: (x + 1, x.sum(-1)), "a b i -> a b i, a b", reduction_factors=("i",)), (X,), "a b"),
}  # fmt: skip


def the_rule(fn, *args):
    (e,) = [e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name == "custom_partitioning"]
    return rule_for("custom_partitioning", [v.aval for v in e.invars], [v.aval for v in e.outvars], e.params, strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_factors_of_a_shardy_rule_shard(case):
    fn, args, free = CASES[case]
    rule, known = the_rule(fn, *args)
    assert known and rule.shard_local == set(free.split())
    (proof,) = check_rule(fn, *args, primitive="custom_partitioning")
    assert proof.how == "local" and {x.split(":")[0] for x in proof.shardings if " " not in x} == rule.shard_local


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_a_planned_step_runs_the_call_on_shards_in_scans_and_gradients(shape, kind):
    call = jax.custom_vjp(CASES["leading dims"][0])
    backward = partitioned(
        lambda y, g: 2 * y * (g - (g * y).sum(-1, keepdims=True)), "... i, ... i -> ... i", need_replication_factors=("i",)
    )
    call.defvjp(lambda x: (y := call(x), y), lambda y, g: (backward(y, g),))

    @jax.value_and_grad
    def loss(w, x):
        body = jax.checkpoint(lambda x, w: (call(x @ w), ()))
        return (jax.lax.scan(body, x, w)[0] ** 2).sum()

    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))
    w, x = array(3, 16, 16), array(8, 4, 16, seed=1)
    step, n = on_shards("custom_partitioning", loss, w, x, mesh=mesh, in_shardings=(None, P("a")))
    assert n >= 2 and "CustomSPMDPartitioning" not in step.lower(w, x).as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_over_shards_are_the_plans_own(kind):
    """A bias is added to the complete sum, and a gradient is summed over the rows, once."""
    times, backward = CASES["product"][0], NORM_BACKWARD

    def step(x, w, scale):
        y = times(x, w) + 1
        return backward(x, x * scale)[1] + (y**2).sum()

    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)
    x, w = array(8, 4, 16), array(16, 16, seed=1)
    planned, n = on_shards(
        "custom_partitioning", step, x, w, array(16, seed=2), mesh=mesh, in_shardings=(P("a", None, "b"), P("b"), None)
    )
    assert n == 2 and "CustomSPMDPartitioning" not in planned.lower(x, w, array(16)).as_text()


def test_a_result_that_is_whole_on_every_device_is_not_summed_next_to_one_that_is():
    x, scale = array(8, 4, 16), array(4, seed=1)
    step = shardplan.auto(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,)), cluster=NEAR, in_shardings=(P("a"), None))
    with pytest.warns(ShardingWarning, match=r"joins some results over the shards of a by a sum, and not results\[1\]"):
        got = step(with_scale(jnp.sum, jax.lax.psum))(x, scale)
    for one, other in zip(got, (x.sum((0, 1)), scale * 2), strict=True):
        assert difference(one, other) is None


def test_operations_are_those_of_the_call():
    fn, args, _ = CASES["product"]
    assert the_rule(fn, *args)[0].flops == 2 * 4 * 8 * 16 * 8


def without_axes(sharding):
    return NamedSharding(sharding.mesh, P(*[None] * len(sharding.spec)))


def last_dim(on_shards, rule="a b i -> a b"):
    """A sum over the last dim, or what the rule makes of it, with the last dim alone sharded and run so."""
    function = (lambda x: x.sum(-1)) if rule == "a b i -> a b" else jnp.sin

    def partition(mesh, args, result):
        return mesh, on_shards, *(jax.tree.map(lambda x: x.sharding, of) for of in (result, args))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule, need_replication_factors=("a", "b"))
    return call


def as_result(function):
    """A call without a rule that shards operands as its result, also where the numbers are wrong then."""

    def partition(mesh, args, result):
        return mesh, function, result.sharding, jax.tree.map(lambda _: result.sharding, args)

    call = custom_partitioning(function)
    call.def_partition(partition)
    return call


REFUSED = {
    "not summed": (last_dim(lambda x: x.sum(-1)), r"does not join results\[0\] over the shards of i"),
    "goes on": (last_dim(lambda x: jax.lax.psum(x.sum(-1), "i") + 1), "computes add of what it has joined over shards"),
    "in a loop": (
        last_dim(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jax.lax.psum(y, "i"), x.sum(-1))),
        "runs scan over the shards of i",
    ),
    "gathers": (last_dim(lambda x: jax.lax.all_gather(x, "i", axis=2, tiled=True).sum(-1)), "runs all_gather over the shards of i"),
    "joins shards": (last_dim(lambda x: jax.lax.psum(x, "i"), "a b i -> a b i"), r"joins results\[0\] over shards that the rule keeps"),
    "partition gathers": (partitioned(jnp.sin, "a b i -> a b i", moved=without_axes), "its partition answers"),
    "shapes": (partitioned(lambda x: jnp.zeros((4, 8, 16)), "a b i -> a b i"), "its lower_fn makes float32"),
    "no rule": (partitioned(jnp.sin, None), "it has no sharding_rule"),
    "no rule, as the result": (as_result(softmax), "it has no sharding_rule"),
    "unfit": (partitioned(jnp.sin, "a b -> a b"), "its sharding_rule does not fit: it names 2 dims of an array with 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_runs_replicated_and_the_warning_names_the_cause(case):
    fn, why = REFUSED[case]
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    with pytest.warns(ShardingWarning, match=r"no rule for primitive 'custom_partitioning'[\s\S]*" + why):
        got = shardplan.auto(mesh, cluster=NEAR)(lambda x: fn(x + 1))(X)
    assert difference(got, fn.fun(X + 1)) is None


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("case", ["leading dims", "product", "no rule, rows"])
def test_calls_compile_for_absent_gpus_on_shards_as_planned(case):
    """With the last dim of the first operand sharded where it may be: products of parts are summed."""
    fn, args, free = CASES[case]
    shapes = [jax.ShapeDtypeStruct((*x.shape[:-2], 2048, 4096), "float32") for x in args]
    pinned = P("b", None, "a") if "i" in free.split() else P("b", "a")
    planned = shardplan.auto(
        jax.sharding.AbstractMesh((2, 4), ("a", "b")), cluster="h100", in_shardings=(pinned, *[None] * (len(args) - 1))
    )

    def step(x, *rest):
        return fn(x, *(jnp.concatenate([w, w]) for w in rest)).sum(1)

    planned = planned(step)
    (call,) = [d for d in planned.plan(*shapes).decisions if d.primitive == "custom_partitioning"]
    report = planned.check(*shapes, target="h100:8")
    assert len(call.strategy) == 2 and report.ok and report.collectives_ratio == pytest.approx(1, abs=0.02)
