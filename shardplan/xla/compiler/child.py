"""The child process that compiles: forked from a server that has imported jax, on Linux, which saves that second.

The server is this file as a program, one per process that compiles. It reads a request per line, forks, runs the asked program as
`python PROGRAM FOLDER` would, and answers with the child's number and then with its exit status. It ends with its parent, or after
`IDLE_S` without work.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

IDLE_S = 60
"""Seconds after which a server without work ends."""


def run(program: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> int | None:
    """Runs a program on a folder, with its output in the file `stderr` there; returns its exit status, None after the time limit."""
    if sys.platform != "linux" or not _LOCK.acquire(blocking=False):  # another thread compiles just now
        return _started(program, folder, environment, timeout_s)
    try:
        return _server(environment).run(program, folder, environment, timeout_s)
    finally:
        _LOCK.release()


def _started(program: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> int | None:
    """As `run`, in a process of its own from the start."""
    with (folder / "stderr").open("wb") as stderr:
        words, quiet = [sys.executable, "-P", program, str(folder)], subprocess.DEVNULL
        child = subprocess.Popen(words, stdin=quiet, stdout=stderr, stderr=stderr, env=dict(environment), start_new_session=True)
        try:
            return child.wait(timeout_s)
        except BaseException as stopped:
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
            child.wait()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            return None


# ---- the server, seen from its parent

_LOCK = threading.Lock()
_SERVERS: list[_Server] = []
"""The last one, if any."""


def _server(environment: Mapping[str, str]) -> _Server:
    """One that runs; another environment than that of XLA's flags needs another one, as jax reads it when it is imported."""
    others = {name: value for name, value in environment.items() if name != "XLA_FLAGS"}
    while _SERVERS:
        if (server := _SERVERS[-1]).owner == os.getpid() and server.environment == others and server.process.poll() is None:
            return server
        _SERVERS.pop().end()
    _SERVERS.append(_Server(others))
    return _SERVERS[-1]


@atexit.register
def _end() -> None:
    while _SERVERS:
        _SERVERS.pop().end()


@dataclass
class _Server:
    environment: dict[str, str]
    owner: int = field(default_factory=os.getpid)
    process: subprocess.Popen = field(init=False)

    def __post_init__(self):
        words, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
        self.process = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, env=self.environment, start_new_session=True)

    def end(self) -> None:
        """Ends it, also while it waits for a child of another thread; not the one that a fork of this process only inherited."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()

    def run(self, program: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> int | None:
        """As the function; where the server has just ended, in a process of its own."""
        request = {"program": program, "folder": str(folder), "flags": environment["XLA_FLAGS"]}
        assert self.process.stdin is not None
        child = None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            child = self._answer(None)
            if (code := self._answer(timeout_s)) is None:
                self._kill(child)
            return code
        except (BrokenPipeError, EOFError):
            self._kill(child)
            return _started(program, folder, environment, timeout_s)
        except BaseException:
            self._kill(child)
            raise

    def _answer(self, timeout_s: float | None) -> int | None:
        """The number that the server says; None if it says none in time. Raises `EOFError` if it has ended."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], timeout_s)[0]:
            return None
        if not (line := stdout.readline()):
            raise EOFError
        return int(line)

    def _kill(self, child: int | None) -> None:
        """Ends the server, and the child that it waits for."""
        for group in (child, self.process.pid):
            if group is not None:
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        self.process.wait()


# ---- the server itself


def serve() -> None:
    """Reads requests until there are no more."""
    from shardplan.xla.compiler import _backend  # noqa: F401  imports jax

    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while select.select([requests], [], [], IDLE_S)[0] and (line := requests.readline()):
        if not (child := os.fork()):
            _run(json.loads(line))
        os.setpgid(child, child)  # before the parent knows the number, by which it kills it with all that it starts
        for answer in (lambda: child, lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])):
            answers.write(b"%d\n" % answer())
            answers.flush()


def _run(request: Mapping[str, str]) -> None:
    """In the child: runs the program, and ends."""
    import runpy

    code = 1
    try:
        output = os.open(Path(request["folder"]) / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for to in (sys.stdout, sys.stderr):
            os.dup2(output, to.fileno())
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        os.environ["XLA_FLAGS"] = request["flags"]
        sys.argv = [request["program"], request["folder"]]
        runpy.run_path(request["program"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
