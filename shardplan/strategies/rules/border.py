"""Border ops (`ir/traits.py`): every dim passes through; the trip dim of a loop's stacked arrays needs replication.

loop_slice   trip a b -> a b     replicated trip
loop_stack   a b -> trip a b     replicated trip
"""

from __future__ import annotations

from shardplan.ir.graph import Op

from ..rule import Rule, factors

TRIP = (("trip",),)
"""The dim of a stacked array that a loop runs over."""


def border_rule(op: Op) -> Rule | None:
    """The rule of a border op; None for a JAX primitive."""
    match op.primitive:
        case "arg":
            return Rule((), (factors(op.outs[0]),))
        case "const":
            a = factors(op.outs[0])
            return Rule((), (a,), replicated=frozenset(x for d in a for x in d))
        case "branch_index":
            return Rule(((),), ())
        case "loop_slice":
            a = factors(op.outs[0])
            return Rule(((*TRIP, *a),), (a,), replicated=frozenset({"trip"}), fusion="loop")
        case "loop_stack":
            a = factors(op.ins[0])
            return Rule((a,), ((*TRIP, *a),), replicated=frozenset({"trip"}))
    if not op.traits.border:
        return None
    a = factors(op.outs[0])
    return Rule((a,) * len(op.ins), (a,), accumulator_init=op.accumulates and op.traits.loop_carry, fusion="view")
