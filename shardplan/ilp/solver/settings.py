"""The solver's tuned numbers, with the effect of halving and of doubling each.

`benchmarks/solver_settings.py` measures three effects, each for half and for twice the number, relative to the default:

- P: counted work after presolve on ten planner problems under tight budgets (dlrm, moe, gpt, lstm). All stay proven.
- C: counted work on the IOPDDL instances A, B and G. All stay proven.
- L: the sum of the objectives that instances K and S reach within a limit of work. None is proven.

"=" is within 1 %. Numbers without an effect, and those of single stages, are constants where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Tuned numbers of all stages."""

    exact_states: int = 2_000  # up to which elimination is exact if its tables are small. P 1.02 and =, C = and =, L = and =
    exact_entries: float = 2e6  # of all bucket tables of an exact elimination. P 1.90 and 0.76, C 1.02 and =, L = and =
    total_entries: float = 4e7  # of all bucket tables of a bound, about a gigabyte. P = and =, C = and =, L 1.015 and 0.993
    trws_rounds: int = 2  # of TRW-S after each change of prices. P 0.81 and 1.88, C 0.73 and 1.18, L 1.050 and 0.987
    first_rounds: tuple[int, int] = (4, 16)  # at the first prices, least and most. P 0.72 and 2.44, C 0.96 and 1.03, L 1.011 and 1.007
    rounds_growth: int = 2  # factor of the rounds while only TRW-S may raise the bound. P 0.84 and 1.61, C 0.91 and 1.13, L = and =
    least_gain: float = 0.01  # of a round, as a share of the gap, for more rounds. P 0.62 and 1.48, C 0.98 and 0.89, L = and =
    bucket_entries: int = 1 << 14  # of a bucket table in the chain's bounds. P 1.03 and 0.45, C 0.86 and 1.11, L 0.945 and 0.945
    core_share: float = 0.3  # states of least min-marginals in core search. P 1.05 and 0.76, C 1.03 and 1.07, L = and =
    core_size: int = 4_000  # of the 0-1 program that CP-SAT takes over. P 0.97 and 1.07, C = and =, L = and =
    large_states: int = 20_000  # from which primal search comes first, with a time limit. P, C and L do not read it


DEFAULT = Settings()
