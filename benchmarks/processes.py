"""One plan for all processes, again and again, and what is left of a job when one of its processes is killed.

    python benchmarks/processes.py [--runs 100] [--kills 10]

`runs` jobs of two processes of four emulated devices plan and train (`tests/process_jobs.py`); counted are hangs (none ended within
two minutes), plans that differ between processes, and losses that differ from the first run's. `kills` times each, a process is killed
while the first one plans, between planning and running, and between two steps. Printed are the seconds until the other one has ended,
at most, and whether its log names the reason. JAX's heartbeat time-out is 10 s here, 100 s unless `initialize` is given another.
"""

import argparse
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOB = Path(__file__).parent.parent / "tests" / "process_jobs.py"
LONGEST_S = 120
REASONS = "has ended", "JAX distributed service detected fatal errors", "heartbeat", "did not plan", "Connection", "closed"


def started(folder: Path, part: str) -> list[subprocess.Popen]:
    """Two processes, whose output goes to the folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out = []
    for n in range(2):
        words = [sys.executable, JOB, n, 2, port, folder, part]
        with open(folder / f"{n}.out", "w") as o, open(folder / f"{n}.err", "w") as e:
            out.append(subprocess.Popen([str(x) for x in words], stdout=o, stderr=e))
    return out


def said(folder: Path, n: int) -> dict:
    """Claim -> values."""
    lines = [json.loads(line) for line in (folder / f"{n}.out").read_text().splitlines() if line.startswith("{")]
    return {line["claim"]: line for line in lines}


def ended(processes: list[subprocess.Popen], limit_s: float) -> bool:
    """Whether all end in time; those that do not are killed."""
    until = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes) and time.monotonic() < until:
        time.sleep(0.05)
    hung = any(p.poll() is None for p in processes)
    for p in processes:
        p.kill()
    return not hung


def run(part: str) -> dict | None:
    """What the first process says of a job, if both say the same; None for a hang."""
    with tempfile.TemporaryDirectory() as name:
        processes = started(Path(name), part)
        if not ended(processes, LONGEST_S):
            return None
        one, two = said(Path(name), 0), said(Path(name), 1)
        return one if one == two and one else {}


def kill(part: str, victim: int) -> tuple[float, bool]:
    """(seconds until the other process has ended, whether its log names a reason) after the victim says that it is in this part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = started(folder, part)
        while "now" not in said(folder, victim):
            time.sleep(0.05)
        os.kill(processes[victim].pid, signal.SIGKILL)
        start, other = time.monotonic(), 1 - victim
        in_time = ended([processes[other]], LONGEST_S)
        text = (folder / f"{other}.err").read_text() + (folder / f"{other}.out").read_text()
        return (time.monotonic() - start if in_time else float("inf")), any(reason in text for reason in REASONS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    found = [run("ilp") for _ in range(options.runs)]
    texts = collections.Counter(json.dumps(x) for x in found if x)
    print(f"{options.runs} runs: {found.count(None)} hangs, {found.count({})} of different plans, {len(texts)} kind(s) of answer")
    for part in ("while it plans", "before it runs", "between steps"):
        for victim in range(2):
            ends = [kill(part, victim) for _ in range(options.kills)]
            worst, named = max(s for s, _ in ends), sum(ok for _, ok in ends)
            print(
                f"process {victim} killed {part}: the other one has ended after {worst:.0f} s at most, {named} of {len(ends)} name why"
            )


if __name__ == "__main__":
    main()
