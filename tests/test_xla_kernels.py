"""Kernels of small programs on one device: XLA's read and write as many bytes as those that are planned."""

import jax
import jax.numpy as jnp
import pytest
from clusters import H100
from jax import lax
from test_fusion import F32, S, megabytes, needs_gpu_compiler, whole

from shardplan import Cluster
from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.layout import MeshShape
from shardplan.xla import compile
from shardplan.xla.hlo.schedule import kernels, work_s

BF16, I32 = jnp.bfloat16, jnp.int32
X, AT, ROWS = S((4096, 1024), F32), S((256,), I32), S((256, 1024), F32)


def scattered(at, rows):
    return jnp.zeros(X.shape, rows.dtype).at[at].add(rows)


def picked(w, x, labels):
    """The loss of a classifier by the logits at its labels."""
    logits = (x @ w).astype(F32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()


INTO_SUM = {
    "an input": (lambda x, at, rows: x + scattered(at, rows), (X, AT, ROWS)),
    "what a kernel makes": (lambda x, at, rows: jnp.tanh(x) + scattered(at, rows), (X, AT, ROWS)),
    "what another one reads, too": (
        lambda x, at, rows: (lambda y: (jnp.exp(y + scattered(at, rows)), y))(jnp.tanh(x)), (X, AT, ROWS)),
    "with a kernel behind the sum": (lambda x, at, rows: jnp.exp(jnp.tanh(x) + scattered(at, rows)), (X, AT, ROWS)),
    "no sum": (lambda x, at, rows: jnp.tanh(x) - scattered(at, rows), (X, AT, ROWS)),
    "gradients of logits": (jax.grad(picked), (S((512, 16000), BF16), S((4096, 512), BF16), S((4096,), I32))),
}  # fmt: skip


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", INTO_SUM)
def test_a_scatter_into_zeros_that_are_added_to_something_writes_into_that(name):
    moves_as_planned(*INTO_SUM[name], rel=0.02)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("behind", [True, False])
def test_zeros_that_several_read_behind_a_scatter_are_one_array(behind):
    def masked(x, rows, at):
        z = jnp.zeros(x.shape).at[at].add(rows)
        some = z if behind else x
        less, more = (jnp.where(test, x, jnp.zeros(x.shape)) for test in (some < 0, some > 1))
        return less, more, z

    moves_as_planned(masked, (X, ROWS, AT), rel=0.02)


def root_mean_square(x):
    y = x.astype(F32)
    return (y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


TOKENS, WEIGHT, BACK = (16384, 512), (512, 2048), (2048, 512)
LINEAR = {
    "scores scaled before their softmax": lambda x, w, u, v: jax.nn.softmax((x @ w) / 8) @ v,
    "two products added before a softmax": lambda x, w, u, v: jax.nn.softmax(x @ w + x @ u) @ v,
    "two products added before a tanh": lambda x, w, u, v: jnp.tanh((x @ w + x @ u) * 2) @ v,
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_work_on_products_whose_sums_are_whole_is_part_of_the_kernels_that_read_it(name, dtype):
    moves_as_planned(LINEAR[name], [S(shape, dtype) for shape in (TOKENS, WEIGHT, WEIGHT, BACK)], rel=0.02)


CASTS = {
    "a product to a wider dtype": (lambda x, w, v: (x @ w).astype(F32) @ v, BF16, F32),
    "elementwise work on a product to a wider dtype": (lambda x, w, v: jnp.tanh(x @ w).astype(F32) @ v, BF16, F32),
    "what is written first to a wider dtype": (lambda x, w, v: jnp.square(x @ w).astype(F32) @ v, BF16, F32),
    "an input to a narrower dtype": (lambda x, w, v: x.astype(BF16) @ w, F32, BF16),
    "an input to a narrower dtype, twice": (lambda x, w, v: (x.astype(BF16) @ w, (-x).astype(BF16) @ w), F32, BF16),
    "a product to a narrower dtype": (lambda x, w, v: jnp.sin(x @ w.astype(F32)).astype(BF16) @ v, F32, BF16),
    "a mask": (lambda x, w, v: (x @ w > 0).astype(BF16) @ v.astype(BF16), BF16, F32),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", CASTS)
def test_a_product_casts_what_it_reads_to_wider_dtypes_and_inputs_that_nothing_else_reads(name):
    fun, given, back = CASTS[name]
    moves_as_planned(fun, [S(TOKENS, given), S(WEIGHT, BF16), S(BACK, back)], rel=0.02)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("behind", [jax.nn.gelu, jnp.negative, lambda y: jnp.tanh(y) + 1, lambda y: y])
def test_a_kernel_of_rows_ends_where_the_least_is_written_for_another_reduction(behind):
    moves_as_planned(lambda x: (behind(root_mean_square(x)).astype(F32) ** 2).mean(), [S(TOKENS, BF16)], rel=0.02)


def swapped(x):
    """The halves of rows, the other way round, as rotary embeddings have them."""
    half = x.shape[-1] // 2
    return jnp.concatenate([x[..., half:], x[..., :half]], -1)


def less_largest(x):
    return x - x.max(-1, keepdims=True)


ENDS = {
    "another kernel of rows reads it as it is": lambda x: jax.nn.softmax(x) - jax.nn.softmax(x).astype(F32).mean(0).astype(x.dtype),
    "elementwise work behind columns of it": lambda x: jnp.tanh(x + less_largest(x) - less_largest(x).astype(F32).mean(0)),
    "halves swapped before": lambda x: jax.nn.softmax(swapped(x) + x),
    "halves swapped behind": lambda x: less_largest(x) * swapped(less_largest(x)),
    "halves swapped, the parts reduced": lambda x: jnp.sin(less_largest(swapped(x))),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", ENDS)
def test_kernels_of_rows_write_once_what_columns_are_reduced_of_and_join_no_rows_that_they_reduce(name):
    moves_as_planned(lambda x: (ENDS[name](x).astype(F32) ** 2).mean(), [S(TOKENS, BF16)], rel=0.03)


BESIDES = {
    "an input added behind": (lambda x, w, v: (x @ w @ v + x).astype(F32).mean(), BF16),
    "an input added behind, read twice": (lambda x, w, v: (x @ w @ v + x).mean(), F32),
    "a bound and an input's larger": (lambda x, w, v: jnp.maximum(jnp.tanh(x @ w @ v), x) @ w, BF16),
    "a square of what it makes": (lambda x, w, v: ((x @ w @ v + x) ** 2).mean(), F32),
    "bounded on both sides before": (lambda x, w, v: jnp.clip(x, -1, 1) @ w, BF16),
    "bounded on both sides and a tanh before": (lambda x, w, v: jnp.tanh(jnp.clip(x, -1, 1)) @ w, F32),
    "bounded on one side before": (lambda x, w, v: jnp.maximum(x, -1) @ w, BF16),
    "a cast there and back before": (lambda x, w, v: jax.nn.relu(x).astype(F32).astype(BF16) @ w, BF16),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", BESIDES)
def test_products_read_inputs_of_the_step_behind_and_bound_nothing_on_both_sides_before(name):
    fun, dtype = BESIDES[name]
    moves_as_planned(fun, [S(TOKENS, dtype), S(WEIGHT, dtype), S(BACK, dtype)], rel=0.03)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(("gpu", "arrays"), [("a100", 1), ("h100", 0)])
def test_what_elementwise_work_in_bfloat16_makes_for_more_of_it_has_32_bits_before_hopper(gpu, arrays):
    """The tanh of gelu that its gradient reads; gelu's result and its gradient are read by products alone."""

    def loss(w, v, x):
        return ((jax.nn.gelu(x @ w) @ v).astype(F32) ** 2).mean()

    fn, args = jax.grad(loss, (0, 1)), (S((512, 1024), BF16), S((1024, 512), BF16), S((4096, 512), BF16))
    module = compile(jax.jit(fn), *args, target=f"{gpu}:1").module
    written = [a for i, _ in kernels(module).items() for a in i.arrays if a.shape == (4096, 1024)]
    assert sum(a.dtype == "f32" for a in written) == arrays
    facts = StepFacts.of(parse(jax.make_jaxpr(fn)(*args)), MeshShape(("x",), (1,)), Cluster.preset(gpu).device)
    assert [facts.graph.ops[facts.graph.values[v].producer[0]].primitive for v in facts.wide] == ["tanh"] * arrays


def summed(axis):
    return lambda x: jnp.tanh(jnp.tanh(x).sum(axis)) * 2


def normalized(x):
    return (x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-5)


FEW = {
    **{f"columns of {n}, {d} behind": (summed(1), (S((4096, n, d), F32),)) for n, d in ((8, 64), (31, 64), (48, 16), (100, 4))},
    **{f"more columns, {n} of {d}": (summed(1), (S((4096, n, d), F32),)) for n, d in ((32, 64), (48, 64), (100, 16))},
    **{f"rows of {n}": (summed(-1), (S((65536, n), F32),)) for n in (12, 24, 31, 32, 48)},
    "concatenated": (lambda x, z: jnp.concatenate([x.sum(1), z], 1), (S((4096, 8, 64), F32), S((4096, 64), F32))),
    "broadcast": (normalized, (S((4096, 8, 64), F32),)),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", FEW)
def test_sums_of_few_elements_are_part_of_elementwise_work(name):
    moves_as_planned(*FEW[name], rel=0.03)


def normal(x):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


TABLE, IDS = S((50304, 256), F32), S((64, 256), I32)
LOOKUPS = {
    "summed": (lambda t, i: jnp.tanh(t.astype(BF16)[i].sum(1)), (TABLE, S((4096, 8), I32))),
    "elementwise": (lambda t, i: jnp.tanh(t[i]), (TABLE, IDS)),
    "multiplied": (lambda t, i, w: t.astype(BF16)[i] @ w, (TABLE, IDS, S((256, 256), BF16))),
    "normalized": (lambda t, i: normal(t[i]), (TABLE, IDS)),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_are_part_of_kernels_that_keep_no_rows_and_read_rows_of_what_is_cast(name):
    moves_as_planned(*LOOKUPS[name], rel=0.03)


def recurrence(decay, x):
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, x), axis=1)[1]


def total(x):
    return lax.associative_scan(jnp.add, x, axis=1)


SCANNED = S((64, 128, 1024), F32)
SCANS = {
    "recurrence": (recurrence, (SCANNED, SCANNED), 0.1),
    "gradient of a recurrence": (lambda y, *x: jax.vjp(recurrence, *x)[1](y), (SCANNED,) * 3, 0.25),
    "sum": (total, (SCANNED,), 0.2),
    "gradient of a sum": (lambda y, x: jax.vjp(total, x)[1](y), (SCANNED, SCANNED), 0.25),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", SCANS)
def test_levels_of_an_associative_scan_are_written_as_slices_of_them_overlap(name):
    """Inputs and results alone are a third of what XLA moves."""
    fun, args, rel = SCANS[name]
    moves_as_planned(fun, args, rel)


def smoothed(x, w, labels):
    """A loss that smooths its labels, of more words than a kernel keeps on chip."""

    def loss(x):
        logp = jax.nn.log_softmax(x @ w)
        return -(0.9 * jnp.take_along_axis(logp, labels[:, None], -1)[:, 0] + 0.1 * logp.mean(-1)).mean()

    return jax.value_and_grad(loss)(x)


@pytest.mark.slow
@needs_gpu_compiler
def test_a_sum_of_the_forward_pass_is_in_the_kernel_of_a_gradient_that_waits_for_the_same():
    moves_as_planned(smoothed, (S((4096, 512), F32), S((512, 32768), F32), S((4096,), I32)), rel=0.03)


def checkpointed(activation):
    def loss(w, v, x):
        def layer(x):
            return activation(x @ w) @ v

        return (jax.checkpoint(layer)(jax.checkpoint(layer)(x)).astype(F32) ** 2).mean()

    return jax.grad(loss, argnums=(0, 1))


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu])
def test_an_expensive_activation_that_is_computed_again_and_its_gradient_are_one_kernel(activation):
    args = [S(shape, BF16) for shape in ((1024, 4096), (4096, 1024), (8192, 1024))]
    moves_as_planned(checkpointed(activation), args, rel=0.02)


BEHIND = {
    "tanh": lambda y, v: jnp.tanh(y),
    "three ops": lambda y, v: jnp.tanh(y) * 2 + 1,
    "an input": lambda y, v: jax.nn.relu(y + v),
    "two bounds": lambda y, v: lax.clamp(BF16(-1), y, BF16(1)),
    "a wider cast": lambda y, v: y.astype(F32),
    "a wider cast behind tanh": lambda y, v: jnp.tanh(y).astype(F32),
    "tanh behind a wider cast": lambda y, v: jnp.tanh(y.astype(F32)),
    "tanh and its sums": lambda y, v: (jnp.tanh(y), jnp.tanh(y).astype(F32).sum(0)),
    "sums alone": lambda y, v: jnp.tanh(y).astype(F32).sum(0),
    "what reads it twice": lambda y, v: jnp.tanh(y) * y,
    "an input that was cast": lambda y, v: y + v.astype(F32).astype(BF16),
}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("work", BEHIND.values(), ids=BEHIND)
def test_a_product_goes_on_to_what_is_in_memory(work):
    moves_as_planned(lambda x, w, v: work(x @ w, v), (S((2048, 2048), BF16), S((2048, 4096), BF16), S((4096,), BF16)), rel=0.02)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("bounded", [lambda x: lax.clamp(BF16(-1), x, BF16(1)), lambda x: jnp.clip(x, -1, 1), jnp.tanh])
def test_two_bounds_are_written_before_a_product_other_work_is_not(bounded):
    moves_as_planned(lambda x, w: bounded(x) @ w, (S((2048, 2048), BF16), S((2048, 4096), BF16)), rel=0.02)


@pytest.mark.slow
@needs_gpu_compiler
def test_what_a_product_writes_for_the_next_round_is_copied():
    moves_as_planned(lambda x, w: lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ w), x), (S((2048, 2048), BF16),) * 2, rel=0.05)


def moves_as_planned(fun, args, rel: float) -> None:
    assert megabytes(fun, *args) == pytest.approx(emitted_megabytes(fun, *args), rel=rel)


def emitted_megabytes(fun, *args) -> float:
    done = compile(jax.jit(fun), *args, target="h100:1")
    assert done.ok, done.error
    return sum(work.bytes * runs for work, runs in kernels(done.module).values()) / 1e6


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "turned"), [(4096, 4), (1 << 16, 0)])
def test_masked_rows_are_transposed_for_products_unless_a_split_product_reads_them_too(rows, turned, dtype):
    """Each ragged product reads rows, and the gradients of the weights contract them: of few rows and wide results in one part."""
    groups, d, h = (8, 1024, 1024) if turned else (8, 128, 256)

    def loss(p, x, sizes):
        return (lax.ragged_dot(jnp.sin(lax.ragged_dot(x, p["up"], sizes)), p["down"], sizes) ** 2).sum()

    args = {"up": S((groups, d, h), dtype), "down": S((groups, h, d), dtype)}, S((rows, d), dtype), S((groups,), I32)
    run = kernels(compile(jax.jit(jax.grad(loss, (0, 1))), *args, target="h100:1").module)
    copies = [i for i in run if "wrapped_transpose" in i.name and i.arrays[0].shape[:2] == (rows, groups)]
    weights = [i for i in run if "wrapped_transpose" in i.name and i.arrays[0].shape[0] == groups]
    assert (len(copies), len(weights)) == (turned, 2)
    emitted_s = sum(runs * work_s(work, H100) for work, runs in run.values())
    assert whole(jax.grad(loss, (0, 1)), *args, cluster=H100) == pytest.approx(emitted_s, rel=0.05 if turned else 0.08)
