"""A lower bound of the seconds of every plan of a strategy space, from the best plan found.

For each computation (the step, a loop's body) one of three bounds of `costs/bound_network.py` is chosen, the one that is tightest for
the best plan:

    "compute"    its kernels
    "exposed"    its kernels but those that may hide one of a set of collectives, and these collectives
    "network"    all its collectives; of those that pipelining may move out of a loop, all rounds but one

The cost network of this choice is solved, without a memory limit and without ties, so that its bound holds for all plans. If it leads
to a plan that computes more than the bound counts, the mean of it and of "compute" is solved, at which both plans cost the same: two
steps of the cutting-plane method on (11) and (12).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from shardplan.costs.array_edges import ArrayEdge
from shardplan.costs.bound_network import BoundTables, Weights
from shardplan.costs.decided_tasks import OUTSIDE, shared_key
from shardplan.costs.states import PS
from shardplan.costs.task import Candidate, PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.ilp.solver.solve import solve
from shardplan.search.objective import Judged

WORK = 2.0
"""Work limit of one bound, about seconds."""

MOST_COLLECTIVES = 512
"""Collectives of one computation, the longest, that the set of "exposed" is chosen from."""

Mode = Literal["compute", "exposed", "network"]


def compute_floor(task: PlanningTask) -> float:
    """Picoseconds of all kernels under the fastest strategy of each: a quick bound."""
    return float(sum(int(seconds.min() * op.runs * PS) for op, seconds in zip(task.space.graph.ops, task.space.seconds, strict=True)))


def lower_bound(task: PlanningTask, best: Judged, deadline: Deadline) -> tuple[float, list[Candidate]]:
    """Picoseconds that no plan of the task undercuts, whatever its memory; the pins hold.

    Returns:
        The bound, and the plans of least bounds: they compute and send little, and may be fast.
    """
    found, plans = _Bounds(task, best), []
    if best.network.space is not task.space:
        return min(compute_floor(task), best.solution.objective), plans
    tables = found.tables
    floor = found.weights({})
    chosen = found.weights(found.modes) if task.overlaps else found.everything
    bound, weights = compute_floor(task), chosen
    for _ in range(3):
        if deadline.over():
            break
        problem = tables.problem(weights)
        hint = found.states if np.isfinite(problem.objective(found.states)) else None
        solution = solve(problem, hint=hint, work_limit=WORK)
        bound = max(bound, solution.bound)
        if solution.states:
            plans.append(found.candidate(solution))
        share = _balance(found, (floor, chosen), solution.states)
        if share is None or not 0 < share < 1:
            break
        weights = floor.mean(chosen, share)
    return min(bound, best.solution.objective), plans


def _balance(found: _Bounds, ends: tuple[Weights, Weights], states: Sequence[int]) -> float | None:
    """The share of the second weights at which the best plan and these states cost the same."""
    if not states:
        return None
    (a, b), (c, d) = ([found.tables.value(w, s) for w in ends] for s in (found.states, tuple(states)))
    slope = (b - a) - (d - c)
    return (c - a) / slope if slope > 0 else None


@dataclass(frozen=True, eq=False)
class _Bounds:
    """The bounds of the computations of a step, and the plan that they are chosen for."""

    task: PlanningTask
    best: Judged

    @cached_property
    def tables(self) -> BoundTables:
        return BoundTables.of(self.task.space, self.task.resharder, self.task.allowed)

    @cached_property
    def states(self) -> tuple[int, ...]:
        """The best plan as states of a network without memory limit."""
        network, states = self.best.network, self.best.states
        retained, chosen = network.retained(states), network.strategies(states)
        of, blocks = self.task.space.strategies, self.tables.tables.blocks
        return tuple(s + (blocks.count(j) - 1) * len(of[j]) * (j in retained) for j, s in enumerate(chosen))

    def candidate(self, solution: Solution) -> Candidate:
        """States of a network without memory limit as those of the best plan's network."""
        of, blocks, network = self.task.space.strategies, self.tables.tables.blocks, self.best.network
        chosen = [s % len(x) for s, x in zip(solution.states, of, strict=True)]
        retained = {j for j in blocks.retainable if solution.states[j] >= len(of[j]) * (blocks.count(j) - 1)}
        return Candidate(network, Solution("feasible", network.states_of(chosen, retained), solution.objective, 0.0))

    # ---- computations

    @cached_property
    def around(self) -> list[int]:
        """Per loop, the loop that holds it, or OUTSIDE."""
        return [holders[1] for holders in self.task.space.graph.loop_holders[:-1]]

    def inside(self, op_home: int, home: int) -> int | None:
        """The member of computation `home` that holds computation `op_home`: a loop, OUTSIDE for itself, or None if none does."""
        member = OUTSIDE
        while op_home != home:
            if op_home == OUTSIDE:
                return None
            member, op_home = op_home, self.around[op_home]
        return member

    @cached_property
    def homes(self) -> list[int]:
        """Per op, the computation that runs its kernel."""
        ops = self.task.space.graph.ops
        return [op.held_during if op.traits.loop_slice or op.traits.loop_stack else op.loop for op in ops]

    # ---- seconds of the best plan

    @cached_property
    def kernel_ps(self) -> np.ndarray:
        graph, seconds = self.task.space.graph, self.task.space.seconds
        chosen = self.best.network.strategies(self.best.states)
        return np.array([float(seconds[i][s]) * op.runs * PS for i, (op, s) in enumerate(zip(graph.ops, chosen, strict=True))])

    @cached_property
    def sent_ps(self) -> np.ndarray:
        """Per array edge, the least picoseconds of its collectives that count."""
        sent = [self.tables.sent(edge, self.states) for edge in self.task.space.array_edges]
        return self.shares * np.nan_to_num(np.array(sent), nan=0.0, posinf=0.0)

    @cached_property
    def shares(self) -> np.ndarray:
        """Per array edge, the fraction of its collectives that counts: those of edges that may share them add up to one at most."""
        graph, edges = self.task.space.graph, self.task.space.array_edges
        keys = [shared_key(graph, edge.consumer, edge.value) for edge in edges]
        sizes = Counter(keys)
        return np.array([1.0 / sizes[key] for key in keys])

    def stays(self, edge: ArrayEdge) -> bool:
        """Whether no compiler option moves the collectives of an edge into another round of their loop."""
        pipelined = any(options.pipelined for options in self.task.options.xla)
        loop, kind = self.task.space.graph.ops[edge.consumer].loop, self.task.space.collective_sites[edge.value].collective_class
        return not pipelined or loop == OUTSIDE or kind not in ("prefetch", "gradient")

    def inside_loop(self, edge: ArrayEdge) -> float:
        """Fraction of the rounds of an edge's collectives that run in their loop, whatever is pipelined; the rest may run around it."""
        loop, loops = self.task.space.graph.ops[edge.consumer].loop, self.task.space.graph.loops
        return 1.0 if self.stays(edge) or loops[loop].trips <= 1 else (loops[loop].trips - 1) / loops[loop].trips

    # ---- the choice

    @cached_property
    def exposed(self) -> dict[int, tuple[frozenset[int], frozenset[int], frozenset[int]]]:
        """By computation, the set E of (12) as array edges, and the ops and loops of H."""
        return {home: _exposed_set(self, home) for home in (OUTSIDE, *range(len(self.around)))}

    @cached_property
    def modes(self) -> dict[int, Mode]:
        """By computation, the bound that is tightest for the best plan, loops inside counted at theirs."""
        out: dict[int, Mode] = {}
        total: dict[int, float] = {}
        edges = self.task.space.array_edges
        sent: dict[int, float] = {}
        for n, edge in enumerate(edges):
            home = self.task.space.graph.ops[edge.consumer].loop
            sent[home] = sent.get(home, 0.0) + self.inside_loop(edge) * self.sent_ps[n]
        loops = self.task.space.graph.loops
        for home in (*sorted(range(len(loops)), key=lambda n: loops[n].stop - loops[n].start), OUTSIDE):
            kernels = sum(self.kernel_ps[i] for i, at in enumerate(self.homes) if at == home)
            inner = {n: total[n] for n, at in enumerate(self.around) if at == home}
            e, ops, hiding = self.exposed[home]
            kept = kernels - sum(self.kernel_ps[i] for i in ops) + sum(t for n, t in inner.items() if n not in hiding)
            bounds: dict[Mode, float] = {
                "compute": kernels + sum(inner.values()),
                "exposed": kept + sum(self.sent_ps[n] for n in e),
                "network": sent.get(home, 0.0),
            }
            out[home] = max(bounds, key=bounds.__getitem__)
            total[home] = bounds[out[home]]
        return out

    @property
    def everything(self) -> Weights:
        """All kernels and all collectives: what a step takes where nothing overlaps."""
        space = self.task.space
        return Weights([1.0] * len(space.graph.ops), self.shares.tolist(), [1.0] * len(space.array_edges))

    def weights(self, modes: dict[int, Mode]) -> Weights:
        """What the bounds of these modes count; "compute" where none is given."""
        graph, edges = self.task.space.graph, self.task.space.array_edges
        counted: dict[int, float] = {OUTSIDE: 1.0}
        for n in sorted(range(len(self.around)), key=lambda n: graph.loops[n].start - graph.loops[n].stop):
            home = self.around[n]
            mode = modes.get(home, "compute")
            hidden = mode == "network" or (mode == "exposed" and n in self.exposed[home][2])
            counted[n] = 0.0 if hidden else counted[home]

        def op(i: int) -> float:
            home = self.homes[i]
            mode = modes.get(home, "compute")
            return 0.0 if mode == "network" or (mode == "exposed" and i in self.exposed[home][1]) else counted[home]

        def edge(n: int) -> tuple[float, float]:
            home = graph.ops[edges[n].consumer].loop
            mode = modes.get(home, "compute")
            counts = self.inside_loop(edges[n]) if mode == "network" else float(mode == "exposed" and n in self.exposed[home][0])
            return counted[home] * counts * float(self.shares[n]), counted[home] * (mode == "compute")

        pairs = [edge(n) for n in range(len(edges))]
        return Weights([op(i) for i in range(len(graph.ops))], [a for a, _ in pairs], [b for _, b in pairs])


def _exposed_set(found: _Bounds, home: int) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """The set E of a computation, chosen greedily: a collective is in it if it takes longer than what it alone adds to H."""
    space = found.task.space
    graph, edges = space.graph, space.array_edges
    here = (n for n in map(int, np.flatnonzero(found.sent_ps)) if graph.ops[edges[n].consumer].loop == home and found.stays(edges[n]))
    mine = sorted(here, key=lambda n: (-found.sent_ps[n], n))[:MOST_COLLECTIVES]
    if not mine:
        return frozenset(), frozenset(), frozenset()
    members, related = _relations(found, home, mine)
    cost = np.zeros(len(members))
    for (kind, i), n in members.items():
        cost[n] = (
            found.kernel_ps[i]
            if kind == "op"
            else sum(found.kernel_ps[k] for k, at in enumerate(found.homes) if found.inside(at, home) == i)
        )
    hiding = np.zeros(len(members), dtype=bool)
    chosen: list[int] = []
    for _ in range(2):
        for c, n in enumerate(mine):
            new = ~related[:, c] & ~hiding
            if n not in chosen and found.sent_ps[n] > cost[new].sum():
                chosen.append(n)
                hiding |= new
    names = list(members)
    ops = frozenset(names[m][1] for m in np.flatnonzero(hiding) if names[m][0] == "op")
    return frozenset(chosen), ops, frozenset(names[m][1] for m in np.flatnonzero(hiding) if names[m][0] == "loop")


def _relations(found: _Bounds, home: int, collectives: Sequence[int]) -> tuple[dict[tuple[str, int], int], np.ndarray]:
    """The ops and loops of a computation, numbered; and bool [member, collective], whether one waits for the other."""
    edges = found.task.space.array_edges

    def member(i: int, at: int) -> tuple[str, int] | None:
        inside = found.inside(at, home)
        return None if inside is None else ("op", i) if inside == OUTSIDE else ("loop", inside)

    of = [member(i, at) for i, at in enumerate(found.homes)]
    members: dict[tuple[str, int], int] = {}
    for name in of:
        if name is not None:
            members.setdefault(name, len(members))
    bits = {n: 1 << c for c, n in enumerate(collectives)}
    after, before = [0] * len(members), [0] * len(members)
    for n, bit in bits.items():
        reader, maker = of[edges[n].consumer], of[edges[n].producer]
        if reader is not None:
            after[members[reader]] |= bit
        if maker is not None:
            before[members[maker]] |= bit
    waits: dict[int, set[int]] = {}
    for edge in edges:
        a, b = of[edge.producer], of[edge.consumer]
        if a is not None and b is not None and a != b:
            waits.setdefault(members[b], set()).add(members[a])
    order = sorted(members.values(), key=lambda m: m)
    for _ in range(2):  # a loop may be listed before what it waits for
        for m in order:
            for a in waits.get(m, ()):
                after[m] |= after[a]
        for m in reversed(order):
            for a in waits.get(m, ()):
                before[a] |= before[m]
    both = [after[m] | before[m] for m in order]
    width = (len(collectives) + 7) // 8
    packed = np.array([np.frombuffer(x.to_bytes(width, "little"), np.uint8) for x in both]).reshape(len(both), width)
    related = np.unpackbits(packed, axis=1, bitorder="little")[:, : len(collectives)].astype(bool)
    return members, related
