"""Elementwise ops: every dim is a pass-through factor; rank-0 operands and dims that the result stretches have none.

mul       a b, a b -> a b
select_n  1, a b, a b -> a b       with a scalar predicate the first operand is rank 0
"""

from __future__ import annotations

from shardplan.ir.traits import Traits
from shardplan.strategies.rule import Rule, factors, flat_factors, rule


def elementwise(*ins, out, **kw) -> Rule:
    """Every dim of the result passes through, where the operand has it."""
    result = factors(out[0])

    def dims(x):
        return tuple(a if n == m else () for a, n, m in zip(result, x.shape, out[0].shape, strict=True)) if x.shape else ()

    return Rule(tuple(map(dims, ins)), (result,) * len(out), **{"fusion": "loop", **kw})


PLAIN = """
    and bessel_i0e bessel_i1e clz digamma eq_to erf_inv erfc integer_pow
    is_finite le_to lgamma log2 lt_to mulhi nextafter not one_minus_square or
    philox2x32 philox4x32 polygamma polynomial population_count reduce_precision rem
    round shift_left shift_right_arithmetic shift_right_logical sign square threefry2x32
    threefry4x32 xor zeta real imag complex conj
"""
PROLOGUES = """
    abs acos acosh asin asinh atan atan2 atanh cbrt ceil cos cosh eq erf exp exp2
    expm1 floor ge gt le log log1p logistic lt max min ne pow rsqrt sin sinh sqrt sub tan tanh
"""
ITERATED = "igamma igamma_grad_a igammac regularized_incomplete_beta"
LINEAR = "stop_gradient xla_metadata_value zeros_like"


@rule(*PLAIN.split())
@rule(*PROLOGUES.split(), traits=Traits(matmul_prologue=True))
@rule("clamp", traits=Traits(matmul_prologue=True, bounds_twice=True))
@rule("select_n", traits=Traits(selects=True))
@rule("mul", "div", traits=Traits(matmul_prologue=True, scaling=True))
@rule("neg", traits=Traits(matmul_prologue=True, forwards_value=True))
@rule("convert_element_type", traits=Traits(forwards_value=True, runs_with_reader=True))
def plain(*ins, out, **_):
    return elementwise(*ins, out=out)


@rule(*ITERATED.split(), traits=Traits(runs_on_shards=True))
def iterated(*ins, out, **_):
    """Loops inside, so no part of a fusion."""
    return elementwise(*ins, out=out, fusion="none")


@rule(*LINEAR.split())
@rule("add", "add_any", traits=Traits(addition=True, deferrable=True, matmul_prologue=True))
def linear(*ins, out, **_):
    """Partial sums pass through: XLA adds first and reduces then. Not so neg and sub (facts: reassociate-add, reassociate-only-add)."""
    return elementwise(*ins, out=out, linear=True)


@rule("copy", "name", traits=Traits(forwards_value=True))
def identity(x, *, out, **_):
    """The operand: XLA sees none of them."""
    return elementwise(x, out=out, linear=True, fusion="view", flops=0)


@rule("sharding_constraint", traits=Traits(sharding_constraint=True, forwards_value=True))
@rule("shard_alike", "reshard", "layout_constraint", "relayout", "with_memory_space_constraint")
def sharding_constraint(*ins, out, **_):
    return elementwise(*ins, out=out, fusion="view", flops=0)


@rule("nonbatchable", "nontraceable", "nondifferentiable_backward", traits=Traits(forwards_value=True))
def equinox_identity(x, *, out, **_):
    """The operand, for Equinox's checks of how it is transformed."""
    return elementwise(x, out=out, linear=True, fusion="view", flops=0)


@rule()
def select_if_vmap(predicate, x, y, *, out, **_):
    """The first of two arrays, for Equinox's loops: under vmap it is a select."""
    return elementwise(predicate, x, y, out=out, flops=0)


@rule("debug_print", "debug_callback")
def debug_print(*ins, out, **_):
    """Printed by the host, which needs all of it."""
    dims = tuple(factors(x, f"x{i}_") for i, x in enumerate(ins))
    stopped = "the host prints all of it" if any(dims) else ""
    return Rule(dims, (), replicated=frozenset(flat_factors(*dims)), fusion="none", flops=0, stopped=stopped)


@rule()
def tie(x, y, *, out, **_):
    """The second operand, once the first is computed."""
    a, b = factors(x, "x"), factors(y)
    return Rule((a, b), (b,), replicated=frozenset(flat_factors(a)), fusion="view", flops=0)


@rule("device_put", "dce_sink")
def placed(*ins, out, **_):
    dims = tuple(factors(x, f"x{i}_") for i, x in enumerate(ins))
    return Rule(dims, dims[: len(out)], fusion="view", flops=0)
