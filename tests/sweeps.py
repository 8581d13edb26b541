"""Cases of a test of which `make test` runs the quick ones, and `make sweeps` the others."""

from collections.abc import Callable, Iterable

import pytest


def sweep(cases: Iterable, slow: Callable) -> list:
    """Cases as parameters; those of which `slow` is true are marked so. A tuple has a value per argument."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow if slow(x) else ()) for x in cases]
