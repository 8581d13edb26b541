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


def test_a_long_solve_shows_how_many_answers_and_cleans_up():
    shown = []
    with Progress(after_s=0.01, show=shown.append) as p:
        p((0, 1), float("-inf"), float("inf"))
        p((0, 1), 5.0, 0.5)
        p((1, 1), 6.0, 0.0)
        wait_for(lambda: shown)
    assert shown[0].answers == 2 and shown[-1] is None
    assert str(shown[0]) == "planning, 0 s: 2 answers so far"


def test_nothing_is_said_of_the_optimum_before_it_is_known():
    for answers in (0, 1, 2):
        text = str(State(60.0, answers))
        assert "%" not in text and "optimum" not in text and "no answer so far" in str(State(3.0))


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


def test_without_a_terminal_the_logger_says_it_every_ten_seconds(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level("INFO", logger="shardplan")
    show = display()
    for tenth in range(20, 160):
        show(State(tenth / 10, 3))
    show(None)
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("shardplan", "INFO", "planning, 2 s: 3 answers so far"),
        ("shardplan", "INFO", "planning, 12 s: 3 answers so far"),
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_live_line(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    show = display()
    show(State(3.2, 1))
    show(None)
    assert "planning, 3 s: 1 answer so far" in screen.getvalue()


def test_without_rich_a_terminal_gets_the_logger(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    caplog.set_level("INFO", logger="shardplan")
    display()(State(3.0, 1))
    assert caplog.messages == ["planning, 3 s: 1 answer so far"]


def test_a_notebook_keeps_the_last_word_and_no_empty_output(monkeypatch):
    outputs = []

    class Handle:
        def update(self, text):
            outputs[-1] = text.data

    def shown(text, display_id):
        outputs.append(text.data)
        return Handle()

    monkeypatch.setattr("IPython.display.display", shown)
    show = progress._notebook()
    assert outputs == []
    show(State(3.0, 1))
    assert "<progress>" in outputs[0] and "planning, 3 s: 1 answer so far" in outputs[0]
    show(None)
    assert outputs == ['<div style="font:13px system-ui,sans-serif">planned in 3 s: 1 answer</div>']
