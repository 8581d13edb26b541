"""Which compiler options this XLA takes: older names as its own, and what it refuses, with its reason.

Nobody lists them: an empty program is compiled with them on the devices at hand, in milliseconds. XLA for CPU knows the names of the
options for GPUs. Fact: options-names.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache

import jax

from shardplan import _jax
from shardplan.xla_model import compiler_options as known
from shardplan.xla_model.compiler_options import Flag, Flags

_EMPTY = b"""
module @empty {
  func.func public @main() -> tensor<f32> {
    %0 = stablehlo.constant dense<0.0> : tensor<f32>
    return %0 : tensor<f32>
  }
}"""


@cache
def refusal(options: tuple[tuple[str, Flag], ...]) -> str:
    """Why XLA refuses options, in its words; '' if it takes them."""
    try:
        _jax.compile_module(_EMPTY, jax.devices()[:1], dict(options), False, ([], [False]))
    except Exception as error:
        return re.sub(r"^INVALID_ARGUMENT: ", "", str(error).strip().splitlines()[0])
    return ""


def unknown(options: Flags) -> str:
    """Why this XLA refuses a user's options, with the names that it would take; '' if it takes them."""
    why = refusal(tuple(_translated(options).items()))
    name = re.search(r"No such compile option: '([^']*)'", why)
    near = get_close_matches(name[1], [*known.NAMES], 1) if name else []
    return why + (f"; did you mean {near[0]!r}?" if name and near and near[0] != name[1] else "")


def as_known(options: Flags) -> dict[str, Flag]:
    """Options by this XLA's names, without those of `compiler_options.NAMES` that it has no more."""
    out = _translated(options)
    return {name: value for name, value in out.items() if name not in known.NAMES or not _is_missing(name, value)}


def _translated(options: Flags) -> dict[str, Flag]:
    """Options by this XLA's names; levels as numbers, which every version of jax takes."""
    out: dict[str, Flag] = {}
    for name, value in options.items():
        if name in known.RENAMED and _is_missing(name, value):
            renamed, values = known.RENAMED[name]
            out[renamed] = values[known.truth(value)]
        elif name == known.LEVEL and isinstance(value, str):
            out[name] = known.LEVELS.get(value, value)
        else:
            out[name] = value
    return out


def _is_missing(name: str, value: Flag) -> bool:
    return "No such compile option" in refusal(((name, value),))
