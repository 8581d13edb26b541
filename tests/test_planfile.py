"""Plan files: what is written is read again, and what is no plan is refused by field."""

import copy
import json
import math
import os
import re
import time
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from plans import transformer

from shardplan import PlanFileError
from shardplan.plan import Plan
from shardplan.plan import io as planfile
from shardplan.plan.leaf_patterns import folded, unfolded

PLAN = transformer()
VALUE = json.loads(PLAN.dumps())
SCHEMA = jsonschema.Draft202012Validator(Plan.schema())
UP = next(n for n, x in enumerate(VALUE["inputs"]) if x["path"] == "state/params/blocks/0/up")
W = "inputs['state/params/blocks/0/up']"
DATA = Path(__file__).parent / "data" / "plan"


def changed(*path, to):
    """The plan's JSON with one place set; `to` may be a function of what stands there. Ellipsis removes the place."""
    value = copy.deepcopy(VALUE)
    at = value
    for step in path[:-1]:
        at = at[step]
    if to is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = to(at[path[-1]]) if callable(to) else to
    return value


def validate(value) -> Plan:
    return planfile.loads(json.dumps(value).encode(), Plan)


def refused(value) -> str:
    with pytest.raises(PlanFileError) as error:
        validate(value)
    return str(error.value)


def test_a_plan_is_read_as_it_was_saved(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert Plan.load(tmp_path / "plan.json").dumps() == PLAN.dumps()


def test_a_file_of_version_1_is_the_same_plan():
    plan = transformer(layers=1)
    decisions = list(plan.decisions)
    decisions[1] = replace(decisions[1], copy_numbers=(0, -1))
    memory = replace(plan.memory_report, profile=plan.memory_report.profile[:2])
    functions = {(d.file, d.line): d.function for d in decisions}
    lines = tuple(replace(x, function=functions[x.file, x.line]) for x in plan.lines)
    expected = replace(plan, decisions=tuple(decisions), memory_report=memory, donated=("state",), lines=lines)
    assert Plan.load(DATA / "version1.json") == expected


def test_a_file_of_version_2_is_the_same_plan():
    plan = transformer(layers=1)
    memory = replace(plan.memory_report, profile=plan.memory_report.profile[:2])
    lines = tuple(replace(x, function=next(d.function for d in plan.decisions if d.line == x.line)) for x in plan.lines)
    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    assert Plan.load(DATA / "version2.json") == replace(plan, memory_report=memory, compiler_options=options, lines=lines)


@pytest.mark.parametrize(
    "path", [("tied",), ("inputs", "batch/tokens", "layout"), ("decisions", 0, "reads"), ("decisions", 2, "moves", 0, "value")]
)
def test_a_damaged_file_of_version_1_is_refused(path):
    value = at = json.loads((DATA / "version1.json").read_text())
    for step in path[:-1]:
        at = at[step]
    del at[path[-1]]
    assert f"damaged: no plan of version 1 (KeyError: '{path[-1]}')" in refused(value)


def test_saved_plans_meet_the_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA.schema)
    SCHEMA.validate(VALUE)


LEAF = ("inputs", UP)

WRONG = [  # where, what stands there, what the error says, whether the schema says so too
    (("version",), 5, "version: 5 is newer than this shardplan reads (4).\n  ways out: a newer shardplan", True),
    (("version",), "1", "version: '1' is no version of a plan file", True),
    (("cluster",), 7, "cluster: expected `str`, got `int`.\n  way out: a file that plan.save() wrote, or plan anew", True),
    (("status",), "infeasible", "status: invalid enum value 'infeasible'", True),
    (("gap",), -0.1, "gap: expected `float` >= 0.0", True),
    (("gap",), True, "gap: expected `float`, got `bool`", True),
    (("gap",), 10**400, "gap: number out of range", True),
    (("symmetric_layers",), 1, "symmetric_layers: expected `bool`, got `int`", True),
    (("fingerprint",), ..., "the file: object missing required field `fingerprint`", True),
    (("colour",), "red", "the file: object contains unknown field `colour`", True),
    (("mesh", "sizes"), [2], "mesh: mesh axes ('data', 'model') and sizes (2,) must have equal length", False),
    (("mesh", "sizes"), [2, 0], "mesh: 'data=2, model=0' is no mesh", False),
    (("mesh", "sizes"), [2**30, 2**30], "is no mesh", False),
    (("mesh", "axes"), ["data", "data"], "must have equal length and unique names", False),
    (("seconds", "total"), ..., "seconds: has ['bound', 'communication', 'compute', 'hidden'], not bound,", False),
    (("seconds", "compute"), None, "seconds[...]: expected `float`, got `null`", True),
    (("memory", "at_peak", "optimizer"), "much", "memory.at_peak[...]: expected `float`, got `str`", True),
    (("memory", "profile"), lambda p: p * 40, "memory.profile: expected `array` of length <= 1000", True),
    (("inputs",), {}, "inputs: expected `array`, got `object`", True),
    (("inputs",), lambda x: [*x, x[0]], "inputs: a path stands twice", False),
    ((*LEAF, "layout", "dims"), [[], ["modle"]], f"{W}.layout: axis 'modle' is not in mesh data=2, model=4", False),
    ((*LEAF, "layout", "dims"), [["model"], ["model"]], f"{W}.layout: axis 'model' is used twice", False),
    ((*LEAF, "layout", "dims"), [["model"]], f"{W}.layout: has 1 dims, the array 2", False),
    ((*LEAF, "layout", "dims"), [[], "model"], f"{W}.layout.dims[1]: expected `array`, got `str`", True),
    ((*LEAF, "layout"), {"dims": [[], []], "partial": [["data", "sum"]]}, f"{W}.layout: is partial, which inputs", False),
    ((*LEAF, "shape"), [768, 5], f"{W}.layout.dims[1]: 4 shards over model do not divide 5", False),
    ((*LEAF, "shape"), [-1, 3072], f"{W}.shape[0]: expected `int` >= 0", True),
    ((*LEAF, "shape"), [768.0, 3072], f"{W}.shape[0]: expected `int`, got `float`", False),
    ((*LEAF, "dtype"), "", f"{W}.dtype: expected `str` of length >= 1", True),
    ((*LEAF, "path"), 7, f"inputs[{UP}].path: expected `str`, got `int`", True),
    (("unknown",), [["f"]], "unknown[0]: expected `array` of length 2, got 1", True),
    (("decisions", 0, "line"), -1, "decisions[0].line: expected `int` >= 0", True),
    (("decisions", 2, "occurrence"), 7, None, True),
    (("decisions", 3, "op"), 2, "decisions[3].op: 2 does not come after 2, the op decided before", False),
    (("decisions", 3, "copy_numbers"), [-2], "decisions[3].copy_numbers[0]: expected `int` >= -1", True),
    (("lines", 0, "seconds"), "fast", "lines[0].seconds: expected `float`, got `str`", True),
    (("donated",), "state", "donated: expected `array`, got `str`", True),
    (("cluster",), "\ud800", "it is not text in UTF-8", False),
    (("decisions", 1, "strategy"), {"modle": "a"}, "decisions[1].strategy: axis 'modle' is not in mesh", False),
    (("decisions", 1, "result_layouts", 0, "dims", 2), ["x"], "decisions[1].result_layouts[0]: axis 'x' is not in mesh data=2,", False),
    (("decisions", 2, "reshards", 0, "after", "dims"), [], "decisions[2].reshards[0].after: has 0 dims, before has 3", False),
    (("decisions", 2, "reshards", 0, "before", "partial", 0, 1), "mean", "before.partial: 'mean' is none of sum,", False),
    (("decisions", 2, "reshards", 0, "before", "partial", 0, 0), "data", "reshards[0].before: axis 'data' is used twice", False),
    (("decisions", 2, "reshards", 0, "collectives", 0, "kind"), "mean", "collectives[0].kind: invalid enum value 'mean'", True),
    (("decisions", 2, "reshards", 0, "collectives", 0, "axes"), ["y"], "collectives[0].axes: axis 'y' is not in", False),
]


@pytest.mark.parametrize(("path", "to", "text", "schema"), WRONG, ids=lambda v: "rule" if callable(v) else str(v)[:40])
def test_a_wrong_field_is_named(path, to, text, schema):
    value = changed(*path, to=to)
    if text is None:  # nothing wrong with it
        validate(value)
        SCHEMA.validate(value)
        return
    assert text in refused(value)
    assert SCHEMA.is_valid(value) != schema


def places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, x in inner:
        yield from places(x, (*path, key))


SMALL = json.loads(transformer(layers=1).dumps())
SMALL["memory"]["profile"] = SMALL["memory"]["profile"][:1]
PLACES = [p for p in places(SMALL) if p]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.sampled_from(["", "data", "model", "x", "sum", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dims", "partial", "data"]), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PLACES), JUNK)
def test_junk_anywhere_is_refused_in_words_and_never_against_the_schema(path, junk):
    value = copy.deepcopy(SMALL)
    at = value
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = junk
    try:
        validate(value)
    except PlanFileError:
        return
    assert SCHEMA.is_valid(value)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "the file is empty"),
        (b"\x80\x04\x95pickle", "this is no plan file: it is not text in UTF-8"),
        (b"hello: world\n", "this is no plan file: it is not JSON"),
        (b"[1, 2]", "this is no plan file: it has no format, a plan's is 'shardplan-plan'"),
        (b'{"format": "shardplan-cluster", "version": 1}', "this is no plan file: its format is 'shardplan-cluster'"),
        (PLAN.dumps().encode()[:3000], "the file ends in the middle.\n  way out: save the plan again"),
        (PLAN.dumps().replace('"gap": 0.004', '"gap": NaN').encode(), "damaged: NaN is no number that a plan may hold"),
        (PLAN.dumps().replace('"gap": 0.004', '"gap": 1e999').encode(), "gap: expected `float` <= 1e+300"),
        (PLAN.dumps().replace('"gap": 0.004', '"gap": ' + "9" * 9999).encode(), "a number of thousands of digits"),
        (PLAN.dumps().replace('"gap": 0.004', '"gap": 0, "gap": 1').encode(), "damaged: 'gap' stands twice in one object"),
        (PLAN.dumps().replace('"gap": 0.004', '"gap" 0.004').encode(), "damaged at line 57, column 9: Expecting ':' delimiter"),
        (b'{"format": "shardplan-plan", "version": 1, "mesh": ' + b"[" * 200_000, "no plan file: it nests too deeply"),
    ],
    ids=lambda v: "made" if callable(v) else str(v)[:30],
)
def test_files_that_are_no_plans(tmp_path, raw, text):
    path = tmp_path / "plan.json"
    path.write_bytes(raw)
    with pytest.raises(PlanFileError) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert text in str(error.value)


def test_a_plan_cut_anywhere_is_refused(tmp_path):
    text, path = PLAN.dumps(), tmp_path / "plan.json"
    for n in range(1, len(text) - 2, len(text) // 60):
        path.write_text(text[:n])
        with pytest.raises(PlanFileError):
            Plan.load(path)


def test_a_path_that_is_no_file_is_named(tmp_path):
    with pytest.raises(PlanFileError, match=r"missing.json: cannot be read: No such file"):
        Plan.load(tmp_path / "missing.json")
    with pytest.raises(PlanFileError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)


def test_a_giant_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(planfile, "MAX_FILE_BYTES", 1000)
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="the most a plan file may have"):
        Plan.load(tmp_path / "plan.json")


def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    before = path.read_bytes()

    def crash(*_):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(PlanFileError, match=r"plan.json: cannot be written: disk gone"):
        transformer(layers=2).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in Path(tmp_path).iterdir()] == ["plan.json"]


def test_a_plan_file_is_stable_text():
    assert transformer().dumps() == PLAN.dumps()
    assert not any(math.isinf(x) for x in VALUE["seconds"].values())
    lines = PLAN.dumps().splitlines()
    assert sum('"layout"' in line for line in lines) == len(VALUE["inputs"]) + len(VALUE["outputs"])  # one line each


# ---- leaves by pattern


def paths(*rows: str) -> list[str]:
    return [x["path"] for x in unfolded([{"path": path} for path in rows])]


@pytest.mark.parametrize(
    ("rows", "leaves"),
    [
        (["a/b"], ["a/b"]),
        (["h/{0..2}/w"], ["h/0/w", "h/1/w", "h/2/w"]),
        (["{mu,nu}/h{1,3..5}"], ["mu/h1", "mu/h3", "mu/h4", "mu/h5", "nu/h1", "nu/h3", "nu/h4", "nu/h5"]),
        (["h/{0,1}/a", "h/{0,1}/b", "h/c"], ["h/0/a", "h/0/b", "h/1/a", "h/1/b", "h/c"]),
        (["{m,n}/{0,1}/a", "{m,n}/{0,1}/b", "{m,n}/c"], [f"{x}/{y}" for x in "mn" for y in ("0/a", "0/b", "1/a", "1/b", "c")]),
        (["a{{0..2}}", "{{{0..2}}}"], ["a{0..2}", "{0}", "{1}", "{2}"]),
        (["norm{,2}/w"], ["norm/w", "norm2/w"]),
        (["{3..2}"], ["3..2"]),
    ],
)
def test_rows_that_begin_alike_are_read_together_name_by_name(rows, leaves):
    assert paths(*rows) == leaves


NAMES = st.sampled_from(
    ["0", "1", "2", "10", "11", "007", "w", "b", "h_0", "h_1", "h_2", "h_10", "", "a{b", "x}", "1,2", "3..5", "a/b"]
)
"""Of dict keys; two more are "a" and "a/b", which other dicts spell the same."""
TREES = st.recursive(st.sampled_from([0, 1]), lambda inner: st.lists(st.tuples(NAMES, inner), max_size=4), max_leaves=24)


def leaves_of(tree, path=()):
    """Leaves in flat order, of a tree in which no dict has a key twice."""
    if isinstance(tree, int):
        return [{"path": "/".join(path), "shape": [tree]}]
    return [leaf for key, inner in dict(tree).items() for leaf in leaves_of(inner, (*path, key))]


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(TREES)
def test_the_rows_of_any_tree_are_its_leaves_in_order(tree):
    leaves = leaves_of(tree)
    rows = folded(leaves)
    assert unfolded(rows) == leaves and len(rows) <= len(leaves)


@pytest.mark.parametrize(
    ("leaves", "rows"),
    [
        ([f"layer_{n}_kernel" for n in range(1_400)], 1),
        ([f"params/{2 * n}" for n in range(3_000)], 1),
        (["/".join("a" * 500)], 1),
        ([f"{n}/{'x' * 90_000}" for n in range(400)], 400),  # larger than what may be written by pattern
    ],
)
def test_many_and_deep_leaves_are_written(leaves, rows):
    leaves = [{"path": path, "shape": [1]} for path in leaves]
    assert len(folded(leaves)) == rows and unfolded(folded(leaves)) == leaves


def test_numbers_of_other_types_are_kept_apart():
    leaves = [{"path": "a", "x": 1}, {"path": "b", "x": True}, {"path": "c", "x": 1.0}]
    assert [type(row["x"]) for row in folded(leaves)] == [int, bool, float]


def test_layers_that_are_alike_are_one_row():
    layer = [("attention", [("b", 1), ("w", 0)]), ("norm1", 1), ("norm2", 1)]
    state = [("params", [("layers", [(str(n), layer) for n in range(48)]), ("table", 0)])]
    rows = [x["path"] for x in folded(leaves_of([("mu", state), ("nu", state), ("step", 1)]))]
    kinds = ("layers/{0..47}/attention/b", "layers/{0..47}/attention/w", "layers/{0..47}/norm{1,2}", "table")
    assert rows == [*(f"{{mu,nu}}/params/{kind}" for kind in kinds), "step"]


def test_a_file_of_version_3_has_plain_paths():
    value = {**SMALL, "version": 3, "inputs": [{**x, "path": "a{0,1}"} for x in SMALL["inputs"][:1]]}
    assert [x.path for x in validate(value).inputs] == ["a{0,1}"]
    assert [x.path for x in validate({**value, "version": 4}).inputs] == ["a0", "a1"]


@pytest.mark.parametrize("path", ["a{0", "a}b", "{a{b}}", "{a}" * 40])
def test_what_is_no_pattern_is_refused(path):
    assert re.search(r"inputs: .* is no pattern of paths\.\n  way out: ", refused(changed("inputs", UP, "path", to=path)))


@pytest.mark.parametrize("path", ["{0..99999999}", "{0..999}/{0..999}/{0..999}", "x" * 20_000 + "{0..9999}", "{0..9999}" + "{a}" * 9])
def test_patterns_that_name_too_much_are_refused_before_they_are_read(path):
    start = time.process_time()
    assert "inputs: the paths name arrays of more than 10 MB of text" in refused(changed("inputs", UP, "path", to=path))
    assert time.process_time() - start < 5
