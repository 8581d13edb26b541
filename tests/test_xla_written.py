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
        (lambda x: x * jnp.arctan(x), BF16, ROWS, 5),
    ],
)
def test_activations_held_for_the_gradient_are_those_that_the_plan_counts(activation, dtype, rows, arrays):
    shapes = (rows[-1], HIDDEN), (HIDDEN,), (HIDDEN, rows[-1]), rows
    fun, args = gradient(activation), [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    size = math.prod(rows[:-1]) * HIDDEN
    assert written_by_xla(fun, args, size) == written_by_plan(fun, args, size) == arrays


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
