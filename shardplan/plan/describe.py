"""The plan of what planning found: pytree paths, source lines, seconds and bytes in place of numbers of nodes and states.

A copy of an array for several readers is no op of the user's: its reshards are listed at its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shardplan.costs.halo_exchange import Exchange, exchanged
from shardplan.costs.memory_categories import categories, memory_by_category
from shardplan.costs.network import CostNetwork
from shardplan.costs.step_seconds import PS
from shardplan.files import portable, source_line
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.conflicts import AGAINST
from shardplan.plan.data import Leaf, MemoryReport, PlanDecision, PlannedCollective, PlannedReshard, SourceLine
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.strategies.enumerate import PARTIAL
from shardplan.units import format_array

PROFILE_POINTS = 160


def describe(planned: Planned, context=None) -> Plan:
    """The plan of what was planned.

    Args:
        planned: of the search's last round.
        context: what `Plan.fix`, `Plan.check` and the pytree views need.
    """
    space, graph = planned.space, planned.graph
    kinds = categories(graph)
    parts = planned.network.step_seconds(planned.solution.states)
    total = parts.total(planned.exposed_fraction) / PS
    status = planned.solution.status
    assert status != "infeasible"
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
        status=status,
        gap=float(planned.solution.gap),
        symmetric_layers=planned.solution.tied,
        memory_report=_memory(planned.network, planned.solution.states),
        search=planned.options.search,
        fingerprint=planned.traced.fingerprint(),
        donated=planned.traced.donated_names(),
        lines=tuple(_lines(planned)),
        unknown=space.unknown,
    ).with_context(context)


def _lines(planned: Planned) -> Iterator[SourceLine]:
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


# ---- decisions


def _decisions(planned: Planned) -> Iterator[PlanDecision]:
    space, seen = planned.space, {}
    program = ((i, op) for i, op in enumerate(planned.graph.ops) if not op.traits.copy)
    for number, (i, op) in enumerate(program):
        file = portable(op.source.file)
        name = (file, op.source.line, op.primitive, op.phase)
        occurrence = seen[name] = seen.get(name, -1) + 1
        decided = planned.decisions.get(op.path)
        reshards = (*_reshards(planned, i), *_halo_exchanges(planned, i))
        if decided is None and not reshards:
            continue
        runs = op.reads if op.traits.border else op.runs
        yield PlanDecision(
            op=number,
            file=file,
            line=op.source.line,
            function=op.source.function,
            primitive=op.primitive,
            occurrence=occurrence,
            phase=op.phase,
            strategy=_strategy(planned, i),
            operand_layouts=decided.reads if decided else (),
            copy_numbers=decided.copies if decided else (),
            result_layouts=decided.results if decided else (),
            result_type=format_array(op.outs[0]) if op.outs and hasattr(op.outs[0], "shape") else "",
            reshards=reshards,
            seconds=float(space.seconds[i][planned.strategies[i]]) * op.runs / runs,
            runs=float(runs),
        )


def _strategy(planned: Planned, i: int) -> Mapping[str, str]:
    """Mesh axis -> the factor that it shards."""
    factors = planned.space.strategies[i].factors[planned.strategies[i]]
    found = zip(planned.space.mesh.axes, factors, strict=True)
    return {axis: "partial sums" if x == PARTIAL else x for axis, x in found if x is not None}


def _reshards(planned: Planned, i: int) -> Iterator[PlannedReshard]:
    graph = planned.graph
    for x in operand_reshards(planned, i):
        v = graph.ops[x.op].inputs[x.operand]
        assert v is not None
        producer = graph.ops[graph.maker(planned.space.accumulated_sums.get(v, v))].source
        conflict = any(step.kind in AGAINST for step in x.steps)
        yield PlannedReshard(
            operand=x.shown,
            array=format_array(graph.values[v]),
            before=planned.result_layout(*graph.values[v].producer),
            after=planned.operand_layout(x.op, x.operand),
            collectives=tuple(map(_collective, x.steps)),
            pins=planned.conflicts.get((x.op, x.operand), ()) if conflict else (),
            producer_source=f"{portable(producer.file)}:{producer.line}" if producer.file else "",
        )


def _halo_exchanges(planned: Planned, i: int) -> Iterator[PlannedReshard]:
    op, space = planned.graph.ops[i], planned.space
    for x in exchanged(op, space.rules[i], space.strategies[i], planned.strategies[i], space.mesh, space.cluster):
        layout = planned.operand_layout(i, x.operand)
        yield PlannedReshard(x.operand, format_array(op.ins[x.operand]), layout, layout, (_collective(x),))


def _collective(step: ReshardStep | Exchange) -> PlannedCollective:
    return PlannedCollective(step.kind, tuple(step.axes), float(step.bytes), float(step.seconds))  # pyright: ignore[reportArgumentType]


class OperandReshard(NamedTuple):
    """A reshard that is listed at an op.

    Attributes:
        shown: operand of that op.
        op, operand: the operand that is resharded, of that op or of a copy that it reads.
        steps: one after the other.
    """

    shown: int
    op: int
    operand: int
    steps: tuple[ReshardStep, ...]


def operand_reshards(planned: Planned, i: int) -> Iterator[OperandReshard]:
    """Reshards of the operands of op i, those of a copy at its first reader."""
    for k, v in enumerate(planned.graph.ops[i].inputs):
        if v is not None:
            yield from _chain(planned, v, i, k, k)


def _chain(planned: Planned, v: int, reader: int, operand: int, shown: int) -> Iterator[OperandReshard]:
    if reader in planned.retained:
        return
    value = planned.graph.values[v]
    copy = planned.graph.ops[value.producer[0]]
    if copy.traits.copy and value.consumers[0] == (reader, operand):
        source = copy.inputs[0]
        assert source is not None
        yield from _chain(planned, source, value.producer[0], 0, shown)
    steps = planned.network.path(v, planned.result_layout(*value.producer), planned.operand_layout(reader, operand))
    if steps:
        yield OperandReshard(shown, reader, operand, steps)


# ---- memory


def _memory(network: CostNetwork, states) -> MemoryReport:
    graph, limit = network.space.graph, network.problem.limit
    allocations = network.allocations(states)
    horizon = max((end for *_, end, _ in allocations), default=0)
    if not horizon:
        return MemoryReport(0.0, limit, "", {})
    kinds = categories(graph)
    names = sorted(set(kinds.values()))
    number = {name: n for n, name in enumerate(names)}
    change = np.zeros((len(names), horizon + 1))
    for i, start, end, held in allocations:
        change[number[kinds[i]], start] += held
        change[number[kinds[i]], end] -= held
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
