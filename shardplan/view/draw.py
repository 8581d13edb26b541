"""Geometry of a plan's page: the mesh as grids of devices, an array as its shards, memory as stacked areas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardplan.mesh.layout import MeshShape
from shardplan.plan.data import Leaf, MemoryReport

MAX_DEVICES = 512
MAX_BLOCKS = 16  # along one dim of a picture
MAX_TICKS = 4
BUDGET_DRAWN = 1.6  # a budget is a line in the chart up to so many times the peak


# ---- the mesh


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


# ---- one array


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


# ---- memory over the step


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
