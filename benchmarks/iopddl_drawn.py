"""Drawn problems of the form and size of the IOPDDL benchmark, each with planted states that are proven optimal.

A drawn problem is a train step over made-up layers on a device mesh, as the contest's are of real ones: every node is an op, its
states say which role (a dim of its result, or the contraction) each mesh axis shards, edges cost the reshard of an operand, elementwise
ops may follow one operand ("functional" tables, one finite entry per row), bytes are held from an op to its last reader, parameters
always.

Planting makes an answer optimal with little change. Prices per byte and messages (4), (6) bound the drawn problem from below; where an
entry of the planted states is above the least of its reparametrized table, its cost falls by the difference, and at every step that has
a price, a node without a choice fills the memory to the limit. Then the bound equals the cost of the planted states.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Edge, Problem, Usage, sum_over_intervals
from shardplan.ilp.solver.relax.trws import TRWS

RATE = 50.0  # cost of a byte sent
PLANT_TURNS, PLANT_ROUNDS = 100, 60  # of the search for the planted states and of TRW-S for their proof
BINDING = 0.99  # steps that hold at least this share of the limit may have a price


@dataclass(frozen=True)
class Family:
    """What instances of one name have in common."""

    mesh: tuple[int, ...]
    blocks: int
    style: str = "layers"  # "layers": a residual chain, "levels": skips between halves, "hub": all blocks read one tensor
    follow: float = 0.9  # share of the elementwise ops that follow their operand
    chain: int = 8  # elementwise ops between two products
    heads: int = 0  # a third dim of the activations; 0: none
    tightness: float = 1.1  # limit over the sum of least bytes, at the highest step
    seconds: float = 60.0  # time limit, as the contest's


FAMILIES = {  # name: (family, seed); the solver was tuned on the first five
    "layers": (Family((4, 8), 300), 1),
    "layers-reshards": (Family((2, 16), 600, follow=0.5, chain=12, seconds=180), 2),
    "levels-3axes": (Family((2, 4, 4), 200, "levels", follow=0.6, seconds=300), 3),
    "hub-3dims": (Family((8, 8), 400, "hub", follow=0.95, chain=16, heads=2, tightness=1.05), 4),
    "levels-small": (Family((4, 8), 60, "levels", follow=0.8, chain=6, tightness=1.2), 5),
    "hub": (Family((4, 8), 400, "hub", follow=0.7), 11),
    "levels-3dims": (Family((2, 8), 500, "levels", follow=0.8, chain=10, heads=1, tightness=1.05, seconds=120), 12),
    "hub-3axes": (Family((2, 2, 8), 150, "hub", follow=0.8, chain=12, tightness=1.2, seconds=180), 13),
    "layers-3dims": (Family((16, 4), 100, follow=0.3, heads=2), 14),
}

Role = tuple[int, ...]  # of every mesh axis: the dim of the result, one more: the contraction, -1: replicated


@functools.cache
def roles_of(dims: tuple[int, ...], mesh: tuple[int, ...], contracted: int = 0) -> np.ndarray:
    """The states of an op, [k, axes]: every axis takes a role if its size divides what it shards."""
    sizes = (*dims, contracted) if contracted else dims
    found = []
    for roles in itertools.product(range(-1, len(sizes)), repeat=len(mesh)):
        parts = defaultdict(lambda: 1)
        for axis, role in enumerate(roles):
            parts[role] *= mesh[axis]
        if all(role < 0 or sizes[role] % n == 0 for role, n in parts.items()):
            found.append(roles)
    return np.array(found, dtype=np.int64).reshape(-1, len(mesh))


class TrainStep:
    """Ops in the order in which they run, as nodes of a cost network."""

    def __init__(self, family: Family, rng: np.random.Generator):
        self.mesh, self.family, self.rng = np.array(family.mesh), family, rng
        self.dims: list[tuple[int, ...]] = []
        self.states: list[np.ndarray] = []  # roles of every node's states
        self.costs: list[np.ndarray] = []
        self.last_use: list[int] = []
        self.first: list[int] = []
        self.edges: list[Edge] = []
        self.tape: list[tuple] = []
        self._cached: dict[tuple, np.ndarray] = {}

    def shared(self, key: tuple, table: np.ndarray) -> np.ndarray:
        """The table that is stored under a key: repeated layers share theirs."""
        return self._cached.setdefault(key, table)

    def parts(self, roles: np.ndarray, skip: int = -9) -> np.ndarray:
        """Number of shards of each state, without those of role `skip`."""
        return np.where((roles >= 0) & (roles != skip), self.mesh, 1).prod(axis=1)

    def node(self, dims: tuple[int, ...], contracted: int = 0, held: bool = False) -> int:
        """A new op; an all-reduce is paid where an axis shards the contraction. Held bytes are there from the start to the end."""
        roles, key = roles_of(dims, tuple(self.mesh.tolist()), contracted), ("cost", dims, contracted)
        if key not in self._cached:
            reduced = np.where(roles == len(dims), 1.0 - 1.0 / self.mesh, 0.0).sum(axis=1)
            self._cached[key] = np.rint(RATE * 2 * reduced * 4 * np.prod(dims) / self.parts(roles, len(dims)))
        self.dims.append(dims)
        self.states.append(roles)
        self.costs.append(self._cached[key])
        self.first.append(0 if held else len(self.costs) - 1)
        self.last_use.append(-1 if held else len(self.costs) - 1)
        return len(self.costs) - 1

    def read(self, x: int, y: int, roles: tuple[int, ...]) -> None:
        """Op y reads x: the dim of x that each role of y is, or -1; the edge costs the reshard."""
        key = ("reshard", self.dims[x], len(self.states[x]), self.dims[y], len(self.states[y]), roles)
        if key not in self._cached:
            have = np.where(self.states[x] < len(self.dims[x]), self.states[x], -1)  # reduced: the contraction is replicated
            want = np.array((*roles, *[-1] * (len(self.dims[y]) + 2 - len(roles))))[self.states[y]]
            a, b = have[:, None, :], want[None, :, :]
            parts = np.where(want >= 0, self.mesh, 1).prod(axis=1)
            gathered = np.where((a >= 0) & (b < 0), 1.0 - 1.0 / self.mesh, 0.0).sum(axis=2)
            moved = np.where((a >= 0) & (b >= 0) & (a != b), 1.0 - 1.0 / self.mesh, 0.0).sum(axis=2) / max(self.mesh)
            self._cached[key] = np.rint(RATE * 4 * np.prod(self.dims[x]) * (gathered + moved) / parts)
        self._edge(x, y, self._cached[key])

    def follow(self, x: int, y: int) -> None:
        """Op y takes the roles of x."""
        key = ("follow", self.dims[x], len(self.states[x]), len(self.states[y]))
        if key not in self._cached:
            have = np.where(self.states[x] < len(self.dims[x]), self.states[x], -1)
            same = (have[:, None, :] == self.states[y][None, :, :]).all(axis=2)
            self._cached[key] = np.where(same, 0.0, np.inf)
        self._edge(x, y, self._cached[key])

    def _edge(self, x: int, y: int, table: np.ndarray) -> None:
        self.edges.append(Edge(x, y, table))
        if self.last_use[x] >= 0:
            self.last_use[x] = y

    def elementwise(self, *operands: int) -> int:
        """An op on operands of equal dims."""
        dims = self.dims[operands[0]]
        y = self.node(dims)
        for n, x in enumerate(operands):
            if n == 0 and self.rng.random() < self.family.follow:
                self.follow(x, y)
            else:
                self.read(x, y, tuple(range(len(dims))))
        self.tape.append(("elementwise", y, operands))
        return y

    def product(self, x: int, w: int) -> int:
        """x [.., c] times w [c, n]."""
        dims = (*self.dims[x][:-1], self.dims[w][1])
        y = self.node(dims, self.dims[w][0])
        lead = len(dims) - 1
        self.read(x, y, (*range(lead), -1, lead))
        self.read(w, y, (*[-1] * lead, 1, 0))
        self.tape.append(("product", y, (x, w)))
        return y

    def backward(self, loss: int) -> dict[int, int]:
        """Gradients of all that the tape reads, by node."""
        grads: dict[int, list[int]] = defaultdict(list)
        grads[loss].append(self.elementwise(loss))
        total: dict[int, int] = {}
        tape, self.tape = self.tape[::-1], []
        for kind, y, operands in tape:
            if not (found := grads.pop(y, [])):
                continue
            dy = functools.reduce(lambda a, b: self.elementwise(a, b), found)
            if kind == "elementwise":
                for x in operands:
                    grads[x].append(self.elementwise(dy, x) if self.rng.random() < 0.5 else self.elementwise(dy))
                continue
            x, w = operands
            lead = len(self.dims[x]) - 1
            dx = self.node(self.dims[x], self.dims[w][1])
            self.read(dy, dx, (*range(lead), -1, lead))
            self.read(w, dx, (*[-1] * lead, 0, 1))
            grads[x].append(dx)
            dw = self.node(self.dims[w], self.dims[x][0])
            self.read(x, dw, (lead, -1, 0))
            self.read(dy, dw, (-1, lead, 0))
            grads[w].append(dw)
        for x, found in grads.items():
            total[x] = functools.reduce(lambda a, b: self.elementwise(a, b), found)
        return total

    def problem(self, tightness: float) -> Problem:
        """The network; its limit is `tightness` times the highest sum of least bytes."""
        end = len(self.costs)
        usages = []
        for i, (dims, roles) in enumerate(zip(self.dims, self.states, strict=True)):
            key = ("bytes", dims, len(roles))
            held = self.shared(key, 4.0 * np.prod(dims) // self.parts(roles, len(dims)))
            usages.append(Usage(i, self.first[i], end if self.last_use[i] < 0 else self.last_use[i] + 1, held))
        least = sum_over_intervals((u.lo, u.hi, u.min_bytes) for u in usages).max()
        return Problem(tuple(self.costs), tuple(self.edges), tuple(usages), float(np.floor(tightness * least)))


def _block(step: TrainStep, x: int, width: int, wide: int, params: list[int], extra: tuple[int, ...] = ()) -> int:
    """One residual block of two or three products with chains of elementwise ops between them."""
    family, rng, y = step.family, step.rng, x
    sizes = (wide, width) if rng.random() < 0.7 else (width, wide, width)
    for n in sizes:
        w = step.node((step.dims[y][-1], n), held=True)
        params.append(w)
        for _ in range(int(rng.integers(1, family.chain + 1))):
            y = step.elementwise(y)
        for h in extra:
            if step.dims[h] == step.dims[y] and rng.random() < 0.5:
                y = step.elementwise(y, h)
        y = step.product(y, w)
    return step.elementwise(y, x)


def train_step(family: Family, seed: int) -> Problem:
    """The drawn problem before planting."""
    rng = np.random.default_rng(seed)
    step, devices = TrainStep(family, rng), int(np.prod(family.mesh))
    batch, width = devices * int(rng.choice([8, 16, 32])), devices * int(rng.choice([4, 8, 16]))
    lead = (batch, devices * family.heads) if family.heads else (batch,)
    params: list[int] = []
    x = step.elementwise(step.node((*lead, width)))
    hub, skips = step.elementwise(x), []
    for b in range(family.blocks):
        wide = width * int(rng.choice([1, 2, 4]))
        extra = (hub,) if family.style == "hub" else ()
        if family.style == "levels" and b >= family.blocks / 2 and skips:
            extra = (skips.pop(),)
            x = step.elementwise(x, extra[0])
        x = _block(step, x, width, wide, params, extra)
        if family.style == "levels" and b < family.blocks / 2:
            skips.append(x)
    grads = step.backward(x)
    for w in params:
        moment = step.node(step.dims[w], held=True)
        averaged = step.elementwise(moment, grads[w])
        for _ in range(int(rng.integers(1, 4))):
            averaged = step.elementwise(averaged)
        step.elementwise(w, averaged)
    return step.problem(family.tightness)


@dataclass(frozen=True)
class Planted:
    """A problem, its planted states, and the certificate: prices per byte [T] and messages by receiving and sending node."""

    problem: Problem
    states: tuple[int, ...]
    prices: np.ndarray
    messages: dict[tuple[int, int], np.ndarray]

    @functools.cached_property
    def optimum(self) -> float:
        """Cost of the planted states."""
        return self.problem.objective(self.states)

    def bound(self) -> float:
        """The lower bound (4) that the certificate proves: the sum of all least reparametrized entries, less what the limit costs."""
        costs, tables = _reparametrized(self.problem, self.prices, self.messages)
        return (
            sum(float(c.min()) for c in costs)
            + sum(float(t.min()) for t in tables)
            - float(self.prices.sum()) * self.problem.usage_table.limit
        )


def _reparametrized(problem: Problem, prices: np.ndarray, messages: dict) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    costs = problem.by_node(problem.cost_row + problem.usage_table.penalty(prices))
    for e in problem.edges:
        costs[e.i] = costs[e.i] + messages[e.i, e.j]
        costs[e.j] = costs[e.j] + messages[e.j, e.i]
    return costs, (e.cost - messages[e.i, e.j][:, None] - messages[e.j, e.i] for e in problem.edges)


def good_answer(problem: Problem, seed: int) -> tuple[tuple[int, ...], np.ndarray]:
    """Feasible states of low cost, and prices [T] at which they are nearly optimal; a count of turns ends the search, not a clock."""
    from shardplan.ilp.solver.primal.iterated_search import IteratedLocalSearch

    small = presolve(problem)
    search = IteratedLocalSearch(small.problem, 4_000)
    found = min(search.run(seed % 4, 4, lambda turn: turn / PLANT_TURNS), key=small.problem.objective)
    assert search.prices is not None
    prices = np.zeros(problem.usage_table.n_steps)
    prices[small.steps[: len(search.prices)]] = search.prices
    return small.invert(found), prices


def plant(problem: Problem, seed: int) -> Planted:
    """The problem with a good answer made optimal."""
    problem = _simple(problem)
    states, prices = good_answer(problem, seed)
    limit = problem.usage_table.limit
    free = limit - problem.memory(states)
    prices = np.where((free <= (1 - BINDING) * limit) & (prices > 1e-6 * prices.max(initial=0.0)), prices, 0.0)
    filler = len(problem.costs)  # a node without a choice
    fillers = tuple(Usage(filler, int(t), int(t) + 1, np.array([free[t]])) for t in np.flatnonzero(prices) if free[t])
    problem = replace(problem, costs=(*problem.costs, np.zeros(1)), usages=(*problem.usages, *fillers))
    states = (*states, 0)
    trws = TRWS(problem, compiled=True)
    priced = problem.cost_row + problem.usage_table.penalty(prices)
    trws.iterate(priced, PLANT_ROUNDS)
    _, sent = trws.commit(priced, 1.0)
    messages = {key: m for e, (a, b) in zip(problem.edges, sent, strict=True) for key, m in (((e.i, e.j), a), ((e.j, e.i), b))}
    costs, tables = _reparametrized(problem, prices, messages)
    planted = [_lowered(c, (s,), r) for c, s, r in zip(problem.costs, states, costs, strict=True)]
    edges = [e._replace(cost=_lowered(e.cost, (states[e.i], states[e.j]), t)) for e, t in zip(problem.edges, tables, strict=True)]
    return Planted(replace(problem, costs=tuple(planted), edges=tuple(edges)), states, prices, messages)


def _lowered(table: np.ndarray, entry: tuple[int, ...], reparametrized: np.ndarray) -> np.ndarray:
    """The table with one entry lowered to the least reparametrized one; raised as a whole where a cost would be negative."""
    above = float(np.ceil(reparametrized[entry] - reparametrized.min()))
    if above <= 0:
        return table
    table = table.copy()
    table[entry] -= above
    return table - min(0.0, table.min())


def _simple(problem: Problem) -> Problem:
    """The problem with parallel edges joined, so that messages by pairs of nodes are those of edges."""
    joined: dict[tuple[int, int], np.ndarray] = {}
    for e in problem.edges:
        i, j, cost = (e.i, e.j, e.cost) if e.i < e.j else (e.j, e.i, e.cost.T)
        joined[i, j] = joined[i, j] + cost if (i, j) in joined else cost
    return replace(problem, edges=tuple(Edge(i, j, cost) for (i, j), cost in joined.items()))
