"""Progress of a solve, shown from its third second on: how many answers there are, the proven gap, and a bar.

    with Progress() as progress:
        solve(problem, progress=progress)

In a terminal that is a live line (if rich is installed), in a notebook a bar; where neither is there, nothing is written.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardplan.units import format_percent

AFTER_S = 2.0
EVERY_S = 0.1


@dataclass(frozen=True)
class State:
    """How far a solve is; `bound` in the solver's own units, `gap` relative, None before the first answer."""

    seconds: float
    answers: int
    bound: float | None
    gap: float | None

    def __str__(self) -> str:
        found = f"{self.answers} answer{'s' * (self.answers != 1)} so far" if self.answers else "no answer yet"
        if self.gap is None:
            proof = "no bound yet"
        else:
            proof = f"at most {format_percent(self.gap)} from the optimum" if self.gap < 1 else "nothing proven yet"
        return f"planning, {self.seconds:.0f} s: {found}, {proof}"

    @property
    def share(self) -> float:
        """How full a bar is: a gap of 100 % is empty, of 0.01 % full, even steps in between being factors of ten."""
        if self.gap is None or self.gap >= 1:
            return 0.0
        return 1.0 if self.gap <= 1e-4 else -math.log10(self.gap) / 4


class Progress:
    """Called by the solver with (states, bound, gap) whenever something got better. Shows only what happens inside `with`.

    Args:
        after_s: seconds of silence at the start.
        show: takes a `State` and shows it, and None at the end; by default whatever this process can do.
    """

    def __init__(self, after_s: float = AFTER_S, show: Callable[[State | None], None] | None = None):
        self._after_s, self._given = after_s, show
        self._lock = threading.Lock()
        self._timer: threading.Thread | None = None
        self._stop = threading.Event()
        self._start, self._answers = 0.0, 0
        self._last: Sequence[int] = ()
        self._bound: float | None = None
        self._gap: float | None = None

    def __call__(self, states: Sequence[int], bound: float, gap: float) -> None:
        """Takes what the solver has found so far."""
        with self._lock:
            if states is not self._last and tuple(states) != tuple(self._last):
                self._answers, self._last = self._answers + 1, states
            self._bound = float(bound) if math.isfinite(bound) else self._bound
            self._gap = float(gap) if math.isfinite(gap) else self._gap

    def __enter__(self) -> Progress:
        self._start, self._answers, self._last, self._bound, self._gap = time.monotonic(), 0, (), None, None
        self._stop = threading.Event()
        self._timer = threading.Thread(target=self._run, args=(self._stop,), name="shardplan-progress", daemon=True)
        self._timer.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._timer is not None:
            self._timer.join(timeout=2)
            self._timer = None

    @property
    def state(self) -> State:
        """How far the solve is now."""
        with self._lock:
            return State(time.monotonic() - self._start, self._answers, self._bound, self._gap)

    def _run(self, stop: threading.Event) -> None:
        if stop.wait(self._after_s):
            return
        with contextlib.suppress(Exception):  # a display that fails must not end a solve
            show = self._given or display()
            if show is None:
                return
            try:
                while not stop.wait(EVERY_S):
                    show(self.state)
            finally:
                show(None)


def display() -> Callable[[State | None], None] | None:
    """What can show a `State` here: a notebook's bar, a terminal's live line, or nothing."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return _notebook()
    if sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return _terminal()
    return None


def _notebook() -> Callable[[State | None], None]:
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)

    def show(state: State | None) -> None:
        if handle is not None:
            handle.update(HTML(_bar(state) if state else ""))

    return show


def _bar(state: State) -> str:
    return (
        f'<div style="font:13px system-ui,sans-serif"><progress max="1" value="{state.share:.3f}" '
        f'style="width:16em;vertical-align:middle"></progress> {state}</div>'
    )


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
