"""Which weighted means of (11) bound a plan best: the sets E of collectives that compute cannot hide, by minimum cuts.

Per computation, the best E for given seconds is a minimum cut: a collective is left out of E, or all kernels that are independent of it
are left out of what counts. Loops inside count as kernels of as many seconds as their own bound.

    source --seconds--> collective --infinite--> kernel, independent of it --seconds--> sink

Of readers that may share a collective, one counts. Of collectives that may be combined, those of one chain pay their latency: none of
them is combined with another, since each waits for the one before.
Also known as project selection, or maximum closure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.bound_network import AROUND, KERNELS, LATENCY, NETWORK, Weights
from shardplan.costs.kernel_tasks import OUTSIDE
from shardplan.costs.shared_collectives import shared_key
from shardplan.costs.task import PlanningTask
from shardplan.ilp.solver.or_tools import or_tools

MOST_COLLECTIVES = 256
"""Collectives of one computation, the longest, that E is chosen from."""

MOST_FLOW = 1 << 60


class Members(NamedTuple):
    """The ops and loops of a computation: numbers that go up with the program, and who waits for whom."""

    of: list[int]  # op -> the member that holds it, or -1
    loops: dict[int, int]  # loop -> its member
    count: int
    waits: list[tuple[int, ...]]  # per member


class Hiding(NamedTuple):
    """E of a computation, and all that some collective of E may hide behind."""

    exposed: frozenset[int]  # array edges
    members: frozenset[int]
    around: frozenset[int]  # array edges whose kernels may run meanwhile


class Fractions(NamedTuple):
    """What counts of the seconds on the network, of the latency and of the staging kernels, each [array edge]."""

    network: np.ndarray
    latency: np.ndarray
    staged: np.ndarray


@dataclass(frozen=True, eq=False)
class BestWeights:
    """The weights that are best for given seconds of a step's ops and array edges."""

    task: PlanningTask
    costly: np.ndarray  # bool [array edge], whether it costs anything in some layouts

    @cached_property
    def around(self) -> list[int]:
        """Per loop, the loop that holds it, or OUTSIDE."""
        return [holders[1] for holders in self.task.space.graph.loop_holders[:-1]]

    @cached_property
    def homes(self) -> list[int]:
        """Per op, the computation that runs its kernel."""
        return [op.runs_in for op in self.task.space.graph.ops]

    @cached_property
    def edge_homes(self) -> list[int]:
        """Per array edge, the computation that runs its collectives."""
        return [self.task.space.graph.ops[edge.consumer].loop for edge in self.task.space.array_edges]

    @cached_property
    def inner_first(self) -> list[int]:
        """All computations, inner loops before outer ones."""
        loops = self.task.space.graph.loops
        return [*sorted(range(len(loops)), key=lambda n: loops[n].stop - loops[n].start), OUTSIDE]

    @cached_property
    def inside(self) -> np.ndarray:
        """Per array edge, the fraction of the rounds of its collectives that run in their loop, whatever is pipelined."""
        loops = self.task.space.graph.loops
        trips = [1 if self.stays[n] else loops[home].trips for n, home in enumerate(self.edge_homes)]
        return np.array([1.0 if rounds <= 1 else (rounds - 1) / rounds for rounds in trips])

    @cached_property
    def stays(self) -> list[bool]:
        """Per array edge, whether no compiler option moves its collectives into another round of their loop."""
        pipelined = any(options.pipelined for options in self.task.options.xla)
        pairs = zip(self.edges, self.edge_homes, strict=True)
        return [not pipelined or home == OUTSIDE or not self._may_move(edge) for edge, home in pairs]

    def _may_move(self, edge: ArrayEdge) -> bool:
        return self.task.space.collective_sites[edge.value].collective_class in ("prefetch", "gradient")

    @cached_property
    def edges(self) -> tuple[ArrayEdge, ...]:
        """Of the space."""
        return self.task.space.array_edges

    @cached_property
    def readers(self) -> list[tuple]:
        """Per array edge, what it agrees in with those that may share its collectives."""
        graph = self.task.space.graph
        return [shared_key(graph, edge.consumer, edge.value) for edge in self.edges]

    @cached_property
    def groups(self) -> list[tuple]:
        """Per array edge, what it agrees in with those whose collectives may be combined with its own."""
        sites = self.task.space.collective_sites
        return [(sites[edge.value].joint, home) for edge, home in zip(self.edges, self.edge_homes, strict=True)]

    @cached_property
    def members(self) -> dict[int, Members]:
        """By computation."""
        return {home: self._members(home) for home in self.inner_first}

    def _members(self, home: int) -> Members:
        numbers: dict[tuple[bool, int], int] = {}
        of: list[int] = []
        holders = {OUTSIDE: (OUTSIDE,)} | {n: some for n, some in enumerate(self.task.space.graph.loop_holders[:-1])}
        for i, at in enumerate(self.homes):
            chain = holders[at]
            if home not in chain:
                of.append(-1)
                continue
            level = chain.index(home)
            name = (True, chain[level - 1]) if level else (False, i)
            of.append(numbers.setdefault(name, len(numbers)))
        waits: list[dict[int, None]] = [{} for _ in numbers]
        for edge in self.edges:
            a, b = of[edge.producer], of[edge.consumer]
            if a >= 0 and b >= 0 and a != b:
                waits[b][a] = None
        return Members(of, {n: m for (loop, n), m in numbers.items() if loop}, len(numbers), [tuple(x) for x in waits])

    # ---- weights

    def compute(self, seconds: Weights) -> Weights:
        """All kernels and no collective."""
        return self._weights(self._fractions(seconds, False), {home: self._with_all(home, 0, [], []) for home in self.inner_first})

    def best(self, seconds: Weights, spread: bool = False) -> Weights:
        """The weights of most seconds, which are those of a plan, or of a weighted mean of plans, in any unit."""
        fractions = self._fractions(seconds, spread)
        serial, lost = self._weights(fractions, {}, serial=True), self.task.interference
        return serial if lost == 1 else Weights.mean((self._overlapped(seconds, fractions), serial), (1 - lost, lost))

    def _overlapped(self, seconds: Weights, fractions: Fractions) -> Weights:
        """The same if kernels and collectives do not slow each other."""
        total: dict[int, float] = {}
        chosen: dict[int, Hiding] = {}
        for home in self.inner_first:
            chosen[home], total[home] = self._cut(home, seconds, fractions.network, total)
        return self._weights(fractions, chosen)

    def _counted(self, seconds: np.ndarray, spread: bool) -> np.ndarray:
        """Per array edge, the fraction that counts: of readers that may share, the one of most seconds; equal parts if none has."""
        out, first = self.equal_parts.copy(), {}
        for n in np.flatnonzero(seconds > 0).tolist() if not spread else ():
            at = first.setdefault(self.readers[n], n)
            if seconds[n] > seconds[at]:
                first[self.readers[n]] = n
        for key, n in first.items():
            out[self.sharing[key]] = 0.0
            out[n] = 1.0
        return out

    @cached_property
    def sharing(self) -> dict[tuple, list[int]]:
        """Array edges by readers that may share collectives."""
        out: dict[tuple, list[int]] = {}
        for n in np.flatnonzero(self.costly).tolist():
            out.setdefault(self.readers[n], []).append(n)
        return out

    @cached_property
    def equal_parts(self) -> np.ndarray:
        """Per array edge, its part if all that may share its collectives have one."""
        out = np.zeros(len(self.edges))
        for some in self.sharing.values():
            out[some] = 1.0 / len(some)
        return out

    @cached_property
    def combining(self) -> dict[tuple, list[int]]:
        """Array edges whose collectives may be combined."""
        out: dict[tuple, list[int]] = {}
        for n in np.flatnonzero(self.costly).tolist():
            out.setdefault(self.groups[n], []).append(n)
        return out

    def _cut(self, home: int, seconds: Weights, counts: np.ndarray, inner: dict[int, float]) -> tuple[Hiding, float]:
        """The best E of a computation, and the seconds that it bounds it by; `inner` are those of loops."""
        mine = np.array([at == home for at in self.edge_homes], bool)
        sent = counts * mine * (seconds.edges[:, NETWORK] + seconds.edges[:, LATENCY])
        longest = sorted(np.flatnonzero(sent > 0).tolist(), key=lambda n: (-sent[n], n))[:MOST_COLLECTIVES]
        members = self.members[home]
        after, before = self._relations(members, longest)
        everything, moves = (1 << len(longest)) - 1, sum(1 << c for c, n in enumerate(longest) if not self.stays[n])
        latencies = frozenset(self._chains(members, longest, after, seconds.edges[:, LATENCY]))
        paid = [seconds.edges[n, NETWORK] + (n in latencies) * seconds.edges[n, LATENCY] for n in longest]
        capacity = [max(0.0, x) * self.inside[n] for x, n in zip(paid, longest, strict=True)]
        held = np.zeros(members.count)
        np.add.at(held, [members.of[i] for i, at in enumerate(self.homes) if at == home],
                  [x for x, at in zip(seconds.ops.tolist(), self.homes, strict=True) if at == home])  # fmt: skip
        for n, m in members.loops.items():
            held[m] = inner[n] if self.around[n] == home else held[m]
        related = [(a | b) & ~moves for a, b in zip(after, before, strict=True)]
        own = {n: 1 << c for c, n in enumerate(longest)}
        kernels = seconds.edges[:, AROUND] + np.maximum(0.0, seconds.edges[:, KERNELS]) * counts
        meanwhile = {n: (self._edge_bits(members, n, after, before) | own.get(n, 0)) & ~moves for n in np.flatnonzero(mine).tolist()}
        classes: dict[int, float] = {}
        for m, bits in enumerate(related):
            classes[bits] = classes.get(bits, 0.0) + float(held[m])
        for n, bits in meanwhile.items():
            if kernels[n] > 0:
                classes[bits] = classes.get(bits, 0.0) + float(kernels[n])
        exposed = _minimum_cut(capacity, [(bits, x) for bits, x in classes.items() if x > 0 and bits != everything])
        total = sum(x for c, x in enumerate(capacity) if exposed >> c & 1)
        total += sum(x for bits, x in classes.items() if bits & exposed == exposed)
        return self._with_all(home, exposed, longest, related), total

    def _with_all(self, home: int, exposed: int, collectives: Sequence[int], related: Sequence[int]) -> Hiding:
        """A set of collectives, with all others that no more members may hide."""
        members = self.members[home]
        hidden = frozenset(m for m, bits in enumerate(related) if bits & exposed != exposed)
        kept = {m: 1 << k for k, m in enumerate(m for m in range(members.count) if m not in hidden)}
        before = [kept.get(m, 0) for m in range(members.count)]
        after = list(before)
        for _ in range(2 if members.loops else 1):
            for m in range(members.count):
                for a in members.waits[m]:
                    before[m] |= before[a]
            for m in reversed(range(members.count)):
                for a in members.waits[m]:
                    after[a] |= after[m]
        everything = (1 << len(kept)) - 1
        chosen = {n for c, n in enumerate(collectives) if exposed >> c & 1}
        mine = [n for n in np.flatnonzero(self.costly).tolist() if self.edge_homes[n] == home]
        for n in mine:
            maker, reader = members.of[self.edges[n].producer], members.of[self.edges[n].consumer]
            known = (before[maker] if maker >= 0 else 0) | (after[reader] if reader >= 0 else 0)
            if known == everything and (self.stays[n] or not kept):
                chosen.add(n)
        listed = sorted(chosen)
        later, earlier = self._relations(members, listed)
        full, own = (1 << len(listed)) - 1, {n: 1 << c for c, n in enumerate(listed)}
        moves = sum(1 << c for c, n in enumerate(listed) if not self.stays[n])
        around = frozenset(n for n in mine if (self._edge_bits(members, n, later, earlier) | own.get(n, 0)) & ~moves != full)
        return Hiding(frozenset(chosen), hidden, around)

    def _relations(self, members: Members, collectives: Sequence[int]) -> tuple[list[int], list[int]]:
        """Per member, the sets of collectives that it waits for, and that wait for it; some may be missing."""
        after, before = [0] * members.count, [0] * members.count
        for c, n in enumerate(collectives):
            maker, reader = members.of[self.edges[n].producer], members.of[self.edges[n].consumer]
            if reader >= 0:
                after[reader] |= 1 << c
            if maker >= 0:
                before[maker] |= 1 << c
        for _ in range(2 if members.loops else 1):  # a loop may be listed before what it waits for
            for m in range(members.count):
                for a in members.waits[m]:
                    after[m] |= after[a]
            for m in reversed(range(members.count)):
                for a in members.waits[m]:
                    before[a] |= before[m]
        return after, before

    def _edge_bits(self, members: Members, n: int, after: Sequence[int], before: Sequence[int]) -> int:
        """The set of collectives that what runs between the ends of an array edge waits for, or that wait for it."""
        maker, reader = members.of[self.edges[n].producer], members.of[self.edges[n].consumer]
        return (after[maker] if maker >= 0 else 0) | (before[reader] if reader >= 0 else 0)

    def _chains(self, members: Members, collectives: Sequence[int], after: Sequence[int], latency: np.ndarray) -> Iterable[int]:
        """Of each group that may be combined, the chain of most latency: each waits for the one before."""
        places: dict[tuple, list[int]] = {}
        for c, n in enumerate(collectives):
            places.setdefault(self.groups[n], []).append(c)
        for some in places.values():
            some.sort(key=lambda c: (self.edges[collectives[c]].producer, collectives[c]))
            total: dict[int, float] = {}
            previous: dict[int, int] = {}
            for c in some:
                maker = members.of[self.edges[collectives[c]].producer]
                bits = after[maker] if maker >= 0 else 0
                last = max((b for b in total if bits >> b & 1), key=total.__getitem__, default=-1)
                previous[c], total[c] = last, max(0.0, float(latency[collectives[c]])) + (total[last] if last >= 0 else 0.0)
            at = max(some, key=total.__getitem__)
            while at >= 0:
                yield collectives[at]
                at = previous[at]

    def _latencies(self, seconds: np.ndarray, counts: np.ndarray, spread: bool) -> np.ndarray:
        """Per array edge, the fraction of its latency that counts: of arrays that may be combined, one chain; all if none moves."""
        out = np.zeros(len(self.edges))
        for some in self.combining.values():
            out[some] = 1.0 / len(some)
        paid = counts * seconds
        for home, members in self.members.items() if not spread else ():
            mine = [n for n in np.flatnonzero(paid > 0).tolist() if self.edge_homes[n] == home]
            mine = sorted(mine, key=lambda n: (-paid[n], n))[:MOST_COLLECTIVES]
            for key in {self.groups[n] for n in mine}:
                out[self.combining[key]] = 0.0
            out[list(self._chains(members, mine, self._relations(members, mine)[0], seconds))] = 1.0
        return np.minimum(out, counts)

    def _fractions(self, seconds: Weights, spread: bool) -> Fractions:
        network = self._counted(seconds.edges[:, NETWORK] + seconds.edges[:, LATENCY], spread)
        latency = self._latencies(seconds.edges[:, LATENCY], network, spread)
        return Fractions(network, latency, self._counted(seconds.edges[:, KERNELS], spread) * self.inside)

    def _weights(self, fractions: Fractions, chosen: dict[int, Hiding], serial: bool = False) -> Weights:
        """What the bounds of these sets count."""
        counted: dict[int, float] = {OUTSIDE: 1.0}
        for n in reversed(self.inner_first[:-1]):
            home = self.around[n]
            hidden = not serial and self.members[home].loops.get(n, -1) in chosen[home].members
            counted[n] = 0.0 if hidden else counted[home]

        def op(i: int, home: int) -> float:
            return 0.0 if not serial and self.members[home].of[i] in chosen[home].members else counted[home]

        network, latency, staged = fractions
        edges = np.zeros((len(self.edges), 4))
        for n, home in enumerate(self.edge_homes):
            sent = counted[home] * (1.0 if serial else (n in chosen[home].exposed) * self.inside[n])
            around = 0.0 if not serial and n in chosen[home].around else counted[home]
            edges[n] = sent * network[n], sent * latency[n], around * staged[n], around
        return Weights(np.array([op(i, home) for i, home in enumerate(self.homes)]), edges)


def _minimum_cut(collectives: Sequence[float], kernels: Sequence[tuple[int, float]]) -> int:
    """The set E: seconds of collectives, and seconds of kernels with the set of collectives that each depends on."""
    if not collectives:
        return 0
    if not kernels:
        return (1 << len(collectives)) - 1
    first, sink = 1 + len(collectives), 1 + len(collectives) + len(kernels)
    seconds = np.array([*collectives, *(x for _, x in kernels)])
    scale = 1.0 if seconds.max() <= 0 else min(1.0, MOST_FLOW / (seconds.max() * sink))
    capacity = (seconds * scale).astype(np.int64)
    at, c = np.nonzero(np.array([[not bits >> c & 1 for c in range(len(collectives))] for bits, _ in kernels]))
    flow, before, kernel = or_tools("graph.python.max_flow").SimpleMaxFlow(), np.arange(1, first), np.arange(first, sink)
    arcs = ((np.zeros_like(before), before), (kernel, np.full_like(kernel, sink)), (1 + c, first + at))
    tails, heads = (np.concatenate(ends).astype(np.int32) for ends in zip(*arcs, strict=True))
    flow.add_arcs_with_capacity(tails, heads, np.append(capacity, np.full(len(c), MOST_FLOW)))
    flow.solve(0, sink)
    return sum(1 << n - 1 for n in flow.get_source_side_min_cut() if 1 <= n <= len(collectives))
