"""A plan for other viewers: its predicted schedule as a Chrome trace (Perfetto), its program as Model Explorer's graph JSON.

Perfetto         https://ui.perfetto.dev          Trace Event Format, "JSON object format"; times in microseconds
Model Explorer   ai.google.dev/edge/model-explorer  its own JSON: graphs of nodes with incoming edges, folded by namespace
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardplan.files import portable
from shardplan.ir.graph import Graph, Op
from shardplan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.schedule import Span, StepSchedule
from shardplan.units import clean, format_array, format_bytes, format_seconds

LANES = {"compute": 1, "network": 2, "phase": 3}
"""Thread of the trace -> its number."""


def perfetto(plan: Plan) -> str:
    """The predicted schedule as a Chrome trace: a compute and a network thread, phases, exposed communication, memory as a counter."""
    schedule = StepSchedule(plan.context.planned)
    names = [_meta("process_name", 0, f"plan for {plan.mesh}, predicted for one device")]
    names += [_meta("thread_name", number, lane) for lane, number in LANES.items()]
    spans = [_event(schedule, x) for x in schedule.spans]
    bands = [_complete(phase, "phase", start, end - start, {}) for phase, start, end in schedule.bands]
    return json.dumps({"traceEvents": [*names, *bands, *spans, *_memory(schedule)], "displayTimeUnit": "ms"}, separators=(",", ":"))


def _meta(what: str, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": number, "args": {"name": clean(name)}}


def _complete(name: str, lane: str, start_s: float, seconds: float, args: dict[str, Any], category: str = "") -> dict[str, Any]:
    times = {"ts": round(1e6 * start_s, 4), "dur": round(1e6 * seconds, 4)}
    return {"ph": "X", "name": clean(name), "cat": category or lane, "pid": 1, "tid": LANES[lane], **times, "args": args}


def _event(schedule: StepSchedule, x: Span) -> dict[str, Any]:
    file, line = schedule.place(x.op)
    args: dict[str, Any] = {"line": f"{clean(file)}:{line}"} if file else {}
    if x.lane == "network":
        args |= {"arrays": [*map(clean, x.arrays)], "number of arrays": x.parts, "sent bytes": x.sent_bytes}
        args["exposed µs"] = round(1e6 * x.exposed_s, 4)
    elif x.parts > 1:
        args["ops"] = x.parts
    return _complete(x.name, x.lane, x.start_s, x.seconds, args, x.phase)


def _memory(schedule: StepSchedule) -> Iterator[dict[str, Any]]:
    """Bytes by category whenever they change, in program order."""
    held: dict[str, float] = dict.fromkeys(sorted({x.kind for x in schedule.buffers}), 0.0)
    changes = [(x.start_s, x.first, x.kind, x.bytes) for x in schedule.buffers]
    changes += [(x.end_s, x.last, x.kind, -x.bytes) for x in schedule.buffers]
    changes.sort(key=lambda x: x[:2])
    for n, (at, _, kind, change) in enumerate(changes):
        held[kind] += change
        if n + 1 == len(changes) or changes[n + 1][0] > at:
            yield {"ph": "C", "name": "memory", "pid": 1, "ts": round(1e6 * at, 4), "args": {k: round(v) for k, v in held.items()}}


# ---- Model Explorer


def model_explorer(plan: Plan) -> str:
    """The program with the plan's strategies as Model Explorer's JSON: a node per op, folded by phase, file and line."""
    planned, seconds = plan.context.planned, StepSchedule(plan.context.planned).seconds_of_ops()
    graph, reshards = planned.graph, {planned.user_ops[d.op]: d.reshards for d in plan.decisions}
    nodes = []
    for i in planned.user_ops:
        op = graph.ops[i]
        attributes = {
            "line": f"{portable(op.source.file)}:{op.source.line}" if op.source.file else "",
            "strategy": _strategy(planned, i),
            "seconds": format_seconds(float(seconds[i])) if seconds[i] else "",
            "runs per step": f"{op.runs:g}" if op.runs != 1 else "",
        }
        for r in reshards.get(i, ()):
            kinds = ", ".join(f"{c.kind} over {', '.join(c.axes)}" for c in r.collectives)
            attributes[f"operand {r.operand}"] = f"{kinds}: {r.before} -> {r.after}, {format_bytes(r.sent_bytes(plan.mesh))} sent"
        nodes.append(
            {
                "id": str(i),
                "label": clean(op.label or op.primitive),
                "namespace": _namespace(op),
                "incomingEdges": [*_edges(graph, op)],
                "attrs": [{"key": key, "value": clean(value)} for key, value in attributes.items() if value],
                "outputsMetadata": [_output(planned, i, r) for r in range(len(op.outputs))],
            }
        )
    return json.dumps({"label": f"plan for {plan.mesh}", "graphs": [{"id": clean(f"step on {plan.mesh}"), "nodes": nodes}]})


def _strategy(planned: Planned, i: int) -> str:
    sharded = planned.space.strategies[i].sharded(planned.strategies[i], planned.space.mesh)
    return ", ".join(f"{axis}: {x}" for axis, x in sharded.items())


def _namespace(op: Op) -> str:
    if op.traits.step_input or op.traits.step_output:
        return "inputs" if op.traits.step_input else "outputs"
    place = portable(op.source.file).replace("/", "⁄") if op.source.file else "no line known"
    return clean(f"{op.phase}/{place}/line {op.source.line}")


def _edges(graph: Graph, op: Op) -> Iterator[dict[str, str]]:
    for k, v in enumerate(op.inputs):
        if v is not None:
            maker, r = graph.values[graph.original(v)].producer
            yield {"sourceNodeId": str(maker), "sourceNodeOutputId": str(r), "targetNodeInputId": str(k)}


def _output(planned: Planned, i: int, r: int) -> dict[str, Any]:
    text = format_array(planned.graph.ops[i].outs[r]), str(planned.result_layout(i, r))
    return {"id": str(r), "attrs": [{"key": key, "value": clean(x)} for key, x in zip(("tensor_shape", "layout"), text, strict=True)]}
