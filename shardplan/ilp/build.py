"""The cost network of a graph: one node per op, one state per strategy, one edge per array handed from op to op.

    c_i[s]      = runs_i x compute seconds of op i under strategy s                                     (node)
    e_ij[s, t]  = reads_j x seconds of the cheapest way from the layout in which strategy s of i makes
                  the array to the layout in which strategy t of j takes it                             (edge)
                = 0 if equal else inf, where j *follows* i (one layout through a fusion), and for tied ops
                  (loop carries, state that comes out as it went in)
    u_i[s]      = bytes of the arrays op i makes, one device's share under strategy s, while they live   (usage)

An elementwise op, view or reduction follows its operand's producer when it can take every layout the producer can make: a
reshard there would break a fusion, and one before or after it does as well. Partial results may be resolved anywhere. What a big op
reads is gathered into a `share` before it, never on its own edge: there its bytes are counted.

A large array that is read through a copy beside other readers (`live.py`) gets two states per layout: "the same array", free of
memory but only where the layouts agree, and "a copy". A copy that somebody read in an earlier phase has one more state per layout,
"kept": no collective, but only where the earlier reader took that layout, and its memory from there on.

Costs are rounded to whole picoseconds, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log2, prod

import numpy as np

from shardplan.ilp.overlap import Seconds
from shardplan.ilp.problem import Edge, Problem, Usage, over_time
from shardplan.ir.beside import Beside
from shardplan.ir.graph import BORDER
from shardplan.ir.live import ALIASES, takes_over
from shardplan.ir.share import SMALL_BYTES
from shardplan.mesh.collective import ALONE, COMBINED_BYTES, Crowd
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import MERGED, Resharder, Sent, Step
from shardplan.strategies.fusion import FUSIBLE
from shardplan.strategies.space import Space

PS = 1e12
"""Picoseconds per second: costs of a planner's problem are whole picoseconds."""

LEAST_SLACK_S = 1e-6
"""Work shorter than this hides nothing."""

SMALL = 1e-3
"""Copies smaller than this share of the memory limit are not told apart from their originals."""


Crowds = tuple[tuple[int, tuple[tuple[Sent, Crowd], ...]], ...]
"""Per crowd of places, how many of its arrays a plan moves by every kind of collective over some axes."""


@dataclass(frozen=True)
class Charges:
    """Seconds per step beyond the model's, as seen in a compiled plan.

    Attributes:
        strategies: by (op, strategy).
        reshards: by (op, operand, layout it is made in, layout it is taken in).
    """

    strategies: Mapping[tuple[int, int], float]
    reshards: Mapping[tuple[int, int, Layout, Layout], float]


@dataclass(frozen=True, eq=False)
class Network:
    """A problem and how to read its answer.

    Attributes:
        problem: nodes are the graph's ops, in order.
        doubled: ops whose states s and s + k are strategy s without and with a buffer of its own; in the last k states of a share
            with an `earlier` reader the copy is kept from there.
        resharders: per value, what prices its reshards.
        background: (edge, the most picoseconds of it that other work hides, what of it can be hidden at all).
        waiting: what part of what is hidden is paid in `problem`.
        unpriced: copies that the problem takes for the originals: small ones, and without a limit all.
    """

    space: Space
    problem: Problem
    doubled: frozenset[int]
    unpriced: tuple[Usage, ...]
    resharders: tuple[Resharder, ...]
    background: tuple[tuple[int, float, np.ndarray], ...]
    waiting: float

    def parts(self, states) -> Seconds:
        """What a step takes under these states, in whole picoseconds but for the background."""
        problem = self.problem
        compute = sum(float(c[s]) for c, s in zip(problem.costs, states, strict=True))
        paid = [float(e.cost[states[e.i], states[e.j]]) for e in problem.edges]
        edges = problem.edges
        behind = sum(min(float(sent[states[edges[n].i], states[edges[n].j]]), hides) for n, hides, sent in self.background)
        inline = sum(paid) - self.waiting * behind
        return Seconds(compute, inline, behind, sum(float(c.min()) for c in problem.costs))

    def strategies(self, states) -> tuple[int, ...]:
        """The strategy number of every op."""
        return tuple(s % len(c) for s, c in zip(states, self.space.choices, strict=True))

    def kept(self, states) -> frozenset[int]:
        """Shares that take the copy of an earlier phase."""
        n = self.space.choices
        return frozenset(j for j in self.space.graph.earlier if states[j] >= len(n[j]) * (1 + (j in self.doubled)))

    def path(self, v: int, before: Layout, after: Layout) -> tuple[Step, ...]:
        """The collectives that bring value v from one layout to another."""
        value = self.space.graph.values[v]
        return self.resharders[v].path(value.shape, value.itemsize, before, after)

    def reshards(self, j: int, strategies: Sequence[int], kept: Collection[int]) -> Iterator[tuple[int, tuple[Step, ...]]]:
        """(operand, collectives) that bring op j its operands, in one run; nothing is moved for shares that are `kept`."""
        values, choices = self.space.graph.values, self.space.choices
        for k, v in enumerate(self.space.graph.ops[j].inputs if j not in kept else ()):
            if v is not None:
                i, r = values[v].producer
                before, after = choices[i].results[r][strategies[i]], choices[j].operands[k][strategies[j]]
                if before != after and (steps := self.path(v, before, after)):
                    yield k, steps

    def moved(self, states) -> Crowds:
        """How many arrays these states move together."""
        graph, strategies, kept = self.space.graph, self.strategies(states), self.kept(states)
        moved: dict[tuple, dict[int, float]] = {}
        for j, op in enumerate(graph.ops):
            for k, steps in self.reshards(j, strategies, kept):
                v = op.inputs[k]
                assert v is not None
                place = self.space.places[v]
                for step in steps if place.members > 1 else ():
                    if step.kind in MERGED:
                        size = graph.values[v].bytes / step.after.shards(self.space.mesh)
                        moved.setdefault((place.crowd, step.kind, step.axes), {})[place.origin] = size
        out: dict[int, list[tuple[Sent, Crowd]]] = {}
        for (crowd, kind, axes), sizes in sorted(moved.items()):
            out.setdefault(crowd, []).append(((kind, axes), Crowd(len(sizes), sum(sizes.values()) > COMBINED_BYTES)))
        return tuple((crowd, tuple(found)) for crowd, found in out.items())

    def restated(self, other: Network, states) -> tuple[int, ...]:
        """The states in which every op does what it does in `states` of another network of the same graph."""
        number: dict[int, dict] = {}
        out = []
        for found, wide, s in zip(other.space.choices, self.space.choices, states, strict=True):
            at = number.setdefault(id(wide), {x: n for n, x in enumerate(wide.letters)})
            block, s = divmod(s, len(found))
            out.append(block * len(wide) + at[found.letters[s]])
        return tuple(out)

    def holdings(self, states) -> list[tuple[int, int, int, float]]:
        """(op, lo, hi, bytes) of everything a device has in memory at the times lo <= t < hi."""
        graph, choices = self.space.graph, self.space.choices
        out = [(u.node, u.lo, u.hi, float(u.bytes[states[u.node]])) for u in self.problem.usages]
        chosen = self.strategies(states)
        for u in self.unpriced:
            v, held = graph.ops[u.node].inputs[0], choices[u.node].results[0][chosen[u.node]]
            i, r = (u.node, 0) if v is None else graph.values[v].producer  # a number written in the program is held by its reader
            if v is None or held != choices[i].results[r][chosen[i]]:
                out.append((u.node, u.lo, u.hi, float(u.bytes[states[u.node]])))
        return out


    def peak(self, states) -> float:
        """The most bytes that a device has in memory at any time, of everything."""
        return float(over_time((lo, hi, n) for _, lo, hi, n in self.holdings(states)).max(initial=0.0))


def build(
    space: Space,
    resharder: Resharder,
    limit: float | None,
    allowed: Mapping[int, np.ndarray] | None = None,
    tie: bool = True,
    charges: Charges | None = None,
    waiting: float = 1.0,
    crowds: Crowds | None = None,
) -> Network:
    """The network of a space.

    Args:
        space: graph, strategies and compute seconds.
        resharder: prices redistribution on the space's mesh.
        limit: bytes per device, or None.
        allowed: for pinned ops, which strategies remain: bool [s].
        tie: tie repeated layers.
        charges: what some choices cost beyond the model.
        waiting: what part of the seconds is paid that a reshard spends beside other work.
        crowds: how many arrays a plan moves together; None takes all arrays of a queue to be moved alike, however that is.
    """
    graph, choices = space.graph, space.choices
    doubled = _doubled(space, limit)

    def blocks(i: int) -> int:
        """How many states each strategy of op i has."""
        return 1 + (i in doubled) + (i in graph.earlier)

    costs = []
    cache: dict = {}
    for i, op in enumerate(graph.ops):
        key = (id(space.seconds[i]), op.runs, blocks(i))
        if allowed is not None and i in allowed:
            key = (*key, i)
        if key not in cache:
            cost = np.rint(space.seconds[i] * op.runs * PS)
            if allowed is not None and i in allowed:
                cost = np.where(allowed[i], cost, np.inf)
            cache[key] = np.tile(cost, blocks(i))
        costs.append(cache[key])

    for (i, s), extra in (charges.strategies if charges else {}).items():
        costs[i] = costs[i] + np.where(np.arange(len(costs[i])) % len(choices[i]) == s, np.rint(extra * PS), 0.0)

    pinned = frozenset(allowed or ())
    pinned |= {start for start, end in graph.tied if end in pinned}
    tables = _Tables(space, resharder, doubled, waiting, pinned, crowds)
    edges, background = [], []
    for j, op in enumerate(graph.ops):
        for k, v in enumerate(op.inputs):
            if v is not None:
                i, r = graph.values[v].producer
                table, sent = tables.handed(i, r, j, k, v)
                for (at, operand, before, after), extra in (charges.reshards if charges else {}).items():
                    if (at, operand) == (j, k):
                        table = table + tables.chosen(i, r, j, k, before, after, table) * np.rint(extra * PS)
                if hides := tables.hides(j, k):
                    background.append((len(edges), hides, sent))
                edges.append(Edge(i, j, table))
    edges += [Edge(i, j, tables.tied(i, j)) for i, j in graph.tied]
    edges += [Edge(i, j, tables.kept(i, k, j)) for j, (i, k) in graph.earlier.items()]

    usages, unpriced = [], []
    for v, interval in enumerate(space.live):
        if interval is None or interval[0] >= interval[1]:
            continue
        i, r = graph.values[v].producer
        alias = graph.ops[i].primitive in ALIASES and not takes_over(graph, i)
        held, told = tables.held(i, r, v), not alias or i in doubled
        nothing = [0 * held] * (blocks(i) - 1)
        own = np.tile(held, blocks(i)) if not told else np.concatenate([0 * held, *[held] * len(nothing)]) if nothing else held
        (usages if told else unpriced).append(Usage(i, *interval, own))
        if i in graph.earlier:
            at, _ = graph.earlier[i]
            before = space.live[graph.ops[at].outputs[0]] if graph.ops[at].primitive == "share" else None
            since = before[1] if before else at + 1
            if since < interval[0]:
                (usages if told else unpriced).append(Usage(i, since, interval[0], np.concatenate([*nothing, held])))
    ties = space.layers if tie else ()
    if ties:
        ties = _split_unequal(ties, costs, [(i in doubled, i in graph.earlier) for i in range(len(costs))], graph.tied)
    names = tuple(f"{op.primitive} at {op.source}" if not op.label else op.label for op in graph.ops)
    assert all(len(c) == len(choices[i]) * blocks(i) for i, c in enumerate(costs))
    problem = Problem(tuple(costs), tuple(edges), tuple(usages), limit, names, ties)
    return Network(space, problem, doubled, tuple(unpriced), tables.resharders, tuple(background), waiting)


def _doubled(space: Space, limit: float | None) -> frozenset[int]:
    graph = space.graph
    return frozenset(
        i
        for i, op in enumerate(graph.ops)
        if limit is not None
        and op.primitive in ALIASES
        and op.inputs[0] is not None
        and not takes_over(graph, i)
        and graph.values[op.outputs[0]].bytes > SMALL * limit
    )


def _split_unequal(ties, costs, kinds, tied) -> tuple[int, ...]:
    """Members of a class must have the same states: pins, also those of what they are tied to, and boundary effects set some apart."""
    forbidden = [b"" if np.isfinite(c).all() else np.isinf(c).tobytes() for c in costs]
    beside = {x: forbidden[y] for pair in tied for x, y in (pair, pair[::-1])}
    first: dict = {}
    return tuple(first.setdefault((c, len(costs[i]), kinds[i], forbidden[i], beside.get(i)), i) for i, c in enumerate(ties))


def summed(before: Layout, after: Layout) -> bool:
    """Whether a reshard only adds up partial sums: what a loop may put off to its end."""
    return bool(before.partial) and not after.partial and before.dims == after.dims


class _Tables:
    """Edge and usage tables, one array object per distinct content."""

    def __init__(
        self,
        space: Space,
        resharder: Resharder,
        doubled: frozenset[int],
        waiting: float,
        pinned: frozenset[int],
        crowds: Crowds | None,
    ):
        self.space, self.doubled, self.waiting, self.pinned = space, doubled, waiting, pinned
        known = dict(crowds or ())
        # Scattered and gathered at once, a gradient would be all-reduced; only its sums are counted as merged with others.
        kinds = (("all-reduce", "reduce-scatter") if p.queue == "gradient" else MERGED for p in space.places)
        self.resharders = tuple(
            resharder.combining(Crowd(p.members) if crowds is None else ALONE, of, known.get(p.crowd, ()))
            for p, of in zip(space.places, kinds, strict=True)
        )
        self.cache: dict = {}
        self.unique: dict[int, tuple[tuple[Layout, ...], np.ndarray]] = {}

    def _distinct(self, layouts: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], np.ndarray]:
        """Distinct layouts of a list and the position of each of its entries among them."""
        if id(layouts) not in self.unique:
            number: dict[Layout, int] = {}
            at = np.array([number.setdefault(x, len(number)) for x in layouts], dtype=np.int64)
            self.unique[id(layouts)] = tuple(number), at
        return self.unique[id(layouts)]

    def hides(self, j: int, k: int) -> float:
        """Picoseconds per step of the way to operand k of op j that other work hides at most, a power of two."""
        seconds = self.space.slack.get((j, k), 0.0) if (j, k) not in self.space.accumulated else 0.0
        return 2.0 ** floor(log2(seconds * self.space.graph.ops[j].reads * PS)) if seconds > LEAST_SLACK_S else 0.0

    def handed(self, i: int, r: int, j: int, k: int, v: int) -> tuple[np.ndarray, np.ndarray]:
        """Edge of the array that op i makes as result r and op j takes as operand k, and what of its seconds other work can hide."""
        graph, space = self.space.graph, self.space
        value, reads = graph.values[v], graph.ops[j].reads
        made, taken = space.choices[i].results[r], space.choices[j].operands[k]
        start = space.accumulated.get((j, k))
        once = None if start is None else graph.ops[start].reads
        follows = self.follows(i, j) and self.carries(made, taken)
        copied = graph.ops[i].primitive == "share" and not graph.ops[i].params["follows"] and value.bytes > SMALL_BYTES
        later = j in graph.earlier
        rows = 1 + (i in self.doubled) + (i in graph.earlier)
        resharder = self.resharders[v]
        hides = self.hides(j, k)
        ways = id(resharder), value.shape, value.itemsize, hides if self.waiting < 1 else hides > 0
        turned = space.beside[v] if any(s.partial for s in self._distinct(made)[0]) else None
        key = (id(made), id(taken), ways, reads, once, rows, j in self.doubled, later, follows, copied, turned)
        if key not in self.cache:
            (sources, a), (targets, b) = self._distinct(made), self._distinct(taken)
            times = np.array([[once if once and summed(s, t) else reads for t in targets] for s in sources])
            table = resharder.table(value.shape, value.itemsize, sources, targets) * (times * PS)
            sent = np.zeros_like(table)
            if hides:
                sent = np.rint(resharder.bare.table(value.shape, value.itemsize, sources, targets) * (times * PS))
            if turned:
                table = table + self._turning(value.shape, turned, sources, targets) * (times * PS)
            table = np.rint(table - (1 - self.waiting) * np.minimum(sent, hides))
            if once:  # XLA puts a sum off only where it goes on to the carry as it is
                table = np.where([[not s.partial and s != t for t in targets] for s in sources], np.inf, table)
            if follows:
                whole = np.array([not s.partial for s in sources])[:, None]
                equal = np.array([[s == t for t in targets] for s in sources])
                table = np.where(whole & ~equal, np.inf, table)
            if copied:
                mesh = self.space.mesh
                grows = np.array([[s.shards(mesh) > t.shards(mesh) for t in targets] for s in sources])
                table = np.where(grows, np.inf, table)
            table, sent = table[np.ix_(a, b)], sent[np.ix_(a, b)]
            if j in self.doubled:
                equal = np.array([[s == t for t in targets] for s in sources])[np.ix_(a, b)]
                table = np.concatenate([np.where(equal, 0.0, np.inf), np.where(equal, np.inf, table)], axis=1)
                sent = np.concatenate([np.zeros_like(sent), sent], axis=1)
            if later:
                table, sent = (np.concatenate([x, np.zeros((len(a), len(b)))], axis=1) for x in (table, sent))
            self.cache[key] = (np.tile(table, (rows, 1)), np.tile(sent, (rows, 1))) if rows > 1 else (table, sent)
        return self.cache[key]

    def _turning(self, shape: tuple[int, ...], turned: Beside, sources, targets) -> np.ndarray:
        """Seconds [source, target] of turning what a sum is computed with that is scattered along any dim but the first.

        XLA lays an array out so that its parts on the devices lie one after the other, and what is computed with it in the same way.
        """
        device, mesh = self.space.cluster.device, self.space.mesh
        later = [d for n, d in enumerate(turned.order) if prod(shape[e] for e in turned.order[:n]) > 1]

        def seconds(t: Layout) -> float:
            return sum(max(device.kernel_latency_s, 2 * n / t.shards(mesh) / device.memory_rate) for n in turned.bytes)

        costs = [(seconds(t), frozenset(a for d in later for a in t.dims[d])) for t in targets]
        return np.array([[0.0 if axes.isdisjoint(s.partial_axes) else x for x, axes in costs] for s in sources])

    def chosen(self, i: int, r: int, j: int, k: int, before: Layout, after: Layout, table: np.ndarray) -> np.ndarray:
        """Where in the edge's `table` a reshard from `before` to `after` takes place: 1, elsewhere 0."""
        made, taken = self.space.choices[i].results[r], self.space.choices[j].operands[k]
        rows, columns = table.shape[0] // len(made), table.shape[1] // len(taken)
        place = np.outer(np.tile([x == before for x in made], rows), np.tile([x == after for x in taken], columns))
        return np.where(place & np.isfinite(table) & (table > 0), 1.0, 0.0)

    def kept(self, i: int, k: int, j: int) -> np.ndarray:
        """Edge of the op that took a copy as its operand k and the share that may keep that copy: where it does, layouts agree."""
        graph, space = self.space.graph, self.space
        taken, held = space.choices[i].operands[k], space.choices[j].results[0]
        rows, columns = 1 + (i in self.doubled) + (i in graph.earlier), 1 + (j in self.doubled)
        key = ("kept", id(taken), id(held), rows, columns)
        if key not in self.cache:
            (sources, a), (targets, b) = self._distinct(taken), self._distinct(held)
            equal = np.array([[0.0 if s == t else np.inf for t in targets] for s in sources])[np.ix_(a, b)]
            self.cache[key] = np.tile(np.concatenate([np.zeros((len(a), len(b) * columns)), equal], axis=1), (rows, 1))
        return self.cache[key]

    def follows(self, i: int, j: int) -> bool:
        """Whether op j, where it can, takes the result of op i in the layout it has."""
        ops, rules = self.space.graph.ops, self.space.rules
        if not self.pinned.isdisjoint((i, j)):
            return False
        settled = rules[i].fusion in ("loop", "view") and ops[i].primitive not in BORDER
        if ops[j].primitive == "share":
            return ops[j].params["follows"] and settled
        if rules[j].fusion not in FUSIBLE or rules[j].halo or ops[j].primitive in BORDER:
            return False
        alone = ops[i].primitive == "arg" and len(self.space.graph.values[ops[i].outputs[0]].consumers) == 1
        return settled or alone or ops[i].primitive == "share"

    def carries(self, made: tuple[Layout, ...], taken: tuple[Layout, ...]) -> bool:
        """Whether whatever is made can be taken as it is."""
        key = ("carries", id(made), id(taken))
        if key not in self.cache:
            self.cache[key] = {x for x in self._distinct(made)[0] if not x.partial} <= set(self._distinct(taken)[0])
        return self.cache[key]

    def tied(self, i: int, j: int) -> np.ndarray:
        """Edge of two ops that must have one layout: what i makes is what j makes."""
        a, b = self.space.choices[i].results[0], self.space.choices[j].results[0]
        key = ("tied", id(a), id(b), i in self.doubled, j in self.doubled)
        if key not in self.cache:
            table = np.array([[0.0 if s == t else np.inf for t in b] for s in a])
            self.cache[key] = np.tile(table, (1 + (i in self.doubled), 1 + (j in self.doubled)))
        return self.cache[key]

    def held(self, i: int, r: int, v: int) -> np.ndarray:
        """Bytes per device of result r of op i under each strategy."""
        value, layouts = self.space.graph.values[v], self.space.choices[i].results[r]
        key = ("held", id(layouts), value.bytes)
        if key not in self.cache:
            self.cache[key] = np.array([np.ceil(value.bytes / x.shards(self.space.mesh)) for x in layouts])
        return self.cache[key]
