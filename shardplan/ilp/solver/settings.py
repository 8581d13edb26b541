"""Every tuned number of the solver, with its meaning and the effect of halving and doubling it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Tuned numbers of all links.

    Entries are entries of cost tables; budgets are shares of what is left of the deadline. Half and twice: counted work after
    presolve relative to the default, on two planner problems under tight budgets (dlrm at 1.2, gpt at 1.05 times the least peak, both
    on 2x4), as `benchmarks/solver_settings.py` measures it. All variants prove the same optima. "=" is within 1 % on these two, harder
    problems may differ; "-" is not measured.

    name                     meaning                                                                          half    twice
    dominance_entries        the dominance test visits at one node                                            =       =
    eliminated_entries       of an edge table that eliminating a node may create                              =       =
    exact_states             up to which elimination is exact if its tables are small                         1.19    =
    exact_entries            of all bucket tables of an exact elimination                                     1.19    =
    total_entries            of all bucket tables of a bound: memory of the process, about a gigabyte         =       =
    trws_rounds              of TRW-S after each change of prices                                             0.86    1.46
    first_rounds             of TRW-S at the first prices: least, most                                        0.81    1.36
    first_visits             entries that the first rounds visit, between these                               =       =
    rounds_growth            factor of the rounds while only TRW-S may raise the bound                        1.09    0.96
    least_gain               of a round, as a share of the gap, for more rounds                               0.90    1.21
    sparse_share             TRW-S ends once fixing leaves this share of the entries                          =       =
    peak_bucket_entries      of a bucket table in `minimize_peak`                                             -       -
    peak_dominance_entries   as dominance_entries, in `minimize_peak`                                         -       -
    bucket_entries           of a bucket table in the chain's bounds                                          1.85    0.91
    price_changes            of one bound                                                                     =       =
    repaired_points          relaxed answers of a bound that are repaired                                     =       =
    core_share               states of least min-marginals in core search                                     1.37    1.11
    rebound_below            bound again if fixing leaves at most this share of the states                    =       =
    rebound_after_branching  the same, after a target                                                         =       =
    relaxed_capacity_budget  for the optimum without the memory limit                                         =       =
    first_target             distance of the first target from the bound, as a share of the gap               =       =
    target_budget            for each target but the last                                                     =       =
    unknown_gap              gap as a share of the bound, while there is no answer                            =       =
    branch_above             branch if fixing leaves more than this share of the states                       =       =
    node_bucket_entries      of a bucket table in branch and bound, at first                                  =       =
    bucket_growth            factor of that where no byte has a price                                         =       =
    core_size                of the 0-1 program that CP-SAT takes over                                        0.79    =
    core_work                of CP-SAT, about seconds                                                         1.02    =
    core_retry               as a share of the size, after CP-SAT failed                                      =       =
    hard_core_size           as core_size, where elimination is exact                                         =       =
    hard_core_work           as core_work, where elimination is exact                                         =       =
    dominance_budget         for the dominance test; this and the next three under a time limit only          -       -
    first_feasible_after     share of the time limit after which a first answer comes before a bound          -       -
    large_states             from which primal search comes before branch and bound                           -       -
    large_bound_budget       for one bound of a large problem                                                 -       -
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
