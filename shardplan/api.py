"""`auto`: a step that knows nothing of devices, planned at its first call and run as planned from then on.

    step = auto(mesh, donate_argnums=0)(train_step)
    state = step.init(create_state, key)        # created sharded
    state, loss = step(state, batch)            # plans once per signature, then dispatches as jit does
    step.plan(state, batch)                     # the plan, without running; shapes are enough

What is static, donated or passed by keyword is decided by `jax.jit` itself; `step.py` makes the planned step of one signature.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar

import jax
from msgspec import structs

from shardplan import _jax
from shardplan.errors import OtherSignature, ShardingError
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import even_layout
from shardplan.options import JIT_ARGUMENTS, AutoOptions
from shardplan.plan import Plan
from shardplan.plan.arguments import same_paths
from shardplan.plan.data import JobPart, Leaf
from shardplan.plan.padded import Padded, fill, with_own_shapes
from shardplan.plan.stand_ins import on_stand_ins, stood_back, stood_in
from shardplan.signature import Call
from shardplan.trace import BEING_PLANNED

if TYPE_CHECKING:
    from shardplan.step import PlannedStep
    from shardplan.xla.report.check import PlanReport

P = ParamSpec("P")
R = TypeVar("R")


def auto(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    pins: Mapping[str, Any] | None = None,
    memory: float | str | None = None,
    search: str = "ilp",
    time_limit: float | None = None,
    cluster: str | Cluster | None = None,
    compute_scale: float = 1.0,
    overlap: bool = True,
    user_shardings: Literal["keep", "hint", "ignore"] = "keep",
    plan: str | os.PathLike[str] | Plan | None = None,
    state_like: str | os.PathLike[str] | Plan | None = None,
    pad_state: bool = False,
    cache: str | os.PathLike[str] | None = None,
    verify: str | bool | None = None,
    process_timeout: float = 300.0,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    compiler_options: Mapping[str, bool | int | float | str] | Literal["auto"] | None = "auto",
    keep_unused: bool = False,
    **jit_options: Any,
) -> Callable[[Callable[P, R]], Auto[P, R]]:
    """Plan and run a step on a mesh.

    Args:
        mesh: of any axes; an `AbstractMesh` plans only, and needs `cluster`. A step of `auto` keeps options that are not given here.
        in_shardings, out_shardings: as in `jax.jit`, tree prefixes of specs or NamedShardings; None and `P.UNCONSTRAINED` are planned.
        pins: PartitionSpecs by path pattern of the inputs, e.g. {"params/**/kernel": P(None, "model")}.
        memory: bytes per device, a number or "80GB"; None or "adaptive": what the device has, 5 % to spare if that is possible; inf or
            "disable": no limit. "slight", "moderate", "heavy" save 25, 50, 75 % of the way from the fastest plan's peak to the least.
        search: "ilp" (integer program; judges the plans of the others, too, and bounds all plans), "propagation" (each op follows its
            neighbours, from the pins on; no solver, no useful bound) or "recursive" (one mesh axis after the other).
        time_limit: seconds for the search; then the best plan so far, or the one of least memory. None stops by counted work.
        cluster: prices: a preset's name, a file made by `calibrate`, or a `Cluster`; None is that of `plan`, or the machine at hand.
        compute_scale, overlap: factor on compute seconds; whether compute hides collectives, where the cluster hides any.
        user_shardings: `with_sharding_constraint`s of the step are pins ("keep"), where the search starts ("hint"), or ignored.
        plan: a plan or a plan file to reuse without solving.
        state_like: the plan (or its file) of another step: the state that both take keeps its layouts; the rest is in memory, too.
        pad_state: state that an axis does not divide may be held filled up with zeros; `shardplan.unpadded(state)` gives arrays.
        cache: a folder that keeps plans, each taken from there when the same program is planned with the same options.
        verify: compile the plan for this target ("h100:8"; True: devices at hand), price what XLA does beyond it, and solve again,
            up to three plans; see `Plan.verified`. Not done for a plan that is reused.
        process_timeout: seconds after which a process of the mesh that does not plan, or gives no sign of life, is an error.
        compiler_options: of XLA, on GPUs: "auto" sets those that make the plan faster, None none; a mapping goes to every platform.
        static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, **jit_options: as in `jax.jit`.

    Raises:
        ShardingError: for an option that cannot be; when planning, if a pin cannot hold or nothing fits the memory.
    """
    given = dict(locals())
    jit = {name: given.pop(name) for name in JIT_ARGUMENTS}
    options = AutoOptions(**given, jit_arguments=jit)
    given |= jit | given.pop("jit_options")
    changed = {name: value for name, value in given.items() if value is not DEFAULTS.get(name)}
    return lambda fun: fun.with_options(**changed) if isinstance(fun, Auto) else Auto(fun, options)


def _with_arguments_of_jit(fun: Callable, options: AutoOptions) -> AutoOptions:
    """The options, with the static and donated arguments of a step that is jitted already, where none are given."""
    given = dict(options.jit_arguments)
    for names in (("static_argnums", "static_argnames"), ("donate_argnums", "donate_argnames")):
        if all(given[name] is None for name in names):
            given |= {name: _jax.jit_argument(fun, name) or None for name in names}
    return replace(options, jit_arguments=given)


DEFAULTS = {name: p.default for name, p in inspect.signature(auto).parameters.items()}
"""Option of `auto` -> its default."""


class Auto(Generic[P, R]):
    """A step that plans itself; made by `auto`. Call it like the function it wraps."""

    def __init__(self, fun: Callable[P, R], options: AutoOptions):
        if not callable(fun):
            raise ShardingError(f"auto(mesh) takes a step, not {type(fun).__name__}.\n  way out: auto(mesh)(train_step)")
        if inspect.isgeneratorfunction(fun) or inspect.iscoroutinefunction(fun) or inspect.isasyncgenfunction(fun):
            kind = "a generator" if inspect.isgeneratorfunction(fun) else "an async function"
            raise ShardingError(
                f"the step {fun.__name__} is {kind}, which cannot be traced.\n  way out: a function that returns arrays"
            )
        functools.update_wrapper(self, fun, updated=())
        options = _with_arguments_of_jit(fun, options)
        self._fun, self.options = fun, options
        try:
            jitted = jax.jit(fun, **options.jit_arguments)
            self._static = (
                frozenset(_jax.jit_argument(jitted, "static_argnums")),
                frozenset(_jax.jit_argument(jitted, "static_argnames")),
            )
        except (ValueError, TypeError) as error:
            given = ", ".join(f"{k}={v!r}" for k, v in options.jit_arguments.items() if v is not None)
            raise ShardingError(f"{given}: {error}\n  way out: numbers or names of arguments that the step takes") from None
        self._steps: dict[Any, PlannedStep] = {}
        self._last: PlannedStep | None = None
        self._unplanned_state = False  # whether `init` made a state before there was a plan: the next call reshards it
        self._explicit, self._abstract = not _jax.is_auto(options.mesh), isinstance(options.mesh, jax.sharding.AbstractMesh)

    def with_options(self, **changes: Any) -> Auto[P, R]:
        """The same step with other options of `auto`; nothing planned is carried over, nor `plan` and `state_like` to another mesh.

        Raises:
            ShardingError: for an option that does not exist or cannot be.
        """
        old, own = self.options, {f.name for f in fields(AutoOptions)}
        jit = {name: changes.pop(name) for name in JIT_ARGUMENTS if name in changes}
        more = {name: changes.pop(name) for name in [*changes] if name not in own}
        changes |= {"jit_arguments": {**old.jit_arguments, **jit}, "jit_options": {**old.jit_options, **more}}
        plans = {name: None for name in ("plan", "state_like") if name not in changes and getattr(old, name) is not None}
        if plans and replace(old, **changes, **plans).shape != old.shape:
            changes |= plans
        return Auto(self._fun, replace(old, **changes))

    # ---- calling

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step as planned; plans it first for arguments of new shapes. A step that is being planned has it as a part."""
        if BEING_PLANNED.get():
            return self._fun(*args, **kwargs)
        if self._explicit and (under := _jax.under_jit()) is not False:
            if under is None:  # eager arrays under a transformation: its rule is the plain function's
                return self._fun(*args, **kwargs)
            step, operands = self._step(args, kwargs)
            return stood_back(step.traceable(*step.held(operands)))
        refused = None
        if self._last is not None and not kwargs:
            try:
                return self._last(*args)
            except OtherSignature:
                pass
            except (TypeError, ValueError) as error:  # jit holds arguments against shardings before it traces them
                refused = error
        step, operands = self._step(args, kwargs)
        if refused is not None and step is self._last:
            raise refused
        result = step(*operands, expects_move=self._unplanned_state, foreign=True)
        self._unplanned_state = False
        if step.stands_in:
            return stood_back(result)
        if not kwargs and not any(self._static):
            self._last = step
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _step(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[PlannedStep, tuple]:
        """(the planned step of a call's signature, the operands it takes)."""
        from shardplan.step import plan_step  # the first plan loads the solver, not `import shardplan`

        given = Call.of(args, kwargs, *self._static)
        call = given.with_own_shapes()
        if call.signature not in self._steps:
            adopt, before = functools.partial(self._adopt, call.signature), [*self._steps.values()]
            self._steps[call.signature] = plan_step(self._fun, call, self.options, adopt, before)
        return self._steps[call.signature], given.operands

    def _adopt(self, signature: Hashable, step: PlannedStep) -> bool:
        """Whether a faster plan replaces that of a signature: unless the step has run, and its state lies as the old plan wants it."""
        if self._last is None and self.options.plan is None:
            self._steps[signature] = replace(step, asked=self._steps[signature].asked)
            return True
        return False

    def adopt_plans(self, other: Auto[P, R], job: tuple[JobPart, ...]) -> None:
        """Has the plans of another `Auto` of the same step, as plans of a job."""
        for signature, step in other._steps.items():
            plan, context = structs.replace(step.plan, job=job), step.plan.context
            adopt = functools.partial(self._adopt, signature)  # where `Plan.fix` puts a faster plan
            replan = replace(context.replan, options=self.options, adopt=adopt, fastest=[plan])
            self._steps[signature] = replace(step, plan=plan.with_context(replace(context, replan=replan)))

    # ---- planning

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or ShapeDtypeStructs); nothing runs, no device is needed."""
        return self._step(args, kwargs)[0].plan

    def check(self, *args: Any, target: str | None = None, **kwargs: Any) -> PlanReport:
        """What XLA makes of the plan for arguments of these shapes: `plan(*args, **kwargs).check(target)`."""
        return self.plan(*args, **kwargs).check(target)

    def init(self, create: Callable, *args: Any, **kwargs: Any) -> Any:
        """Runs `create(*args, **kwargs)` so that its result is created sharded: no device ever holds all of an array.

        Where a plan for a state of this form is known (`plan` was called, a plan file is in use, or the step ran), the result is laid
        out as that plan wants it. Otherwise every array is sharded as far as it divides, and the first call of the step reshards it.
        """
        mesh = self.options.mesh
        if not isinstance(mesh, jax.sharding.Mesh):
            raise ShardingError(
                f"init needs devices, and {mesh} has none.\n  ways out: .plan() works without; a mesh of devices runs: "
                "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)"
            )
        if not callable(create):
            raise ShardingError(
                f"init takes a function that creates the state, not {type(create).__name__}.\n  ways out: step.init(create_state, "
                "key); a state that is there already goes to the step as it is, or jax.device_put(state, plan.in_shardings[0][0])"
            )

        create = on_stand_ins(create)
        args, kwargs = stood_in((args, kwargs))

        def created(args, kwargs):
            with _jax.within(_jax.auto_twin(mesh)):
                return create(*args, **kwargs)

        leaves, tree = jax.tree.flatten(jax.eval_shape(created, *jax.tree.map(_jax.abstract, (args, kwargs))))
        known = self._known_leaves(tree, leaves)
        self._unplanned_state = known is None
        layouts = [x.layout for x in known] if known else [even_layout(x.shape, self.options.shape) for x in leaves]
        shapes = [layout.filled_shape(x.shape, self.options.shape) for x, layout in zip(leaves, layouts, strict=True)]
        shardings = [_jax.sharding(mesh, x.spec()) for x in layouts]

        def filled(args, kwargs):
            return tuple(fill(x, shape) for x, shape in zip(jax.tree.leaves(created(args, kwargs)), shapes, strict=True))

        arrays = jax.jit(_jax.on_auto_axes(filled, mesh, tuple(shardings)), out_shardings=tuple(shardings))(args, kwargs)
        made = (x if x.shape == own.shape else Padded(x, own.shape) for x, own in zip(arrays, leaves, strict=True))
        return stood_back(jax.tree.unflatten(tree, made))

    def _known_leaves(self, tree, leaves) -> list[Leaf] | None:
        """The leaves of the first argument of this structure, or else of these paths, in the newest plan that has one."""
        want, saved = [(tuple(x.shape), str(x.dtype)) for x in leaves], self.options.saved_plan
        steps = [*reversed(self._steps.values())]
        parts = [part for same in (operator.eq, same_paths) for step in steps for part in step.argument_leaves(tree, same)]
        parts += [list(saved.inputs[: len(want)])] if saved is not None else []
        return next((part for part in parts if [(x.shape, x.dtype) for x in part] == want), None)

    # ---- jit's other verbs

    def trace(self, *args: Any, **kwargs: Any):
        """As `jax.jit(f).trace`, of the planned function; on an AbstractMesh, of the shapes."""
        step, operands = self._step(args, kwargs)
        shapes = self._abstract or step.plan.pads_state
        return step.jitted.trace(*step.held(jax.tree.map(_jax.abstract, operands)) if shapes else operands)

    def lower(self, *args: Any, **kwargs: Any):
        """As `jax.jit(f).lower`, of the planned function; on an AbstractMesh, for the cluster's platform."""
        platforms = self.options.machine.platforms[:1] if self._abstract else ()
        return self.trace(*args, **kwargs).lower(lowering_platforms=platforms or None)

    def compile(self, *args: Any, **kwargs: Any):
        """`lower(...).compile()`."""
        return self.lower(*args, **kwargs).compile()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.eval_shape`: shapes of the result."""
        return jax.eval_shape(self._fun, *with_own_shapes(args), **with_own_shapes(kwargs))

    def clear_cache(self) -> None:
        """Forget all plans and compiled steps."""
        self._steps.clear()
        self._last = None
