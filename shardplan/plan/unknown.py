"""What a plan says of ops that no rule is for: where they are, what they cost on every device, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardplan import _jax_kernels
from shardplan.costs.space import IN_PART
from shardplan.errors import warn
from shardplan.units import format_seconds

if TYPE_CHECKING:
    from shardplan.plan.plan import Plan

SOURCES_NAMED = 3
"""How many lines a warning of an unknown primitive names."""
CALLBACK_WAY = (
    "put what computes under jax.shard_map; checks may stay as they are (those of equinox.error_if: EQX_ON_ERROR=nan drops them)"
)
"""Way out for Python functions that a step calls on the host."""
PRINT_WAY = "print a sum, or a slice, of it"
"""Way out for arrays that `jax.debug` hands to the host."""


def warn_of_unknown(plan: Plan) -> None:
    """A warning for each op without a rule; one for all of a primitive that take less than a percent of the step each.

    What is split over some mesh axes only is named if it takes as much.
    """
    places: dict[tuple, list[tuple[str, float, float]]] = {}
    for text, source in plan.unknown:
        compute_s, gather_s = plan.context.planned.replicated_seconds(text.partition(" (")[0], source)
        large = compute_s + gather_s >= 0.01 * plan.seconds["total"]
        if not large and f"({IN_PART}" in text:
            continue
        places.setdefault((text, source if large else None), []).append((source, compute_s, gather_s))
    for (text, _), some in places.items():
        primitive, _, why = text.removesuffix(")").partition(" (")
        sources, compute_s, gather_s = [*dict.fromkeys(x[0] for x in some)], sum(x[1] for x in some), sum(x[2] for x in some)
        where = ", ".join(sources[:SOURCES_NAMED])
        price = (compute_s + gather_s) / (plan.seconds["total"] or 1.0)
        share = f"{price:.0%}".replace("%", " %") if price >= 0.01 else "under 1 %"
        where += f" and on {len(sources) - SOURCES_NAMED} more lines" if len(sources) > SOURCES_NAMED else ""
        found = f"no rule for primitive {primitive!r} at {where}: it runs replicated"
        if why.startswith(IN_PART):
            found, why = f"no strategy splits {primitive!r} at {where} over all mesh axes", why.removeprefix(IN_PART)
        why = f"\n  why: {why}" if why else ""
        calls_back = any(primitive == p.name for p in _jax_kernels.CALLBACKS)
        way = CALLBACK_WAY if calls_back else PRINT_WAY if primitive in _jax_kernels.PRINTS else "shardplan.register_rule"
        warn(
            f"{found}, {share} of the step on every device "
            f"({format_seconds(compute_s)} of compute, {format_seconds(gather_s)} of resharding its operands).{why}\n"
            f"  way out: {way}"
        )
