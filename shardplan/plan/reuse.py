"""A saved plan applied to a step: exactly when the program is the same, as far as it still matches when it was edited."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

import jax
import jax.numpy as jnp

from shardplan.costs.options import Options, PinDims
from shardplan.costs.pins import pin_text, unmet_pin
from shardplan.emit.emit import EmitDecision
from shardplan.errors import PlanFileError, ShardingError, warn
from shardplan.ir.graph import Graph, Op, Path
from shardplan.ir.parse import Traced
from shardplan.mesh.layout import MeshShape
from shardplan.plan.data import Leaf, PlanDecision
from shardplan.plan.plan import Plan
from shardplan.plan.program import differences, numbered, placed, result_type, source_lines
from shardplan.units import fit, format_array, format_memory, listed

MAX_LISTED, MAX_TEXT = 5, 100


def saved_decisions(plan: Plan, traced: Traced, mesh: MeshShape) -> Mapping[Path, EmitDecision] | None:
    """Decisions of a saved plan for the program it was made for, wherever its source is now; None for another program.

    Raises:
        PlanFileError: when the plan is for another mesh.
    """
    if plan.mesh != mesh:
        raise PlanFileError(
            f"the plan is for mesh {fit(str(plan.mesh), MAX_TEXT)}, the step runs on mesh {mesh}.\n"
            "  ways out: that mesh, or plan anew without plan="
        )
    graph, program = traced.graph, traced.identity()
    if plan.fingerprint == program.fingerprint:
        numbers, lost = {d.op: d.op for d in plan.decisions}, []
    elif same_inputs(plan, traced) and plan.products == program.products and plan.jax != jax.__version__:
        numbers, lost = _matched(plan, graph)
    elif same_inputs(plan, traced) and not plan.products and _fits(plan, graph):
        numbers, lost = {d.op: d.op for d in plan.decisions}, []
        warn(
            "the plan is from a file of an older format, which cannot say whether it was made for this very step; all its "
            "decisions fit and are taken over.\n  way out: save it again"
        )
    else:
        return None
    jaxpr = traced.jaxpr.jaxpr
    for leaves, atoms in ((plan.inputs, jaxpr.invars), (plan.outputs, jaxpr.outvars)):
        if [(x.shape, x.dtype) for x in leaves] != [_type(v.aval) for v in atoms]:
            raise PlanFileError("the plan's inputs or results are not those of the step it names.\n  way out: plan anew without plan=")
    if lost:
        warn(
            f"the plan was made with jax {plan.jax}; jax {jax.__version__} traces the same step with other small ops: "
            f"{len(numbers)} of {len(plan.decisions)} decisions are taken over, the others are left to XLA.\n"
            f"  not matched: {_listed(lost)}\n  way out: plan anew without plan="
        )
    _check_donation(plan, traced)
    ops, found = graph.ops, {}
    for d in (d for d in plan.decisions if d.op in numbers):
        n = numbers[d.op]
        op = ops[n] if n < len(ops) else None
        if op is None or op.primitive != d.primitive or not _has_dims(d, op):
            raise PlanFileError(
                f"the plan decides op {d.op}, a {fit(d.primitive, MAX_TEXT)}, which the step does not have.\n"
                "  way out: plan anew without plan="
            )
        found[op.path] = EmitDecision(d.operand_layouts, d.result_layouts, d.copy_numbers)
    return found


def _has_dims(d: PlanDecision, op: Op) -> bool:
    """Whether the operands and results of an op have the numbers of dims that a decision says."""
    ins, outs = ([len(getattr(x, "shape", ())) for x in avals] for avals in (op.ins, op.outs))
    operands = [(n, layout.rank) for n, chain in enumerate(d.operand_layouts) for layout in chain]
    results = [(n, layout.rank) for n, layout in enumerate(d.result_layouts) if layout is not None]
    return all(n < len(ranks) and ranks[n] == rank for ranks, some in ((ins, operands), (outs, results)) for n, rank in some)


def _check_donation(plan: Plan, traced: Traced) -> None:
    if plan.donated != traced.donated_names():
        then, now = (", ".join(names) or "nothing" for names in (plan.donated, traced.donated_names()))
        warn(
            f"the plan was made for a step that donates {then}; this one donates {now}, so it needs other memory than the plan says.\n"
            "  ways out: donate_argnums as it was, or plan anew without plan="
        )


def decisions_but_scalars(plan: Plan, traced: Traced) -> Mapping[Path, EmitDecision] | None:
    """Decisions of a plan that was solved here, for a program that differs from its own in scalars alone; None for any other.

    A Python number in the state, such as a count of steps, is weakly typed until the step returns an array in its place; the step is
    traced again then, with other conversions.
    """
    if plan.context is None or plan.context.planned is None or not same_inputs(plan, traced):
        return None
    before, after = plan.context.planned.traced.graph, traced.graph
    old, new = ([n for n, op in enumerate(graph.ops) if not all(math.prod(x.shape) == 1 for x in op.outs)] for graph in (before, after))
    if [_op_text(before.ops[n]) for n in old] != [_op_text(after.ops[n]) for n in new] or plan.products != traced.identity().products:
        return None
    numbers = dict(zip(old, new, strict=True))
    decided = ((numbers[d.op], d) for d in plan.decisions if d.op in numbers)
    return {after.ops[n].path: EmitDecision(d.operand_layouts, d.result_layouts, d.copy_numbers) for n, d in decided}


def _op_text(op: Op) -> tuple:
    return op.primitive, str(op.source), op.phase, op.runs, list(map(_type, op.outs)), list(map(_type, op.ins))


def same_inputs(plan: Plan, traced: Traced) -> bool:
    """Whether inputs and outputs have the paths and types that they have in the plan."""
    jaxpr = traced.jaxpr.jaxpr
    ends = (plan.inputs, traced.in_labels, jaxpr.invars), (plan.outputs, traced.out_labels, jaxpr.outvars)
    return all(
        [(x.path, x.shape, x.dtype) for x in leaves] == [(name, *_type(v.aval)) for name, v in zip(labels, atoms, strict=True)]
        for leaves, labels, atoms in ends
    )


def _type(aval) -> tuple[tuple[int, ...], str]:
    return tuple(getattr(aval, "shape", ())), str(getattr(aval, "dtype", "token"))


def _fits(plan: Plan, graph: Graph) -> bool:
    """Whether every op that the plan decides is an op of this program, by number, primitive, function and type of the result."""

    def same(d: PlanDecision) -> bool:
        op = graph.ops[d.op] if d.op < len(graph.ops) else None
        return op is not None and (op.primitive, op.source.function, result_type(op)) == (d.primitive, d.function, d.result_type)

    return all(map(same, plan.decisions))


def _matched(plan: Plan, graph: Graph) -> tuple[dict[int, int], list[str]]:
    """(op of the plan -> op of this program, decisions without an op): matched by source line, primitive, phase and type of result."""
    known, found, lost = numbered(graph, source_lines(graph, {})), {}, []
    for key, d in placed(plan.decisions, plan.lines):
        n = known.get(key)
        op = graph.ops[n] if n is not None else None
        if op is not None and result_type(op) == d.result_type and len(op.inputs) >= len(d.operand_layouts):
            found[d.op] = n
        else:
            lost.append(f"{fit(d.primitive, MAX_TEXT)} at {PurePath(d.file).name}:{d.line}")
    return found, lost


def matching_pins(plan: Plan, traced: Traced, options: Options, state: Mapping[int, PinDims]) -> Options:
    """The options with every input that still matches pinned to the saved plan's layout; warns of the others.

    Args:
        plan: the saved one.
        traced: the step to be planned.
        options: their pins win over those of the saved plan.
        state: pins of the state by another step's plan, which win over those of the saved plan, too.

    Raises:
        PlanFileError: when the plan has nothing in common with the step.
    """
    leaves = {x.path: x for x in plan.inputs}
    pins, lost = {}, []
    avals = [v.aval for v in traced.jaxpr.jaxpr.invars]
    for n, (label, aval) in enumerate(zip(traced.in_labels, avals, strict=True)):
        leaf = leaves.pop(label, None)
        if leaf is not None and leaf.shape == tuple(aval.shape):
            pins[n] = leaf.layout.dims
        else:
            lost.append(f"{label} {format_array(aval)}")
    if not pins:
        raise PlanFileError(
            "the plan is for another model: none of its inputs is one of this step.\n"
            f"  plan: {_listed([f'{x.path} {format_array(x)}' for x in plan.inputs])}\n  step: {_listed(lost)}\n"
            "  way out: plan anew without plan="
        )
    unmatched = [*lost, *(f"{path} (no longer there)" for path in leaves)]
    warn(
        f"the plan was made for another version of this step: {len(pins)} of {len(avals)} inputs keep its layouts, the rest is planned "
        "again."
        + "".join(f"\n  {text}" for text in differences(plan, traced, jax.__version__))
        + (f"\n  not matched: {_listed(unmatched)}" if unmatched else "")
    )
    return replace(options, in_pins={**pins, **state, **(options.in_pins or {})})


# ---- one state, several functions


@dataclass(frozen=True)
class SharedState:
    """The state of another step's plan, as a step takes it.

    Attributes:
        pins: flat number of an input -> its layout there.
        rest_bytes: per device, of the state that the step does not take. It is in memory, too, while the step runs.
    """

    pins: Mapping[int, PinDims]
    rest_bytes: float

    @classmethod
    def none(cls) -> SharedState:
        """Of a step that shares no state."""
        return cls({}, 0.0)

    def leaves_room(self, options: Options, name: str) -> tuple[Options, str]:
        """(the options with the memory that the rest of the state leaves for the step of this name, what holds the rest in words).

        Raises:
            ShardingError: it leaves none.
        """
        if options.memory is None or not self.rest_bytes:
            return options, ""
        room = f"{format_memory(self.rest_bytes)} of {format_memory(options.memory)} hold the state that {name} does not take"
        if options.memory <= self.rest_bytes:
            raise ShardingError(f"state_like: {room}.\n  ways out: a larger mesh, or more memory=")
        return replace(options, memory=options.memory - self.rest_bytes), room


def shared_state(plan: Plan, traced: Traced, taken: Collection[str]) -> SharedState:
    """The inputs of a step that are state of another step's plan, in the layouts that they have there.

    The state of a plan are its parameters and optimizer state; of one that keeps none, an evaluation's, the first argument. An input is
    the state leaf of its path; else the only leaf, or the only parameter, whose path ends in its own without the argument's name
    ("params/up" of "state/params/up"). Shape and dtype are the same.

    Args:
        plan: of the step that keeps the state.
        traced: the step to be planned.
        taken: paths of inputs that have pins of their own.

    Raises:
        ShardingError: no input is one of the state.
    """
    state, found = _state(plan), _shared_leaves(plan, traced)
    known = {id(leaf) for leaf in found.values()}
    pins = {n: leaf.layout.dims for n, leaf in found.items() if traced.in_labels[n] not in taken}
    rest = [leaf for leaf in state if id(leaf) not in known]
    if not pins and not any(label in taken for label in traced.in_labels):
        raise ShardingError(
            f"state_like: no input of the step is state of that plan.\n  state: {_listed([x.path for x in state])}\n"
            f"  step: {_listed(traced.in_labels)}\n  way out: the plan of a step with the same parameters, or in_shardings"
        )
    return SharedState(pins, sum(leaf.device_bytes(plan.mesh) for leaf in rest))


def padded_inputs(traced: Traced, pads_state: bool, plan: Plan | None) -> frozenset[int]:
    """Numbers of the inputs of a step that may be held padded: its own state if that may, and what another step's plan holds so."""
    own = {a for a, _ in traced.tied} if pads_state else set()
    shared = _shared_leaves(plan, traced) if plan is not None and plan.pads_state else {}
    taken = {n for n, leaf in shared.items() if leaf.held_shape(plan.mesh) != leaf.shape} if plan is not None else set()
    dtypes = [v.aval.dtype for v in traced.jaxpr.jaxpr.invars]
    return frozenset(n for n in own | taken if not jnp.issubdtype(dtypes[n], jax.dtypes.extended))


def _shared_leaves(plan: Plan, traced: Traced) -> dict[int, Leaf]:
    """Number of an input -> the leaf of another plan's state that it is."""
    state = _state(plan)
    inputs = enumerate(zip(traced.in_labels, traced.jaxpr.jaxpr.invars, strict=True))
    found = ((n, _of_path([x for x in state if (x.shape, x.dtype) == _type(v.aval)], label)) for n, (label, v) in inputs)
    return {n: leaf for n, leaf in found if leaf is not None}


def _state(plan: Plan) -> list[Leaf]:
    kept = [x for x in plan.inputs if x.kind in ("parameters", "optimizer")]
    return kept or [x for x in plan.inputs if x.path.partition("/")[0] == plan.inputs[0].path.partition("/")[0]]


def refuse_other_state(plan: Plan, pins: Mapping[int, PinDims]) -> None:
    """Raises ShardingError if a saved plan has its state elsewhere than the pins of `state_like` say."""
    for n, dims in pins.items():
        if (leaf := plan.inputs[n]).layout.dims != dims:
            raise ShardingError(
                f"plan= has {leaf.path} as {leaf.layout}, state_like= as {pin_text(dims)}.\n"
                "  ways out: state_like= alone, which plans anew; plan= alone, which moves the state at every call"
            )


def refuse_unmet(plan: Plan, traced: Traced, options: Options, given_bytes: float | None) -> None:
    """Holds what the user asks for besides a saved plan against it.

    Args:
        plan: that is reused for the very program that it was made for.
        traced: the step.
        options: with the pins, and `memory_saving`.
        given_bytes: per device, that `memory=` names; None if it names none.

    Raises:
        ShardingError: a pin, a sharding or the memory is not what the plan has; or a pin that cannot be.
    """
    ends = (traced.graph.args, plan.inputs), (traced.graph.outs, plan.outputs)
    layouts = {i: leaf.layout for ops, leaves in ends for i, leaf in zip(ops, leaves, strict=True)}
    ways = "ways out: plan= alone; or without plan=, which plans anew"
    if (unmet := unmet_pin(traced.graph, options, layouts, plan.mesh)) is not None:
        asked, layout = unmet
        raise ShardingError(f"{asked}, plan= has it as {layout}.\n  {ways}")
    if given_bytes is not None and plan.memory().peak > given_bytes:
        needed = format_memory(plan.memory().peak)
        raise ShardingError(f"plan= takes {needed} per device, memory= allows {format_memory(given_bytes)}.\n  {ways}")
    if options.memory_saving:
        warn(f"memory= asks for a plan that saves memory, and plan= is reused as it is.\n  {ways}")


def _of_path(leaves: Sequence[Leaf], label: str) -> Leaf | None:
    whole = [x for x in leaves if x.path == label]
    tail = label.partition("/")[2] or label
    ends = [x for x in leaves if f"/{x.path}".endswith(f"/{tail}")]
    for some in (whole, ends, [x for x in ends if x.kind == "parameters"]):
        if some and all(x.layout == some[0].layout for x in some):
            return some[0]
    return None


def _listed(names: Sequence[str]) -> str:
    return listed([fit(name, MAX_TEXT) for name in names], MAX_LISTED)
