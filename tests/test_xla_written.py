"""Which activations XLA for GPU writes in one layer and its gradient: as many arrays as the plan counts."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, compile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

F32, BF16 = jnp.float32, jnp.bfloat16
FLAT, ROWS = (6304, 768), (32, 197, 768)
HIDDEN = 3072


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def gradient(activation):
    """Of a product, a bias and an activation, then another product."""

    def loss(w, b, v, x):
        return ((activation(x @ w + b) @ v).astype(F32) ** 2).mean()

    return jax.grad(loss, argnums=(0, 1, 2, 3))


def written_by_plan(fun, args, size: int) -> int:
    facts = StepFacts.of(parse(jax.make_jaxpr(fun)(*args)), MeshShape(("x",), (1,)), Cluster.preset("h100").device)
    makers = (facts.graph.ops[value.producer[0]].traits for value in facts.graph.values)
    made = [not (traits.step_input or traits.step_output) for traits in makers]
    values = zip(facts.graph.values, facts.materialised, made, strict=True)
    return sum(written and inside and math.prod(value.shape) == size for value, written, inside in values)


def written_by_xla(fun, args, size: int) -> int:
    text = compile(fun, *args, target="h100:1").text
    results = re.findall(r"= (.*?) (?:fusion|custom-call|dot)\(", text[text.index("ENTRY") :])
    shapes = (shape for types in results for shape in re.findall(r"\w+\[([\d,]+)\]", types))
    return sum(math.prod(map(int, shape.split(","))) == size for shape in shapes)


@pytest.mark.parametrize(
    ("activation", "dtype", "rows", "arrays"),
    [
        # two products' results, the activation, the gradient behind it; and
        (jax.nn.silu, BF16, ROWS, 4),
        (jax.nn.elu, BF16, ROWS, 4),
        (jax.nn.gelu, BF16, ROWS, 5),  # the tanh
        (jax.nn.gelu, F32, ROWS, 4),  # which is computed again
        (exact_gelu, BF16, FLAT, 5),  # the erfc
        (exact_gelu, F32, ROWS, 5),
        (exact_gelu, BF16, ROWS, 6),  # and its argument
        (lambda x: x * jnp.sin(x), F32, ROWS, 5),
        (jnp.tanh, F32, FLAT, 3),  # products compute it for themselves, and one other kernel
        (jnp.tanh, BF16, FLAT, 3),
        (jnp.sin, F32, FLAT, 3),
        (lax.erf, BF16, FLAT, 3),
        (lambda x: x * jnp.arctan(x), BF16, ROWS, 5),
    ],
)
def test_activations_held_for_the_gradient_are_those_that_the_plan_counts(activation, dtype, rows, arrays):
    shapes = (rows[-1], HIDDEN), (HIDDEN,), (HIDDEN, rows[-1]), rows
    fun, args = gradient(activation), [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    size = math.prod(rows[:-1]) * HIDDEN
    assert written_by_xla(fun, args, size) == written_by_plan(fun, args, size) == arrays


@pytest.mark.parametrize(
    ("between", "stored"),
    [
        (jnp.sin, 1),
        (jnp.log1p, 1),
        (jnp.floor, 1),
        (lambda h: h / 3, 1),
        (lambda h: jnp.exp(jnp.clip(h, -1, 1)), 1),
        (lambda h: lax.pow(h, jnp.full_like(h, 1.7)), 1),
        (jnp.sign, 2),
        (jnp.square, 2),
        (lambda h: jnp.where(h > 0, h, 0.0), 2),
        (lambda h: lax.erf_inv(h), 2),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_product_computes_elementwise_work_on_what_it_reads(between, stored, dtype):
    """One array, the first product's result, or the work between the two as well."""

    def net(x, w, v):
        return between(x @ w).astype(dtype) @ v

    args = [jax.ShapeDtypeStruct(shape, dtype) for shape in (FLAT, (FLAT[1], HIDDEN), (HIDDEN, FLAT[1]))]
    assert written_by_xla(net, args, FLAT[0] * HIDDEN) == written_by_plan(net, args, FLAT[0] * HIDDEN) == stored


@pytest.mark.parametrize(
    "drop",
    [
        lambda x: x + jnp.zeros_like(x),
        lambda x: jnp.zeros_like(x) + x,
        lambda x: x - jnp.zeros_like(x),
        lambda x: x * jnp.ones_like(x),
        lambda x: x / jnp.full_like(x, 1),
    ],
)
def test_work_with_a_number_that_changes_nothing_is_dropped(drop):
    args = [jax.ShapeDtypeStruct(ROWS, F32)]
    assert written_by_xla(drop, args, math.prod(ROWS)) == 0
    assert [op.primitive for op in parse(jax.make_jaxpr(drop)(*args)).ops if not op.traits.broadcast] == ["arg", "out"]


def test_a_residual_sum_is_computed_again_for_the_mask_of_the_relu_behind_it():
    def loss(ws, x):
        for w in ws:
            h = x @ w
            x = jax.nn.relu((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5) + x)
        return (x.astype(F32) ** 2).mean()

    rows, width, layers = 8192, 1024, 3
    args = [jax.ShapeDtypeStruct((width, width), BF16)] * layers, jax.ShapeDtypeStruct((rows, width), BF16)
    # of each layer the product's result and the relu (but the last), then three gradients: of the relu, of the product, of the layer
    arrays = 2 * layers - 1 + 3 * layers - 1
    assert written_by_xla(jax.grad(loss), args, rows * width) == written_by_plan(jax.grad(loss), args, rows * width) == arrays


@pytest.mark.parametrize("rows, width", [(1000, 1000), (16384, 1024)])
@pytest.mark.parametrize("layers, arrays", [(3, 7), (5, 12), (8, 19)])
def test_the_sum_of_many_layers_is_written_where_computing_it_again_reads_more(layers, arrays, rows, width):
    """Per layer the softmax and the product, to which the first adds the residual; then each third sum, and the last."""

    def residual(x, w):
        for _ in range(layers):
            x = x + jax.nn.softmax(x) @ w
        return x

    args = [jax.ShapeDtypeStruct((rows, width), F32), jax.ShapeDtypeStruct((width, width), F32)]
    assert written_by_xla(residual, args, rows * width) == written_by_plan(residual, args, rows * width) == arrays


def swapped(x):
    return jnp.concatenate([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1)


@pytest.mark.parametrize(
    ("fun", "operands", "arrays"),
    [
        # a sum of two arrays, read by three kernels or by four: the tanh, and
        (lambda x, y: (x.sum(0), (x * x).sum(1), jnp.tanh(x)), 2, 1),
        (lambda x, y: (x.sum(0), (x * x).sum(1), jnp.tanh(x), x[::-1]), 2, 3),  # the reversed array, and the sum
        # what is read at two places of each kernel, the larger array twice from memory
        (lambda x, y: ((x + y).sum(0), (x * y).sum(1), jnp.tanh(x + y)), 1, 2),
    ],
)
def test_what_is_read_in_several_places_is_counted_as_often(fun, operands, arrays):
    def made(*some):
        x = some[0] + some[1] if len(some) > 1 else some[0].astype(BF16)
        return fun(x, swapped(x))

    shape = 65536, 1024
    args = [jax.ShapeDtypeStruct(shape, F32)] * operands
    assert written_by_xla(made, args, math.prod(shape)) == written_by_plan(made, args, math.prod(shape)) == arrays
