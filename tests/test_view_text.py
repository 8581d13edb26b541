"""What people read about a plan, as text. SHARDPLAN_GOLDEN=write rewrites the stored texts."""

import dataclasses
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from plans import MESH, decision, layout, leaf, numbered, transformer

from shardplan import units
from shardplan.mesh.layout import Layout
from shardplan.plan.data import MemoryReport
from shardplan.view import rows

GOLDEN = Path(__file__).parent / "data" / "view"


@pytest.fixture
def plan():
    return transformer()


def other(plan):
    """The same plan with the up-projections of two layers replicated."""
    inputs = tuple(replace(x, layout=layout("", "")) if x.path.endswith(("1/up", "2/up")) else x for x in plan.inputs)
    last = replace(plan.decisions[-1], strategy={"data": "b"})
    seconds = {**plan.seconds, "total": 5e-3}
    return replace(plan, inputs=inputs, decisions=(*plan.decisions[:-1], last), seconds=seconds)


def check(name: str, text: str):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SHARDPLAN_GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()
    assert max(map(len, text.splitlines())) <= 120
    assert not any(line != line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text


def test_summary(plan):
    assert str(plan).splitlines() == [
        "mesh    data=2, model=4 (8 devices), priced as h100",
        "plan    feasible, at most 0.4 % from the optimum (integer program, symmetric layers)",
        "step    4.38 ms = 4.2 ms compute + 177 µs communication; 63.7 MB sent per device",
        "memory  2.71 GiB of 74.5 GiB per device at the peak, train.py:6 in block",
    ]


def test_explain(plan):
    check("explain", plan.explain())


def test_explain_twelve_layers_takes_no_more_lines_than_three(plan):
    assert len(transformer(12).explain().splitlines()) == len(plan.explain().splitlines())


def test_explain_without_source(plan):
    text = plan.explain(source=False)
    assert "# forward" not in text and "collectives" in text and "train.py:6  return" not in text


def test_explain_of_a_plan_without_code(plan):
    text = replace(plan, lines=()).explain()
    assert "train.py:6\n" in text
    assert "# forward" not in text


def test_diff(plan):
    check("diff", str(plan.diff(other(plan))))


def test_diff_names_the_layouts_of_ops_that_differ_in_nothing_else(plan):
    def read(k, *layouts):
        operands = ((), layouts) if k else (layouts, ())
        return decision("train.py", 6, "block", "add", strategy={"data": "a"}, operand_layouts=operands, result_layouts=(None,))

    rows, columns = layout("data", ""), layout("", "data")
    before = replace(plan, decisions=numbered([read(0)] * 4))

    def words(*after):
        found = str(before.diff(replace(plan, decisions=numbered(after))))
        return found.splitlines()[-1].partition("->  ")[2]

    assert words(read(0), read(1, rows), read(1, rows), read(1, rows)) == "operand 1 as P('data', None)  ×3"
    assert words(read(1, rows), read(1, rows), read(0, columns), read(0)) == "operand 1 as P('data', None), and 1 other  ×3"
    assert words(read(1, rows), read(1, rows), read(1, columns), read(0, columns)) == "operand 1 as P('data', None), and 2 others  ×4"
    assert "a  ->  operand 1 left to XLA  ×2" in str(
        replace(plan, decisions=numbered([read(1, rows)] * 2)).diff(replace(plan, decisions=numbered([read(1)] * 2)))
    )


def test_a_plan_differs_from_itself_in_nothing(plan):
    assert not plan.diff(plan)
    assert "the plans shard everything the same way" in str(plan.diff(plan))


def test_diff_of_plans_with_other_inputs_and_meshes(plan):
    fewer = replace(plan, inputs=plan.inputs[2:], mesh=dataclasses.replace(MESH, sizes=(4, 2)), cluster="a100", fingerprint="f")
    text = str(plan.diff(fewer))
    assert "mesh      data=2, model=4 -> data=4, model=2" in text
    assert "cluster   h100 -> a100" in text
    assert "the plans are for different programs" in text
    assert "not there" in text


def test_memory(plan):
    assert str(plan.memory()).splitlines() == [
        "memory per device at the peak, train.py:6 in block",
        "  activations  1.86 GiB   69 %",
        "  optimizer     572 MiB   21 %",
        "  parameters    296 MiB   11 %",
        "  together     2.71 GiB  100 %",
        "  budget       74.5 GiB  3.6 %  used",
    ]
    assert str(MemoryReport(0.0, None, "", {})) == "memory per device at the peak\n  together  0 B"


@pytest.mark.parametrize(
    ("status", "gap", "text"),
    [
        ("optimal", 0.0, "optimal (integer program, symmetric layers)"),
        ("fallback", 1e-9, "optimal (integer program"),
        ("fallback", 0.02, "what propagation found, at most 2 % from the optimum"),
        ("feasible", 1.0, "feasible, nothing proven"),
    ],
)
def test_what_is_proven_is_said(plan, status, gap, text):
    assert text in str(replace(plan, status=status, gap=gap))


def test_an_empty_plan_says_so(plan):
    text = replace(plan, inputs=(), decisions=(), unknown=(), memory_report=MemoryReport(0.0, None, "", {})).explain()
    assert "inputs: none" in text and "collectives: none" in text and "nothing is sent" in text


def test_names_cannot_steer_the_terminal_or_break_the_table(plan):
    evil = "state/\x1b[31mred\n\x07/" + "w" * 300
    file = "/tmp/\x1b]0;title\x07.py"
    named = replace(
        plan,
        inputs=(leaf(evil, (8, 8), "data", ""),),
        decisions=(decision(file, 3, "f\n", "dot\x1b", result_layouts=(layout("data"),), result_type="float32[8]\x1b"),),
        unknown=(("\x1b[2J", "a\nb"),),
        cluster="h\x1b[0m",
        memory_report=replace(plan.memory_report, where="x\ny\x1b"),
    )
    for text in (named.explain(), str(named), str(plan.diff(named))):
        assert "\x1b" not in text and "\x07" not in text
        assert max(map(len, text.splitlines())) <= 120
    assert "red" in named.explain()


# ---- rows


def test_paths_that_differ_in_one_segment_are_one_row():
    leaves = [leaf(f"s/{n}/{m}/{w}", (4, 4), "", "") for n in range(12) for m in ("attn", "mlp") for w in ("k", "q")]
    (row,) = rows.leaf_rows(leaves, MESH)
    assert (row.path, len(row.leaves)) == ("s/*/{attn,mlp}/{k,q}", 48)


def test_a_row_never_claims_layers_that_are_laid_out_otherwise():
    leaves = [leaf(f"layer_{n}/w", (4, 4), "data" if n == 2 else "", "") for n in range(6)]
    assert [(r.path, len(r.leaves)) for r in rows.leaf_rows(leaves, MESH)] == [("layer_{0-1,3-5}/w", 5), ("layer_2/w", 1)]


def test_every_leaf_is_in_one_row():
    leaves = [leaf("/".join(["a", *p]), (4,), "") for p in (["0"], ["0", "0"], ["x"], ["x1"], ["x1", "y"], [], ["0", "y"])]
    found = rows.leaf_rows(leaves, MESH)
    assert sorted(x.path for r in found for x in r.leaves) == sorted(x.path for x in leaves)


def test_files_of_one_name_are_told_apart():
    files = ["a/model/train.py", "b/model/train.py", "site-packages/flax/nnx/linear.py", "data.py", ""]
    assert list(rows.file_names(files).values()) == ["a/model/train.py", "b/model/train.py", "flax/nnx/linear.py", "data.py", ""]


# ---- amounts and types


def test_amounts_are_humane():
    seconds = (0, 4e-7, 41e-6, 999.6e-6, 1.834e-3, 9.996e-3, 75.0)
    assert [*map(units.format_seconds, seconds)] == ["0 µs", "0.4 µs", "41 µs", "1 ms", "1.83 ms", "10 ms", "75 s"]
    assert [units.format_bytes(n) for n in (0, 512, 12_582_912, 999_950)] == ["0 B", "512 B", "12.6 MB", "1 MB"]
    assert units.format_memory(80e9) == "74.5 GiB"
    assert [units.format_percent(x) for x in (0, 1e-6, 0.004, 0.0996, 0.54)] == ["0 %", "<0.01 %", "0.4 %", "10 %", "54 %"]
    assert [units.format_count(n) for n in (1, 12, 2.5)] == ["", "×12", "×2.5"]


def test_types_read_as_jax_prints_them():
    assert rows.type_text("float32", (8, 4, 2), layout("data", "", "")) == "f32[8@data, 4, 2]"
    assert rows.type_text("bfloat16", (8,), layout("data model")) == "bf16[8@(data,model)]"
    assert rows.type_text("float32", (), Layout((), (("data", "sum"), ("model", "sum")))) == "f32[] {sum over data,model}"
    assert rows.array_type("key<fry>[2]", layout("")) == "key<fry>[2]"
    names = ("float32", "bfloat16", "int4", "bool", "float8_e4m3fn", "key<fry>")
    assert [*map(rows.itemsize, names)] == [4, 2, 0.5, 1, 1, 8]
