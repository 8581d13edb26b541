"""Every rule: frozen as text, proven in numbers on 8 devices, and wrong ones found out."""

import contextlib
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from rule_examples import EXAMPLES, rules_table

import shardplan
from shardplan._jax import equations
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.enumerate import enumerate_strategies
from shardplan.strategies.register import is_registered, parse, register_rule
from shardplan.strategies.rule import RULES, Rule, RuleError, factors
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.shape import reshape_factors
from shardplan.testing import check_rule

GOLDEN = Path(shardplan.__file__).parent / "strategies" / "rules.txt"
BY_DEPENDENCE = {"random_bits", "random_split", "random_gamma"}
"""Primitives whose elements depend on their position: proven by what a shard depends on."""
NEWER = {"log2", "one_minus_square"}
"""Not made by every supported jax, so not in the frozen text."""
WITHOUT_EXAMPLE = """
    eq_to le_to lt_to threefry2x32 threefry4x32 philox2x32 philox4x32 iota_2x32_shape geqp3 from_edtype
    to_edtype  (inside others)
    polynomial empty empty2 broadcast_to zeros_like  (other versions of jax)
    scatter_add scatter_sub scatter_mul scatter_max scatter_min  (other spellings)
    shard_alike tie xla_metadata_value  (placements, too)
    device_put relayout sharding_constraint reshard layout_constraint with_memory_space_constraint  (placements)
    dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd_wrapper  (cuDNN's: test_attention.py)
    custom_partitioning  (of its users: test_partitioned.py)
    ffi_call  (of its users: test_foreign.py)
    core_map mpmd_map  (kernels without block mappings, replicated)
    debug_print debug_callback  (no results)
    mulhi select_and_scatter platform_index dce_sink  (not lowered for CPU, not reachable, nothing to split)
"""


@contextlib.contextmanager
def ruled(primitive: str, function):
    """A rule in place of the one the primitive has."""
    old = RULES.get(primitive)
    RULES[primitive] = function
    try:
        yield
    finally:
        if old is None:
            del RULES[primitive]
        else:
            RULES[primitive] = old


def test_the_table_is_as_frozen():
    assert rules_table([e for e in EXAMPLES if e.primitive not in NEWER]) == GOLDEN.read_text(), (
        "the rules changed; if they are better now, write rules_table() to shardplan/strategies/rules.txt"
    )


def test_every_rule_has_an_example():
    assert set(RULES) - {e.primitive for e in EXAMPLES} <= NEWER | set(WITHOUT_EXAMPLE.split())


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=lambda e: f"{e.primitive}-{sum(x.primitive == e.primitive for x in EXAMPLES[: EXAMPLES.index(e)])}"
)
def test_the_sharded_op_equals_the_global_one(example):
    for proof in check_rule(example.fn, *example.values(), primitive=example.primitive, pairs=1):
        depends = example.primitive in BY_DEPENDENCE or "head" in proof.rule
        assert proof.how == ("dependence" if depends else "local")


@pytest.mark.parametrize(
    ("primitive", "fn", "why"),
    [
        ("cumsum", lambda x: lax.cumsum(x, axis=0), "elements differ"),
        ("sort", lambda x: lax.sort(-x, dimension=0), "elements differ"),
        ("rev", lambda x: lax.rev(x, (0,)), "elements differ"),
    ],
)
def test_finds_a_factor_that_needs_replication(primitive, fn, why):
    with ruled(primitive, lambda x, *, out, **_: Rule((factors(x),), (factors(x),))), pytest.raises(RuleError, match=why):
        check_rule(fn, jnp.arange(32.0).reshape(8, 4))


def test_finds_a_wrong_kind_of_reduction():
    why = re.escape("reduce_max on float32[8] -> float32[] is wrong when sharded as a:4: 1 of 1 elements differ by up to 9 (allowed")
    wrong = ruled("reduce_max", lambda x, *, out, **_: Rule((factors(x),), ((),), reduce={"a": "sum"}))
    with wrong, pytest.raises(RuleError, match=why):
        check_rule(jnp.max, jnp.arange(8.0))


def test_finds_what_is_not_linear():
    wrong = ruled("exp", lambda x, *, out, **_: Rule((factors(x),), (factors(x),), linear=True))
    with wrong, pytest.raises(RuleError, match="marked linear"):
        check_rule(jnp.exp, jnp.arange(8.0))


def test_finds_a_partial_result_that_cannot_be_formed():
    wrong = ruled("random_bits", lambda x, *, out, **_: Rule((factors(x),), (factors(out[0], "o"),), reduce={"a": "sum"}))
    with wrong, pytest.raises(RuleError, match="partial result cannot be formed"):
        check_rule(jax.vmap(lambda k: jax.random.bits(k, (4,))), jax.random.split(jax.random.key(0), 8))


def test_proves_every_op_of_a_program_into_loops_and_branches():
    def step(w, xs):
        def cell(h, x):
            h = lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ w + x), lambda h: h, h)
            return h, h.sum()

        return lax.scan(cell, jnp.zeros_like(xs[0]), xs)

    proofs = check_rule(step, jnp.ones((4, 4)), jnp.ones((3, 2, 4)))
    assert {"tanh", "dot_general", "reduce_sum"} <= {p.primitive for p in proofs}


def test_proofs_are_held_against_a_file(tmp_path):
    golden = tmp_path / "rules.txt"
    for _ in range(2):
        check_rule(jnp.sum, jnp.ones(8), golden=golden)
    assert golden.read_text() == "reduce_sum  float32[8] -> float32[]  a ->   reduce a\n"
    why = re.escape(f"not as frozen in {golden}:\n--- frozen\n+++ now\n@@ -1 +1 @@\n-reduce_sum  float32[8]")
    with pytest.raises(RuleError, match=why):
        check_rule(jnp.sum, jnp.ones(16), golden=golden)


# ---- reshape


@st.composite
def reshapes(draw):
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), max_size=6))

    def shape():
        cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
        edges = [0, *cuts, len(primes)]
        return tuple(int(np.prod(primes[a:b], dtype=int)) for a, b in itertools.pairwise(edges))

    left, right = shape(), shape()
    return left, tuple(draw(st.permutations(right)))


@given(reshapes())
@settings(max_examples=200, deadline=None)
def test_a_sharded_reshape_keeps_every_element_at_its_index(shapes):
    """A factor's index at an element of the left shape equals that at the same element of the right shape."""
    left, right = shapes
    a, b, sizes, replicated = reshape_factors(left, right)

    def index(dims, factor):
        grid = [n for d in dims for n in [sizes[x] for x in d]]
        axis = [x for d in dims for x in d].index(factor)
        return np.broadcast_to(np.arange(grid[axis]).reshape([-1 if i == axis else 1 for i in range(len(grid))]), grid).reshape(-1)

    assert tuple(int(np.prod([sizes[x] for x in d], dtype=int)) for d in a) == left
    assert tuple(int(np.prod([sizes[x] for x in d], dtype=int)) for d in b) == right
    for factor in {x for d in a for x in d} - replicated:
        np.testing.assert_array_equal(index(a, factor), index(b, factor))


def test_a_reshape_shares_every_factor_it_can():
    assert reshape_factors((8, 6), (2, 4, 6)) == ((("a", "b"), ("c",)), (("a",), ("b",), ("c",)), {"a": 2, "b": 4, "c": 6}, frozenset())
    assert reshape_factors((2, 3), (3, 2))[3] == {"a", "b", "c", "d"}
    assert reshape_factors((12, 5), (6, 10))[:2] == ((("a", "b"), ("c",)), (("a",), ("b", "c")))
    assert reshape_factors((0, 3), (3, 0))[3] == {"a", "b", "c", "d"}


# ---- unknown primitives, and the user's rules


class Aval:
    def __init__(self, *shape):
        self.shape, self.dtype = shape, np.dtype("float32")


@pytest.mark.parametrize(
    ("kernel", "params"),
    [
        ((3, 3, 4, 6), dict(window_strides=(1, 1), padding="SAME")),
        ((3, 3, 4, 6), dict(window_strides=(2, 3), padding=((3, 1), (0, 2)), lhs_dilation=(2, 3), rhs_dilation=(1, 2))),
        ((8, 8, 4, 6), dict(window_strides=(1, 1), padding=((1, 1), (1, 1)))),
        ((3, 3, 2, 6), dict(window_strides=(1, 1), padding="SAME", feature_group_count=2)),
        ((3, 3, 4, 6), dict(window_strides=(1, 1), padding="SAME", batch_group_count=2)),
    ],
)
def test_flops_of_a_convolution_are_what_xla_counts(kernel, params):
    def conv(x, w):
        return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **params)

    args = jax.ShapeDtypeStruct((4, 8, 8, 4), jnp.float32), jax.ShapeDtypeStruct(kernel, jnp.float32)
    (eqn,) = jax.make_jaxpr(conv)(*args).eqns
    rule, _ = rule_for(eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
    counted = jax.jit(conv).lower(*args).cost_analysis()
    assert counted is not None and rule.flops == counted["flops"]


def test_an_unknown_primitive_is_replicated_and_says_so():
    rule, known = rule_for("warp_drive", [Aval(8, 4), Aval()], [Aval(8)], {"speed": 9})
    assert not known and rule.replicated == {"x0_a", "x0_b", "y0_a"}


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_types_that_xla_cannot_send_stay_replicated(dtype):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.arange(64).reshape(16, 4).astype(dtype)

    def step(x):
        y = lax.reduce(x, jnp.zeros((), dtype), lax.add, (0,))
        return y, x.astype(jnp.int32) + 1

    planned = shardplan.auto(mesh, cluster=NEAR)(step)
    for got, want in zip(planned(x), step(x), strict=True):
        np.testing.assert_array_equal(got.astype(int), want.astype(int))
    plan = planned.plan(x)
    assert {d.primitive for d in plan.decisions if d.strategy} <= {"add"}


@pytest.mark.parametrize(
    "unfit",
    [
        lambda x, *, out, speed, **_: Rule((factors(x),), (factors(x),)),  # a parameter that this jax does not have
        lambda x, *, out, **_: Rule((factors(x),), ((),)),
    ],
)
def test_a_rule_that_does_not_fit_keeps_the_op_replicated(unfit):
    with ruled("neg", unfit):
        rule, known = rule_for("neg", [Aval(8)], [Aval(8)], {})
        assert not known and rule.replicated == {"x0_a", "y0_a"}
        with pytest.raises(RuleError):
            rule_for("neg", [Aval(8)], [Aval(8)], {}, strict=True)


def test_a_bug_in_a_rule_raises_with_its_own_traceback():
    def buggy(x, **_):
        return 1 / 0

    with ruled("neg", buggy), pytest.raises(ZeroDivisionError) as error:
        rule_for("neg", [Aval(8)], [Aval(8)], {})
    assert error.traceback[-1].name == "buggy"


@pytest.fixture
def mine():
    yield "my_op"
    RULES.pop("my_op", None)


def test_a_registered_rule_is_used(mine):
    register_rule(mine, "... d, d f -> ... f", reduce="d", flops=lambda n: 2 * n["...0"] * n["...1"] * n["d"] * n["f"])
    rule, known = rule_for(mine, [Aval(2, 8, 4), Aval(4, 6)], [Aval(2, 8, 6)], {})
    assert known and str(rule) == "...0 ...1 d, d f -> ...0 ...1 f  reduce d" and rule.flops == 2 * 2 * 8 * 4 * 6
    register_rule(mine, "a b -> a", reduce="b=max")
    assert rule_for(mine, [Aval(8, 4)], [Aval(8)], {})[0].reduce == {"b": "max"}
    register_rule(mine, "... d -> ... d", replicated="... d")
    assert rule_for(mine, [Aval(8, 4)], [Aval(8, 4)], {})[0].replicated == {"...0", "d"}


@pytest.mark.parametrize(
    ("pattern", "kw", "message"),
    [
        ("a b -> a", {}, "rule 'a b -> a' for my_op: ['b'] are in operands only, so sharding leaves a partial result"
         " of unknown kind\n  way out: name them in reduce= or replicated="),
        ("a b -> a b", {"reduce": "b"}, "'b' is reduced but stands in a result"),
        ("a b -> a", {"reduce": "c"}, "reduce= names 'c', which is in no operand\n  way out: one of ['b']"),
        ("a b -> a", {"reduce": "b=mean"}, "'b' is reduced by 'mean'\n  way out: one of sum, max, min, prod, and, or"),
        ("a a -> a", {}, "'a' stands twice in 'a a'"),
        ("a b -> a b", {"replicated": "z"}, "replicated= names ['z'], which are in no tensor"),
        ("a b, a b", {}, "needs operands and results separated by one '->'"),
        ("a (b c -> a", {}, "parentheses in 'a (b c' are nested or unbalanced"),
        ("a b -> a, b", {"reduce": "a"}, "['b'] are not in result 0, so sharding leaves a partial one of unknown kind\n  way out: "),
        ("a b c -> a", {"shard_local": True, "reduce": "b=max c"}, "partial results are of one kind, here of max, sum\n  way out: fac"),
    ],
)  # fmt: skip
def test_a_rule_that_contradicts_itself_is_refused(mine, pattern, kw, message):
    with pytest.raises(RuleError, match=re.escape(message)):
        register_rule(mine, pattern, **kw)
    assert mine not in RULES


@pytest.mark.parametrize(
    ("ins", "message"),
    [
        ([Aval(8, 4, 2)], "rule 'a b -> a  reduce b' of my_op does not fit [8,4,2] -> [8]: 'a b' names 2 dims, [8,4,2] has 3"
         "\n  way out: a factor for each, or '...' for leading dims of any number"),
        ([Aval(6, 4)], "factor 'a' is both 6 and 8\n  way out: a second factor for one of the two, both in replicated="),
        ([Aval(8, 4), Aval(8)], "it names 1 operands and 1 results, the op has 2 and 1: [8,4], [8] -> [8]\n"
         "  way out: a tensor for each"),
    ],
)  # fmt: skip
def test_a_registered_rule_that_does_not_fit_its_op_is_an_error(mine, ins, message):
    register_rule(mine, "a b -> a", reduce="b")
    with pytest.raises(RuleError, match=re.escape(message)):
        rule_for(mine, ins, [Aval(8)], {})


@pytest.mark.parametrize(
    ("flops", "message"),
    [
        (lambda n: n["z"], "rule 'a b -> a' for my_op: flops= raised KeyError('z')"),
        (lambda n: n["a"] - n["b"] * 100, "flops= says -392.0"),
        (lambda n: "many", "flops= raised ValueError"),
    ],
)
def test_flops_that_cannot_be_counted_are_an_error(mine, flops, message):
    register_rule(mine, "a b -> a", reduce="b", flops=flops)
    with pytest.raises(RuleError, match=re.escape(message)) as error:
        rule_for(mine, [Aval(8, 4)], [Aval(8)], {})
    assert "way out: a number from the sizes of the factors, here {'a': 8, 'b': 4}" in str(error.value)


def test_a_kernel_that_says_global_shapes_runs_on_no_shard():
    with pytest.raises(RuleError, match=r"pallas_call: it says the global shapes.*\n  way out: a primitive of your own"):
        register_rule("pallas_call", "a b -> a b", shard_local=True)
    assert not is_registered("pallas_call")


def test_every_assignment_of_axes_to_factors_that_divide_is_a_strategy():
    left, right = parse("a b c, c d e -> a b d e")
    rule, sizes = Rule(left, right, reduce={"c": "sum"}), dict.fromkeys("abcde", 8)
    mesh = MeshShape(("x", "y", "z"), (2, 2, 2))
    assert set(enumerate_strategies(rule, sizes, mesh).factors) == set(itertools.product([None, *"abcde"], repeat=3))
    fewer = enumerate_strategies(rule, sizes | {"a": 4, "b": 1}, mesh).factors
    assert set(fewer) == {c for c in itertools.product([None, *"acde"], repeat=3) if c.count("a") < 3}


def test_axes_on_one_factor_stack_in_mesh_order_or_with_one_of_them_last():
    left, right = parse("a b, b c -> a c")
    rule, sizes = Rule(left, right, reduce={"b": "sum"}), dict.fromkeys("abc", 8)
    found = enumerate_strategies(rule, sizes, MeshShape(("x", "y", "z"), (2, 2, 2)))
    assert len(set(found.keys)) == len(found)
    rows = {
        word: {"".join(of.dims[0]) for (factors, _), of in zip(found.keys, found.operands[0], strict=True) if factors == tuple(word)}
        for word in ("aab", "aba", "aaa", "abc")
    }
    assert rows == {"aab": {"xy", "yx"}, "aba": {"xz", "zx"}, "aaa": {"xyz", "yzx", "xzy"}, "abc": {"x"}}
    one_row = enumerate_strategies(rule, sizes, MeshShape(("x", "y", "z"), (2, 1, 2)))
    assert {of.dims[0] for of in one_row.operands[0]} == {(), ("x",), ("z",), ("x", "z"), ("z", "x")}


def test_axes_stack_in_mesh_order_where_shards_need_something_of_each_other():
    left, right = parse("a b -> a b")
    rule = Rule(left, right, scan=frozenset("a"))
    found = enumerate_strategies(rule, {"a": 8, "b": 8}, MeshShape(("x", "y"), (2, 2)))
    assert {of.dims for of in found.operands[0] if len(of.dims[0] + of.dims[1]) > 1} == {
        (("x", "y"), ()), (("x",), ("y",)), (("y",), ("x",)), ((), ("x", "y")), ((), ("y", "x")),
    }  # fmt: skip


def test_patterns_and_rules_are_one_notation():
    for example in EXAMPLES[::20]:
        eqns = equations(jax.make_jaxpr(example.fn)(*example.values()).jaxpr)
        eqn = next(e for e in eqns if e.primitive.name == example.primitive)
        rule, _ = rule_for(example.primitive, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
        if () not in rule.operands:  # a scalar is an empty text, as is no operand at all
            assert parse(str(rule).split("  ")[0]) == (rule.operands, rule.results)
