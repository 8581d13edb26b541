"""Progress of a solve, shown from its third second on: number of answers, the proven gap, and a bar.

A terminal shows a live line (if rich is installed), a notebook a bar; elsewhere nothing is written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardplan.units import format_percent

AFTER_S = 2.0
EVERY_S = 0.1
"""Seconds between two updates."""


@dataclass(frozen=True)
class State:
    """How far a solve is; `bound` in the solver's own units, `gap` relative, None before the first answer."""

    seconds: float = 0.0
    answers: int = 0
    bound: float | None = None
    gap: float | None = None

    def __str__(self) -> str:
        found = f"{self.answers} answer{'s' * (self.answers != 1)} so far" if self.answers else "no answer yet"
        known = "no bound yet" if self.gap is None else "nothing proven yet"
        proof = f"at most {format_percent(self.gap)} from the optimum" if self.gap is not None and self.gap < 1 else known
        return f"planning, {self.seconds:.0f} s: {found}, {proof}"

    @property
    def share(self) -> float:
        """How full a bar is: empty at a gap of 100 %, full at 0.01 %, a quarter for every factor of ten."""
        return 0.0 if self.gap is None else min(1.0, max(0.0, -math.log10(max(self.gap, 1e-4)) / 4))


class Progress:
    """Called by the solver whenever its states, bound or gap improve. Shows a `State` only inside `with`.

    Args:
        after_s: seconds of silence at the start.
        show: takes a `State` and shows it, and None at the end; by default what `display` finds.
    """

    def __init__(self, after_s: float = AFTER_S, show: Callable[[State | None], None] | None = None):
        self._after_s, self._show = after_s, show
        self._states: Sequence[int] = ()
        self._state = State()

    def __call__(self, states: Sequence[int], bound: float, gap: float) -> None:
        """Takes the solver's states, bound and gap so far."""
        now = self._state
        answers = now.answers + (states is not self._states and tuple(states) != tuple(self._states))
        known = float(bound) if math.isfinite(bound) else now.bound, float(gap) if math.isfinite(gap) else now.gap
        self._states, self._state = states, State(0.0, answers, *known)

    def __enter__(self) -> Progress:
        self._states, self._state, self._stop = (), State(), threading.Event()
        arguments = time.monotonic(), self._stop
        self._thread = threading.Thread(target=self._run, args=arguments, name="shardplan-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(timeout=2)

    def _run(self, start: float, stop: threading.Event) -> None:
        if stop.wait(self._after_s):
            return
        with contextlib.suppress(Exception):  # a display that fails must not end a solve
            show = self._show or display()
            if show is None:
                return
            try:
                while not stop.wait(EVERY_S):
                    show(replace(self._state, seconds=time.monotonic() - start))
            finally:
                show(None)


def display() -> Callable[[State | None], None] | None:
    """Shows a `State` as a notebook's bar or as a terminal's live line; None where neither is possible."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return _notebook()
    if sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return _terminal()
    return None


def _notebook() -> Callable[[State | None], None]:
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda state: handle.update(HTML(_bar(state) if state else ""))


def _bar(state: State) -> str:
    bar = f'<progress max="1" value="{state.share:.3f}" style="width:16em;vertical-align:middle"></progress>'
    return f'<div style="font:13px system-ui,sans-serif">{bar} {state}</div>'


def _terminal() -> Callable[[State | None], None]:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)

    def show(state: State | None) -> None:
        if state is None:
            live.stop()
            return
        if not live.is_started:
            live.start()
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=1.0, completed=state.share, width=24), str(state))
        live.update(row, refresh=True)

    return show
