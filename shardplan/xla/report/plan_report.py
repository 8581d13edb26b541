"""A plan against its compiled step: collectives line by line, memory, products.

    >>> print(step.plan(state, batch).check("h100:8"))
    compiled for h100:8 in 2.0 s, mesh data=4, model=2
                       planned      XLA
    collectives        12.7 MB  12.7 MB  1.00
    memory             5.5 MiB  5.77 MiB 0.95
    products          176 Mflop 176 Mflop 1.00

The jitted step is the one that `auto` runs, constraints and all; it is lowered on shapes alone, so that a plan made on an
`AbstractMesh` is checked like any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardplan.errors import ShardingError
from shardplan.plan import Plan
from shardplan.plan.data import PlanDecision, PlannedCollective, PlannedReshard
from shardplan.units import format_bytes, format_flops, format_memory
from shardplan.xla.compiler.compile import Compiled, lower_for
from shardplan.xla.compiler.targets import Target
from shardplan.xla.report.check import (
    XlaReport,
    check_lowered,
    describe_buffer,
    describe_remat,
    recomputed,
    refuse_unknown,
    section,
)
from shardplan.xla.report.compare import CollectiveComparison, ExpectedCollective, compare


@dataclass(frozen=True)
class PlanReport:
    """A plan and the compiled step; every figure is per device and step. `print` it.

    Attributes:
        plan: the plan.
        report: the compiled step, crossed thresholds and warnings.
    """

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
        """Planned flops of products on one device; None for a plan that was not made in this process."""
        return planned_flops(self.plan)

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
        return _describe(self)


def check_plan(plan: Plan, target: str | Target | None = None, fail_on: Collection[str] = (), **options: Any) -> PlanReport:
    """Compiles the planned step for `target` and compares; see `Plan.check`.

    Raises:
        ShardingError: the plan was read from a file and remembers no program.
    """
    refuse_unknown(fail_on)
    if plan.context is None:
        raise ShardingError(
            "check() needs a plan that remembers its program; this one was read from a file.\n"
            "  way out: auto(mesh, plan=file)(step).check(*args)"
        )
    function, args = plan.context.program(plan)
    lowered = lower_for(target, function, *args)
    return PlanReport(plan, check_lowered(lowered, target, fail_on=fail_on, mesh=plan.mesh, **options))


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


def planned_flops(plan: Plan) -> float | None:
    """Flops of the products and convolutions that one device does in one step; None for a plan read from a file."""
    planned = plan.context.planned if plan.context is not None else None
    return None if planned is None else planned.product_flops


def _describe(found: PlanReport) -> str:
    compiled = found.compiled
    if not compiled.ok or compiled.memory is None:
        return str(found.report)
    where = compiled.target or f"{compiled.n_devices} CPU devices"
    comparison, memory = found.comparison, compiled.memory
    rows = [
        ("", "planned", "XLA", ""),
        (
            "collectives",
            format_bytes(comparison.planned_bytes),
            format_bytes(comparison.emitted_bytes),
            f"{comparison.ratio:.2f}   bytes that a device sends in one step",
        ),
        (
            "memory",
            format_memory(found.plan.memory().peak),
            format_memory(memory.peak_bytes),
            f"{found.memory_ratio:.2f}   at its peak" + ("" if compiled.fits is not False else "   DOES NOT FIT"),
        ),
    ]
    if found.flops is not None:
        ratio = "" if found.flops_ratio is None else f"{found.flops_ratio:.2f}   products and convolutions{recomputed(compiled)}"
        rows.append(("products", format_flops(found.flops), format_flops(compiled.flops), ratio))
    lines = [f"compiled for {where} in {compiled.seconds:.1f} s, mesh {found.plan.mesh}"]
    lines += [f"{name:<12} {a:>10} {b:>10}  {ratio}".rstrip() for name, a, b, ratio in rows]
    lines += str(comparison).split("\n")[1:]
    lines += section("largest at the memory's peak", [describe_buffer(b, compiled.n_devices) for b in compiled.peak[:6]])
    lines += section("XLA warns", [describe_remat(r) for r in found.report.rematerializations])
    lines += section("failed", list(found.failures))
    return "\n".join(lines)
