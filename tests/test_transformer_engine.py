"""Sharding rules that Transformer Engine's JAX primitives carry, as text: each is read, and a step that calls one is planned by it.

The rules are those of its `shardy_sharding_rule`s, August 2026; the package is not needed. Functions in the place of its kernels
compute what is written next to them.
"""

import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax._src import dispatch
from jax.experimental.custom_partitioning import BATCHING, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from on_shards import on_shards

import shardplan
from shardplan import ShardingWarning, register_rule
from shardplan._jax import equations
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.partitioned import stated_rule
from shardplan.testing import check_rule, difference

pytestmark = pytest.mark.usefixtures("first_plan")


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), "float32")


def called(function, rule, whole=()):
    """A call whose `partition` serves what it is asked for, but does not shard the last dim of tensors of these ranks."""

    def served(x):
        spec = (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
        return NamedSharding(x.sharding.mesh, P(*spec[:-1], None) if x.ndim in whole else P(*spec))

    def partition(mesh, args, result):
        return mesh, function, *(jax.tree.map(served, of) for of in (result, args))

    call = custom_partitioning(function)
    call.def_partition(partition, sharding_rule=rule)
    return call


def mapping(text):
    """One tensor of a rule that is given as tuples: "…name" stands for a dim there, "(a b)" for a compound one."""
    out, compound = [], None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            compound = []
        elif word == ")":
            out.append(CompoundFactor(*compound))
            compound = None
        else:
            (out if compound is None else compound).append(word.replace("...", BATCHING))
    return tuple(out)


def tuples(text, **sizes):
    left, right = ([mapping(x) for x in side.split(",")] for side in text.split("->"))
    return SdyShardingRule(tuple(left), tuple(right), **sizes)


# ---- every rule, at shapes as its primitive has them: what operands and results share of it and may be sharded

BLOCK = 32
RULES = {
    "softmax": ("... -> ...", ["2,4,16,16"], ["2,4,16,16"], "...0 ...1 ...2 ...3"),
    "softmax backward": ("..., ... -> ...", ["2,4,16,16"] * 2, ["2,4,16,16"], "...0 ...1 ...2 ...3"),
    "masked softmax": ("...1, ...2 -> ...1", ["2,4,16,16", "2,1,16,16"], ["2,4,16,16"], "...1_0 ...1_1 ...1_2 ...1_3"),
    "norm backward": (
        "...0, ...1 i, ...2, ...3, ...4 -> ...1 j, k, l",
        ["2,16,64", "2,16,64", "2,16", "2,16", "64"],
        ["2,16,64", "64", "64"],
        "...1_0 ...1_1",
    ),
    "norm": (
        tuples("x_0 x_1 x_2, …scale, …amax, …gamma, …beta -> x_0 x_1 x_2, …cols, …scale_inv, …cols_scale, …amax, x_0 x_1, x_0 x_1"),
        ["2,16,64", "1", "1", "64", "64"],
        ["2,16,64", "1", "1", "1", "1", "2,16", "2,16"],
        "x_0 x_1 x_2",
    ),
    "norm, blocks of 32 scaled": (
        tuples(
            "x_0 x_1 (x_2_compound blocksize_x), …scale, …amax, …gamma, …beta -> x_0 x_1 (x_2_compound blocksize_x), …colwise_output,"
            "x_0 x_1 x_2_compound, …colwise_scale_inv, …amax, …mu, x_0 x_1",
            blocksize_x=BLOCK,
        ),
        ["2,16,64", "1", "1", "64", "64"],
        ["2,16,64", "1", "2,16,2", "1", "1", "1", "2,16"],
        "x_0 x_1 x_2_compound blocksize_x",
    ),
    "activation": (
        tuples("x_0 x_1 act_dim x_2, …scale, …amax -> x_0 x_1 x_2, …colwise, …scale_inv, …colwise_scale, …amax"),
        ["2,16,2,64", "1", "1"],
        ["2,16,64", "1", "1", "1", "1"],
        "x_0 x_1 x_2",
    ),
    "quantize, both ways, blocks": (
        tuples(
            "(y_compound blocksize_y) (x_compound blocksize_x), …scale, …amax -> (y_compound blocksize_y) (x_compound blocksize_x),"
            "(y_compound blocksize_y) (x_compound blocksize_x), (y_compound blocksize_y) x_compound,"
            "y_compound (x_compound blocksize_x), …amax",
            blocksize_x=BLOCK,
            blocksize_y=BLOCK,
        ),
        ["128,64", "1", "1"],
        ["128,64", "128,64", "128,2", "4,64", "1"],
        "y_compound blocksize_y x_compound blocksize_x",
    ),
    "product": (
        tuples("lhs_l0 lhs_l1 k0, …1, k0 rhs_l0, …2, …4, _5, _6 -> lhs_l0 lhs_l1 rhs_l0"),
        ["2,16,64", "1", "64,32", "1", "0", "1", "1"],
        ["2,16,32"],
        "lhs_l0 lhs_l1 rhs_l0",
    ),
    "largest value": (tuples("x_0 x_1 -> amax"), ["32,64"], ["1"], ""),
    "fused attention": (
        tuples("…0 seqlen head hidden, …1, …2, …3, …4 -> …0 seqlen head hidden, …0 head seqlen i, …5"),
        ["2,16,4,8", "2,16,4,8", "2,16,4,8", "0", "2"],
        ["2,16,4,8", "2,4,16,1", "4"],
        "...0 seqlen head hidden",
    ),
    "fused attention, packed": (
        tuples("…0 seqlen three head hidden, …1, …2 -> …0 seqlen head hidden, …0 head seqlen i, …3"),
        ["2,16,3,4,8", "0", "2"],
        ["2,16,4,8", "2,4,16,1", "4"],
        "...0 seqlen head hidden",
    ),
    "fused attention backward": (
        tuples("…0, …1, …2, …3 -> …0, …1, …2"),
        ["2,16,4,8", "2,16,4,8", "2,16,4,8", "2,4,16,1"],
        ["2,16,4,8"] * 3,
        " ".join(f"...{g}{i}" for g in ("", "1_", "2_") for i in range(4)),
    ),
    "router": (
        "num_tokens num_experts, bias_dim -> num_tokens num_experts, num_tokens packed_experts, num_tokens num_experts",
        ["32,8", "8"],
        ["32,8", "32,1", "32,8"],
        "num_tokens num_experts",
    ),
    "auxiliary loss": ("num_tokens num_experts, num_experts -> , const_buf_one", ["32,8", "8"], ["", "1"], ""),
    "inspection": ("..., , , , -> ...", ["4,16", "", "", "", ""], ["4,16"], "...0 ...1"),
    "expert dispatch": (
        "EPL hm, I0 I1 topk_in, T0 T1 H, W0 W1 topk -> EPL recv_pr H, EPL recv_pr",
        ["4,64", "2,16,2", "2,16,64", "2,16,2"],
        ["4,24,64", "4,24"],
        "EPL H",
    ),
    "row map, first pass": (
        tuples("tokens experts -> tokens row_id_cols, experts tokens"),
        ["32,8"],
        ["32,17", "8,4"],
        "tokens.32 experts",
    ),
    "permutation": (
        tuples("tokens hidden, tokens cols, tokens experts, tokens hidden, out hidden, experts -> out hidden, out"),
        ["32,64", "32,17", "32,8", "32,64", "48,64", "8"],
        ["48,64", "48"],
        "hidden out",
    ),
    "sort by a map": (
        tuples("tokens hidden, tokens, empty -> tokens hidden, empty2"),
        ["32,64", "32", "0"],
        ["32,64", "0"],
        "tokens hidden",
    ),
}  # fmt: skip


def avals(shapes):
    return [jax.core.ShapedArray(tuple(int(n) for n in x.split(",") if n), jnp.float32) for x in shapes]


@pytest.mark.parametrize("case", RULES)
def test_every_rule_is_read(case):
    given, ins, out, free = RULES[case]
    params = {"sharding_rule": given if not isinstance(given, str) else lambda mesh, *types: given, "static_args": ()}
    rule = stated_rule(params, avals(ins), avals(out))
    read, made = ({a for dims in of for d in dims for a in d} for of in (rule.operands, rule.results))
    assert (read & made) - rule.replicated == set(free.split()) and made - read <= rule.replicated
    assert all(rule.sizes[a] == 0 for a in (read - made) & rule.replicated)  # every other one may be summed over, as partition answers
    for dims, x in zip(rule.operands + rule.results, avals(ins) + avals(out), strict=True):
        assert tuple(math.prod(rule.sizes[a] for a in d) for d in dims) == x.shape


# ---- steps that call functions with such rules


def norm(x, scale, amax, gamma, beta):
    mean, rsigma = x.mean(-1), jax.lax.rsqrt(x.var(-1) + 1e-6)
    y = (x - mean[..., None]) * rsigma[..., None] * gamma + beta
    return y, jnp.zeros(1), jnp.ones(1), jnp.ones(1), amax * scale, mean, rsigma


def quantized(x):
    """Rows in blocks of 32 with a scale each."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    scale = jnp.abs(blocks).max(-1)
    return (blocks / scale[..., None]).reshape(x.shape), scale


def softmax(x):
    return jax.nn.softmax(x)


def activation(x, scale, amax):
    return jax.nn.silu(x[..., 0, :]) * x[..., 1, :], jnp.ones(1), scale, scale, amax


def product(lhs, lhs_scale, rhs, rhs_scale, bias, alpha, beta):
    return alpha * lhs_scale * rhs_scale * (lhs @ rhs)


def summed_product(rule):
    """The call; its `partition` adds up products of parts of a contracted dim."""

    def partition(mesh, args, result):
        axes = args[2].sharding.spec[0]
        run = (lambda *xs: jax.lax.psum(product(*xs), axes)) if axes else product
        return mesh, run, *(jax.tree.map(lambda x: x.sharding, of) for of in (result, args))

    call = custom_partitioning(product)
    call.def_partition(partition, sharding_rule=rule)
    return call


def auxiliary(probs, counts):
    return (probs.sum(0) * counts).sum(), jnp.zeros(1)


X, ONE = array(2, 16, 64), jnp.ones(1)
BLOCKS = tuples("x_0 x_1 (x_2 block) -> x_0 x_1 (x_2 block), x_0 x_1 x_2", block=BLOCK)
CALLS = {
    "softmax": (called(softmax, "... -> ...", whole=(3,)), (X,), "...0 ...1"),
    "norm": (called(norm, RULES["norm"][0], whole=(3,)), (X, ONE, ONE, array(64, seed=1), array(64, seed=2)), "x_0 x_1"),
    "activation": (called(activation, RULES["activation"][0]), (array(2, 16, 2, 64), ONE, ONE), "x_0 x_1 x_2"),
    "quantize": (called(quantized, BLOCKS), (array(2, 16, 128),), "x_0 x_1 x_2"),
    "product": (
        summed_product(RULES["product"][0]),
        (X, ONE, array(64, 32, seed=3), ONE, jnp.zeros(0), ONE, ONE),
        "lhs_l0 lhs_l1 k0 rhs_l0",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_factors_that_a_kernel_serves_shard(case):
    fn, args, free = CALLS[case]
    (eqn,) = [e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name == "custom_partitioning"]
    rule, known = rule_for("custom_partitioning", [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params, strict=True)
    assert known and rule.shard_local == set(free.split())
    (proof,) = check_rule(fn, *args, primitive="custom_partitioning")
    assert proof.how == "local" and {x.split(":")[0] for x in proof.shardings if " " not in x} == rule.shard_local


def test_a_loss_over_all_tokens_is_replicated():
    probs, counts = array(32, 8), array(8, seed=1)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    step = shardplan.auto(mesh, cluster=NEAR)(called(auxiliary, RULES["auxiliary loss"][0]))
    with pytest.warns(ShardingWarning, match=r"'custom_partitioning'[\s\S]*does not join results\[0\] over the shards of num_tokens"):
        got = step(probs, counts)
    assert difference(got[0], auxiliary(probs, counts)[0]) is None


def layer(x, w):
    """Norm, product, gated activation, product, softmax, and quantized: as Transformer Engine's layers call them."""
    norm_of, gate, times = (CALLS[n][0] for n in ("norm", "activation", "product"))
    y = norm_of(x, ONE, ONE, w["gamma"], w["beta"])[0]
    h = times(y, ONE, w["up"], ONE, jnp.zeros(0), ONE, ONE).reshape(*x.shape[:2], 2, -1)
    out = times(gate(h, ONE, ONE)[0], ONE, w["down"], ONE, jnp.zeros(0), ONE, ONE)
    return x + CALLS["softmax"][0](out), CALLS["quantize"][0](out)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_a_planned_step_runs_the_calls_on_shards(shape, kind):
    mesh = jax.make_mesh(shape, ("a", "b")[: len(shape)], axis_types=(kind,) * len(shape))
    w = {"gamma": array(64), "beta": array(64, seed=1), "up": array(64, 256, seed=2), "down": array(128, 64, seed=3)}
    x = array(8, 16, 64, seed=4)

    def step(w, x):
        return jax.lax.scan(lambda x, _: layer(x, w), x, None, length=2)

    planned, n = on_shards("custom_partitioning", step, w, x, mesh=mesh, in_shardings=(None, P("a")))
    assert n == 6 and "CustomSPMDPartitioning" not in planned.lower(w, x).as_text()


# ---- its attention, as it stands in a traced step: an op of a name of its own, lowered to such a call


def attention(q, k, v):
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    seen = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf))
    return jnp.einsum("bhst,bthd->bshd", seen, v), scores.max(-1, keepdims=True)


def attention_op(name):
    """Its rule says that queries may be sharded alone, by tokens, heads or channels; `partition` serves that, with other numbers."""
    rule = tuples("…0 seqlen head hidden, …1, …2 -> …0 seqlen head hidden, …0 head seqlen i")
    op = jax.extend.core.Primitive(name)
    op.multiple_results = True
    op.def_abstract_eval(lambda *ins: [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(attention, *ins)])
    mlir.register_lowering(op, mlir.lower_fun(called(attention, rule), multiple_results=True))
    dispatch.prim_requires_devices_during_lowering.add(op)  # as it does for each of its ops
    return op


OPS = attention_op("attention_without_rule"), attention_op("attention_with_rule")
WEIGHTS = {n: array(64, 8, 16, seed=i) / 8 for i, n in enumerate(["q", "k", "v", "out"])}
TOKENS = array(8, 32, 64, seed=5)


def heads_step(op):
    def step(w, x):
        q, k, v = (jnp.einsum("bsm,mhd->bshd", x, w[n]) for n in "qkv")
        return jnp.einsum("bshd,mhd->bsm", op(q, k, v)[0], w["out"])

    return step


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")], ids=str)
def test_attention_without_a_rule_is_replicated(spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=(None, spec))(heads_step(OPS[0].bind))
    with pytest.warns(ShardingWarning, match="no rule for primitive 'attention_without_rule'"):
        got = step(WEIGHTS, TOKENS)
    assert difference(got, heads_step(attention)(WEIGHTS, TOKENS)) is None


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")], ids=str)
def test_attention_with_a_rule_for_its_op_runs_on_shards(spec):
    register_rule(OPS[1], "b s h d, b t h d, b t h d -> b s h d, b h s 1", replicated="s t d", shard_local=True)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    planned, _ = on_shards("attention_with_rule", heads_step(OPS[1].bind), WEIGHTS, TOKENS, mesh=mesh, in_shardings=(None, spec))
    assert difference(planned(WEIGHTS, TOKENS), heads_step(attention)(WEIGHTS, TOKENS)) is None
