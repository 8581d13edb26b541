"""Plans compared: two, in what they do differently; those of several searches, by the one objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from shardplan.mesh.layout import Layout
from shardplan.plan.data import PlanDecision
from shardplan.plan.program import placed

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


@dataclass(frozen=True)
class PlanDiff:
    """Two plans side by side; `print` it."""

    a: Plan
    b: Plan

    @cached_property
    def leaves(self) -> tuple[tuple[str, Layout | None, Layout | None], ...]:
        """(path, layout in a, layout in b) of inputs that differ."""
        a, b = ({x.path: x.layout for x in p.inputs} for p in (self.a, self.b))
        return tuple((k, a.get(k), b.get(k)) for k in dict.fromkeys([*a, *b]) if a.get(k) != b.get(k))

    @cached_property
    def decisions(self) -> tuple[tuple[tuple, PlanDecision | None, PlanDecision | None], ...]:
        """(key, decision in a, decision in b) of ops that differ in strategy or layouts.

        Ops of one program are compared by number; those of two programs by function, code of the line, primitive, phase and occurrence.
        """

        def choice(d: PlanDecision | None):
            return d and (d.strategy, d.operand_layouts, d.result_layouts)

        by_number = self.a.fingerprint == self.b.fingerprint
        a, b = ({d.op if by_number else key: d for key, d in placed(p.decisions, p.lines)} for p in (self.a, self.b))
        pairs = ((a.get(k), b.get(k)) for k in dict.fromkeys([*a, *b]))
        return tuple(((y or x).key, x, y) for x, y in pairs if choice(x) != choice(y))  # pyright: ignore[reportOptionalMemberAccess]

    def __bool__(self) -> bool:
        return bool(self.a.mesh != self.b.mesh or self.leaves or self.decisions)

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:diff_text")(self)
