"""Plans, answers, differences and reports as JSON values, and a report as Markdown, for comments of continuous integration.

Seconds are of one step, bytes per device; sent bytes are those on the wire. Numbers have six significant digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from shardplan.plan import Plan, PlanDiff
from shardplan.plan.data import PlanDecision
from shardplan.plan.program import differences_of_plans
from shardplan.plan.travel import contract
from shardplan.plan.why import Why
from shardplan.units import clean, format_bytes, format_flops, format_memory, format_seconds
from shardplan.view import rows
from shardplan.xla.report.check import PlanReport, XlaReport
from shardplan.xla_model.facts import Fact

VIEWERS = {
    "perfetto": "write the predicted schedule as a Chrome trace, for ui.perfetto.dev",
    "model_explorer": "write the program with its strategies as JSON for Model Explorer",
}
"""Option -> its help; `Plan.to_...` writes the file."""

DIGITS = 6


def to_json(value: Any) -> str:
    """JSON text, indented."""
    return json.dumps(rounded(value), indent=2)


def rounded(value: Any) -> Any:
    """Floats of a JSON value with `DIGITS` significant digits; tuples as lists."""
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return int(short) if short == int(short) and abs(short) < 2**53 else short
    if isinstance(value, dict):
        return {str(name): rounded(x) for name, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, (list, tuple)) else value


def plan_values(plan: Plan, brief: bool = False) -> dict[str, Any]:
    """The contract of a plan, its figures and, unless `brief`, its inputs and collectives."""
    memory = plan.memory_report
    found: dict[str, Any] = {
        **contract(plan),
        "search": plan.search,
        "status": plan.status,
        "gap": plan.gap,
        "seconds": dict(plan.seconds),
        "sent_bytes": plan.comm_bytes,
        "memory": {"peak": memory.peak, "limit": memory.limit, "where": memory.where, "at_peak": dict(memory.at_peak)},
        "saves": plan.saving,
        "fingerprint": plan.fingerprint,
    }
    found["advice"] = [asdict(one) for one in plan.advice()]
    if brief:
        return found
    inputs = [
        {
            "path": x.path,
            "kind": x.kind,
            "shape": list(x.shape),
            "dtype": x.dtype,
            "spec": list(x.layout.spec()),
            "device_bytes": x.device_bytes(plan.mesh),
        }
        for x in plan.inputs
    ]
    lines = rows.senders(rows.lines(plan))
    collectives = [
        {
            "file": line.file,
            "line": line.number,
            "what": c.text,
            "phase": c.phase,
            "runs": c.runs,
            "sent_bytes": c.bytes,
            "seconds": c.seconds,
        }
        for line in lines
        for c in line.collectives
    ]
    return found | {"inputs": inputs, "collectives": collectives, "unknown": [list(x) for x in plan.unknown]}


def diff_values(diff: PlanDiff) -> dict[str, Any]:
    """What the second plan does otherwise than the first: figures as [first, second], inputs and ops that differ."""
    a, b = diff.a, diff.b

    def choice(d: PlanDecision | None) -> dict[str, str] | None:
        return d and dict(d.strategy)

    return {
        "same": not diff,
        "same_program": a.fingerprint == b.fingerprint,
        "program": [] if a.fingerprint == b.fingerprint else differences_of_plans(a, b),
        "mesh": [dict(a.mesh), dict(b.mesh)],
        "cluster": [a.cluster, b.cluster],
        "seconds": [a.seconds["total"], b.seconds["total"]],
        "sent_bytes": [a.comm_bytes, b.comm_bytes],
        "peak_bytes": [a.memory_report.peak, b.memory_report.peak],
        "inputs": [{"path": path, "spec": [x and list(x.spec()) for x in layouts]} for path, *layouts in diff.leaves],
        "ops": [
            {"file": file, "line": line, "primitive": primitive, "phase": phase, "occurrence": n, "strategy": [choice(x), choice(y)]}
            for (file, line, primitive, phase, n), x, y in diff.decisions
        ],
    }


def fact_values(found: Iterable[Fact]) -> list[dict[str, Any]]:
    """Facts about XLA, field by field."""
    return [asdict(fact) for fact in found]


def rule_values(table: str) -> list[dict[str, str]]:
    """The printed table of rules, column by column."""
    rows_ = (re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in table.splitlines() if line.strip())
    return [dict(zip(("primitive", "shapes", "rule"), row, strict=False)) for row in rows_]


def report_values(report: PlanReport | XlaReport) -> dict[str, Any]:
    """What XLA made of a step, and of its plan where there is one."""
    plan, xla = (report.plan, report.report) if isinstance(report, PlanReport) else (None, report)
    compiled, memory = xla.compiled, xla.compiled.memory
    found: dict[str, Any] = {
        "ok": report.ok,
        "failures": list(report.failures),
        "target": str(compiled.devices),
        "compiled": compiled.ok and memory is not None,
    }
    if not compiled.ok or memory is None:
        return found
    found["xla"] = {
        "peak_bytes": memory.peak_bytes,
        "collective_buffer_bytes": xla.collective_bytes,
        "product_flops": compiled.flops,
        "rematerializations": len(xla.rematerializations),
        "collectives": [
            {"source": x.source, "kind": x.kind, "axes": list(x.axes), "phase": x.phase, "count": x.count, "buffer_bytes": x.bytes}
            for x in xla.lines
        ],
    }
    if isinstance(report, PlanReport) and plan is not None:
        found["xla"]["sent_bytes"] = report.comparison.emitted_bytes
        found["plan"] = {
            "seconds": plan.seconds["total"],
            "sent_bytes": report.comparison.planned_bytes,
            "peak_bytes": plan.memory_report.peak,
            "product_flops": report.flops,
            "fingerprint": plan.fingerprint,
        }
    return found


def report_markdown(report: PlanReport | XlaReport, title: str) -> str:
    """A heading with the verdict, a table of planned and emitted figures, what failed, and the whole report folded."""
    values = report_values(report)
    lines = [f"### {'✅' if report.ok else '❌'} {clean(title)}", "", f"compiled for {values['target']}", ""]
    plan, xla = values.get("plan"), values.get("xla")
    if xla:
        lines += (
            ["| per device and step | planned | XLA |", "|---|---:|---:|"] if plan else ["| per device and step | XLA |", "|---|---:|"]
        )
        for name, key, text in (
            ("sent by collectives", "sent_bytes", format_bytes),
            ("memory at the peak", "peak_bytes", format_memory),
            ("products", "product_flops", format_flops),
        ):
            cells = [text(side[key]) if side.get(key) is not None else "" for side in (plan, xla) if side]
            lines += [f"| {name} | {' | '.join(cells)} |"] if any(cells) else []
        lines += [f"| predicted step | {format_seconds(plan['seconds'])} | |"] if plan else []
        lines.append("")
    lines += [f"- ❌ {clean(text)}" for text in report.failures] + [""] * bool(report.failures)
    return (
        "\n".join([*lines, "<details><summary>report</summary>", "", "```", str(report).rstrip("\n"), "```", "", "</details>"]) + "\n"
    )


def answer_values(found: Why) -> dict[str, Any]:
    """An answer of `Plan.why` as JSON values."""

    def figures(x: Any) -> dict[str, Any]:
        return {"text": clean(x.text), "seconds": x.seconds, "peak": x.peak_bytes, "sent": x.sent_bytes, "fits": x.fits}

    counts: dict[tuple, list] = {}
    for use in found.readers:
        counts.setdefault((use.phase, use.what, use.layout, use.collectives), []).append(use)
    readers = [
        {
            "phase": phase,
            "what": clean(what),
            "how": "as it is" if layout == found.layout else clean(f"as {layout}"),
            "collectives": clean(", ".join(collectives)),
            "n": len(some),
            "sent": sum(x.sent_bytes for x in some),
            "seconds": sum(x.seconds for x in some),
        }
        for (phase, what, layout, collectives), some in counts.items()
    ]
    stack = next((x.stack for x in (found.maker, *found.readers) if x.stack), ())
    return rounded(
        {
            "name": clean(found.name),
            "layout": clean(str(found.layout)),
            "maker": clean(found.maker.what),
            "readers": readers[:12],
            "stack": [clean(x) for x in stack[:8]],
            "chosen": figures(found.chosen),
            "choices": [figures(x) for x in found.choices],
            "unpriced": found.unpriced,
            "impossible": [clean(x) for x in found.impossible],
            "constraints": [clean(x) for x in found.constraints],
            "estimated": found.estimated,
            "pending": [clean(x) for x in found.pending],
        }
    )
