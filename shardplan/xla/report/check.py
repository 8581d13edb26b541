"""Checks a step as its author sharded it: collectives by source line, replicated arguments, warnings, memory, thresholds.

>>> report = check(step, params, batch, target="h100:8", max_bytes=2e9, fail_on={"remat"})
>>> print(report)
compiled for h100:8 in 1.1 s, mesh data=4, model=2
memory       5.77 MiB of 79.1 GiB per device: arguments 1.52 MiB, temporaries 4.27 MiB
products     176 Mflop per device, 1.00 of its share
collectives  22.3 MB per device and step, 9.44 MB of it while other work runs

  train.py:19  h = jax.nn.gelu(h @ w[0])
     all-gather over data            524 kB x 6     3.15 MB  forward
     ...
>>> report.failures
()
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardplan import _jax
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.units import format_bytes, format_flops, format_memory
from shardplan.xla.compiler import _backend
from shardplan.xla.compiler.compile import Compiled, compile_lowered, lower_for
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import CombinedTensor, HloCollective
from shardplan.xla.hlo.peak import Buffer
from shardplan.xla.hlo.remat import Rematerialization
from shardplan.xla.hlo.schedule import Overlap, overlaps
from shardplan.xla.hlo.text import Frame, HloArray, users_line

FAIL_ON = ("guess", "memory", "remat", "replicated", "twice")


@dataclass(frozen=True)
class SourceLineCollectives:
    """Collectives of one kind that one source line causes.

    Attributes:
        frame: the line; None where XLA kept no trace.
        phase: 'forward', 'recomputed', 'backward' or '' (outside of any gradient).
        tensors: (array, runs) of each tensor moved.
        bytes: per device and step, all runs.
        asynchronous_bytes: of these, moved while other work may run.
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
        return linecache.getline(self.frame.file, self.frame.line).strip() if self.frame else ""


@dataclass(frozen=True)
class ReplicatedArgument:
    """An argument of the step of which devices hold copies.

    Attributes:
        path: in the arguments: "args[0]['w']".
        array: the global array.
        bytes: on each device.
        copies: how many devices hold the same shard.
    """

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
    """Result of `check`; every figure is per device and step. `print` it.

    Attributes:
        compiled: the compiled step, or why it failed.
        replicas: replicated arguments, the most wasteful first.
        failures: thresholds that were crossed, as sentences; () when all is well.
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
        return _describe(self)


def check(
    function,
    *args: Any,
    target: str | Target | None = None,
    max_bytes: float | None = None,
    max_memory: float | None = None,
    fail_on: Collection[str] = (),
    large_bytes: float = 64e6,
    mesh: MeshShape | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    timeout_s: float = 900,
    **kwargs: Any,
) -> XlaReport:
    """Compiles a jitted function as its author sharded it, without running it, and reports on the compiled step.

    Args:
        function: a `jax.jit`ed function, or a plain one whose arguments are sharded.
        *args: positional arguments; arrays or shapes.
        target: 'h200:8', 'h100:8x8', ...; None for the devices at hand.
        max_bytes: fail when collectives move more per device and step.
        max_memory: fail when a device needs more bytes.
        fail_on: any of 'remat' (XLA replicates a tensor in full to reshard it), 'memory' (it does not fit the target),
            'replicated' (an argument wastes more than `large_bytes` on copies), 'twice' (devices repeat each other's products),
            'guess' (a collective in a loop of unknown length). A failed compile always fails.
        large_bytes: threshold of 'replicated'.
        mesh: as for `compile`.
        options: as for `compile`.
        timeout_s: as for `compile`.
        **kwargs: keyword arguments; arrays or shapes.

    Raises:
        ValueError: an unknown word in `fail_on`, or a target that does not match; see `compile`.
    """
    refuse_unknown(fail_on)
    lowered = lower_for(target, function, *args, **kwargs)
    return check_lowered(lowered, target, max_bytes, max_memory, fail_on, large_bytes, mesh, options, timeout_s)


def refuse_unknown(fail_on: Collection[str]) -> None:
    """ValueError for a word that `fail_on` does not know."""
    unknown = sorted(set(fail_on) - set(FAIL_ON))
    if unknown:
        raise ValueError(f"fail_on has {', '.join(map(repr, unknown))}; it knows {', '.join(map(repr, FAIL_ON))}")


def check_lowered(
    lowered,
    target: str | Target | None,
    max_bytes: float | None = None,
    max_memory: float | None = None,
    fail_on: Collection[str] = (),
    large_bytes: float = 64e6,
    mesh: MeshShape | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    timeout_s: float = 900,
) -> XlaReport:
    """As `check`, for a step that `lower_for` lowered for the same target."""
    compiled = compile_lowered(lowered, target, mesh=mesh, options=options, timeout_s=timeout_s)
    report = XlaReport(compiled, _replicas(lowered, compiled) if compiled.ok else (), ())
    return XlaReport(compiled, report.replicas, tuple(_failures(report, max_bytes, max_memory, frozenset(fail_on), large_bytes)))


def _failures(report: XlaReport, max_bytes, max_memory, fail_on: frozenset[str], large_bytes: float):
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
    groups: dict[tuple, list[tuple[HloCollective, CombinedTensor]]] = {}
    for c in collectives:
        if c.group_size == 1:
            continue
        for part in c.parts:
            frame = users_line(part.stack) or users_line(c.stack)
            groups.setdefault((frame, c.kind, c.reduction, c.axes, _phase(part.op_name or c.op_name)), []).append((c, part))
    lines = [
        SourceLineCollectives(
            frame,
            kind,
            reduction,
            axes,
            phase,
            tuple((p.array, c.runs) for c, p in moved),
            sum(p.array.bytes * c.runs for c, p in moved),
            sum(p.array.bytes * c.runs for c, p in moved if c.asynchronous),
        )
        for (frame, kind, reduction, axes, phase), moved in groups.items()
    ]

    def order(line: SourceLineCollectives):
        place = (line.frame.file, line.frame.line) if line.frame else ("", 0)
        return -line.bytes, place, line.kind, line.axes, line.phase

    return tuple(sorted(lines, key=order))


def _phase(op_name: str) -> str:
    if _jax.REMATERIALISED in op_name:
        return "recomputed"
    if _jax.BACKWARD in op_name:
        return "backward"
    return "forward" if _jax.DIFFERENTIATED in op_name else ""


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


def _describe(report: XlaReport) -> str:
    compiled = report.compiled
    where = compiled.target or f"{compiled.n_devices} CPU devices"
    mesh = f", mesh {compiled.mesh}" if compiled.mesh else ""
    if not compiled.ok or compiled.memory is None:
        return f"compiling for {where} failed{mesh}\n{compiled.error}"
    memory, device = compiled.memory, compiled.target.gpu.memory_bytes if compiled.target else None
    of = f" of {format_memory(device)}" if device else ""
    hidden = sum(line.asynchronous_bytes for line in report.lines)
    balance = (f", {compiled.balance:.2f} of its share" if compiled.balance else "") + recomputed(compiled)
    lines = [
        f"compiled for {where} in {compiled.seconds:.1f} s{mesh}",
        f"memory       {format_memory(memory.peak_bytes)}{of} per device: arguments {format_memory(memory.argument_bytes)}, "
        f"temporaries {format_memory(memory.temp_bytes)}" + ("" if compiled.fits is not False else "   DOES NOT FIT"),
        f"products     {format_flops(compiled.flops)} per device{balance}",
        f"collectives  {format_bytes(report.collective_bytes)} per device and step, "
        f"{format_bytes(hidden)} of it while other work may run",
    ]
    lines += _describe_lines(report.lines)
    lines += section("largest at the memory's peak", [describe_buffer(b, compiled.n_devices) for b in compiled.peak[:6]])
    lines += section("held by several devices, the most wasteful first", [str(r) for r in report.replicas[:5]])
    lines += section("XLA warns", [describe_remat(r) for r in report.rematerializations])
    lines += section("failed", list(report.failures))
    return "\n".join(lines)


def _describe_lines(found: tuple[SourceLineCollectives, ...]) -> list[str]:
    places: dict[Frame | None, list[SourceLineCollectives]] = {}
    for line in found:
        places.setdefault(line.frame, []).append(line)
    out = []
    for frame, here in places.items():
        place = f"{Path(frame.file).name}:{frame.line}" if frame else "no line known"
        out += ["", f"  {place}  {here[0].code}".rstrip()]
        for line in here:
            what = f"{line.kind}{f' ({line.reduction})' if line.reduction else ''} over {', '.join(line.axes) or 'devices'}"
            biggest = max((a.bytes for a, _ in line.tensors), default=0)
            times = f"up to {format_bytes(biggest)} x {line.count:g}" if line.count != 1 else format_bytes(biggest)
            out.append(f"     {what:<38} {times:>20}  {format_bytes(line.bytes):>8}  {line.phase}".rstrip())
    return out


def describe_buffer(b: Buffer, n_devices: int) -> str:
    """One line: memory, array, source line, and whether every device holds all of it."""
    frame = users_line(b.stack)
    where = f"{Path(frame.file).name}:{frame.line}  {linecache.getline(frame.file, frame.line).strip()}" if frame else b.op_name
    what = str(b.array or b.name)
    replicated = "  replicated on every device" if b.copies == n_devices else ""
    return f"{format_memory(b.bytes):>8}  {what:<24} {where}{replicated}".rstrip()


def describe_remat(r: Rematerialization) -> str:
    """One rematerialization warning, with its source line."""
    frame = users_line(r.stack)
    code = f"\n     {linecache.getline(frame.file, frame.line).strip()}" if frame else ""
    before, after = (x if isinstance(x, Layout) else y for x, y in ((r.before, r.sharding_before), (r.after, r.sharding_after)))
    place = f" at {Path(frame.file).name}:{frame.line}" if frame else ""
    return f"{r.array} is replicated in full to get from {before} to {after}{place}{code}"


def recomputed(compiled: Compiled) -> str:
    """The flops that XLA's rematerialization repeats; '' for none."""
    repeated = compiled.recomputed_flops
    return f", {format_flops(repeated)} of it computed again by XLA to save memory" if repeated else ""


def section(title: str, entries: list[str]) -> list[str]:
    """Lines of a titled list; none for an empty one."""
    return ["", title, *(f"  {e}" for e in entries)] if entries else []
