"""The `Plan` of a planning result: paths, source lines, seconds and bytes in place of numbers of nodes and states.

A copy of an array for several readers is no op of the user's: its reshards are listed at its first reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from shardplan.costs.decided_memory import DecidedMemory
from shardplan.costs.halo_exchange import Exchange
from shardplan.costs.memory_categories import memory_by_category
from shardplan.costs.states import PS
from shardplan.files import portable
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.data import Leaf, MemoryReport, PlanDecision, PlannedCollective, PlannedReshard, SourceLine
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.program import result_type, source_lines
from shardplan.plan.seconds_range import seconds_range
from shardplan.strategies.enumerate import PARTIAL
from shardplan.units import format_array, to_digits
from shardplan.xla_model.compiler_options import Flags, XlaOptions

AGAINST = ("all-gather", "all-to-all", "collective-permute")
"""Collectives between shardings that contradict each other; the other kinds complete partial sums."""
PROFILE_POINTS = 160
"""Times of the memory profile: one per few pixels of its chart."""


def describe(planned: Planned, context=None, compiler_options: Flags | None = None) -> Plan:
    """The plan of a planning result.

    Args:
        planned: what was found.
        context: what `Plan.fix`, `Plan.check` and the pytree views need.
        compiler_options: those that the plan is compiled with on GPUs; their bytes are in its peak.
    """
    flags = dict(compiler_options or {})
    space, graph = planned.space, planned.graph
    kinds = planned.categories
    line = planned.timeline
    status = planned.solution.status
    program = planned.traced.identity()
    low_s, high_s, unmeasured = seconds_range(planned)
    assert status != "infeasible"
    return Plan(
        mesh=space.mesh,
        cluster=space.cluster.name,
        inputs=tuple(_leaf(planned, i, kinds[i]) for i in graph.args),
        outputs=tuple(_leaf(planned, i, "output") for i in graph.outs),
        decisions=tuple(_decisions(planned)),
        seconds={
            "compute": to_digits(line.compute_s),
            "communication": to_digits(line.collective_s),
            "hidden": to_digits(line.hidden_s),
            "interference": to_digits(line.interference_s),
            "total": to_digits(line.total_s),
            "bound": to_digits(line.total_s * (1 - planned.solution.gap)),
            "low": to_digits(low_s),
            "high": to_digits(high_s),
        },
        status=status,
        gap=to_digits(planned.solution.gap),
        symmetric_layers=planned.solution.tied,
        memory_report=_memory(planned, XlaOptions.of(flags), kinds),
        search=planned.options.search,
        fingerprint=program.fingerprint,
        products=program.products,
        jax=jax.__version__,
        donated=planned.traced.donated_names(),
        compiler_options=flags,
        lines=_lines(planned),
        unknown=space.unknown,
        unmeasured=unmeasured,
    ).with_context(context)


def _lines(planned: Planned) -> tuple[SourceLine, ...]:
    seconds: dict[tuple[str, int], float] = {}
    ops, network, states = planned.graph.ops, planned.network, planned.solution.states
    around = ((ops[edge.consumer], ps) for edge, ps in network.edge_kernels(states))
    for op, ps in (*zip(ops, network.kernel_ps(states), strict=True), *around):
        if ps:
            at = (op.source.file, op.source.line)
            seconds[at] = seconds.get(at, 0.0) + ps / PS
    return source_lines(planned.graph, {at: to_digits(x) for at, x in seconds.items()})


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
        if i in planned.kept:
            if (known := planned.kept[i]) is not None:
                yield known
            continue
        decided, reshards = planned.decisions.get(op.path), tuple(_reshards(planned, i))
        if decided is None and not reshards:
            continue
        s = planned.strategies[i]
        sharded = space.strategies[i].sharded(s, space.mesh)
        runs = op.reads if op.traits.border else op.runs
        yield PlanDecision(
            op=number,
            file=file,
            line=op.source.line,
            function=op.source.function,
            primitive=op.primitive,
            occurrence=occurrence,
            phase=op.phase,
            strategy={axis: "partial sums" if x == PARTIAL else x for axis, x in sharded.items()},
            operand_layouts=decided.reads if decided else (),
            copy_numbers=decided.copies if decided else (),
            result_layouts=decided.results if decided else (),
            result_type=result_type(op),
            reshards=reshards,
            seconds=to_digits(float(space.kernel_seconds[i][s]) * op.runs / runs),
            runs=float(runs),
        )


def _reshards(planned: Planned, i: int) -> Iterator[PlannedReshard]:
    """Reshards at the operands of an op, then the halo exchanges of its own."""
    graph, space = planned.graph, planned.space
    for shown, v, (reader, operand, before, after), steps in planned.operand_reshards(i):
        producer = graph.ops[graph.maker(space.accumulated_sums.get(v, v))].source
        conflict = any(step.kind in AGAINST for step in steps)
        yield PlannedReshard(
            operand=shown,
            array=format_array(graph.values[v]),
            before=before,
            after=after,
            collectives=tuple(map(_collective, steps)),
            pins=planned.conflicts.get((reader, operand), ()) if conflict else (),
            producer_source=f"{portable(producer.file)}:{producer.line}" if producer.file else "",
        )
    for x in planned.exchanges.get(i, ()):
        layout = planned.operand_layout(i, x.operand)
        yield PlannedReshard(x.operand, format_array(graph.ops[i].ins[x.operand]), layout, layout, (_collective(x),))


def _collective(step: ReshardStep | Exchange) -> PlannedCollective:
    seconds = to_digits(step.seconds)
    return PlannedCollective(step.kind, tuple(step.axes), float(step.bytes), seconds)  # pyright: ignore[reportArgumentType]


# ---- memory


def _memory(planned: Planned, options: XlaOptions, kinds: Mapping[int, str]) -> MemoryReport:
    graph, limit = planned.graph, planned.network.limit
    memory = DecidedMemory(planned.program(options))
    allocations = memory.allocations()
    horizon = max((end for *_, end, _ in allocations), default=0)
    if not horizon:
        return MemoryReport(0.0, limit, "", {})
    change = {kind: np.zeros(horizon + 1) for kind in sorted(set(kinds.values()))}
    for i, start, end, held in allocations:
        change[kinds[i]][start] += held
        change[kinds[i]][end] -= held
    live = {kind: np.cumsum(x)[:-1] for kind, x in change.items()}
    peak, op = memory.place_of_peak, graph.ops[memory.op_at_peak]
    points = np.unique(np.append(np.linspace(0, horizon - 1, PROFILE_POINTS).astype(int), peak))
    return MemoryReport(
        peak=memory.peak_bytes(),
        limit=None if limit is None else float(limit),
        where=f"{op.source}{f' in {op.source.function}' if op.source.function else ''}",
        at_peak=memory_by_category(kinds, allocations, peak),
        profile=tuple({kind: float(x[t]) for kind, x in live.items() if x[t] > 0} for t in points),
    )
