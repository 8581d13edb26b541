"""Checks a compiled step: as its author sharded it, by source line and thresholds, and against the plan that it was made from."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath
from typing import Any

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.mesh.layout import MeshShape
from shardplan.plan import Plan
from shardplan.plan.data import PlanDecision, PlannedCollective, PlannedReshard
from shardplan.units import format_bytes, format_flops, format_memory
from shardplan.xla.compiler import _backend
from shardplan.xla.compiler.compile import WITHOUT_TRITON, Compiled, Options, compile, lower_for, target_at_hand
from shardplan.xla.compiler.options import as_known
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import HloCollective
from shardplan.xla.hlo.diagnostics import Buffer, Rematerialization
from shardplan.xla.hlo.schedule import Overlap, overlaps
from shardplan.xla.hlo.text import Frame, HloArray
from shardplan.xla.report.compare import CollectiveComparison, ExpectedCollective, compare

FAIL_ON = ("guess", "memory", "remat", "replicated", "twice")
PHASES = {_jax.REMATERIALISED: "recomputed", _jax.BACKWARD: "backward", _jax.DIFFERENTIATED: "forward"}
"""Part of an op's name -> when the op runs; the first that matches."""


@dataclass(frozen=True)
class SourceLineCollectives:
    """Collectives of one kind that one source line causes.

    Attributes:
        frame: the line; None where XLA kept no trace.
        phase: 'forward', 'recomputed', 'backward' or '' (outside of any gradient).
        tensors: (array, runs) of each tensor moved.
        bytes: per device and step, all runs; `asynchronous_bytes` of these are moved while other work may run.
    """

    frame: Frame | None
    kind: str
    reduction: str
    axes: tuple[str, ...]
    phase: str
    tensors: tuple[tuple[HloArray, float], ...]
    bytes: float
    asynchronous_bytes: float

    @property
    def count(self) -> float:
        """Tensors moved in one step, all runs."""
        return sum(runs for _, runs in self.tensors)

    @property
    def source(self) -> str:
        """'file:line'."""
        return str(self.frame) if self.frame else "no line known"

    @property
    def code(self) -> str:
        """Text of the line; '' where the file cannot be read."""
        return self.frame.code if self.frame else ""


@dataclass(frozen=True)
class ReplicatedArgument:
    """An argument of the step, like "args[0]['w']", of which `copies` devices hold the same shard; `array` is global, `bytes` local."""

    path: str
    array: HloArray
    bytes: int
    copies: int

    @property
    def wasted_bytes(self) -> float:
        """Bytes per device that sharding over the copies would save."""
        return self.bytes * (1 - 1 / self.copies)

    def __str__(self) -> str:
        return f"{self.path}  {self.array}, {format_memory(self.bytes)} on each device, the same on {self.copies}"


@dataclass(frozen=True)
class XlaReport:
    """The compiled step, its replicated arguments (the most wasteful first), and the thresholds that it crosses, as sentences.

    `print` it; every figure is per device and step.
    """

    compiled: Compiled
    replicas: tuple[ReplicatedArgument, ...]
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether it compiled and no threshold was crossed."""
        return not self.failures

    @cached_property
    def lines(self) -> tuple[SourceLineCollectives, ...]:
        """Collectives by source line, kind, axes and phase, the most bytes first."""
        return _lines(self.compiled.collectives) if self.compiled.ok else ()

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The work between start and done of each asynchronous collective."""
        return overlaps(self.compiled.module, self.compiled.mesh) if self.compiled.ok else ()

    @property
    def rematerializations(self) -> tuple[Rematerialization, ...]:
        """XLA's "Involuntary full rematerialization" warnings."""
        return self.compiled.rematerializations

    @property
    def collective_bytes(self) -> float:
        """Bytes moved by collectives in one step, per device."""
        return sum(line.bytes for line in self.lines)

    def __str__(self) -> str:
        compiled, memory = self.compiled, self.compiled.memory
        mesh = f", mesh {compiled.mesh}" if compiled.mesh else ""
        if not compiled.ok or memory is None:
            return f"compiling for {compiled.devices} failed{mesh}\n{compiled.error}"
        of = f" of {format_memory(compiled.target.gpu.memory_bytes)}" if compiled.target else ""
        hidden = sum(line.asynchronous_bytes for line in self.lines)
        balance = (f", {compiled.balance:.2f} of its share" if compiled.balance else "") + _recomputed(compiled)
        lines = [
            f"compiled for {compiled.devices} in {compiled.seconds:.1f} s{mesh}",
            *_retried(compiled),
            f"memory       {format_memory(memory.peak_bytes)}{of} per device: arguments {format_memory(memory.argument_bytes)}, "
            f"temporaries {format_memory(memory.temp_bytes)}{_misfit(compiled)}",
            f"products     {format_flops(compiled.flops)} per device{balance}",
            f"collectives  {format_bytes(self.collective_bytes)} of buffers per device and step, "
            f"{format_bytes(hidden)} of it while other work may run",
        ]
        return "\n".join([*lines, *_describe_lines(self.lines), *_details(self, self.replicas[:5])])


@dataclass(frozen=True)
class PlanReport:
    """A plan, and the report on the compiled step; every figure is per device and step. `print` it."""

    plan: Plan
    report: XlaReport

    @property
    def compiled(self) -> Compiled:
        """The compiled step, or why it failed."""
        return self.report.compiled

    @property
    def ok(self) -> bool:
        """Whether it compiled and no threshold was crossed."""
        return self.report.ok

    @property
    def failures(self) -> tuple[str, ...]:
        """Thresholds that were crossed, as sentences."""
        return self.report.failures

    @cached_property
    def comparison(self) -> CollectiveComparison:
        """Planned against emitted collectives; RuntimeError when the compile failed."""
        if not self.compiled.ok:
            raise RuntimeError(f"nothing to compare: {self.compiled.error}")
        return compare(expected(self.plan), self.compiled)

    @cached_property
    def flops(self) -> float | None:
        """Planned flops of products and convolutions on one device; None for a plan read from a file."""
        planned = self.plan.context.planned if self.plan.context is not None else None
        return None if planned is None else planned.product_flops

    @property
    def collectives_ratio(self) -> float:
        """Bytes on the wire, planned over emitted."""
        return self.comparison.ratio

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory, planned over XLA's; None when the compile failed."""
        memory = self.compiled.memory
        return self.plan.memory().peak / memory.peak_bytes if memory and memory.peak_bytes else None

    @property
    def flops_ratio(self) -> float | None:
        """Flops of products, planned over emitted; None where either is unknown or there are none."""
        return self.flops / self.compiled.flops if self.flops and self.compiled.ok and self.compiled.flops else None

    def __str__(self) -> str:
        compiled, memory = self.compiled, self.compiled.memory
        if not compiled.ok or memory is None:
            return str(self.report)
        comparison = self.comparison
        sent = format_bytes(comparison.planned_bytes), format_bytes(comparison.emitted_bytes)
        peak = format_memory(self.plan.memory().peak), format_memory(memory.peak_bytes)
        rows = [
            ("", "planned", "XLA", ""),
            ("collectives", *sent, f"{comparison.ratio:.2f}   bytes that a device sends in one step"),
            ("memory", *peak, f"{self.memory_ratio:.2f}   at its peak{_misfit(compiled)}"),
        ]
        if self.flops is not None:
            ratio = "" if self.flops_ratio is None else f"{self.flops_ratio:.2f}   products and convolutions{_recomputed(compiled)}"
            rows.append(("products", format_flops(self.flops), format_flops(compiled.flops), ratio))
        lines = [f"compiled for {compiled.devices} in {compiled.seconds:.1f} s, mesh {self.plan.mesh}", *_retried(compiled)]
        lines += [f"{name:<12} {a:>10} {b:>10}  {ratio}".rstrip() for name, a, b, ratio in rows]
        return "\n".join([*lines, *str(comparison).split("\n")[1:], *_details(self.report)])


def check(
    function,
    *args: Any,
    target: str | Target | None = None,
    max_bytes: float | None = None,
    max_memory: float | None = None,
    fail_on: Collection[str] = (),
    large_bytes: float = 64e6,
    mesh: MeshShape | None = None,
    options: Options | None = None,
    timeout_s: float = 900,
    **kwargs: Any,
) -> XlaReport:
    """Compiles a jitted function as its author sharded it, without running it, and reports on the compiled step.

    Args:
        function: a `jax.jit`ed function, a plain one whose arguments are sharded, or a `jax.stages.Lowered`, as for `compile`.
        *args, **kwargs: its arguments; arrays or shapes.
        target: 'h200:8', 'h100:8x8', ...; None for the devices at hand.
        max_bytes: fail when collectives move more per device and step.
        max_memory: fail when a device needs more bytes.
        fail_on: any of 'remat' (XLA replicates a tensor in full to reshard it), 'memory' (it does not fit the target),
            'replicated' (an argument wastes more than `large_bytes` on copies), 'twice' (devices repeat each other's products),
            'guess' (a collective in a loop of unknown length). A failed compile always fails.
        large_bytes: threshold of 'replicated'.
        mesh, options, timeout_s: as for `compile`.

    Raises:
        ValueError: an unknown word in `fail_on`, or a target that does not match; see `compile`.
    """
    _refuse_unknown(fail_on)
    lowered = lower_for(target, function, *args, **kwargs)
    compiled = compile(lowered, target=target, mesh=mesh, options=options, timeout_s=timeout_s)
    report = XlaReport(compiled, _replicas(lowered, compiled) if compiled.ok else (), ())
    return replace(report, failures=tuple(_failures(report, max_bytes, max_memory, fail_on, large_bytes)))


def _refuse_unknown(fail_on: Collection[str]) -> None:
    if unknown := sorted(set(fail_on) - set(FAIL_ON)):
        raise ShardingError(
            f"fail_on has {', '.join(map(repr, unknown))}, which it does not know.\n  way out: some of {', '.join(map(repr, FAIL_ON))}"
        )


def check_plan(
    plan: Plan, target: str | Target | None = None, fail_on: Collection[str] = (), tolerance: float | None = None, **options: Any
) -> PlanReport:
    """Compiles the planned step for `target` and compares: `Plan.check`.

    Args:
        plan: with its program.
        target, fail_on, **options: as for `check`.
        tolerance: fail when XLA's program sends or holds more than planned by more than this part, such as 0.1.
    """
    _refuse_unknown(fail_on)
    if plan.context is None:
        raise ShardingError(
            "check() needs a plan that remembers its program; this one was read from a file.\n"
            "  way out: auto(mesh, plan=file)(step).check(*args)"
        )
    function, args = plan.context.program(plan)
    lowered = lower_for(target, function, *args)  # so that `options` are none of the step's
    for_gpus = target is not None or target_at_hand() is not None
    flags = (as_known(plan.compiler_options) if for_gpus else {}) | dict(options.pop("options", None) or {})
    report = PlanReport(plan, check(lowered, target=target, fail_on=fail_on, mesh=plan.mesh, options=flags, **options))
    more = tuple(_excesses(report, tolerance)) if tolerance is not None else ()
    return replace(report, report=replace(report.report, failures=(*report.failures, *more)))


def _excesses(report: PlanReport, tolerance: float) -> Iterator[str]:
    memory = report.compiled.memory
    if not report.compiled.ok or memory is None:
        return
    comparison = report.comparison
    for planned, emitted, verb, text in (
        (comparison.planned_bytes, comparison.emitted_bytes, "sends", format_bytes),
        (report.plan.memory().peak, float(memory.peak_bytes), "holds", format_memory),
    ):
        if emitted > (1 + tolerance) * planned:
            more = f"{emitted / planned - 1:.0%} more than" if planned else "where nothing was"
            yield f"a device {verb} {text(emitted)}, {more} planned{f' ({text(planned)})' if planned else ''}"


def expected(plan: Plan) -> tuple[ExpectedCollective, ...]:
    """Every collective that a plan expects XLA to emit; reductions on the line that makes the partial sums."""

    def source(d: PlanDecision, m: PlannedReshard, c: PlannedCollective) -> str:
        at = m.producer_source if c.kind in ("all-reduce", "reduce-scatter") else ""
        return at or (f"{d.file}:{d.line}" if d.file else "")

    reshards = [(d, m) for d in plan.decisions for m in d.reshards]
    return tuple(
        ExpectedCollective(c.kind, c.axes, c.bytes, plan.mesh.size(*c.axes), d.runs, source(d, m, c), m.array, number)
        for number, (d, m) in enumerate(reshards)
        for c in m.collectives
        if c.kind != "slice"
    )


def _failures(report: XlaReport, max_bytes, max_memory, fail_on: Collection[str], large_bytes: float):
    compiled = report.compiled
    if not compiled.ok or compiled.memory is None:
        yield compiled.error
        return
    if max_bytes is not None and report.collective_bytes > max_bytes:
        yield f"collectives move {format_bytes(report.collective_bytes)} per device and step, more than {format_bytes(max_bytes)}"
    peak = compiled.memory.peak_bytes
    if max_memory is not None and peak > max_memory:
        yield f"a device needs {format_memory(peak)}, more than {format_memory(max_memory)}"
    if "memory" in fail_on and compiled.fits is False and compiled.target:
        yield f"a device needs {format_memory(peak)} and {compiled.target} has {format_memory(compiled.target.gpu.memory_bytes)}"
    if "remat" in fail_on:
        yield from map(str, report.rematerializations)
    if "replicated" in fail_on:
        yield from (str(r) for r in report.replicas if r.wasted_bytes > large_bytes)
    if "twice" in fail_on and (compiled.balance or 1) > 1.01:
        yield f"devices do {compiled.balance:.2f} times their share of the products"
    if "guess" in fail_on:
        yield from (f"{c}: in a loop of unknown length" for c in compiled.collectives if c.guessed)


def _lines(collectives: tuple[HloCollective, ...]) -> tuple[SourceLineCollectives, ...]:
    groups = defaultdict(list)
    for c in collectives:
        for part in c.parts if c.group_size > 1 else ():
            op_name = part.op_name or c.op_name
            phase = next((phase for mark, phase in PHASES.items() if mark in op_name), "")
            groups[part.frame or c.frame, c.kind, c.reduction, c.axes, phase].append((c, part.array))
    lines = []
    for (frame, kind, reduction, axes, phase), moved in groups.items():
        tensors = tuple((array, c.runs) for c, array in moved)
        all_bytes = sum(array.bytes * c.runs for c, array in moved)
        asynchronous_bytes = sum(array.bytes * c.runs for c, array in moved if c.asynchronous)
        lines.append(SourceLineCollectives(frame, kind, reduction, axes, phase, tensors, all_bytes, asynchronous_bytes))

    def place(frame: Frame | None) -> tuple[str, int]:
        return (frame.file, frame.line) if frame else ("", 0)

    return tuple(sorted(lines, key=lambda x: (-x.bytes, place(x.frame), x.kind, x.axes, x.phase)))


def _replicas(lowered, compiled: Compiled) -> tuple[ReplicatedArgument, ...]:
    """Arguments of which several devices hold the same shard, by their shapes in the compiled entry computation."""
    entry = compiled.module.computations[compiled.module.entry]
    local = {int(i.literal): i.arrays[0] for i in entry if i.opcode == "parameter" and len(i.arrays) == 1}
    out = []
    for number, (path, _, shape) in enumerate(_backend.arguments(lowered)):
        shard = local.get(number)
        if shard is None or not shard.size:
            continue
        copies = round(compiled.n_devices * shard.size / max(1, math.prod(shape)))
        if copies > 1:
            out.append(ReplicatedArgument(path, HloArray(shard.dtype, shape), shard.bytes, copies))
    return tuple(sorted(out, key=lambda r: (-r.wasted_bytes, r.path)))


# ---- for people


def _describe_lines(found: tuple[SourceLineCollectives, ...]) -> list[str]:
    places = defaultdict(list)
    for line in found:
        places[line.frame].append(line)
    out = []
    for frame, here in places.items():
        out += ["", f"  {frame.short if frame else 'no line known'}  {here[0].code}".rstrip()]
        for line in here:
            what = f"{line.kind}{f' ({line.reduction})' if line.reduction else ''} over {', '.join(line.axes) or 'devices'}"
            biggest = max((a.bytes for a, _ in line.tensors), default=0)
            times = f"up to {format_bytes(biggest)} x {line.count:g}" if line.count != 1 else format_bytes(biggest)
            out.append(f"     {what:<38} {times:>20}  {format_bytes(line.bytes):>8}  {line.phase}".rstrip())
    return out


def _details(report: XlaReport, replicas: tuple[ReplicatedArgument, ...] = ()) -> list[str]:
    """The sections that end a report, none that is empty."""
    sections = {
        "largest at the memory's peak": [_describe_buffer(b, report.compiled.n_devices) for b in report.compiled.peak[:6]],
        "held by several devices, the most wasteful first": replicas,
        "XLA warns": [_describe_remat(r) for r in report.rematerializations],
        "failed": report.failures,
    }
    return [line for title, entries in sections.items() if entries for line in ("", title, *(f"  {e}" for e in entries))]


def _describe_buffer(b: Buffer, n_devices: int) -> str:
    where = f"{b.frame.short}  {b.frame.code}" if b.frame else b.op_name
    replicated = "  replicated on every device" if b.copies == n_devices else ""
    return f"{format_memory(b.bytes):>8}  {b.array or b.name!s:<24} {where}{replicated}".rstrip()


def _describe_remat(r: Rematerialization) -> str:
    place, code = (f" at {r.frame.short}", f"\n     {r.frame.code}") if r.frame else ("", "")
    before, after = r.before or r.sharding_before, r.after or r.sharding_after
    return f"{r.array} is replicated in full to get from {before} to {after}{place}{code}"


def _recomputed(compiled: Compiled) -> str:
    """The flops that XLA's rematerialization repeats; '' for none."""
    repeated = compiled.recomputed_flops
    return f", {format_flops(repeated)} of it computed again by XLA to save memory" if repeated else ""


def _retried(compiled: Compiled) -> list[str]:
    """The line on a second attempt, without XLA's Triton products; [] where the first succeeded."""
    if not compiled.retried:
        return []
    flags = ", ".join(f"{name}={value}" for name, value in WITHOUT_TRITON.items())
    why = re.sub(r"^\w+: (INTERNAL: )?", "", compiled.retried.splitlines()[0])[:90]
    at = re.search(r"Suspected Python Code Location:\s+(\S+:\d+)", compiled.retried)
    return [f"second attempt, with {flags}: XLA {f'failed at {PurePath(at[1]).name}' if at else 'failed'} ({why}...)"]


def _misfit(compiled: Compiled) -> str:
    """The mark of a step that does not fit its target; '' for others."""
    return "   DOES NOT FIT" if compiled.fits is False else ""
