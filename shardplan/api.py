"""`auto`: a train step that knows nothing of devices, planned at its first call and run as planned from then on.

    step = auto(mesh, donate_argnums=0)(train_step)
    state = step.init(create_state, key)        # born split
    state, loss = step(state, batch)            # plans once per signature, then dispatches as jit does
    step.plan(state, batch)                     # the plan, without running; shapes are enough

The planned function is `jax.jit` of the emitted program with explicit shardings. The fast path calls the jitted function of the last
signature; that function, should jit ever have to trace it for other arguments, raises `_OtherSignature`, and the slow path looks up
or makes the right one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from shardplan import _jax
from shardplan.costs.charges import Charges
from shardplan.costs.options import Options
from shardplan.costs.pins import pin_dims
from shardplan.emit.emit import emit
from shardplan.errors import ShardingError, ShardingWarning
from shardplan.ir.traced import Traced
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.machine import resolve
from shardplan.pipeline import make_plan
from shardplan.plan import SEARCHES, Plan
from shardplan.plan.describe import describe
from shardplan.plan.planned import Planned
from shardplan.plan.reuse import matching_pins, saved_decisions

if TYPE_CHECKING:
    from shardplan.feedback import Verified
    from shardplan.xla.report.plan_report import PlanReport

UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

THRIFT = {"slight": 0.25, "moderate": 0.5, "heavy": 0.75}
"""Words for memory: part of the way from what the fastest plan needs to what the leanest does."""

LIMITS = {"adaptive": None, "disable": float("inf")}
"""Words for memory: what the device has, and no limit."""

USER_SHARDINGS = ("keep", "hint", "ignore")


class _OtherSignature(Exception):
    """The jitted function was called with arguments it was not planned for."""


class _Elsewhere(Exception):
    """The jitted function was called with arrays of another mesh."""


def auto(
    mesh,
    *,
    in_shardings=None,
    out_shardings=None,
    pins: Mapping[str, Any] | None = None,
    memory: float | str | None = None,
    search: str = "ilp",
    time_limit: float | None = None,
    cluster: str | Cluster | None = None,
    compute_scale: float = 1.0,
    overlap: bool = True,
    user_shardings: Literal["keep", "hint", "ignore"] = "keep",
    plan: str | os.PathLike[str] | Plan | None = None,
    verify: str | Literal[True] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    keep_unused: bool = False,
    **jit_options,
) -> Callable[[Callable], Auto]:
    """Plan and run a step on a mesh.

    Args:
        mesh: a `jax.sharding.Mesh`, with Auto or Explicit axes, or an `AbstractMesh` (planning only).
        in_shardings, out_shardings: as in `jax.jit`, a tree prefix of PartitionSpecs or NamedShardings; what is None, and dims
            that are `P.UNCONSTRAINED`, the planner chooses; the rest is pinned.
        pins: PartitionSpecs by path pattern of the inputs, e.g. {"params/**/kernel": P(None, "model")}.
        memory: budget per device in bytes or as "80GB"; by default ("adaptive") what the device has. `float("inf")` or "disable" for
            no limit. "slight", "moderate" or "heavy" saves memory for its own sake: a quarter, half or three quarters of the way
            from what the fastest plan needs to what the leanest does.
        search: "ilp" (an integer program, with a proof), "propagation" (faster, no proof) or "recursive" (one mesh axis after
            the other, no proof, for meshes of many axes).
        time_limit: seconds for the search, after which the best plan so far is taken, or the leanest where none was found that fits; by
            default it stops by counted work, so that a plan is the same on every machine.
        cluster: prices of compute and links: a preset's name, a file made by `calibrate`, or a `Cluster`; by default the
            machine at hand.
        compute_scale: how many times longer compute takes than the cluster says; more weighs communication less.
        overlap: whether collectives that nobody waits for (gradients, parameters of later layers) cost only what compute cannot
            hide, where the cluster hides any.
        user_shardings: whether `with_sharding_constraint`s inside the step are kept, where the search starts ("hint"), or ignored.
        plan: a plan or a plan file to reuse without solving.
        verify: compile the plan for this target ("h100:8"; True for the devices at hand), and where XLA does more than planned,
            price that and solve again, up to three plans; `plan.verified` tells. A plan that is reused is not verified again.
        static_argnums, static_argnames, donate_argnums, donate_argnames, keep_unused, jit_options: as in `jax.jit`.

    Raises:
        ShardingError: at planning, when a pin cannot hold or nothing fits the memory.
    """
    if search not in SEARCHES:
        raise ShardingError(f"search={search!r} is none of {', '.join(map(repr, SEARCHES))}")
    if user_shardings not in USER_SHARDINGS:
        raise ShardingError(f"user_shardings={user_shardings!r} is none of {', '.join(map(repr, USER_SHARDINGS))}")
    if not (isinstance(compute_scale, (int, float)) and 0 < compute_scale < float("inf")):
        raise ShardingError(f"compute_scale={compute_scale!r} is no positive number")
    if isinstance(memory, str):
        memory = LIMITS.get(memory, memory)
    if memory in THRIFT and search == "recursive":
        raise ShardingError(f"memory={memory!r} needs to know the fastest plan first.\n  ways out: search='ilp', or a number of bytes")
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        raise ShardingError(f"auto() takes a mesh first, not {type(mesh).__name__}.\n  way out: auto(jax.make_mesh((8,), ('data',)))")

    def decorate(fun: Callable) -> Auto:
        settings = _Settings(
            mesh, in_shardings, out_shardings, dict(pins or {}), memory, search, time_limit,
            cluster, float(compute_scale), bool(overlap), user_shardings,
            Plan.load(plan) if isinstance(plan, (str, os.PathLike)) else plan, verify,
            keep_unused, jit_options,
        )  # fmt: skip
        return Auto(fun, settings, _Arguments(fun, static_argnums, static_argnames, donate_argnums, donate_argnames))

    return decorate


@dataclass(frozen=True, eq=False)
class _Settings:
    mesh: Any
    in_shardings: Any
    out_shardings: Any
    pins: dict[str, Any]
    memory: float | str | None
    search: str
    time_limit: float | None
    cluster: str | Cluster | None
    compute_scale: float
    overlap: bool
    user_shardings: Literal["keep", "hint", "ignore"]
    plan: Plan | None
    verify: str | Literal[True] | None
    keep_unused: bool
    jit_options: dict[str, Any]

    @functools.cached_property
    def shape(self) -> MeshShape:
        return MeshShape(tuple(map(str, self.mesh.axis_names)), tuple(int(n) for n in self.mesh.axis_sizes))

    @functools.cached_property
    def machine(self) -> Cluster:
        found = self._machine()
        return found if self.compute_scale == 1 else found.scaled(self.compute_scale)

    def _machine(self) -> Cluster:
        if isinstance(self.mesh, jax.sharding.Mesh):
            device = self.mesh.devices.flat[0]
            return resolve(self.cluster, device.platform, device.device_kind, n_devices=self.mesh.size)
        kind = getattr(getattr(self.mesh, "abstract_device", None), "device_kind", None) or "cpu"
        platform = "cpu" if kind == "cpu" else "gpu"
        return resolve(self.cluster, platform, kind, n_devices=self.shape.n_devices)

    @property
    def budget(self) -> float | None:
        given = self.memory is not None and self.memory not in THRIFT
        limit = parse_bytes(self.memory) if given else self.machine.device.memory_bytes  # type: ignore[arg-type]
        return None if np.isinf(limit) else float(limit)


def parse_bytes(amount: float | str) -> float:
    """Bytes of 80e9, "80GB" or "74.5GiB".

    Raises:
        ShardingError: when the text is no amount of memory, or is not positive.
    """
    text = str(amount).strip().lower()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ") if not text.endswith("inf") else text
    try:
        value = float(digits) * UNITS[text[len(digits) :].strip() or "b"]
    except (ValueError, KeyError):
        value = float("nan")
    if not value > 0:
        raise ShardingError(
            f"memory={amount!r} is no amount of memory.\n"
            f"  ways out: bytes, text like '80GB' or '74.5GiB', or one of {', '.join((*LIMITS, *THRIFT))}"
        )
    return value


class _Arguments:
    """Which arguments are static or donated, and how a call is sorted into what jit gets."""

    def __init__(self, fun, static_argnums, static_argnames, donate_argnums, donate_argnames):
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = positional
        self.static = _both(positional, static_argnums, static_argnames, "static")
        self.donated = _both(positional, donate_argnums, donate_argnames, "donate")

    def sort(self, args: tuple, kwargs: Mapping) -> tuple[tuple, dict, tuple]:
        """(dynamic positional, dynamic keyword, static (place, value) pairs)."""
        places, names = self.static
        if not places and not names:
            return args, dict(kwargs), ()
        fixed = {p % len(args) for p in places if -len(args) <= p < len(args)}
        static = tuple((p, args[p]) for p in sorted(fixed)) + tuple((k, kwargs[k]) for k in sorted(kwargs) if k in names)
        for where, value in static:
            try:
                hash(value)
            except TypeError:
                raise ShardingError(
                    f"static argument {where!r} of type {type(value).__name__} is not hashable.\n"
                    "  way out: make it hashable, or leave it out of static_argnums"
                ) from None
        dynamic = tuple(a for p, a in enumerate(args) if p not in fixed)
        return dynamic, {k: v for k, v in kwargs.items() if k not in names}, static

    def label(self, place: int, static: tuple) -> str:
        """Name of the dynamic positional argument number `place`."""
        fixed = {p for p, _ in static if isinstance(p, int)}
        free = [n for p, n in enumerate(self.names) if p not in fixed]
        return free[place] if place < len(free) else f"[{place}]"

    def donates(self, n_args: int, static: tuple) -> tuple[int, ...]:
        """Numbers of the donated ones among the dynamic positional arguments."""
        fixed = {p for p, _ in static if isinstance(p, int)}
        total = n_args + len(fixed)
        free = [p for p in range(total) if p not in fixed]
        places = {p % total for p in self.donated[0] if -total <= p < total}
        return tuple(k for k, p in enumerate(free) if p in places)


def _both(positional: list[str], nums, names, what: str) -> tuple[frozenset[int], frozenset[str]]:
    """Numbers and names, each completed from the other through the signature, as jit does when one is given."""
    number_set = {nums} if isinstance(nums, int) else set(nums or ())
    name_set = {names} if isinstance(names, str) else set(names or ())
    if any(not isinstance(n, int) for n in number_set) or any(not isinstance(n, str) for n in name_set):
        raise ShardingError(f"{what}_argnums takes ints and {what}_argnames strings, not {nums!r} and {names!r}")
    completed = set(name_set)
    for n in number_set:
        if -len(positional) <= n < len(positional):
            completed.add(positional[n])
    number_set |= {positional.index(n) for n in name_set if n in positional}
    return frozenset(number_set), frozenset(completed)


@dataclass(frozen=True, eq=False)
class _Context:
    """What a fresh plan was planned from; `program` gives the jitted step and shapes to trace it with, devices or not."""

    mesh: Any
    in_tree: Any
    out_tree: Any
    in_dtypes: Mapping[str, Any]
    replan: Callable[..., Plan]
    program: Callable[[Plan], tuple[Callable, tuple]]
    planned: Planned | None = None
    verified: Verified | None = None


@dataclass(frozen=True, eq=False)
class _Entry:
    """One signature: its plan, the jitted step, and the step to be traced into a larger program on an Explicit mesh."""

    plan: Plan
    jitted: Callable
    traceable: Callable
    in_shardings: list
    donated: tuple[int, ...]


class Auto:
    """A step that plans itself; made by `auto`. Call it like the function it wraps."""

    def __init__(self, fun: Callable, settings: _Settings, arguments: _Arguments):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._settings, self._arguments = fun, settings, arguments
        self._entries: dict[Any, _Entry] = {}
        self._last: Callable | None = None
        self._plain_call = not arguments.static[0] and not arguments.static[1]
        self._explicit = not _jax.is_auto(settings.mesh)

    # ---- calling

    def __call__(self, *args, **kwargs):
        if self._explicit and (under := _jax.under_jit()) is not False:
            if under is None:  # eager arrays under a transformation: its rule is the plain function's
                return self._fun(*args, **kwargs)
            entry, dynamic, keywords = self._entry(args, kwargs)
            return entry.traceable(*dynamic, *([keywords] if keywords else []))
        last = self._last
        if last is not None and self._plain_call and not kwargs:
            try:
                return last(*args)
            except _OtherSignature:
                pass
            except (ValueError, _Elsewhere) as error:
                if not _is_placement(error):
                    raise
        return self._call(args, kwargs)

    def _call(self, args, kwargs):
        entry, dynamic, keywords = self._entry(args, kwargs)
        given = (*dynamic, keywords) if keywords else dynamic
        try:
            out = entry.jitted(*given)
        except (ValueError, _Elsewhere) as error:
            if not _is_placement(error):
                raise
            leaves, tree = jax.tree.flatten(given)
            placed = [_place(x, s) for x, s in zip(leaves, entry.in_shardings, strict=True)]
            out = entry.jitted(*jax.tree.unflatten(tree, placed))
            for n in entry.donated:  # what was donated is gone, also where a copy of it was moved first
                if isinstance(leaves[n], jax.Array) and not leaves[n].is_deleted():
                    leaves[n].delete()
        if self._plain_call and not keywords:
            self._last = entry.jitted
        return out

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    # ---- planning

    def plan(self, *args, **kwargs) -> Plan:
        """The plan for arguments of these shapes (arrays or ShapeDtypeStructs); nothing runs, no device is needed."""
        return self._entry(args, kwargs)[0].plan

    def check(self, *args, target: str | None = None, **kwargs) -> PlanReport:
        """What XLA makes of the plan for arguments of these shapes: `plan(*args, **kwargs).check(target)`."""
        return self.plan(*args, **kwargs).check(target)

    def init(self, create: Callable, *args, **kwargs):
        """Run `create(*args, **kwargs)` so that its result is born split over the mesh: no device holds the whole.

        Where a plan for a state of this form is known (`plan` was called, a plan file is in use, or the step ran), the
        result is laid out as that plan wants it. Otherwise every array is split as far as it divides, and the first call of
        the step brings it to the layout it plans.
        """
        arguments, in_tree = jax.tree.flatten((args, kwargs))

        def flat(*arguments):
            args, kwargs = jax.tree.unflatten(in_tree, arguments)
            with _jax.within(self._twin):
                return tuple(jax.tree.leaves(create(*args, **kwargs)))

        with _jax.within(self._twin):
            abstract = jax.tree.unflatten(in_tree, map(_jax.abstract, arguments))
            shapes = jax.eval_shape(create, *abstract[0], **abstract[1])
        leaves, tree = jax.tree.flatten(shapes)
        layouts = self._known_layouts(tree, leaves) or [even_layout(x.shape, self._settings.shape) for x in leaves]
        mesh = self._concrete_mesh("init")
        shardings = tuple(_jax.sharding(mesh, x.spec()) for x in layouts)
        born = jax.jit(_jax.on_auto_axes(flat, mesh, shardings), out_shardings=shardings)(*arguments)
        return jax.tree.unflatten(tree, born)

    def _known_layouts(self, tree, leaves) -> list[Layout] | None:
        want = [(tuple(x.shape), str(x.dtype)) for x in leaves]
        for entry in reversed(self._entries.values()):
            context = entry.plan.context
            inputs = iter(entry.plan.inputs)
            for part in _subtrees(context.in_tree):
                found = [next(inputs) for _ in range(part.num_leaves)]
                if part == tree and [(x.shape, x.dtype) for x in found] == want:
                    return [x.layout for x in found]
        saved = self._settings.plan
        if saved is not None:
            found = saved.inputs[: len(want)]
            if [(x.shape, x.dtype) for x in found] == want:
                return [x.layout for x in found]
        return None

    @functools.cached_property
    def _twin(self):
        return _jax.auto_twin(self._settings.mesh)

    def _concrete_mesh(self, what: str):
        if isinstance(self._settings.mesh, jax.sharding.Mesh):
            return self._settings.mesh
        raise ShardingError(
            f"{what} needs devices, and {self._settings.mesh} has none.\n  ways out: .plan() works without; a jax.make_mesh(...) runs"
        )

    # ---- jit's other verbs

    def trace(self, *args, **kwargs):
        """As `jax.jit(f).trace`, of the planned function."""
        entry, dynamic, keywords = self._entry(args, kwargs)
        return entry.jitted.trace(*dynamic, *([keywords] if keywords else []))

    def lower(self, *args, **kwargs):
        """As `jax.jit(f).lower`, of the planned function."""
        return self.trace(*args, **kwargs).lower()

    def compile(self, *args, **kwargs):
        """`lower(...).compile()`."""
        return self.lower(*args, **kwargs).compile()

    def eval_shape(self, *args, **kwargs):
        """As `jax.eval_shape`: shapes of the result."""
        return jax.eval_shape(self._fun, *args, **kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and compiled steps."""
        self._entries.clear()
        self._last = None

    # ---- inside

    def _entry(self, args, kwargs) -> tuple[_Entry, tuple, dict]:
        dynamic, keywords, static = self._arguments.sort(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, keywords))
        key = (tree, tuple(map(_signature, leaves)), static)
        if key not in self._entries:
            self._entries[key] = self._make(dynamic, keywords, static, self._settings)
        return self._entries[key], dynamic, keywords

    def _make(self, dynamic, keywords, static, settings: _Settings) -> _Entry:
        _check_arrays(dynamic, keywords, self._arguments, static)
        step = _Step(self._fun, self._arguments, settings, self._twin, dynamic, keywords, static)
        options = step.options(settings)
        saved = settings.plan
        decisions = saved_decisions(saved, step.traced, settings.shape) if saved is not None else None

        def replan(pins: Mapping[str, Any], search: str | None = None) -> Plan:
            asked = replace(settings, pins={**settings.pins, **pins}, search=search or settings.search, plan=None, verify=None)
            return self._make(dynamic, keywords, static, asked).plan

        def context(decisions, planned: Planned | None = None) -> _Context:
            def program(plan: Plan) -> tuple[Callable, tuple]:
                args, keywords = jax.tree.unflatten(step.in_tree, step.in_leaves)
                return step.jitted(decisions, plan)[0], (*args, keywords) if step.has_keywords else args

            return _Context(settings.mesh, step.in_tree, step.out_tree, step.in_dtypes, replan, program, planned)

        if saved is not None:
            if decisions is not None:
                return step.jit(decisions, saved.with_context(context(decisions)))
            options = matching_pins(saved, step.traced, options)

        def solve(memory: float | None, charges: Charges | None = None) -> Plan:
            with options.progress or contextlib.nullcontext():
                asked = replace(options, memory=memory, charges=charges)
                planned = make_plan(step.traced, settings.shape, settings.machine, asked)
            return describe(planned, context(planned.decisions, planned))

        if settings.verify is None:
            plan = solve(options.memory)
        else:
            from shardplan.feedback import verified

            target = None if settings.verify is True else settings.verify
            found = verified(solve, target, options.memory, settings.machine)
            plan = found.plan.with_context(replace(found.plan.context, verified=found))
        for primitive, source in plan.unknown:
            warnings.warn(
                f"no rule for primitive {primitive!r} at {source}: it is kept whole on every device.\n"
                "  way out: shardplan.register_rule",
                ShardingWarning,
                stacklevel=4,
            )
        assert plan.context is not None
        return step.jit(plan.context.planned.decisions, plan)


class _Step:
    """A step traced for one signature."""

    def __init__(self, fun, arguments: _Arguments, settings: _Settings, twin, dynamic, keywords, static):
        self.settings, self.twin, self.static = settings, twin, static
        self.n_args, self.has_keywords = len(dynamic), bool(keywords)
        self.keywords = keywords
        self.donated_args = arguments.donates(len(dynamic), static)
        self.donated_names = arguments.donated[1] & set(keywords)
        self.plain = _bind_static(fun, static, len(dynamic))
        _no_refs(jax.tree.leaves((dynamic, keywords)), "takes")
        abstract = jax.tree.map(_jax.abstract, (dynamic, keywords))
        with _jax.within(twin), _shard_map_meshes():
            self.plain, traced = _traced(self.plain, settings.shape, *abstract)
        _no_refs(traced.jaxpr.consts, "closes over")
        self.in_leaves, self.in_tree = jax.tree.flatten(abstract)
        self.out_info = traced.out_info
        self.out_leaves, self.out_tree = jax.tree.flatten(traced.out_info)
        labels = _labels(dynamic, keywords, arguments, static)
        self.in_dtypes = dict(zip(labels, [x.dtype for x in self.in_leaves], strict=True))
        self.traced = Traced(
            _jax.without_refs(traced.jaxpr),
            labels,
            _unique([_path(p) or "result" for p, _ in jax.tree_util.tree_leaves_with_path(traced.out_info)]),
            tuple(_tie_state(self.in_tree, self.in_leaves, self.out_tree, self.out_leaves)),
            tuple(self._donated_leaves(dynamic, keywords)),
        )

    def _donated_leaves(self, dynamic, keywords):
        at = 0
        for k, arg in enumerate((*dynamic, *(keywords[name] for name in sorted(keywords)))):
            n = len(jax.tree.leaves(arg))
            name = None if k < len(dynamic) else sorted(keywords)[k - len(dynamic)]
            if k in self.donated_args or name in self.donated_names:
                yield from range(at, at + n)
            at += n

    def options(self, settings: _Settings) -> Options:
        in_pins = _pins(settings.in_shardings, self._args_tree(), self.in_leaves, "in_shardings")
        out_pins = _pins(settings.out_shardings, self.out_tree, self.out_leaves, "out_shardings")
        pins = {pattern: tuple(_spec(spec, f"pin {pattern!r}")) for pattern, spec in settings.pins.items()}
        thrift = THRIFT.get(settings.memory, 0.0) if isinstance(settings.memory, str) else 0.0
        from shardplan.view.progress import Progress

        return Options(
            settings.budget, settings.search, settings.time_limit, in_pins, out_pins, pins, Progress(),
            memory_saving=thrift, overlap=settings.overlap, constraints=settings.user_shardings,
        )  # fmt: skip

    def _args_tree(self):
        args, _ = jax.tree.unflatten(self.in_tree, range(len(self.in_leaves)))
        return jax.tree.structure(args)

    def jit(self, decisions, plan: Plan) -> _Entry:
        """The jitted step of a plan; raises _OtherSignature when traced for other arguments."""
        if not isinstance(self.settings.mesh, jax.sharding.Mesh):
            return _Entry(plan, _no_devices, _no_devices, [], ())
        jitted, step, in_flat, donates = self.jitted(decisions, plan)
        return _Entry(plan, jitted, step, in_flat, self.traced.donated if donates else ())

    def jitted(self, decisions, plan: Plan) -> tuple[Callable, Callable, list, bool]:
        """(the jitted step with a plan's constraints and shardings, it before jit, its inputs' shardings, whether it donates)."""
        run = emit(self.traced.jaxpr, decisions, self.twin)
        # Callbacks know their mesh: with them the step runs on the twin, and its results are handed to the user's mesh.
        aside = bool(self.traced.jaxpr.effects) or _jax.knows_its_mesh(self.traced.jaxpr)
        mesh = self.twin if aside else self.settings.mesh
        in_flat = [_jax.sharding(mesh, leaf.layout.spec()) for leaf in plan.inputs]
        out_flat = [_jax.sharding(mesh, leaf.layout.spec()) for leaf in plan.outputs]
        expected = (self.in_tree, [(x.shape, x.dtype, x.weak_type) for x in self.in_leaves])
        differentiable = _jax.differentiable_as(run, self.plain, self.in_tree, self.traced.jaxpr)

        def flat_step(*leaves):
            with _jax.within(self.twin):
                return tuple(differentiable(*leaves))

        def step(*given, keep_types=False):
            args, keywords = (given[:-1], given[-1]) if self.has_keywords else (given, {})
            leaves, tree = jax.tree.flatten((args, keywords))
            if (tree, [(x.shape, x.dtype, x.weak_type) for x in map(_jax.abstract, leaves)]) != expected:
                raise _OtherSignature
            if any(_jax.is_foreign(x, mesh) for x in leaves):
                raise _Elsewhere
            out = list(out_flat)
            for a, o in self.traced.tied if keep_types else ():  # state comes out with the type that it went in with
                out[o] = _jax.typed_sharding(leaves[a], mesh) or out[o]
            return jax.tree.unflatten(self.out_tree, _jax.on_auto_axes(flat_step, mesh, tuple(out))(*leaves))

        shardings = jax.tree.unflatten(self.in_tree, in_flat)
        in_shardings = (*shardings[0], shardings[1]) if self.has_keywords else shardings[0]
        donate = self.donated_args
        if self.has_keywords and self.donated_names:
            if self.donated_names != set(self.keywords):
                warnings.warn(
                    "keyword arguments are donated together or not at all: none is donated.\n  way out: pass donated ones by position",
                    ShardingWarning,
                    stacklevel=6,
                )
            else:
                donate = (*donate, self.n_args)
        step.__name__ = getattr(self.plain, "__name__", "step")
        jitted = jax.jit(
            step,
            in_shardings=in_shardings,
            out_shardings=jax.tree.unflatten(self.out_tree, out_flat),
            donate_argnums=donate,
            keep_unused=self.settings.keep_unused,
            **self.settings.jit_options,
        )
        if aside and not _jax.is_auto(self.settings.mesh):
            jitted = _jax.on_twin(jitted, self.twin, self.settings.mesh)
        return jitted, functools.partial(step, keep_types=True), in_flat, bool(donate)


def _traced(plain: Callable, shape: MeshShape, args, keywords):
    """(the function as it can be traced on this mesh, its trace).

    When it names axes that the mesh lacks, and none where there is no mesh, it is traced as it is without one.
    """
    try:
        return plain, jax.jit(plain).trace(*args, **keywords)
    except ValueError as error:
        if not _jax.names_no_axis(error):
            raise
        unknown = error
    told, way = f"the step asks for layouts that the mesh has no axis for: {unknown}", f"name axes of {shape}"
    alone = _jax.without_mesh(plain)
    try:
        traced = jax.jit(alone).trace(*args, **keywords)
    except Exception:
        raise ShardingError(f"{told}\n  way out: {way}, or plan on a mesh that has it") from unknown
    warnings.warn(
        f"{told}\n  All that it asks for only where there is a mesh is left to the planner.\n  way out: {way}",
        ShardingWarning,
        stacklevel=7,
    )
    return alone, traced


@contextlib.contextmanager
def _shard_map_meshes():
    """Says what to do where a `shard_map` inside the step insists on a mesh with Explicit axes: steps are planned on Auto axes."""
    try:
        yield
    except ValueError as error:
        if "should match the mesh passed to shard_map" not in str(error):
            raise
        raise ShardingError(
            "a shard_map inside the step is given a mesh whose axes are Explicit; a planned step is traced on the same mesh with "
            "Auto axes.\n  ways out: leave mesh= out of that jax.shard_map (it takes the mesh in use), or plan on "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n)"
        ) from error


def _no_refs(values, how: str):
    if found := [jax.typeof(x) for x in values if _jax.is_ref(x)]:
        raise ShardingError(
            f"the step {how} a mutable array, {found[0]}, which a plan cannot place.\n"
            "  ways out: take the array and return the new one; or jax.new_ref inside the step"
        )


def _no_devices(*_):
    raise ShardingError(
        "this step was planned on an AbstractMesh, which has no devices to run on.\n  way out: auto(jax.make_mesh(...))"
    )


def _bind_static(fun: Callable, static: tuple, n_dynamic: int) -> Callable:
    if not static:
        return fun
    places = {p: v for p, v in static if isinstance(p, int)}
    names = {k: v for k, v in static if isinstance(k, str)}

    @functools.wraps(fun)
    def bound(*dynamic, **keywords):
        rest = iter(dynamic)
        args = [places[p] if p in places else next(rest) for p in range(n_dynamic + len(places))]
        return fun(*args, **keywords, **names)

    return bound


def _signature(leaf):
    try:
        return (
            leaf.shape,
            leaf.dtype,
            bool(getattr(leaf, "weak_type", getattr(getattr(leaf, "aval", None), "weak_type", False))),
        )
    except AttributeError:
        return type(leaf)


def _check_arrays(dynamic, keywords, arguments: _Arguments, static) -> None:
    leaves = jax.tree.leaves((dynamic, keywords))
    for n, leaf in enumerate(leaves):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            continue
        if isinstance(leaf, (bool, int, float, complex)):
            continue
        label = _labels(dynamic, keywords, arguments, static)[n]
        raise ShardingError(
            f"argument {label} is {type(leaf).__name__} {str(leaf)[:40]!r}, not an array.\n"
            "  ways out: make it an array, or name it in static_argnums or static_argnames"
        )


def _path(keys) -> str:
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def _labels(dynamic, keywords, arguments: _Arguments, static) -> tuple[str, ...]:
    out = []
    for keys, _ in jax.tree_util.tree_leaves_with_path((dynamic, keywords)):
        by_place = keys[0].idx == 0
        head = arguments.label(keys[1].idx, static) if by_place else str(keys[1].key)
        out.append("/".join(x for x in (head, _path(keys[2:])) if x))
    return _unique(out)


def _unique(labels: list[str]) -> tuple[str, ...]:
    """The labels, told apart where keys with slashes make two paths read alike."""
    seen: dict[str, int] = {}
    for n, label in enumerate(labels):
        count = seen[label] = seen.get(label, 0) + 1
        if count > 1:
            labels[n] = f"{label}~{count}"
    return tuple(labels)


def _subtrees(in_tree) -> list:
    """Structures of the single arguments of a call."""
    return [part for side in in_tree.children() for part in side.children()]


def _tie_state(in_tree, in_leaves, out_tree, out_leaves):
    """(input, output) leaf numbers of state: arguments that come out again with the same structure, shapes and dtypes."""

    def parts(tree, leaves):
        at, out = 0, []
        for part in tree:
            n = part.num_leaves
            out.append((part, at, [(x.shape, x.dtype) for x in leaves[at : at + n]]))
            at += n
        return out

    whole = out_tree.num_leaves == len(out_leaves) and [out_tree]
    candidates = parts(out_tree.children() or whole, out_leaves)
    if (out_tree, [(x.shape, x.dtype) for x in out_leaves]) in [(p, s) for p, _, s in parts(_subtrees(in_tree), in_leaves)]:
        candidates = parts([out_tree], out_leaves)
    used = set()
    for part, start, shapes in candidates:
        if not shapes:
            continue
        for k, (in_part, in_start, in_shapes) in enumerate(parts(_subtrees(in_tree), in_leaves)):
            if k not in used and in_part == part and in_shapes == shapes:
                used.add(k)
                yield from ((in_start + n, start + n) for n in range(len(shapes)))
                break


def _pins(prefix, tree, leaves, who: str) -> dict[int, Any]:
    """Pins by flat number from a tree prefix of shardings."""
    if prefix is None:
        return {}

    def is_leaf(x):
        return x is None or isinstance(x, (jax.sharding.PartitionSpec, jax.sharding.Sharding))

    out: dict[int, Any] = {}
    full = jax.tree.unflatten(tree, range(tree.num_leaves))
    try:
        spread = _jax.broadcast_prefix(prefix, full, is_leaf)
    except ValueError as error:
        raise ShardingError(f"{who} is no tree prefix of what the step {'takes' if who[0] == 'i' else 'returns'}: {error}") from None
    for n, sharding in enumerate(spread):
        if sharding is not None:
            out[n] = pin_dims(_spec(sharding, who), max(len(leaves[n].shape), len(_spec(sharding, who))))
    return out


def _spec(sharding, who: str):
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, (jax.sharding.PartitionSpec, tuple)):
        raise ShardingError(f"{who}: {sharding!r} is no PartitionSpec or NamedSharding")
    return spec


def _is_placement(error: Exception) -> bool:
    """Whether jit refused arguments for where they live, which moving them mends."""
    if isinstance(error, _Elsewhere):
        return True
    text = str(error)
    refusals = (
        "does not match the sharding",
        "incompatible devices",
        "should be equal",
        "mesh should be the same",
        "aval mesh",
    )
    return any(refusal in text for refusal in refusals)


def _place(x, sharding):
    return x if isinstance(x, (bool, int, float, complex)) else jax.device_put(x, sharding)


def even_layout(shape: Sequence[int], mesh: MeshShape) -> Layout:
    """Every mesh axis on the largest dim that it divides."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for axis, n in mesh:
        fits = [d for d in range(len(left)) if n > 1 and left[d] % n == 0 and left[d] >= n]
        if fits:
            d = max(fits, key=lambda d: left[d])
            dims[d] += (axis,)
            left[d] //= n
    return Layout(tuple(dims))
