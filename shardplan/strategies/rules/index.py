"""Gather and scatter in every mode.

    gather       v d, n 1 -> n d            reduce v    each device looks up the rows it holds, the parts are summed
    gather       b v d, b n 1 -> b n d      reduce v    b is a batching dim
    scatter-add  v d, n 1, n d -> v d       reduce n    v: each device keeps the updates that fall in its part
    scatter      v d, n 1, n d -> v d       replicated n   overwriting updates have an order

A dim of the operand of which slices are read, neither all of it nor one element, needs replication; so do the components of one index.
Partial results of a scatter over n start from the operand on one device and from the identity of the reduction on the others.
"""

from __future__ import annotations

from functools import partial
from math import prod

from shardplan.ir.traits import ScatterKind, Traits
from shardplan.strategies.rule import Rule, factors, rule
from shardplan.strategies.rules.reduce import collective_kind


def index_factors(indices, batching: dict[int, tuple[str, ...]]):
    """Factors of the indices' dims; `batching` gives those shared with the operand. The last dim holds one index."""
    own = [batching.get(d, n) for d, n in enumerate(factors(indices, "i"))]
    own[-1] = () if indices.shape[-1] == 1 else own[-1]
    return tuple(own)


@rule(traits=Traits(gather=True, reads_part=True))
def gather(x, indices, *rest, out, dimension_numbers, slice_sizes, **_):
    n, a, b = dimension_numbers, factors(x), factors(x, "s")
    kind = "or" if str(x.dtype) == "bool" else "sum"
    i = index_factors(indices, {j: a[d] for d, j in zip(n.operand_batching_dims, n.start_indices_batching_dims, strict=True)})
    reduce, replicated, window = {}, set(i[-1]), []
    for d, (size, taken) in enumerate(zip(x.shape, slice_sizes, strict=True)):
        indexed = d in n.start_index_map
        if d in n.operand_batching_dims:
            continue
        if taken == size and not indexed:
            kept = a[d]
        elif taken == 1 and indexed and "key<" not in str(x.dtype):
            kept, reduce[a[d][0]] = (), kind
        else:
            kept = b[d]
            replicated |= {*a[d], *(() if d in n.collapsed_slice_dims else b[d])}
        if d not in n.collapsed_slice_dims:
            window.append(kept)
    window, batch = iter(window), iter(i[:-1])
    result = tuple(next(window) if d in n.offset_dims else next(batch) for d in range(len(out[0].shape)))
    operands, shard_local = (a, i, *((),) * len(rest)), single_lookup(indices, reduce)
    return Rule(operands, (result,), reduce=reduce, replicated=frozenset(replicated), shard_local=shard_local, fusion="loop")


def scatter(x, indices, updates, *, out, dimension_numbers, kind: str | None, **_) -> Rule:
    """Updates at one place are joined by a reduction of this kind, or by none that a collective has: then updates need replication."""
    kind = collective_kind(x, kind)
    n, a, b = dimension_numbers, factors(x), factors(updates, "u")
    i = index_factors(indices, {j: a[d] for d, j in zip(n.operand_batching_dims, n.scatter_indices_batching_dims, strict=True)})
    replicated, window, batch = set(i[-1]), iter(n.update_window_dims), iter(i[:-1])
    u = [b[d] if d in n.update_window_dims else next(batch) for d in range(len(updates.shape))]
    for d, size in enumerate(x.shape):
        indexed = d in n.scatter_dims_to_operand_dims
        if d in n.operand_batching_dims or (d in n.inserted_window_dims and indexed):
            continue
        if d in n.inserted_window_dims:
            replicated |= {*a[d]}
            continue
        w = next(window)
        if updates.shape[w] == size and not indexed:
            u[w] = a[d]
        elif updates.shape[w] == 1 and indexed:
            u[w] = ()
        else:
            replicated |= {*a[d], *b[w]}
    free = {j for dim in i[:-1] for j in dim} - {c for d in a for c in d}
    reduce = dict.fromkeys(sorted(free), kind) if kind else {}
    replicated = frozenset(replicated if kind else replicated | free)
    shard_local = single_lookup(indices, [c for d in n.scatter_dims_to_operand_dims for c in a[d]])
    return Rule((a, i, tuple(u)), (a,), reduce=reduce, replicated=replicated, shard_local=shard_local)


def single_lookup(indices, names) -> frozenset[str]:
    """The factors, if only one place is looked up: XLA makes a slice of it, for which it would gather the operand."""
    return frozenset(names if prod(indices.shape[:-1]) == 1 else ())


SCATTERS: dict[ScatterKind, str | None] = {"add": "sum", "mul": "prod", "max": "max", "min": "min", "sub": None}
"""How updates are joined -> kind of the partial results. XLA partitions sums of updates, not differences: it would gather them."""

rule("scatter", traits=Traits(scatter="set", in_place=True))(partial(scatter, kind=None))
for _name, _kind in SCATTERS.items():
    rule(f"scatter-{_name}", f"scatter_{_name}", traits=Traits(scatter=_name, in_place=True))(partial(scatter, kind=_kind))
