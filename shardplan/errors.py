"""What goes wrong for a person to mend: every message says what, where, with numbers, and a way out."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

INTERNAL = (f"{Path(__file__).parent}{os.sep}", contextlib.__file__)
"""Files whose frames a warning skips."""


class ShardingError(ValueError):
    """A step, pin or budget for which no plan exists, an option that cannot be, a machine that nobody knows."""


class PlanFileError(ShardingError):
    """A plan file that is damaged, foreign, or for another mesh or model."""


class ShardingWarning(UserWarning):
    """Something that works, but less well than a person may think."""


class ForeignMeshError(ShardingError):
    """A planned step was called with arrays that are typed with the axes of another mesh."""

    def __init__(self):
        super().__init__(
            "a planned step is called on arrays of another mesh, as inside jax.pmap or jax.shard_map, where devices are given.\n"
            "  ways out: call it outside of them, or put the function as it was written there, without shardplan.auto"
        )


class OtherSignature(Exception):  # noqa: N818  # caught inside, never seen
    """A planned step was called with arguments of another signature than it was planned for."""


def warn(message: str) -> None:
    """Issues a `ShardingWarning` at the line of the innermost caller outside this package."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ShardingWarning, stacklevel=level)
