"""A step as the planner gets it: a flat jaxpr, and what JAX's pytrees said of its inputs and outputs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from shardplan import _jax


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as the planner sees it.

    Attributes:
        jaxpr: the closed jaxpr of the flat step.
        in_labels, out_labels: pytree paths of flat inputs and outputs.
        tied: (input, output) numbers of state.
        donated: numbers of donated inputs.
    """

    jaxpr: Any
    in_labels: tuple[str, ...]
    out_labels: tuple[str, ...]
    tied: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]

    def fingerprint(self) -> str:
        """The same for the same program with the same shapes in every process."""
        text = _jax.jaxpr_text(self.jaxpr) + repr((self.in_labels, self.out_labels, self.tied))
        return hashlib.sha256(text.encode()).hexdigest()

    def donated_names(self) -> tuple[str, ...]:
        """Donated arguments by name; by leaf where only some leaves of an argument are donated."""
        given = [(label.split("/")[0], label, n in self.donated) for n, label in enumerate(self.in_labels)]
        in_part = {head for head, _, donated in given if not donated}
        return tuple(dict.fromkeys(label if head in in_part else head for head, label, donated in given if donated))
