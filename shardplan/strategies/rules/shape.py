"""Ops that move data and compute nothing: which dims of the result are which dims of the operands.

reshape           a (b c) -> (a b) c        a dim of the one side may be a product of letters of the other
broadcast_in_dim  1 b -> a b                a letter only in the result is split for free: each device makes its part
slice             a b -> a b   halo b=1     every element lies elsewhere: on this shard, or on one that sends it
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, count
from math import gcd

from shardplan.ir.traits import Traits

from ..halo import Halo
from ..rule import Rule, factors, rule


def move(operands, results, replicated=(), **kw) -> Rule:
    """A rule that computes nothing; `replicated` is a list of dims."""
    return Rule(
        tuple(operands),
        tuple(results),
        **{"replicated": frozenset(a for d in replicated for a in d), "fusion": "loop", "flops": 0, **kw},
    )


def resized(ins, outs, changed=(), **kw) -> Rule:
    """Tensors of one rank: dims that are `changed` or differ in size are whole on every side, the others pass through."""
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
    """Letters of a reshape: the common factors of both shapes, walked major to minor; what has none stays whole.

    Returns:
        Dims of the left shape, dims of the right shape, letter sizes, whole letters.

    >>> factors((8, 6), (2, 4, 6))
    (((('a', 'b'), ('c',)), (('a',), ('b',), ('c',)), {'a': 2, 'b': 4, 'c': 6}, frozenset())
    """
    names = (f"{chr(97 + i % 26)}{i // 26 or ''}" for i in count())
    shapes, dims, at, rest = (left, right), ([], []), [0, 0], [1, 1]
    sizes, replicated = {}, set()
    if 0 in left:
        dims = [[(next(names),) for _ in shape] for shape in shapes]
        return *map(tuple, dims), {}, frozenset(a for side in dims for d in side for a in d)

    def advance(side):
        """To the next dim, once the last one is used up."""
        while rest[side] == 1 and at[side] < len(shapes[side]):
            rest[side] = shapes[side][at[side]]
            at[side] += 1
            dims[side].append(())

    def give(side, letter, size):
        sizes[letter] = size
        dims[side][-1] += (letter,)
        rest[side] //= size

    while True:
        advance(0)
        advance(1)
        if rest == [1, 1]:
            return tuple(dims[0]), tuple(dims[1]), sizes, frozenset(replicated)
        if (common := gcd(*rest)) > 1:
            letter = next(names)
            give(0, letter, common)
            give(1, letter, common)
            continue
        # Coprime, like (2, 3) -> (3, 2): whole letters on both sides until the products meet.
        done = [1, 1]
        while done[0] != done[1] or done == [1, 1]:
            side = 0 if done[0] < done[1] or done == [1, 1] else 1
            advance(side)
            done[side] *= rest[side]
            replicated.add(letter := next(names))
            give(side, letter, rest[side])


@rule("reshape", traits=Traits(forwards_value=True, runs_with_reader=True))
def _(x, *rest, out, dimensions=None, **_):
    order = dimensions or range(len(x.shape))  # the dims are transposed into this order first
    left, right, sizes, replicated = reshape_factors(tuple(x.shape[d] for d in order), out[0].shape)
    left = tuple(dim for _, dim in sorted(zip(order, left, strict=True)))
    fusion = "loop" if dimensions else "view"
    return Rule((left, *((),) * len(rest)), (right,), sizes=sizes, replicated=replicated, linear=True, fusion=fusion, flops=0)


@rule("transpose", traits=Traits(transpose=True, forwards_value=True, runs_with_reader=True))
def _(x, *, out, permutation, **_):
    a = factors(x)
    return move((a,), (tuple(a[p] for p in permutation),), linear=True)


@rule("squeeze", traits=Traits(forwards_value=True))
def _(x, *, out, dimensions, **_):
    a = tuple(() if d in dimensions else b for d, b in enumerate(factors(x)))
    return move((a,), (tuple(b for d, b in enumerate(a) if d not in dimensions),), linear=True, fusion="view")


@rule("broadcast_in_dim", traits=Traits(broadcast=True))
def _(x, *rest, out, broadcast_dimensions, **_):
    a = factors(out[0])
    return move((tuple(() if n == 1 else a[d] for d, n in zip(broadcast_dimensions, x.shape, strict=True)), *((),) * len(rest)), (a,))


@rule("broadcast_to")
def _(x, *, out, **_):
    a = factors(out[0])
    return move((tuple(() if n == 1 else b for n, b in zip(x.shape, a[len(a) - len(x.shape) :], strict=True)),), (a,))


@rule("tile")
def _(x, *, out, reps, **_):
    a, r = factors(x), factors(x, "r")
    sizes = {b[0]: n for b, n in zip(a, x.shape, strict=True)} | {b[0]: n for b, n in zip(r, reps, strict=True)}
    return move((a,), (tuple(b if n == 1 else (*c, *b) for b, c, n in zip(a, r, reps, strict=True)),), sizes=sizes)


@rule("iota", "empty", "empty2", "platform_index")
def _(*ins, out, **_):
    return move(((),) * len(ins), (factors(out[0]),))


@rule("concatenate")
def _(*ins, out, dimension, **_):
    before = accumulate((x.shape[dimension] for x in ins), initial=0)
    return shifted(ins, out, {dimension: [Halo(low=n) for n, _ in zip(before, ins, strict=False)]})


@rule("rev")
def _(x, *, out, dimensions, **_):
    return shifted((x,), out, {d: [Halo(stride=-1, low=1 - x.shape[d])] for d in dimensions})


@rule("stack")
def _(*ins, out, axis, **_):
    a = factors(out[0])
    return move((a[:axis] + a[axis + 1 :],) * len(ins), (a,), (a[axis],))


@rule("unstack")
def _(x, *, out, axis, **_):
    a = factors(x)
    return move((a,), (a[:axis] + a[axis + 1 :],) * len(out), (a[axis],))


@rule("pad")
def _(x, value, *, out, padding_config, **_):
    halos = {d: [Halo(low=low, dilation=1 + gap)] for d, (low, high, gap) in enumerate(padding_config) if any((low, high, gap))}
    r = shifted((x,), out, halos)
    return replace(r, operands=(*r.operands, ()))


@rule("slice", traits=Traits(reads_part=True))
def _(x, *, out, start_indices, limit_indices, strides, **_):
    kept = zip(start_indices, strides or (1,) * len(x.shape), x.shape, out[0].shape, strict=True)
    return shifted((x,), out, {d: [Halo(stride=step, low=-start)] for d, (start, step, n, m) in enumerate(kept) if n != m})


@rule("dynamic_slice", traits=Traits(reads_part=True))
def _(x, *starts, out, **_):
    a, small, cut, replicated = cutting(x, out[0])
    kept = "key<" in str(x.dtype)
    reduce = {} if kept else dict.fromkeys(cut, "or" if str(x.dtype) == "bool" else "sum")
    return move((a, *((),) * len(starts)), (small,), [replicated, cut if kept else ()], reduce=reduce, shard_local=frozenset(reduce))


# What of an update falls in a device's shard is written there, so all dims of the operand pass through.
@rule("dynamic_update_slice", traits=Traits(in_place=True, writes_part=(1, 1)))
def _(x, update, *starts, out, **_):
    a, small, cut, replicated = cutting(x, update)
    return move((a, small, *((),) * len(starts)), (a,), [replicated], shard_local=frozenset(cut))


def cutting(x, part):
    """Letters of an array and of a part of it; those along which it is smaller, and those of the part that may not be split."""
    a, b = factors(x), factors(part, "s")
    sizes = list(zip(x.shape, part.shape, strict=True))
    small = tuple(c if n == m else () if m == 1 else d for c, d, (n, m) in zip(a, b, sizes, strict=True))
    cut = tuple(c for (c,), (n, m) in zip(a, sizes, strict=True) if n != m)
    return a, small, cut, tuple(d for (d,), (n, m) in zip(b, sizes, strict=True) if m not in (n, 1))


def leading(x, y, **kw) -> Rule:
    """Two tensors that share leading dims; the further ones of either are whole."""
    n = min(len(x.shape), len(y.shape))
    a, b = factors(x), factors(x)[:n] + factors(y, "y")[n:]
    return move((a,), (b,), a[n:] + b[n:], fusion="view", **kw)


@rule("bitcast_convert_type", "to_edtype", "from_edtype")
def _(x, *, out, **_):
    return leading(x, out[0])
