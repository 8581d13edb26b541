"""Planned against emitted collectives, joined by the user's source line.

    same        moved as planned, within `tolerance`
    cheaper     XLA moves less (it combined two reductions, or gathered once for two readers)
    dearer      XLA moves more, or by a dearer collective (an all-reduce where a reduce-scatter was planned)
    unplanned   emitted and never planned
    missing     planned and never emitted

Sizes are bytes on the wire: what one device sends in one step by the ring algorithm, so that an all-reduce counts twice what a
reduce-scatter of the same buffer does. XLA may attribute a collective to another line than the plan, or emit one over several axes
where the plan has one per axis; leftovers are joined once more, first whole lines by axes and size, then single collectives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.files import short_place
from shardplan.mesh.collective import wire_bytes
from shardplan.units import format_bytes
from shardplan.xla.compiler.compile import Compiled
from shardplan.xla.hlo.collectives import CombinedTensor, HloCollective

VERDICTS = ("unplanned", "dearer", "missing", "cheaper", "same")


@dataclass(frozen=True)
class ExpectedCollective:
    """A planned collective.

    Attributes:
        kind, bytes: as in `HloCollective`.
        axes: mesh axes it runs over, in any order; `group_size` devices each.
        runs: per step.
        source: 'file:line' of the user's program; '' when unknown.
        note: the caller's, carried into the findings.
        reshard: a number shared by the collectives of one reshard path.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float
    group_size: int
    runs: float = 1.0
    source: str = ""
    note: str = ""
    reshard: int | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return self.runs * wire_bytes(self.kind, self.bytes, self.group_size)

    def __str__(self) -> str:
        return _describe(self, self.bytes)


@dataclass(frozen=True)
class EmittedTensor:
    """One tensor of a collective that XLA emitted."""

    collective: HloCollective
    part: CombinedTensor

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        c = self.collective
        return c.runs * wire_bytes(c.kind, self.part.array.bytes, c.group_size)

    @property
    def source(self) -> str:
        """'file:line' of the tensor, or of the collective; '' where XLA kept none."""
        return self.part.source or self.collective.source or ""

    def __str__(self) -> str:
        return f"{_describe(self.collective, self.part.array.bytes)}, {self.part.array}"


@dataclass(frozen=True)
class CollectiveFinding:
    """One of `VERDICTS` on the planned and the emitted collectives of one line (the plan's, if it has one) over the same axes."""

    verdict: str
    source: str
    axes: tuple[str, ...]
    planned: tuple[ExpectedCollective, ...]
    emitted: tuple[EmittedTensor, ...]

    @property
    def planned_bytes(self) -> float:
        """On the wire, per device and step."""
        return _sent(self.planned)

    @property
    def emitted_bytes(self) -> float:
        """On the wire, per device and step."""
        return _sent(self.emitted)

    @property
    def difference_bytes(self) -> float:
        """Absolute difference on the wire."""
        return abs(self.emitted_bytes - self.planned_bytes)


@dataclass(frozen=True)
class CollectiveComparison:
    """All findings, the greatest difference first within a verdict; `print` for people."""

    findings: tuple[CollectiveFinding, ...]

    def of(self, verdict: str) -> tuple[CollectiveFinding, ...]:
        """The findings with one verdict."""
        return tuple(f for f in self.findings if f.verdict == verdict)

    @property
    def planned_bytes(self) -> float:
        """On the wire, per device and step."""
        return sum(f.planned_bytes for f in self.findings)

    @property
    def emitted_bytes(self) -> float:
        """On the wire, per device and step."""
        return sum(f.emitted_bytes for f in self.findings)

    @property
    def ratio(self) -> float:
        """Planned over emitted; 1 when neither moves anything."""
        if not self.emitted_bytes:
            return 1.0 if not self.planned_bytes else float("inf")
        return self.planned_bytes / self.emitted_bytes

    def __str__(self) -> str:
        lines = [
            f"planned {format_bytes(self.planned_bytes)}, emitted {format_bytes(self.emitted_bytes)} on the wire "
            f"per device and step: {self.ratio:.2f}"
        ]
        for f in self.findings:
            if f.verdict != "same":
                lines += ["", f"{f.verdict}  {short_place(f.source) or 'no line known'}"]
                lines += [f"   planned  {e}" for e in _few(f.planned)] + [f"   emitted  {e}" for e in _few(f.emitted)]
        lines += ["", f"{len(self.of('same'))} of {len(self.findings)} as planned"]
        return "\n".join(lines)


def compare(
    planned: Iterable[ExpectedCollective], compiled: Compiled | Iterable[HloCollective], tolerance: float = 0.1
) -> CollectiveComparison:
    """Joins every collective that is planned, local slices apart, with those emitted for the same step on the same mesh.

    `tolerance` is the relative difference on the wire that still counts as the same.
    """
    collectives = compiled.collectives if isinstance(compiled, Compiled) else compiled
    left, right = defaultdict(list), defaultdict(list)
    for e in planned:
        if e.group_size > 1 and e.bytes:
            left[short_place(e.source), frozenset(e.axes)].append(e)
    for m in (EmittedTensor(c, p) for c in collectives if c.group_size > 1 for p in c.parts):
        right[short_place(m.source), frozenset(m.collective.axes)].append(m)
    findings = [_finding(left.pop(k), right.pop(k), tolerance) for k in sorted(left.keys() & right.keys(), key=str)]
    findings += _on_other_lines(left, right, tolerance)
    findings += [_finding(group, [], tolerance) for group in left.values()]
    findings += [_finding([], group, tolerance) for group in right.values()]
    findings = _over_joint_axes(_rebalance(findings, tolerance), tolerance)
    return CollectiveComparison(tuple(sorted(findings, key=lambda f: (VERDICTS.index(f.verdict), -f.difference_bytes, f.source))))


def _sent(found: Iterable[ExpectedCollective | EmittedTensor]) -> float:
    return sum(x.wire_bytes for x in found)


def _on_other_lines(left: dict, right: dict, tolerance: float) -> list[CollectiveFinding]:
    """Findings of leftovers on different lines that move equal bytes over the same axes; removes them from both."""
    out = []
    for key in sorted(left, key=lambda k: (-_sent(left[k]), str(k))):
        size = _sent(left[key])
        gaps = [(abs(_sent(group) - size), str(k), k) for k, group in right.items() if k[1] == key[1]]
        if gaps and min(gaps)[0] <= tolerance * size:
            out.append(_finding(left.pop(key), right.pop(min(gaps)[2]), tolerance))
    return out


def _rebalance(findings: list[CollectiveFinding], tolerance: float) -> list[CollectiveFinding]:
    """Moves emitted collectives from lines with a surplus to lines that lack one of that kind, axes and size."""
    found = [(list(f.planned), list(f.emitted)) for f in findings]
    over = [n for n, f in enumerate(findings) if f.verdict in ("unplanned", "dearer")]
    short = [n for n, f in enumerate(findings) if f.verdict in ("missing", "cheaper")]

    def excess(n: int) -> float:
        planned, emitted = found[n]
        return _sent(emitted) - _sent(planned)

    for n in over:
        for m in sorted(found[n][1], key=lambda m: (-m.wire_bytes, str(m))):
            least = (1 - tolerance) * m.wire_bytes
            takers = [k for k in short if -excess(k) >= least and any(_matches(e, m, tolerance) for e in found[k][0])]
            if takers and excess(n) >= least:
                found[n][1].remove(m)
                found[takers[0]][1].append(m)
    return [_finding(*f, tolerance) for f in found if any(f)]


def _matches(e: ExpectedCollective, m: EmittedTensor, tolerance: float) -> bool:
    """Of one kind, axes and size in one run: XLA may emit a loop's body twice, and its first and last round apart."""
    c, size = m.collective, wire_bytes(e.kind, e.bytes, e.group_size)
    emitted = wire_bytes(c.kind, m.part.array.bytes, c.group_size)
    return e.kind == c.kind and {*e.axes} == {*c.axes} and abs(size - emitted) <= tolerance * size


def _over_joint_axes(findings: list[CollectiveFinding], tolerance: float) -> list[CollectiveFinding]:
    """Joins a reshard planned as one collective per axis with the one collective over all these axes that XLA emitted."""
    found = [(list(f.planned), list(f.emitted)) for f in findings]
    reshards = defaultdict(list)
    for n, (planned, _) in enumerate(found):
        for e in planned:
            if e.reshard is not None:
                reshards[e.reshard].append((n, e))
    for n, f in enumerate(findings):
        for m in f.emitted if f.verdict == "unplanned" else ():
            for reshard, steps in reshards.items():
                first = max((e for _, e in steps), key=lambda e: e.bytes)
                covers = len(steps) > 1 and {a for _, e in steps for a in e.axes} == {*m.collective.axes}
                here = short_place(first.source) == short_place(f.source)
                if covers and here and abs(first.bytes - m.part.array.bytes) <= tolerance * first.bytes:
                    for k, e in steps:
                        found[k][0].remove(e)
                        found[n][0].append(e)
                    del reshards[reshard]
                    break
    return [_finding(*f, tolerance) for f in found if any(f)]


def _finding(planned: list[ExpectedCollective], emitted: list[EmittedTensor], tolerance: float) -> CollectiveFinding:
    before, after = _sent(planned), _sent(emitted)
    if not planned or not emitted:
        verdict = "missing" if planned else "unplanned"
    elif abs(after - before) <= tolerance * before:
        verdict = "same"
    else:
        verdict = "dearer" if after > before else "cheaper"
    source = planned[0].source if planned else emitted[0].source
    axes = max([*(e.axes for e in planned), *(m.collective.axes for m in emitted)], key=len)
    return CollectiveFinding(verdict, source, axes, tuple(planned), tuple(emitted))


def _describe(c: ExpectedCollective | HloCollective, n_bytes: float) -> str:
    runs = f" x {c.runs:g}" if c.runs != 1 else ""
    return f"{c.kind} over {', '.join(c.axes)}, {format_bytes(n_bytes)}{runs}"


def _few(entries: Iterable[ExpectedCollective | EmittedTensor]) -> list[str]:
    lines = [text if n == 1 else f"{text}   ({n} times)" for text, n in Counter(map(str, entries)).items()]
    return lines[:4] + ([f"... and {len(lines) - 4} more"] if len(lines) > 4 else [])
