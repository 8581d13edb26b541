"""Every tuned number of the solver, with its meaning and the effect of halving and doubling it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Tuned numbers of all links.

    Entries are entries of cost tables; budgets are shares of what is left of the deadline. TABLE
    """

    # presolve
    dominance_entries: int = 1 << 14
    eliminated_entries: int = 1 << 16
    # relax
    exact_states: int = 2_000
    exact_entries: float = 2e6
    total_entries: float = 4e7
    trws_rounds: int = 2
    first_rounds: tuple[int, int] = (4, 16)
    first_visits: float = 6e7
    rounds_growth: int = 2
    least_gain: float = 0.01
    sparse_share: float = 0.5
    peak_bucket_entries: int = 1 << 14
    peak_dominance_entries: int = 1 << 22
    # search
    bucket_entries: int = 1 << 14
    price_changes: int = 6
    repaired_points: int = 3
    core_share: float = 0.3
    rebound_below: float = 0.8
    rebound_after_branching: float = 0.6
    relaxed_capacity_budget: float = 0.5
    first_target: float = 0.25
    target_budget: float = 0.35
    unknown_gap: float = 0.3
    branch_above: float = 0.8
    node_bucket_entries: int = 1 << 16
    bucket_growth: int = 16
    core_size: int = 4_000
    core_work: float = 0.3
    core_retry: float = 0.6
    hard_core_size: int = 8_000
    hard_core_work: float = 1.0
    # under a time limit
    dominance_budget: float = 0.15
    first_feasible_after: float = 0.4
    large_states: int = 20_000
    large_bound_budget: float = 0.15


DEFAULT = Settings()
