"""Planned against emitted: each verdict by name."""

import gzip
import pathlib
from dataclasses import replace

from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import MeshShape
from shardplan.xla import ExpectedCollective, collectives, compare
from shardplan.xla.hlo.text import HloArray

MESH = MeshShape(("data", "model"), (4, 2))
TEXT = gzip.decompress((pathlib.Path(__file__).parent / "data" / "hlo" / "fsdp_gpu_0.12.hlo.gz").read_bytes()).decode()
EMITTED = collectives(TEXT, MESH)
W = 256 * 512 * 4

# Gathered forward, recomputed and backward for the first product, forward and backward for the second; gradients scattered.
PLAN = [
    ExpectedCollective("all-gather", ("data",), W, 4, 18, "src/programs.py:19"),
    ExpectedCollective("all-gather", ("data",), W, 4, 12, "src/programs.py:20"),
    ExpectedCollective("reduce-scatter", ("data",), W, 4, 6, "src/programs.py:19"),
    ExpectedCollective("reduce-scatter", ("data",), W, 4, 6, "src/programs.py:20"),
    ExpectedCollective("all-reduce", ("model",), 16 * 256 * 4, 2, 6, "src/programs.py:19"),
    ExpectedCollective("all-reduce", ("model",), 16 * 256 * 4, 2, 6, "src/programs.py:20"),
    ExpectedCollective("all-reduce", ("data",), 4, 4, 1, "src/programs.py:23"),
]


def verdicts(plan):
    return {(f.verdict, f.source.rpartition("/")[2], f.axes) for f in compare(plan, EMITTED).findings if f.verdict != "same"}


def test_a_right_plan_is_the_same_everywhere():
    found = compare(PLAN, EMITTED)
    assert {f.verdict for f in found.findings} == {"same"}
    assert found.ratio == 1
    assert str(found).endswith("5 of 5 as planned")


def test_unplanned_and_missing():
    assert verdicts(PLAN[:-1]) == {("unplanned", "programs.py:23", ("data",))}
    extra = ExpectedCollective("all-to-all", ("model",), 4096, 2, 1, "src/programs.py:30")
    assert verdicts([*PLAN, extra]) == {("missing", "programs.py:30", ("model",))}


def test_a_gather_planned_once_too_often_is_cheaper_and_once_too_seldom_dearer():
    assert verdicts([replace(PLAN[0], runs=30), *PLAN[1:]]) == {("cheaper", "programs.py:19", ("data",))}
    assert verdicts([replace(PLAN[0], runs=6), *PLAN[1:]]) == {("dearer", "programs.py:19", ("data",))}


def test_an_all_reduce_where_a_scatter_was_planned_is_dearer():
    planned = [ExpectedCollective("reduce-scatter", ("model",), 16 * 256 * 4, 2, 6, "programs.py:19"), *PLAN[:4], *PLAN[5:]]
    assert verdicts(planned) == {("dearer", "programs.py:19", ("model",))}


def test_the_same_transfer_on_another_line_is_found():
    assert verdicts([*PLAN[:-1], replace(PLAN[-1], source="elsewhere.py:1")]) == set()


def test_one_of_several_transfers_of_a_line_is_found_on_another():
    moved = ExpectedCollective("all-to-all", ("model",), 1 << 20, 2, 1, "programs.py:19")
    sums = next(c for c in EMITTED if c.axes == ("model",))
    part = replace(sums.parts[0], array=HloArray("f32", (1 << 18,)), stack=())
    there = replace(sums, kind="all-to-all", parts=(part,), bytes=1 << 20, runs=1, stack=())
    found = compare([*PLAN, moved], [*EMITTED, there])
    assert {f.verdict for f in found.findings} == {"same"}
    assert {f.verdict for f in compare([*PLAN, replace(moved, kind="all-gather")], [*EMITTED, there]).findings} > {"unplanned"}


def test_a_loop_that_is_emitted_in_parts_moves_what_was_planned():
    """XLA writes a loop's body twice and its first round apart, and a combined collective has one line for arrays of several."""
    plan = [ExpectedCollective("reduce-scatter", ("data",), W * n, 4, 6, f"programs.py:{n}") for n in (1, 2, 4)]
    scatter = next(c for c in EMITTED if c.kind == "reduce-scatter")
    parts = tuple(replace(scatter.parts[0], array=HloArray("f32", (W * n // 4,)), stack=()) for n in (1, 2, 4))
    emitted = [replace(scatter, parts=parts, bytes=7 * W, runs=runs, stack=()) for runs in (2.5, 2.5, 1)]
    assert {f.verdict for f in compare(plan, emitted).findings} == {"same"}
    assert {f.verdict for f in compare(plan, emitted[:2]).findings} == {"cheaper"}


def test_two_scatters_emitted_as_one_sum_are_dearer_and_not_unplanned():
    sums = next(c for c in EMITTED if c.axes == ("model",))
    whole = replace(sums, axes=("data", "model"), groups=(tuple(range(8)),))
    size, line = whole.parts[0].array.bytes, whole.source or ""
    steps = [
        ExpectedCollective("reduce-scatter", ("model",), size, 2, whole.runs, line, reshard=7),
        ExpectedCollective("reduce-scatter", ("data",), size / 2, 4, whole.runs, line, reshard=7),
    ]
    (found,) = compare(steps, [whole]).findings
    assert (found.verdict, found.axes, len(found.planned)) == ("dearer", ("data", "model"), 2)
    apart = [replace(e, reshard=n) for n, e in enumerate(steps)]
    assert {f.verdict for f in compare(apart, [whole]).findings} == {"unplanned", "missing"}


def test_axes_may_be_written_in_any_order():
    both = next(c for c in EMITTED if c.axes == ("model",))
    both = replace(both, axes=("data", "model"))
    expected = ExpectedCollective("all-reduce", ("model", "data"), both.bytes, 2, both.runs, both.source or "")
    assert compare([expected], [both]).findings[0].verdict == "same"


def test_printed_differences():
    text = str(compare([replace(PLAN[0], runs=6), *PLAN[1:]], EMITTED))
    assert "dearer  programs.py:19\n   planned  all-gather over data, 524 kB x 6\n" in text
    assert "   emitted  all-gather over data, 524 kB x 6, f32[256,512]   (3 times)\n" in text


def test_bytes_on_the_wire():
    assert [wire_bytes(k, 800, 4) for k in ("all-reduce", "all-gather", "all-to-all", "collective-permute")] == [
        1200,
        600,
        600,
        800,
    ]
