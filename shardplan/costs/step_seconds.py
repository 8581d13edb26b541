"""The seconds of one step: compute, blocking collectives, and background collectives as far as they stay exposed."""

from __future__ import annotations

from dataclasses import dataclass

PS = 1e12
"""Picoseconds per second: costs of a cost network are whole picoseconds, so that sums are exact."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step, in any unit of time.

    Formula:
        total = compute + blocking + background - hidden
        hidden = (1 - exposed_fraction) * min(background, overlap_capacity)

    Attributes:
        compute: kernels.
        blocking: collectives on the critical path.
        background: collectives that may run at the same time as independent compute.
        overlap_capacity: compute that every plan has: the least seconds of every op.
    """

    compute: float
    blocking: float
    background: float
    overlap_capacity: float

    def hidden(self, exposed_fraction: float) -> float:
        """Seconds of background collectives that compute hides; a hidden one still costs `exposed_fraction` of its seconds."""
        return (1 - exposed_fraction) * min(self.background, self.overlap_capacity)

    def total(self, exposed_fraction: float) -> float:
        """Seconds of the step."""
        return self.compute + self.blocking + self.background - self.hidden(exposed_fraction)
