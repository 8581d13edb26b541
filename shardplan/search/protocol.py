"""What a search is: one class that chooses a strategy for every op.

A search of cost networks says how it searches one (`Search.search`); `Search.plan` runs it in the loop that prices, searches and
prices again (`slope_scaling.py`), and has every plan judged by the objective (`objective.py`). A search that builds networks of its own
replaces `plan`.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardplan.costs.build import replicated_bytes
from shardplan.costs.network import CostNetwork
from shardplan.costs.task import PlanningTask
from shardplan.ilp.solver.deadline import Deadline
from shardplan.ilp.solver.problem import Solution
from shardplan.search.objective import Candidates
from shardplan.search.slope_scaling import SearchStates, slope_scaling


@dataclass(frozen=True, eq=False)
class Search(ABC):
    """One way to choose strategies for the step of a task; `shardplan.searches.SEARCHES` holds all by name."""

    task: PlanningTask

    untied: ClassVar[SearchStates | None] = None
    """`search` that may plan repeated layers each on their own, given states in which they agree; None if there is none."""

    def search(self, network: CostNetwork, hint: tuple[int, ...], deadline: Deadline) -> Solution:
        """States of one cost network.

        Args:
            network: objective, memory limit and pins are its problem's.
            hint: states that the network before this one was answered with; () at first.
            deadline: when to stop.
        """
        raise NotImplementedError

    def plan(self, memory: float | None) -> Candidates | None:
        """All plans that the search comes upon within `memory` bytes per device (None: no limit), by the objective.

        Returns:
            Candidates, the best of which exceeds the limit if none fits; or None to leave the task to the search "ilp".
        """
        deadline = Deadline(self.task.options.time_limit, work=np.inf)
        # Without a limit copies need no states of their own, and the network is smaller.
        if memory is None or replicated_bytes(self.task.space) > memory:
            return self.candidates(memory, deadline)
        free = self.candidates(None, deadline)
        if free.best is None or free.best.peak_bytes <= memory:
            return replace(free, limit=memory)
        found = self.candidates(memory, deadline)
        found.adopt(x for x in free.judged.values() if x.peak_bytes <= memory)
        return found

    def candidates(self, limit: float | None, deadline: Deadline) -> Candidates:
        """All plans that the search comes upon under a limit."""
        found = Candidates.none(self.task, limit)
        slope_scaling(found, self.search, self.untied, deadline)
        return found

    def converged(self, limit: float | None, deadline: Deadline) -> Candidates:
        """Those of its first step: the plans on the way to one that costs what it was found at."""
        found = Candidates.none(self.task, limit)
        slope_scaling(found, self.search, None, deadline, complete=False)
        return found


def time_left(deadline: Deadline) -> float | None:
    """Seconds, for `solve(time_limit=...)`; None without a limit."""
    return None if deadline.time_limit is None else max(0.0, deadline.seconds_left)
