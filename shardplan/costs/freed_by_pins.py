"""Which pinned ops have neighbours that do not follow: a pin frees others from following only where they could not meet all pins otherwise.

Ops that follow have the layout of what they read, so a pin reaches along them from op to op. What is left of their strategies is found
by arc consistency; where nothing is left of one, the pins in reach of each other contradict, and arrays are resharded next to them.
So no plan of a step with a pin is missing from those of the step without it, unless pins contradict.

Arc consistency: Mackworth, "Consistency in networks of relations", Artificial Intelligence 8(1), 1977.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from shardplan.costs.space import StrategySpace
from shardplan.costs.tables import edge_layouts

Near = list[tuple[int, Callable[[], np.ndarray]]]
"""Ops next to one, and bool [its strategy, strategy of the one next to it], which go together."""


def freed_by_pins(space: StrategySpace, allowed: Mapping[int, np.ndarray]) -> frozenset[int]:
    """Those of `pinned_ops` whose neighbours cannot follow.

    Args:
        allowed: pinned op -> bool [s], which strategies remain.
    """
    near = _near(space) if allowed else {}
    left: dict[int, np.ndarray] = {i: mask.copy() for i, mask in allowed.items()}
    reach = {i: i for i in allowed}  # op -> one that pins reach together with it
    contradicting: set[int] = set()

    def root(i: int) -> int:
        while reach[i] != i:
            reach[i] = i = reach[reach[i]]
        return i

    changed = dict.fromkeys(allowed)
    while changed:
        i, _ = changed.popitem()
        for j, together in near.get(i, ()):
            before = left.get(j)
            reached = np.logical_or.reduce(together()[left[i]], axis=0)
            after = reached if before is None else np.logical_and(before, reached)
            if before is None and after.all():
                continue
            reach.setdefault(j, j)
            reach[root(j)] = root(i)
            if not after.any():
                contradicting.add(j)
            elif before is None or (after != before).any():
                left[j] = after
                changed[j] = None
    freed = {root(j) for j in contradicting}
    return frozenset(i for i in pinned_ops(space, allowed) if i in reach and root(i) in freed)


def pinned_ops(space: StrategySpace, allowed: Mapping[int, np.ndarray]) -> frozenset[int]:
    """Pinned ops, and inputs that have the layout of a pinned output."""
    return frozenset(allowed) | {start for start, end in space.graph.same_layout if end in allowed}


def _near(space: StrategySpace) -> dict[int, Near]:
    """Along arrays that are followed, and between inputs and outputs of one layout."""
    near: dict[int, Near] = {}

    def join(i: int, j: int, together: Callable[[], np.ndarray]) -> None:
        near.setdefault(i, []).append((j, together))
        near.setdefault(j, []).append((i, lambda: together().T))

    tables: dict[int, np.ndarray] = {}
    for edge in space.array_edges:
        if edge.template.is_follower:

            def followed(template=edge.template) -> np.ndarray:
                if (found := tables.get(id(template))) is None:
                    layouts = edge_layouts(space, template, True)
                    shape = len(template.result_layouts), len(template.operand_layouts)
                    found = np.ones(shape, bool) if layouts.forbidden is None else ~layouts.forbidden[layouts.strategies]
                    tables[id(template)] = found
                return found

            join(edge.producer, edge.consumer, followed)
    for i, j in space.graph.same_layout:

        def agreeing(i=i, j=j) -> np.ndarray:
            a, b = (space.layout_lists(space.strategies[x].results[0]) for x in (i, j))
            return a.equal(b)[np.ix_(a.index, b.index)]

        join(i, j, agreeing)
    return near
