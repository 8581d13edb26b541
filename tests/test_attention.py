"""cuDNN's attention: batch and heads shard, proven with kernels of the same specification on the CPU; planned with no cuDNN there."""

import math

import cudnn_on_cpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax._src.cudnn import fused_attention_stablehlo as cudnn
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
}


@pytest.mark.parametrize("case", CASES)
def test_batch_and_heads_shard(case):
    which, fn, args = CASES[case]
    with cudnn_assumed():
        (proof,) = check_rule(fn, *args, primitive=f"dot_product_attention_{which}_wrapper", pairs=0)
    assert proof.how == "local" and {"b:2", "m:2"} <= set(proof.shardings)


def rules(fn, *args):
    with cudnn_assumed():
        found = [e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name.startswith("dot_product_attention")]
    return [rule_for(e.primitive.name, [v.aval for v in e.invars], [v.aval for v in e.outvars], e.params, strict=True) for e in found]


def test_sequences_and_depth_and_the_heads_of_a_group_need_replication():
    for rule, known in rules(gradients, Q, K, V):
        assert known and rule.shard_local == {"b", "m"} and {"t", "s", "h", "g"} <= rule.replicated


def test_packed_sequences_shard_by_heads_and_dropout_does_not_shard():
    lengths, offsets = jax.ShapeDtypeStruct((4, 3), "int32"), jax.ShapeDtypeStruct((4, 4), "int32")
    x = array(4, 8, 8, 16)

    def packed(q, k, v, n, at):
        return cudnn.dot_product_attention(q, k, v, None, None, n, n, at, at, mask_type=cudnn.MaskType.PADDING)

    ((rule, known),) = rules(packed, x, x, x, lengths, offsets)
    assert known and rule.shard_local == {"m"}
    ((rule, known),) = rules(lambda x: cudnn.dot_product_attention(x, x, x, dropout_rate=0.1), x)
    assert not known and "same masks" in rule.unsharded


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
