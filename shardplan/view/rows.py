"""Rows that text and HTML show of a plan: similar inputs folded into one, and the step's ops summed under the user's lines.

state/blocks/{0..11}/attn/{key,query,value}/kernel  ->  state/blocks/*/attn/{key,query,value}/kernel   ×36
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardplan.files import is_library
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.plan import Plan
from shardplan.plan.data import Conflict, Leaf, MemoryReport, PlanDecision, itemsize
from shardplan.units import clean

KINDS = ("parameters", "optimizer", "batch", "constants", "output")
PHASES = ("forward", "backward", "update")
MEMORY_KINDS = ("parameters", "optimizer", "constants", "batch", "gathered", "activations", "gradients", "update")
MAX_NOTES = 3  # layouts shown under one line, per phase; twice as many reshards
NEGLIGIBLE = 0.02  # a layout of less than this share of the seconds of the line's most expensive result is only counted
MIN_SHARE = 0.01  # a line that shards nothing is shown from this share of the step's seconds on
SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def _rank(name: str, order: Sequence[str]) -> tuple[int, str]:
    """Sorts names in a given order, other names behind them."""
    return (order.index(name) if name in order else len(order), name)


# ---- types, as JAX prints them


def type_text(dtype: str, shape: Sequence[int], layout: Layout) -> str:
    """A type with the axes of its sharded dims, "f32[8@x, 4@(y,z)]"; partial axes in braces."""

    def dim(n: int, axes: tuple[str, ...]) -> str:
        return str(n) if not axes else f"{n}@{axes[0]}" if len(axes) == 1 else f"{n}@({','.join(axes)})"

    kinds = sorted({kind for _, kind in layout.partial})
    partial = "".join(f" {{{kind} over {','.join(a for a, k in layout.partial if k == kind)}}}" for kind in kinds)
    name = next((short + dtype[len(long) :] for long, short in SHORT if dtype.startswith(long)), dtype)
    return clean(f"{name}[{', '.join(map(dim, shape, layout.dims))}]{partial}")


def array_type(text: str, layout: Layout) -> str:
    """`type_text` of an array's type as text, "float32[8,4]"; another type is followed by its layout."""
    found = re.fullmatch(r"(.+)\[((?:\d+(?:,\s*\d+)*)?)\]", text)
    shape = [int(n) for n in found[2].split(",") if n] if found else []
    return type_text(found[1], shape, layout) if found and len(shape) == layout.rank else clean(f"{text} {layout}").strip()


# ---- paths that differ in one segment at a time


def fold(named: Sequence[tuple[str, int]], everything: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Paths that differ in one segment at a time, merged: (path, numbers), in order of the first number.

    A segment stands as "*" where `everything` has no other numbers there, otherwise as a choice, "{a,b}".
    """
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for path, n in named:
        groups.setdefault(tuple((segment,) for segment in path.split("/")), []).append(n)
    for at in range(max(map(len, groups), default=0)):
        merged: dict[tuple, tuple[list[str], list[int]]] = {}
        for key, numbers in groups.items():
            here = key[at : at + 1]
            words, members = merged.setdefault((key[:at], key[at + 1 :], here and (_stem(here[0][0]),)), ([], []))
            words += [w for segment in here for w in segment if w not in words]
            members += numbers
        groups = {(*start, *[tuple(words)][: len(here)], *end): members for (start, end, here), (words, members) in merged.items()}
    known = _numbers(tuple(everything))
    out = [(clean("/".join(_segment(key, at, known) for at in range(len(key)))), sorted(n)) for key, n in groups.items()]
    return sorted(out, key=lambda row: row[1][0])


_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


@functools.lru_cache(maxsize=4)
def _numbers(paths: tuple[str, ...]) -> dict[tuple[str, ...], set[int]]:
    """Start of a path, "*" for its numbers -> numbers in its last segment."""
    known: dict[tuple[str, ...], set[int]] = {}
    for path in paths:
        start: tuple[str, ...] = ()
        for segment in path.split("/"):
            start += (_without_number(segment),)
            if found := _NUMBERED.fullmatch(segment):
                known.setdefault(start, set()).add(int(found[2]))
    return known


@functools.lru_cache(maxsize=10_000)
def _stem(segment: str) -> tuple[str, str] | None:
    """The text before and after the number of a segment; segments without a number merge with each other only."""
    found = _NUMBERED.fullmatch(segment)
    return (found[1], found[3]) if found else None


def _without_number(segment: str) -> str:
    return "*".join(_stem(segment) or (segment,))


def _segment(key: tuple[tuple[str, ...], ...], at: int, known: Mapping[tuple[str, ...], set[int]]) -> str:
    words = key[at]
    if len(words) == 1:
        return words[0]
    if (stem := _stem(words[0])) is None:
        return f"{{{','.join(words)}}}"
    numbers = sorted(int(found[2]) for w in words if (found := _NUMBERED.fullmatch(w)))
    if set(numbers) == known.get(tuple(_without_number(k[0]) for k in key[: at + 1])):
        return "*".join(stem)
    runs = ([n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda at: at[1] - at[0]))
    ranges = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"{stem[0]}{{{ranges}}}{stem[1]}"


# ---- inputs and outputs


@dataclass(frozen=True)
class LeafRow:
    """Leaves of one type, layout and kind whose paths differ in some segments.

    Attributes:
        path: of all of them, as `fold` writes it.
        leaves: in flat order.
        type: of one leaf with its axes, "f32[768, 3072@model]".
        layout: PartitionSpec of one leaf, or "replicated"; with ", padded" if it is held so.
        device_bytes: of all leaves on one device.
    """

    path: str
    leaves: tuple[Leaf, ...]
    type: str
    layout: str
    device_bytes: float


def leaf_rows(leaves: Sequence[Leaf], mesh: MeshShape) -> list[LeafRow]:
    """Rows in the order of kinds, then of the first leaf."""
    groups: dict[tuple, list[int]] = {}
    for n, x in enumerate(leaves):
        groups.setdefault((x.kind, x.dtype, x.shape, x.layout), []).append(n)
    found = []
    for (kind, dtype, shape, layout), numbers in groups.items():
        text, spec = type_text(dtype, shape, layout), clean(str(layout)) if layout.sharded_axes else "replicated"
        spec += ", padded" if layout.filled_shape(shape, mesh) != shape else ""
        each = math.prod(layout.local_shape(shape, mesh)) * itemsize(dtype)
        for path, members in fold([(leaves[n].path, n) for n in numbers], [x.path for x in leaves]):
            row = LeafRow(path, tuple(leaves[n] for n in members), text, spec, each * len(members))
            found.append((_rank(kind, KINDS), members[0], row))
    return [row for *_, row in sorted(found, key=lambda r: r[:2])]


# ---- the user's lines


class LineCost(NamedTuple):
    """Collectives, result layouts ("layout") or reshards of operands ("reshard") of one text, line and phase, summed over a step.

    `bytes` are those that a device sends.
    """

    what: str
    phase: str
    text: str
    runs: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class LineRow:
    """One line of the user's program, or the ops of no line (`number` 0).

    Attributes:
        file: as the program named it.
        place: for people, e.g. "train.py:41".
        code: the line itself, "" where it cannot be read.
        compute_s, communication_s: of all its ops, per step.
        collectives: by phase, then the most expensive first.
        notes: layouts and reshards, in the same order.
        shards: whether a mesh axis shards one of its results.
    """

    file: str
    number: int
    place: str
    code: str
    compute_s: float
    communication_s: float
    collectives: tuple[LineCost, ...]
    notes: tuple[LineCost, ...]
    shards: bool

    @property
    def seconds(self) -> float:
        """Compute and communication, per step."""
        return self.compute_s + self.communication_s

    @property
    def indent(self) -> int:
        """Columns before the code."""
        return len(self.code) - len(self.code.lstrip())

    @property
    def is_library(self) -> bool:
        """Whether the line is in an installed package, not in the user's own program."""
        return is_library(self.file)


def lines(plan: Plan, source: bool = True) -> list[LineRow]:
    """The user's lines in the order in which they first run; without `source`, without their code."""
    known = {(x.file, x.line, ""): x for x in plan.lines}
    found: dict[tuple[str, int, str], list[PlanDecision]] = {key: [] for key in known}
    for d in plan.decisions:
        traits = traits_of(d.primitive)
        if traits.step_input and not d.reshards:
            continue
        border = "" if d.file else "inputs" if traits.step_input else "outputs" if traits.step_output else ""
        found.setdefault((d.file, d.line, border), []).append(d)
    names, rows = file_names(file for file, *_ in found), []
    for (file, number, border), here in found.items():
        line, costs = known.get((file, number, border)), _costs(here, plan.mesh)
        rows.append(
            LineRow(
                file,
                number,
                place=f"{names[file]}:{number}" if file else border or "no line known",
                code=clean(line.code) if line and source else "",
                compute_s=line.seconds if line else 0.0,
                communication_s=sum(d.comm_seconds for d in here),
                collectives=tuple(c for c in costs if c.what == "collective"),
                notes=tuple(c for c in costs if c.what != "collective"),
                shards=any(x is not None and x.sharded_axes for d in here for x in d.result_layouts),
            )
        )
    return rows


def _costs(decisions: Sequence[PlanDecision], mesh: MeshShape) -> list[LineCost]:
    sums: dict[tuple, list[float]] = {}

    def add(what: str, d: PlanDecision, text: str, sent: float, seconds: float) -> None:
        total = sums.setdefault((what, d.phase, text), [0.0] * 3)
        for k, x in enumerate((1.0, sent, seconds)):
            total[k] += d.runs * x

    for d in decisions:
        if not traits_of(d.primitive).endpoint and d.result_layouts and (layout := d.result_layouts[0]) is not None:
            add("layout", d, array_type(d.result_type, layout), 0.0, d.seconds)
        for r in d.reshards:
            steps = [f"{c.kind} over {clean(', '.join(c.axes))}" for c in r.collectives]
            for step, c in zip(steps, r.collectives, strict=True):
                add("collective", d, step, c.sent_bytes(mesh), c.seconds)
            add("reshard", d, f"{', '.join(steps)} -> {array_type(r.array, r.after)}", r.sent_bytes(mesh), r.seconds)
    costs = [LineCost(*key, *total) for key, total in sums.items()]
    return sorted(costs, key=lambda c: (_rank(c.phase, PHASES), c.what, -c.seconds, c.text))


def senders(lines: Sequence[LineRow]) -> list[LineRow]:
    """The lines with collectives, the most expensive first."""
    return sorted((line for line in lines if line.collectives), key=lambda line: (-line.communication_s, line.place))


def file_names(files: Iterable[str]) -> dict[str, str]:
    """Short names of files that tell them apart: the part inside site-packages, or as much of the end as is needed."""
    parts, out = {file: re.split(r"[/\\]", file) for file in files}, {}
    for file, path in parts.items():
        keep = len(path) - 1 if is_library(file) else 1
        while keep < len(path) and any(x[-keep:] == path[-keep:] for other, x in parts.items() if other != file):
            keep += 1
        out[file] = clean("/".join(path[-keep:]))
    return out


def annotated(plan: Plan, lines: Sequence[LineRow]) -> list[tuple[str, list[LineRow]]]:
    """(file, its lines that have something to say), the user's own files first, then libraries."""
    least_s = MIN_SHARE * (plan.seconds["total"] or 1.0)
    files: dict[str, list[LineRow]] = {}
    for line in sorted(lines, key=lambda line: line.is_library):
        if line.code and (line.collectives or line.seconds >= least_s or (line.shards and not line.is_library)):
            files.setdefault(line.file, []).append(line)
    return [(here[0].place.rsplit(":", 1)[0], sorted(here, key=lambda line: line.number)) for here in files.values()]


def line_notes(line: LineRow) -> Iterator[tuple[LineCost | None, str, str]]:
    """(note, phase, text) of the comments under a line: the most expensive layouts and reshards, then how many are left out."""
    for (phase, what), notes in itertools.groupby(line.notes, key=lambda note: (note.phase, note.what)):
        every = list(notes)
        shown = every[: 2 * MAX_NOTES]
        if what == "layout":
            shown = [note for note in every[:MAX_NOTES] if note.seconds >= NEGLIGIBLE * every[0].seconds]
        yield from ((note, phase, note.text) for note in shown)
        if left := len(every) - len(shown):
            yield None, phase, f"... and {left} more {what}{'s' * (left != 1)}"


# ---- the step as a whole


def disagreement(conflict: Conflict) -> str:
    """The two pins of a conflict in one line."""
    one, other = conflict.pins
    return f"{one}, forward against backward" if one == other else f"{one}, against {other}"


def peak_place(memory: MemoryReport) -> str:
    """Where the peak is, its innermost function only: ", train.py:6 in loss" of "train.py:6 in build.<locals>.loss"; or ""."""
    return clean(re.sub(r"\S*<locals>\.", "", f", {memory.where}")) if memory.where else ""


def categories(memory: MemoryReport) -> list[str]:
    """Categories of memory over the step, the longest-lived first."""
    return sorted({k for p in (memory.at_peak, *memory.profile) for k in p}, key=lambda kind: _rank(kind, MEMORY_KINDS))
