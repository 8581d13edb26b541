"""Dropless experts by ragged products: a device has its rows of every expert, or every row of its experts, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.testing import check_rule, difference
from shardplan.xla import available

S, CHOSEN = jax.ShapeDtypeStruct, 2
WEIGHTS = "gate", "up", "down"


def experts(p, x):
    """Every token's two best experts, each with its tokens in consecutive rows; no token is dropped."""
    x = x * p["scale"]
    flat, gates = choose(p, x)
    order = jnp.argsort(flat)
    rows, sizes = x[order // CHOSEN], jnp.bincount(flat, length=len(p["up"])).astype("int32")
    h = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes)) * lax.ragged_dot(rows, p["up"], sizes)
    y = lax.ragged_dot(h, p["down"], sizes) * gates[order][:, None]
    return x + jnp.zeros_like(x).at[order // CHOSEN].add(y)


def choose(p, x):
    gates, chosen = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    return chosen.reshape(-1), gates.reshape(-1)


def step(p, x, y):
    def loss(p):
        return jnp.mean((experts(p, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value


def model(groups, width, hidden, dtype="float32"):
    up, down = (groups, width, hidden), (groups, hidden, width)
    shapes = {"scale": (width,), "router": (width, groups), "gate": up, "up": up, "down": down}
    return {name: S(shape, dtype) for name, shape in shapes.items()}


def drawn(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, x.dtype), tree)


def factors(plan) -> list[dict[str, int]]:
    """Of every ragged product: its sharded factors ("a": rows, "g": groups) with the devices over which they are."""
    planned, found = plan.context.planned, []
    for op, of, s in zip(planned.graph.ops, planned.space.strategies, planned.strategies, strict=True):
        if op.traits.grouped_matmul:
            sizes: dict[str, int] = {}
            for a, n in zip(of.factors[s], planned.space.mesh.sizes, strict=True):
                if a:
                    sizes[a] = sizes.get(a, 1) * n
            found.append(sizes)
    return found


@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "pinned"), [((8,), P()), ((8,), P("a")), ((2, 4), P("b")), ((2, 4), P(("a", "b")))])
def test_same_numbers(shape, kind, pinned):
    args = drawn((model(8, 16, 32), S((64, 16), "float32"), S((64, 16), "float32")))
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))
    pins = {f"p/{name}": pinned for name in WEIGHTS}
    planned = shardplan.auto(mesh, cluster=NEAR, pins=pins)(step)
    want, got = args[0], args[0]
    for _ in range(2):
        (want, loss), (got, planned_loss) = jax.jit(step)(want, *args[1:]), planned(got, *args[1:])
    assert difference(planned_loss, loss) is None
    assert [difference(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)] == [None] * 5
    used = factors(planned.plan(*args))
    assert len(used) == 9 and any("g" in x or "a" in x for x in used)


BATCHED = {
    "one set of sizes": ((((2,), (2,)), ((0,), (0,))), [1], [1], (4, 16, 2), (4, 4, 2, 6), [3, 1, 4, 8]),
    "sizes per batch": ((((2,), (2,)), ((0,), (0,))), [1], [1], (4, 8, 2), (4, 2, 2, 6), [[3, 5], [0, 8], [8, 0], [1, 2]]),
    "rows contracted": ((((1, 2), (1, 2)), ((0,), (0,))), [1], [], (2, 8, 2), (2, 8, 2), [[3, 5], [0, 8]]),
    "groups of batches": ((((2,), (1,)), ((0,), (0,))), [0], [], (8, 16, 4), (8, 4, 6), [3, 5]),
}


@pytest.mark.parametrize("case", BATCHED)
def test_batches_shard(case):
    numbers, rows, groups, left, right, sizes = BATCHED[case]
    dims = lax.RaggedDotDimensionNumbers(numbers, rows, groups)
    x, y = drawn((S(left, "float32"), S(right, "float32")))
    step = lambda x, y: lax.ragged_dot_general(x, y, jnp.array(sizes, "int32"), dims)  # noqa: E731
    (report,) = check_rule(step, x, y)
    assert report.shardings and report.rule.startswith("a ")
    assert difference(shardplan.auto(jax.make_mesh((8,), ("a",)), cluster=NEAR)(step)(x, y), step(x, y)) is None


NARROW = [(128, "uint8", True), (256, "uint8", False), (128, "int8", False), (64, "int8", True)]


@pytest.mark.parametrize(("rows", "dtype", "counts"), NARROW)
def test_sizes_that_cannot_count_the_rows_wrap_around_as_in_jax(rows, dtype, counts):
    x, w = drawn((S((rows, 64), "float32"), S((8, 64, 64), "float32")))
    sizes = jnp.array([rows // 4, 0, 1, rows // 2, 0, 0, 3, rows // 8], dtype)
    planned = shardplan.auto(jax.make_mesh((8,), ("a",)), cluster=NEAR, pins={"rhs": P("a")})(lax.ragged_dot)
    assert difference(planned(x, w, sizes), jax.jit(lax.ragged_dot)(x, w, sizes)) is None
    (report,) = check_rule(lax.ragged_dot, x, w, sizes)
    assert report.rule.endswith("replicated s") == counts


def small_experts_of_many_tokens():
    return model(8, 512, 1024, "bfloat16"), S((16384, 512), "bfloat16"), S((16384, 512), "bfloat16")


def large_experts_of_few_tokens():
    return model(64, 4096, 8192, "bfloat16"), S((2048, 4096), "bfloat16"), S((2048, 4096), "bfloat16")


CHOICES = [(small_experts_of_many_tokens, "a"), (large_experts_of_few_tokens, "g")]


def planner(**options):
    return shardplan.auto(jax.sharding.AbstractMesh((8,), ("x",)), cluster="h100", donate_argnums=0, **options)(step)


@pytest.mark.parametrize(("case", "sharded"), CHOICES)
def test_tokens_go_to_large_experts_and_small_experts_to_tokens(case, sharded):
    """Either is faster than to shard the experts' columns, which leaves every device the masked copies of all rows for all experts."""
    free = planner().plan(*case())
    columns = {"p/gate": P(None, None, "x"), "p/up": P(None, None, "x"), "p/down": P(None, "x", None)}
    assert factors(free) == [{sharded: 8}] * 9
    assert free.seconds["total"] < planner(pins=columns).plan(*case()).seconds["total"]


def test_a_plan_is_saved_and_read(tmp_path):
    plan = planner().plan(*large_experts_of_few_tokens())
    plan.save(tmp_path / "plan.json")
    assert shardplan.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize(("case", "sharded"), CHOICES)
def test_xla_multiplies_and_sends_what_is_planned(case, sharded):
    report = planner().check(*case(), target="h100:8")
    assert report.flops_ratio == pytest.approx(1, abs=0.01) and report.collectives_ratio == pytest.approx(1, abs=0.01)
    assert all("test_ragged.py" in f.source for f in report.comparison.findings)
