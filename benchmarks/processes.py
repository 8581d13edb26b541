"""One plan for all processes: again and again, of every example, and what is left of a job when one of its processes is killed.

    python benchmarks/processes.py [--runs 100] [--kills 10] [--examples gpt,moe] [--ways ilp,verify]

runs       jobs of two processes of four emulated devices plan and train (`tests/process_jobs.py`); counted are hangs (not ended within
           two minutes), plans that differ between processes, and losses that differ from the first run's.
examples   each on Auto and Explicit axes, planned in every way, by one process of eight devices, two of four, and four of two: whether
           the bytes of all plans are the same, and the largest relative difference of a loss from that of one process.
kills      times each, a process of `examples/elastic.py` (two of four devices) is killed while it plans, compiles, between steps, and
           while it saves, the first and the last in turn, at a moment drawn from a seed. Printed are the seconds until the other one
           has ended, at most (JAX's heartbeat time-out is 10 s here, 100 s unless `initialize` is given another), whether its log
           names a reason, and what a restart by one process of 4, 6 or 8 devices does: from which step it goes on, and the
           largest relative difference of a loss from that of a job that was never interrupted.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
JOB, ELASTIC = ROOT / "tests" / "process_jobs.py", ROOT / "examples" / "elastic.py"
LONGEST_S = 120
EXAMPLES = ("hybrid_mlp", "dlrm", "face_softmax", "digits_cnn", "llama", "gpt", "moe")
WAYS = ("ilp", "propagation", "recursive", "file", "limit", "verify")
REASONS = "has ended", "JAX distributed service detected fatal errors", "heartbeat", "did not plan", "Connection", "closed"
PHASES = {
    "planning": ("planning", 1.0),
    "compiling": ("compiling", 1.0),
    "between steps": ("step 9", 0.0),
    "saving": ("saving step 9", 0.4),
}
"""The line that says so, and up to how many seconds later the process is killed."""


def started(folder: Path, words_of: Callable[[int, int], Sequence], count: int = 2) -> list[subprocess.Popen]:
    """Processes, of which `words_of` gives the arguments by number and port; their output goes to the folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    out, env = [], {**os.environ, "JAX_PLATFORMS": "cpu"}
    for n in range(count):
        with open(folder / f"{n}.out", "w") as o, open(folder / f"{n}.err", "w") as e:
            words = [sys.executable, "-u", *map(str, words_of(n, port))]
            out.append(subprocess.Popen(words, stdout=o, stderr=e, env=env))
    return out


def ended(processes: Sequence[subprocess.Popen], limit_s: float) -> bool:
    """Whether all end in time; those that do not are killed."""
    until = time.monotonic() + limit_s
    while any(p.poll() is None for p in processes) and time.monotonic() < until:
        time.sleep(0.05)
    hung = any(p.poll() is None for p in processes)
    for p in processes:
        p.kill()
    return not hung


def said(folder: Path, n: int) -> dict:
    """Claim -> values that a process of `tests/process_jobs.py` printed."""
    lines = [json.loads(line) for line in (folder / f"{n}.out").read_text().splitlines() if line.startswith("{")]
    return {line.pop("claim"): line for line in lines}


def jobs(part: str, count: int, limit_s: float) -> list[dict] | None:
    """What every process of a job says; None for a hang."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = started(folder, lambda n, port: (JOB, n, count, port, folder, part), count)
        in_time = ended(processes, limit_s)
        found = [said(folder, n) for n in range(count)]
        if in_time and any(p.returncode for p in processes):
            for n in range(count):  # the first error of each, such as a time-out of gloo on a machine that is too busy
                errors = [line for line in (folder / f"{n}.err").read_text().splitlines() if "rror" in line]
                print(*(f"process {n}: {line[:300]}" for line in errors[:1]), sep="\n", flush=True)
        return found if in_time else None


# ---- again and again


def runs(count: int) -> None:
    found = [jobs("ilp", 2, LONGEST_S) for _ in range(count)]
    differing = sum(x is not None and (x[0] != x[1] or not x[0]) for x in found)
    texts = collections.Counter(json.dumps(x) for x in found if x)
    print(f"{count} runs: {found.count(None)} hangs, {differing} of different plans, {len(texts)} kind(s) of answer", flush=True)


# ---- every example


def examples(names: Sequence[str], ways: Sequence[str]) -> None:
    for name in names:
        by_count = {n: jobs(f"example {name} {' '.join(ways)}", n, 1200) for n in (1, 2, 4)}
        for claim in next(iter(by_count[1] or [{}]), {}):
            alone, texts, off = by_count[1][0][claim], set(), 0.0
            texts.add(alone["plan"] if "limit" not in claim else None)
            complete = True
            for n in (2, 4):
                mine = [x.get(claim) for x in by_count[n] or [None]]
                complete = complete and all(mine)
                texts |= {x["plan"] for x in mine if x}
                off = max([off, *(abs(a / b - 1) for x in mine if x for a, b in zip(x["losses"], alone["losses"], strict=True))])
            same = f"{len(texts - {None})} plan(s)" if complete else "MISSING"
            print(f"{claim:48} {same}  losses off by {off:.1e}, e.g. {alone['losses'][-1]:.6g}", flush=True)


# ---- kills


def elastic(folder: Path, devices: int, n: int = 0, port: int = 0, processes: int = 1) -> list:
    words = [ELASTIC, "--folder", folder, "--devices", devices, "--steps", 18, "--every", 3]
    return words if processes == 1 else [*words, "--processes", processes, "--process", n, "--port", port]


def losses(text: str) -> dict[int, float]:
    """Step -> loss."""
    return {int(x[1]): float(x[3]) for x in map(str.split, text.splitlines()) if x[:1] == ["step"] and x[2:3] == ["loss"]}


def kill(phase: str, victim: int, begun: Path, random_: random.Random) -> tuple[float, bool, str]:
    """(seconds until the other process has ended, whether its log names a reason, what the restart prints)."""
    line, most_s = PHASES[phase]
    with tempfile.TemporaryDirectory() as name:
        folder, saved = Path(name), Path(name) / "checkpoints"
        shutil.copytree(begun, saved)
        processes = started(folder, lambda n, port: elastic(saved, 8, n, port, 2))
        until = time.monotonic() + LONGEST_S
        while not any(x.startswith(line) for x in (folder / f"{victim}.out").read_text().splitlines()):
            if time.monotonic() > until:
                ended(processes, 0)
                return float("inf"), False, ""
            time.sleep(0.005)
        time.sleep(random_.uniform(0, most_s))
        os.kill(processes[victim].pid, signal.SIGKILL)
        start, other = time.monotonic(), 1 - victim
        in_time = ended([processes[other]], LONGEST_S)
        took = time.monotonic() - start if in_time else float("inf")
        text = (folder / f"{other}.err").read_text() + (folder / f"{other}.out").read_text()
        again = started(folder, lambda *_: elastic(saved, random_.choice((4, 6, 8))), 1)
        ended(again, LONGEST_S)
        named = processes[other].returncode == 0 or any(reason in text for reason in REASONS)
        return took, named, (folder / "0.out").read_text() + (folder / "0.err").read_text()


def kills(count: int) -> None:
    random_ = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        whole, begun = Path(name) / "whole", Path(name) / "begun"
        words = [sys.executable, *map(str, elastic(whole, 8))]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        want = losses(subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout)
        words = [sys.executable, *map(str, elastic(begun, 8)), "--steps", "6"]
        subprocess.run(words, capture_output=True, check=True, env=env)
        for phase in PHASES:
            took, named, from_, off, failed = [], 0, collections.Counter(), 0.0, 0
            for n in range(count):
                seconds, reason, text = kill(phase, n % 2, begun, random_)
                took.append(seconds)
                named += reason
                found = losses(text)
                failed += "all is saved" not in text or max(found, default=0) != 18
                from_[min(found, default=0) - 1] += 1
                off = max([off, *(abs(x / want[k] - 1) for k, x in found.items())])
            print(
                f"killed {phase}: the other one has ended after {max(took):.0f} s at most, {named} of {count} name why; "
                f"{failed} restarts failed, went on from step {dict(sorted(from_.items()))}, losses off by {off:.1e} at most",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--examples", default=",".join(EXAMPLES), help="names, separated by commas; none for none")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    if options.runs:
        runs(options.runs)
    examples([x for x in options.examples.split(",") if x != "none"], options.ways.split(","))
    if options.kills:
        kills(options.kills)


if __name__ == "__main__":
    main()
