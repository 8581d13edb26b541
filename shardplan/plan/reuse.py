"""A saved plan applied to a step: exactly when the program is the same, as far as it still matches when it was edited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardplan.costs.options import Options
from shardplan.emit.emit import EmitDecision
from shardplan.errors import PlanFileError, warn
from shardplan.ir.graph import Path
from shardplan.ir.parse import Traced
from shardplan.mesh.layout import MeshShape
from shardplan.plan.plan import Plan
from shardplan.units import format_array

MAX_LISTED = 5


def saved_decisions(plan: Plan, traced: Traced, mesh: MeshShape) -> Mapping[Path, EmitDecision] | None:
    """Decisions of a saved plan for the program it was made for, wherever its source is now; None for another program.

    Raises:
        PlanFileError: when the plan is for another mesh.
    """
    if plan.mesh != mesh:
        raise PlanFileError(
            f"the plan is for mesh {plan.mesh}, the step runs on mesh {mesh}.\n  ways out: that mesh, or plan anew without plan="
        )
    if plan.fingerprint != traced.fingerprint():
        return None
    ops = traced.graph().ops
    if plan.donated != traced.donated_names():
        then, now = (", ".join(names) or "nothing" for names in (plan.donated, traced.donated_names()))
        warn(
            f"the plan was made for a step that donates {then}; this one donates {now}, so it needs other memory than the plan says.\n"
            "  ways out: donate_argnums as it was, or plan anew without plan="
        )
    found = {}
    for d in plan.decisions:
        op = ops[d.op] if d.op < len(ops) else None
        if op is None or op.primitive != d.primitive:
            raise PlanFileError(
                f"the plan decides op {d.op}, a {d.primitive}, which the step does not have.\n  way out: plan anew without plan="
            )
        found[op.path] = EmitDecision(d.operand_layouts, d.result_layouts, d.copy_numbers)
    return found


def matching_pins(plan: Plan, traced: Traced, options: Options) -> Options:
    """The options with every input that still matches pinned to the saved plan's layout; warns of the others.

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
            f"  plan: {_listed([x.path for x in plan.inputs])}\n  step: {_listed(traced.in_labels)}\n  way out: plan anew without plan="
        )
    unmatched = [*lost, *(f"{path} (no longer there)" for path in leaves)]
    warn(
        f"the plan was made for another version of this step: {len(pins)} of {len(avals)} inputs keep its layouts, the rest is planned "
        "again." + (f"\n  not matched: {_listed(unmatched)}" if unmatched else "")
    )
    return replace(options, in_pins={**pins, **(options.in_pins or {})})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
