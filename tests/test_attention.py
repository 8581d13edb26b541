"""cuDNN's attention: batch and heads shard, proven with kernels of the same specification on the CPU; planned with no cuDNN there."""

import functools
import inspect
import math

import cudnn_on_cpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan._jax import equations
from shardplan._jax_kernels import cudnn_assumed
from shardplan.strategies.rules import rule_for
from shardplan.testing import check_rule, difference
from shardplan.xla.compiler._backend import lower

pytestmark = pytest.mark.usefixtures("first_plan")

cudnn_on_cpu.install()


def array(*shape, seed=0, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def attend(q, k, v, bias=None, **kw):
    return jax.nn.dot_product_attention(q, k, v, bias=bias, implementation="cudnn", **kw)


def gradients(*xs, **kw):
    """Of attention's sum of squares by all operands."""
    return jax.grad(lambda *xs: (attend(*xs, **kw).astype("float32") ** 2).sum(), tuple(range(len(xs))))(*xs)


Q, K, V = array(4, 8, 8, 16), array(4, 16, 4, 16, seed=1), array(4, 16, 4, 16, seed=2)
LENGTHS = jnp.array([8, 3, 5, 1], "int32")
HEADS_FIRST = [jnp.swapaxes(x, 1, 2) for x in (Q, K, V)]
CASES = {
    "grouped queries, causal": ("bwd", lambda *xs: gradients(*xs, is_causal=True), (Q, K, V)),
    "bias of all batches": ("bwd", gradients, (Q, K, V, array(1, 8, 8, 16, seed=3))),
    "bias of all heads": ("bwd", gradients, (Q, K, V, array(4, 1, 8, 16, seed=3))),
    "lengths": ("fwd", lambda *xs: attend(*xs, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS), (Q, K, V)),
    "heads first": ("fwd", lambda *xs: cudnn.dot_product_attention(*xs, qkv_layout="BNTH"), HEADS_FIRST),
    "window": ("fwd", lambda *xs: attend(*xs, is_causal=True, local_window_size=(3, 0)), (Q, K, V)),
}


@pytest.mark.parametrize("case", CASES)
def test_batch_and_heads_shard(case):
    which, fn, args = CASES[case]
    with cudnn_assumed():
        (proof,) = check_rule(fn, *args, primitive=f"dot_product_attention_{which}_wrapper", pairs=0)
    assert proof.how == "local" and {"b:2", "m:2"} <= set(proof.shardings)


def proofs(fn, *args, **kw):
    """Of all attention in a function: primitive -> proven shardings."""
    with cudnn_assumed():
        found = [p for p in check_rule(fn, *args, **kw) if p.primitive.startswith("dot_product_attention")]
    assert all(p.how == "local" for p in found)
    return {p.primitive.removeprefix("dot_product_attention_").removesuffix("_wrapper"): p.shardings for p in found}


PACKED = [array(4, 16, 4, 8, seed=n) for n in range(4)]
SEGMENTS = jnp.array([[3, 5, 4], [9, -1, -1], [8, 8, -1], [1, 2, 6]], "int32")
OFFSETS = jnp.array([[0, 4, 12, -1], [2, -1, -1, -1], [0, 8, -1, -1], [0, 1, 10, -1]], "int32")
"""Three sequences in a row, one, two and three, some with gaps between them."""


def test_packed_sequences_shard_by_heads():
    def run(q, k, v, grad):
        packing = {"q_seqlen": SEGMENTS, "kv_seqlen": SEGMENTS, "q_offsets": OFFSETS, "kv_offsets": OFFSETS}
        attend = functools.partial(cudnn.dot_product_attention, **packing, mask_type=MaskType.PADDING_CAUSAL)
        return jax.vjp(attend, q, k, v)[1](grad)

    assert proofs(run, *PACKED) == dict.fromkeys(("fwd", "bwd"), ("m:2",))


def pages(count, size, seed):
    """Keys or values on so many pages, and a table that scatters the pages of every row."""
    order = np.random.default_rng(seed).permutation(count)
    return array(count, size, 4, 16, seed=seed), jnp.asarray(order.reshape(4, 1, -1, 1), "int32")


def paged(q, k, k_table, v, v_table, **kw):
    lengths = LENGTHS, jnp.array([16, 9, 12, 5], "int32")
    return cudnn.paged_attention(q, k, v, *lengths, k_table, v_table, mask_type=MaskType.PADDING, return_residual=True, **kw)


PAGED = Q, *pages(8, 8, 1), *pages(16, 4, 2)
"""Pages of values are half as long as pages of keys."""


def in_layout(xs, layout):
    """Tensors in this order of dims, tables as they are."""
    return [jnp.swapaxes(x, 1, 2) if layout == "BNTH" and x.shape[3] > 1 else x for x in xs]


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_heads_shard_with_their_pages_and_the_batch_with_its_page_tables(layout):
    run = functools.partial(paged, qkv_layout=layout)
    assert proofs(run, *in_layout(PAGED, layout), pairs=1) == {"fwd": ("b:2", "m:2", "b:2 m:2")}


FP8 = [array(2, 128, n, 128, seed=n, dtype="float8_e4m3fn") for n in (4, 2, 2, 4)]
UNDONE = "descale_s", "descale_o", "descale_dP"
SCALES = {n: jnp.full((1, 1, 1, 1), 32 if n.startswith("scale") else 1 / 32 if n in UNDONE else 0.5) for n in cudnn.fp8_params_keys}


def fp8(q, k, v, grad, scales, **kw):
    """Results, and gradients by all operands; those by scales are the largest values of the others."""
    made, by = jax.vjp(lambda *xs: cudnn.dot_product_attention(*xs[:3], fp8_params=xs[3], use_fp8=True, **kw), q, k, v, scales)
    return made, by((grad, *map(jnp.zeros_like, made[1:])))


@pytest.mark.parametrize("layout, mask", [("BTNH", MaskType.CAUSAL), ("BNTH", MaskType.NO_MASK)], ids=["BTNH", "BNTH"])
def test_fp8_attention_shards_by_batch_and_heads(layout, mask):
    run = functools.partial(fp8, scales=SCALES, qkv_layout=layout, mask_type=mask)
    assert proofs(run, *in_layout(FP8, layout), pairs=0) == dict.fromkeys(("fp8_fwd", "fp8_bwd"), ("b:2", "m:2"))


def test_fp8_attention_rounds_the_same_on_shards():
    step = shardplan.auto(jax.make_mesh((2, 2), ("x", "y")), cluster=NEAR)(fp8)
    kernels = [d for d in step.plan(*FP8, SCALES).decisions if d.primitive.startswith("dot_product_attention")]
    assert len(kernels) == 2 and all(set(d.strategy) == {"x", "y"} for d in kernels)
    with cudnn_assumed():
        plain = jax.jit(fp8)(*FP8, SCALES)
    for got, want in zip(jax.tree.leaves(step(*FP8, SCALES)), jax.tree.leaves(plain), strict=True):
        assert np.array_equal(got, want)


def test_of_alibi_only_the_batch_shards_since_slopes_are_by_head():
    def run(q, k, v, grad):
        return jax.vjp(functools.partial(cudnn.dot_product_attention, mask_type=MaskType.ALIBI), q, k, v)[1](grad)

    assert proofs(run, Q, K, V, array(*Q.shape, seed=3)) == dict.fromkeys(("fwd", "bwd"), ("b:2",))


def rules(fn, *args):
    with cudnn_assumed():
        found = [e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name.startswith("dot_product_attention")]
    return [rule_for(e.primitive.name, [v.aval for v in e.invars], [v.aval for v in e.outvars], e.params, strict=True) for e in found]


def test_sequences_and_depth_and_the_heads_of_a_group_need_replication():
    for rule, known in rules(gradients, Q, K, V):
        assert known and rule.shard_local == {"b", "m"} and {"t", "s", "h", "g"} <= rule.replicated


def test_what_goes_by_position_does_not_shard(monkeypatch):
    monkeypatch.setattr("shardplan._jax_kernels.ASSUMED_CUDNN", 91300)  # the first with a score_mod
    cases = {"same masks": {"dropout_rate": 0.1}}
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:
        cases["positions"] = {"score_mod": lambda scores, x: scores + x, "score_mod_args": (jnp.ones(16),)}
    for why, options in cases.items():
        attend = functools.partial(cudnn.dot_product_attention, **options)
        found = rules(lambda *xs, attend=attend: jax.vjp(attend, *xs)[1](Q), Q, K, V)
        assert len(found) == 2 and all(not known and why in rule.unsharded for rule, known in found)


def test_pages_have_no_gradient_that_shards():
    (_, known), (rule, gradient_known) = rules(jax.grad(lambda *xs: paged(*xs)[0].astype("float32").sum()), *PAGED)
    assert known and not gradient_known and "no gradient" in rule.unsharded


def test_fp8_attention_takes_the_maximum_of_all_shards():
    x = jax.ShapeDtypeStruct((4, 128, 8, 128), "float8_e4m3fn")
    scales = {key: jnp.ones((1, 1, 1, 1)) for key in cudnn.fp8_params_keys}

    def run(x, scales):
        return jax.vjp(lambda x: cudnn.dot_product_attention(x, x, x, use_fp8=True, fp8_params=scales)[0], x)[0]

    ((rule, known), *_) = rules(run, x, scales)
    assert known and rule.reduce == {"b": "max", "m": "max"} and rule.results[1] == ((),) * 4


def test_flops_are_two_products_forward_and_five_backward_halved_by_a_causal_mask():
    pairs = 2 * 4 * 8 * 8 * 16 * 16
    assert [r.flops for r, _ in rules(gradients, Q, K, V)] == [2 * pairs, 5 * pairs]
    assert [r.flops for r, _ in rules(CASES["grouped queries, causal"][1], Q, K, V)] == [pairs, 2.5 * pairs]
    assert [r.flops for r, _ in rules(paged, *PAGED)] == [2 * pairs]


def test_attention_is_lowered_for_absent_gpus_sharded_or_not():
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"))
    for shape, spec, shard in (((8, 64, 8, 64), P("x", None, "y"), "4x64x2x64"), ((3, 64, 3, 64), None, "3x64x3x64")):
        q = jax.ShapeDtypeStruct(shape, "bfloat16")
        step = shardplan.auto(mesh, cluster="h100", in_shardings=(spec,))(lambda q: attend(q, q, q, is_causal=True))
        (call,) = [x for x in lower(step, q, platform="cuda").as_text().split("\n") if "__cudnn$fmhaSoftmax" in x]
        assert f"tensor<{shard}xbf16>" in call


WEIGHTS = {
    "q": array(16, 8, 16) / 4,
    "k": array(16, 4, 16, seed=1) / 4,
    "v": array(16, 4, 16, seed=2),
    "bias": array(1, 8, 8, 8, seed=3),
}
"""Small enough that softmax does not blow up the rounding of bfloat16 sums of shards."""


def train(weights, x):
    def loss(weights):
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, weights[n]) for n in "qkv")
        return (attend(q, k, v, weights["bias"], is_causal=True).astype("float32") ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return grads, value


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
def test_a_step_gives_the_same_numbers_on_a_machine_without_cudnn(kind):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x = array(4, 8, 16, seed=7)
    step = shardplan.auto(mesh, cluster=NEAR)(train)
    kernels = [d for d in step.plan(WEIGHTS, x).decisions if d.primitive.startswith("dot_product_attention")]
    assert len(kernels) == 2 and all(math.prod(mesh.shape[a] for a in d.strategy) == 8 for d in kernels)
    with cudnn_assumed():
        plain = jax.jit(train)(WEIGHTS, x)
    for got, want in zip(jax.tree.leaves(step(WEIGHTS, x)), jax.tree.leaves(plain), strict=True):
        assert difference(got, want) is None
