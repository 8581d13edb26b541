"""In which order dims lie in memory around products, and what is transposed for that: the plan's transposes are those XLA compiles."""

import math

import jax
import jax.numpy as jnp
import pytest

from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, compile
from shardplan.xla.hlo.products import dims_of
from shardplan.xla_model.physical_order import PhysicalOrders, physical_orders, reshaped
from shardplan.xla_model.row_kernels import reduces_columns

needs_gpu_compiler = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

F32, BF16 = jnp.float32, jnp.bfloat16
B, T, G, R, K = 4, 1024, 8, 4, 64
LARGE = 1 << 18
GROUPED, HEADS, KEYS = (B, T, G, R, K), (B, T, G * R, K), (B, T, G, K)


def weights(scores):
    mask = jnp.tri(T, dtype=bool) if scores.shape[-2] == T else True
    return jax.nn.softmax(jnp.where(mask, scores.astype(F32) * K**-0.5, -1e9)).astype(BF16)


def einsum(scores, values):
    return lambda q, k, v: jnp.einsum(values, weights(jnp.einsum(scores, q, k)), v)


def of_heads(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return (weights(q @ k.transpose(0, 1, 3, 2)) @ v).transpose(0, 2, 1, 3)


def xla_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


ATTENTION = {
    "grouped": (einsum("btgrk,bsgk->bgrts", "bgrts,bsgk->btgrk"), GROUPED, KEYS),
    "groups last": (einsum("btkgd,bskd->bkgts", "bkgts,bskd->btkgd"), GROUPED, KEYS),
    "queries first": (einsum("btgrk,bsgk->bgtrs", "bgtrs,bsgk->btgrk"), GROUPED, KEYS),
    "heads": (einsum("bthd,bshd->bhts", "bhts,bshd->bthd"), HEADS, HEADS),
    "heads first": (of_heads, HEADS, HEADS),
    "jax.nn": (xla_attention, HEADS, KEYS),
}


def gradient(fn):
    def both(q, k, v, dy):
        y, back = jax.vjp(fn, q, k, v)
        return y, back(dy)

    return both


def planned(fn, *args) -> tuple[StepFacts, PhysicalOrders]:
    facts = StepFacts.of(parse(jax.make_jaxpr(fn)(*args)), MeshShape(("x",), (1,)), Cluster.preset("h100").device)
    return facts, physical_orders(facts.graph, facts.rules)


def planned_transposes(fn, *args) -> list[tuple[int, bool]]:
    """Elements, and whether they move without tiles."""
    facts, orders = planned(fn, *args)
    found = [(math.prod(facts.graph.values[v].shape), untiled) for v, untiled in orders.written.items() if facts.materialised[v]]
    found += [(facts.graph.ops[at].ins[k].size, untiled) for at, some in orders.transposed.items() for k, untiled in some]
    return sorted(x for x in found if x[0] > LARGE)


def fusions(fn, *args) -> list:
    """Of every fused kernel without products, whether it goes element by element, and its instructions."""
    module = compile(jax.jit(fn), *args, target="h100:1").module
    kernels = (i for i in module.computations[module.entry] if i.opcode == "fusion")
    inside = [(i.attribute("kind") == "kLoop", [x for n in i.callees["calls"] for x in module.computations[n]]) for i in kernels]
    return [(loop, body) for loop, body in inside if all(x.opcode != "dot" for x in body)]


def compiled_transposes(fn, *args) -> list[tuple[int, bool]]:
    transposes = [(loop, x) for loop, body in fusions(fn, *args) for x in body if x.opcode == "transpose"]
    moved = ((x.arrays[0].size, loop and dims_of(x, "dimensions")[-1] != len(x.arrays[0].shape) - 1) for loop, x in transposes)
    return sorted(x for x in moved if x[0] > LARGE)


def a(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("name", ATTENTION)
class TestAttention:
    pytestmark = needs_gpu_compiler

    def test_transposes_of_the_forward_pass_are_those_of_the_plan(self, name):
        fn, query, key = ATTENTION[name]
        args = a(*query), a(*key), a(*key)
        assert compiled_transposes(fn, *args) == planned_transposes(fn, *args)

    def test_so_are_those_of_the_gradient(self, name):
        if name == "jax.nn":
            pytest.skip("a kernel that keeps rows on chip writes the weights as they lie, where they are needed in two other orders")
        fn, query, key = ATTENTION[name]
        args = a(*query), a(*key), a(*key), a(*query)
        assert compiled_transposes(gradient(fn), *args) == planned_transposes(gradient(fn), *args)

    def test_softmax_reduces_columns_where_its_dim_is_not_the_minor_one_of_the_product(self, name):
        fn, query, key = ATTENTION[name]
        args = a(*query), a(*key), a(*key)
        reduces = [x for _, body in fusions(fn, *args) for x in body if x.opcode == "reduce" and x.operands[0].arrays[0].size > LARGE]
        columns = {len(x.operands[0].arrays[0].shape) - 1 not in dims_of(x, "dimensions") for x in reduces}
        facts, orders = planned(fn, *args)
        dead = facts.graph.dead
        ours = {reduces_columns(op, orders) for at, op in enumerate(facts.graph.ops) if op.traits.reduction and at not in dead}
        assert columns == ours == {name in ("grouped", "groups last")}


class TestProducts:
    pytestmark = needs_gpu_compiler

    @pytest.mark.parametrize("contracted", ["hk", "bt"])
    def test_rows_in_two_parts_are_read_so_and_contracted_dims_are_not(self, contracted):
        def fn(w, v, x):  # a product [b, h, k, t]
            y = jnp.einsum("bhts,bshk->bthk", w, v)
            return jnp.einsum("bthk,hkd->btd", y, x) if contracted == "hk" else jnp.einsum("bthk,btd->hkd", y, x)

        args = a(B, 16, T, T), a(B, T, 16, K), a(16, K, 1024) if contracted == "hk" else a(B, T, 1024)
        found = compiled_transposes(fn, *args)
        assert found == planned_transposes(fn, *args) and len(found) == 1 + (contracted == "bt")


@pytest.mark.parametrize(
    ("order", "before", "after", "expected"),
    [
        ((0, 1, 2), (4, 6, 8), (4, 48), (0, 1)),
        ((0, 2, 1), (4, 6, 8), (4, 48), None),
        ((1, 2, 0), (4, 6, 8), (4, 48), (1, 0)),
        ((2, 0, 1), (4, 6, 8), (24, 2, 4), (1, 2, 0)),
        ((1, 0), (4, 6), (4, 1, 6), (1, 2, 0)),
        ((0, 1), (4, 6), (3, 8), (0, 1)),
        ((1, 0), (4, 6), (3, 8), None),
        ((1, 0, 2), (4, 1, 6), (4, 6), (0, 1)),
        ((0,), (6,), (5,), None),
        ((0,), (0,), (0, 3), None),
        ((), (), (1,), (0,)),
    ],
)
def test_a_reshape_moves_nothing_if_the_dims_that_it_joins_lie_together(order, before, after, expected):
    assert reshaped(order, before, after) == expected


def test_what_only_products_read_is_written_as_they_need_it():
    def fn(x, w, read_again):
        z = jnp.tanh(x * 2)  # [b, t, h, k], of which b and h are batch dims
        y = jnp.einsum("bthk,bhkm->bhtm", z, w)
        return (y, z + 1) if read_again else y

    for read_again in (False, True):
        facts, orders = planned(lambda x, w: fn(x, w, read_again), a(4, 64, 8, 32), a(4, 8, 32, 16))  # noqa: B023
        (z,) = (op.outputs[0] for op in facts.graph.ops if op.primitive == "tanh")
        assert facts.materialised[z] == (z in orders.written) == (not read_again)  # else the product computes it of a transposed x
        assert sum(map(len, orders.transposed.values())) == read_again
