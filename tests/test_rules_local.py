"""Ops that run on every device's own shards, since XLA would move what need not move: same numbers, nothing moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.strategies.register import register_rule
from shardplan.strategies.rule import RULES
from shardplan.testing import check_rule, difference
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.2, 0.9, shape), "float32")


def conv(**groups):
    dims = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims, **groups)


solve = lax.linalg.triangular_solve
TRIANGLE = jnp.eye(6) + jnp.tril(array(8, 6, 6))
CASES = {
    "fft": (jnp.fft.fft, (array(8, 12),), P("x")),
    "rfft2": (lambda x: jnp.fft.rfft2(x), (array(8, 6, 10),), P("x")),
    "triangular_solve": (lambda a, b: solve(a, b, left_side=True, lower=True), (TRIANGLE, array(8, 6, 4)), P("x")),
    "right-hand sides": (lambda b: solve(TRIANGLE[0], b, left_side=True, lower=True), (array(6, 8),), P(None, "x")),
    "tridiagonal_solve": (lambda d, b: lax.linalg.tridiagonal_solve(d - 0.2, d + 2, d - 0.3, b), (array(8, 6), array(8, 6, 3)), P("x")),
    "igamma": (lambda a, x: jax.scipy.special.gammainc(a, x), (array(8, 3), array(8, 3, seed=1)), P("x")),
    "betainc": (jax.scipy.special.betainc, (array(8), array(8, seed=1), array(8, seed=2)), P("x")),
    "grouped, by batch": (conv(feature_group_count=2), (array(8, 4, 4, 8), array(3, 3, 4, 6)), P("x")),
    "depthwise, by group": (conv(feature_group_count=8), (array(2, 4, 4, 8), array(3, 3, 1, 16)), P(None, None, None, "x")),
    "batch groups": (conv(batch_group_count=8), (array(16, 4, 4, 4), array(3, 3, 4, 8)), P("x")),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("case", CASES)
def test_runs_on_shards_and_moves_nothing(case, kind):
    fn, args, spec = CASES[case]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto if kind == "auto" else AxisType.Explicit,))
    whole = jax.tree.map(lambda x: P() if x.ndim == 4 and x.shape[:2] == (3, 3) else spec, args)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=whole if "by batch" in case else (spec, *[None] * (len(args) - 1)))(fn)
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert difference(got, want) is None
    planned = step.plan(*args).context.planned
    at = next(i for i, op in enumerate(planned.graph.ops) if op.traits.runs_on_shards)
    assert any(planned.space.strategies[at].factors[planned.strategies[at]]), "the case is not sharded"
    assert collectives(step.compile(*args).as_text()) == ()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("spec", [P("x"), P(None, None, None, "x"), P(None, "x")])
def test_gradients_of_max_pooling_run_on_shards(dtype, spec):
    def pooled(x):
        return (lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME").astype("float32") ** 2).sum()

    x, mesh = array(8, 16, 4, 8).astype(dtype), jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=spec, out_shardings=spec)(jax.grad(pooled))
    assert difference(step(x), jax.grad(pooled)(x)) is None
    assert collectives(step.compile(x).as_text()) == ()


@pytest.mark.parametrize("kernel", [1, 3])
def test_groups_and_the_channels_of_a_group_are_sharded_at_once(kernel):
    """With a kernel of one XLA does not compile this."""
    mesh = jax.make_mesh((4, 2), ("g", "c"), axis_types=(AxisType.Auto,) * 2)
    specs = P(None, None, ("g", "c")), P(None, "c", "g")

    def groups(x, w):
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=4)

    x, w = array(2, 6, 16), array(kernel, 4, 8)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=specs, out_shardings=P(None, None, "g"))(groups)
    assert difference(step(x, w), groups(x, w)) is None
    assert {c.kind for c in collectives(step.compile(x, w).as_text())} == {"all-reduce"}


def cholesky(x):
    """A call of a library that XLA knows nothing of."""
    return jax.ffi.ffi_call("lapack_spotrf_ffi", [x, jax.ShapeDtypeStruct(x.shape[:-2], "int32")])(x, uplo=np.uint8(ord("L")))[0]


@pytest.mark.parametrize(
    ("fn", "pattern", "options"),
    [
        (cholesky, "a b c -> a b c", {}),
        (lambda x: cholesky(x).sum(0), "a b c -> b c", {"reduce": "a"}),
        (lambda x: cholesky(x).min(0), "a b c -> b c", {"reduce": "a=min"}),
        (lambda x: cholesky(x).reshape(-1, x.shape[-1]), "a b c -> (a b) c", {}),
    ],
    ids=["split", "summed", "least", "joined"],
)
@pytest.mark.parametrize("local", [False, True])
def test_a_primitive_of_the_users_runs_on_shards_where_its_rule_says_so(local, fn, pattern, options):
    mine = Primitive("my_factors")
    mine.def_impl(jax.jit(fn))
    mine.def_abstract_eval(lambda x: jax.typeof(jax.eval_shape(fn, x)))
    mlir.register_lowering(mine, mlir.lower_fun(fn, multiple_results=False))
    register_rule(mine, pattern, replicated="b c", **options, shard_local=local)
    try:
        x, mesh = jnp.tile(jnp.eye(6), (8, 1, 1)) + 0.1, jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        jnp.linalg.cholesky(x)  # has jax load the library
        step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P("x"))(mine.bind)
        assert difference(step(x), fn(x)) is None
        assert ("all-gather" in {c.kind for c in collectives(step.compile(x).as_text())}) != local
        assert check_rule(mine.bind, x)[0].shardings
    finally:
        del RULES["my_factors"]


def test_an_initial_value_counts_once():
    """XLA counts it for every piece in which a resharded operand arrives."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = jnp.arange(128).reshape(8, 16)

    def total(x):
        return lax.reduce(x, np.int32(3), lambda a, b: a + b, (0,))

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P("x"), out_shardings=P("x"))(total)
    np.testing.assert_array_equal(step(x), np.asarray(x).sum(0) + 3)


def test_a_transform_is_in_rows_whatever_layout_the_arrays_around_it_have():
    """XLA for CPU gathers along the last dim column by column, and does not transform what lies so."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    x, y = array(8, 6), array(8, 6, seed=1)

    def loss(x, y):
        return (jax.scipy.signal.fftconvolve(x, y) ** 2).sum()

    run = jax.grad(loss, (0, 1))
    for got, want in zip(shardplan.auto(mesh, cluster=NEAR, in_shardings=P(None, "x"))(run)(x, y), run(x, y), strict=True):
        assert difference(got, want) is None


def test_derivatives_are_those_of_the_function():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x = array(8, 12)

    def power(x):
        return (jnp.abs(jnp.fft.fft(x)) ** 2).sum()

    got = shardplan.auto(mesh, cluster=NEAR)(jax.value_and_grad(power))(x)
    for a, b in zip(got, jax.value_and_grad(power)(x), strict=True):
        assert difference(a, b) is None
