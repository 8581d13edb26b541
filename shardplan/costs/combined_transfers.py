"""Which collectives of a decided program XLA makes one (rule 2 of docs/xla_model.md).

XLA takes the collectives that may be one in the order of the HLO, and goes on with the next collective where one would exceed the
threshold or waits for one that was taken, so that of a chain of sums several times over, such as two norms of each parameter of which
the second waits for the first, the second is combined with the first of the next parameter. What waits for one that was combined waits
for all of them.

Facts: combine-threshold, combine-independent, combine-in-order, combine-order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_

from shardplan.costs.decided_tasks import Tasks


class Combiner:
    """Combines collectives, one group after the other.

    Attributes:
        behind: by collective, those that it waits for, as a set of bits.
    """

    def __init__(self, tasks: Tasks):
        self.bit = {n: 1 << k for k, n in enumerate(tasks.transfers)}
        found: list[int] = []  # per task, it and what it waits for
        for n, before in enumerate(tasks.before):
            mine = self.bit.get(n, 0)
            for m in before:
                mine |= found[m]
            found.append(mine)
        self.behind = {n: found[n] & ~bit for n, bit in self.bit.items()}

    def in_chain(self, some: Sequence[int]) -> bool:
        """Whether one of these waits for another."""
        mine = reduce(or_, (self.bit[n] for n in some))
        return any(self.behind[n] & mine for n in some)

    def combined(self, in_order: Sequence[int], result_bytes: Callable[[int], float], threshold_bytes: float) -> Iterator[list[int]]:
        """Those of a group that are one collective; the order is that of the HLO if some wait for others."""
        left = list(in_order)
        while left:
            taken, size, rest, mine = [], 0.0, [], 0
            for at, n in enumerate(left):
                if result_bytes(n) > threshold_bytes:
                    yield [n]
                elif size + result_bytes(n) > threshold_bytes or self.behind[n] & mine:
                    rest = left[at:]
                    break
                else:
                    taken.append(n)
                    size += result_bytes(n)
                    mine |= self.bit[n]
            if taken:
                self._join(taken, mine)
                yield taken
            left = rest

    def _join(self, taken: Sequence[int], mine: int) -> None:
        if len(taken) > 1:
            past = reduce(or_, (self.behind[n] for n in taken))
            for n, behind in self.behind.items():
                if self.bit[n] & mine:
                    self.behind[n] = past
                elif behind & mine:
                    self.behind[n] = behind | mine | past
