"""Foreign calls whose target has a rule: every device calls the target on its own shards, with the numbers of the plain step."""

import ctypes
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from on_shards import on_shards

import shardplan
from shardplan import ShardingWarning
from shardplan.strategies import register
from shardplan.strategies.rule import RuleError
from shardplan.testing import check_rule, difference
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")


@pytest.fixture(autouse=True)
def no_rules():
    """The table of targets' rules, empty before and after, and jax's LAPACK loaded."""
    register.TARGETS.clear()
    jnp.linalg.cholesky(jnp.eye(2))
    yield
    register.TARGETS.clear()


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.2, 0.9, shape), "float32")


def like(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# ---- LAPACK, which jaxlib has for the CPU


def by_columns(x):
    """LAPACK's order of a batch of matrices."""
    return (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


def lu(x):
    batch = x.shape[:-2]
    results = [like(*x.shape), like(*batch, x.shape[-1], dtype="int32"), like(*batch, dtype="int32")]
    layouts = {"input_layouts": [by_columns(x)], "output_layouts": [by_columns(x), None, None]}
    return jax.ffi.ffi_call("lapack_sgetrf_ffi", results, **layouts, input_output_aliases={0: 0}, vmap_method="broadcast_all")(x)


def solve(a, b, trans="N"):
    """Systems of lower triangles."""
    layouts = {"input_layouts": [by_columns(a), by_columns(b)], "output_layouts": by_columns(b)}
    call = jax.ffi.ffi_call("lapack_strsm_ffi", like(*b.shape), **layouts, vmap_method="broadcast_all")
    kinds = {"side": "L", "uplo": "L", "trans_x": trans, "diag": "N"}
    return call(a, b, **{name: np.uint8(ord(value)) for name, value in kinds.items()})


@jax.custom_vjp
def solved(a, b):
    return solve(a, b)


def solved_backward(kept, g):
    a, x = kept
    g = solve(a, g, trans="T")
    return jnp.tril(-jnp.einsum("...ik,...jk->...ij", g, x)), g


solved.defvjp(lambda a, b: (x := solve(a, b), (a, x)), solved_backward)


def register_lapack():
    rule = "... n m -> ... n m, ... p, ..."
    shardplan.register_rule("ffi_call", rule, target="lapack_sgetrf_ffi", replicated="n m p", flops=lambda n: 2 / 3 * n["n"] ** 3)
    shardplan.register_rule("ffi_call", "... n m, ... n k -> ... n k", target="lapack_strsm_ffi", replicated="n m")


def triangles(*batch, n=6):
    return jnp.tril(array(*batch, n, n)) + jnp.eye(n)


def train(a, b):
    """A scan with recomputation over systems, and its gradient."""

    def loss(a, b):
        return (jax.lax.scan(jax.checkpoint(lambda b, a: (jnp.tanh(solved(a, b)), ())), b, a)[0] ** 2).sum()

    value, grads = jax.value_and_grad(loss, (0, 1))(a, b)
    return value, grads, jax.jit(lu)(a[0])[0]


def mesh_of(shape, kind):
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(kind,) * len(shape))


def planned_as(fn, *args, **options):
    """The planned step; all its foreign calls run on shards."""
    return on_shards("ffi_call", fn, *args, **options)[0]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_a_step_calls_lapack_on_shards_in_scans_and_gradients(shape, kind):
    register_lapack()
    mesh, a, b = mesh_of(shape, kind), triangles(3, 8), array(8, 6, 4, seed=1)
    step = planned_as(train, a, b, mesh=mesh, in_shardings=(P(None, "x"), P("x")))
    text = step.compile(a, b).as_text()
    assert not {"all-gather", "all-to-all"} & {c.kind for c in collectives(text)}
    assert re.search(r"\(f32\[1,6,6\]\S*, .* custom-call\(.*lapack_sgetrf_ffi", text)


@pytest.mark.parametrize("axes", [0, (0, None), (None, 0)], ids=str)
def test_batched_calls_shard_along_the_batch(axes):
    register_lapack()
    a, b = (triangles(8) if axes in (0, (0, None)) else triangles()), (array(8, 6, 4) if axes in (0, (None, 0)) else array(6, 4))
    planned_as(jax.vmap(solve, axes), a, b, mesh=mesh_of((8,), AxisType.Auto))


def test_the_rules_hold_in_numbers():
    register_lapack()
    (proof,) = check_rule(lu, array(2, 8, 4, 4) + jnp.eye(4))
    assert proof.how == "local" and proof.shardings == ("...0:2", "...1:4", "...0:2 ...1:2")
    (proof,) = check_rule(solve, triangles(8), array(8, 6, 4))
    assert proof.how == "local" and {"...0:4", "k:2"} <= set(proof.shardings)
    shardplan.register_rule("ffi_call", "... n m, ... n k -> ... n k", target="lapack_strsm_ffi", replicated="m k")
    with pytest.raises(RuleError, match=r"rule '...0 n m, .* replicated k m' of ffi_call on .* is wrong when sharded as n:"):
        check_rule(solve, triangles(8), array(8, 6, 4))


def test_operations_are_those_of_the_rule():
    register_lapack()
    plan = shardplan.auto(mesh_of((8,), AxisType.Auto), cluster=NEAR)(lu).plan(array(8, 6, 6))
    rules = [
        r for op, r in zip(plan.context.planned.graph.ops, plan.context.planned.space.rules, strict=True) if op.primitive == "ffi_call"
    ]
    assert [r.flops for r in rules] == [2 / 3 * 6**3]


# ---- functions of a user's own (`foreign.cc`)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    made, source = tmp_path_factory.mktemp("foreign") / "foreign.so", Path(__file__).with_name("foreign.cc")
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}", str(source), "-o", str(made)], check=True)
    found = ctypes.cdll.LoadLibrary(str(made))
    for name in ("scale", "most"):
        jax.ffi.register_ffi_target(f"test_{name}", jax.ffi.pycapsule(getattr(found, name)), platform="cpu")


def scale(x, w, **options):
    results = [like(*x.shape), like(x.shape[-1])]
    return jax.ffi.ffi_call("test_scale", results, **options)(x, w, rows=np.int32(x.size // x.shape[-1]))


SCALE = {"target": "test_scale", "replicated": "d", "reduce": "r", "attributes": lambda given, n: given | {"rows": n["r"]}}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_a_result_without_the_factor_is_summed_and_attributes_are_of_the_shard(library, shape, kind):
    shardplan.register_rule("ffi_call", "r d, d -> r d, d", **SCALE)
    x, w = array(16, 4), array(4, seed=1)
    step = planned_as(
        lambda x, w: scale(jnp.sin(x), w), x, w, mesh=mesh_of(shape, kind), in_shardings=(P(("x", "y")[: len(shape)]), P())
    )
    assert {c.kind for c in collectives(step.compile(x, w).as_text())} == {"all-reduce"}
    (proof,) = check_rule(scale, x, w)
    assert proof.shardings == ("r:8",) and proof.how == "local"


def test_a_call_with_side_effects_runs_on_shards(library):
    shardplan.register_rule("ffi_call", "r d, d -> r d, d", **SCALE)
    planned_as(lambda x, w: scale(x, w, has_side_effect=True), array(16, 4), array(4), mesh=mesh_of((8,), AxisType.Auto))


def test_a_maximum_is_joined_by_a_maximum(library):
    shardplan.register_rule("ffi_call", "r d -> d", target="test_most", reduce="r=max")
    most = lambda x: jax.ffi.ffi_call("test_most", like(x.shape[-1]))(x)  # noqa: E731
    x = -array(16, 8)
    for spec in (P("x"), P(None, "y"), P("x", "y")):
        planned_as(most, x, mesh=mesh_of((2, 4), AxisType.Auto), in_shardings=(spec,))
    (proof,) = check_rule(most, x)
    assert proof.shardings == ("r:8", "d:4", "r:2 d:2")


def test_what_is_not_batched_belongs_to_no_loop(library):
    shardplan.register_rule("ffi_call", "... r d, ... d -> ... r d, ... d", target="test_scale", replicated="r d")
    call = jax.ffi.ffi_call("test_scale", [like(2, 4), like(4)], vmap_method="expand_dims")
    fn = jax.vmap(lambda x, w: call(x, w, rows=np.int32(16))[0], (0, None))
    (eqn,) = [e for e in jax.make_jaxpr(fn)(array(8, 2, 4), array(4)).eqns if e.primitive.name == "ffi_call"]
    rule = register.TARGETS["test_scale"](*(v.aval for v in eqn.invars), out=[v.aval for v in eqn.outvars])
    assert str(rule) == "...0 r d, 1 d -> ...0 r d, ...0 d  replicated d r"


# ---- what is refused


def errors(pattern, *, fn=None, args=(), **options):
    shardplan.register_rule("ffi_call", pattern, **options)
    shardplan.auto(mesh_of((8,), AxisType.Auto), cluster=NEAR)(fn).plan(*args)


def of_scale(attributes):
    errors("r d, d -> r d, d", fn=scale, args=(array(16, 4), array(4)), **SCALE | {"attributes": attributes})


WRONG = {
    "no target": (
        lambda: shardplan.register_rule("ffi_call", "a -> a", shard_local=True),
        "for ffi_call: it says the global shapes, so no device can run it on a shard\n  way out: target=",
    ),
    "a primitive": (
        lambda: shardplan.register_rule("sin", "a -> a", target="t"),
        'rule \'a -> a\' for t: sin has no target\n  way out: register_rule("ffi_call"',
    ),
    "linear": (lambda: errors("a -> a", target="t", linear=True), "reads complete operands\n  way out: neither linear= nor fusion="),
    "attributes of a primitive": (
        lambda: shardplan.register_rule("my_op", "a -> a", attributes=lambda given, n: given),
        "for my_op: attributes= are those of a foreign call\n  way out: target=",
    ),
    "unknown kind": (
        lambda: errors("r d -> r d, d", target="t"),
        "rule 'r d -> r d, d' for t: ['r'] are not in result 1, so sharding leaves a partial one of unknown kind\n  way out: name them",
    ),
    "two kinds": (lambda: errors("r d ->", target="t", reduce="r d=max"), "partial results are of one kind, here of sum, max"),
    "reduced in all": (lambda: errors("r -> r, r", target="t", reduce="r"), "'r' is reduced but stands in every result"),
    "tensors": (
        lambda: errors("a b c -> a b c", fn=lu, args=(array(8, 6, 6),), target="lapack_sgetrf_ffi"),
        "for lapack_sgetrf_ffi: it names 1 operands and 1 results, the op has 1 and 3: [8,6,6] -> [8,6,6], [8,6], [8]\n"
        "  at test_foreign.py:",
    ),
    "ranks": (
        lambda: errors("a b -> a b, a, a", fn=lu, args=(array(8, 6, 6),), target="lapack_sgetrf_ffi", replicated="b"),
        "of lapack_sgetrf_ffi does not fit [8,6,6] -> [8,6,6], [8,6], [8]: 'a b' names 2 dims, [8,6,6] has 3\n  at test_foreign.py:",
    ),
    "alias": (
        lambda: errors("a b c -> a d e, a f, a", fn=lu, args=(array(8, 6, 6),), target="lapack_sgetrf_ffi", replicated="b c d e f"),
        "for lapack_sgetrf_ffi: operand 0 is 'a b c' and result 0 is 'a d e', but they are one buffer (input_output_aliases)\n  at",
    ),
    "attributes": (
        lambda: of_scale(lambda given, n: {"rows": 3}),
        "rule for test_scale: attributes= makes rows = np.int32(3) where the call has np.int32(16)\n  at test_foreign.py:",
    ),
    "failing attributes": (
        lambda: of_scale(lambda given, n: n["q"]),
        "rule for test_scale: attributes= raised KeyError('q')\n  at test_foreign.py:",
    ),
    "fewer leading dims": (
        lambda: errors("... n m -> ... n m, ... p, ...", fn=few, args=(array(8, 2, 6, 6),), target="few", replicated="n m p"),
        "'...' stands for 1 dims in result 0 and for 2 in another tensor: [8,2,6,6] -> [8,6,6], [8,2,6], [8,2]",
    ),
}  # fmt: skip


def few(x):
    return jax.ffi.ffi_call("few", [like(8, 6, 6), like(8, 2, 6), like(8, 2)])(x)[0]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_an_error_with_the_way_out(case):
    wrong, message = WRONG[case]
    with warnings.catch_warnings(), pytest.raises(RuleError, match=re.escape(message)) as error:
        warnings.simplefilter("ignore", ShardingWarning)
        wrong()
    assert "\n  way out: " in str(error.value)


def test_without_a_rule_the_call_is_replicated_and_the_warning_names_the_target():
    x = array(8, 6, 6) + 2 * jnp.eye(6)
    why = r"no rule for primitive 'ffi_call' at test_foreign.py:[\s\S]*why: its target has no rule; target='lapack_sgetrf_ffi' of"
    with pytest.warns(ShardingWarning, match=why):
        got = shardplan.auto(mesh_of((8,), AxisType.Auto), cluster=NEAR)(lambda x: lu(jnp.sin(x)))(x)
    for a, b in zip(got, lu(jnp.sin(x)), strict=True):
        assert difference(a, b) is None


def test_a_plan_is_not_taken_from_a_cache_of_other_rules(tmp_path):
    step = shardplan.auto(mesh_of((8,), AxisType.Auto), cluster=NEAR, cache=tmp_path)
    x = array(8, 6, 6)
    with pytest.warns(ShardingWarning, match="no rule for primitive 'ffi_call'"):
        assert step(lu).plan(x).unknown
    register_lapack()
    assert not step(lambda x: lu(x)).plan(x).unknown and len(list(tmp_path.iterdir())) == 2
