"""A plan as HTML: the mesh, the inputs as split rectangles, cost and memory over the step, collectives, annotated source.

One piece of text with its style inside, for a notebook or as a page: nothing is loaded from anywhere. The markup stands in
`plan.html` in named pieces; `_piece` fills one in and escapes every value that is not itself a filled-in piece.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template

from shardplan.mesh.layout import Layout, MeshShape
from shardplan.plan import Plan
from shardplan.plan.data import Leaf
from shardplan.units import clean, fit, format_bytes, format_count, format_memory, format_percent, format_seconds
from shardplan.view import rows
from shardplan.view.text import parts, quality

HERE = Path(__file__).parent
COLOURS = 6  # of mesh axes, in plan.css
MOST_DEVICES = 512
MOST_BLOCKS = 16  # along one dim of a picture
MOST_ROWS = 200
MOST_BARS = 16


class Markup(str):
    """Text that is HTML already."""


def to_html(plan: Plan, page: bool) -> str:
    """The plan as a page of its own, or as one element for a notebook."""
    body = _plan(plan, page)
    return Template((HERE / "page.html").read_text("utf-8")).substitute(title=_escape(_title(plan)), body=body) if page else body


def _escape(value: object) -> str:
    return value if isinstance(value, Markup) else html.escape(clean(str(value)))


@cache
def _pieces() -> dict[str, Template]:
    parts = re.split(r"<!-- piece: (\w+) -->\n", (HERE / "plan.html").read_text("utf-8"))
    return {name: Template(text.strip()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _piece(piece: str, /, **values: object) -> Markup:
    return Markup(_pieces()[piece].substitute({k: _escape(v) for k, v in values.items()}))


def _join(pieces: Iterable[Markup]) -> Markup:
    return Markup("".join(pieces))


def _file(name: str) -> Markup:
    return Markup((HERE / name).read_text("utf-8"))


def _json(value: object) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _px(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


# ---- the page


def _title(plan: Plan) -> str:
    return f"Plan for mesh {plan.mesh}"


def _plan(plan: Plan, page: bool) -> Markup:
    lines = rows.lines(plan)
    axes = _axes(plan.mesh)
    return _piece(
        "plan",
        css=_file("plan.css"),
        js=_file("plan.js"),
        title=_title(plan),
        subtitle=f"{plan.mesh.n_devices} devices, priced as {plan.cluster}; {quality(plan)}",
        tiles=_tiles(plan),
        mesh=_mesh(plan.mesh, axes),
        memory=_memory(plan),
        inputs=_inputs(plan, axes),
        costs=_costs(plan, lines),
        collectives=_collectives(plan, lines, axes),
        conflicts=_conflicts(plan, rows.source_labels(lines)),
        unknown=_unknown(plan),
        source=_source(plan, lines, page),
        footer=f"program {plan.fingerprint[:12]}, predicted by shardplan",
        data=_json({"points": [_reading(point) for point in plan.memory_report.profile]}),
    )


def _axes(mesh: MeshShape) -> dict[str, int]:
    """Mesh axis -> number of its colour."""
    return {axis: n % COLOURS for n, axis in enumerate(mesh.axes)}


def _reading(point) -> list[str]:
    total = sum(point.values())
    return [
        format_memory(total),
        *(f"{clean(k)}  {format_memory(v)}" for k, v in sorted(point.items(), key=lambda kv: -kv[1]) if v),
    ]


def _tiles(plan: Plan) -> Markup:
    s, memory = plan.seconds, plan.memory_report
    exposed = s["communication"] - s["hidden"]
    shares = [(kind, share / (s["total"] or 1.0)) for kind, share in (("compute", s["compute"]), ("communication", exposed))]
    count = sum(d.runs * sum(c.kind != "slice" for m in d.reshards for c in m.collectives) for d in plan.decisions)
    most = max(memory.limit or 0.0, memory.peak) or 1.0
    return _join(
        [
            _piece(
                "tile",
                label="Predicted step",
                value=format_seconds(s["total"]),
                meter=_meter([(kind, share, f"{kind} {format_percent(share)}") for kind, share in shares]),
                more=parts(plan),
            ),
            _piece(
                "tile",
                label="Peak memory per device",
                value=format_memory(memory.peak),
                meter=_meter([(_memory_class(k), v / most, f"{k} {format_memory(v)}") for k, v in _at_peak(plan)]),
                more=f"{format_percent(memory.peak / memory.limit)} of the budget, {format_memory(memory.limit)}"
                if memory.limit
                else "no limit",
            ),
            _piece(
                "tile",
                label="Through collectives",
                value=format_bytes(plan.comm_bytes) if plan.comm_bytes else "nothing",
                meter="",
                more=f"{count:.10g} collectives per step and device" if count else "no device waits for another",
            ),
        ]
    )


def _meter(parts: Sequence[tuple[str, float, str]]) -> Markup:
    return _piece(
        "meter",
        parts=_join(_piece("meter_part", kind=kind, width=_px(100 * share), title=title) for kind, share, title in parts),
    )


def _at_peak(plan: Plan) -> list[tuple[str, float]]:
    return [(k, plan.memory_report.at_peak[k]) for k in rows.categories(plan) if plan.memory_report.at_peak.get(k)]


def _memory_class(kind: str) -> str:
    return kind if kind in rows.MEMORY_KINDS else "other"


# ---- the mesh


def _mesh(mesh: MeshShape, axes: dict[str, int]) -> Markup:
    chips = _piece("axes", axes=_join(_piece("axis", n=axes[a], name=a, size=size) for a, size in mesh))
    outer, inner = mesh.axes[:-2], mesh.axes[-2:]
    if not inner or mesh.size(*inner) > MOST_DEVICES:
        return _join([chips, _piece("note", text=f"{mesh.n_devices} devices")])
    panels, shown = [], max(1, MOST_DEVICES // mesh.size(*inner))
    for n, place in enumerate(itertools.product(*(range(mesh.size(a)) for a in outer))):
        if n < shown:
            caption = ", ".join(f"{a}={i}" for a, i in zip(outer, place, strict=True))
            panels.append(_panel(mesh, axes, inner, n * mesh.size(*inner), caption))
    hidden = math.prod(mesh.size(a) for a in outer) - len(panels)
    more = [_piece("note", text=f"and {hidden} more such grids")] if hidden else []
    return _join([chips, _piece("panels", panels=_join(panels)), *more, _piece("key")])


def _panel(mesh: MeshShape, axes: dict[str, int], inner: tuple[str, ...], first: int, caption: str) -> Markup:
    columns = mesh.size(inner[-1])
    lines = mesh.size(inner[0]) if len(inner) == 2 else 1
    cells = []
    for row in range(lines):
        if row == 0:
            side = _piece("grid_side", n=axes[inner[0]], name=inner[0], span=lines) if len(inner) == 2 else _piece("grid_blank")
            cells.append(side)
        for column in range(columns):
            number = first + row * columns + column
            where = ", ".join(f"{a}={i}" for a, i in reversed(mesh.coordinates(number).items()))
            cells.append(_piece("device", number=number, title=f"device {number}: {where}"))
    return _piece(
        "panel",
        caption=_piece("panel_caption", text=caption) if caption else "",
        columns=columns,
        head=_piece("grid_head", n=axes[inner[-1]], name=inner[-1], span=columns),
        cells=_join(cells),
    )


# ---- inputs


def _inputs(plan: Plan, axes: dict[str, int]) -> Markup:
    found = rows.leaf_rows(plan.inputs, plan.mesh)
    out, kind = [], None
    for row in found[:MOST_ROWS]:
        if row.first.kind != kind:
            kind = row.first.kind
            out.append(_piece("input_kind", kind=kind))
        out.append(
            _piece(
                "input",
                picture=picture(row.first, plan.mesh, axes),
                path=_breakable(row.path),
                type=_coloured(row.type, axes),
                spec=_coloured(str(row.first.layout), axes) if row.first.layout.split_axes else "whole",
                times=format_count(row.count),
                bytes=format_memory(row.device_bytes),
            )
        )
    hidden = len(found) - MOST_ROWS
    more = [_piece("note", text=f"and {hidden} more rows")] if hidden > 0 else []
    return _join([_piece("inputs", rows=_join(out)), *more])


def _breakable(path: str) -> Markup:
    """A path that breaks after slashes where it is too long."""
    return Markup(_escape(path).replace("/", "/<wbr>"))


def _coloured(text: str, axes: dict[str, int]) -> Markup:
    """Text in which the names of mesh axes, where they stand as axes, have their colour."""
    if not axes:
        return Markup(_escape(text))
    names = "|".join(re.escape(a) for a in sorted(axes, key=len, reverse=True))
    out = []
    for n, part in enumerate(re.split(rf"(?<=[@(,' ])({names})(?=[,)\]'}} ]|$)", text)):
        out.append(_piece("axis_word", n=axes[part], name=part) if n % 2 else Markup(_escape(part)))
    return _join(out)


def picture(leaf: Leaf, mesh: MeshShape, axes: dict[str, int]) -> Markup:
    """The array as a rectangle cut into its shards, each in the colours of the mesh axes that cut it."""
    layout = leaf.layout
    chosen = _drawn(leaf.shape, layout)
    shape = tuple(leaf.shape[d] for d in chosen)
    width, height = _box(shape)
    behind = [axes[layout.dims[d][0]] for d in range(layout.rank) if layout.dims[d] and d not in chosen]
    x0 = y0 = 1 + 3 * len(behind)
    offsets = [1 + 3 * k for k in range(len(behind))]
    plates = [_piece("plate", n=n, x=at, y=at, w=width, h=height) for n, at in zip(behind, offsets, strict=True)]
    if not layout.split_axes:
        blocks = [_piece("whole", x=x0, y=y0, w=width, h=height)]
    else:
        cuts = [layout.dims[d] for d in chosen]
        down, across = cuts if len(cuts) == 2 else ((), cuts[0] if cuts else ())
        blocks = _blocks(x0, y0, width, height, mesh, axes, down, across)
    local = layout.local_shape(leaf.shape, mesh)
    title = f"each device holds {'×'.join(map(str, local)) or 'a number'}"
    if layout.split_axes:
        title += f", 1/{layout.shards(mesh)} of {'×'.join(map(str, leaf.shape))}"
    return _piece("picture", width=width + x0 + 1, height=height + y0 + 1, title=title, blocks=_join([*plates, *blocks]))


def _drawn(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """The one or two dims that a picture shows: split ones first, then the last ones."""
    order = sorted(range(len(shape)), key=lambda d: (not layout.dims[d], shape[d] == 1, -d))
    return tuple(sorted(order[:2]))


def _box(shape: tuple[int, ...]) -> tuple[int, int]:
    if not shape:
        return 10, 10
    if len(shape) == 1:
        return 72, 10
    ratio = min(3.6, max(0.4, math.sqrt((shape[1] or 1) / (shape[0] or 1))))
    return (72, round(72 / ratio / 1.2)) if ratio >= 1.9 else (round(32 * ratio), 32)


def _blocks(x0, y0, width, height, mesh: MeshShape, axes: dict[str, int], down: tuple[str, ...], across: tuple[str, ...]):
    rows_, columns = (min(MOST_BLOCKS, mesh.size(*a)) for a in (down, across))
    colours = [axes[a] for a in (*down, *across)]
    gap = 1.5 if max(rows_, columns) <= 8 else 0.8
    w, h = (width - gap * (columns - 1)) / columns, (height - gap * (rows_ - 1)) / rows_
    for row, column in itertools.product(range(rows_), range(columns)):
        x, y = x0 + column * (w + gap), y0 + row * (h + gap)
        place = {"x": _px(x), "y": _px(y), "w": _px(w), "h": _px(h)}
        yield _piece("block", n=colours[-1], r=_px(min(1.5, w / 4, h / 4)), **place)
        if len(colours) > 1 and w > 4 * h:
            yield _piece("block", n=colours[0], r=0, **{**place, "w": _px(w / 2)})
        elif len(colours) > 1:
            yield _piece("block_half", n=colours[0], **place)


# ---- cost and memory over the step


def _costs(plan: Plan, lines: Sequence[rows.LineRow]) -> Markup:
    bars = [(line.place, line.code.strip(), line.compute_s, line.communication_s) for line in lines if line.seconds > 0]
    kept = set(sorted(range(len(bars)), key=lambda n: (-(bars[n][2] + bars[n][3]), n))[:MOST_BARS])
    rest = [bar for n, bar in enumerate(bars) if n not in kept]
    shown = [bar for n, bar in enumerate(bars) if n in kept]
    if rest:
        shown.append((f"{len(rest)} more lines", "", sum(b[2] for b in rest), sum(b[3] for b in rest)))
    if not shown:
        return _piece("note", text="nothing costs anything")
    most = max(b[2] + b[3] for b in shown)

    def bar(place: str, code: str, compute: float, communication: float) -> Markup:
        return _piece(
            "cost",
            place=place,
            code=code,
            title=f"{format_seconds(compute)} compute, {format_seconds(communication)} communication",
            compute=_px(100 * compute / most),
            communication=_px(100 * communication / most),
            time=format_seconds(compute + communication),
        )

    return _piece("costs", rows=_join(bar(*b) for b in shown))


def _memory(plan: Plan) -> Markup:
    memory, profile = plan.memory_report, plan.memory_report.profile
    if len(profile) < 2:
        return _piece("note", text=f"{format_memory(memory.peak)} per device at the peak")
    kinds = rows.categories(plan)
    totals = [sum(p.values()) for p in profile]
    near = memory.limit is not None and memory.limit <= 1.6 * max(totals)
    top = 1.06 * max(max(totals), memory.limit if near and memory.limit else 0.0) or 1.0
    peak = max(range(len(totals)), key=lambda n: totals[n])
    ticks = [_piece("tick", bottom=_px(100 * t / top), text=format_memory(t)) for t in _ticks(top)]
    budget, note = Markup(""), Markup("")
    if near and memory.limit:
        budget = _piece("budget", y=_px(200 - 200 * memory.limit / top))
        ticks.append(_piece("budget_label", bottom=_px(100 * memory.limit / top), text=f"budget {format_memory(memory.limit)}"))
    elif memory.limit:
        text = f"The budget, {format_memory(memory.limit)}, is {memory.limit / (memory.peak or 1):.3g} times the peak."
        note = _piece("note", text=text)
    share = peak / (len(profile) - 1)
    return _piece(
        "memory",
        points=len(profile),
        title="Bytes per device from the start of the step to its end",
        areas=_join(_areas(profile, kinds, top)),
        budget=budget,
        ticks=_join(ticks),
        peak_x=_px(1000 * share),
        peak_left=_px(100 * share),
        side="left" if share > 0.4 else "right",
        peak=fit(f"peak {format_memory(memory.peak)}{', ' + rows.where(memory.where) if memory.where else ''}", 64),
        legend=_join(
            _piece("legend", kind=_memory_class(k), name=k, amount=format_memory(memory.at_peak[k]) if k in memory.at_peak else "")
            for k in reversed(kinds)
        ),
        note=note,
    )


def _areas(profile, kinds: Sequence[str], top: float):
    base = [0.0] * len(profile)
    x = [_px(1000 * n / (len(profile) - 1)) for n in range(len(profile))]
    y: Callable[[float], str] = lambda b: _px(200 - 200 * b / top)  # noqa: E731
    for kind in kinds:
        roof = [b + p.get(kind, 0.0) for b, p in zip(base, profile, strict=True)]
        upper = " ".join(f"{a},{y(b)}" for a, b in zip(x, roof, strict=True))
        lower = " ".join(f"{a},{y(b)}" for a, b in zip(reversed(x), reversed(base), strict=True))
        yield _piece("area", kind=_memory_class(kind), d=f"M{upper} L{lower} Z")
        base = roof


def _ticks(top: float) -> list[float]:
    """Two to four round amounts below `top`."""
    step = 2.0 ** math.floor(math.log2(top / 2)) if top > 0 else 1.0
    return [step * n for n in range(1, 5) if step * n < 0.97 * top]


# ---- collectives and source


def _collectives(plan: Plan, lines: Sequence[rows.LineRow], axes: dict[str, int]) -> Markup:
    moved = sorted((line for line in lines if line.traffic), key=lambda line: (-line.communication_s, line.place))
    if not moved:
        return _piece("note", text="none: no device waits for another")
    total = plan.seconds["total"] or 1.0
    most = max(t.seconds for line in moved for t in line.traffic) or 1.0
    out = [
        _piece(
            "collective",
            line=_piece("collective_line", place=line.place, code=line.code.strip()) if n == 0 else "",
            what=_coloured(str(t), axes),
            phase=t.phase,
            runs=f"{t.runs:.10g}",
            bytes=format_bytes(t.bytes) if t.kind != "slice" else "",
            time=format_seconds(t.seconds),
            width=_px(100 * t.seconds / most),
            share=format_percent(t.seconds / total),
        )
        for line in moved[:MOST_ROWS]
        for n, t in enumerate(line.traffic)
    ]
    return _piece("collectives", rows=_join(out))


def _source(plan: Plan, lines: Sequence[rows.LineRow], page: bool) -> Markup:
    found = rows.annotated(plan, lines)
    if not found:
        return _piece("note", text="the plan has no source lines")
    out = []
    for name, here in found:
        body, before = [], None
        for line in here:
            if before is not None and line.number > before + 1:
                body.append(_piece("gap"))
            before = line.number
            body.append(_piece("line", number=line.number, code=line.code))
            body += [_line_note(line, *line_notes) for line_notes in rows.line_notes(line)]
        mine = not rows.is_library(here[0].file)
        count = f"{len(here)} line{'s' * (len(here) != 1)}"
        out.append(_piece("file", name=name, count=count, open="open" if page and mine else "", lines=_join(body)))
    return _join(out)


def _line_note(line: rows.LineRow, note: rows.LineNote | None, phase: str, text: str) -> Markup:
    return _piece(
        "line_note",
        what=note.what if note else "more",
        indent=len(line.code) - len(line.code.lstrip()),
        phase=phase,
        text=text,
        times=format_count(note.runs) if note else "",
        bytes=format_bytes(note.bytes) if note and note.bytes else "",
        time=format_seconds(note.seconds) if note and note.seconds else "",
    )


def _conflicts(plan: Plan, source_labels: Mapping[tuple[str, int], str]) -> Markup:
    if not plan.conflicts:
        return Markup("")
    items = (
        _piece(
            "conflict",
            pins=rows.disagreement(c),
            bytes=format_bytes(c.bytes),
            time=format_seconds(c.seconds),
            place=source_labels[c.file, c.line],
        )
        for c in plan.conflicts[:MOST_ROWS]
    )
    return _piece("conflicts", items=_join(items))


def _unknown(plan: Plan) -> Markup:
    if not plan.unknown:
        return Markup("")
    items = _join(_piece("unknown_item", primitive=p, source=s) for p, s in dict.fromkeys(plan.unknown))
    return _piece("unknown", items=items)
