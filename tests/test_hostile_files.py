"""Files stay data: whatever they hold, they are read or refused in words; who writes them at once, or dies writing, tears none."""

import os
import signal
import subprocess
import sys
import time

import pytest
from file_claims import KINDS, PLAN, SHAPES, claims, own_plan, step
from msgspec.structs import replace

import shardplan
from shardplan.plan import io
from shardplan.plan.cache import CachedPlan

COUNTS = {"plan file": 1000, "cache entry": 200, "cluster file": 600, "plan to take over": 200}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_nobody_saved_is_read_or_refused_in_words(kind, tmp_path):
    *wrong, summary = claims(kind, COUNTS[kind], tmp_path)
    assert not wrong, "\n".join(wrong[:5])
    assert " 0 read" not in summary and " 0 refused" not in summary


@pytest.mark.parametrize("load", [shardplan.Plan.load, shardplan.Cluster.load], ids=["plan", "cluster"])
def test_what_is_no_file_is_refused_at_once(load, tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "folder.json").mkdir()
    for name, why in (
        ("pipe", "a pipe or a device"), ("endless", "a pipe or a device"), ("loop", "symbolic links"), ("folder", "Is a directory"),
        ("missing", "No such file"), ("a\0b", "No such file"), ("x" * 300, "File name too long"),
    ):  # fmt: skip
        with pytest.raises(shardplan.ShardingError, match=why):
            load(tmp_path / f"{name}.json")


def test_a_file_of_very_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "MAX_VALUES", 1000)
    (tmp_path / "plan.json").write_text('{"format": "shardplan-plan", "x": [' + "[]," * 1000 + "[]]}")
    with pytest.raises(shardplan.PlanFileError, match="holds more than 1,000 values"):
        shardplan.Plan.load(tmp_path / "plan.json")


def test_a_foreign_plan_in_the_cache_is_planned_anew_and_replaced(tmp_path):
    import jax

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plan = shardplan.auto(mesh, cache=tmp_path)(step).plan(*SHAPES)
    (entry,) = tmp_path.iterdir()
    for content in (PLAN.dumps(), replace(plan, mesh=shardplan.MeshShape(("data", "model"), (4, 2))).dumps(), "{"):
        entry.write_text(content)
        assert shardplan.auto(mesh, cache=tmp_path)(step).plan(*SHAPES).dumps() == plan.dumps()
        assert shardplan.Plan.load(entry) == plan


WRITER = """
import sys
from shardplan.files import write_atomically
while True:
    write_atomically(sys.argv[1], sys.argv[2] * 200_000)
"""


def test_writers_at_once_that_are_killed_never_leave_a_torn_file(tmp_path):
    path = tmp_path / "plan.json"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter]) for letter in "ab"]
    try:
        seen, until = set(), time.monotonic() + 20
        while (len(seen) < 2 and time.monotonic() < until) or time.monotonic() < until - 18.5:
            if path.exists():
                text = path.read_text()
                assert text in ("a" * 200_000, "b" * 200_000)
                seen.add(text[0])
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert seen == {"a", "b"} and path.read_text() in ("a" * 200_000, "b" * 200_000)


def test_a_cache_folder_with_what_a_killed_writer_left_is_used_as_before(tmp_path):
    plan = shardplan.Plan.loads(own_plan().decode())
    place = CachedPlan.of(tmp_path, {"program": "x"})
    (tmp_path / f".{place.path.name}.abc.tmp").write_text("{")
    assert place.load() is None
    place.save(plan)
    assert place.load() == plan
