"""What a shard needs of its neighbours along a split dim that windows slide over.

    conv     n h w c, i j c o -> n h w o    halo h=3    window of 3: one row from the shard before and one from the shard after
    pooling  n h w c -> n h w c             halo h=2/2  windows of 2, each 2 further: none

    slice    n h -> n h                     halo h=1    what is cut off moves all behind it on: a part of the shard after
    cumsum   n h -> n h                     prefix h    what all before sum up to: every shard gathers the totals of all
    argmax   n h -> n                       best h      what is best of all: every shard gathers what is best of each, and where it is
    random   k -> n                         first k     the first element: all sum it up, those without it nothing

XLA sends the shares that lack to whoever lacks them, one collective-permute for every distance they come from; an op that fetches
them itself (`Rule.shard_local`, run by `emit/shard_local/forms.py`) uses as few as it can. With several such dims split it is one dim after the other:
XLA sends on all rows it has by then, an op that fetches those that its windows see (measured: `benchmarks/rules_on_xla.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from shardplan import _jax
from shardplan.mesh import collective
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.rule import Rule, exchanged_sizes


@dataclass(frozen=True)
class Exchange:
    """One collective: rows of an operand that go to other shards along some axes; bytes per device of its larger buffer."""

    operand: int
    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float


def exchanges(
    rule: Rule,
    factors: Sequence[str | None],
    ins: Sequence,
    outs: Sequence,
    layouts: Sequence[Layout],
    mesh: MeshShape,
    cluster: Cluster,
) -> list[Exchange]:
    """What one strategy exchanges.

    Args:
        rule: the op's rule.
        letters: the strategy: per mesh axis the letter it is put on.
        ins, outs: avals of operands and results.
        layouts: of the operands.
        mesh: names and sizes of the axes.
        cluster: the machine.
    """

    def sent(k: int, kind: str, axes: tuple[str, ...], bytes_: float) -> Exchange:
        return Exchange(k, kind, axes, bytes_, collective.seconds(kind, bytes_, axes, mesh, cluster))

    over = {a: tuple(axis for axis, x in zip(mesh.axes, factors, strict=True) if x == a) for a in rule.exchanged if a in factors}
    out = []
    for k, dims in enumerate(rule.operands):
        split = [(h, *exchanged_sizes(rule, h, k, ins, outs)) for h in over if (h,) in dims]
        held = prod(layouts[k].local_shape(tuple(ins[k].shape), mesh)) * _jax.itemsize(ins[k].dtype) if split else 0.0
        for h, n, _ in split:
            own = n // (shards := mesh.size(*over[h]))
            if h in rule.scan:
                out.append(sent(k, "all-gather", over[h], held * shards / own))
            if h in rule.head:
                out.append(sent(k, "all-reduce", over[h], held / own))
            if h in rule.arg_reduce:
                chosen = held * shards * min(rule.arg_reduce[h], own) / own
                places = chosen * _jax.itemsize(outs[-1].dtype) / _jax.itemsize(ins[k].dtype)
                out += [sent(k, "all-gather", over[h], b) for b in (chosen, places)]
        slid = [(rule.halo[h][k], over[h], n, m) for h, n, m in split if k in rule.halo.get(h, ())]
        for halo, axes, n, m in sorted(slid, key=lambda x: x[0].growth(*x[2:])) if rule.shard_local else slid:
            shards = mesh.size(*axes)
            if rule.shard_local:
                rows = [max(x.size for x in permute) for permute in halo.permutes(n, m, shards)]
            else:
                rows = halo.hops(n, m, shards).values()
            row = held / (n // shards)
            moved = [row * r for r in rows]
            out += [sent(k, "collective-permute", axes, b) for b in moved]
            held = row * halo.span(m // shards) if rule.shard_local else held + sum(moved)
    return out
