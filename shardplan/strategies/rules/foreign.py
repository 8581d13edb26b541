"""How a call of a foreign function may be sharded: as the rule says that is registered for its target.

register_rule("ffi_call", "... d, d -> ... d", target="my_norm", replicated="d")

ffi_call  (8,128,64), (64) -> (8,128,64)    ...0 ...1 d, d -> ...0 ...1 d  replicated d
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardplan._jax_kernels import ffi_attributes, ffi_hashable
from shardplan.ir.traits import Traits
from shardplan.strategies.register import TARGETS
from shardplan.strategies.rule import Rule, RuleError, factor_sizes, format_dims, rule
from shardplan.strategies.rules.kernel import unsharded_rule


@rule(traits=Traits(shapes_in_params=True, foreign=True))
def ffi_call(*ins, out, target_name, **params):
    if target_name not in TARGETS:
        return unsharded_rule(ins, out, f"its target has no rule; target={target_name!r} of register_rule gives it one")
    found = TARGETS[target_name](*ins, out=out)
    sizes = factor_sizes(found, tuple(tuple(x.shape) for x in ins), tuple(tuple(x.shape) for x in out), target_name)
    for i, o in params["input_output_aliases"]:
        if (operand := found.operands[i]) != (result := found.results[o]):
            raise RuleError(
                f"rule '{found}' for {target_name}: operand {i} is '{format_dims(operand)}' and result {o} is '{format_dims(result)}', "
                "but they are one buffer (input_output_aliases)\n  way out: the same factors in both, or no alias"
            )
    _check_attributes(target_name, ffi_attributes(params), sizes)
    return found


def local_attributes(target: str, given: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The attributes of a call whose factors have these sizes, as the user's rule makes them from those of the whole call.

    Raises:
        RuleError: `attributes=` fails.
    """
    if (function := TARGETS[target].attributes) is None:
        return dict(given)
    try:
        made = dict(function(dict(given), dict(sizes)))
        return {name: _like(value, given.get(name)) for name, value in made.items()}
    except Exception as error:  # of whichever kind: it is the user's code
        raise RuleError(
            f"rule for {target}: attributes= raised {error!r}\n"
            f"  way out: a dict of all attributes, made from {dict(given)} and the sizes of the factors, here {dict(sizes)}"
        ) from error


def _like(value, given):
    """A number of the type that the foreign function is given, say `np.int32`."""
    return type(given)(value) if isinstance(given, np.generic) else value


def _check_attributes(target: str, given: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise a RuleError unless `attributes=` makes the call's own attributes for the sizes that it has."""
    made = local_attributes(target, given, sizes)
    left, right = dict(ffi_hashable(made)), dict(ffi_hashable(given))
    if wrong := [name for name in sorted({*left, *right}) if name not in left or name not in right or left[name] != right[name]]:
        text = ", ".join(f"{name} = {made.get(name)!r} where the call has {given.get(name)!r}" for name in wrong)
        raise RuleError(
            f"rule for {target}: attributes= makes {text}\n"
            f"  way out: what makes the call's own attributes from the sizes of its factors, here {dict(sizes)}"
        )


def local_sizes(sizes: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Sizes of factors on one device, with so many shards per factor."""
    return {a: n // counts.get(a, 1) for a, n in sizes.items()}


def local_shapes(rule: Rule, sizes: Mapping[str, int], counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Shapes of the results of a device's call."""
    local = local_sizes(sizes, counts)
    return [tuple(math.prod(local[a] for a in dim) for dim in dims) for dims in rule.results]
