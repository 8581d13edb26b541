"""OR-Tools, also where TensorFlow is loaded.

Both bring Abseil and Protocol Buffers of their own. Loaded behind TensorFlow, OR-Tools would be bound to those of TensorFlow, and
CP-SAT would end the process (https://github.com/google/or-tools/issues/3230). So it is loaded with a flag by which it looks for names
in its own libraries first.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

OWN_NAMES_FIRST = getattr(os, "RTLD_DEEPBIND", 0)
"""Flag of `dlopen` on Linux; elsewhere libraries know their own names, or nothing can be done."""


def or_tools(module: str) -> Any:
    """A module of OR-Tools, by its name below `ortools`."""
    if not OWN_NAMES_FIRST or "tensorflow" not in sys.modules or "ortools" in sys.modules:
        return import_module(f"ortools.{module}")
    before = sys.getdlopenflags()
    sys.setdlopenflags(before | OWN_NAMES_FIRST)
    try:
        return import_module(f"ortools.{module}")
    finally:
        sys.setdlopenflags(before)
