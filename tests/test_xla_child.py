"""Child processes that compile: forks of one that has imported jax."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardplan.xla.compiler import child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux alone")


def run(folder, text, flags="", timeout_s=60):
    """Exit status and output of a program."""
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(text)
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = child.run(str(folder / "program.py"), folder, environment, timeout_s)
    return code, (folder / "stderr").read_text()


def test_each_has_its_flags_its_output_and_its_exit_status(tmp_path):
    say = "import os, sys; print('jax' in sys.modules, sys.argv[1], os.environ['XLA_FLAGS'], flush=True); "
    for flags, end, code in (
        ("--a=1", "", 0),
        ("--b=2", "sys.exit(3)", 3),
        ("", "sys.exit('no')", 1),
        ("--c", "os.abort()", -signal.SIGABRT),
    ):
        found, said = run(tmp_path, say + end, flags)
        assert (found, said.splitlines()[0]) == (code, f"True {tmp_path} {flags}".rstrip() + " " * (not flags))
    assert "ZeroDivisionError" in run(tmp_path, "1 / 0")[1]


def test_what_takes_too_long_is_killed_with_what_it_started(tmp_path):
    started = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    code, said = run(tmp_path, started, timeout_s=1)
    assert code is None and run(tmp_path, "print(1)") == (0, "1\n")
    process = Path("/proc", said.strip(), "stat")
    for _ in range(100):
        if not process.exists() or process.read_text().rpartition(")")[2].split()[0] in "ZX":
            break
        threading.Event().wait(0.05)
    else:
        pytest.fail("the process that it started still runs")


def test_several_threads_compile_at_once(tmp_path):
    found = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: run(tmp_path / str(n), f"print({n})")})) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: (0, f"{n}\n") for n in range(3)}


def test_another_environment_and_a_server_that_was_killed_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDPLAN_TEST", "1")
    assert run(tmp_path, "import os; print(os.environ['SHARDPLAN_TEST'])") == (0, "1\n")
    os.killpg(child._SERVERS[-1].process.pid, signal.SIGKILL)
    assert run(tmp_path, "print(2)") == (0, "2\n")


ENDS = """
import os, sys, threading, time
from pathlib import Path
from shardplan.xla.compiler import child
folder = Path(sys.argv[1])
environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
arguments = str(folder / "program.py"), folder, environment, 60
threading.Thread(target=child.run, args=arguments, daemon=True).start()
while not (folder / "runs").exists():
    time.sleep(0.05)
"""


def test_a_process_ends_although_a_thread_of_it_still_compiles(tmp_path):
    (tmp_path / "program.py").write_text(f"import time; open({str(tmp_path / 'runs')!r}, 'w').close(); time.sleep(60)")
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, timeout=40)
