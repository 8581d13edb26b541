"""Progress of planning, shown from its third second on: how long it has lasted, and how many answers were found.

A terminal shows a live line (if rich is installed), a notebook a line that stays with the last word; elsewhere the logger "shardplan"
gets a message (level INFO) every ten seconds. The distance from the optimum is known when all is done.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

AFTER_S = 2.0
EVERY_S = 0.1
"""Seconds between two updates."""
LOG_EVERY_S = 10.0
"""Seconds between two messages of the logger."""


@dataclass(frozen=True)
class State:
    """How far planning is."""

    seconds: float = 0.0
    answers: int = 0

    def __str__(self) -> str:
        return f"planning, {self.seconds:.0f} s: {self.found} so far"

    @property
    def found(self) -> str:
        """The number of answers, in words."""
        return f"{self.answers} answer{'s' * (self.answers != 1)}" if self.answers else "no answer"


class Cancelled(Exception):  # noqa: N818  # no error: who watches wants no more
    """Raised in the planning that is watched, to end it."""


_watcher: ContextVar[Callable[[State], None] | None] = ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched(watcher: Callable[[State], None]) -> Iterator[None]:
    """Planning of this thread tells `watcher` of each answer, and shows nothing; the watcher may raise `Cancelled`."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Progress:
    """Called by the solver whenever its states, bound or gap improve. Shows a `State` only inside `with`.

    Args:
        after_s: seconds of silence at the start.
        show: takes a `State` and shows it, and None at the end; by default what `display` finds.
    """

    def __init__(self, after_s: float = AFTER_S, show: Callable[[State | None], None] | None = None):
        self._after_s, self._show = after_s, show
        self._watcher, self._since = _watcher.get(), time.monotonic()
        self._states: Sequence[int] = ()
        self._state = State()

    def __call__(self, states: Sequence[int], bound: float, gap: float) -> None:
        """Takes the states of one of the solver's problems; its bound and gap say nothing of the plan."""
        new = states is not self._states and tuple(states) != tuple(self._states)
        self._states, self._state = states, State(0.0, self._state.answers + new)
        if self._watcher:
            self._watcher(replace(self._state, seconds=time.monotonic() - self._since))

    def __enter__(self) -> Progress:
        self._states, self._state, self._stop = (), State(), threading.Event()
        if self._watcher:
            return self
        arguments = time.monotonic(), self._stop
        self._thread = threading.Thread(target=self._run, args=arguments, name="shardplan-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._watcher:
            return
        self._thread.join(timeout=2)

    def _run(self, start: float, stop: threading.Event) -> None:
        if stop.wait(self._after_s):
            return
        with contextlib.suppress(Exception):  # a display that fails must not end a solve
            show = self._show or display()
            try:
                while not stop.wait(EVERY_S):
                    show(replace(self._state, seconds=time.monotonic() - start))
            finally:
                show(None)


def display() -> Callable[[State | None], None]:
    """Shows a `State` as a notebook's line, as a terminal's live line, or as a message of the logger."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is not None and hasattr(shell, "kernel"):
        return _notebook()
    if sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return _terminal()
    return _logger()


def _logger() -> Callable[[State | None], None]:
    log, last = logging.getLogger("shardplan"), -LOG_EVERY_S

    def show(state: State | None) -> None:
        nonlocal last
        if state is not None and state.seconds >= last + LOG_EVERY_S:
            last = state.seconds
            log.info("%s", state)

    return show


def _notebook() -> Callable[[State | None], None]:
    from IPython.display import HTML, display

    handle: Any = None
    last = State()

    def show(state: State | None) -> None:
        nonlocal handle, last
        last = state or last
        text = HTML(_line(str(state), "<progress></progress> ") if state else _line(f"planned in {last.seconds:.0f} s: {last.found}"))
        if handle is None:
            handle = display(text, display_id=True)
        else:
            handle.update(text)

    return show


def _line(text: str, bar: str = "") -> str:
    return f'<div style="font:13px system-ui,sans-serif">{bar}{text}</div>'


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
        row.add_row(ProgressBar(pulse=True, width=24), str(state))
        live.update(row, refresh=True)

    return show
