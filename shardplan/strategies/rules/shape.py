"""Ops that move data and compute nothing: dims of the result share factors with dims of the operands.

reshape           a (b c) -> (a b) c        a dim of one side may be a product of factors of the other
broadcast_in_dim  1 b -> a b                a factor of the result alone shards for free: each device makes its part
slice             a b -> a b   halo b=1     every element moves: from this shard or from another
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count
from math import gcd

from shardplan.ir.traits import Traits
from shardplan.strategies.halo import Halo
from shardplan.strategies.rule import Rule, factors, flat_factors, rule


def move(operands, results, replicated=(), **kw) -> Rule:
    """A rule without flops; `replicated` is a list of dims."""
    kw = {"replicated": frozenset(flat_factors(replicated)), "fusion": "loop", "flops": 0, **kw}
    return Rule(tuple(operands), tuple(results), **kw)


def resized(ins, outs, changed=(), **kw) -> Rule:
    """Tensors of one rank: dims that are `changed` or differ in size need replication on every side, the others pass through."""
    tensors, shared = (*ins, *outs), factors(outs[0])
    cut = {d for d, sizes in enumerate(zip(*(x.shape for x in tensors), strict=True)) if d in changed or len(set(sizes)) > 1}
    own = [factors(x, f"x{i}_") for i, x in enumerate(tensors)]
    dims = [tuple(o[d] if d in cut else a for d, a in enumerate(shared)) for o in own]
    return move(dims[: len(ins)], dims[len(ins) :], [o[d] for o in own for d in cut], **kw)


def shifted(ins, out, halos, **kw) -> Rule:
    """Tensors of one rank: along dim d, operand k of `ins` is read as `halos[d][k]` says; the other dims pass through."""
    a = factors(out[0])
    if 0 in out[0].shape or "key<" in str(out[0].dtype):
        return resized(ins, out, halos, **kw)
    halo = {a[d][0]: dict(enumerate(each)) for d, each in halos.items()}
    return move((a,) * len(ins), (a,), halo=halo, shard_local=frozenset(halo), **kw)


def reshape_factors(left: tuple[int, ...], right: tuple[int, ...]):
    """Dims of both sides of a reshape, factor sizes, factors that need replication.

    Both shapes are walked major to minor, taking common factors; coprime parts need replication.

    >>> reshape_factors((8, 6), (2, 4, 6))
    (((('a', 'b'), ('c',)), (('a',), ('b',), ('c',)), {'a': 2, 'b': 4, 'c': 6}, frozenset())
    """
    names = (f"{chr(97 + i % 26)}{i // 26 or ''}" for i in count())
    if 0 in left:
        own = [tuple((next(names),) for _ in shape) for shape in (left, right)]
        return *own, {}, frozenset(flat_factors(*own))
    ahead, dims, rest = (iter(left), iter(right)), ([], []), [1, 1]
    sizes, replicated = {}, set()

    def advance(side):  # to the next dim, once the last one is used up
        while rest[side] == 1 and (size := next(ahead[side], None)) is not None:
            rest[side] = size
            dims[side].append(())

    def give(side, factor, size):
        sizes[factor] = size
        dims[side][-1] += (factor,)
        rest[side] //= size

    while True:
        advance(0)
        advance(1)
        if rest == [1, 1]:
            return tuple(dims[0]), tuple(dims[1]), sizes, frozenset(replicated)
        if (common := gcd(*rest)) > 1:
            factor = next(names)
            give(0, factor, common)
            give(1, factor, common)
            continue
        # Coprime, like (2, 3) -> (3, 2): replicated factors on both sides until the products meet.
        done = [1, 1]
        while done == [1, 1] or done[0] != done[1]:
            side = int(done[0] > done[1])
            advance(side)
            done[side] *= rest[side]
            replicated.add(factor := next(names))
            give(side, factor, rest[side])


@rule(traits=Traits(forwards_value=True, runs_with_reader=True))
def reshape(x, *rest, out, dimensions=None, **_):
    order = dimensions or range(len(x.shape))  # the dims are transposed into this order first
    left, right, sizes, replicated = reshape_factors(tuple(x.shape[d] for d in order), out[0].shape)
    left = tuple(dim for _, dim in sorted(zip(order, left, strict=True)))
    fusion = "loop" if dimensions else "view"
    return Rule((left, *((),) * len(rest)), (right,), sizes=sizes, replicated=replicated, linear=True, fusion=fusion, flops=0)


@rule(traits=Traits(transpose=True, forwards_value=True, runs_with_reader=True))
def transpose(x, *, out, permutation, **_):
    a = factors(x)
    return move((a,), (tuple(a[p] for p in permutation),), linear=True)


@rule(traits=Traits(forwards_value=True))
def squeeze(x, *, out, dimensions, **_):
    a = tuple(() if d in dimensions else b for d, b in enumerate(factors(x)))
    return move((a,), (tuple(b for d, b in enumerate(a) if d not in dimensions),), linear=True, fusion="view")


@rule(traits=Traits(broadcast=True))
def broadcast_in_dim(x, *rest, out, broadcast_dimensions, **_):
    a = factors(out[0])
    return move((tuple(() if n == 1 else a[d] for d, n in zip(broadcast_dimensions, x.shape, strict=True)), *((),) * len(rest)), (a,))


@rule()
def broadcast_to(x, *, out, **_):
    rank = len(out[0].shape)
    return broadcast_in_dim(x, out=out, broadcast_dimensions=range(rank - len(x.shape), rank))


@rule()
def tile(x, *, out, reps, **_):
    a, r = factors(x), factors(x, "r")
    sizes = {b[0]: n for b, n in zip(a, x.shape, strict=True)} | {b[0]: n for b, n in zip(r, reps, strict=True)}
    return move((a,), (tuple(b if n == 1 else (*c, *b) for b, c, n in zip(a, r, reps, strict=True)),), sizes=sizes)


@rule("iota", "iota_2x32_shape", "empty", "empty2", "platform_index")
def iota(*ins, out, **_):
    return move(((),) * len(ins), (factors(out[0]),) * len(out))


@rule(traits=Traits(concatenates=True))
def concatenate(*ins, out, dimension, **_):
    before = accumulate((x.shape[dimension] for x in ins), initial=0)
    return shifted(ins, out, {dimension: [Halo(low=n) for n, _ in zip(before, ins, strict=False)]})


@rule(traits=Traits(reversal=True))
def rev(x, *, out, dimensions, **_):
    return shifted((x,), out, {d: [Halo(stride=-1, low=1 - x.shape[d])] for d in dimensions})


@rule()
def stack(*ins, out, axis, **_):
    a = factors(out[0])
    return move((a[:axis] + a[axis + 1 :],) * len(ins), (a,), (a[axis],))


@rule()
def unstack(x, *, out, axis, **_):
    r = stack(*out, out=(x,), axis=axis)
    return replace(r, operands=r.results, results=r.operands)


@rule(traits=Traits(pads=True))
def pad(x, value, *, out, padding_config, **_):
    halos = {d: [Halo(low=low, dilation=1 + gap)] for d, (low, high, gap) in enumerate(padding_config) if any((low, high, gap))}
    r = shifted((x,), out, halos)
    return replace(r, operands=(*r.operands, ()))


@rule(traits=Traits(reads_part=True))
def slice_(x, *, out, start_indices, limit_indices, strides, **_):
    kept = zip(start_indices, strides or (1,) * len(x.shape), x.shape, out[0].shape, strict=True)
    return shifted((x,), out, {d: [Halo(stride=step, low=-start)] for d, (start, step, n, m) in enumerate(kept) if n != m})


@rule(traits=Traits(reads_part=True))
def dynamic_slice(x, *starts, out, **_):
    a, small, cut, replicated = slice_factors(x, out[0])
    kept = "key<" in str(x.dtype)
    reduce = {} if kept else dict.fromkeys(cut, "or" if str(x.dtype) == "bool" else "sum")
    return move((a, *((),) * len(starts)), (small,), [replicated, cut if kept else ()], reduce=reduce, shard_local=frozenset(reduce))


@rule(traits=Traits(in_place=True, writes_part=(1, 1)))
def dynamic_update_slice(x, update, *starts, out, **_):
    """A device writes the part of the update that falls in its shard, so all dims of the operand pass through."""
    a, small, cut, replicated = slice_factors(x, update)
    return move((a, small, *((),) * len(starts)), (a,), [replicated], shard_local=frozenset(cut))


def slice_factors(x, part):
    """Factors of an array, of a slice of it, those along which the slice is smaller, and the slice's own that need replication."""
    a, b = factors(x), factors(part, "s")
    sizes = list(zip(x.shape, part.shape, strict=True))
    small = tuple(c if n == m else () if m == 1 else d for c, d, (n, m) in zip(a, b, sizes, strict=True))
    cut = tuple(c for (c,), (n, m) in zip(a, sizes, strict=True) if n != m)
    return a, small, cut, tuple(d for (d,), (n, m) in zip(b, sizes, strict=True) if m not in (n, 1))


@rule("bitcast_convert_type", "to_edtype", "from_edtype", "random_wrap", "random_unwrap")
def bitcast_convert_type(x, *, out, **_):
    """Dims in front are shared; further dims of either need replication: the parts of an element, the words of a key."""
    (y,) = out
    n = min(len(x.shape), len(y.shape))
    a, b = factors(x), factors(x)[:n] + factors(y, "y")[n:]
    return move((a,), (b,), a[n:] + b[n:], fusion="view")
