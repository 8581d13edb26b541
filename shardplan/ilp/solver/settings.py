"""The solver's tuned numbers that matter, with the effect of halving and doubling each; the others stand where they are used.

Effects are counted work after presolve relative to the default, for half and for twice the number, on two planner problems under tight
budgets (dlrm at 1.2, gpt at 1.05 times the least peak, both on 2x4), as `benchmarks/solver_settings.py` measures it. All variants prove
the same optima. "=" is within 1 %; the numbers that are not listed here were "=" both ways on these two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Tuned numbers of all links."""

    exact_states: int = 2_000  # up to which elimination is exact if its tables are small: 1.19, =
    exact_entries: float = 2e6  # of all bucket tables of an exact elimination: 1.19, =
    total_entries: float = 4e7  # of all bucket tables of a bound, about a gigabyte: =, =
    trws_rounds: int = 2  # of TRW-S after each change of prices: 0.86, 1.46
    first_rounds: tuple[int, int] = (4, 16)  # of TRW-S at the first prices, least and most: 0.81, 1.36
    rounds_growth: int = 2  # factor of the rounds while only TRW-S may raise the bound: 1.09, 0.96
    least_gain: float = 0.01  # of a round, as a share of the gap, for more rounds: 0.90, 1.21
    bucket_entries: int = 1 << 14  # of a bucket table in the chain's bounds: 1.85, 0.91
    core_share: float = 0.3  # states of least min-marginals in core search: 1.37, 1.11
    core_size: int = 4_000  # of the 0-1 program that CP-SAT takes over: 0.79, =
    core_work: float = 0.3  # of CP-SAT, about seconds: 1.02, =
    large_states: int = 20_000  # under a time limit, from which primal search comes before branch and bound: not measured


DEFAULT = Settings()
