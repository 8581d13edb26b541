"""What a cost network assumes of the whole plan: the price of hidden communication, and which arrays are combined in one collective."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from shardplan.costs.edge_templates import partial_bytes_ratio
from shardplan.costs.space import StrategySpace
from shardplan.mesh.collective import UNCOMBINED, CollectiveKey, CombinedCollectives
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.combining import COMBINABLE, COMBINE_THRESHOLD_BYTES
from shardplan.xla_model.promotion import byte_factors

CombinedGroups = tuple[tuple[tuple[int, CollectiveKey], tuple[tuple[int, float], ...]], ...]
"""Arrays that one collective moves: ((site group, kind and axes), ((op that makes it, bytes of the result per device), ...)), ..."""


@dataclass(frozen=True)
class Pricing:
    """What a cost network assumes of the whole plan; the pricing loop (`search/slope_scaling.py`) finds it out.

    Attributes:
        background_price: fraction of a background collective's seconds that its edge costs.
        combined: what is combined; None: all arrays of a site group are, however each is moved.
    """

    background_price: float = 1.0
    combined: CombinedGroups | None = None


def resharders(space: StrategySpace, resharder: Resharder, combined: CombinedGroups | None) -> tuple[Resharder, ...]:
    """Per value, what prices its reshards; one object for values of one price."""
    known: dict[int, tuple[tuple[CollectiveKey, CombinedCollectives], ...]] = {}
    for (group, key), arrays in combined or ():
        above = sum(n for _, n in arrays) > COMBINE_THRESHOLD_BYTES
        if len(arrays) > 1:
            together = CombinedCollectives(len(arrays), COMBINE_THRESHOLD_BYTES if above else inf)
            known[group] = (*known.get(group, ()), (key, together))
    found: dict[tuple, Resharder] = {}
    out = []
    for v, (value, site) in enumerate(zip(space.graph.values, space.collective_sites, strict=True)):
        part = partial_bytes_ratio(space.graph, space.accumulated_sums, v)
        others = CombinedCollectives(site.group_size, COMBINE_THRESHOLD_BYTES) if combined is None else UNCOMBINED
        same = (value.dtype, part, site.collective_class, others, site.group if site.group in known else None)
        if same not in found:
            # A gradient that is both reduce-scattered and gathered would be all-reduced: only its reductions count as combined.
            kinds = ("all-reduce", "reduce-scatter") if site.collective_class == "gradient" else COMBINABLE
            found[same] = resharder.sending(byte_factors(value.dtype, part)).combining(others, kinds, known.get(site.group, ()))
        out.append(found[same])
    return tuple(out)
