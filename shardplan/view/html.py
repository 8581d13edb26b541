"""A plan as HTML: the instrument as a page, and for a notebook without widgets a report that needs no script.

One piece of text with its style and script inside; nothing is loaded from elsewhere. `templates/` has the markup
and escapes every value; this file computes the values, and the geometry of what is drawn.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from shardplan.mesh.layout import MeshShape
from shardplan.plan import Plan
from shardplan.plan.baselines import recorded
from shardplan.plan.data import Leaf, MemoryReport
from shardplan.units import clean, fit, format_bytes, format_count, format_memory, format_percent, format_seconds
from shardplan.view import rows
from shardplan.view.instrument import Instrument, module, style
from shardplan.view.session import Entry
from shardplan.view.text import quality, time_parts

TEMPLATES = Path(__file__).parent / "templates"
COLOURS = 6  # of mesh axes, in plan.css
MAX_ROWS = 200
MAX_BARS = 16
MAX_DEVICES = 512
MAX_BLOCKS = 16  # along one dim of a picture
MAX_TICKS = 4
MAX_INPUTS_ASKED, MAX_RESHARDS_ASKED = 12, 8  # whose answers are on the page
BUDGET_DRAWN = 1.6  # a budget is a line in the chart up to so many times the peak


def to_html(plan: Plan, page: bool, saving: str | None = None) -> str:
    """The plan as a page of its own, or as one element for a notebook, which states `saving` if given, else asks for `plan.saving`."""
    if page and plan.context is not None and plan.context.planned is not None:
        return _page(plan)
    axes = axis_colours(plan.mesh)
    drawn = {"picture_of": partial(picture, mesh=plan.mesh, axes=axes), "coloured": partial(_coloured, axes=axes)}
    title, parts = f"Plan for mesh {plan.mesh}", {**drawn, **_summary(plan, saving), **_memory(plan), **_lines(plan)}
    template = environment().get_template("page.jinja" if page else "plan.jinja")
    return template.render(page=page, plan=plan, axes=axes, title=title, state=None, baselines=recorded(plan), **parts)


def _page(plan: Plan) -> str:
    """The instrument with its data, and below it what is only read: baselines, warnings, the annotated source."""
    entry = Entry(plan, "as planned")
    for id_ in _asked_at_once(entry.instrument) if plan.answers_quickly else ():
        entry.answers.answer(id_)
    known = plan.answers_quickly or "_baselines" in vars(plan)
    found = plan.baselines() if known else None  # before the data, which state what the plan saves
    copies = {"pins": entry.pins_code, "code": entry.code, "json": _short_json(plan)}
    state = {"data": entry.instrument.data(), "answers": entry.answers.on_page(), "copies": copies}
    axes = axis_colours(plan.mesh)
    return (
        environment()
        .get_template("page.jinja")
        .render(
            page=True,
            plan=plan,
            title=f"Plan for mesh {plan.mesh}",
            state=Markup(json.dumps(state, separators=(",", ":")).translate(NOT_IN_SCRIPTS)),
            module=Markup(module()),
            style=Markup(style()),
            coloured=partial(_coloured, axes=axes),
            baselines=found if found and found.rows else None,
            step_s=plan.seconds["total"] or 1.0,
            memory=plan.memory_report,
            **_lines(plan),
        )
    )


NOT_IN_SCRIPTS = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
MAX_JSON = 200_000
"""Characters of a plan's file that is on its page."""


def _short_json(plan: Plan) -> str:
    text = plan.dumps()
    return text if len(text) <= MAX_JSON else f"{len(text)} characters: plan.save(path) writes them"


def _asked_at_once(instrument: Instrument) -> list[str]:
    """The largest inputs and the most expensive reshards."""
    inputs = sorted((x for x in instrument.arrays if x["id"][0] == "i"), key=lambda x: -x["bytes"])
    asked = [*inputs[:MAX_INPUTS_ASKED], *instrument.collectives[:MAX_RESHARDS_ASKED]]
    return [x["id"] for x in asked if x["id"] in instrument.targets]


@cache
def environment() -> Environment:
    """The templates with their filters."""
    found = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True
    )
    found.filters |= {
        "bytes": format_bytes, "count": format_count, "memory": format_memory, "percent": format_percent, "seconds": format_seconds,
        "px": px, "breakable": _breakable, "memory_style": _memory_style,
        "lines": _as_lines, "disagreement": rows.disagreement, "line_notes": rows.line_notes,
    }  # fmt: skip
    found.globals |= {name: Markup((TEMPLATES / f"plan.{name}").read_text("utf-8")) for name in ("css", "js")}
    return found


def axis_colours(mesh: MeshShape) -> dict[str, int]:
    """Mesh axis -> number of its colour."""
    return {axis: n % COLOURS for n, axis in enumerate(mesh.axes)}


def _printable(value: object) -> object:
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _as_lines(text: str) -> Markup:
    """Text of several lines, each cleaned and escaped."""
    return Markup("\n").join(clean(line) for line in text.splitlines())


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


def _summary(plan: Plan, saving: str | None) -> dict[str, Any]:
    s, found, step_s = plan.seconds, grids(plan.mesh), plan.seconds["total"] or 1.0
    shares = (("compute", s["compute"] / step_s), ("communication", (step_s - s["compute"]) / step_s))
    inputs = rows.leaf_rows(plan.inputs, plan.mesh)
    span = f"between {format_seconds(s['low'])} and {format_seconds(s['high'])}; " if s.get("high") else ""
    return {
        "quality": quality(plan),
        "time_parts": f"{span}{time_parts(plan)}",
        "saving": plan.saving if saving is None else saving,
        "step_s": step_s,
        "time_shares": [(kind, x, f"{kind} {format_percent(x)}") for kind, x in shares],
        "collective_runs": sum(d.runs * sum(c.kind != "slice" for r in d.reshards for c in r.collectives) for d in plan.decisions),
        "grids": found,
        "hidden_grids": plan.mesh.n_devices // len(found[0]["devices"]) - len(found) if found else 0,
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
        "chart": chart(memory, kinds),
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
        "advice": plan.advice(),
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


# ---- drawn: the mesh


def grids(mesh: MeshShape) -> list[dict[str, Any]]:
    """At most `MAX_DEVICES` devices as grids of the two minor mesh axes, one per position along the other axes; [] if none fits.

    A grid has that position as `caption`, the axes `down` (None on a mesh of one axis) and `across` with their sizes `rows` and
    `columns`, and `devices`: (number, coordinates in words), row by row.
    """
    each = mesh.size(*mesh.axes[-2:])
    if not mesh.axes or each > MAX_DEVICES:
        return []
    *outer, across = mesh.axes
    down = outer[-1] if outer else None
    shape = {"down": down, "rows": mesh.size(down) if down else 1, "across": across, "columns": mesh.size(across)}
    found = []
    for first in range(0, min(mesh.n_devices, MAX_DEVICES // each * each), each):
        places = [[f"{a}={i}" for a, i in reversed(mesh.coordinates(first + n).items())] for n in range(each)]
        devices = [(first + n, f"device {first + n}: {', '.join(place)}") for n, place in enumerate(places)]
        found.append({"caption": ", ".join(places[0][:-2]), "devices": devices, **shape})
    return found


# ---- drawn: one array


class Shape(NamedTuple):
    """A rectangle of a CSS class, or the upper left half of one."""

    style: str
    x: float
    y: float
    w: float
    h: float
    r: float = 1.5
    half: bool = False


def picture(leaf: Leaf, mesh: MeshShape, axes: Mapping[str, int]) -> dict[str, Any]:
    """The array as a rectangle of its shards, in the colours of the mesh axes that shard it (`axes`: mesh axis -> colour).

    It shows at most two dims: sharded ones first, then the last ones; a further sharded dim is a plate behind the rectangle.

    Returns:
        `shapes` in a box of `width` x `height` pixels, and the `title`, which states the shard of one device.
    """
    layout, shape = leaf.layout, leaf.shape
    order = sorted(range(len(shape)), key=lambda d: (not layout.dims[d], shape[d] == 1, -d))
    drawn = sorted(order[:2])
    width, height = _box([shape[d] for d in drawn])
    behind = [axes[layout.dims[d][0]] for d in range(layout.rank) if layout.dims[d] and d not in drawn]
    x = y = 1 + 3 * len(behind)
    shapes = [Shape(f"plate a{n}", 1 + 3 * k, 1 + 3 * k, width, height) for k, n in enumerate(behind)]
    if not layout.sharded_axes:
        shapes.append(Shape("replicated", x, y, width, height))
    else:
        cuts = [layout.dims[d] for d in drawn]
        down, across = cuts if len(cuts) == 2 else ((), cuts[0] if cuts else ())
        shapes += _blocks(Shape("", x, y, width, height), mesh, axes, down, across)
    local = layout.local_shape(shape, mesh)
    title = f"each device holds {'×'.join(map(str, local)) or 'a number'}"
    if layout.sharded_axes:
        title += f", 1/{layout.shards(mesh)} of {'×'.join(map(str, shape))}"
    return {"width": width + x + 1, "height": height + y + 1, "title": title, "shapes": shapes}


def _box(shape: Sequence[int]) -> tuple[int, int]:
    """(width, height) of the rectangle of an array of 0, 1 or 2 dims."""
    if len(shape) < 2:
        return (72 if shape else 10), 10
    ratio = min(3.6, max(0.4, math.sqrt((shape[1] or 1) / (shape[0] or 1))))
    return (72, round(72 / ratio / 1.2)) if ratio >= 1.9 else (round(32 * ratio), 32)


def _blocks(box: Shape, mesh: MeshShape, axes: Mapping[str, int], down: tuple[str, ...], across: tuple[str, ...]) -> Iterator[Shape]:
    rows, columns = (min(MAX_BLOCKS, mesh.size(*a)) for a in (down, across))
    colours = [axes[a] for a in (*down, *across)]
    gap = 1.5 if max(rows, columns) <= 8 else 0.8
    w, h = (box.w - gap * (columns - 1)) / columns, (box.h - gap * (rows - 1)) / rows
    for row, column in itertools.product(range(rows), range(columns)):
        x, y = box.x + column * (w + gap), box.y + row * (h + gap)
        yield Shape(f"a{colours[-1]}", x, y, w, h, min(1.5, w / 4, h / 4))
        if len(colours) > 1:
            yield Shape(f"a{colours[0]}", x, y, w / 2, h, 0) if w > 4 * h else Shape(f"a{colours[0]}", x, y, w, h, half=True)


# ---- drawn: memory over the step


def chart(memory: MemoryReport, kinds: Sequence[str]) -> dict[str, Any] | None:
    """Memory over the step as stacked areas; None for a plan with no profile.

    Returns:
        `areas`: (category, outline of its area in a box of 1000 x 200, y downwards), from the ground up; `ticks`: (height as a
        fraction of the chart's, bytes); `limit`: height of the budget, None where it is not drawn; `peak`: its time as a fraction
        of the step.
    """
    profile = memory.profile
    if len(profile) < 2:
        return None
    totals = [sum(point.values()) for point in profile]
    limit = memory.limit if memory.limit and memory.limit <= BUDGET_DRAWN * max(totals) else None
    top = 1.06 * max(max(totals), limit or 0.0) or 1.0
    peak = max(range(len(totals)), key=lambda n: totals[n]) / (len(profile) - 1)
    step = 2.0 ** math.floor(math.log2(top / 2))
    ticks = [step * n for n in range(1, MAX_TICKS + 1) if step * n < 0.97 * top]
    x = [px(1000 * n / (len(profile) - 1)) for n in range(len(profile))]
    areas, ground = [], [0.0] * len(profile)
    for kind in kinds:
        roof = [g + point.get(kind, 0.0) for g, point in zip(ground, profile, strict=True)]
        corners = [*zip(x, roof, strict=True), *zip(reversed(x), reversed(ground), strict=True)]
        outline = " ".join(f"{a},{px(200 - 200 * b / top)}" for a, b in corners)
        areas.append((kind, f"M{outline} Z"))
        ground = roof
    return {"areas": areas, "ticks": [(t / top, t) for t in ticks], "limit": limit and limit / top, "peak": peak}


def px(x: float) -> str:
    """A length with at most two decimals."""
    return f"{x:.2f}".rstrip("0").rstrip(".")
