"""Linear algebra and transforms: batch dims pass through, matrices need replication.

cholesky          a m n -> a m n             replicated m n
triangular_solve  a m m, a m k -> a m k      replicated m: columns of the right-hand side pass through
fft               a b -> a c                 replicated b c
"""

from __future__ import annotations

from math import prod

from shardplan.ir.traits import Traits
from shardplan.strategies.rule import Rule, factors, flat_factors, rule


def batched(ins, out, core: int, flops=None) -> Rule:
    """All tensors share the leading dims of the first operand, all but its last `core`; the other dims need replication."""
    n = len(ins[0].shape) - core
    batch = factors(ins[0])[:n]
    own = [factors(x, f"x{i}_")[n:] for i, x in enumerate((*ins, *out))]
    dims = tuple(batch + o for o in own)
    return Rule(dims[: len(ins)], dims[len(ins) :], replicated=frozenset(flat_factors(*own)), flops=flops)


MATRIX = "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr schur svd tridiagonal"


@rule(*MATRIX.split())
@rule("symmetric_product", traits=Traits(runs_on_shards=True))
def factorization(*ins, out, **_):
    return batched(ins, out, 2, flops=prod(ins[0].shape) * min(ins[0].shape[-2:]))


@rule("lu_pivots_to_permutation", "cholesky_update")
def lu_pivots_to_permutation(*ins, out, **_):
    return batched(ins, out, 1 if len(ins) == 1 else 2)


@rule(traits=Traits(runs_on_shards=True, row_major=True))
def fft(x, *, out, fft_lengths, **_):
    return batched((x,), out, len(fft_lengths), flops=5 * prod(x.shape) * max(1, prod(fft_lengths).bit_length()))


@rule(traits=Traits(runs_on_shards=True))
def triangular_solve(a, b, *, out, left_side, **_):
    """op(a) x = b or x op(a) = b: columns of b, or its rows, are independent."""
    *batch, m, k = factors(b) if left_side else (*factors(b)[:-2], factors(b)[-1], factors(b)[-2])
    x = (*batch, m, k) if left_side else (*batch, k, m)
    return Rule(((*batch, ("p",), ("q",)), x), (x,), replicated=frozenset({"p", "q", *m}), flops=prod(b.shape) * a.shape[-1])


@rule(traits=Traits(runs_on_shards=True))
def tridiagonal_solve(lower, diagonal, upper, b, *, out, **_):
    *batch, m, _ = factors(b)
    return Rule(((*batch, m),) * 3 + (factors(b),), (factors(b),), replicated=frozenset(m), flops=8 * prod(b.shape))
