"""From a traced step to a plan: the arrows between the rooms, one after the other, and nothing else.

jaxpr -> Graph -> Space -> Network -> Solution -> Decisions -> Plan
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from shardplan import _jax
from shardplan.costs.network import Charges, Network, build, whole_bytes
from shardplan.costs.space import Space, make_space
from shardplan.costs.tables import Crowds
from shardplan.emit.decide import decide
from shardplan.emit.emit import EmitDecision
from shardplan.errors import ShardingError
from shardplan.files import portable
from shardplan.ilp import minimize_peak
from shardplan.ilp.overlap_price import judged
from shardplan.ilp.slope_scaling import settled
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.incumbent import uncollected
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Problem, Solution, indicator_costs
from shardplan.ir.graph import Graph, Op, Path
from shardplan.ir.parse import parse
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder, ReshardStep
from shardplan.propagation import conflicts, propagate, recursive
from shardplan.xla_model.liveness import ALIASES

FREE = "*"
"""A dim of a pin that the planner may split as it likes."""

APART_WORK, APART_OPS = 3.0, 20_000
"""Counted work, about seconds, for repeated layers that are not planned alike; and how many ops may be, where memory does not ask."""

ALIKE = 1e-3
"""Repeated layers stay alike where that costs no more than this part of a step."""

MANY_AXES = 3
"""Mesh axes from which an answer without a proof is held against recursive search."""

PinDims = tuple[tuple[str, ...] | str, ...]
"""A pin: per dim its mesh axes, or FREE; dims left out at the end are unsplit."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as the planner sees it.

    Attributes:
        jaxpr: the closed jaxpr of the flat step.
        in_labels, out_labels: pytree paths of flat inputs and outputs.
        tied: (input, output) numbers of state.
        donated: numbers of donated inputs.
    """

    jaxpr: Any
    in_labels: tuple[str, ...]
    out_labels: tuple[str, ...]
    tied: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]

    def fingerprint(self) -> str:
        """The same for the same program with the same shapes in every process."""
        text = _jax.jaxpr_text(self.jaxpr) + repr((self.in_labels, self.out_labels, self.tied))
        return hashlib.sha256(text.encode()).hexdigest()

    def donated_names(self) -> tuple[str, ...]:
        """Donated arguments by name; by leaf where only some leaves of an argument are donated."""
        donated = set(self.donated)
        whole: dict[str, bool] = {}
        for n, label in enumerate(self.in_labels):
            head = label.split("/")[0]
            whole[head] = whole.get(head, True) and n in donated
        heads = [(label, label.split("/")[0]) for n, label in enumerate(self.in_labels) if n in donated]
        return tuple(dict.fromkeys(head if whole[head] else label for label, head in heads))


@dataclass(frozen=True)
class Options:
    """What a person asked for.

    Attributes:
        memory: bytes per device, or None for no limit.
        search: one of `plan.SEARCHES`.
        time_limit: seconds for the search, or None for its own deterministic limit.
        in_pins, out_pins: by flat number.
        pins: entries of a PartitionSpec by path pattern.
        charges: what strategies and reshards cost beyond the model, as seen in a compiled plan.
        thrift: part of the way from the fastest plan's peak to the leanest plan's that memory has to go down.
        overlap: whether collectives that nobody waits for run beside other work, on a cluster that lets them.
        constraints: whether the program's own `with_sharding_constraint`s are kept, only a "hint", or ignored.
    """

    memory: float | None = None
    search: str = "ilp"
    time_limit: float | None = None
    in_pins: Mapping[int, PinDims] = None  # type: ignore[assignment]
    out_pins: Mapping[int, PinDims] = None  # type: ignore[assignment]
    pins: Mapping[str, Sequence] = None  # type: ignore[assignment]
    progress: Any = None
    charges: Charges | None = None
    thrift: float = 0.0
    overlap: bool = True
    constraints: Literal["keep", "hint", "ignore"] = "keep"


@dataclass(frozen=True, eq=False)
class Planned:
    """What planning found, with everything it was found from.

    Attributes:
        strategies: per op of the graph, the number of its strategy.
        decisions: by path, what emission applies.
        beside: what a hidden collective costs, as a part of its seconds; 1 where none is hidden.
        seconds: planning time by stage.
    """

    traced: Traced
    network: Network
    solution: Solution
    strategies: tuple[int, ...]
    decisions: Mapping[Path, EmitDecision]
    options: Options
    beside: float
    seconds: Mapping[str, float]

    @property
    def space(self) -> Space:
        return self.network.space

    @property
    def graph(self) -> Graph:
        return self.space.graph

    def made(self, i: int, r: int = 0) -> Layout:
        """Layout in which op i makes its result r."""
        return self.space.choices[i].results[r][self.strategies[i]]

    def taken(self, i: int, k: int) -> Layout:
        """Layout in which op i takes its operand k."""
        return self.space.choices[i].operands[k][self.strategies[i]]

    @functools.cached_property
    def kept(self) -> frozenset[int]:
        """Shares that take the copy of an earlier phase: they move nothing."""
        return self.network.kept(self.solution.states)

    def reshards(self, i: int) -> list[tuple[int, tuple[ReshardStep, ...]]]:
        """(operand, collectives) that bring an op its operands, in one run."""
        return list(self.network.reshards(i, self.strategies, self.kept))

    @functools.cached_property
    def conflicts(self) -> Mapping[tuple[int, int], tuple[str, str]]:
        """(op, operand) -> the two pins between whose regions the operand changes its layout."""
        graph, pins = self.graph, _pins(self.graph, self.options)
        if len(pins) < 2:
            return {}
        reads = ((i, k, graph.values[v].producer) for i, op in enumerate(graph.ops) for k, v in enumerate(op.inputs) if v is not None)
        changed = {(i, k) for i, k, made in reads if self.made(*made) != self.taken(i, k)}
        return conflicts(graph, changed, {i: _told(graph.ops[i], asked) for i, asked in pins.items()})

    def in_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.made(i) for i in self.graph.args)

    def out_layouts(self) -> tuple[Layout, ...]:
        return tuple(self.made(i) for i in self.graph.outs)


@uncollected()
def make_plan(traced: Traced, mesh: MeshShape, cluster: Cluster, options: Options) -> Planned:
    """Plan a step.

    Raises:
        ShardingError: when a pin cannot hold, or no plan fits the memory.
    """
    clock = _Clock()
    graph = _loosened(parse(traced.jaxpr, traced.in_labels, traced.out_labels, traced.tied, traced.donated), options)
    clock.lap("graph")
    resharder, beside = Resharder(mesh, cluster), 1.0 - cluster.overlap * options.overlap
    if options.search == "recursive":
        found = _recursive(graph, resharder, options, beside)
        clock.lap("solve")
        if found:
            return _planned(traced, found[0], judged(*found, beside, beside)[0], options, beside, clock)
    space = make_space(graph, mesh, cluster)
    clock.lap("strategies")
    allowed = allowed_strategies(space, options=options)
    if options.thrift:
        options = replace(options, memory=_thrifty(functools.partial(build, space, resharder, allowed=allowed), options))

    @functools.lru_cache(maxsize=2)
    def network(limit: float | None, waiting: float, crowds: Crowds | None) -> Network:
        made = build(space, resharder, limit, allowed, charges=options.charges, waiting=waiting, crowds=crowds)
        clock.lap("network")
        return made

    @functools.cache
    def users(limit: float | None, waiting: float) -> tuple[int, ...]:
        """The states that the program's own constraints ask for."""
        kept = allowed_strategies(space, options=replace(options, constraints="keep"))
        return propagate(build(space, resharder, limit, kept, waiting=waiting).problem).states

    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def over() -> bool:
        return left() == 0.0

    def search(at: Network, before: tuple[int, ...], most: float = np.inf) -> Solution:
        limit = at.problem.limit

        def fits(states: tuple[int, ...]) -> bool:
            return limit is None or at.problem.peak(states) <= limit

        presolved = presolve(at.problem, tie=True)
        wanted = users(limit, at.waiting) if options.constraints == "hint" else ()
        known = [(at.problem.objective(states) if states and fits(states) else np.inf, states) for states in (wanted, before)]
        again = options.search != "propagation" and known[-1][0] < np.inf  # the plan before is hint enough
        hint = Solution("feasible", (), np.inf, 0.0) if again else propagate(at.problem, presolved)
        for objective, states in known:
            if objective < hint.objective:
                hint = replace(hint, states=states, objective=objective)
        clock.lap("propagation")
        if options.search == "propagation":
            return hint if not hint.states or fits(hint.states) else solve(at.problem, hint=hint.states, time_limit=left())
        solution = solve(
            at.problem, hint=hint.states or None, cutoff=most, time_limit=left(), progress=options.progress, presolved=presolved
        )
        many = sum(n > 1 for _, n in mesh) >= MANY_AXES
        if solution.status in ("feasible", "fallback") and many and options.search != "recursive" and not over():
            solution = _axis_by_axis(at, solution, graph, resharder, replace(options, memory=limit))
        if solution.status == "fallback" and not solution.states and over():  # better than an error
            states = lowest(at.problem)
            if states and fits(states):
                solution = replace(solution, states=states, objective=at.problem.objective(states))
        clock.lap("solve")
        return solution

    def apart(at: Network, alike: tuple[int, ...]) -> Solution:
        """Repeated layers each on their own, where that pays; of many ops only where the limit makes layers that are alike costly."""
        paid, few = at.problem.objective(alike), len(alike) <= APART_OPS
        found = Solution("fallback", (), np.inf, 0.0)
        if few or solve(replace(at.problem, usages=(), limit=None), time_limit=left()).objective < paid:
            own = solve(replace(at.problem, ties=()), hint=alike, time_limit=left(), work_limit=APART_WORK)
            proven = own.status == "optimal" and own.objective == paid
            found = own if proven or own.objective < (1 - ALIKE) * paid else found
        clock.lap("solve")
        return found

    loose = None if options.search == "propagation" else apart

    def settle(limit: float | None) -> tuple[Network, Solution]:
        return settled(functools.partial(network, limit), search, loose, lambda network: lowest(network.problem), beside, over)

    limit = options.memory
    roomy = limit is not None and whole_bytes(space) <= limit  # copies need not be told from originals, which takes longer
    found, solution = settle(None if roomy else limit)
    if limit is not None and roomy and solution.states:
        fits, limited = found.peak(solution.states) <= limit, replace(found, problem=replace(found.problem, limit=limit))
        found, solution = (limited, solution) if fits else settle(limit)
    if not solution.states or not np.isfinite(solution.objective):
        states = leanest(found.problem)
        raise ShardingError(does_not_fit(network(limit, found.waiting, found.moved(states)) if states else found, options))
    return _planned(traced, found, solution, options, beside, clock)


def _thrifty(network: Callable[..., Network], options: Options) -> float:
    """The budget between what the fastest plan needs and what the leanest does."""

    def peak(found: Network, states: tuple[int, ...]) -> float:
        return network(limit=found.problem.limit, crowds=found.moved(states)).peak(states)

    free = network(limit=None)
    fastest = peak(free, solve(free.problem).states)
    told = network(limit=fastest)
    least = peak(told, leanest(told.problem))
    budget = fastest - options.thrift * max(0.0, fastest - least)
    return budget if options.memory is None else min(budget, options.memory)


def _recursive(graph: Graph, resharder: Resharder, options: Options, waiting: float) -> tuple[Network, Solution] | None:
    return recursive(graph, resharder, options.memory, functools.partial(allowed_strategies, options=options), waiting)


def _axis_by_axis(network: Network, solution: Solution, graph: Graph, resharder: Resharder, options: Options) -> Solution:
    """The better of an answer without a proof and what recursive search finds."""
    found = _recursive(graph, resharder, options, network.waiting)
    states = network.restated(found[0], found[1].states) if found else ()
    objective = network.problem.objective(states) if states else np.inf
    fits = bool(states) and (options.memory is None or network.problem.peak(states) <= options.memory)
    better = fits and (not solution.states or objective < solution.objective)
    return replace(solution, status="feasible", states=states, objective=objective) if better else solution


def _planned(traced: Traced, network: Network, solution: Solution, options: Options, beside: float, clock: _Clock) -> Planned:
    strategies = network.strategies(solution.states)
    decided = decide(network, strategies, network.kept(solution.states))
    clock.lap("decisions")
    return Planned(traced, network, solution, strategies, decided, options, beside, clock.seconds)


class _Clock:
    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    def lap(self, name: str):
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.start
        self.start = now


# ---- pins


Pin = tuple[str, PinDims]
"""Who says so, and what."""


def allowed_strategies(space: Space, settled: Collection[str] | None = None, *, options: Options) -> dict[int, np.ndarray]:
    """Per pinned op, which of its strategies remain; of its pins only what they say of the `settled` axes, by default all.

    Raises:
        ShardingError: on a pin that no strategy meets, saying why.
    """
    axes = space.mesh.axes if settled is None else tuple(settled)
    return {i: _allowed(space, i, wanted, axes) for i, wanted in sorted(_pins(space.graph, options).items())}


def _pins(graph: Graph, options: Options) -> dict[int, list[Pin]]:
    """By op, what is asked of its result.

    Raises:
        ShardingError: on a pin that matches no input.
    """
    pins: dict[int, list[Pin]] = {}
    for ops, by_number in ((graph.args, options.in_pins), (graph.outs, options.out_pins)):
        for n, dims in (by_number or {}).items():
            pins.setdefault(ops[n], []).append((f"{'in' if ops is graph.args else 'out'}_shardings", dims))
    for pattern, dims in (options.pins or {}).items():
        hits = [i for i in graph.args if matches(graph.ops[i].label, pattern)]
        if not hits:
            some = ", ".join(graph.ops[i].label for i in graph.args[:5])
            raise ShardingError(
                f"pin {pattern!r} matches no input of the step.\n  inputs: {some}{', ...' if len(graph.args) > 5 else ''}\n"
                "  ways out: '**' matches any number of path segments, '*' any part of one"
            )
        for i in hits:
            rank = len(graph.ops[i].outs[0].shape)
            pins.setdefault(i, []).append((f"pin {pattern!r}", pin_dims(dims, max(rank, len(dims)))))
    for i, op in enumerate(graph.ops):
        spec = _jax.constraint_spec(op.params) if op.primitive == "sharding_constraint" and options.constraints == "keep" else None
        if spec is not None:
            dims = tuple(FREE if e is FREE else e for e in pin_dims(spec, len(op.outs[0].shape)))
            pins.setdefault(i, []).append(("with_sharding_constraint", dims))
    return pins


def _told(op: Op, asked: Sequence[Pin]) -> str:
    """What is asked of an op's result, in words that are the same wherever the program lies."""
    label, place = f"{op.label}: " if op.label else "", f"{portable(op.source.file)}:{op.source.line}"
    return label + ", ".join(f"{_asker(op, who, place)} = {pin_text(dims)}" for who, dims in asked)


def _asker(op: Op, who: str, place: str) -> str:
    """Who asks for a layout of an op's result: a constraint by its place, which says who it is."""
    return f"{who} at {place}" if op.primitive == "sharding_constraint" else who


def _loosened(graph: Graph, options: Options) -> Graph:
    """The graph without the ties of inputs to outputs that are pinned to other layouts: what looks like state is none."""
    pins = _pins(graph, options)

    def agree(start: int, end: int) -> bool:
        both = ((x, y) for _, a in pins.get(start, ()) for _, b in pins.get(end, ()) for x, y in zip(a, b, strict=False))
        return all(x == y or FREE in (x, y) for x, y in both)

    return replace(graph, tied=tuple(pair for pair in graph.tied if agree(*pair)))


def _allowed(space: Space, i: int, wanted: list[Pin], axes: tuple[str, ...]) -> np.ndarray:
    op, layouts = space.graph.ops[i], space.choices[i].results[0]
    shape = tuple(op.outs[0].shape)
    what = f"{op.label or op.primitive} {op.outs[0].dtype}[{','.join(map(str, shape))}]"
    mask = np.ones(len(layouts), dtype=bool)
    wanted = [(_asker(op, who, str(op.source)), dims) for who, dims in wanted]
    for n, (who, dims) in enumerate(wanted):
        check_pin(f"{who} on {what}", dims, shape, space.mesh)
        before = mask
        known = [d if d == FREE else tuple(a for a in d if a in axes) for d in dims]
        mask = mask & np.array([all(d in (FREE, x) for d, x in zip(known, layout.dims, strict=True)) for layout in layouts])
        if not mask.any():
            if n and before.any():
                others = " and ".join(f"{w} = {pin_text(d)}" for w, d in wanted[: n + 1])
                raise ShardingError(f"conflicting pins on {what}: {others}.\n  way out: keep one of them")
            raise ShardingError(
                f"{who} on {what}: {pin_text(dims)} is no layout the planner can give it on mesh {space.mesh}.\n"
                f"  way out: axes of one dim in mesh order, each axis once"
            )
    return mask


def check_pin(who: str, dims: PinDims, shape: tuple[int, ...], mesh: MeshShape) -> None:
    """Raises ShardingError for a pin of the wrong rank, an axis the mesh lacks, or a dim that does not divide."""
    text = pin_text(dims)
    if len(dims) != len(shape):
        raise ShardingError(f"{who}: {text} has {len(dims)} entries, the array {len(shape)} dims.\n  way out: one entry per dim")
    seen: set[str] = set()
    for d, axes in enumerate(dims):
        if axes == FREE:
            continue
        for axis in axes:
            if axis not in mesh.axes:
                raise ShardingError(f"{who}: {text} names mesh axis {axis!r}, the mesh has {mesh}.\n  way out: one of {mesh.axes}")
            if axis in seen:
                raise ShardingError(f"{who}: {text} uses mesh axis {axis!r} twice.\n  way out: each axis on one dim")
            seen.add(axis)
        if shape[d] % mesh.size(*axes):
            raise ShardingError(
                f"{who}: {text} splits dim {d} of size {shape[d]} over {mesh.size(*axes)} devices, which does not divide.\n"
                f"  way out: pad dim {d} to {-(-shape[d] // mesh.size(*axes)) * mesh.size(*axes)}, or leave it unsplit"
            )


def pin_dims(spec, rank: int) -> PinDims:
    """Entries of a PartitionSpec as a pin; a spec shorter than the rank leaves the last dims unsplit, as in JAX."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(FREE if e is _jax.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def pin_text(dims: PinDims) -> str:
    def one(d):
        return "*" if d == FREE else "None" if not d else repr(d[0]) if len(d) == 1 else repr(tuple(d))

    return f"P({', '.join(map(one, dims))})"


def matches(label: str, pattern: str) -> bool:
    """Whether a path ends in what `pattern` describes: '**' any segments, '*' and '?' inside one segment."""

    def match(path: list[str], want: list[str]) -> bool:
        if not want:
            return not path
        if want[0] == "**":
            return any(match(path[n:], want[1:]) for n in range(len(path) + 1))
        return bool(path) and fnmatchcase(path[0], want[0]) and match(path[1:], want[1:])

    return match(label.split("/"), ["**", *pattern.strip("/").split("/")])


# ---- when nothing fits


def does_not_fit(network: Network, options: Options) -> str:
    """The least memory possible, where its peak is, what is in it, and ways out."""
    problem, graph = network.problem, network.space.graph
    if problem.limit is None:
        return "no plan exists: the pins contradict each other.\n  way out: drop one of them"
    states = lowest(problem)
    if not states:
        return "no plan exists: the pins contradict each other.\n  way out: drop one of them"
    memory = problem.memory(states)
    step, peak = int(memory.argmax()), float(memory.max())
    if peak <= problem.limit:
        return (
            f"no plan was found within the search's limit, though {gib(problem.limit)} GiB per device are enough.\n"
            f"  ways out: time_limit=600, or memory={peak * 1.1:.3g}"
        )
    op = graph.ops[min(step, len(graph.ops) - 1)]
    parts = ", ".join(f"{k} {gib(b)}" for k, b in memory_by_category(network, states, step).items() if b > 0.005 * peak)
    return (
        f"no plan fits {gib(problem.limit)} GiB per device on mesh {network.space.mesh}.\n"
        f"  least possible: {gib(peak)} GiB, at {op.source} in {op.source.function or op.primitive}   [{parts}]\n"
        f"  ways out: a larger mesh, donate_argnums for the state, jax.checkpoint around {op.source}, "
        f"or memory={peak * 1.02:.3g}"
    )


def leanest(problem: Problem) -> tuple[int, ...]:
    """The states that hold the fewest bytes on average over the step, whatever they cost; () when none go together."""
    bare = problem.map_costs(indicator_costs)
    costs = list(bare.costs)
    for u in problem.usages:
        costs[u.node] = costs[u.node] + np.rint(u.bytes * (u.hi - u.lo) / 1024)
    return solve(replace(bare, costs=tuple(costs), limit=None)).states


def lowest(problem: Problem) -> tuple[int, ...]:
    """The states of the lowest peak found, whatever they cost; () when none go together."""
    found = (leanest(problem), minimize_peak(replace(problem, limit=None)).states)
    return min((states for states in found if states), key=problem.peak, default=())


def gib(n: float) -> str:
    return f"{n / 2**30:.3g}"


HELD = frozenset({"parameters", "optimizer", "constants", "batch", "gathered"})
COPIES = ALIASES | {"loop_slice"}


def categories(graph: Graph) -> dict[int, str]:
    """Per op that makes arrays, what they are to a person; "gathered" is what is fetched from inputs for their readers."""
    state = {a for a, _ in graph.tied}
    out = {}
    for i, op in enumerate(graph.ops):
        if op.primitive == "arg":
            used = {graph.ops[at].phase for at, _ in graph.values[op.outputs[0]].consumers if graph.ops[at].primitive != "out"}
            kind = "parameters" if used & {"forward", "backward"} or not used else "optimizer"
            out[i] = kind if i in state else "batch"
        elif op.primitive == "const":
            out[i] = "constants"
        elif op.primitive in COPIES and op.inputs[0] is not None and out[graph.values[op.inputs[0]].producer[0]] in HELD:
            out[i] = "gathered"
        else:
            out[i] = {"forward": "activations", "backward": "gradients", "update": "update"}[op.phase]
    return out


def memory_by_category(network: Network, states, time: int) -> dict[str, float]:
    """Bytes per device alive at one time step, by category."""
    kinds, out = categories(network.space.graph), {}
    for i, lo, hi, held in network.holdings(states):
        if lo <= time < hi and held:
            out[kinds[i]] = out.get(kinds[i], 0.0) + held
    return dict(sorted(out.items(), key=lambda item: -item[1]))
