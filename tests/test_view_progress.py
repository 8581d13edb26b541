"""Progress while a solve lasts: quiet at first, never in the way."""

import io
import sys
import time

import pytest

from shardplan.view import progress
from shardplan.view.progress import Progress, State, display


def wait_for(condition):
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_short_solve_shows_nothing():
    shown = []
    with Progress(show=shown.append) as p:
        p((0, 1), 5.0, 0.5)
    assert shown == []


def test_a_long_solve_shows_answer_bound_and_gap_and_cleans_up():
    shown = []
    with Progress(after_s=0.01, show=shown.append) as p:
        p((0, 1), float("-inf"), float("inf"))
        p((0, 1), 5.0, 0.5)
        p((1, 1), 6.0, 0.004)
        wait_for(lambda: shown)
    assert (shown[0].answers, shown[0].bound, shown[0].gap) == (2, 6.0, 0.004)
    assert shown[-1] is None
    assert str(shown[0]) == "planning, 0 s: 2 answers so far, at most 0.4 % from the optimum"


def test_outside_of_a_solve_nothing_happens():
    p = Progress(after_s=0.0, show=lambda _: pytest.fail("shown"))
    p((0,), 1.0, 0.0)


def test_a_display_that_fails_does_not_end_the_solve():
    calls = []

    def broken(state):
        calls.append(state)
        raise RuntimeError("no screen")

    with Progress(after_s=0.0, show=broken) as p:
        wait_for(lambda: calls)
        p((0,), 1.0, 0.0)


def test_plain_output_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert display() is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_live_line(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    show = display()
    show(State(3.2, 1, 4.0, 0.25))
    show(None)
    assert "planning, 3 s: 1 answer so far, at most 25 % from the optimum" in screen.getvalue()


def test_without_rich_a_terminal_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    assert display() is None


def test_the_bar_fills_as_the_gap_closes():
    shares = [State(0, 1, None, gap).share for gap in (None, 1.0, 0.1, 0.01, 1e-4, 0.0)]
    assert shares == [0, 0, 0.25, 0.5, 1, 1]
    assert "<progress" in progress._bar(State(1, 1, None, 0.1))
