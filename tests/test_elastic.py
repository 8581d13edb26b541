"""`examples/elastic.py`: preempted or killed while it saves, and restarted on other devices, it loses what a whole job does."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import models  # noqa: F401  # finds the examples
import orbax.checkpoint as ocp
import pytest
from elastic import Job, run

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(Job(tmp_path_factory.mktemp("whole"), steps=12), lambda _: None)


def assert_same(losses, want, steps):
    assert losses.keys() == set(steps)
    assert losses == pytest.approx({n: want[n] for n in steps}, rel=2e-5)


def test_killed_while_saving_it_goes_on_from_the_last_complete_checkpoint(uninterrupted, tmp_path):
    words = [sys.executable, "-u", str(EXAMPLE), "--folder", str(tmp_path), "--devices", "8", "--steps", "12"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
        said = []
        for line in job.stdout:
            said.append(line)
            if line.startswith("saving step 10"):
                job.kill()
    assert said[-1].startswith("saving step 10") and job.wait() == -signal.SIGKILL
    with ocp.CheckpointManager(tmp_path) as manager:
        complete = manager.latest_step()
    assert complete in (1, 5, 10)  # steps are quick, and saving is not: it may have been writing any of the later two
    said = []
    assert_same(run(Job(tmp_path, devices=4, steps=12), said.append), uninterrupted, range(complete + 1, 13))
    assert f"restored step {complete}, saved on mesh data=2, model=4" in said


def test_preempted_it_saves_and_goes_on_with_other_batches_and_another_optimizer(uninterrupted, tmp_path):
    def preempt(line):
        if line.startswith("step 7"):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    job = Job(tmp_path, steps=12)
    try:
        first = run(job, preempt)
        assert len(first) < 12  # at the next step at the latest
        assert_same(first, uninterrupted, range(1, len(first) + 1))
        assert_same(run(replace(job, devices=6), lambda _: None), uninterrupted, range(len(first) + 1, 13))
        said = []
        other = run(replace(job, batch=96, optimizer="momentum", steps=14), said.append)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "restored step 12, saved on mesh data=2, model=3" in said
    assert other.keys() == {13, 14} and max(other.values()) < uninterrupted[1] - 1  # what was learned is kept
