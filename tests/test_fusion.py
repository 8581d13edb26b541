"""What a device reads and writes: by kernel, as XLA's GPU back end makes them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import H100
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import shardplan
from shardplan.costs.space import StepFacts, make_strategy_space
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.mesh.rates import COLUMN_READ, MASKED_BYTE, NARROW_UPDATE, ROW_READ, UNTILED_BYTE, Product, kernel_seconds
from shardplan.xla import available
from shardplan.xla.hlo.schedule import kernels, seconds, seconds_of
from shardplan.xla_model.physical_order import physical_orders
from shardplan.xla_model.row_kernels import row_kernels

S, F32 = jax.ShapeDtypeStruct, jnp.float32
BYTES = replace(
    H100, device=replace(H100.device, flops=dict.fromkeys(H100.device.flops, 1e30), kernel_latency_s=0.0, sms=0, elements_per_s=0)
)
"""A device that takes no time but for memory, and splits no products."""

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def whole(fun, *args, cluster=BYTES) -> float:
    """Seconds of a step that is not split."""
    space = make_strategy_space(StepFacts.of(parse(jax.make_jaxpr(fun)(*args)), mesh := MeshShape(("x",), (1,))), mesh, cluster)
    return sum(op.runs * s[0] for op, s in zip(space.graph.ops, space.seconds, strict=True))


def megabytes(fun, *args) -> float:
    return whole(fun, *args) * BYTES.device.memory_rate / 1e6


X = S((1000, 1000), F32)  # 4 MB


@pytest.mark.parametrize(
    "behind, moved",
    [
        (jnp.tanh, 12),
        (lambda y: jnp.tanh(y) * 2 + 1, 12),
        (lambda y: lax.clamp(-1.0, y, 1.0), 12),
        (lambda y: jnp.tanh(y) * y, 20),  # read twice: a kernel of its own
        (lambda y: jnp.tanh(y).sum(0), 16),  # tanh is in the kernel of the sum
        (lambda y: (jnp.tanh(y), jnp.tanh(y).sum(0)), 16),
    ],
)
def test_a_product_goes_on_to_what_is_in_memory(behind, moved):
    assert megabytes(lambda x, w: behind(x @ w), X, X) == pytest.approx(moved, rel=0.01)


@pytest.mark.parametrize(
    "fun, moved",
    [
        (lambda x: jnp.tanh(x * 2) + 1, 8),  # one kernel: read and written
        (lambda x: (jnp.sin(x), jnp.cos(x)), 12),  # one kernel, read once
        (lambda x: (jnp.sin(x) + 1, (jnp.sin(x) + 1) * 2), 12),  # written on the way
        (lambda x: x.sum(0), 4),
        (lambda x: (x.sum(0), (x * x).sum(0)), 4),  # two sums of one kernel
        (lambda x: (x.sum(0), x.sum(1)), 8),  # over other dims another kernel
        (lambda x: jnp.tanh(jnp.sin(x).reshape(1, 1000, 1000).sum(0)), 8),  # a sum of one is a view
        (lambda x: (jnp.sin(x) * 2).reshape(-1), 8),  # what only a view reads is written
        (lambda x: x - x.sum(0), 12),  # read for the sum, and again
        (lambda x: jax.nn.softmax(x), 8),  # a row stays on chip
        (lambda x: jax.nn.softmax(x, axis=0), 16),  # a column does not: for the largest, for the sum, and again
        (lambda x: jax.nn.softmax(x.T), 16),  # nor does a row of a transpose
        (lambda x: jax.vjp(jax.nn.softmax, x)[1](x)[0], 8),  # the gradient computes the row once more
        (lambda x: (lambda y, back: (y, back(x + 1)[0]))(*jax.vjp(jax.nn.softmax, x)), 4 + 8 + 8),  # the sum, and each result
        (lambda x: (jnp.concatenate([x, x * 2]), x + 1), 12 + 8),  # what concatenates writes one result
        (lambda x: (x[:500] + 1, x[500:] * 2), 8),  # slices read their own part
        (lambda x: (lambda y: (y * 2, y @ x, jnp.tanh(x) - 1))(jnp.tanh(x)), 20),  # two kernels: a product computes it
        (lambda x: x @ x, 8),  # one operand twice is read once
        (lambda x: jnp.sin(x) @ jnp.cos(x), 8),  # a product computes both
        (lambda x: jnp.sin(x) @ x[0], 4),  # with a vector it is a sum
        (lambda x: jnp.tanh(jnp.outer(x[0], x[1])), 4),  # and without a sum, elementwise
        (lambda x: x.reshape(-1).reshape(500, 2000) + 1, 8),  # views move nothing
    ],
)
def test_bytes_that_kernels_read_and_write(fun, moved):
    assert megabytes(fun, X) == pytest.approx(moved, rel=0.01)


@pytest.mark.parametrize(("gpu", "itemsize", "written"), [("h100", 4, False), ("h100", 2, True), ("h200", 4, True), ("a100", 4, True)])
def test_gelus_tanh_is_written_where_that_takes_less_than_computing_it_again(gpu, itemsize, written):
    def loss(w, x):
        return ((jax.nn.gelu(x @ w) @ w.T) ** 2).mean()

    args = (S(shape, F32 if itemsize == 4 else jnp.bfloat16) for shape in ((768, 3072), (8192, 768)))
    graph, device = parse(jax.make_jaxpr(jax.grad(loss))(*args)), Cluster.preset(gpu).device
    facts = StepFacts.of(graph, MeshShape(("x",), (1,)), device)
    (tanh,) = (op.outputs[0] for op in facts.graph.ops if op.primitive == "tanh")
    assert facts.materialised[tanh] is written


@pytest.mark.parametrize(
    ("fun", "shapes", "kept"),
    [
        (lambda x: x / x.mean(-1, keepdims=True), [(4096, 1024)], 1),
        (lambda x, v: x / jnp.sqrt(0.9 * v + 0.1 * (x * x).mean(-1))[:, None], [(4096, 1024), (4096,)], 0),
        (lambda x: x / x.mean(), [(1024,)], 0),
        (jax.nn.softmax, [(1024,)], 2),
    ],
)
def test_another_array_between_a_reduction_and_its_row_or_a_number_behind_a_scalar_leaves_it_off_chip(fun, shapes, kept):
    facts = StepFacts.of(parse(jax.make_jaxpr(fun)(*(S(shape, F32) for shape in shapes))), MeshShape(("x",), (1,)), H100.device)
    orders = physical_orders(facts.graph, facts.rules)
    assert len(row_kernels(facts.graph, orders.rules, orders).fused) == kept


def written_of(fun, *args) -> list[str]:
    """Primitives that make what is in memory in one device's program, besides the products and its inputs and outputs."""
    facts = StepFacts.of(parse(jax.make_jaxpr(fun)(*args)), MeshShape(("x",), (1,)), H100.device)
    ops = (facts.graph.ops[value.producer[0]] for value in facts.graph.values)
    inside = (op.primitive if op.inputs and op.outs and not op.traits.step_output and not op.traits.matmul else "" for op in ops)
    size = max(value.bytes for value in facts.graph.values) / 8
    values = zip(facts.graph.values, facts.materialised, inside, strict=True)
    return [name for value, written, name in values if written and name and value.bytes >= size]


@pytest.mark.parametrize(
    ("rows", "dtype", "held"),
    [((8192,), F32, ["erfc", "mul"]), ((8192,), jnp.bfloat16, ["erfc", "mul"]), ((8, 1024), jnp.bfloat16, ["mul", "erfc", "mul"])],
)
def test_exact_gelu_holds_its_erfc_and_in_bfloat16_its_argument_if_the_products_rows_are_flattened(rows, dtype, held):
    def loss(w, v, x):
        return ((jax.nn.gelu(x @ w, approximate=False) @ v).astype(F32) ** 2).mean()

    shapes = (768, 3072), (3072, 768), (*rows, 768)
    assert written_of(jax.grad(loss), *(S(shape, dtype) for shape in shapes))[: len(held)] == held


@pytest.mark.parametrize("again", [False, True])
def test_a_tanh_that_a_checkpoint_computes_again_is_not_written_for_its_gradient(again):
    """One kernel computes the activation again, for the gradient of the weight behind it, and its gradient."""

    def loss(w, v, x):
        def layer(x):
            return jax.nn.gelu(x @ w) @ v

        return ((jax.checkpoint(layer) if again else layer)(x).astype(F32) ** 2).mean()

    written = written_of(jax.grad(loss, argnums=(0, 1)), *(S(x, jnp.bfloat16) for x in ((768, 3072), (3072, 768), (8192, 768))))
    assert written.count("tanh") == (not again)


def test_a_mask_is_computed_again_by_kernels_that_read_what_it_is_made_of():
    def loss(w, v, x):
        return ((jax.nn.elu(x @ w) @ v) ** 2).mean()

    assert "gt" not in written_of(jax.grad(loss), *(S(shape, jnp.bfloat16) for shape in ((768, 3072), (3072, 768), (8192, 768))))


def test_a_name_and_a_copy_of_a_product_are_the_product():
    named = megabytes(lambda x: checkpoint_name(x @ x, "kept") @ x, X)
    assert named == megabytes(lambda x: jnp.copy(x @ x) @ x, X) == megabytes(lambda x: x @ x @ x, X)


def test_a_tanh_is_written_if_two_kernels_read_it_that_are_no_products_and_one_does_not_read_its_argument():
    def written(fun):
        facts = StepFacts.of(parse(jax.make_jaxpr(fun)(X)), MeshShape(("x",), (1,)), H100.device)
        return [facts.materialised[op.outputs[0]] for op in facts.graph.ops if op.primitive == "tanh"]

    assert written(lambda x: (lambda y: (y + 1).sum(0) + y)(jnp.tanh(x))) == [True]
    assert written(lambda x: (lambda y: (x * (y + 1)).sum(0) + x * y)(jnp.tanh(x))) == [False]
    assert written(lambda x: (lambda y: (y @ x, x @ y, y - 1))(jnp.tanh(x))) == [False]


def test_a_row_that_is_sharded_is_read_again():
    mesh = MeshShape(("x",), (8,))
    space = make_strategy_space(StepFacts.of(parse(jax.make_jaxpr(jax.nn.softmax)(X)), mesh), mesh, BYTES)
    at = next(i for i, op in enumerate(space.graph.ops) if op.primitive == "reduce_sum")
    operand, result = space.strategies[at].shards[:2]
    again = space.seconds[at][operand > result].min() - space.seconds[at][(operand == result) & (operand == 8)].min()
    assert again * BYTES.device.memory_rate == pytest.approx(4e6 / 8, rel=0.02)


def test_a_product_is_written_transposed_while_it_is_computed():
    wide = S((4096, 4096), F32)
    assert whole(lambda x: (x @ x).T, wide, cluster=H100) == whole(lambda x: x @ x, wide, cluster=H100)
    assert megabytes(lambda x: (x @ x).T + 1, X) == megabytes(lambda x: x @ x + 1, X)


def test_zeros_of_a_scatter_are_written_for_other_readers_too():
    def masked(scattered, filled=jnp.zeros):
        def run(x, rows, at):
            z = jnp.zeros(x.shape).at[at].add(rows) if scattered else x
            return jnp.where(z > 0, x, filled(x.shape)), z if scattered else rows

        return megabytes(run, X, S((100, 1000), F32), S((100,), jnp.int32))

    assert masked(True) == pytest.approx(masked(True, jnp.ones) + 8, rel=0.01)  # zeros written and read
    assert masked(False) == pytest.approx(masked(False, jnp.ones), rel=0.01)  # of no scatter made where they are read


@pytest.mark.parametrize(
    ("shape", "axis", "sums"),
    [
        ((4000, 31, 8), 1, 0),  # columns of fewer elements than a warp's threads
        ((4000, 32, 32), 1, 1),
        ((4000, 63, 8), 1, 0),  # of narrow rows, up to twice as many
        ((40000, 12), 1, 0),
        ((40000, 16), 1, 1),  # rows that fill a warp evenly
    ],
)
def test_a_sum_of_few_elements_is_written_by_the_kernel_that_reads_it(shape, axis, sums):
    x = S(shape, F32)
    size, summed = x.size * 4e-6, x.size // shape[axis] * 4e-6
    assert megabytes(lambda x: jnp.tanh(x.sum(axis)), x) == pytest.approx(size + summed + 2 * sums * summed, rel=1e-3)
    spread = megabytes(lambda x: x - x.sum(axis, keepdims=True), x)  # or once for all that it is broadcast to
    assert spread == pytest.approx(3 * size + 2 * summed, rel=1e-3) or (axis == len(shape) - 1 and spread == pytest.approx(2 * size))


def test_of_a_cast_table_only_the_rows_that_are_looked_up_are_read():
    rows = S((1000,), jnp.int32)
    assert megabytes(lambda t, i: jnp.tanh(t.astype(jnp.bfloat16)[i]), S((100_000, 1000), F32), rows) == pytest.approx(6, rel=0.01)
    assert megabytes(lambda t: jnp.tanh(t.astype(jnp.bfloat16)[:1000]), S((100_000, 1000), F32)) == pytest.approx(6, rel=0.01)


def test_a_lookup_computes_only_the_rows_that_it_reads_whatever_other_kernels_compute():
    rows, row = S((10,), jnp.int32), 0.04  # MB
    found = megabytes(lambda x, i: (lambda y: (y.sum(0), y[i]))(x * 2 + 1), X, rows)
    assert found == pytest.approx(4 + 2 * row, rel=0.01)


def test_partial_sums_of_lookups_are_written_and_read_by_each_kernel():
    """Of a table whose rows are sharded, against one that is whole."""
    mesh = MeshShape(("x",), (8,))
    jaxpr = jax.make_jaxpr(lambda t, i: jnp.tanh(t[i].sum(1)))(S((80_000, 1000), F32), S((1000, 4), jnp.int32))
    space = make_strategy_space(StepFacts.of(parse(jaxpr), mesh), mesh, BYTES)
    at = next(i for i, op in enumerate(space.graph.ops) if op.primitive == "gather")
    partial = np.array([layout.partial != () for layout in space.strategies[at].results[0]])
    more = space.seconds[at][partial].min() - space.seconds[at][~partial & (space.strategies[at].shards[-1] == 1)].min()
    assert more * BYTES.device.memory_rate == pytest.approx(2 * 16e6, rel=0.01)


@pytest.mark.parametrize(
    ("fun", "moved"),
    [
        (lambda x, z: jnp.sin(x) + z, 8),  # x is read, the sine written, and rows are added to that
        (lambda x, z: jnp.exp(jnp.sin(x) + z), 16),  # by a kernel behind
        (lambda x, z: jnp.sin(x) - z, 4 + 12),  # zeros, and a kernel that subtracts
        (lambda x, z: (z + (y := jnp.sin(x)), y.sum(0)), 8 + 4),  # another reader computes the sine again
        (lambda x, z: x + z, 8),  # an input is copied
    ],
)
def test_a_scatter_adds_to_what_its_result_is_added_to(fun, moved):
    rows, at = S((10, 1000), F32), S((10,), jnp.int32)
    found = megabytes(lambda x, rows, at: fun(x, jnp.zeros(X.shape).at[at].add(rows)), X, rows, at)
    assert found == pytest.approx(moved + 3 * 0.04, rel=0.01)


def test_what_every_layer_adds_to_costs_the_same_layer_after_layer():
    """However many stand before."""

    def residual(layers):
        def run(x, w):
            for _ in range(layers):
                x = x + jax.nn.softmax(x) @ w
            return x

        return megabytes(run, X, X)

    four, eight, twelve = residual(4), residual(8), residual(12)
    assert twelve - eight == pytest.approx(eight - four, rel=0.01)
    # the row read, the operand of the product written; that and the weight read, the product written; the sum, or what it is made of
    assert (eight - four) / 4 == pytest.approx(8 + 12 + 10, rel=0.01)


def test_lookups_and_updates_in_place_move_what_they_touch():
    rows, at = S((10, 1000), F32), S((10,), jnp.int32)
    row = 0.04  # MB
    assert megabytes(lambda x, i: x[i], X, at) == pytest.approx(2 * row, rel=0.01)
    assert megabytes(lambda x: lax.dynamic_slice(x, (3, 0), (10, 1000)), X) == pytest.approx(2 * row, rel=0.01)
    assert megabytes(lambda x, u: lax.dynamic_update_slice(x, u, (3, 0)), X, rows) == pytest.approx(2 * row, rel=0.01)
    assert megabytes(lambda u, i: jnp.zeros((1000, 1000)).at[i].add(u), rows, at) == pytest.approx(4 + 3 * row, rel=0.01)  # and zeros


NARROW = replace(BYTES, device=replace(BYTES.device, elements_per_s=1e12, bytes_per_s=1e30))
"""A device that takes no time but for results: a million of them a microsecond."""


@pytest.mark.parametrize(
    ("fun", "millions"),
    [
        (lambda x: x * 2, 1),
        (lambda x: x[:1] + jnp.zeros((3000, 1000), x.dtype), 3),  # results count, not what they are made of
        (lambda x: (x * 2, x + 1), 1),  # of one kernel
        (lambda x: x.sum(0), COLUMN_READ),
        (lambda x: x.max(1), 0.001),
        (lambda x: x - x.sum(0), 1 + COLUMN_READ),
        (lambda x: x - x.max(1, keepdims=True), 1),  # a row is on chip for one reduction
        (lambda x: jax.nn.softmax(x), ROW_READ * 2),  # for two
        (lambda x: jax.nn.softmax(jnp.where(jnp.tri(10, 100, dtype=bool), x.reshape(1000, 10, 100), -9)), MASKED_BYTE * 4),
        (lambda x: x.reshape(500, 4, 500).transpose(0, 2, 1), UNTILED_BYTE * 2),
        (lambda x: x[:, :500] + 1, 0.5),
        (lambda x: x.at[jnp.arange(1000)].add(x), 1 + NARROW_UPDATE),  # the array is copied first
        (lambda x: x.at[jnp.arange(1000)].add(x, indices_are_sorted=True), 1),
        (lambda x: x.astype(F32).at[jnp.arange(1000)].add(x.astype(F32)), 2),
    ],
)
def test_kernels_take_a_time_per_result_however_narrow(fun, millions):
    assert whole(fun, S((1000, 1000), jnp.bfloat16), cluster=NARROW) * 1e6 == pytest.approx(millions, rel=0.01)


def test_loops_move_rows():
    def scanned(x):
        return lax.scan(lambda c, row: (c, jnp.sin(row)), 0.0, x)[1]

    # one kernel cuts a row out, works on it and puts it into a stack that was zero before
    assert megabytes(scanned, X) == pytest.approx(4 + 8, rel=0.01)

    # what is computed before the loop is written, for the loop cuts rows out of it
    assert megabytes(lambda x: scanned(jnp.cos(x)), X) == pytest.approx(8 + 4 + 8, rel=0.01)

    def multiplied(x):
        return lax.scan(lambda c, row: (c, jnp.sin(row) @ row.T), 0.0, x)[1]

    def read_twice(c, xs, w):
        return lax.scan(lambda c, row: (jnp.tanh(((c * row) @ w) * row) + c, None), c, xs)[0]

    # either kernel around the product cuts the row out for itself
    assert megabytes(read_twice, X, S((4, 1000, 1000), F32), X) == pytest.approx(4 * (12 + 12 + 16), rel=0.01)

    # one kernel writes the row and its sine, for a product; that is written, and put into the stack
    assert megabytes(multiplied, S((4, 500, 500), F32)) == pytest.approx(4 * (3 + 3 + 3), rel=0.01)


def test_a_row_of_a_stack_is_computed_by_the_kernel_that_writes_it():
    def f(x, w):
        def body(c, _):
            grown = jnp.exp(c @ w)
            part = grown / (1 + grown)
            return part @ w, (grown, part)

        return lax.scan(body, x, length=10)

    # each round two products, the quotient from the product's result, and the rows: one from that result, one of the quotient
    assert megabytes(f, X, X) == pytest.approx(10 * (12 + 8 + 12 + 8 + 8) + 2 * 40, rel=0.01)


def test_the_zeros_of_stacks_are_written_once_per_shape_and_copied_in_a_body():
    latency = H100.device.kernel_latency_s

    def stacks(n, length=5):
        return lambda x: lax.scan(lambda c, _: (c, tuple(jnp.sin(c + k) for k in range(n))), x, length=length)[1]

    def rounds(n):
        return lambda x: lax.scan(lambda c, _: (c + sum(y[0] for y in stacks(n)(c)), None), x, length=3)[0]

    small = S((8, 8), F32)
    one, three = (whole(stacks(n), small, cluster=H100) for n in (1, 3))
    assert three - one == pytest.approx(2 * 5 * latency, rel=0.01)  # one kernel writes all zeros
    assert whole(stacks(3, 10), small, cluster=H100) - three == pytest.approx(4 * 5 * latency, rel=0.01)
    one, three = (whole(rounds(n), small, cluster=H100) for n in (1, 3))
    assert three - one == pytest.approx(3 * (2 * 5 + 2) * latency, rel=0.01)


def test_products_are_written_in_the_requested_order():
    assert megabytes(lambda x: (x @ x).T, X) == megabytes(lambda x: x @ x, X)


@pytest.mark.parametrize("steps", [1, 10])
def test_no_kernel_is_faster_than_a_launch(steps):
    small = S((8, 8), F32)

    def chain(x):
        for _ in range(steps):
            x = jnp.tanh(x @ x)  # each product does what waits for the one before
        return x

    product_s = kernel_seconds(H100.device, [Product("float32", 2 * 8.0**3, (1, 8, 8, 8))], 0.0)
    assert product_s > H100.device.products["float32"].latency_s > H100.device.kernel_latency_s
    assert whole(chain, small, cluster=H100) == pytest.approx(steps * product_s, rel=0.05)
    split = make_strategy_space(StepFacts.of(parse(jax.make_jaxpr(chain)(small)), mesh := MeshShape(("x",), (8,))), mesh, H100)
    least = sum(op.runs * s.min() for op, s in zip(split.graph.ops, split.seconds, strict=True))
    assert least > 0.9 * whole(chain, small, cluster=H100)  # eight devices are no faster


def test_large_reductions_are_two_kernels():
    latency = H100.device.kernel_latency_s
    assert whole(lambda x: x.sum(0), S((4096, 8), F32), cluster=H100) == pytest.approx(latency)
    assert whole(lambda x: x.sum(0), S((4104, 8), F32), cluster=H100) == pytest.approx(2 * latency)
    assert whole(lambda x: x.sum(1), S((8, 1 << 14), F32), cluster=H100) == pytest.approx(latency)
    both = whole(lambda x: (x.sum(0), (x * x).sum(0)), S((4104, 8), F32), cluster=H100)
    assert both == pytest.approx(3 * latency, rel=0.01)  # the first they share


@pytest.mark.parametrize(
    ("shape", "axes", "kernels"),
    [
        ((8, 128, 8, 32), (1, 3), 2),
        ((8, 128, 8, 12), (1, 3), 1),  # whoever reads the sum adds the twelve
        ((2, 5000, 2, 32), (1, 3), 3),  # the longer dim is too long for one
        ((64, 8, 16, 8), (1, 3), 1),  # both are short
        ((8, 128, 1, 32), (1, 3), 1),
        ((32, 128, 8), (0, 1), 1),
    ],
)
def test_a_reduction_of_dims_that_lie_apart_is_made_in_two(shape, axes, kernels):
    seconds = whole(lambda x: x.sum(axes), S(shape, F32), cluster=H100)
    assert seconds == pytest.approx(kernels * H100.device.kernel_latency_s, rel=0.2)


def test_loops_count_their_iterations_and_slice_every_row_in_a_kernel_of_its_own():
    def run(c, a, b):
        return lax.scan(lambda c, rows: (c @ rows[0] @ rows[1], None), c, (a, b))[0]

    square, stack = S((16, 16), F32), S((10, 16, 16), F32)
    product_s = kernel_seconds(H100.device, [Product("float32", 2 * 16.0**3, (1, 16, 16, 16))], 0.0)
    assert whole(run, square, stack, stack, cluster=H100) == pytest.approx(
        10 * (2 * product_s + (1 + 2) * H100.device.kernel_latency_s)
    )


@pytest.mark.slow
@needs_gpu_compiler
def test_xla_moves_as_much():
    """Normalised layers, forward and backward, and their optimizer: seconds of the plan and of the emitted kernels."""

    def step(params, x, y):
        def loss(params):
            h = x
            for w, scale in params:
                h = h @ w
                h = jnp.maximum((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5) * scale, 0)
            return jnp.mean((h - y) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = [(S((1024, 1024), F32), S((1024,), F32))] * 3
    x = S((16384, 1024), F32)
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    report = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).check(params, x, x, target="h100:8")
    planned, emitted = report.plan.seconds, seconds(report.compiled, H100)
    assert planned["compute"] + planned["communication"] == pytest.approx(emitted.total_s, rel=0.1)


@pytest.mark.slow
@needs_gpu_compiler
def test_xla_runs_as_many_kernels_in_a_recurrence():
    """A gated recurrence in small steps, forward and backward, is made of the least times of its kernels."""

    def step(params, x):
        def loss(params):
            def at(h, row):
                h = jnp.exp(-row[:, None] * params["rate"]) * h + row[:, None]
                return h, jnp.einsum("bn,n->b", h, params["read"])

            return jnp.sum(lax.scan(jax.checkpoint(at), jnp.zeros((x.shape[1], 16)), x)[1] ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"rate": S((16,), F32), "read": S((16,), F32)}
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    report = shardplan.auto(mesh, cluster="h100")(step).check(params, S((512, 4096), F32), target="h100:8")
    assert report.plan.seconds["compute"] == pytest.approx(seconds(report.compiled, H100).compute_s, rel=0.15)


def test_of_a_stack_only_the_sliced_rows_are_read():
    """XLA may turn a stack before it cuts rows out of it or puts rows into it; and a scatter works in place."""
    hlo = """
HloModule rows, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%cut (stack: f32[64,100000], at: s32[]) -> f32[100000] {
  %stack = f32[64,100000]{0,1} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %turned = f32[100000,64]{1,0} bitcast(%stack)
  %row = f32[100000,1]{1,0} dynamic-slice(%turned, %zero, %at), dynamic_slice_sizes={100000,1}
  ROOT %flat = f32[100000]{0} bitcast(%row)
}

%put (stack: f32[64,100000], row: f32[100000,1], at: s32[]) -> f32[64,100000] {
  %stack.1 = f32[64,100000]{0,1} parameter(0)
  %row.1 = f32[100000,1]{1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %turned.1 = f32[100000,64]{1,0} bitcast(%stack.1)
  %new = f32[100000,64]{1,0} dynamic-update-slice(%turned.1, %row.1, %zero.1, %at.1)
  ROOT %back = f32[64,100000]{0,1} bitcast(%new)
}

%sums (table: f32[64,100000], at: s32[1,1], row: f32[1,100000]) -> f32[64,100000] {
  %table = f32[64,100000]{0,1} parameter(0)
  %at.2 = s32[1,1]{1,0} parameter(1)
  %row.2 = f32[1,100000]{1,0} parameter(2)
  ROOT %summed = f32[64,100000]{0,1} scatter(%table, %at.2, %row.2), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
}

ENTRY %main (stack: f32[64,100000], at: s32[], where: s32[1,1], update: f32[1,100000]) -> f32[64,100000] {
  %stack.2 = f32[64,100000]{0,1} parameter(0)
  %at.3 = s32[] parameter(1)
  %where = s32[1,1]{1,0} parameter(2)
  %update = f32[1,100000]{1,0} parameter(3)
  %row.3 = f32[100000]{0} fusion(%stack.2, %at.3), kind=kLoop, calls=%cut
  %row.4 = f32[100000,1]{1,0} bitcast(%row.3)
  %next = f32[64,100000]{0,1} fusion(%stack.2, %row.4, %at.3), kind=kLoop, calls=%put
  ROOT %last = f32[64,100000]{0,1} fusion(%next, %where, %update), kind=kInput, calls=%sums
}
"""  # noqa: E501
    row, found = 4e5, seconds_of(hlo, BYTES)
    assert found.compute_s * BYTES.device.memory_rate == pytest.approx((2 + 2 + 3) * row, rel=0.001)  # what is added to is read, too


def test_of_a_slice_only_what_slices_of_it_leave_is_read():
    hlo = """
HloModule halves, is_scheduled=true

%quarter (x: f32[1024,1000], y: f32[1024,1000]) -> f32[256,1000] {
  %x = f32[1024,1000]{1,0} parameter(0)
  %y = f32[1024,1000]{1,0} parameter(1)
  %sum = f32[1024,1000]{1,0} add(%x, %y)
  %half = f32[512,1000]{1,0} slice(%sum), slice={[0:1024:2], [0:1000]}
  %twice = f32[512,1000]{1,0} add(%half, %half)
  ROOT %part = f32[256,1000]{1,0} slice(%twice), slice={[0:512:2], [0:1000]}
}

ENTRY %main (x: f32[1024,1000], y: f32[1024,1000]) -> f32[256,1000] {
  %x.1 = f32[1024,1000]{1,0} parameter(0)
  %y.1 = f32[1024,1000]{1,0} parameter(1)
  ROOT %out = f32[256,1000]{1,0} fusion(%x.1, %y.1), kind=kLoop, calls=%quarter
}
"""
    assert seconds_of(hlo, BYTES).compute_s * BYTES.device.memory_rate == pytest.approx(3 * 256 * 4e3)


def test_a_kernel_that_sums_columns_computes_what_it_reads_of_stacks():
    hlo = """HloModule m, is_scheduled=true, num_partitions=2

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%cell (rows: f32[64,1000], parts: f32[4,1000], at: s32[], stack: f32[64,1000]) -> f32[64,1000] {
  %rows = f32[64,1000]{1,0} parameter(0)
  %parts = f32[4,1000]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %stack = f32[64,1000]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %none = f32[] constant(0)
  %row = f32[1,1000]{1,0} dynamic-slice(%rows, %at, %zero), dynamic_slice_sizes={1,1000}
  %flat = f32[1000]{0} bitcast(%row)
  %sum = f32[1000]{0} reduce(%parts, %none), dimensions={0}, to_apply=%add
  %both = f32[1000]{0} add(%flat, %sum)
  %new = f32[1,1000]{1,0} bitcast(%both)
  ROOT %put = f32[64,1000]{1,0} dynamic-update-slice(%stack, %new, %at, %zero)
}

ENTRY %main (rows.1: f32[64,1000], parts.1: f32[4,1000], at.1: s32[], stack.1: f32[64,1000]) -> f32[64,1000] {
  %rows.1 = f32[64,1000]{1,0} parameter(0)
  %parts.1 = f32[4,1000]{1,0} parameter(1)
  %at.1 = s32[] parameter(2)
  %stack.1 = f32[64,1000]{1,0} parameter(3)
  ROOT %step = f32[64,1000]{1,0} fusion(%rows.1, %parts.1, %at.1, %stack.1), kind=kLoop, calls=%cell
}
"""
    ((work, _),) = kernels(hlo).values()
    assert work.elements == pytest.approx(COLUMN_READ * (1000 + 4000), rel=0.001)
    assert work.bytes == pytest.approx(4 * (1000 + 4000 + 1000), rel=0.001)


def test_a_number_broadcast_in_steps_is_not_written_for_a_loop():
    def masked(x):
        number = lax.broadcast_in_dim(jnp.broadcast_to(x[0, 0], (1000,)), (1000, 1000), (1,))
        return lax.scan(lambda c, _: (jnp.where(c > 0, c, number) @ c, None), x, length=4)[0]

    space = make_strategy_space(StepFacts.of(parse(jax.make_jaxpr(masked)(X)), mesh := MeshShape(("x",), (1,))), mesh, BYTES)
    made = [op for op in space.graph.ops if op.traits.broadcast and op.outs[0].shape == X.shape]
    assert made and not any(space.materialised[op.outputs[0]] for op in made)
