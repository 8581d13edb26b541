"""Reductions, cumulative ops and orderings along a dim.

reduce_max  a b -> a      reduce b=max
argmax      a b -> a      arg_reduce b
cumsum      a b -> a b    scan b
sort        a b -> a b    replicated b
top_k       a b -> a c, a c    replicated c    arg_reduce b=k
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod

from shardplan.ir.traits import Traits
from shardplan.strategies.rule import Rule, factors, flat_factors, rule
from shardplan.strategies.rules.shape import resized


def reduction(x, axes, n_results: int = 1, kind: str | None = None, **kw) -> Rule:
    """One operand; `axes` are reduced with `kind`, or need replication without one."""
    a = factors(x)
    gone = [a[d][0] for d in axes]
    kept = tuple(b for d, b in enumerate(a) if d not in axes)
    how = {"reduce": dict.fromkeys(gone, kind)} if kind else {"replicated": frozenset(gone)}
    fusion = "view" if n_results == 1 and kind and all(x.shape[d] == 1 for d in axes) else "reduce"
    return Rule((a,), (kept,) * n_results, **how, fusion=fusion, flops=prod(x.shape), **kw)


def collective_kind(x, kind: str | None) -> str | None:
    """The kind, if a collective has it: none orders complex numbers, has the bitwise functions of integers, or xor."""
    unordered = "complex" in str(x.dtype) and kind in ("max", "min")
    return None if unordered or kind == "xor" or (kind in ("and", "or") and str(x.dtype) != "bool") else kind


@rule(traits=Traits(reduction=True, sum_reduction=True))
def reduce_sum(x, *, out, axes, **_):
    return reduction(x, axes, kind="sum", linear=all(x.shape[d] == 1 for d in axes))  # a sum of one is a reshape


def reduce_kind(kind: str, x, *, out, axes, **_) -> Rule:
    return reduction(x, axes, kind=collective_kind(x, kind))


for _kind in ("max", "min", "prod", "and", "or", "xor"):
    rule(f"reduce_{_kind}", traits=Traits(reduction=True))(partial(reduce_kind, _kind))


def over_all(kind: str, x, *, out, **_) -> Rule:
    """Equinox's reductions to one number, over batch dims as well."""
    return reduction(x, range(len(x.shape)), kind=collective_kind(x, kind))


for _name, _kind in {"any": "or", "all": "and", "max": "max"}.items():
    rule(f"unvmap_{_name}", traits=Traits(reduction=True))(partial(over_all, _kind))


def over_named_axes(kind: str, *ins, out, axes, **_) -> Rule:
    """A reduction over dims that a vmap has named."""
    operands = tuple(factors(x, f"x{i}_") for i, x in enumerate(ins))
    gone = {a[d][0]: collective_kind(x, kind) for a, x in zip(operands, ins, strict=True) for d in axes}
    results = tuple(tuple(b for d, b in enumerate(a) if d not in axes) for a in operands)
    reduce, replicated = {a: k for a, k in gone.items() if k}, frozenset(a for a, k in gone.items() if not k)
    return Rule(operands, results, reduce=reduce, replicated=replicated, fusion="reduce", flops=sum(prod(x.shape) for x in ins))


for _kind in ("sum", "max", "min"):
    rule(f"p{_kind}")(partial(over_named_axes, _kind))


@rule("argmax", "argmin")
def argmax(x, *, out, axes, **_):
    r = reduction(x, axes)
    return replace(r, replicated=frozenset(), arg_reduce=dict.fromkeys(r.replicated, 1), shard_local=r.replicated)


@rule(traits=Traits(barrier_operands=True))
def reduce_(*ins, out, dimensions, **_):
    """Operands, then their initial values; the user's function joins two elements."""
    r, n = reduction(ins[0], dimensions, len(out)), len(out)
    return Rule(r.operands * n + ((),) * n, r.results, replicated=r.replicated, fusion="reduce", flops=n * prod(ins[0].shape))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumsum(x, *, out, axis, **_):
    a = factors(x)
    return Rule((a,), (a,), scan=frozenset(a[axis]), shard_local=frozenset(a[axis]))


@rule()
def sort(*ins, out, dimension, **_):
    a = factors(ins[0])
    return Rule((a,) * len(ins), (a,) * len(out), replicated=frozenset(a[dimension]))


def selection(x, out, axis: int, k: int) -> Rule:
    """The k largest along an axis, on every device's own shards (fact: local-top-k)."""
    r = resized((x,), out, (axis % len(x.shape),), fusion="none", flops=prod(x.shape))
    among = frozenset(r.operands[0][axis])
    own = frozenset(flat_factors(r.operands[0]))
    return replace(r, replicated=r.replicated - among, arg_reduce=dict.fromkeys(among, k), shard_local=own)


@rule()
def top_k(x, *, out, k, axis=-1, **_):
    return selection(x, out, axis, k)


@rule()
def approx_top_k(x, *, out, k, reduction_dimension, aggregate_to_topk, **_):
    """Approximate on TPUs only. Not aggregated, it is the best of every bucket."""
    if aggregate_to_topk:
        return selection(x, out, reduction_dimension, k)
    return resized((x,), out, (reduction_dimension % len(x.shape),), fusion="none", flops=prod(x.shape))
