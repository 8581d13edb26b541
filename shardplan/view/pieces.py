"""Work of a widget's kernel in the background, piece by piece: after each, what was asked for last goes on first.

A job is an iterator, and a piece of it what it does up to its next value. A spare job is done while there is no other, half the time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from shardplan.ilp.solver.collector import paused_collector

SWITCH_S = 5e-4
"""How long a thread in the background keeps Python from others that wait; 5 ms otherwise, and a message takes some ten turns."""


class _Giving:
    """Threads in the background give way to others sooner, as long as one of them works."""

    def __init__(self):
        self._lock, self._working, self._before = threading.Lock(), 0, 0.0

    def __enter__(self):
        with self._lock:
            if not self._working:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_S, self._before))
            self._working += 1

    def __exit__(self, *_):
        with self._lock:
            self._working -= 1
            if not self._working:
                sys.setswitchinterval(self._before)


giving_way = _Giving()
"""`with giving_way:` around work in the background."""


class Pieces:
    """Does jobs in one thread."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"shardplan-{name}")
        self._jobs: list[Iterator[object]] = []
        self._spare: Iterator[object] | None = None
        self._lock, self._begun = threading.Lock(), threading.Event()
        self._going = self._ended = False

    def begin(self, job: Iterator[object]) -> None:
        """Does a job, before those that were begun earlier."""
        with self._lock:
            self._jobs.append(job)
            self._begun.set()
            self._go()

    def spare(self, job: Iterator[object]) -> None:
        """Does a job while there is no other, in place of the spare one before."""
        with self._lock:
            self._spare = job
            self._go()

    def end(self) -> None:
        """Does nothing more after the piece that is being done."""
        with self._lock:
            self._ended = True
            self._jobs, self._spare = [], None
            self._begun.set()

    def _go(self) -> None:
        if not self._going and not self._ended:
            self._going = True
            self._thread.submit(self._piece)

    def _piece(self) -> None:
        """Does a piece, and queues up again: the process can end between any two."""
        with self._lock:
            self._begun.clear()
            job = self._jobs[-1] if self._jobs else self._spare
            self._going, spare = job is not None, not self._jobs
        if job is None:
            return
        start, more = time.thread_time(), False
        try:
            with paused_collector(), giving_way:
                more = next(job, self) is not self
        finally:
            if not more:
                self._drop(job)
            elif spare:
                self._begun.wait(time.thread_time() - start)  # so that the process has half of its time for others
            with contextlib.suppress(RuntimeError):  # the process ends
                self._thread.submit(self._piece)

    def _drop(self, job: Iterator[object]) -> None:
        with self._lock:
            self._jobs = [x for x in self._jobs if x is not job]
            self._spare = None if self._spare is job else self._spare
