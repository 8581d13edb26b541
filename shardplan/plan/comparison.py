"""Plans of one step by several searches, compared by the one objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardplan.plan.plan import Plan


@dataclass(frozen=True)
class PlanComparison:
    """Plans of one step by several searches; `print` it."""

    plans: Mapping[str, Plan]  # by the name of the search

    @cached_property
    def bound(self) -> float:
        """Seconds per step that no plan is below, as far as any of the searches proved."""
        return max((p.seconds["bound"] for p in self.plans.values()), default=0.0)

    def gap(self, search: str) -> float:
        """How far a search's plan is from the bound, relative to the plan."""
        total = self.plans[search].seconds["total"]
        return (total - self.bound) / total if total else 0.0

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:comparison_text")(self)
