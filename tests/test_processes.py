"""One plan for all processes of a mesh: two processes of four devices and four of two, over gloo."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import process_jobs
import pytest

JOBS = Path(process_jobs.__file__)
FAULTS = {
    "other shapes": (
        "process 1 would run another step than process 0",
        "input batch/x: float32[32,64] on process 0, float32[64,64] on process 1",
    ),
    "other code": ("process 1 would run another step than process 0", "process_jobs.py:", "none on process 0, 2 sin on process 1"),
    "nothing fits": ("no plan fits 9.77 KiB per device",),
    "no such file": ("missing.json: cannot be read: No such file or directory",),
    "one cannot trace": ("no data here",),
    "one comes late": ("process 1 of 2 did not plan this step within 4 s", "auto(..., process_timeout=600)"),
}
"""What every process says."""


def run(count: int, folder: Path, part: str) -> list[dict]:
    """Per process, what it says of each claim."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])}
    outs, errs = ([open(folder / f"{n}.{what}", "w+") for n in range(count)] for what in ("out", "err"))  # noqa: SIM115
    arguments = [[str(x) for x in (JOBS, n, count, port, folder, part)] for n in range(count)]
    started = [subprocess.Popen([sys.executable, *arguments[n]], env=env, stdout=outs[n], stderr=errs[n]) for n in range(count)]
    found = []
    for n, process in enumerate(started):
        status = process.wait(timeout=300)
        assert status == 0, f"process {n}: {(folder / f'{n}.err').read_text()[-3000:]}"
        lines = [json.loads(line) for line in (folder / f"{n}.out").read_text().splitlines() if line.startswith("{")]
        found.append({line.pop("claim"): line for line in lines})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"), "all")


@pytest.mark.parametrize("claim", list(process_jobs.jobs()))
def test_two_processes_run_the_plan_of_one_with_its_losses(two, claim):
    mesh, options = process_jobs.jobs()[claim]
    alone = process_jobs.trained(mesh, **options)
    assert two[0][claim] == two[1][claim]
    assert two[0][claim]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    if "time_limit" not in options:
        assert two[0][claim]["plan"] == alone["plan"]


def test_an_example_is_run_as_by_one_process(two, tmp_path):
    """Auto and Explicit; all examples, planned in every way, by two and by four processes: benchmarks/processes.py."""
    alone = {}
    process_jobs.example("hybrid_mlp", ["propagation"], tmp_path, lambda claim, **values: alone.update({claim: values}))
    assert len(alone) == 2
    for claim, values in alone.items():
        one, other = ({**said[claim], "seconds": 0} for said in two)
        assert one == other and one["plan"] == values["plan"]
        assert one["losses"] == pytest.approx(values["losses"], rel=1e-6)


@pytest.mark.parametrize("claim", ["a file that the last process has", "memory differs", "calibrations differ", "after all faults"])
def test_what_differs_between_machines_gives_one_plan(two, claim):
    assert two[0][claim] == two[1][claim]
    assert two[0][claim]["losses"] == pytest.approx(two[0]["ilp"]["losses"], rel=1e-6)


def test_a_state_is_moved_to_other_meshes_of_the_same_processes_bit_for_bit(two):
    assert all(said["moved"]["differ"] == [0, 0, 0] for said in two)


def test_a_state_is_not_moved_to_devices_of_other_processes_and_is_kept(two):
    for said in two:
        assert "has to go to other devices, and some of either are other processes'" in said["moved to other devices"]["error"]
        assert "save a checkpoint, and restore it by the new plan" in said["moved to other devices"]["error"]


def test_a_process_makes_only_its_own_shards_of_a_state(two):
    for said in two:
        assert said["init"]["grew"] < 0.75, "half of the state, and what compiling takes"


@pytest.mark.parametrize("claim", FAULTS)
def test_what_goes_wrong_on_one_process_is_said_by_all(two, claim):
    for said in two:
        assert all(text in said[claim]["error"] for text in FAULTS[claim]), said[claim]["error"]


def test_four_processes_run_the_plan_of_two(two, tmp_path):
    four = run(4, tmp_path, "ilp")
    assert all(said["ilp"]["plan"] == two[0]["ilp"]["plan"] for said in four)
    assert all(said["ilp"]["losses"] == pytest.approx(two[0]["ilp"]["losses"], rel=1e-6) for said in four)
