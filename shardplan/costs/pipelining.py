"""What XLA issues a round ahead, or ends a round later, in loops whose collectives are pipelined; and what it then computes twice.

    ahead    an all-gather that needs no array that the round before hands on, and no loop whose own gathers are issued ahead. All that
             it needs runs a round ahead with it; of this, what the round itself needs, too, is computed once more
    later    a sum of a gradient that only becomes a row of a stack

Rows of a stack of weights need nothing. But a round of gradient accumulation needs no array of the round before, so an all-gather of an
activation runs its whole forward pass a round ahead; and the backward pass, which needs that forward pass, too, has XLA run it twice.
What only the backward pass reads is not stacked ahead.

Facts: options-pipelined-gather, options-pipelined-gather-twice, options-pipelined-gather-stacks,
options-pipelined-gather-behind-loop, options-pipelined-reduction.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardplan.costs.kernel_tasks import Tasks
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.cluster import CollectiveKind
from shardplan.xla_model.combining import SUMS

Member = tuple[Literal["task", "loop"], int]
"""A task or a loop of a computation."""


class Pipelined(NamedTuple):
    """Of one loop; combined transfers are named by the first of them.

    Attributes:
        ahead: all-gathers that are issued a round ahead.
        needed: what they need, in its order.
        twice: what of it the round needs for itself, too.
        later: sums that end a round later.
        peeled: whether something is issued ahead, if only before a loop in it, so that the last round stands behind the others.
    """

    ahead: tuple[int, ...] = ()
    needed: tuple[Member, ...] = ()
    twice: frozenset[Member] = frozenset()
    later: tuple[int, ...] = ()
    peeled: bool = False


NOTHING = Pipelined()
"""Of a loop that runs as it is."""


@dataclass(frozen=True, eq=False)
class Pipelining:
    """Finds what is pipelined in the loops of a program.

    Attributes:
        combined: by the first of them, transfers that are one collective.
        members: by computation, its tasks and loops, and what each waits for.
        orders: by computation, its members, each behind what it waits for.
        member: what stands for a task in a computation that holds it.
    """

    graph: Graph
    tasks: Tasks
    combined: Mapping[int, list[int]]
    members: Mapping[int, Mapping[Member, Mapping[Member, None]]]
    orders: Mapping[int, list[Member]]
    member: Callable[[int, int], Member]

    def by_loop(self, kinds: Collection[CollectiveKind]) -> dict[int, Pipelined]:
        """By loop of several rounds in which something is pipelined if these kinds are; loops before those that hold them."""
        out: dict[int, Pipelined] = {}
        loops = [n for n, loop in enumerate(self.graph.loops) if loop.trips > 1] if kinds else []
        for home in sorted(loops, key=lambda n: -len(self.graph.loop_holders[n])):
            mine = [n for n in self.combined if self.tasks.home[n] == home] if "all-reduce" in kinds else []
            later = tuple(n for n in mine if self._ends_later(n))
            ahead = self._ahead(home, out) if "all-gather" in kinds else NOTHING
            if ahead != NOTHING or later:
                out[home] = ahead._replace(later=later)
        return out

    def run_ahead(self, home: int, loop: int, found: Pipelined) -> frozenset[Member]:
        """Members of a loop in computation `home` that run a round ahead with what is `found`: but stacks that nothing there reads."""
        tasks, ahead = self.tasks, {*found.needed, *(("task", n) for n in found.ahead)}
        read = set[int]()
        for n, before in enumerate(tasks.before):
            if self._is_in(n, home) and not self._is_in(n, loop) and self.member(n, home) in ahead:
                read.update(m for m in before if self._is_in(m, loop))
        stacks = {tasks.made.get(j, -1) for j, op in enumerate(self.graph.ops) if op.traits.loop_stack and op.held_during == loop}
        roots = (n for n in tasks.roots.get(loop, ()) if n >= 0 and self._is_in(n, loop) and (n in read or n not in stacks))
        out = {self.member(n, loop) for n in roots}
        for name in reversed(self.orders[loop]):
            if name in out:
                out.update(self.members[loop][name])
        return frozenset(out)

    def _is_in(self, n: int, home: int) -> bool:
        """Whether a computation holds a task."""
        return home in self.graph.loop_holders[self.tasks.home[n]]

    def _gathers(self, home: int) -> list[int]:
        """Combined all-gathers of a loop."""
        return [n for n in self.combined if self.tasks.home[n] == home and self.tasks.kind(n) == "all-gather"]

    def _ahead(self, home: int, inner: Mapping[int, Pipelined]) -> Pipelined:
        """All-gathers of a loop that are issued a round ahead, what they need, and what of it the round needs, too."""
        gathers, before = self._gathers(home), self.members[home]
        first = [*self._sources_of_first(home, inner)]
        staying = self._staying(home, inner) if gathers or first else frozenset[Member]()
        ahead = [n for n in gathers if ("task", n) not in staying]
        first = [sources for sources in first if not sources & staying]
        issued = set[Member](("task", n) for n in ahead)
        found = {m for name in issued for m in before[name]}.union(*first)
        for name in reversed(self.orders[home]):
            if name in found:
                found.update(before[name])
        found -= issued
        roots = (n for n in self.tasks.roots.get(home, ()) if n >= 0 and self._is_in(n, home))
        twice = found.intersection(self.member(n, home) for n in roots)
        for name in reversed(self.orders[home]):
            if name in twice or (name not in found and name not in issued):
                twice.update(m for m in before[name] if m in found)
        needed = tuple(name for name in self.orders[home] if name in found)
        return Pipelined(tuple(ahead), needed, frozenset(twice), peeled=bool(ahead or first))

    def _ends_later(self, first: int) -> bool:
        step, site, *_ = self.tasks.transfers[first]
        sums = site.collective_class == "gradient" and step.kind in SUMS
        return sums and all(self._goes_to_stack(self.tasks.transfers[n].value) for n in self.combined[first])

    def _staying(self, home: int, inner: Mapping[int, Pipelined]) -> frozenset[Member]:
        """Members of a loop that need an array that the round before hands on, or a loop whose own gathers are issued ahead."""
        out = {*self._reading_the_carry[home], *(("loop", n) for n, of in inner.items() if of.ahead)}
        for name in self.orders[home]:
            if any(before in out for before in self.members[home][name]):
                out.add(name)
        return frozenset(out)

    @cached_property
    def _reading_the_carry(self) -> Mapping[int, frozenset[Member]]:
        """By loop, its members with ops that need an array that the round before hands on."""
        tasks, values = self.tasks, self.graph.values
        made = [(n, j) for j, n in tasks.computed.items()]
        made += [(n, values[transfer.value].producer[0]) for n, transfer in tasks.transfers.items()]
        ops = {home: _reading_the_carry(self.graph, home) for home in range(len(self.graph.loops))}
        return {
            home: frozenset(self.member(n, home) for n, j in made if j in some and self._is_in(n, home)) for home, some in ops.items()
        }

    def _sources_of_first(self, home: int, inner: Mapping[int, Pipelined]) -> Iterator[set[Member]]:
        """For each gather that loops in a loop make before their rounds, or in the first one, what the loop makes of what it reads.

        The first round of a loop whose sums end later stands before the others (fact: options-pipelined-reduction).
        """
        for n, of in inner.items():
            for first in (self._gathers(n) if of.later else of.ahead) if self.graph.loop_holders[n][1] == home else ():
                ops = itertools.chain.from_iterable(self._outside(self.tasks.transfers[m].value, n) for m in self.combined[first])
                tasks = (self.tasks.made.get(at, -1) for at in ops)
                yield {self.member(task, home) for task in tasks if task >= 0 and self._is_in(task, home)}

    def _outside(self, v: int, loop: int) -> Iterator[int]:
        """Ops before a loop that make what value v of it is computed from in the first round."""
        graph, stack, seen = self.graph, [v], {v}
        while stack:
            at = graph.values[stack.pop()].producer[0]
            op = graph.ops[at]
            if loop in graph.loop_holders[op.loop] or op.traits.loop_operand or op.traits.loop_carry:
                more = {u for u in op.inputs if u is not None} - seen
                seen |= more
                stack += sorted(more)
            else:
                yield at

    def _goes_to_stack(self, v: int) -> bool:
        """Whether a value, as it is or cast, only becomes a row of a stack."""
        readers = [self.graph.ops[at] for at, _ in self.graph.values[v].consumers]
        hands_on = (op.traits.loop_stack or self._stacks_all(op) for op in readers)
        return bool(readers) and all(hands_on)

    def _stacks_all(self, op: Op) -> bool:
        """Whether an op only hands on what becomes a row of a stack."""
        return (op.traits.copy or op.forwards_value) and all(map(self._goes_to_stack, op.outputs))


def _reading_the_carry(graph: Graph, home: int) -> set[int]:
    """Ops of a loop that need an array that the round before hands on; XLA computes scalars in either round."""
    carries = ((a, graph.ops[o]) for a, o in graph.same_layout if graph.ops[o].traits.loop_next)
    mine = ((a, to) for a, to in carries if to.loop == home and to.outs[0].size > 1)
    out = {a for a, to in mine if to.inputs[0] != graph.ops[a].outputs[0]}  # else every round hands on the same
    for j, op in enumerate(graph.ops):
        if home in graph.loop_holders[op.loop] and any(v is not None and graph.values[v].producer[0] in out for v in op.inputs):
            out.add(j)
    return out
