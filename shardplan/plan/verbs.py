"""Verbs of a plan that rooms above this one carry out: the one place where the room names them.

`Plan` is data, and data imports neither views nor compilers. So that `plan.explain()` works for whoever has only the plan, a verb
is looked up by name when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

VERBS = {
    "summary": "shardplan.view.text",
    "explain": "shardplan.view.text",
    "memory_text": "shardplan.view.text",
    "comparison_text": "shardplan.view.compare",
    "diff_text": "shardplan.view.compare",
    "to_html": "shardplan.view.html",
    "check_plan": "shardplan.xla.report.plan_report",
}
"""Function -> the module that has it."""


def verb(name: str) -> Callable[..., Any]:
    """The function that carries out a verb."""
    return getattr(import_module(VERBS[name]), name)
