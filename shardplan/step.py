"""The planned step of one signature: traced by `jax.jit`, planned, and jitted again with the plan's constraints and shardings.

The operands of a step are the arguments of a call that are not static: positional ones, then keyword arguments by name.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from msgspec import structs

from shardplan import __version__, _jax, _jax_kernels
from shardplan.costs.options import CostCorrections, Options
from shardplan.costs.pins import matches
from shardplan.emit.emit import EmitDecision, emit
from shardplan.errors import ForeignMeshError, OtherSignature, ShardingError, warn
from shardplan.feedback import verified
from shardplan.ir.graph import Path
from shardplan.ir.parse import Traced
from shardplan.options import AutoOptions
from shardplan.pipeline import make_plan
from shardplan.plan import Plan
from shardplan.plan.arguments import path_text
from shardplan.plan.cache import CachedPlan
from shardplan.plan.describe import describe
from shardplan.plan.padded import cut, fill, held
from shardplan.plan.planned import Planned
from shardplan.plan.program import line_name, source_lines
from shardplan.plan.reuse import (
    SharedState,
    decisions_but_scalars,
    matching_pins,
    refuse_other_state,
    refuse_unmet,
    saved_decisions,
    shared_state,
)
from shardplan.plan.unknown import warn_of_unknown
from shardplan.planned_step import PlanContext, PlannedStep
from shardplan.processes import PROGRAM, Announcement, Announcements, Processes
from shardplan.search.objective import NEAR_TIE
from shardplan.searches import SEARCHES
from shardplan.signature import Call, prefix_pins, refuse_non_arrays, refuse_refs, spec_of, state_pairs, unique
from shardplan.strategies.unfold import unfolded
from shardplan.trace import trace
from shardplan.units import format_array, format_seconds
from shardplan.view.progress import Progress
from shardplan.xla.compiler.options import as_known, unknown
from shardplan.xla_model.compiler_options import Flag, XlaOptions

LOG = logging.getLogger("shardplan")
Decisions = Mapping[Path, EmitDecision]


def plan_step(
    fun: Callable,
    call: Call,
    options: AutoOptions,
    adopt: Callable[[PlannedStep], bool] | None = None,
    before: Sequence[PlannedStep] = (),
    alone: bool = False,
    near: Planned | None = None,
) -> PlannedStep:
    """Traces and plans a step for a call's signature; nothing runs.

    On a mesh of several processes, all of them call this, and take the plan of the first one.

    Args:
        fun: the step as it was written.
        call: the shapes of its arguments.
        options: those of `auto`.
        adopt: takes a faster plan that `Plan.fix` or `Plan.compare` comes upon in place of this one; says whether it did.
        before: the step as planned for other calls, with the same options.
        alone: plan on this process, whoever else the mesh belongs to.
        near: the step as it was planned for this mesh; no slower plan is taken where its states do.

    Raises:
        ShardingError: an argument is no array, a pin cannot hold, XLA refuses a compiler option, nothing fits the memory, or another
            process plans another step.
        PlanFileError: the saved plan is for another mesh or model.
    """
    if not alone and (processes := Processes.of(options.mesh, options.process_timeout)) is not None:
        return _plan_of_all(processes, fun, call, options, before)
    _refuse_options(options, call)
    step = TracedStep.of(fun, call, options)
    replanner = functools.partial(Replanner, fun, call, options, adopt)
    decisions, plan, asked = _planned(step, options, step.options(), before, replanner, near)
    return replace(step.jit(decisions, plan), asked=asked)


def _plan_of_all(processes: Processes, fun: Callable, call: Call, options: AutoOptions, before: Sequence[PlannedStep]) -> PlannedStep:
    """The step of the plan that the first process makes.

    It limits the memory by the least that a process announces, and reuses the plan file of any process. What is emitted comes from the
    text of the plan on every process, the first one included, so that all compile the same program.
    """
    traced: list[TracedStep] = []
    own: list[tuple[Decisions, Plan, Options | None]] = []
    replanner = functools.partial(Replanner, fun, call, options, None)

    def announce() -> Announcement:
        _refuse_options(options, call)
        traced.append(TracedStep.of(fun, call, options))
        saved = options.saved_plan
        return Announcement(traced[0].facts(), options.memory_limit, "" if saved is None else saved.dumps())

    def make(announced: Announcements) -> str:
        asked, limits = traced[0].options(), [x.memory_bytes for x in announced.values() if x.memory_bytes is not None]
        file = next((x.plan_file for x in announced.values() if x.plan_file), None)
        shared = replace(options, plan=options.plan_of_processes(file))
        asked = replace(asked, memory=min(limits, default=None))
        own.append(_planned(traced[0], shared, asked, before, replanner))
        return own[0][1].dumps()

    text = processes.one_plan(announce, make)
    (step,), plan = traced, Plan.loads(text)
    decisions = saved_decisions(plan, step.traced, options.shape)
    assert decisions is not None, "internal error: all processes have traced the program that the plan is for"
    if own:
        return replace(step.jit(decisions, own[0][1]), asked=own[0][2])
    return step.jit(decisions, plan.with_context(step.context(decisions, replanner([plan]))))


def _planned(
    step: TracedStep,
    options: AutoOptions,
    asked: Options,
    before: Sequence[PlannedStep],
    replanner: Callable[[list[Plan]], Callable[..., Plan]],
    near: Planned | None = None,
) -> tuple[Decisions, Plan, Options | None]:
    """(decisions, plan, what was planned for) of a traced step: the saved plan, a known one, that of the cache, or a new one."""
    fastest: list[Plan] = []
    context, start = functools.partial(step.context, replan=replanner(fastest)), time.perf_counter()

    def taken_over(plan: Plan, decisions: Decisions, planned: Planned | None = None) -> tuple[Decisions, Plan, Options | None]:
        fastest.append(plan)
        return decisions, plan.with_context(context(decisions, planned=planned)), planned and asked

    like = SharedState.none() if options.state_plan is None else shared_state(options.state_plan, step.traced, step.pinned(asked))
    if (saved := options.saved_plan) is not None:
        if (decisions := saved_decisions(saved, step.traced, options.shape)) is not None:
            refuse_other_state(saved, like.pins)
            refuse_unmet(saved, step.traced, asked, options.given_bytes)
            options.warn_of_other_prices()
            return taken_over(structs.replace(saved, compiler_options=options.flags(saved.compiler_options)), decisions)
        asked = matching_pins(saved, step.traced, asked, like.pins)
    else:
        asked = replace(asked, in_pins={**like.pins, **(asked.in_pins or {})})
    asked, room = like.leaves_room(asked, step.name)
    place = _place(options, step.traced, asked) if near is None else None
    if (known := _known_plan(step, asked, before, place)) is not None:
        return taken_over(*known)
    options.warn_of_prices()
    try:
        plan = _solved(step, options, asked, context, near)
    except ShardingError as error:
        raise ShardingError(f"{error}\n  {room}") if room else error from None
    warn_of_unknown(plan)
    if place:
        place.save(plan)
    fastest.append(plan)
    _log_planned(step.name, plan, before, time.perf_counter() - start)
    return plan.context.planned.decisions, plan, asked


def _solved(step: TracedStep, options: AutoOptions, asked: Options, context: Callable[..., PlanContext], near: Planned | None) -> Plan:
    """A new plan, corrected by a compiler where that is asked for."""

    def solve(memory: float | None, corrections: CostCorrections | None = None) -> Plan:
        with Progress() as progress:
            task = replace(asked, memory=memory, corrections=corrections, progress=progress)
            planned = make_plan(step.traced, options.shape, options.machine, task, near)
        return describe(planned, context(planned.decisions, planned=planned), options.flags(planned.xla.flags()))

    if not options.verify:
        return solve(asked.memory)
    found = verified(solve, None if options.verify is True else options.verify, asked.memory, options.machine)
    plan = found.rounds[found.chosen].plan
    return plan.with_context(replace(plan.context, verified=found))


def _known_plan(
    step: TracedStep, asked: Options, before: Sequence[PlannedStep], place: CachedPlan | None
) -> tuple[Plan, Decisions, Planned | None] | None:
    """(plan, its decisions, what it was planned from) where the step was planned before: in this process, or in the folder of plans."""
    for known in (other.plan for other in before if other.asked == asked):
        if (decisions := decisions_but_scalars(known, step.traced)) is not None:
            LOG.info("%s is traced again for arguments of another tree or weak type; its plan is kept", step.name)
            return known, decisions, known.context.planned
    if place is None or (kept := place.load()) is None or kept.mesh != step.auto.shape:
        return None
    decisions = saved_decisions(kept, step.traced, step.auto.shape)
    return None if decisions is None else (kept, decisions, None)


def _log_planned(name: str, plan: Plan, before: Sequence[PlannedStep], seconds: float) -> None:
    """One line per plan: a warning where the step was planned already, saying which arguments are others now."""
    if not before:
        LOG.info("%s is planned, in %.1f s: %r", name, seconds, plan)
        return
    was = {x.path: format_array(x) for x in before[-1].plan.inputs}
    now = {x.path: format_array(x) for x in plan.inputs}
    other = [
        f"{path} {now.get(path, 'not there')}, was {was.get(path, 'not there')}"
        for path in {**was, **now}
        if was.get(path) != now.get(path)
    ]
    why = "; ".join(other[:3]) + ("; ..." if len(other) > 3 else "") or "static arguments, trees or weak types are others"
    LOG.warning("%s is planned again (%d plans now), in %.1f s: %s", name, len(before) + 1, seconds, why)


def _place(options: AutoOptions, traced: Traced, asked: Options) -> CachedPlan | None:
    """Where the plan is kept; None without a folder, and for plans that are corrected by a compiler."""
    if options.cache is None or options.verify:
        return None
    return CachedPlan.of(options.cache, options.depends_on(traced.identity().fingerprint, asked, traced.donated_names()))


@dataclass(frozen=True, eq=False)
class Replanner:
    """Plans a step anew: with more pins, by another search or for another target.

    A plan faster than the last of `fastest` is adopted, unless it is for another mesh, cluster or memory, as the step runs on what it
    was written for, or has the state of a job elsewhere.
    """

    fun: Callable
    call: Call
    options: AutoOptions
    adopt: Callable[[PlannedStep], bool] | None
    fastest: list[Plan]

    def __call__(self, pins: Mapping[str, Any], search: str | None = None, near: Planned | None = None, **target: Any) -> Plan:
        """The plan with these pins, no slower than that of `near`."""
        options = self.options if isinstance(pins, Mapping) else replace(self.options, pins=pins)  # which says what is wrong
        known = dict.fromkeys(("plan", "verify", "cache"))  # what is planned anew can be asked about, what is taken over cannot
        changed = {"pins": {**(options.pins or {}), **pins}, "search": search or options.search, **known, **target}
        if isinstance(mesh := target.get("mesh"), (Mapping, str)):
            given = mesh if isinstance(mesh, str) else dict(mesh)
            odd = given if isinstance(given, str) else {name: n for name, n in given.items() if not isinstance(n, int) or n < 1}
            if odd or isinstance(given, str):
                raise ShardingError(f"mesh={given!r}: {odd!r} is no number of devices.\n  way out: such as {{'data': 2, 'model': 4}}")
            changed["mesh"] = _jax.abstract_mesh(given, options.mesh)
        if options.state_plan is not None and "mesh" in target:
            changed["state_like"] = None
        elsewhere = not {"mesh", "cluster"}.isdisjoint(target)
        found = plan_step(self.fun, self.call, replace(options, **changed), alone=True, near=None if elsewhere else near)
        if target:
            return found.plan
        found = replace(found, plan=found.plan.with_job_of(self.fastest[-1]))
        self._adopt(found)
        return found.plan

    def _adopt(self, found: PlannedStep) -> None:
        last = self.fastest[-1]
        before, after = (plan.seconds["total"] for plan in (last, found.plan))
        faster = after < (1 - NEAR_TIE) * before and bool(found.plan.job) == bool(last.job)
        if faster and self.adopt is not None and self.adopt(found):
            self.fastest.append(found.plan)
            less = 100 * (1 - after / before)
            warn(
                f"the step runs by a faster plan that was found: {format_seconds(after)}, {less:.1f} % less\n"
                "  way out, for the plan before: auto(..., plan=that_plan)"
            )


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step traced for one signature.

    Attributes:
        twin: the mesh with axes of type Auto, on which the step is traced and emitted.
        program: the jaxpr as traced.
        traced: what is planned.
        operands: as shapes.
        donated: numbers of the donated operands.
        in_tree: structure of (positional arguments, keyword arguments).
        results: leaves of what the step returns, as shapes.
    """

    auto: AutoOptions
    twin: Any
    name: str
    program: Any
    traced: Traced
    operands: tuple
    donated: tuple[int, ...]
    in_tree: Any
    results: list
    out_tree: Any

    @classmethod
    def of(cls, fun: Callable, call: Call, auto: AutoOptions) -> TracedStep:
        """Traces a function for a call's shapes, as `jax.jit` does."""
        refuse_non_arrays(call, fun)
        twin = _jax.auto_twin(auto.mesh)
        with _jax.within(twin):
            traced = trace(fun, call, auto)
        refuse_refs(traced.jaxpr.consts, "closes over")
        in_leaves, in_tree = jax.tree.flatten(traced.args_info)
        avals, infos = ((*args, *(kwargs[k] for k in call.keywords)) for args, kwargs in (traced.in_avals, traced.args_info))
        operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type), avals)
        results, out_tree = jax.tree.flatten(traced.out_info)
        flat = Traced(
            _jax.with_lines(unfolded(_jax.without_dead_code(_jax.without_refs(traced.jaxpr)), auto.shape)),
            call.labels(fun),
            unique(path_text(path) or "result" for path, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)),
            tuple(state_pairs(in_tree, in_leaves, out_tree, results)),
            tuple(n for n, x in enumerate(in_leaves) if x.donated),
        )
        flat = replace(flat, padded=auto.padded_inputs(flat))
        donated = tuple(n for n, info in enumerate(infos) if any(x.donated for x in jax.tree.leaves(info)))
        return cls(auto, twin, getattr(fun, "__name__", "step"), traced.jaxpr, flat, operands, donated, in_tree, results, out_tree)

    def options(self) -> Options:
        """The options of `auto` as planning takes them."""
        auto, (args, _) = self.auto, self.in_tree.children()
        return Options(
            auto.memory_limit,
            auto.search,
            auto.time_limit,
            prefix_pins(auto.in_shardings, args, jax.tree.leaves(self.operands), "in_shardings"),
            prefix_pins(auto.out_shardings, self.out_tree, self.results, "out_shardings"),
            {pattern: tuple(spec_of(spec, f"pin {pattern!r}")) for pattern, spec in (auto.pins or {}).items()},
            reserve=auto.reserve,
            memory_saving=auto.memory_saving,
            overlap=auto.overlap,
            constraints=auto.user_shardings,
            xla=auto.xla,
            own_xla=XlaOptions.of(auto.own_flags),
            chooses_xla=len(auto.xla) > 1 and not XlaOptions.of(auto.own_flags).thresholds,
        )

    def context(self, decisions: Decisions, replan: Callable[..., Plan], planned: Planned | None = None) -> PlanContext:
        """What a plan with these decisions remembers."""

        def program(plan: Plan) -> tuple[Callable, tuple]:
            return self.jit(decisions, plan).jitted, self.held(plan)

        def decided(other: Planned, replan: Callable[..., Plan]) -> Plan:
            return describe(other, self.context(other.decisions, replan, other), self.auto.flags(other.xla.flags()))

        dtypes = {label: x.dtype for label, x in zip(self.traced.in_labels, jax.tree.leaves(self.operands), strict=True)}
        return PlanContext(self.auto.mesh, self.in_tree, self.out_tree, dtypes, replan, program, SEARCHES, decided, planned)

    def facts(self) -> dict[str, str]:
        """Name -> value of all in which the processes that run the step must agree."""
        mesh, own = self.auto.mesh, self.auto.own_flags
        inputs = zip(self.traced.in_labels, self.traced.jaxpr.jaxpr.invars, strict=True)
        lines = source_lines(self.traced.graph, {})
        return {
            "jax": jax.__version__,
            "shardplan": __version__,
            "mesh": f"{self.auto.shape}, axes {', '.join(map(str, mesh.axis_types))}",
            "devices of the mesh": str([d.id for d in mesh.devices.flat] if isinstance(mesh, jax.sharding.Mesh) else []),
            "compiler options": str(dict(sorted(own.items()))),
            "donated": ", ".join(self.traced.donated_names()),
            **{f"input {label}": format_array(v.aval) for label, v in inputs},
            **{line_name(x): ", ".join(f"{n} {name}" for name, n in x.ops.items()) for x in lines},
            PROGRAM: self.traced.identity().fingerprint,
        }

    def held(self, plan: Plan) -> tuple:
        """The operands, as shapes in which a plan holds them between steps."""
        leaves, tree = jax.tree.flatten(self.operands)
        return jax.tree.unflatten(tree, [held(x, leaf, plan.mesh) for x, leaf in zip(leaves, plan.inputs, strict=True)])

    def pinned(self, asked: Options) -> frozenset[str]:
        """Paths of the inputs that have pins."""
        labels = self.traced.in_labels
        return frozenset(
            label for n, label in enumerate(labels) if n in asked.in_pins or any(matches(label, pattern) for pattern in asked.pins)
        )

    def compiler_options(self, plan: Plan) -> dict[str, Flag] | None:
        """What jit is given: a plan's options on GPUs, elsewhere the user's own alone; None for none."""
        flags = plan.compiler_options if self.auto.on_gpus else self.auto.own_flags
        return as_known(flags) if flags else None

    def jit(self, decisions: Decisions, plan: Plan) -> PlannedStep:
        """The step of a plan, jitted with its constraints and shardings."""
        # Callbacks know their mesh: with them the step runs on the twin, and its results are handed to the user's mesh.
        on_twin = bool(self.traced.jaxpr.effects) or _jax_kernels.knows_its_mesh(self.traced.jaxpr)
        mesh: Any = self.twin if on_twin else self.auto.mesh
        in_shardings, out_shardings = ([_jax.sharding(mesh, x.layout.spec()) for x in leaves] for leaves in (plan.inputs, plan.outputs))
        flat = _jax.differentiable_as(emit(self.traced.jaxpr, decisions, self.twin, self.traced.graph.repeats), self.program)
        expected = _types(self.held(plan))
        results = [held(x, leaf, plan.mesh) for x, leaf in zip(self.results, plan.outputs, strict=True)]
        out_tree = jax.tree.structure(jax.tree.unflatten(self.out_tree, results))

        def flat_step(*leaves):
            with _jax.within(self.twin):
                own = (cut(x, leaf.shape) for x, leaf in zip(leaves, plan.inputs, strict=True))
                return tuple(fill(x, leaf.held_shape(plan.mesh)) for x, leaf in zip(flat(*own), plan.outputs, strict=True))

        def step(*operands, keep_types: bool = False):
            leaves = jax.tree.leaves(operands)
            if _types(jax.tree.map(_jax.abstract, operands)) != expected:
                raise OtherSignature
            if any(_jax.is_foreign(x, mesh) for x in leaves):
                raise ForeignMeshError
            out = list(out_shardings)
            for a, o in self.traced.tied if keep_types else ():  # state comes out with the type that it went in with
                out[o] = _jax.typed_sharding(leaves[a], mesh) or out[o]
            return jax.tree.unflatten(out_tree, _jax.on_auto_axes(flat_step, mesh, tuple(out))(*leaves))

        step.__name__ = self.name
        jitted = jax.jit(
            step,
            in_shardings=jax.tree.unflatten(jax.tree.structure(self.operands), in_shardings),
            out_shardings=jax.tree.unflatten(self.out_tree, out_shardings),
            donate_argnums=self.donated,
            keep_unused=self.auto.keep_unused,
            compiler_options=self.compiler_options(plan),
            **self.auto.jit_options,
        )
        if on_twin and not _jax.is_auto(self.auto.mesh):
            jitted = _jax.on_twin(jitted, self.twin, self.auto.mesh)
        traceable, returned = functools.partial(step, keep_types=True), frozenset(a for a, _ in self.traced.tied)
        return PlannedStep(plan, self.auto.mesh, jitted, traceable, in_shardings, self.traced.donated, returned)


def _refuse_options(options: AutoOptions, call: Call) -> None:
    """Refuses donated arguments that a call does not have, and compiler options that XLA would refuse, before the long planning."""
    donated = options.jit_arguments.get("donate_argnums")
    numbers = (donated,) if isinstance(donated, int) else tuple(donated or ())
    if wrong := [n for n in numbers if not -len(call.args) <= n < len(call.args) + len(call.kwargs)]:
        raise ShardingError(
            f"donate_argnums has {wrong[0]}, the step is called with {len(call.args)} arguments.\n"
            "  way out: numbers from 0 of the arguments whose buffers may be reused, such as donate_argnums=0"
        )
    if options.own_flags and (why := unknown(options.own_flags)):
        raise ShardingError(
            f"compiler_options: XLA of jax {jax.__version__} refuses them: {why}\n"
            '  ways out: drop that option, or compiler_options="auto"'
        )


def _types(operands):
    leaves, tree = jax.tree.flatten(operands)
    return tree, [(x.shape, x.dtype, x.weak_type) for x in leaves]
