"""In which order the dims of every value lie in memory, and what XLA for GPU transposes for that.

A product fixes the order of its result, and what is computed from that, elementwise, keeps it. A transpose moves nothing then: it names
the dims anew. XLA transposes where a reader needs another order:

    dot(k[b, s, g, d], q[b, t, g, r, d])   -> [b, g, s, t, r]     batch dims, dims of k, dims of q
      -> transpose -> [b, g, r, t, s]                             lies as [b, g, s, t, r]; so does all that softmax makes of it
      -> softmax over s                                           reduces columns: r is the minor dim
      -> dot(v[b, s, g, d], ..)                                   needs (r, t) as one dim: softmax's kernel writes [b, g, s, r, t]
      -> times dot(..) -> [b, g, r, t, s]                         the later product is transposed to [b, g, s, t, r] before they meet

A product reads an operand if the dims of each group (batch, contracted, own) lie one after the other, in their order. Else the kernel
that makes it writes it so, if that is a fused one and nothing else needs the array; or a kernel of its own transposes it. A convolution
reads and writes its activations in one order (`convolutions.py`), which elementwise work keeps rather than any product's.

Facts: layout-product-order, layout-product-operand, layout-split-rows, layout-transpose-into-product, layout-transpose-bitcast,
layout-untiled-transpose, convolution-channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, prod
from types import MappingProxyType
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op, Value
from shardplan.strategies.rule import Rule
from shardplan.xla_model.ragged import contracts_rows

Dims = tuple[int, ...]
Groups = tuple[Dims, ...]
"""Dims of an array, in groups that a product reads or writes as one dim each."""
Operand = tuple[int, int]
"""Op and number of the operand."""

LEAST_TILE, LARGE_TILE = 16, 1 << 13
"""A fusion of XLA for GPU transposes without tiles, element by element, where the minor dim, before or after, has fewer elements than
`LEAST_TILE`; half of them suffice if the product of the two dims is `LARGE_TILE` (fact: layout-untiled-transpose)."""


@dataclass(frozen=True)
class PhysicalOrders:
    """In which order dims lie in memory.

    Attributes:
        orders: per value, its dims from the outermost to the minor one.
        rules: per op; those of transposes that move nothing are views.
        later: products transposed to an earlier one's order, with another minor dim; each as the last value that is made of it alone.
        written: value that its kernel transposes as it writes it -> whether without tiles.
        transposed: op -> operands that kernels of their own transpose first, and whether without tiles.
    """

    orders: tuple[Dims, ...]
    rules: tuple[Rule, ...]
    later: tuple[int, ...]
    written: Mapping[int, bool]
    transposed: Mapping[int, tuple[tuple[int, bool], ...]]

    def minor(self, op: Op) -> int:
        """The minor dim, in memory, of an op's first operand; -1 if it has none."""
        order = range(len(op.ins[0].shape)) if (v := op.inputs[0]) is None else self.orders[v]
        return order[-1] if order else -1


class CallOrders(NamedTuple):
    """In which order dims lie that a call of a library reads and writes; None where it does not matter, or a copy is made anyway."""

    operands: tuple[Dims | None, ...]
    result: Dims | None


class _Placement(NamedTuple):
    """How a value lies in memory."""

    product: float  # the result whose order it has, counted from the last value if it is a call's; infinite where it is neither's
    order: Dims
    groups: Groups  # of that product's result, as dims of this value; () where it was reshaped


class MemoryTranspose(NamedTuple):
    """A transpose in memory. Dims that stay side by side count as one, dims of one element are left out."""

    sizes: Dims  # as they lie before
    permutation: Dims  # which of them comes first, second and so on
    itemsize: float

    @classmethod
    def between(cls, value: Value, order: Dims, to: Dims) -> MemoryTranspose:
        """From one order of an array's dims to another."""
        dims = [d for d in order if value.shape[d] > 1]
        runs: list[list[int]] = []
        for n in (dims.index(d) for d in to if value.shape[d] > 1):
            if runs and n == runs[-1][-1] + 1:
                runs[-1].append(n)
            else:
                runs.append([n])
        before = sorted(runs)
        return cls(tuple(prod(value.shape[dims[n]] for n in run) for run in before), tuple(map(before.index, runs)), value.itemsize)

    @property
    def keeps_minor(self) -> bool:
        """Whether the minor dim stays the minor one."""
        return self.permutation[-1:] == (len(self.sizes) - 1,) or not self.sizes

    @property
    def untiled(self) -> bool:
        """Whether the transpose moves the minor dim, and this dim or the one that takes its place has few elements.

        Of elements of 16 bits and less the minor dim counts together with the one before it, if that stays before the minor dim and
        what takes its place is more than one tile.
        """
        sizes, dims, last = self.sizes, self.permutation, len(self.sizes) - 1
        if self.keeps_minor:
            return False
        before, after = sizes[last], sizes[dims[-1]]
        if self.itemsize <= 2 and dims[-2] == last - 1 and after > LEAST_TILE:
            before *= sizes[last - 1]
        return min(before, after) < (LEAST_TILE if before * after < LARGE_TILE else LEAST_TILE // 2)


class _Placed(NamedTuple):
    """What is known once every value has an order."""

    values: list[_Placement]
    rules: list[Rule]  # per op; those of transposes that move nothing are views
    written: dict[int, bool]  # transposes that move something -> whether without tiles
    conflicts: dict[int, tuple[Operand, MemoryTranspose]]  # product -> where it first meets an earlier one in another order


def physical_orders(graph: Graph, rules: Sequence[Rule], calls: Mapping[int, CallOrders] = MappingProxyType({})) -> PhysicalOrders:
    """The orders of a step: each as its value is made, then the transposes that readers need; `calls` by op (`convolutions.py`)."""
    placed, with_views, written, conflicts = _placed(graph, rules, calls)
    later, first = [], dict[Operand, bool]()
    for product, (operand, move) in conflicts.items():
        later.append(last := _last_of_chain(graph, product))
        if last == product:
            first[operand] = move.untiled
        else:
            written[last] = move.untiled
    through = [
        op.traits.copy or (rule.fusion == "view" and not op.traits.border) for op, rule in zip(graph.ops, with_views, strict=True)
    ]
    for v, readers in _unreadable(graph, rules, through, placed, calls).items():
        made = next(iter(readers.values())) if _is_made_for(graph, rules, through, v, readers) else None
        if made is not None:
            written[v] = made.untiled
        known = {made}
        for operand, move in readers.items():
            if move not in known:
                known.add(move)
                first[operand] = move.untiled
    transposed: dict[int, tuple[tuple[int, bool], ...]] = {}
    for (at, k), untiled in sorted(first.items()):
        transposed[at] = (*transposed.get(at, ()), (k, untiled))
    return PhysicalOrders(tuple(x.order for x in placed), tuple(with_views), tuple(sorted(later)), written, transposed)


def _placed(graph: Graph, rules: Sequence[Rule], calls: Mapping[int, CallOrders]) -> _Placed:
    """Every value in the order in which it is made."""
    placed = _Placed([], list(rules), {}, {})
    for at, (op, rule) in enumerate(zip(graph.ops, rules, strict=True)):
        new = _as_made(graph, op, rule, placed.values, calls.get(at))
        if new is not None and op.traits.transpose and new.order != (plain := tuple(range(len(new.order)))):
            if new.product < inf and _all_take(graph, rules, op.outputs[0], new.order):
                placed.rules[at] = replace(rule, fusion="view")
            else:
                placed.written[op.outputs[0]] = MemoryTranspose.between(graph.values[op.outputs[0]], new.order, plain).untiled
                if new.product < inf:  # what no product made is read as it lies, unless it is written after all (`materialised.py`)
                    new = new._replace(order=plain)
        elif new is not None and _is_elementwise(op, rule):
            for k, x in _same_shape(op, placed.values):
                if x.product < inf and x.order != new.order and not _fits(x.groups, new.order, op.outs[0].shape):
                    move = MemoryTranspose.between(graph.values[op.outputs[0]], x.order, new.order)
                    if not move.keeps_minor:
                        placed.conflicts.setdefault(int(x.product) % len(graph.values), ((at, k), move))
        row_major = (_Placement(inf, tuple(range(len(x.shape))), ()) for x in op.outs)
        placed.values.extend(row if new is None or len(new.order) != len(row.order) else new for row in row_major)
    return placed


def is_product(op: Op, rule: Rule) -> bool:
    """Whether a kernel of its own computes a product."""
    return op.traits.matmul and rule.fusion == "none"


def _as_made(graph: Graph, op: Op, rule: Rule, placed: Sequence[_Placement], call: CallOrders | None) -> _Placement | None:
    """How the results of an op lie; None where that is row-major for want of a reason."""
    if call is not None and call.result is not None:
        return _Placement(op.outputs[0] - len(graph.values), call.result, (call.result,))
    if is_product(op, rule):
        return _Placement(op.outputs[0], _written_order(graph, op), result_groups(op))
    if _is_elementwise(op, rule):
        plain = tuple(range(len(op.outs[0].shape)))
        same = (x for _, x in _same_shape(op, placed))
        return min(same, key=lambda x: (x.product, x.order == plain), default=None)  # the earliest call or else product decides
    v = op.inputs[0] if op.inputs else None
    if v is None or op.traits.border or len(op.outputs) != 1:
        return None
    product, before, groups = placed[v]
    if op.traits.transpose:
        place = tuple(op.params["permutation"]).index
        return _Placement(product, tuple(map(place, before)), tuple(tuple(map(place, group)) for group in groups))
    if rule.fusion == "view":
        order = reshaped(before, op.ins[0].shape, op.outs[0].shape)
        return None if order is None else _Placement(product, order, ())
    if op.traits.reduction:
        kept = [d for d in range(len(op.ins[0].shape)) if d not in op.params.get("axes", ())]
        return _Placement(product, tuple(kept.index(d) for d in before if d in kept), ())
    return None


def _is_elementwise(op: Op, rule: Rule) -> bool:
    """Whether the results have the dims of some operand: elementwise work and copies."""
    if op.traits.border or op.traits.transpose:
        return op.traits.copy
    return rule.fusion in ("loop", "view") and bool(op.outs) and any(x.shape == op.outs[0].shape for x in op.ins)


def _same_shape(op: Op, placed: Sequence[_Placement]) -> Iterator[tuple[int, _Placement]]:
    """Operands of the shape of the result: number, and how it lies."""
    for k, (v, x) in enumerate(zip(op.inputs, op.ins, strict=True)):
        if v is not None and x.shape == op.outs[0].shape:
            yield k, placed[v]


def _all_take(graph: Graph, rules: Sequence[Rule], v: int, order: Dims) -> bool:
    """Whether all readers of a value take it in any order, or, if it is reshaped, in this one."""
    for at in graph.readers(v):
        op, fusion = graph.ops[at], rules[at].fusion
        if op.traits.border or (fusion == "none" and not op.traits.matmul):
            return False
        if fusion == "view" and reshaped(order, graph.values[v].shape, op.outs[0].shape) is None:
            return False
    return True


def reshaped(order: Dims, before: Dims, after: Dims) -> Dims | None:
    """The order of what a reshape makes of an array in this order; None if it has to move something, or is none."""
    if not prod(before) or prod(before) != prod(after):
        return None
    place = [d for d in order if before[d] > 1]
    parts: list[tuple[int, Dims]] = []  # where dims lie that become others, and these
    for ins, outs in _parts(before, after):
        large = [d for d in ins if before[d] > 1]
        first = place.index(large[0]) if large else -1
        if large and place[first : first + len(large)] != large:
            return None
        parts.append((first, outs))
    return tuple(d for _, outs in sorted(parts) for d in outs)


def _parts(before: Dims, after: Dims) -> Iterator[tuple[Dims, Dims]]:
    """Dims of two shapes in groups of as many elements, as few together as can be."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, m, n = (i, j), 1, 1
        while (i, j) == start or m != n:
            if j == len(after) or (m <= n and i < len(before)):
                m, i = m * before[i], i + 1
            else:
                n, j = n * after[j], j + 1
        yield tuple(range(start[0], i)), tuple(range(start[1], j))


def _unreadable(
    graph: Graph, rules: Sequence[Rule], through: Sequence[bool], placed: Sequence[_Placement], calls: Mapping[int, CallOrders]
) -> dict[int, dict[Operand, MemoryTranspose]]:
    """Array -> operands of products and calls that are this array, but do not read it as it lies -> how it is transposed for them."""
    out: dict[int, dict[Operand, MemoryTranspose]] = {}
    for at, op in enumerate(graph.ops):
        for k, groups, to in _reads(op, rules[at], calls.get(at)) if at not in graph.dead else ():
            v = op.inputs[k]
            if v is not None and not _fits(groups, placed[v].order, op.ins[k].shape):
                array = graph.origin(v, through.__getitem__)
                out.setdefault(array, {})[at, k] = MemoryTranspose.between(graph.values[v], placed[v].order, to)
    return out


def _reads(op: Op, rule: Rule, call: CallOrders | None) -> Iterator[tuple[int, Groups, Dims]]:
    """Operands of a call or a product: number, groups of dims that lie together, and the order that a transpose for it makes."""
    for k, order in enumerate(call.operands if call else ()):
        if order is not None:
            yield k, (order,), order
    for k in _operands_read(op, rule):
        batch, contracted, own = operand_groups(op, k)
        rows = tuple((d,) for d in own) if k == 0 and not batch else (own,)  # need not lie together (fact: layout-split-rows)
        matrices = op.traits.matmul and _is_batched_matmul(op)
        plain = tuple(range(len(op.ins[k].shape)))
        yield k, (batch, contracted, *rows), plain if matrices else batch + (contracted + own if k else own + contracted)


def _operands_read(op: Op, rule: Rule) -> tuple[int, ...]:
    """Which operands a product's kernel reads in the order of their groups; a ragged one copies its rows anyway (`ragged.py`)."""
    if op.traits.grouped_matmul:
        return () if contracts_rows(op) else (1,)
    return tuple(range(len(op.inputs))) if is_product(op, rule) else ()


def _is_batched_matmul(op: Op) -> bool:
    """Whether both operands of a product are row-major matrices behind batch dims: of others XLA transposes and joins dims first."""
    found = [operand_groups(op, k) for k in range(2)]
    return all(batch == tuple(range(len(batch))) and len(contracted) <= 1 and len(own) <= 1 for batch, contracted, own in found)


def _is_made_for(graph: Graph, rules: Sequence[Rule], through: Sequence[bool], v: int, readers: Collection[Operand]) -> bool:
    """Whether a fused kernel makes an array, and nothing but these products reads it."""
    at, products = graph.values[v].producer[0], {reader for reader, _ in readers}
    if rules[at].fusion not in ("loop", "reduce") or graph.ops[at].traits.border:
        return False
    return all(through[i] or i in products or i in graph.dead for i in graph.reached(v, through.__getitem__))


def _fits(groups: Groups, order: Dims, shape: Dims) -> bool:
    """Whether the dims of each group lie one after the other, in their order."""
    order = tuple(d for d in order if shape[d] > 1)
    for group in groups:
        dims = tuple(d for d in group if shape[d] > 1)
        first = order.index(dims[0]) if dims else 0
        if order[first : first + len(dims)] != dims:
            return False
    return True


def _written_order(graph: Graph, op: Op) -> Dims:
    """The order in which a product is written: that of its groups, or of the transpose that alone reads it."""
    readers = graph.values[op.outputs[0]].consumers
    if len(readers) == 1 and transposed_product(graph, reader := graph.ops[readers[0][0]]) is not None:
        return tuple(reader.params["permutation"])
    return tuple(range(len(op.outs[0].shape)))


def transposed_product(graph: Graph, op: Op) -> int | None:
    """The product that XLA writes in the order of `op`, a transpose of two dims and its only reader; None for other ops."""
    v = op.inputs[0] if op.traits.transpose and len(op.ins[0].shape) == 2 else None
    if v is None or len(graph.values[v].consumers) > 1 or not graph.ops[graph.values[v].producer[0]].traits.matmul:
        return None
    return v


def _last_of_chain(graph: Graph, v: int) -> int:
    """The last value of the chain of ops that compute with nothing but v; copies do not count."""
    last = v
    while len(graph.values[v].consumers) == 1:
        op = graph.ops[graph.values[v].consumers[0][0]]
        if [u for u in op.inputs if u is not None] != [v]:
            break
        v = op.outputs[0]
        last = last if op.traits.copy else v
    return last


def result_groups(op: Op) -> Groups:
    """Batch dims, and those that each operand brings into a product."""
    contracted, (batch, _) = op.params["dimension_numbers"]
    free = [len(x.shape) - len(c) - len(batch) for x, c in zip(op.ins, contracted, strict=True)]
    ends = (0, len(batch), len(batch) + free[0], sum(free) + len(batch))
    return tuple(tuple(range(*pair)) for pair in pairwise(ends))


def operand_groups(op: Op, k: int) -> Groups:
    """Batch, contracted and own dims of a product's operand; a product of ragged rows contracts the other operand's groups, too."""
    numbers = op.params["ragged_dot_dimension_numbers"] if op.traits.grouped_matmul else None
    contracted, batch = (tuple(both[k]) for both in (numbers.dot_dimension_numbers if numbers else op.params["dimension_numbers"]))
    if numbers and k:
        contracted = (*numbers.rhs_group_dimensions, *contracted)
    return batch, contracted, tuple(d for d in range(len(op.ins[k].shape)) if d not in batch + contracted)
