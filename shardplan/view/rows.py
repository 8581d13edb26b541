"""Rows that text and pages show of a plan: similar inputs folded into one, and the step's ops gathered under the user's lines.

Text and HTML show the same rows; neither counts anything itself.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardplan.files import is_library
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import MeshShape
from shardplan.plan import Plan
from shardplan.plan.data import Conflict, Leaf, PlanDecision, PlannedReshard
from shardplan.units import clean
from shardplan.view.fold import fold
from shardplan.view.types import array_type, itemsize, join_axes, type_text

KINDS = ("parameters", "optimizer", "batch", "constants", "output")
PHASES = ("forward", "backward", "update")
MAX_NOTES = 3  # layouts shown under one line, per phase; twice as many reshards
NEGLIGIBLE = 0.02  # share of the line's most expensive result, below which a layout is only counted
MIN_SHARE = 0.01  # of the step, from which a line that shards nothing is shown all the same


# ---- inputs and outputs


@dataclass(frozen=True)
class LeafRow:
    """Leaves of one type, layout and kind whose paths differ in some segments.

    Attributes:
        path: what the paths have in common, "*" for all numbers there are, "{a,b}" for a choice.
        leaves: them, in flat order.
        device_bytes: what one device holds of all of them.
    """

    path: str
    leaves: tuple[Leaf, ...]
    device_bytes: float

    @property
    def first(self) -> Leaf:
        """The leaf that stands for all."""
        return self.leaves[0]

    @property
    def count(self) -> int:
        """Leaves in the row."""
        return len(self.leaves)

    @cached_property
    def type(self) -> str:
        """Type of one leaf with its axes: "f32[768, 3072@model]"."""
        return type_text(self.first.dtype, self.first.shape, self.first.layout)

    @property
    def layout(self) -> str:
        """PartitionSpec of one leaf, or "replicated"."""
        return clean(str(self.first.layout)) if self.first.layout.sharded_axes else "replicated"


def leaf_rows(leaves: Sequence[Leaf], mesh: MeshShape) -> tuple[LeafRow, ...]:
    """Rows in the order of kinds, then of the first leaf."""
    groups: dict[tuple, list[int]] = {}
    for n, x in enumerate(leaves):
        groups.setdefault((x.kind, x.dtype, x.shape, x.layout), []).append(n)
    rows = []
    for numbers in groups.values():
        for path, members in fold([(leaves[n].path, n) for n in numbers], [x.path for x in leaves]):
            chosen = tuple(leaves[n] for n in members)
            first = chosen[0]
            local = math.prod(first.layout.local_shape(first.shape, mesh)) * itemsize(first.dtype)
            rows.append((_kind_order(first.kind), members[0], LeafRow(path, chosen, local * len(chosen))))
    return tuple(row for *_, row in sorted(rows, key=lambda r: r[:2]))


def _kind_order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind), "") if kind in KINDS else (len(KINDS), kind)


# ---- the user's lines


@dataclass(frozen=True)
class LineTraffic:
    """Collectives of one kind, over the same axes, in one phase of one line; all runs of a step together."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    runs: float
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} over {join_axes(self.axes)}"


@dataclass(frozen=True)
class LineNote:
    """A comment under a line: a layout of its results ("layout") or a reshard of an operand ("reshard")."""

    what: str
    phase: str
    text: str
    runs: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class LineRow:
    """One line of the user's program, or what stands on none (`number` 0).

    Attributes:
        file: as the program named it; `place` is for people, e.g. "train.py:41".
        code: the line itself, "" where it cannot be read.
        compute_s, communication_s: of all its ops, per step.
        shards: whether a mesh axis shards one of its results.
    """

    file: str
    number: int
    function: str
    place: str
    code: str
    compute_s: float
    communication_s: float
    collectives: tuple[LineTraffic, ...]
    notes: tuple[LineNote, ...]
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


def lines(plan: Plan, source: bool = True) -> tuple[LineRow, ...]:
    """The user's lines in the order in which they first run; without `source`, without their code."""
    known = {(x.file, x.line, ""): x for x in plan.lines}
    found: dict[tuple[str, int, str], list[PlanDecision]] = {key: [] for key in known}
    for d in plan.decisions:
        traits = traits_of(d.primitive)
        if traits.step_input and not d.reshards:
            continue
        border = "" if d.file else "inputs" if traits.step_input else "outputs" if traits.step_output else ""
        found.setdefault((d.file, d.line, border), []).append(d)
    names = file_names(file for file, *_ in found)
    return tuple(
        LineRow(
            file,
            number,
            here[0].function if here else "",
            f"{names[file]}:{number}" if file else border or "no line known",
            clean(known[file, number, border].code) if source and (file, number, border) in known else "",
            known[file, number, border].seconds if (file, number, border) in known else 0.0,
            sum(d.comm_seconds for d in here),
            _collectives(here),
            _notes(here),
            any(x is not None and x.sharded_axes for d in here for x in d.result_layouts),
        )
        for (file, number, border), here in found.items()
    )


def _collectives(decisions: Sequence[PlanDecision]) -> tuple[LineTraffic, ...]:
    sums: dict[tuple, list[float]] = {}
    for d in decisions:
        for reshard in d.reshards:
            for c in reshard.collectives:
                total = sums.setdefault((d.phase, c.kind, c.axes), [0.0, 0.0, 0.0])
                for k, x in enumerate((1.0, c.bytes, c.seconds)):
                    total[k] += d.runs * x
    rows = [LineTraffic(*key, *total) for key, total in sums.items()]
    return tuple(sorted(rows, key=lambda t: (_phase_order(t.phase), -t.seconds, t.kind, t.axes)))


def _notes(decisions: Sequence[PlanDecision]) -> tuple[LineNote, ...]:
    sums: dict[tuple, list[float]] = {}
    for d in decisions:
        if not traits_of(d.primitive).endpoint and d.result_layouts and (layout := d.result_layouts[0]) is not None:
            total = sums.setdefault(("layout", d.phase, array_type(d.result_type, layout)), [0.0] * 3)
            total[0] += d.runs
            total[2] += d.runs * d.seconds
        for reshard in d.reshards:
            total = sums.setdefault(("reshard", d.phase, _reshard(reshard)), [0.0] * 3)
            total[0] += d.runs
            total[1] += d.runs * sum(c.bytes for c in reshard.collectives if c.kind != "slice")
            total[2] += d.runs * sum(c.seconds for c in reshard.collectives)
    rows = [LineNote(*key, *total) for key, total in sums.items()]
    return tuple(sorted(rows, key=lambda n: (_phase_order(n.phase), n.what == "reshard", -n.seconds, n.text)))


def _reshard(reshard: PlannedReshard) -> str:
    steps = ", ".join(f"{c.kind} over {join_axes(c.axes)}" for c in reshard.collectives)
    return f"{steps} -> {array_type(reshard.array, reshard.after)}"


def _phase_order(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase), "") if phase in PHASES else (len(PHASES), phase)


def file_names(files: Iterable[str]) -> dict[str, str]:
    """Short names of files that tell them apart: the part inside site-packages, or as much of the end as is needed."""
    distinct = list(dict.fromkeys(files))
    out = {}
    for file in distinct:
        parts = re.split(r"[/\\]", file)
        keep = len(parts) - 1 if is_library(file) else 1
        while keep < len(parts) and any(_tail(other, keep) == parts[-keep:] for other in distinct if other != file):
            keep += 1
        out[file] = clean("/".join(parts[-keep:]))
    return out


def _tail(file: str, n: int) -> list[str]:
    return re.split(r"[/\\]", file)[-n:]


def annotated(plan: Plan, lines: Sequence[LineRow]) -> list[tuple[str, list[LineRow]]]:
    """(file, its lines that have something to say), the user's own files first, then libraries."""
    total = plan.seconds["total"] or 1.0
    files: dict[str, list[LineRow]] = {}
    for line in sorted(lines, key=lambda line: line.is_library):
        heavy = line.seconds >= MIN_SHARE * total
        if line.code and (line.collectives or heavy or (line.shards and not line.is_library)):
            files.setdefault(line.file, []).append(line)
    return [(here[0].place.rsplit(":", 1)[0], sorted(here, key=lambda line: line.number)) for here in files.values()]


def line_notes(line: LineRow) -> Iterator[tuple[LineNote | None, str, str]]:
    """(note, phase, text) of what is said under a line: the layouts and reshards that cost most, then how many are left out."""
    for (phase, what), notes in itertools.groupby(line.notes, key=lambda note: (note.phase, note.what)):
        every = list(notes)
        shown = every[: 2 * MAX_NOTES]
        if what == "layout":
            shown = [note for note in every[:MAX_NOTES] if note.seconds >= NEGLIGIBLE * every[0].seconds]
        yield from ((note, phase, note.text) for note in shown)
        if left := len(every) - len(shown):
            yield None, phase, f"... and {left} more {what}{'s' * (left != 1)}"


def disagreement(conflict: Conflict) -> str:
    """Which pins disagree."""
    one, other = conflict.pins
    return f"{one}, forward against backward" if one == other else f"{one}, against {other}"


def source_labels(lines: Sequence[LineRow]) -> dict[tuple[str, int], str]:
    """(file, number) -> its place."""
    return {(line.file, line.number): line.place for line in lines}


def where(text: str) -> str:
    """A place without the functions that a function stands in: "train.py:6 in loss" of "train.py:6 in build.<locals>.loss"."""
    return clean(re.sub(r"\S*<locals>\.", "", text))


# ---- the step as a whole


MEMORY_KINDS = ("parameters", "optimizer", "constants", "batch", "gathered", "activations", "gradients", "update")


def categories(plan: Plan) -> tuple[str, ...]:
    """What memory is made of over the step, what stays longest first."""
    found = dict.fromkeys(k for p in (plan.memory_report.at_peak, *plan.memory_report.profile) for k in p)
    return tuple(sorted(found, key=lambda k: (MEMORY_KINDS.index(k) if k in MEMORY_KINDS else len(MEMORY_KINDS), k)))
