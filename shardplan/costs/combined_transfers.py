"""Which collectives of a decided program XLA combines (rule 2 of docs/xla_model.md).

XLA visits the collectives that may be one in the order of the HLO, and fills one of them; it begins the next at a collective that would
exceed the threshold, or that waits for one that was taken. So of two norms of each parameter of which the second waits for the first,
the second is combined with the first norm of the next parameter. What waits for a collective that was combined waits for all of it.

Facts: combine-threshold, combine-independent, combine-in-order, combine-order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_

from shardplan.costs.kernel_tasks import Tasks, order_of


class Combiner:
    """Combines collectives, one group after the other.

    Attributes:
        bit: of each collective.
        behind: by collective, those that it waits for, as a sum of bits.
    """

    def __init__(self, tasks: Tasks, merged: Sequence[Sequence[int]]):
        """Collectives of `tasks`, of which some are `merged` before: what waits for one of these waits for what any of them does."""
        self.bit = {n: 1 << k for k, n in enumerate(tasks.transfers)}
        one = list(range(len(tasks.before)))
        for some in merged:
            for n in some:
                one[n] = some[0]
        order = order_of(range(len(one)), tasks.before, one)
        if order is None:
            order = one = list(range(len(one)))
        members: dict[int, list[int]] = {}
        for n, first in enumerate(one):
            members.setdefault(first, []).append(n)
        found: dict[int, int] = {}  # by task, it and what it waits for
        for first in order:
            found[first] = 0
            for n in members[first]:
                found[first] |= self.bit.get(n, 0)
                for m in tasks.before[n]:
                    found[first] |= found[one[m]]
        self.behind = {n: found[n] & ~bit for n, bit in self.bit.items()}

    def in_chain(self, some: Sequence[int]) -> bool:
        """Whether one of these waits for another."""
        mine = reduce(or_, (self.bit[n] for n in some))
        return any(self.behind[n] & mine for n in some)

    def combined(self, in_order: Sequence[int], result_bytes: Callable[[int], float], threshold_bytes: float) -> Iterator[list[int]]:
        """The combined collectives of a group; `in_order` is the order of the HLO."""
        left = list(in_order)
        while left:
            taken, size, rest, mine, past = [], 0.0, [], 0, 0
            for at, n in enumerate(left):
                if result_bytes(n) > threshold_bytes:
                    yield [n]
                elif size + result_bytes(n) > threshold_bytes or self.behind[n] & mine or self.bit[n] & past:
                    rest = left[at:]
                    break
                else:
                    taken.append(n)
                    size += result_bytes(n)
                    mine, past = mine | self.bit[n], past | self.behind[n]
            if len(taken) > 1:
                self._join(mine, past)
            if taken:
                yield taken
            left = rest

    def _join(self, mine: int, past: int) -> None:
        """Makes one collective of those with the bits `mine`, which wait for those with the bits `past`."""
        for n, behind in self.behind.items():
            if self.bit[n] & mine:
                self.behind[n] = past
            elif behind & mine:
                self.behind[n] = behind | mine | past
