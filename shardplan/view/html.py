"""A plan as HTML: the mesh, the inputs as pictures of their shards, cost and memory over the step, collectives, annotated source.

One piece of text with its style inside, for a notebook or as a page; nothing is loaded from elsewhere. `templates/` has the markup
and escapes every value; this file computes the values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from shardplan.mesh.layout import MeshShape
from shardplan.plan import Plan
from shardplan.units import clean, fit, format_bytes, format_count, format_memory, format_percent, format_seconds
from shardplan.view import draw, rows
from shardplan.view.text import quality, time_parts

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = 6  # of mesh axes, in plan.css
MAX_ROWS = 200
MAX_BARS = 16


def to_html(plan: Plan, page: bool) -> str:
    """The plan as a page of its own, or as one element for a notebook."""
    axes = axis_colours(plan.mesh)
    drawn = {"picture_of": partial(draw.picture, mesh=plan.mesh, axes=axes), "coloured": partial(_coloured, axes=axes)}
    template = environment().get_template("page.jinja" if page else "plan.jinja")
    title = f"Plan for mesh {plan.mesh}"
    return template.render(page=page, plan=plan, axes=axes, title=title, **drawn, **_summary(plan), **_memory(plan), **_lines(plan))


@cache
def environment() -> Environment:
    """The templates with their filters."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True
    )
    found.filters |= {
        "bytes": format_bytes, "count": format_count, "memory": format_memory, "percent": format_percent, "seconds": format_seconds,
        "px": draw.px, "breakable": _breakable, "memory_style": _memory_style,
        "disagreement": rows.disagreement, "line_notes": rows.line_notes,
    }  # fmt: skip
    found.globals |= {name: Markup((TEMPLATES / f"plan.{name}").read_text("utf-8")) for name in ("css", "js")}
    return found


def axis_colours(mesh: MeshShape) -> dict[str, int]:
    """Mesh axis -> number of its colour."""
    return {axis: n % COLOURS for n, axis in enumerate(mesh.axes)}


def _printable(value: object) -> object:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _memory_style(kind: str) -> str:
    return kind if kind in rows.MEMORY_KINDS else "other"


def _breakable(path: str) -> Markup:
    """A path that breaks after slashes where it is too long."""
    return Markup("/<wbr>").join(path.split("/"))


def _coloured(text: str, axes: Mapping[str, int]) -> Markup:
    """Text in which the names of mesh axes, where they stand for axes, have their colour."""
    if not axes:
        return escape(clean(text))
    names = "|".join(re.escape(a) for a in sorted(axes, key=len, reverse=True))
    parts = re.split(rf"(?<=[@(,' ])({names})(?=[,)\]'}} ]|$)", text)
    word = Markup('<em class="a{}">{}</em>')
    return Markup("").join(word.format(axes[x], clean(x)) if n % 2 else clean(x) for n, x in enumerate(parts))


# ---- what is shown


def _summary(plan: Plan) -> dict[str, Any]:
    s, grids, step_s = plan.seconds, draw.grids(plan.mesh), plan.seconds["total"] or 1.0
    shares = (("compute", s["compute"] / step_s), ("communication", (s["communication"] - s["hidden"]) / step_s))
    inputs = rows.leaf_rows(plan.inputs, plan.mesh)
    return {
        "quality": quality(plan),
        "time_parts": time_parts(plan),
        "step_s": step_s,
        "time_shares": [(kind, x, f"{kind} {format_percent(x)}") for kind, x in shares],
        "collective_runs": sum(d.runs * sum(c.kind != "slice" for r in d.reshards for c in r.collectives) for d in plan.decisions),
        "grids": grids,
        "hidden_grids": plan.mesh.n_devices // len(grids[0]["devices"]) - len(grids) if grids else 0,
        "inputs": inputs[:MAX_ROWS],
        "hidden_inputs": len(inputs) - MAX_ROWS,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    memory, kinds = plan.memory_report, rows.categories(plan.memory_report)
    most = max(memory.limit or 0.0, memory.peak) or 1.0

    def reading(point: Mapping[str, float]) -> list[str]:  # lines of the chart's tooltip at one time
        parts = sorted(point.items(), key=lambda kv: -kv[1])
        return [format_memory(sum(point.values())), *(f"{clean(k)}  {format_memory(v)}" for k, v in parts if v)]

    return {
        "memory": memory,
        "memory_shares": [(_memory_style(k), v / most, f"{k} {format_memory(v)}") for k in kinds if (v := memory.at_peak.get(k))],
        "chart": draw.chart(memory, kinds),
        "peak_label": fit(f"peak {format_memory(memory.peak)}{rows.peak_place(memory)}", 64),
        "readings": [*map(reading, memory.profile)],
    }


def _lines(plan: Plan) -> dict[str, Any]:
    lines = rows.lines(plan)
    bars, senders = _bars(lines), rows.senders(lines)
    return {
        "bars": bars,
        "bars_s": max((compute_s + communication_s for *_, compute_s, communication_s in bars), default=1.0),
        "senders": senders[:MAX_ROWS],
        "longest_s": max((c.seconds for line in senders for c in line.collectives), default=0.0) or 1.0,
        "conflicts": plan.conflicts[:MAX_ROWS],
        "places": {(line.file, line.number): line.place for line in lines},
        "files": rows.annotated(plan, lines),
    }


def _bars(lines: Sequence[rows.LineRow]) -> list[tuple[str, str, float, float]]:
    """(place, code, compute seconds, communication seconds) of the most expensive lines in program order, and of the rest together."""
    costly = [line for line in lines if line.seconds > 0]
    shown = set(sorted(range(len(costly)), key=lambda n: -costly[n].seconds)[:MAX_BARS])
    bars = [(x.place, x.code.strip(), x.compute_s, x.communication_s) for n, x in enumerate(costly) if n in shown]
    if rest := [line for n, line in enumerate(costly) if n not in shown]:
        bars.append((f"{len(rest)} more lines", "", sum(x.compute_s for x in rest), sum(x.communication_s for x in rest)))
    return bars
