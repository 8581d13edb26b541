"""How little memory is possible, whatever it costs: what a person is told when nothing fits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardplan.ilp.solver.deadline import UNLIMITED, Deadline
from shardplan.ilp.solver.presolve.presolve import presolve
from shardplan.ilp.solver.problem import Problem, indicator_costs
from shardplan.ilp.solver.relax.dual import min_peak_dual
from shardplan.ilp.solver.relax.relaxation import Relaxation
from shardplan.ilp.solver.search.repair import LocalSearch
from shardplan.ilp.solver.usage import UsageTable

JOINT = 1 << 14  # entries of a joint table
DOMINANCE = 1 << 22  # table entries a dominance test may touch at one node: where nothing costs anything, most states are dominated


@dataclass(frozen=True)
class MinPeak:
    """How little memory is possible.

    Attributes:
        bound_bytes: no choice of states has a lower peak.
        bytes: peak of `states`.
        step: the time step at which it peaks.
        states: the choice found.
    """

    bound_bytes: float
    bytes: float
    step: int
    states: tuple[int, ...]


def minimize_peak(problem: Problem, enough: float = -np.inf, deadline: Deadline = UNLIMITED) -> MinPeak:
    """The least possible peak: a lower bound and a choice that comes near it (often equals it).

    Args:
        enough: bytes; a choice that holds no more is good enough, and the search ends.
    """
    deadline.check()
    bare = replace(problem.map_costs(indicator_costs), limit=-np.inf)
    small = presolve(bare, tie=True, dominance=DOMINANCE, deadline=deadline)
    if not small.feasible:
        return MinPeak(np.inf, np.inf, 0, ())
    memory, relaxation = UsageTable(small.problem), Relaxation(small.problem, JOINT, deadline=deadline)
    moves = LocalSearch(small.problem, memory, deadline)
    best, bound = None, 0.0
    if memory.n_steps:
        points = ((point, point.prices.sum()) for point in min_peak_dual(relaxation, memory))
        found = ((point.value / total, point.elimination_pass.states()) for point, total in points if total)
    else:
        found = iter([(0.0, relaxation.elimination.run().states())])
    for value, guess in found:
        deadline.check()
        bound = max(bound, value)
        if not np.isfinite(small.problem.objective(guess)):
            continue
        moves.settle(guess)
        while best is None or memory.peak(moves.states) < memory.peak(best):
            best = moves.states.copy()
            if not moves.relieve(memory.peak(best) * (1 - 1e-12) - 1e-9, 200):
                break
        if best is not None and memory.peak(best) <= max(bound * (1 + 1e-12), enough):
            break
    if best is None:
        return MinPeak(bound, np.inf, 0, ())
    states = small.invert(best.tolist())
    profile = problem.memory(states)
    return MinPeak(bound, float(profile.max(initial=0.0)), int(profile.argmax()) if len(profile) else 0, states)
