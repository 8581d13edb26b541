"""What the kernels of products compute besides: sums of their parts, work on what they read, and on what they write."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from clusters import H100
from jax import lax
from test_fusion import BYTES, F32, S, X, megabytes, needs_gpu_compiler, whole

import shardplan
from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.layout import MeshShape
from shardplan.xla import compile


@pytest.mark.parametrize(
    ("add", "moved"),
    [
        (lambda w, p: w + p, 16),  # operands, carry, result: one kernel
        (lambda w, p: w + 0.5 * p, 16),
        (lambda w, p: w + p.T, 16),
        (lambda w, p: w + jnp.sin(w) * p, 12 + 12),  # a second kernel; what is made of the carry is no input of the loop
    ],
)
def test_a_products_kernel_adds_its_result_to_a_loops_carry(add, moved):
    def summed(w, xs, y):
        return lax.scan(lambda w, x: (add(w, x @ y), None), w, xs)[0]

    # another kernel cuts the row out for the product
    assert megabytes(summed, X, S((4, 1000, 1000), F32), X) == pytest.approx(4 * (8 + moved), rel=0.01)


@pytest.mark.parametrize(
    ("behind", "moved"),
    [
        (lambda x, p: jnp.tanh(p + x), 16),  # operands, the step's input once more, result: one kernel
        (lambda x, p: jnp.maximum(p * 3, x), 16),
        (lambda x, p: (p + x) ** 2, 16 + 8),  # reads twice what is before
        (lambda x, p: p + jnp.sin(x), 12 + 12),
        (lambda x, p: p * 2, 12),
    ],
)
def test_a_products_kernel_goes_on_as_far_as_inputs_of_the_step_meet_its_result(behind, moved):
    assert megabytes(lambda x, w: behind(x, x @ w), X, X) == pytest.approx(moved, rel=0.01)


@pytest.mark.parametrize(
    "behind, kernels",
    [
        (lambda y: jax.nn.softmax(y), 0),  # the kernel behind the product sums
        (lambda y: jax.nn.gelu(y), 0),
        (lambda y: jnp.tanh(y), 1),  # in the product's kernel if there are no parts
        (lambda y: y * 2, 1),
        (lambda y: y, 1),
        (lambda y: y.sum(0), 1),
        (lambda y: y @ y.T, 2),
        (lambda y: y * (jnp.tanh(y) @ jnp.ones((128, 1 << 15)))[:, :128], 1),  # two kernels would sum many parts
    ],
)
def test_a_kernel_of_its_own_sums_the_parts_of_a_product_if_no_fused_kernel_reads_it(behind, kernels):
    """What splitting costs, against a device that has one multiprocessor, and so splits nothing."""
    args = S((128, 2048), F32), S((2048, 128), F32)
    slow = {"float32": replace(BYTES.device.products["float32"], latency_s=1.0)}  # a second a kernel

    def seconds(sms: int) -> float:
        cluster = replace(BYTES, device=replace(BYTES.device, kernel_latency_s=1.0, products=slow, sms=sms))
        return whole(lambda x, w: behind(x @ w), *args, cluster=cluster)

    assert seconds(132) - seconds(1) == pytest.approx(kernels, abs=0.1)


def planned(fun, *args):
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return shardplan.auto(mesh, cluster="h100")(fun).plan(*args).seconds


def test_products_of_one_array_take_the_seconds_of_one_wide_product_and_the_bound_knows():
    x, narrow, wide = S((4096, 512), jnp.bfloat16), S((512, 256), jnp.bfloat16), S((512, 768), jnp.bfloat16)

    def several(x, *weights):
        return sum(jnp.tanh(x @ w) for w in weights)

    def one(x, w):
        return sum(map(jnp.tanh, jnp.split(x @ w, 3, axis=1)))

    merged, alone = planned(several, x, *[narrow] * 3), planned(lambda x, w: jax.nn.gelu(x @ w), x, narrow)
    assert merged["compute"] == pytest.approx(planned(one, x, wide)["compute"], rel=0.01)
    assert merged["bound"] <= merged["total"] < 0.6 * 3 * alone["total"]


def test_products_that_are_merged_go_on_to_nothing():
    x, w, wide = (S(shape, jnp.bfloat16) for shape in ((16384, 1024), (1024, 512), (1024, 1024)))
    two = planned(lambda x, w, u: (jnp.tanh(x @ w), jnp.tanh(x @ u)), x, w, w)
    one = planned(lambda x, w: [jnp.tanh(y) for y in jnp.split(x @ w, 2, axis=1)], x, wide)
    assert two["compute"] == pytest.approx(one["compute"], rel=0.02)


def test_what_several_products_read_for_the_work_behind_them_is_no_operand_that_they_compute():
    def several(x, z, w, u, b):
        return x @ w + b, z @ u + b

    def narrowed(*args):
        return [y.astype(jnp.bfloat16) for y in several(*args)]

    assert megabytes(several, X, X, X, X, S((1000,), F32)) == pytest.approx(24, rel=0.01)
    assert megabytes(narrowed, X, X, X, X, S((1000,), F32)) == pytest.approx(20, rel=0.01)


WIDTHS = [((64, 64), 0), ((128, 64), 0), ((128, 96), 1), ((96, 96), 1)]
"""Widths of merged products, and how many kernels write their operands side by side."""


@pytest.mark.parametrize("widths, kernels", WIDTHS)
def test_operands_of_merged_products_are_copied_unless_their_dims_have_whole_fragments(widths, kernels, monkeypatch):
    args = S((4096, 512), F32), *(S((512, n), F32) for n in widths)

    def several(x, *weights):
        return [jnp.tanh(x @ w) for w in weights]

    found = planned(several, *args)["compute"]
    monkeypatch.setattr("shardplan.costs.merged_products.FRAGMENT", 1)
    assert found - planned(several, *args)["compute"] == pytest.approx(kernels * H100.device.kernel_latency_s, abs=1e-9)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("widths, kernels", WIDTHS)
def test_xla_copies_operands_of_merged_products_with_odd_dims(widths, kernels):
    weights = [S((512, n), jnp.bfloat16) for n in widths]
    step = jax.jit(lambda x, *weights: [jnp.tanh(x @ w) for w in weights])
    names = [i.name for i in compile(step, S((4096, 512), jnp.bfloat16), *weights, target="h100:1").module if i.opcode == "fusion"]
    assert sum("gemm" in name for name in names) == 1 and sum("concatenate" in name for name in names) == kernels


def test_parts_of_merged_products_are_those_of_the_wide_product():
    """Three gradients of weights are split less than each by itself, as there are more tiles."""

    def gradients(x, *dy):
        return [jnp.sin(jnp.einsum("ki,kj->ij", x, y)) for y in dy]

    x, narrow, wide = S((8192, 512), F32), S((8192, 512), F32), S((8192, 1536), F32)
    merged, one = planned(gradients, x, *[narrow] * 3), planned(gradients, x, wide)
    assert merged["compute"] == pytest.approx(one["compute"], rel=0.1)


PROLOGUES = [
    (lambda x, s, w: (x * s) @ w, 0),
    (lambda x, s, w: (jnp.maximum(x * s + 1, 0)) @ w, 0),
    (lambda x, s, w: (x * jnp.sin(s)) @ w, 1),
    (lambda x, s, w: jnp.clip(x, -1, s.shape[0]) @ w, 1),
    (lambda x, s, w: jnp.minimum(jnp.maximum(x, s), 1) @ w, 0),
    (lambda x, s, w: (x - x.mean(0)) @ w, 1),
    (lambda x, s, w: (x * s.sum()) @ w, 1),
    (lambda x, s, w: lax.scan(lambda x, r: ((x * r) @ w, None), x, s.reshape(1, -1).repeat(2, 0))[0], 1),
]
"""Work before a product, with an input or something computed, and how many arrays are written for it."""


@pytest.mark.parametrize("step, arrays", PROLOGUES)
def test_a_product_computes_again_only_what_is_made_of_one_array_and_inputs(step, arrays):
    args = S((1000, 1000), F32), S((1000,), F32), S((1000, 1000), F32)
    graph = parse(jax.make_jaxpr(step)(*args))
    facts = StepFacts.of(graph, MeshShape(("x",), (1,)), H100.device)
    found = zip(facts.graph.values, facts.materialised, strict=True)
    makers = [(v.shape, facts.rules[v.producer[0]].fusion) for v, written in found if written]
    assert makers.count(((1000, 1000), "loop")) == arrays


def test_what_a_product_reads_for_its_prologue_takes_no_time_where_it_computes():
    args = S((4096, 4096), jnp.bfloat16), S((4096,), jnp.bfloat16), S((4096, 4096), jnp.bfloat16)
    scaled, plain = (whole(fun, *args, cluster=H100) for fun in (lambda x, s, w: (x * s) @ w, lambda x, s, w: x @ w))
    assert scaled == pytest.approx(plain, rel=0.001)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("step, arrays", PROLOGUES)
def test_xla_writes_as_many_arrays_before_a_product(step, arrays):
    args = S((1000, 1000), F32), S((1000,), F32), S((1000, 1000), F32)
    module = compile(jax.jit(step), *args, target="h100:1").module
    fusions = [i for i in module if i.opcode == "fusion" and i.arrays[0].shape == (1000, 1000) and "gemm" not in i.name]
    assert len(fusions) == arrays
