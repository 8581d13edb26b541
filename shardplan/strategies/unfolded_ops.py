"""How an op is written whose dims are held in parts (`unfold.py`): the parameters that name dims and sizes.

    dot_general    (1,), (0,)         on f32[8, (25, 64)], f32[(25, 64), 1600]      (1, 2), (0, 1)
    reduce_sum     axes=(1,)          on f32[8, (25, 64)]                           axes=(1, 2)
    split          sizes=(1600,) * 3  on f32[8, (3, 25, 64)]                        sizes=(1, 1, 1), then reshaped

An op that is not here runs on flat dims, between reshapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import prod

from shardplan import _jax
from shardplan.strategies.rule import RULES
from shardplan.strategies.rules import elementwise

Parts = tuple[tuple[int, ...], ...]
"""Of an array: per dim, the sizes that it is held as, major to minor."""

WRITERS: dict[str, Callable] = {}
"""Primitive -> the function from (writer, equation, operands in parts, their parts, the results' parts) to the results."""


def writes(*primitives: str):
    """Registers how ops are written."""

    def register(fn: Callable) -> Callable:
        WRITERS.update(dict.fromkeys(primitives, fn))
        return fn

    return register


def write(writer, eqn, xs: Sequence, ins: Sequence[Parts], outs: Sequence[Parts]) -> list | None:
    """The results of an op on operands in parts; None for one that cannot be written so."""
    try:
        return WRITERS[eqn.primitive.name](writer, eqn, xs, ins, outs) if eqn.primitive.name in WRITERS else None
    except UnalignedError:
        return None


class UnalignedError(ValueError):
    """An op cuts or joins dims elsewhere than between their parts."""


def shape_of(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of an array in parts."""
    return tuple(n for sizes in parts for n in sizes)


def dims_of(parts: Parts, dims: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the dims that hold these ones, in their order."""
    ends = list(accumulate((len(sizes) for sizes in parts), initial=0))
    return tuple(k for d in dims for k in range(ends[d], ends[d + 1]))


@writes(*(name for name, fn in RULES.items() if fn in (elementwise.plain, elementwise.linear, elementwise.identity)))
def _same_dims(writer, eqn, xs, ins, outs):
    def stretched(x, parts):  # a dim of size one, as many of them as the result has parts
        like = [(1,) * len(whole) if own == (1,) else own for own, whole in zip(parts, outs[0], strict=True)] if parts else parts
        return writer.reshape(x, shape_of(like), eqn)

    return writer.run(eqn, list(map(stretched, xs, ins)), list(map(shape_of, outs)))


@writes("dot_general")
def _dot_general(writer, eqn, xs, ins, outs):
    pairs = (tuple(dims_of(parts, dims) for parts, dims in zip(ins, both, strict=True)) for both in eqn.params["dimension_numbers"])
    return writer.run(eqn, xs, list(map(shape_of, outs)), dimension_numbers=tuple(pairs))


@writes("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
def _reduced(writer, eqn, xs, ins, outs):
    return writer.run(eqn, xs, list(map(shape_of, outs)), axes=dims_of(ins[0], eqn.params["axes"]))


@writes("transpose")
def _transpose(writer, eqn, xs, ins, outs):
    return writer.run(eqn, xs, list(map(shape_of, outs)), permutation=dims_of(ins[0], eqn.params["permutation"]))


@writes("squeeze")
def _squeeze(writer, eqn, xs, ins, outs):
    return writer.run(eqn, xs, list(map(shape_of, outs)), dimensions=dims_of(ins[0], eqn.params["dimensions"]))


@writes("broadcast_in_dim")
def _broadcast_in_dim(writer, eqn, xs, ins, outs):
    into = [dims_of(outs[0], [d])[: len(sizes)] for d, sizes in zip(eqn.params["broadcast_dimensions"], ins[0], strict=True)]
    dims = tuple(k for each in into for k in each)
    return writer.run(eqn, xs, list(map(shape_of, outs)), shape=shape_of(outs[0]), broadcast_dimensions=dims)


@writes("reshape")
def _reshape(writer, eqn, xs, ins, outs):
    if eqn.params["dimensions"] is not None or len(xs) > 1:
        raise UnalignedError
    shape = shape_of(outs[0])
    return [xs[0]] if shape == shape_of(ins[0]) else writer.run(eqn, xs, [shape], new_sizes=shape)


# ---- dims that are cut into equal pieces, or joined from them: the pieces are a part of their own


def with_one_piece(piece: Parts, whole: Parts) -> Parts:
    """The parts of one piece, with a first part of one piece where the whole has one of all.

    Raises:
        UnalignedError: they differ otherwise.
    """
    out = []
    for own, of_whole in zip(piece, whole, strict=True):
        if own != of_whole and own != of_whole[1:] and (len(own) > 1 or len(of_whole) > 1):
            raise UnalignedError
        out.append((1, *own) if len(own) < len(of_whole) else own)
    return tuple(out)


def _pieces(elements: int, of_piece: int) -> int:
    """How many pieces these elements are."""
    if elements % of_piece:
        raise UnalignedError
    return elements // of_piece


@writes("slice")
def _slice(writer, eqn, xs, ins, outs):
    one, strides = with_one_piece(outs[0], ins[0]), eqn.params["strides"]
    if strides is not None and set(strides) != {1}:
        raise UnalignedError
    starts, limits = [], []
    for start, n, of_piece, of_whole in zip(eqn.params["start_indices"], eqn.outvars[0].aval.shape, one, ins[0], strict=True):
        cut = len(of_whole) > 1 and n < prod(of_whole)
        first = _pieces(start, n) if cut else start
        starts += [first, *(0 for _ in of_whole[1:])]
        limits += [first + of_piece[0], *of_whole[1:]]
    made = writer.run(eqn, xs, [shape_of(one)], start_indices=tuple(starts), limit_indices=tuple(limits), strides=None)
    return [writer.reshape(made[0], shape_of(outs[0]), eqn)]


@writes("pad")
def _pad(writer, eqn, xs, ins, outs):
    one = with_one_piece(ins[0], outs[0])
    config = []
    for each, n, of_whole in zip(eqn.params["padding_config"], eqn.invars[0].aval.shape, outs[0], strict=True):
        low, high, gap = each
        if len(of_whole) > 1 and (gap or low < 0 or high < 0):
            raise UnalignedError
        config += [(_pieces(low, n), _pieces(high, n), 0) if len(of_whole) > 1 else each, *((0, 0, 0) for _ in of_whole[1:])]
    return writer.run(eqn, [writer.reshape(xs[0], shape_of(one), eqn), xs[1]], [shape_of(outs[0])], padding_config=tuple(config))


@writes("split")
def _split(writer, eqn, xs, ins, outs):
    ones, axis = [with_one_piece(parts, ins[0]) for parts in outs], eqn.params["axis"]
    sizes = tuple(one[axis][0] for one in ones)
    made = writer.run(eqn, xs, list(map(shape_of, ones)), axis=dims_of(ins[0], [axis])[0], sizes=sizes)
    return [writer.reshape(x, shape_of(parts), eqn) for x, parts in zip(made, outs, strict=True)]


@writes("concatenate")
def _concatenate(writer, eqn, xs, ins, outs):
    ones = [with_one_piece(parts, outs[0]) for parts in ins]
    pieces = [writer.reshape(x, shape_of(one), eqn) for x, one in zip(xs, ones, strict=True)]
    return writer.run(eqn, pieces, [shape_of(outs[0])], dimension=dims_of(outs[0], [eqn.params["dimension"]])[0])


def aligned_parts(eqn) -> Iterator[tuple]:
    """Of ops that cut and join: pairs of (variable, dim), the second of pieces as large as the first, and that size; 0 if it is one."""
    name, p = eqn.primitive.name, eqn.params
    if name not in ("slice", "pad", "split", "concatenate"):
        return
    pieces, whole = (eqn.invars, eqn.outvars[0]) if name in ("pad", "concatenate") else (eqn.outvars, eqn.invars[0])
    pieces = pieces[:1] if name == "pad" else pieces
    if any(isinstance(v, _jax.Literal) for v in (*pieces, whole)):
        return
    for d, n in enumerate(whole.aval.shape):
        sizes = {v.aval.shape[d] for v in pieces}
        size = min(sizes)
        if name == "slice":
            aligned = p["strides"] is None or p["strides"][d] == 1
            begins = [p["start_indices"][d]]
        elif name == "pad":
            low, high, gap = p["padding_config"][d]
            aligned, begins = gap == 0 and low >= 0 and high >= 0, [low]
        else:
            aligned, begins = len(sizes) == 1, []
        if aligned and size and n % size == 0 and all(begin % size == 0 for begin in begins):
            for v in pieces:
                yield (v, d), (whole, d), size if size < n else 0
