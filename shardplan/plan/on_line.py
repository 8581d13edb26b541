"""What a plan decided on one line of the user's program: the reshards and the strategies of its ops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from shardplan.costs.options import ReshardKey
from shardplan.ir.graph import Source
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.planned import Planned


def reshards_on_line(planned: Planned, line: str) -> Iterator[tuple[ReshardKey, tuple[ReshardStep, ...], float]]:
    """(key, steps, seconds per training step) of the reshards on a line 'file:line', reductions on the line of the partial sum."""
    graph = planned.graph
    for i, op in enumerate(graph.ops):
        for _, reader, operand, steps in planned.reshards(i) if not op.traits.copy else ():
            v = graph.ops[reader].inputs[operand]
            assert v is not None
            reduces = any(s.kind in ("all-reduce", "reduce-scatter") for s in steps)
            if _is_on(graph.ops[graph.maker(v)].source if reduces else op.source, line):
                key = reader, operand, planned.result_layout(*graph.values[v].producer), planned.operand_layout(reader, operand)
                yield key, steps, graph.ops[reader].reads * sum(s.seconds for s in steps)


def strategies_on_line(planned: Planned, line: str) -> list[tuple[int, int]]:
    """(op, strategy) of the unfused ops on a line 'file:line'; where all are fused, of those that write an array to memory."""
    graph, space = planned.graph, planned.space
    here = [i for i, op in enumerate(graph.ops) if _is_on(op.source, line) and not op.traits.copy]
    kernels = [i for i in here if space.rules[i].fusion == "none" and not graph.ops[i].traits.border]
    ops = kernels or [i for i in here if any(space.materialised[v] for v in graph.ops[i].outputs)]
    return [(i, planned.strategies[i]) for i in ops]


def _is_on(source: Source, line: str) -> bool:
    """Whether an op's source is 'file:line', whatever the folder."""
    name, _, number = PurePath(line).name.rpartition(":")
    return PurePath(source.file).name == name and str(source.line) == number
