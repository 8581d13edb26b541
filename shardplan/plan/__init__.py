"""The plan: data that is read, written, described, compared and used again."""

from shardplan.plan.plan import Plan, PlanComparison, PlanDiff

__all__ = ["Plan", "PlanComparison", "PlanDiff"]
