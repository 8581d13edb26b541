"""A plan compared with the classical layouts of its step: data parallelism, ZeRO-1, FSDP, tensor parallelism, mixes; one objective.

A baseline has the inputs of the step in a classical layout (`search/classical.py`), without the user's pins. All else is chosen by
the integer program for these inputs, the compiler options that the plan chose among are tried, and the program is scheduled as the
plan's own is. So a baseline is no slower than what a person makes of that layout, as far as the model goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, islice
from pkgutil import resolve_name

import numpy as np
from msgspec import structs

from shardplan.costs.build import build_network, restricted
from shardplan.costs.network import CostNetwork
from shardplan.costs.pricing import Pricing
from shardplan.costs.task import Candidate, PlanningTask, Stopwatch
from shardplan.errors import ShardingError
from shardplan.ilp.solver import solve
from shardplan.ilp.solver.collector import paused_collector
from shardplan.mesh.reshard import Resharder
from shardplan.plan.data import ClassicalStep, ClassicalSteps
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.what_if import sent_bytes
from shardplan.search.classical import Axes, ClassicalLayout, StepInputs, classical_inputs
from shardplan.search.objective import Judged, compiled, judge
from shardplan.units import format_percent, to_digits
from shardplan.xla_model.compiler_options import thresholds

ROUNDS = 2
"""Times that the network of a baseline is solved: once more at the prices of what its first plan combines, which saves up to 7 %."""
WORK = 1.0
"""Work of the solver, about seconds, for each."""


class Baseline(ClassicalStep, frozen=True):
    """A classical layout of the step's inputs, and the step that is planned for it.

    Attributes:
        layouts: path of an input -> entries of its PartitionSpec, as pins; {} for a plan read from a file.
    """

    layouts: Mapping[str, tuple] = {}


@dataclass(frozen=True)
class Baselines:
    """A plan and the baselines of its step, the fastest that fits first; `print` it.

    Attributes:
        pure: whether they are the layouts that are no mixes only.
    """

    plan: Plan
    rows: tuple[Baseline, ...]
    pure: bool = False

    @cached_property
    def best(self) -> Baseline | None:
        """The fastest baseline that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def saving(self) -> float | None:
        """The part of the best baseline's seconds that the plan saves; None without a baseline that fits."""
        if self.best is None:
            return None
        return 1 - self.plan.seconds["total"] / self.best.seconds if self.best.seconds else 0.0

    @property
    def saving_text(self) -> str:
        """`saving` in words; "" without baselines."""
        n, best, saving = len(self.rows), self.best, self.saving
        layouts = f"{n} {'unmixed ' if self.pure else ''}classical layouts"
        if not n:
            return ""
        if best is None or saving is None:
            return f"does what none of {layouts} does: fit the memory"
        what = f"{best.name}, the fastest of {layouts}"
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


@paused_collector()
def baselines(plan: Plan) -> Baselines:
    """The answer of `Plan.baselines`."""
    inputs = _Inputs(plan.context.planned)
    last = (list(inputs.rounds(*each))[-1:] for each in classical_inputs(plan.context.planned.space))
    return _compared(plan, chain.from_iterable(last))


def recorded(plan: Plan) -> Baselines | None:
    """The baselines in the file of a plan; None if it has none."""
    if plan.classical is None:
        return None
    return _compared(plan, (Baseline(**structs.asdict(row)) for row in plan.classical.rows), plan.classical.unmixed)


def with_baselines(plan: Plan) -> Plan:
    """The plan as it is saved, the same whatever it was asked: with those that `Plan.saving` compares it with when first asked."""
    if plan.context is None or plan.context.planned is None:
        return plan
    found = plan.baselines() if plan.answers_quickly else plan._fastest_pure
    rows = (ClassicalStep(*(getattr(row, name) for name in ClassicalStep.__struct_fields__)) for row in found.rows)
    return structs.replace(plan, classical=ClassicalSteps(tuple(rows), found.pure))


def saving(plan: Plan) -> str:
    """The answer of `Plan.saving`."""
    planned = plan.context and plan.context.planned
    if planned is None:
        return found.saving_text if (found := recorded(plan)) else ""
    return (plan.baselines() if plan.answers_quickly or "_baselines" in vars(plan) else plan._fastest_pure).saving_text


def known_saving(plan: Plan) -> str:
    """`Plan.saving`, if it was asked for before, or saved; else ""."""
    return plan.saving if plan.classical is not None or {"_baselines", "_fastest_pure"} & vars(plan).keys() else ""


@paused_collector()
def fastest_pure(plan: Plan) -> Baselines:
    """The layouts that are no mixes, each solved once, the fastest of them once more: quicker than `baselines`, and misses more."""
    inputs = _Inputs(plan.context.planned)
    tried = {each.name: inputs.rounds(each, layouts) for each, layouts in classical_inputs(plan.context.planned.space) if each.pure}
    rows = {name: row for name, found in tried.items() if (row := next(found, None))}
    best = _compared(plan, rows.values(), pure=True).best
    if best is not None:
        rows[best.name] = next(tried[best.name], best)
    return _compared(plan, rows.values(), pure=True)


def _compared(plan: Plan, rows: Iterable[Baseline], pure: bool = False) -> Baselines:
    order = sorted(rows, key=lambda row: (not row.fits, row.seconds if row.fits else row.peak_bytes, row.name))
    return Baselines(plan, tuple(order), pure)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The inputs of a planned step, in any classical layout."""

    planned: Planned

    def rounds(self, classical: ClassicalLayout, layouts: Mapping[int, tuple[Axes, ...]]) -> Iterator[Baseline]:
        """The best step that is found with these inputs, after each round."""
        graph, limit, numbers = self.planned.graph, self.planned.network.limit, {a: n for n, a in enumerate(self.planned.graph.args)}
        in_pins = {numbers[a]: dims for a, dims in layouts.items()}
        pins = {graph.ops[a].label: tuple(_entry(axes) for axes in dims) for a, dims in layouts.items()}
        within = None  # the same under the limit, where the fastest does not fit
        for found in self._judged(in_pins, None):
            best = found
            if limit is not None and found.peak_bytes > limit:
                within = within or self._judged(in_pins, limit)
                best = min((found, *islice(within, 1)), key=lambda x: x.peak_bytes)
            fits = limit is None or best.peak_bytes <= limit
            sent = sent_bytes(best.network, best.states)
            yield Baseline(classical.name, to_digits(best.timeline.total_s), best.peak_bytes, sent, fits, pins)

    def _judged(self, in_pins: Mapping[int, tuple], limit: float | None) -> Iterator[Judged]:
        """The best plan found with these inputs after each round; nothing if they cannot be."""
        space, options = self.planned.space, self.planned.options
        own = replace(options, in_pins=in_pins, out_pins={}, pins={}, constraints="ignore", progress=None, corrections=None)
        task = PlanningTask(space.graph, self._resharder, own, Stopwatch(), known_space=space)
        pricing, best = self._pricing, None
        try:
            for _ in range(ROUNDS):
                first = pricing == self._pricing
                network = restricted(self._any_layout(limit), task.allowed) if first else task.network(pricing, limit)
                solution = solve(network.problem, work_limit=WORK)
                if not solution.found:
                    return
                judged = judge(task, Candidate(network, solution), limit)
                if best is None or judged.rank < best.rank:
                    best = judged
                pricing = replace(pricing, combined=judged.network.pricing.combined)
                yield compiled(task, best, thresholds(best.xla) if own.chooses_xla else ())
        except ShardingError:  # an array cannot be laid out so
            return

    @cached_property
    def _resharder(self) -> Resharder:
        return Resharder(self.planned.space.mesh, self.planned.space.cluster)

    @property
    def _pricing(self) -> Pricing:
        return Pricing(self.planned.network.pricing.background_price)

    @cached_property
    def _any_layout(self) -> Callable[[float | None], CostNetwork]:
        """The network of the first round under a limit, whatever the layout: every input is pinned, to all its strategies."""
        space, inputs = self.planned.space, StepInputs.of(self.planned.graph, self.planned.space.rules)
        pinned = (*inputs.parameters, *inputs.parameter_of, *inputs.batch)
        every = {a: np.ones(len(space.strategies[a]), bool) for a in sorted(pinned)}
        return cache(lambda limit: build_network(space, self._resharder, limit, every, None, self._pricing))


def _entry(axes: Axes) -> str | Axes | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes
