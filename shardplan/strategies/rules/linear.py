"""Products: dot_general, ragged dots and convolutions; contracted dims are reduction factors.

dot_general  a b c, a c d -> a b d   reduce c
conv         n c h w, o c i j -> n o h w   reduce c   halo h=3 w=3   replicated i j
grouped      n (g c) w, (g o) c i -> n (g o) x
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

import numpy as np

from shardplan.ir.traits import Traits
from shardplan.ir.windows import window_hits
from shardplan.strategies.halo import Halo
from shardplan.strategies.rule import Fusion, Rule, factors, rule


def contract(x, y, dimension_numbers):
    """Factors of both operands and of the result: batch dims, then free dims of the left, then of the right."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    a, b = list(factors(x)), list(factors(y, "y"))
    for i, j in zip((*left, *left_batch), (*right, *right_batch), strict=True):
        b[j] = a[i]
    free_left = (d for i, d in enumerate(a) if i not in (*left, *left_batch))
    free_right = (d for i, d in enumerate(b) if i not in (*right, *right_batch))
    return tuple(a), tuple(b), (*(a[i] for i in left_batch), *free_left, *free_right)


def multiply_adds(x, sizes) -> float:
    """Floating point operations of a product over these dims."""
    return (8 if "complex" in str(x.dtype) else 2) * prod(sizes)


SMALL_PRODUCT = 10_000_000
"""Elements of matrix and vector from which on XLA runs their product as a GEMM (fact: fusion-matrix-vector)."""


def product_fusion(x, y, dimension_numbers) -> Fusion:
    """Outer products run as elementwise fusions, small matrix-vector products as reduce fusions, all else as a GEMM."""
    (left, _), (batch, _) = dimension_numbers
    inner, batches = (prod(x.shape[d] for d in dims) for dims in (left, batch))
    rows, columns = (prod(z.shape) // max(1, inner * batches) for z in (x, y))
    if inner == 1:
        return "loop"
    return "reduce" if 1 in (rows, columns) and (rows + columns) * inner < SMALL_PRODUCT else "none"


@rule(traits=Traits(matmul=True, deferrable=True))
def dot_general(x, y, *, out, dimension_numbers, **_):
    a, b, c = contract(x, y, dimension_numbers)
    contracted = dimension_numbers[0][0]
    flops = multiply_adds(x, (*out[0].shape, *(x.shape[i] for i in contracted)))
    reduce = {a[i][0]: "or" if str(out[0].dtype) == "bool" else "sum" for i in contracted}
    return Rule((a, b), (c,), reduce=reduce, flops=flops, fusion=product_fusion(x, y, dimension_numbers))


@rule()
def scaled_dot(x, y, x_scale, y_scale, *, out, dimension_numbers, **_):
    """One scale per block of adjacent elements along a contracted dim."""
    left, right = dimension_numbers[0]
    a, b, c = contract(x, y, dimension_numbers)
    dims, sizes = [list(a), list(b), list(a), list(b)], {d[0]: n for t, z in ((a, x), (b, y)) for d, n in zip(t, z.shape, strict=True)}
    for i, j in zip(left, right, strict=True):
        (name,), n, m = a[i], x_scale.shape[i], y_scale.shape[j]
        sizes |= {name: gcd(n, m)} | {f"{name}{k}": size // gcd(n, m) for k, size in (("x", x.shape[i]), ("p", n), ("q", m))}
        for tensor, d, k in zip(dims, (i, j, i, j), "xxpq", strict=True):
            tensor[d] = (name, f"{name}{k}")
    reduce, inner = {a[i][0]: "sum" for i in left}, {f"{a[i][0]}{k}" for i in left for k in "xpq"}
    flops = multiply_adds(x, (*out[0].shape, *(x.shape[i] for i in left)))
    return Rule(tuple(map(tuple, dims)), (c,), reduce=reduce, replicated=frozenset(inner), sizes=sizes, flops=flops)


@rule(traits=Traits(grouped_matmul=True))
def ragged_dot_general(x, y, group_sizes, *, out, ragged_dot_dimension_numbers, **_):
    """Groups of rows of the left operand have a right operand each.

    Of sharded rows every device multiplies its own, of sharded groups all rows of its own groups, which is expert parallelism: their
    results are zero in the rows of other groups, and are summed. If batches have group sizes of their own, groups are of batches, or
    sizes are integers too narrow for the number of rows, whose sums wrap around, ragged dim and groups need replication.

    Every group multiplies all rows, those of other groups masked (fact: product-ragged-masked).
    """
    n = ragged_dot_dimension_numbers
    (left, _), (batch, _) = n.dot_dimension_numbers
    group = {d: ("g",) for d in n.rhs_group_dimensions}
    (ragged_dim,) = n.lhs_ragged_dimensions
    rows = factors(x)[ragged_dim]
    a, b, c = contract(x, y, n.dot_dimension_numbers)
    c = tuple(d for d in c if d not in [b[i] for i in group])
    b = tuple(group.get(i, d) for i, d in enumerate(b))
    if ragged_dim in left:
        c = (("g",), *c)
    outer = (*batch, *(left if ragged_dim in left else (d for d in range(len(a)) if d not in (*left, *batch))))
    of_sizes = outer[: outer.index(ragged_dim)] if len(group_sizes.shape) > 1 else ()
    wraps = np.iinfo(group_sizes.dtype).max < x.shape[ragged_dim]
    own = frozenset() if ragged_dim in batch or of_sizes or wraps else frozenset({"g", *rows})
    sizes = (*(a[d] for d in of_sizes), ("s",))
    replicated = {"g", *rows, "s"} - own
    reduce = {a[i][0]: "sum" for i in left} | ({"g": "sum"} if group else {})
    flops = multiply_adds(x, (*x.shape, out[0].shape[-1])) * group_sizes.shape[-1]
    return Rule((a, b, sizes), (c,), reduce=reduce, replicated=frozenset(replicated), shard_local=own, flops=flops)


def divisibility(*sizes: int) -> tuple[int, int]:
    """How well all sizes shard at once, to compare: by powers of two, as most mesh axes are, then by anything."""
    n = gcd(*sizes)
    return n & -n, n


@rule(traits=Traits(convolution=True, deferrable=True, runs_on_shards=True))
def conv_general_dilated(x, w, *, out, dimension_numbers, feature_group_count, batch_group_count, **params):
    """Windows slide over spatial dims; feature and batch groups are the major factor of their dims."""
    lhs, rhs, res = dimension_numbers
    spatial, shared, pairs = convolved_dims(x, w, out[0], dimension_numbers, **params)
    batch, feature, made = ("n",), ("c",), ("o",)
    sizes = {"n": x.shape[lhs[0]] // batch_group_count, "c": w.shape[rhs[1]], "o": w.shape[rhs[0]]}
    if feature_group_count > 1:
        feature, made = ("g", "c"), ("g", "o")
    if batch_group_count > 1:
        batch, made = ("g", "n"), ("g", "o")
    if (groups := max(feature_group_count, batch_group_count)) > 1:
        sizes |= {"g": groups, "o": sizes["o"] // groups}

    def place(spec, first, second, names):
        dims = [()] * len(spec)
        for at, dim in zip(spec, (first, second, *((name,) if name else () for name in names)), strict=True):
            dims[at] = dim
        return tuple(dims)

    of_x, of_w, of_out = zip(*spatial, strict=True) if spatial else ((), (), ())
    operands = place(lhs, batch, feature, of_x), place(rhs, made, ("c",), of_w)
    flops = multiply_adds(x, (out[0].shape[res[0]], out[0].shape[res[1]], w.shape[rhs[1]], *pairs))
    return replace(shared, operands=operands, results=(place(res, ("n",), made, of_out),), sizes=sizes, flops=flops)


def convolved_dims(x, w, out, dimension_numbers, *, window_strides, padding, lhs_dilation, rhs_dilation, **_):
    """Per spatial dim the factors of operand, window and result; a rule with what holds along them; (tap, result) pairs per dim.

    Where window positions divide better than results, as in a filter's gradient, the sum over window positions is the factor that
    shards, and the result's dim needs replication. A window of one has no factor ("").
    """
    lhs, rhs, res = dimension_numbers
    names, halo, reduce, replicated, pairs = [], {}, {"c": "sum"}, set(), []
    params = zip(lhs[2:], rhs[2:], res[2:], window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
    for i, (d, r, o, stride, (low, high), dilation, spread) in enumerate(params):
        h, n, taps, made = f"x{i}", x.shape[d], w.shape[r], out.shape[o]
        pairs.append(window_hits(n, taps, made, stride, low, dilation, spread))
        if taps == stride == dilation == spread == 1 and low == high == 0:
            names.append((h, "", h))
        elif divisibility(n, taps) > divisibility(n, made):
            names.append((h, h, f"y{i}"))
            halo[h], reduce[h] = {0: Halo((made - 1) * stride + 1, spread, low, dilation)}, "sum"
            replicated.add(f"y{i}")
        else:
            names.append((h, f"w{i}", h))
            halo[h] = {0: Halo((taps - 1) * spread + 1, stride, low, dilation)}
            replicated.add(f"w{i}")
    shared = Rule((), (), reduce=reduce, halo=halo, shard_local=frozenset(halo), replicated=frozenset(replicated))
    return names, shared, pairs
