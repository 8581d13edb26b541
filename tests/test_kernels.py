"""Pallas kernels: which digits of a grid shard is derived from block mappings and bodies, proven in numbers, and run on shards."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jax.experimental.pallas.ops.gpu import attention
from jax.sharding import AxisType

import shardplan
from shardplan._jax import equations
from shardplan.strategies.rule import RuleError
from shardplan.strategies.rules import rule_for
from shardplan.testing import check_rule, difference
from shardplan.xla import available
from shardplan.xla.compiler._backend import lower

F32 = jnp.float32


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.2, 0.9, shape), F32)


def double(x, y):
    y[...] = x[...] * 2 + 1


def add(x, y, z):
    z[...] = x[...] + y[...]


def call(body, grid, ins, out, shape, **kw):
    """An interpreted kernel; blocks are (block shape, index map)."""
    specs = {"in_specs": [pl.BlockSpec(*x) for x in ins], "out_specs": pl.BlockSpec(*out)}
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(shape, F32), grid=grid, interpret=True, **specs, **kw)


def blocked(body=double, grid=(4, 2), block=(2, 4), index=lambda i, j: (i, j), out=None, shape=(8, 8), **kw):
    """One operand and one result of one shape."""
    return call(body, grid, [(block, index)], out or (block, index), shape, **kw)


def accumulate(reset):
    def body(x, w, out, total):
        @pl.when(reset())
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...] @ w[...]
        out[...] = total[...]

    return body


def matmul(reset, **kw):
    """A product whose sum over the last grid axis lies in scratch memory."""
    body, scratch = accumulate(reset), [pltpu.VMEM((4, 4), F32)]
    ins = [((4, 4), lambda i, j, k: (i, k)), ((4, 4), lambda i, j, k: (k, j))]
    return call(body, (2, 2, 2), ins, ((4, 4), lambda i, j, k: (i, j)), (8, 8), scratch_shapes=scratch, **kw)


def prefetched(body, maps, grid=(4,), n=2):
    """A kernel whose index maps read scalars: rows of x that a table names."""
    spec = pltpu.PrefetchScalarGridSpec(1, grid, [pl.BlockSpec((1, 4), maps[0])], pl.BlockSpec((1, 4), maps[1]))
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((4, 4), F32), grid_spec=spec, interpret=True)


def lookup(table, x, out):
    out[...] = x[...] * 2


TABLE = jnp.array([3, 0, 0, 5], "int32")
ONE_AXIS = [((None, None, 4), lambda g: (g // 4, g % 4, 0)), ((None, None, 4), lambda g: (g // 4, g % 4 // 2, 0))]

FREE = {
    "squeezed": (call(double, (4,), [((None, 8), lambda i: (i, 0))], ((None, 8), lambda i: (i, 0)), (4, 8)), [array(4, 8)], {"g0"}),
    "elements": (
        call(double, (4,), [((pl.Element(2), 8), lambda i: (i * 2, 0))], ((2, 8), lambda i: (i, 0)), (8, 8)), [array(8, 8)], {"g0"},
    ),
    "every second block": (
        call(double, (2,), [((2, 8), lambda i: (2 * i, 0))], ((2, 8), lambda i: (i, 0)), (4, 8)), [array(8, 8)], {"g0"},
    ),
    "batch and heads on one axis": (
        call(add, (8,), ONE_AXIS, ((None, None, 4), lambda g: (g, 0, 0)), (8, 1, 4)), [array(2, 4, 4), array(2, 2, 4)],
        {"g0", "g0_2", "g0_4"},
    ),
    "two axes on one dim": (
        call(double, (2, 4), [((2, 4), lambda b, h: (b * 4 + h, 0))], ((None, 2, 4), lambda b, h: (b, h, 0)), (2, 8, 4)),
        [array(16, 4)], {"g0", "g1"},
    ),
    "sum in scratch, begun anew": (matmul(lambda: pl.program_id(2) == 0), [array(8, 8), array(8, 8)], {"g0", "g1"}),
    "sum in scratch, declared": (
        matmul(
            lambda: jnp.logical_not(pl.program_id(2) > 0),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        ),
        [array(8, 8), array(8, 8)], {"g0", "g1"},
    ),
    "rows by a table": (prefetched(lookup, (lambda i, t: (t[i], 0), lambda i, t: (i, 0))), [TABLE, array(8, 4)], {"g0"}),
    "batched": (jax.vmap(blocked()), [array(2, 8, 8)], {"g0", "g1", "g2"}),
    "in place": (blocked(input_output_aliases={0: 0}), [array(8, 8)], {"g0", "g1"}),
}  # fmt: skip


def rule_of(fn, args):
    eqn = next(e for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if e.primitive.name == "pallas_call")
    return eqn, *rule_for("pallas_call", [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params, strict=True)


@pytest.mark.parametrize("case", FREE)
def test_digits_that_index_all_results_in_blocks_shard(case):
    fn, args, free = FREE[case]
    _, rule, known = rule_of(fn, args)
    assert known and rule.shard_local == free
    (proof,) = check_rule(fn, *args, primitive="pallas_call", pairs=case == "batched")
    assert proof.how == "local" and {x.split(":")[0] for x in proof.shardings} == free


def position(x, out):
    out[...] = x[...] + pl.program_id(0)


def carried(x, out, total):
    total[...] = total[...] + x[...]
    out[...] = total[...]


def reads_table(table, x, out):
    out[...] = x[...] * table[0]


ROWS = ((2, 8), lambda i: (i, 0))
STOPPED = {
    "position": (blocked(position, (4,), *ROWS), "grid axis 0: the body reads program_id(0)"),
    "sum": (call(double, (4,), [ROWS], ((2, 8), lambda i: (0, 0)), (2, 8)), "the index map of outputs does not mention it"),
    "overlapping": (
        call(double, (4,), [((pl.Element(4), 8), lambda i: (i, 0))], ((4, 8), lambda i: (i, 0)), (16, 8)),
        "grid axis 0: of dim 0 of args[0], blocks overlap",
    ),
    "a part": (call(double, (2,), [ROWS], ROWS, (4, 8)), "of dim 0 of args[0], blocks cover 4 of 8 elements"),
    "backwards": (
        call(double, (4,), [((2, 8), lambda i: (3 - i, 0))], ROWS, (8, 8)), "the index map of dim 0 of args[0] does not begin at 0"
    ),
    "not linear": (
        call(double, (4,), [((2, 8), lambda i: (i * i // 3, 0))], ROWS, (8, 8)), "the index map of dim 0 of args[0] is not linear in it"
    ),
    "diagonal": (
        call(double, (4,), [((2, 2), lambda i: (i, i))], ((2, 2), lambda i: (i, 0)), (8, 2)),
        "it indexes both dim 0 of args[0] and dim 1 of args[0]",
    ),
    "scratch": (blocked(carried, (4,), *ROWS, scratch_shapes=[pltpu.VMEM((2, 8), F32)]), "scratch memory may carry values along it"),
    "one program": (blocked(grid=()  , block=(8, 8), index=lambda: (0, 0)), "its grid is a single program"),
    "a table that the body reads": (
        lambda x: prefetched(reads_table, (lambda i, t: (t[i], 0), lambda i, t: (i, 0)))(TABLE, x),
        "index maps read index operand 0 by it, and the body reads it, too",
    ),
    "an index on a value": (
        lambda x: prefetched(lookup, (lambda i, t: ((t[0] + i) % 8, 0), lambda i, t: (i, 0)))(TABLE, x),
        "depends on it and on values that are known at run time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPPED)
def test_what_cannot_be_shown_is_replicated_and_the_reason_named(case):
    fn, why = STOPPED[case]
    _, rule, known = rule_of(fn, [array(8, 8)])
    assert not known and why in rule.unsharded


def test_a_kernel_without_a_rule_says_in_the_warning_why():
    fn, _ = STOPPED["position"]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    why = r"'pallas_call' at test_kernels.py:\d+: it runs replicated, .* on every device .*\n  why: kernel.*reads program_id\(0\)"
    with pytest.warns(shardplan.ShardingWarning, match=why):
        plan = shardplan.auto(mesh, cluster=NEAR)(lambda x: fn(x) * 2).plan(array(8, 8))
    assert "reads program_id(0)" in plan.explain()


def test_a_kernel_that_no_strategy_splits_over_all_axes_says_in_the_warning_why():
    """Rows in reverse order are on no grid axis that could be sharded, columns are: two blocks of them, for two devices of four."""
    reversed_rows = blocked(
        grid=(16, 2), block=(64, 1024), index=lambda i, j: (15 - i, j), out=((64, 1024), lambda i, j: (i, j)), shape=(1024, 2048)
    )
    auto = shardplan.auto(jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), cluster=NEAR)
    why = r"no strategy splits 'pallas_call' at test_kernels.py:\d+ over all mesh axes, .* on every device .*\n  why: kernel.*index map"
    with pytest.warns(shardplan.ShardingWarning, match=why):
        plan = auto(lambda x: jnp.sin(reversed_rows(x))).plan(array(1024, 2048))
    assert "in part: kernel: grid axis 0: the index map" in plan.explain()
    two = shardplan.auto(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), cluster=NEAR)
    assert two(lambda x: jnp.sin(reversed_rows(x))).plan(array(1024, 2048)).unknown == ()


def test_a_wrong_claim_of_a_kernels_grid_is_found(monkeypatch):
    from shardplan.strategies.kernel import grid

    monkeypatch.setattr(grid, "_read_positions", lambda jaxpr: iter(()))
    with pytest.raises(RuleError, match="elements differ"):
        check_rule(STOPPED["position"][0], array(8, 8), primitive="pallas_call")


def test_flops_are_the_cost_estimates_or_those_of_the_body_at_every_grid_point():
    estimate = pl.CostEstimate(flops=640, transcendentals=0, bytes_accessed=4096)
    _, rule, _ = rule_of(blocked(cost_estimate=estimate), [array(8, 8)])
    assert (rule.flops, rule.bytes) == (640, 4096)
    assert rule_of(blocked(), [array(8, 8)])[1].flops == 2 * 64

    def causal(x, out):
        out[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, lambda i, y: y @ y, x[...])

    product = 2 * 8**3
    _, rule, _ = rule_of(blocked(causal, (4,), (8, 8), lambda i: (i, 0), shape=(32, 8)), [array(32, 8)])
    assert rule.flops == pytest.approx((1 + 2 + 3 + 4) * product, rel=0.02)


def test_a_shard_gets_its_part_of_grid_shapes_and_cost():
    from shardplan.emit.shard_local.kernels import local_params

    estimate = pl.CostEstimate(flops=640, transcendentals=0, bytes_accessed=4096)
    eqn, *_ = rule_of(blocked(cost_estimate=estimate), [array(8, 8)])
    found = local_params(eqn, {"g0": 2, "g1": 2})
    assert found["grid_mapping"].grid == (2, 1) and found["out_avals"][0].shape == (4, 4)
    assert found["cost_estimate"].flops == 160 and found["cost_estimate"].bytes_accessed == 1024


def attend(params, x, interpret=True):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[n]) for n in "qkv")
    sizes = attention.BlockSizes(*[16 if interpret else 64] * 6)
    return (attention.mha(q, k, v, None, causal=True, interpret=interpret, block_sizes=sizes) ** 2).mean()


def train(params, x):
    loss, grads = jax.value_and_grad(attend)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads), loss


PARAMS = {n: array(16, 8, 16, seed=k) for k, n in enumerate("qkv")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(2, 4)], ids=str)
def test_fused_attention_runs_on_its_batch_and_heads_with_the_same_numbers(shape, kind):
    mesh = jax.make_mesh(shape, ("x", "y", "z")[: len(shape)], axis_types=(kind,) * len(shape))
    x = array(4, 32, 16, seed=7)
    step = shardplan.auto(mesh, cluster=NEAR)(train)
    kernels = [d for d in step.plan(PARAMS, x).decisions if d.primitive == "pallas_call"]
    assert len(kernels) == 3 and all(math.prod(mesh.shape[a] for a in d.strategy) == 8 for d in kernels)
    for got, want in zip(jax.tree.leaves(step(PARAMS, x)), jax.tree.leaves(jax.jit(train)(PARAMS, x)), strict=True):
        assert difference(got, want) is None


def doubled_product(params):
    """A kernel in blocks of 128, in the language of these compiler parameters."""

    def step(w, x):
        y = x @ w
        block = pl.BlockSpec((128, 128), lambda i, j: (i, j))
        twice = pl.pallas_call(
            double, y, grid=(y.shape[0] // 128, y.shape[1] // 128), in_specs=[block], out_specs=block, compiler_params=params
        )
        return twice(y).sum(0)

    return step, jax.ShapeDtypeStruct((4096, 4096), F32), jax.ShapeDtypeStruct((4096, 4096), F32)


COMPILED = {
    "Triton": (*doubled_product(pltriton.CompilerParams()), "__gpu$xla.gpu.triton"),
    "Mosaic GPU": (*doubled_product(plgpu.CompilerParams()), "mosaic_gpu"),
    "attention and its gradient": (
        jax.value_and_grad(lambda w, x: attend(w, x, interpret=False)),
        {n: jax.ShapeDtypeStruct((1024, 16, 64), "bfloat16") for n in "qkv"},
        jax.ShapeDtypeStruct((8, 512, 1024), "bfloat16"),
        "__gpu$xla.gpu.triton",
    ),
}
"""A step, its arguments, and part of the name of the custom call that its kernel is lowered to."""


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
@pytest.mark.parametrize("case", COMPILED)
def test_kernels_compile_for_absent_gpus_on_shards_as_planned(case):
    step, w, x, called = COMPILED[case]
    planned = shardplan.auto(jax.sharding.AbstractMesh((2, 4), ("x", "y")), cluster="h100")(step)
    kernels = [d for d in planned.plan(w, x).decisions if d.primitive == "pallas_call"]
    assert kernels and all(len(d.strategy) == 2 for d in kernels)
    assert called in lower(planned, w, x, platform="cuda").as_text()
    report = planned.check(w, x, target="h100:8")
    assert report.ok and report.collectives_ratio == pytest.approx(1, abs=0.02) and report.flops_ratio == pytest.approx(1, abs=0.01)
