"""Dims that a mesh axis does not divide: sharded in nearly equal blocks inside the step, with the same numbers."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clusters import H100, NEAR
from jax import lax
from rule_examples import EXAMPLES
from unequal_blocks import unequal_strategies, wrong_strategies

import shardplan
from shardplan.ir.traits import Traits
from shardplan.mesh import layout as layouts
from shardplan.mesh.layout import Layout, MeshShape, splits_unevenly
from shardplan.mesh.reshard import Resharder
from shardplan.strategies.enumerate import enumerate_strategies
from shardplan.strategies.register import parse
from shardplan.strategies.rule import Rule
from shardplan.strategies.uneven import uneven_factors
from shardplan.testing.check import run_equations

pytestmark = pytest.mark.usefixtures("first_plan")

MESH = MeshShape(("x", "y"), (2, 3))


def make_mesh(shape, kind="Auto"):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("x", "y")[: len(shape)], axis_types=(jax.sharding.AxisType[kind],) * len(shape))


def product() -> Rule:
    left, right = parse("a b, b c -> a c")
    return Rule(left, right, reduce={"b": "sum"})


@pytest.mark.parametrize(
    ("n", "shards", "unequal"), [(61, 8, True), (64, 8, False), (12, 8, False), (64, 12, True), (25, 8, True), (3, 4, False)]
)
def test_blocks_may_be_filled_up_by_three_tenths(n, shards, unequal):
    assert splits_unevenly(n, shards) is unequal


def test_an_unequal_factor_is_sharded_along_one_axis():
    found = enumerate_strategies(product(), {"a": 61, "b": 6, "c": 4}, MESH, uneven={"a"}).factors
    assert {c for c in found if "a" in c} == {("a", None), (None, "a"), ("a", "b"), ("b", "a"), ("c", "a")}
    assert not any("a" in c for c in enumerate_strategies(product(), {"a": 61, "b": 6, "c": 4}, MESH).factors)


def test_work_and_shards_are_those_of_the_largest_block():
    found = enumerate_strategies(product(), {"a": 61, "b": 6, "c": 4}, MESH, uneven={"a"})
    s = found.factors.index(("b", "a"))
    assert found.work[s] == pytest.approx(21 / 61 / 2)
    assert [of[s] for of in found.shards] == pytest.approx([2 * 61 / 21, 2, 61 / 21])


RULES = {
    "products": (product(), Traits(matmul=True), "abc"),
    "ends of the step": (Rule((), parse("-> a b")[1]), Traits(border=True, step_input=True), ""),
    "compound dims": (Rule(*parse("(a b) c -> a b c"), fusion="view"), Traits(), "c"),
    "kernels on shards": (Rule(*parse("a b -> a b"), shard_local=frozenset("a"), fusion="loop"), Traits(), "b"),
    "windows": (Rule(*parse("a b -> a b"), halo={"a": {}}, fusion="loop"), Traits(), "b"),
    "kernels of libraries": (Rule(*parse("a b -> a b")), Traits(), ""),
}


@pytest.mark.parametrize(("rule", "traits", "factors"), RULES.values(), ids=RULES)
def test_factors_that_may_be_unequal(rule, traits, factors):
    assert uneven_factors(rule, traits) == frozenset(factors)


PROVEN = {
    **dict.fromkeys(("and", "broadcast_in_dim", "concatenate", "exp", "iota", "reduce_max", "reduce_or", "reduce_prod"), 1),
    **dict.fromkeys(("reduce_sum", "select_n", "slice", "transpose"), 1),
    **{"dot_general": 2, "gather": 2, "reshape": 2, "scatter-add": 4},
}
"""Primitive -> how many of its examples."""


@pytest.mark.parametrize(("primitive", "most"), PROVEN.items(), ids=PROVEN)
def test_what_blocks_are_filled_up_with_is_never_read(primitive, most, monkeypatch):
    """Also with blocks that hold nothing; drawn calls of every primitive: `benchmarks/rules_fuzz.py --proof unequal`."""
    monkeypatch.setattr(layouts, "MOST_PADDING", 1.0)
    proven = 0
    for example in [e for e in EXAMPLES if e.primitive == primitive][-most:]:
        found, values = [], example.values()
        run_equations(jax.make_jaxpr(example.fn)(*values), values, lambda *pair, found=found: found.append(pair))
        for eqn, operands in found:
            if eqn.primitive.name == primitive and (strategies := list(unequal_strategies(eqn, MESH))):
                operands = [jnp.asarray(x, v.aval.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
                assert not list(wrong_strategies(eqn, operands, make_mesh((2, 3)), strategies))
                proven += len(strategies)
    assert proven


def test_xla_adds_what_it_fills_up_updates_with():
    """Fact uneven-updates-are-not-masked: if this fails, `shardplan/emit/uneven.py` is needed no more."""
    mesh = make_mesh((2, 3))

    def rows(updates, indices, constrain):
        updates = jnp.exp(constrain(updates))  # what was filled up with zeros is ones now
        return jnp.zeros((16, 4)).at[indices].add(updates, mode="promise_in_bounds")

    args = jnp.zeros((64, 4)), jnp.arange(64) % 15 + 1
    placed = jax.jit(lambda *xs: rows(*xs, lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("y")))))(*args)
    plain = jax.jit(lambda *xs: rows(*xs, lambda x: x))(*args)
    np.testing.assert_allclose(placed[1:], plain[1:], rtol=1e-6)
    assert (placed[0] == 2).all() and not plain[0].any()


EACH = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))


@pytest.mark.parametrize(("dtype", "beyond"), [("uint32", 2**32 - 1), ("uint8", 255), ("int16", -1), ("int32", 2**31 - 1)])
def test_indices_of_any_dtype_may_lie_in_unequal_blocks(dtype, beyond):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 6, (8, 6, 1))
    indices[::2, 0] = beyond
    operands = [jnp.asarray(x) for x in (rng.normal(size=(8, 4)), indices.astype(dtype), rng.normal(size=(8, 6)))]
    (eqn,) = jax.make_jaxpr(lambda *xs: lax.scatter_add(*xs, EACH, mode="fill"))(*operands).eqns
    strategies = list(unequal_strategies(eqn, MESH))
    assert strategies and not list(wrong_strategies(eqn, operands, make_mesh((2, 3)), strategies))


ABORTS = """
import jax, jax.numpy as jnp
from jax import lax
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
split = lambda x: lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P("x")))
each = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))
step = lambda x, i, u: split(lax.scatter_add(split(x * 2), split(i + 1), split(u * 2), each, mode="clip"))
jax.jit(step)(jnp.ones((60, 16)), jnp.zeros((60, 16, 1), {dtype!r}), jnp.ones((60, 16)))
"""


@pytest.mark.parametrize(("dtype", "aborts"), [("int32", False), ("uint32", True)])
def test_xla_aborts_on_indices_of_other_dtypes_in_unequal_blocks(dtype, aborts):
    """Fact uneven-indices-of-int32: if this fails, `shardplan/emit/uneven.py` may leave indices as they are."""
    done = subprocess.run([sys.executable, "-c", ABORTS.format(dtype=dtype)], capture_output=True, text=True)
    assert (done.returncode != 0) is aborts, done.stderr[-2000:]
    assert ("Check failed" in done.stderr) is aborts


def paths(shape, src: Layout, dst: Layout) -> list[tuple[str, float]]:
    return [(s.kind, s.bytes) for s in Resharder(MeshShape(("x", "y"), (4, 2)), H100).path(shape, 4, src, dst)]


def test_collectives_carry_blocks_that_are_filled_up():
    rows, columns, whole = Layout((("x",), ())), Layout(((), ("x",))), Layout(((), ()))
    assert paths((1021, 768), rows, whole) == [("all-gather", 1024 * 768 * 4)]
    assert paths((1021, 768), columns, rows) == [("all-to-all", 1024 * 768)]


def test_a_sum_is_complete_before_it_is_sharded_unequally():
    partial = Layout(((), ()), (("x", "sum"),))
    assert [kind for kind, _ in paths((1021, 767), partial, Layout((("x",), ())))] == ["all-reduce", "slice"]
    assert [kind for kind, _ in paths((1021, 768), partial, Layout(((), ("x",))))] == ["reduce-scatter"]
    moved = Layout((("y",), ()), (("x", "sum"),))
    assert next(kind for kind, _ in paths((1021, 768), moved, Layout(((), ("y",))))) == "all-reduce"


def test_a_sum_in_unequal_blocks_leads_to_every_layout_of_equal_ones():
    partial = Layout((("x",), ()), (("y", "sum"),))
    assert next(kind for kind, _ in paths((1022, 767), partial, Layout((("y",), ())))) == "all-reduce"


def small_model(vocabulary=101, width=36, rows=31, length=17):
    """A language model of two scanned layers with a tied table; no size but the width is a multiple of 2 or 3."""

    def create():
        keys = jax.random.split(jax.random.key(0), 3)
        layers = {
            "up": 0.1 * jax.random.normal(keys[0], (2, width, 5 * width)),
            "down": 0.1 * jax.random.normal(keys[1], (2, 5 * width, width)),
        }
        return {"table": jax.random.normal(keys[2], (vocabulary, width)), "layers": layers}

    def loss(params, ids):
        def layer(x, p):
            scores = jnp.einsum("btd,bsd->bts", x, x) / width
            x = x + jax.nn.softmax(jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)) @ x
            return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

        x, _ = lax.scan(jax.checkpoint(layer), params["table"][ids], params["layers"])
        logits = (x / jnp.abs(x).max(-1, keepdims=True)) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    def step(params, ids):
        value, grads = jax.value_and_grad(loss)(params, ids)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return create, step, np.random.default_rng(0).integers(0, vocabulary, (rows, length)).astype(np.int32)


def unequal_dims(plan) -> set[int]:
    """Sizes of the dims that some op shards unevenly."""
    planned, found = plan.context.planned, set()
    for op, of, s in zip(planned.graph.ops, planned.space.strategies, planned.strategies, strict=True):
        for x, made in zip(op.outs, of.results, strict=True):
            pairs = zip(x.shape, made[s].dims, strict=True)
            found |= {n for n, axes in pairs if n % planned.space.mesh.size(*axes)}
    return found


@pytest.mark.parametrize(("shape", "kind"), [((8,), "Explicit"), ((2, 3), "Auto")])
def test_same_numbers(shape, kind, tmp_path):
    create, step, ids = small_model()
    want = jax.jit(step)(create(), ids)
    mesh = make_mesh(shape, kind)
    plan = shardplan.auto(mesh, cluster=NEAR, search="propagation")(step).plan(jax.eval_shape(create), ids)
    assert unequal_dims(plan) & {31, 17, 101}
    plan.save(tmp_path / "plan.json")
    planned = shardplan.auto(mesh, plan=tmp_path / "plan.json")(step)
    got = planned(planned.init(create), ids)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1e-3, float(np.abs(y).max())) if jnp.size(y) > 1 else 1e-5)


def test_a_constraint_in_the_step_may_shard_unequally():
    mesh = make_mesh((2, 3))

    def step(x):
        return lax.with_sharding_constraint(x * 2, jax.P(None, "y")).sum(0)

    x = jnp.arange(6 * 13.0).reshape(6, 13)
    planned = shardplan.auto(mesh, cluster=NEAR)(step)
    assert unequal_dims(planned.plan(x)) == {13}
    np.testing.assert_array_equal(planned(x), 2 * x.sum(0))


def test_rows_that_no_axis_divides_share_the_work():
    """64 sequences on 12 × 8 devices: 6 on each, 72 in all, where only 8 of 96 devices would have had parts of their own."""
    mesh = jax.sharding.AbstractMesh((12, 8), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(w, x):
        return w - jax.grad(lambda w: (jax.nn.relu(x @ w) ** 2).mean())(w)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 4096), (64, 4096, 4096)))
    plan = shardplan.auto(mesh, cluster="h100")(step).plan(w, x)
    assert plan.context.planned.product_flops < 1.13 * 4 * 64 * 4096**3 / 96
