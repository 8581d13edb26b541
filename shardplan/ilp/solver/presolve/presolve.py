"""Which nodes, states and time steps can be left out without losing an optimum: exact reductions, each undone on the answer.

A reduction is a class with two verbs: `apply(net, ...)` changes the working network and returns a record, or None when it
finds nothing; the record's `invert(states)` puts back the states it decided. `presolve` runs them until none applies:

    Tie        nodes of one class are one node: costs, usages and edges summed, a loop's diagonal becomes a node cost
    Restrict   states that cannot be taken (no finite partner, or too many bytes) and dominated ones are dropped
    Follow     each state of j allows one state of i only:            i := f(j), all of i's terms move to j
    Eliminate  i holds no memory that matters, at most two edges:     e_jk += min_s c_i[s] + e_ij[s, .] + e_ik[s, .]

    >>> small = shrink(problem)
    >>> solution = solve(small.problem); states = small.invert(solution.states)      # objective + small.offset
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.problem import Edge, Problem, Usage

DOMINANCE_PAIRS = 1 << 14  # table entries a dominance test may touch at one node, by default
ELIMINATE_SIZE = 1 << 16  # entries of an edge table that elimination may create
SOME = 1_000  # edges or usages, between which the clock is looked at


@dataclass(frozen=True)
class Presolved:
    """A smaller problem and the way back.

    Attributes:
        problem: what is left to decide; node i is node `nodes[i]` of the network that the trail speaks of.
        offset: constant part of the objective, left out of `problem`.
        feasible: False when a reduction proved that nothing fits.
        tied: whether classes of nodes were made one.
        steps: the time steps of the problem that was given, for each of the steps that are left.
    """

    problem: Problem
    offset: float
    feasible: bool
    nodes: tuple[int, ...]
    trail: tuple
    n_nodes: int
    tied: bool = False
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def invert(self, states: Sequence[int]) -> tuple[int, ...]:
        """States of the original problem from states of the small one."""
        full = np.zeros(self.n_nodes, dtype=np.int64)
        full[list(self.nodes)] = states
        for record in reversed(self.trail):
            full = record.invert(full)
        return tuple(full.tolist())

    def project(self, states: Sequence[int]) -> tuple[int, ...] | None:
        """States of the small problem from original ones (a hint), or None when they use a state that was dropped."""
        for record in self.trail:
            if isinstance(record, Tie):
                states = [states[m] for m in record.first]
            elif isinstance(record, Restrict):
                kept = np.flatnonzero(record.keep == states[record.node])
                if len(kept) == 0:
                    return None
                states = list(states)
                states[record.node] = int(kept[0])
        return tuple(int(states[i]) for i in self.nodes)


# ---------------------------------------------------------------- the working network


Block = tuple[np.ndarray, np.ndarray]  # usages of a node: intervals [m, 2], bytes [m, k]


class Network:
    """Mutable adjacency form of a Problem: `adj[i][j]` is e_ij with i's states as rows, `adj[j][i]` the same transposed."""

    def __init__(self, problem: Problem, deadline: Deadline = UNLIMITED):
        self.costs: list[np.ndarray] = list(problem.costs)
        self.adj: list[dict[int, np.ndarray]] = [{} for _ in self.costs]
        self.uses: list[list[Block]] = [[] for _ in self.costs]
        self.alive = [True] * len(self.costs)
        self.limit = problem.limit
        self.offset = 0.0
        self.ground: int | None = None  # a node with one state and no edges
        self.feasible = all(len(c) for c in self.costs)
        self.dirty: OrderedDict[int, None] = OrderedDict()  # worklist in order of arrival
        self._finite: dict[int, tuple] = {}
        turned = {id(e.cost): e.cost.T for e in problem.edges}
        for number, e in enumerate(problem.edges):
            self.join(e.i, e.j, e.cost, turned[id(e.cost)])
            if number % SOME == 0:
                deadline.check()
        if problem.limit is not None:
            for u in problem.usages:
                if u.hi > u.lo:
                    self.uses[u.node].append((np.array([(u.lo, u.hi)]), u.bytes[None, :]))
        self.dirty = OrderedDict.fromkeys(range(len(self.costs)))

    def join(self, i: int, j: int, table: np.ndarray, turned: np.ndarray | None = None) -> None:
        """Adds a table (and what it is transposed) to e_ij; parallel edges become one."""
        if j in self.adj[i]:
            table, turned = self.adj[i][j] + table, None
        self.adj[i][j], self.adj[j][i] = table, table.T if turned is None else turned
        self.dirty[i] = self.dirty[j] = None

    def cut(self, i: int, j: int) -> None:
        del self.adj[i][j], self.adj[j][i]
        self.dirty[i] = self.dirty[j] = None

    def usage(self, i: int) -> Block | None:
        """All of i's usages as one block."""
        if len(self.uses[i]) > 1:
            intervals, amounts = zip(*self.uses[i], strict=True)
            self.uses[i] = [(np.concatenate(intervals), np.concatenate(amounts))]
        return self.uses[i][0] if self.uses[i] else None

    def drop(self, i: int) -> None:
        """Takes out a node that is decided elsewhere."""
        for j in list(self.adj[i]):
            self.cut(i, j)
        self.alive[i], self.uses[i] = False, []
        self.dirty.pop(i, None)

    def finite(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(which rows have a finite entry, f with column j finite in row f[j] only, or None); kept by the table's identity."""
        if id(table) not in self._finite:
            mask, some = np.isfinite(table), np.logical_or.reduce  # half the time of `any` on small arrays
            one = np.count_nonzero(mask) == table.shape[1] and some(mask, axis=0).all()  # per column
            function = mask.argmax(axis=0) if one else None
            self._finite[id(table)] = (some(mask, axis=1), function, table)  # the table is held so that its identity stays its own
        return self._finite[id(table)][:2]

    def to_problem(self) -> tuple[Problem, tuple[int, ...]]:
        nodes = tuple(i for i, alive in enumerate(self.alive) if alive)
        number = {i: n for n, i in enumerate(nodes)}
        edges = tuple(Edge(number[i], number[j], t) for i in nodes for j, t in self.adj[i].items() if i < j)
        usages = tuple(
            Usage(number[i], int(lo), int(hi), amount)
            for i in nodes
            if (held := self.usage(i)) is not None
            for (lo, hi), amount in zip(*held, strict=True)
        )
        return Problem(tuple(self.costs[i] for i in nodes), edges, usages, self.limit if usages else None), nodes


# ---------------------------------------------------------------- reductions


@dataclass(frozen=True)
class Tie:
    """One node per class of `Problem.ties`."""

    member: np.ndarray  # class number of every node, 0 .. n_classes - 1
    first: tuple[int, ...]  # a node of every class

    @classmethod
    def apply(cls, problem: Problem) -> tuple[Problem, Tie]:
        names, first, member = np.unique(np.asarray(problem.ties), return_index=True, return_inverse=True)
        costs = _sums((member[i], None, c) for i, c in enumerate(problem.costs))
        loops: dict[tuple, list] = {}
        pairs: dict[tuple, list] = {}
        for e in problem.edges:
            i, j = member[e.i], member[e.j]
            group, key = (loops, (i, id(e.cost))) if i == j else (pairs, (i, j, id(e.cost)))
            group.setdefault(key, [e.cost, 0])[1] += 1
        for (i, _), (table, count) in loops.items():
            costs[i, None] = costs[i, None] + count * np.diagonal(table)
        usages = _sums((member[u.node], (u.lo, u.hi), u.bytes) for u in problem.usages)
        tied = Problem(
            costs=tuple(costs[i, None] for i in range(len(names))),
            edges=tuple(Edge(int(i), int(j), count * t if count > 1 else t) for (i, j, _), (t, count) in pairs.items()),
            usages=tuple(Usage(int(i), lo, hi, b) for (i, (lo, hi)), b in usages.items()),
            limit=problem.limit,
            names=tuple(problem.names[i] for i in first) if problem.names else (),
        )
        return tied, cls(member, tuple(first.tolist()))

    def invert(self, states: np.ndarray) -> np.ndarray:
        return states[self.member]


def _sums(terms) -> dict[tuple, np.ndarray]:
    """Arrays summed by key; an array that occurs many times is multiplied, not added."""
    counted: dict[tuple, list] = {}
    for node, key, array in terms:
        counted.setdefault((int(node), key, id(array)), [array, 0])[1] += 1
    total: dict[tuple, np.ndarray] = {}
    for (node, key, _), (array, count) in counted.items():
        part = count * array if count > 1 else array
        total[node, key] = total[node, key] + part if (node, key) in total else part
    return total


@dataclass(frozen=True)
class Restrict:
    """A node keeps the states `keep` only."""

    node: int
    keep: np.ndarray

    @classmethod
    def apply(cls, net: Network, i: int, keep: np.ndarray) -> Restrict | None:
        """`keep` is a mask over i's states."""
        if np.count_nonzero(keep) == len(keep):
            return None
        chosen = np.flatnonzero(keep)
        net.feasible &= len(chosen) > 0
        net.costs[i] = net.costs[i][chosen]
        net.uses[i] = [(intervals, amounts[:, chosen]) for intervals, amounts in net.uses[i]]
        for j, table in net.adj[i].items():
            smaller = np.ascontiguousarray(table[chosen])
            net.adj[i][j], net.adj[j][i] = smaller, smaller.T
            net.dirty[j] = None
        net.dirty[i] = None
        return cls(i, chosen)

    def invert(self, states: np.ndarray) -> np.ndarray:
        states[self.node] = self.keep[states[self.node]]
        return states


def possible(net: Network, i: int) -> np.ndarray:
    """Mask of i's states that have a finite cost and a finite partner in every edge."""
    mask = np.isfinite(net.costs[i])
    for table in net.adj[i].values():
        mask = mask & net.finite(table)[0]
    return mask


def undominated(net: Network, i: int, most: int) -> np.ndarray:
    """Mask of i's states but those that another one replaces at no greater cost and bytes, whatever the neighbours take.

    b replaces a when  c[b] + sum_j max_x (e_ij[b, x] - e_ij[a, x]) <= c[a]  and u[b] <= u[a] in every interval; of two
    that replace each other the lower number stays. No state is dropped where that would touch more than `most` table entries.
    """
    cost, tables = net.costs[i], list(net.adj[i].values())
    k = len(cost)
    keep = np.ones(k, dtype=bool)
    if k == 1 or k * k > most:
        return keep
    slack = cost[:, None] - cost[None, :]  # [a, b]; what the edges may cost more under b
    np.fill_diagonal(slack, -np.inf)
    for table in tables:  # a few columns rule out most pairs
        few = table[:, sorted({0, table.shape[1] // 2, table.shape[1] - 1, int(table.min(axis=0).argmin())})]
        slack[(_difference(few, few[:, None]) > slack[:, :, None]).any(axis=2)] = -np.inf
        if slack.max() == -np.inf:
            return keep
    a, b = np.nonzero(slack >= -_REACH)
    if len(a) * sum(t.shape[1] for t in tables) > most:
        return keep
    usage = net.usage(i)
    if usage is not None and len(a):
        amounts = np.unique(usage[1], axis=0)
        for first in range(0, len(a), 256):  # in pieces, for a leader may hold thousands of intervals
            part = slice(first, first + 256)
            fits = (amounts[:, b[part]] <= amounts[:, a[part]]).all(axis=0)
            slack[a[part], b[part]] = np.where(fits, slack[a[part], b[part]], -np.inf)
        a, b = np.nonzero(slack >= -_REACH)
    left = slack[a, b]
    for table in tables:
        left = left - _difference(table[b], table[a]).max(axis=1)
    replaced = {(int(p), int(q)) for p, q, rest in zip(a, b, left, strict=True) if rest >= 0}
    for p, q in sorted(replaced):
        if keep[p] and keep[q] and ((q, p) not in replaced or q < p):
            keep[p] = False
    return keep


_REACH = 1e300


def _difference(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """After - before; where `before` is forbidden nothing can be lost: -inf."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(before), -np.inf, after - before)


@dataclass(frozen=True)
class Follow:
    """Node i takes state f[s_j]: given j, only one state of i is possible."""

    node: int
    leader: int
    f: np.ndarray

    @classmethod
    def apply(cls, net: Network, i: int) -> Follow | None:
        if not net.adj[i] and len(net.costs[i]) == 1:  # decided and alone: all of these are one node
            if net.ground is None or net.ground == i or not net.alive[net.ground]:
                net.ground = i
                return None
            return cls._merge(net, i, net.ground, np.zeros(1, dtype=np.int64))
        found = ((j, f) for j, table in net.adj[i].items() if (f := net.finite(table)[1]) is not None)
        j, f = next(found, (i, None))
        if f is None:
            return None
        back = net.finite(net.adj[i][j].T)[1] if len(f) == len(net.costs[i]) and len(net.adj[i]) > len(net.adj[j]) else None
        if back is not None:
            return cls._merge(net, j, i, back)  # one-to-one: the smaller joins the larger
        return cls._merge(net, i, j, f)

    @classmethod
    def _merge(cls, net: Network, i: int, j: int, f: np.ndarray) -> Follow:
        net.costs[j] = net.costs[j] + net.costs[i][f]
        if j in net.adj[i]:
            net.costs[j] = net.costs[j] + net.adj[i][j][f, np.arange(len(f))]
        net.uses[j] += [(intervals, amounts[:, f]) for intervals, amounts in net.uses[i]]
        for other, other_table in list(net.adj[i].items()):
            if other == j:
                continue
            if len(net.costs[i]) == 1:  # a decided node tells its neighbours their costs and joins nobody
                net.costs[other] = net.costs[other] + other_table[0]
                net.dirty[other] = None
            else:
                net.join(j, other, other_table[f])
        net.drop(i)
        net.dirty[j] = None
        return cls(i, j, f)

    def invert(self, states: np.ndarray) -> np.ndarray:
        states[self.node] = self.f[states[self.leader]]
        return states


@dataclass(frozen=True)
class Eliminate:
    """Node i answers its (at most two) neighbours with the cheapest state: `best[s_j, s_k]`."""

    node: int
    neighbours: tuple[int, ...]
    best: np.ndarray

    @classmethod
    def apply(cls, net: Network, i: int) -> Eliminate | None:
        near = tuple(net.adj[i])
        if net.uses[i] or len(near) > 2 or (len(near) == 2 and _joint(net, i, near) > ELIMINATE_SIZE):
            return None
        cost = net.costs[i]
        if not near:
            joint = cost
            net.offset += float(cost.min(initial=np.inf))
        elif len(near) == 1:
            (j,) = near
            joint = net.adj[j][i] + cost
            net.costs[j] = net.costs[j] + joint.min(axis=-1)
            net.dirty[j] = None
        else:
            j, k = near
            joint = (net.adj[j][i] + cost)[:, None, :] + net.adj[k][i][None, :, :]
            net.join(j, k, joint.min(axis=-1))
        net.drop(i)
        return cls(i, near, joint.argmin(axis=-1))

    def invert(self, states: np.ndarray) -> np.ndarray:
        states[self.node] = self.best[tuple(states[j] for j in self.neighbours)]
        return states


def _joint(net: Network, i: int, near: tuple[int, ...]) -> int:
    return len(net.costs[i]) * int(np.prod([len(net.costs[j]) for j in near]))


# ---------------------------------------------------------------- memory


def timeline(usages: Sequence[Usage]) -> np.ndarray:
    """The time steps that imply all others of (2): the last start before an end. [steps], rising."""
    if not usages:
        return np.zeros(0, dtype=np.int64)
    starts = np.unique([u.lo for u in usages])
    if any(u.min_bytes < 0 for u in usages):  # bytes that come back: every start and end counts
        return np.unique(np.concatenate([starts, [u.hi for u in usages]]))
    ends = np.unique([u.hi for u in usages])
    return starts[np.unique(np.searchsorted(starts, ends) - 1)]


class _Change:
    """How the bytes of all states change from one step to another."""

    def __init__(self):
        self.bytes: dict[int, tuple[np.ndarray, float, float]] = {}  # of each node, with the least and the most
        self.min_bytes = self.max_bytes = 0.0  # of any choice

    def add(self, i: int, amount: np.ndarray, least: float, most: float) -> None:
        """Adds what node i's states change by: `amount`, at least and at most so much."""
        if i in self.bytes:
            before, low, high = self.bytes[i]
            self.min_bytes, self.max_bytes = self.min_bytes - low, self.max_bytes - high
            amount = before + amount
            least, most = float(amount.min()), float(amount.max())
        self.bytes[i] = amount, least, most
        self.min_bytes, self.max_bytes = self.min_bytes + least, self.max_bytes + most

    def then(self, later: _Change) -> _Change:
        small, large = sorted((self, later), key=lambda c: len(c.bytes))
        for i, change in small.bytes.items():
            large.add(i, *change)
        return large


def unimplied(usages: Sequence[Usage], lo: np.ndarray, hi: np.ndarray, n_steps: int, deadline: Deadline) -> np.ndarray:
    """[step] -> whether some choice holds more there than at the next step before and after it that is left."""
    events: list[list[tuple[int, np.ndarray, float, float]]] = [[] for _ in range(n_steps + 1)]
    for number, (u, a, b) in enumerate(zip(usages, lo.tolist(), hi.tolist(), strict=True)):
        if number % SOME == 0:
            deadline.check()
        events[a].append((u.node, u.bytes, u.min_bytes, u.max_bytes))
        events[b].append((u.node, -u.bytes, -u.max_bytes, -u.min_bytes))
    left: list[tuple[int, _Change]] = []  # with the change since the one before
    since = _Change()
    for t in range(n_steps):
        deadline.check()
        for change in events[t]:
            since.add(*change)
        while left and since.min_bytes >= 0:
            since = left.pop()[1].then(since)
        if not left or since.max_bytes > 0:
            left.append((t, since))
            since = _Change()
    mask = np.zeros(n_steps, dtype=bool)
    mask[[t for t, _ in left]] = True
    return mask


def remove_redundant_steps(problem: Problem, deadline: Deadline = UNLIMITED) -> tuple[Problem, np.ndarray]:
    """The problem with time renumbered to the steps at which the limit can be broken at all, and which steps those are.

    Without a limit if there are none.
    """
    usages = [u for u in problem.usages if u.hi > u.lo]
    if problem.limit is None or not usages:
        return replace(problem, usages=(), limit=None), np.zeros(0, dtype=np.int64)
    deadline.check()
    steps = timeline(usages)
    deadline.check()
    lo, hi = (np.searchsorted(steps, [getattr(u, side) for u in usages]) for side in ("lo", "hi"))
    most = np.zeros(len(steps) + 1)
    np.add.at(most, lo, [u.max_bytes for u in usages])
    np.add.at(most, hi, [-u.max_bytes for u in usages])
    tight = np.cumsum(most)[:-1] > problem.limit
    deadline.check()
    if all((u.bytes == np.rint(u.bytes)).all() for u in usages):  # sums of others are not exact
        tight &= unimplied(usages, lo, hi, len(steps), deadline)
    deadline.check()
    number = np.concatenate([[0], np.cumsum(tight)])
    merged = _sums(
        (u.node, (int(number[a]), int(number[b])), u.bytes)
        for u, a, b in zip(usages, lo, hi, strict=True)
        if number[b] > number[a] and u.bytes.any()
    )
    usages = tuple(Usage(i, a, b, amount) for (i, (a, b)), amount in merged.items())
    return replace(problem, usages=usages, limit=problem.limit if merged else None), steps[tight]


def fitting(problem: Problem, deadline: Deadline = UNLIMITED) -> dict[int, np.ndarray]:
    """Masks of the states that fit beside everyone else's least bytes, for the nodes where some do not."""
    if problem.limit is None or np.isneginf(problem.limit):
        return {}
    horizon = max(u.hi for u in problem.usages)
    least = np.zeros(horizon + 1)
    by_node: dict[int, list[Usage]] = {}
    for u in problem.usages:
        least[u.lo] += u.min_bytes
        least[u.hi] -= u.min_bytes
        by_node.setdefault(u.node, []).append(u)
    deadline.check()
    slack = problem.limit - np.cumsum(least)[:-1]
    from_step = _RangeMin(slack)
    masks = {}
    for i, uses in by_node.items():
        deadline.check()
        mask = np.ones(len(problem.costs[i]), dtype=bool)
        for u in uses:
            if u.max_bytes - u.min_bytes > (room := from_step(u.lo, u.hi)):
                mask &= u.bytes - u.min_bytes <= room
        if not mask.all():
            masks[i] = mask
    return masks


class _RangeMin:
    """Least value over any range of steps, from minima over powers of two."""

    def __init__(self, values: np.ndarray):
        self.levels = [values]
        while len(self.levels[-1]) > (half := 1 << (len(self.levels) - 1)):
            previous = self.levels[-1]
            self.levels.append(np.minimum(previous[:-half], previous[half:]))

    def __call__(self, lo: int, hi: int) -> float:
        level = (hi - lo).bit_length() - 1
        row = self.levels[level]
        return min(row[lo], row[hi - (1 << level)])


# ---------------------------------------------------------------- the chain


def presolve(
    problem: Problem,
    *,
    tie: bool = False,
    dominance: int = DOMINANCE_PAIRS,
    deadline: Deadline = UNLIMITED,
) -> Presolved:
    """Applies every reduction until none finds anything.

    Args:
        problem: any problem.
        tie: make one node of every class in `problem.ties` first (a restriction, not a reduction).
        dominance: table entries that the search for dominated states may touch at one node; it takes longest, finds most where all
            costs are alike, and next to nothing in a part of a shrunk problem.
        deadline: once it is over, no more dominated states are looked for.
    """
    trail: list = []
    n_nodes, tied = len(problem.costs), bool(tie and problem.ties)
    if tied:
        problem, record = Tie.apply(problem)
        trail.append(record)
    nodes = range(len(problem.costs))
    offset, feasible = 0.0, True
    steps = np.arange(max((u.hi for u in problem.usages), default=0))
    while feasible:
        deadline.check()
        timed, tight = remove_redundant_steps(problem, deadline)
        steps = steps[tight]
        deadline.check()
        net = Network(timed, deadline)
        deadline.check()
        before = sum(map(len, net.costs))
        for i, mask in fitting(timed, deadline).items():
            _record(trail, Restrict.apply(net, i, mask), nodes)
        _exhaust(net, trail, nodes, deadline)
        doubtful = [i for i, alive in enumerate(net.alive) if alive]
        while dominance and doubtful and net.feasible and not deadline.over():  # costs more, so it waits until the rest is done
            for i in doubtful:
                if net.alive[i] and not deadline.over():
                    _record(trail, Restrict.apply(net, i, undominated(net, i, dominance)), nodes)
            doubtful = list(net.dirty)
            _exhaust(net, trail, nodes, deadline)
        deadline.check()
        offset, feasible = offset + net.offset, net.feasible
        problem, left = net.to_problem()
        deadline.check()
        nodes = tuple(nodes[i] for i in left)
        if problem.n_states >= 0.98 * before or (dominance and deadline.over()):
            break
    return Presolved(problem, offset, feasible, tuple(nodes), tuple(trail), n_nodes, tied, steps)


def _exhaust(net: Network, trail: list, nodes: Sequence[int], deadline: Deadline) -> None:
    """Runs the reductions at every node whose surroundings changed."""
    while net.dirty and net.feasible:
        deadline.check()
        i, _ = net.dirty.popitem(last=False)
        if not net.alive[i]:
            continue
        record = Restrict.apply(net, i, possible(net, i)) or Follow.apply(net, i) or Eliminate.apply(net, i)
        _record(trail, record, nodes)


def _record(trail: list, record, nodes: Sequence[int]) -> None:
    """Appends a record in the numbers of the network before the first reduction."""
    if record is None:
        return
    if isinstance(nodes, range):  # the network before the first reduction
        trail.append(record)
        return
    renumber = {"node": nodes[record.node]}
    if isinstance(record, Follow):
        renumber["leader"] = nodes[record.leader]
    if isinstance(record, Eliminate):
        renumber["neighbours"] = tuple(nodes[j] for j in record.neighbours)
    trail.append(replace(record, **renumber))
