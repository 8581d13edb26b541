"""A plan compared with the classical layouts of its step: data parallelism, ZeRO-1, FSDP, tensor parallelism, mixes; one objective.

A baseline has the inputs of the step in a classical layout (`classical.py`), without the user's pins. All else is chosen by the integer
program for these inputs, the compiler options that the plan chose among are tried, and the program is scheduled as the plan's own is.
So a baseline is no slower than what a person makes of that layout, as far as the model goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pkgutil import resolve_name

from shardplan.costs.pricing import Pricing
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.errors import ShardingError
from shardplan.ilp.solver import solve
from shardplan.mesh.reshard import Resharder
from shardplan.plan.classical import Axes, ClassicalLayout, StepInputs, classical_layouts
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.what_if import sent_bytes
from shardplan.search.objective import Judged, compiled, judge
from shardplan.units import format_percent, to_digits
from shardplan.xla_model.compiler_options import thresholds

ROUNDS = 2
"""Times that the network of a baseline is solved: once more at the prices of what its first plan combines, which saves up to 7 %."""
WORK = 1.0
"""Work of the solver, about seconds, for each."""
COMPARED_OPS = 4_000
"""Ops of a step up to which `fastest_pure` is planned to print a plan: two fifths of the seconds of planning, at most some."""


@dataclass(frozen=True)
class Baseline:
    """A classical layout of the step's inputs, and the step that is planned for it.

    Attributes:
        name: of the layout, with its mesh axes where several are mixed.
        layouts: path of an input -> entries of its PartitionSpec, as pins.
        seconds, peak_bytes, sent_bytes: of the step; of the plan of lowest peak found where nothing fits.
        fits: whether the peak is within the memory limit.
    """

    name: str
    layouts: Mapping[str, tuple]
    seconds: float
    peak_bytes: float
    sent_bytes: float
    fits: bool


@dataclass(frozen=True)
class Baselines:
    """A plan and the baselines of its step, the fastest that fits first; `print` it."""

    plan: Plan
    rows: tuple[Baseline, ...]

    @cached_property
    def best(self) -> Baseline | None:
        """The fastest baseline that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def saving(self) -> float | None:
        """The part of the best baseline's seconds that the plan saves; None without a baseline that fits."""
        return None if self.best is None else 1 - self.plan.seconds["total"] / self.best.seconds

    @property
    def saving_text(self) -> str:
        """`saving` in words; "" without baselines."""
        n, best, saving = len(self.rows), self.best, self.saving
        if not n:
            return ""
        if best is None or saving is None:
            return f"does what none of {n} classical layouts does: fit the memory"
        what = f"{best.name}, the fastest of {n} classical layouts"
        change = format_percent(abs(saving))
        return (
            f"{change} of the step of {what}"
            if saving > 0
            else f"nothing: {change} more than {what}"
            if saving
            else f"nothing: as {what}"
        )

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:baselines_text")(self)


def baselines(plan: Plan) -> Baselines:
    """The answer of `Plan.baselines`."""
    planned = plan.context.planned
    return _compared(plan, (row for each in _classical(planned) if (row := _baseline(planned, *each))))


def saving(plan: Plan) -> str:
    """The answer of `Plan.saving`."""
    planned = plan.context and plan.context.planned
    if planned is None:
        return ""
    if plan.answers_quickly or "_baselines" in vars(plan):
        return plan.baselines().saving_text
    return plan._fastest_pure.saving_text if len(planned.graph.ops) <= COMPARED_OPS else "not known; plan.baselines() compares"


def fastest_pure(plan: Plan) -> Baselines:
    """The layouts that are no mixes, each solved once, the fastest of them once more: quicker than `baselines`, and misses more."""
    planned = plan.context.planned
    layouts = {classical.name: (classical, of) for classical, of in _classical(planned) if classical.pure}
    rows = {name: row for name, each in layouts.items() if (row := _baseline(planned, *each, rounds=1))}
    best = _compared(plan, rows.values()).best
    return _compared(plan, ({**rows, best.name: _baseline(planned, *layouts[best.name]) or best} if best else rows).values())


def _compared(plan: Plan, rows: Iterable[Baseline]) -> Baselines:
    return Baselines(plan, tuple(sorted(rows, key=lambda row: (not row.fits, row.seconds if row.fits else row.peak_bytes, row.name))))


def _classical(planned: Planned) -> Iterator[tuple[ClassicalLayout, Mapping[int, tuple[Axes, ...]]]]:
    """Every classical layout that differs from those before it, and the layouts of the inputs."""
    inputs = StepInputs.of(planned.graph, planned.space.rules)
    known: set[tuple] = set()
    for classical in classical_layouts(planned.space.mesh) if inputs.parameters else ():
        layouts = inputs.layouts(planned.space.mesh, classical)
        key = tuple(sorted(layouts.items()))
        if key not in known:  # else there is nothing to shard in this way
            known.add(key)
            yield classical, layouts


def _baseline(
    planned: Planned, classical: ClassicalLayout, layouts: Mapping[int, tuple[Axes, ...]], rounds: int = ROUNDS
) -> Baseline | None:
    graph, limit, numbers = planned.graph, planned.network.limit, {a: n for n, a in enumerate(planned.graph.args)}
    in_pins = {numbers[a]: dims for a, dims in layouts.items()}
    found = _best(in_pins, planned, None, rounds)
    if found is not None and limit is not None and found.peak_bytes > limit:
        found = min((x for x in (found, _best(in_pins, planned, limit, rounds)) if x), key=lambda x: x.peak_bytes)
    if found is None:
        return None
    fits = limit is None or found.peak_bytes <= limit
    pins = {graph.ops[a].label: tuple(_entry(axes) for axes in dims) for a, dims in layouts.items()}
    sent = sent_bytes(found.network, found.states)
    return Baseline(classical.name, pins, to_digits(found.timeline.total_s), found.peak_bytes, sent, fits)


def _entry(axes: Axes) -> str | Axes | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _best(in_pins: Mapping[int, tuple], planned: Planned, limit: float | None, rounds: int) -> Judged | None:
    """The best plan found with these inputs; None if they cannot be."""
    space = planned.space
    own = replace(planned.options, in_pins=in_pins, out_pins={}, pins={}, constraints="ignore", progress=None, corrections=None)
    task = PlanningTask(space.graph, Resharder(space.mesh, space.cluster), own, Stopwatch(), known_space=space)
    pricing, best = Pricing(planned.network.pricing.background_price), None
    try:
        for _ in range(rounds):
            network = task.network(pricing, limit)
            solution = solve(network.problem, work_limit=WORK)
            if not solution.found:
                break
            judged = judge(task, Candidate(network, solution), limit)
            if best is None or judged.rank < best.rank:
                best = judged
            pricing = replace(pricing, combined=judged.network.pricing.combined)
    except ShardingError:  # an array cannot be laid out so
        return None
    return best and compiled(task, best, thresholds(best.xla) if own.chooses_xla else ())
