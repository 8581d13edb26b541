"""What planning found, told as a `Plan`: paths, source lines, seconds and bytes instead of numbers of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from shardplan.costs.memory_categories import categories, memory_by_category
from shardplan.costs.network import CostNetwork
from shardplan.costs.space import exchanged
from shardplan.costs.tables import PS
from shardplan.files import portable, source_line
from shardplan.ir.graph import BORDER, Op
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.data import Leaf, MemoryReport, PlanDecision, PlannedCollective, PlannedReshard, SourceLine
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.propagation.conflicts import AGAINST
from shardplan.strategies.enumerate import PARTIAL

PROFILE_POINTS = 160


def describe(planned: Planned, context=None) -> Plan:
    """The plan of what was planned; `context` is what `Plan.fix` and the pytree views need."""
    space, graph = planned.space, planned.graph
    kinds = categories(graph)
    parts = planned.network.step_seconds(planned.solution.states)
    total = parts.total(planned.exposed_fraction) / PS
    return Plan(
        mesh=space.mesh,
        cluster=space.cluster.name,
        inputs=tuple(_leaf(planned, i, kinds[i]) for i in graph.args),
        outputs=tuple(_leaf(planned, i, "output") for i in graph.outs),
        decisions=tuple(_decisions(planned)),
        seconds={
            "compute": parts.compute / PS,
            "communication": (parts.blocking + parts.background) / PS,
            "hidden": parts.hidden(planned.exposed_fraction) / PS,
            "total": total,
            "bound": total * (1 - planned.solution.gap),
        },
        status=planned.solution.status,
        gap=float(planned.solution.gap),
        symmetric_layers=planned.solution.tied,
        memory_report=_memory(planned.network, planned.solution.states),
        search=planned.options.search,
        fingerprint=planned.traced.fingerprint(),
        donated=planned.traced.donated_names(),
        lines=tuple(_lines(planned)),
        unknown=space.unknown,
    ).with_context(context)


def _lines(planned: Planned):
    seconds: dict[tuple[str, int], float] = {}
    problem = planned.network.problem
    for op, cost, state in zip(planned.graph.ops, problem.costs, planned.solution.states, strict=True):
        if cost[state]:
            at = (op.source.file, op.source.line)
            seconds[at] = seconds.get(at, 0.0) + float(cost[state])
    for (file, line), ps in seconds.items():
        yield SourceLine(portable(file), line, source_line(file, line), ps / PS)


def _leaf(planned: Planned, i: int, kind: str) -> Leaf:
    op = planned.graph.ops[i]
    aval = op.outs[0]
    return Leaf(op.label, tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "token")), planned.result_layout(i), kind)


def _decisions(planned: Planned):
    graph, space = planned.graph, planned.space
    number, seen = -1, {}
    for i, op in enumerate(graph.ops):
        if op.primitive == "share":
            continue
        number += 1
        file = portable(op.source.file)
        name = (file, op.source.line, op.primitive, op.phase)
        occurrence = seen[name] = seen.get(name, -1) + 1
        decided = planned.decisions.get(op.path)
        reshards = tuple(_moves(planned, i))
        if decided is None and not reshards:
            continue
        runs = op.runs if op.primitive not in BORDER else op.reads
        yield PlanDecision(
            file=file,
            line=op.source.line,
            function=op.source.function,
            primitive=op.primitive,
            occurrence=occurrence,
            phase=op.phase,
            strategy=_strategy(planned, i),
            operand_layouts=decided.reads if decided else (),
            result_layouts=decided.results if decided else (),
            reshards=reshards,
            seconds=float(space.seconds[i][planned.strategies[i]]) * op.runs / runs,
            runs=float(runs),
            result_type=_type(op),
            op=number,
            copy_numbers=decided.copies if decided else (),
        )


def _moves(planned: Planned, i: int):
    for shown, reader, operand, steps in fetches(planned, i):
        v = planned.graph.ops[reader].inputs[operand]
        assert v is not None
        value = planned.graph.values[v]
        before, after = planned.result_layout(*value.producer), planned.operand_layout(reader, operand)
        collectives = tuple(PlannedCollective(s.kind, tuple(s.axes), float(s.bytes), float(s.seconds)) for s in steps)
        made = planned.graph.ops[planned.graph.maker(planned.space.accumulated_sums.get(v, v))].source
        place = f"{portable(made.file)}:{made.line}" if made.file else ""
        between = planned.conflicts.get((reader, operand), ())
        pins = between if any(c.kind in AGAINST for c in collectives) else ()
        yield PlannedReshard(shown, f"{value.dtype}[{','.join(map(str, value.shape))}]", before, after, collectives, pins, place)
    op, space = planned.graph.ops[i], planned.space
    for x in exchanged(op, space.rules[i], space.strategies[i], planned.strategies[i], space.mesh, space.cluster):
        layout, aval = planned.operand_layout(i, x.operand), op.ins[x.operand]
        kind = PlannedCollective(x.kind, x.axes, float(x.bytes), float(x.seconds))
        yield PlannedReshard(x.operand, f"{aval.dtype}[{','.join(map(str, aval.shape))}]", layout, layout, (kind,))


Fetch = tuple[int, int, int, tuple[ReshardStep, ...]]


def fetches(planned: Planned, i: int) -> Iterator[Fetch]:
    """Reshards at an op: (operand of op i, op that reshards, its operand, how); that of a shared copy stands at its first reader."""
    for k, v in enumerate(planned.graph.ops[i].inputs):
        if v is not None:
            yield from _fetch(planned, v, i, k, k)


def _fetch(planned: Planned, v: int, reader: int, operand: int, shown: int) -> Iterator[Fetch]:
    if reader in planned.retained:
        return
    graph = planned.graph
    value = graph.values[v]
    copy = graph.ops[value.producer[0]]
    if copy.primitive == "share" and value.consumers[0] == (reader, operand):
        source = copy.inputs[0]
        assert source is not None
        yield from _fetch(planned, source, value.producer[0], 0, shown)
    before, after = planned.result_layout(*value.producer), planned.operand_layout(reader, operand)
    steps = planned.network.path(v, before, after)
    if steps:
        yield shown, reader, operand, steps


def _strategy(planned: Planned, i: int) -> Mapping[str, str]:
    chosen = planned.space.strategies[i].factors[planned.strategies[i]]
    mesh = planned.space.mesh
    return {axis: "partial sums" if x == PARTIAL else x for axis, x in zip(mesh.axes, chosen, strict=True) if x is not None}


def _type(op: Op) -> str:
    if not op.outs or not hasattr(op.outs[0], "shape"):
        return ""
    return f"{op.outs[0].dtype}[{','.join(map(str, op.outs[0].shape))}]"


def _memory(network: CostNetwork, states) -> MemoryReport:
    graph, limit = network.space.graph, network.problem.limit
    holdings = network.allocations(states)
    horizon = max((hi for *_, hi, _ in holdings), default=0)
    if not horizon:
        return MemoryReport(0.0, limit, "", {})
    kinds = categories(graph)
    names = sorted(set(kinds.values()))
    number = {name: n for n, name in enumerate(names)}
    change = np.zeros((len(names), horizon + 1))
    for i, lo, hi, held in holdings:
        change[number[kinds[i]], lo] += held
        change[number[kinds[i]], hi] -= held
    over_time = np.cumsum(change, axis=1)[:, :-1]
    profile = over_time.sum(axis=0)
    peak = int(profile.argmax())
    op = graph.ops[min(peak, len(graph.ops) - 1)]
    points = np.unique(np.append(np.linspace(0, horizon - 1, PROFILE_POINTS).astype(int), peak))
    return MemoryReport(
        peak=float(profile[peak]),
        limit=None if limit is None else float(limit),
        where=f"{op.source}" + (f" in {op.source.function}" if op.source.function else ""),
        at_peak=memory_by_category(network, states, peak),
        profile=tuple({n: float(over_time[number[n], t]) for n in names if over_time[number[n], t] > 0} for t in points),
    )
