"""The command line: what it prints, writes and returns, and that an error is one message."""

import json
import os
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest
from plans import transformer

from shardplan import cli
from shardplan.cli import main
from shardplan.plan import Plan

pytestmark = pytest.mark.usefixtures("first_plan")

PROGRAM = """\
import jax, jax.numpy as jnp
import shardplan


def step(w, x):
    def loss(w):
        h = jnp.tanh(x @ w["up"])
        return jnp.mean((h @ w["down"]) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, grad), value


def shapes():
    s = jax.ShapeDtypeStruct
    return {"up": s((512, 2048), "float32"), "down": s((2048, 512), "float32")}, s((64, 512), "float32")


def example():
    return step, shapes()


def spread():
    return step, *shapes()


def decorated():
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    return shardplan.auto(mesh, pins={"w/up": jax.sharding.PartitionSpec(None, "model")}, donate_argnums=0)(step), shapes()


def wrong():
    return step


def breaks():
    return undefined_name


def breaks_inside():
    return (lambda w, x: x @ w["up"].T), shapes()


def leaves():
    raise SystemExit("bye")


def unpinned():
    return shardplan.auto(jax.sharding.AbstractMesh((8,), ("x",)))(step), shapes()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)
    yield tmp_path
    sys.modules.pop("program", None)


MESH = ("--mesh", "data=2,model=4", "--cluster", "h100")


def test_plan_prints_and_writes(here, capsys):
    assert main(["plan", "program.py:example", *MESH, "-o", "plan.json", "--html", "plan.html"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("mesh    data=2, model=4 (8 devices), priced as h100\n")
    assert "program.py\n" in said.out
    assert said.err == "wrote plan.json\nwrote plan.html\n"
    plan = Plan.load("plan.json")
    assert [x.path for x in plan.inputs] == ["w/down", "w/up", "x"]
    assert said.out == plan.explain() and "\nsaves   " in said.out
    assert (here / "plan.html").read_text() != plan.html()


@pytest.mark.parametrize("name", ["program:example", "program.py:example", "program.py:spread", "./program.py:example"])
def test_a_step_is_named_by_module_or_file(here, capsys, name):
    assert main(["plan", name, *MESH, "--brief"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_saved_plans_of_real_steps_meet_the_schema(here):
    assert main(["plan", "program.py:example", *MESH, "-o", "plan.json", "--pin", "w/up=None,model", "--brief"]) == 0
    text = (here / "plan.json").read_text()
    jsonschema.Draft202012Validator(Plan.schema()).validate(json.loads(text))
    Plan.load("plan.json").save("again.json")
    assert (here / "again.json").read_text() == text


@pytest.mark.parametrize(
    ("pin", "spec"),
    [
        ("w/up=None,model", (None, "model")),
        ("**/up=data+model", (("data", "model"),)),
        ("w/*=", ()),
        ("a=b/up=model", ("model",)),
        ("w/up=P(None, ('data', 'model'))", (None, ("data", "model"))),
        ("w/up=P()", ()),
        ("w/up=-,*", (None, cli.parse_pin("x=*")[1][0])),
    ],
)
def test_pins_are_written_as_specs(pin, spec):
    assert tuple(cli.parse_pin(pin)[1]) == spec
    assert cli.parse_pin(pin)[0] == pin.rpartition("=")[0]


def test_options_reach_the_planner(here, capsys):
    options = ["--search", "propagation", "--memory", "inf", "--time-limit", "5", "--donate", "0", "--pin", "w/up=model,None"]
    assert main(["plan", "program.py:example", *MESH, *options, "-o", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    assert (plan.search, plan.memory_report.limit) == ("propagation", None)
    assert next(x for x in plan.inputs if x.path == "w/up").layout.dims == (("model",), ())


def test_state_of_another_plan_and_a_folder_of_plans(here, capsys):
    assert main([*PLAN, *MESH, "--pin", "w/up=model,data", "-o", "train.json", "--brief"]) == 0
    assert main([*PLAN, *MESH, "--state-like", "train.json", "--cache", "plans", "-o", "plan.json", "--brief"]) == 0
    plan = Plan.load("plan.json")
    assert next(x for x in plan.inputs if x.path == "w/up").layout.spec() == ("model", "data")
    (kept,) = (here / "plans").iterdir()
    assert Plan.load(kept) == plan
    assert main([*PLAN, *MESH, "--state-like", "train.json", "--cache", "plans", "-o", "again.json", "--brief"]) == 0
    assert Plan.load("again.json") == plan and len([*(here / "plans").iterdir()]) == 1


def test_compiler_options_reach_the_plan(here, capsys):
    def planned(text):
        assert main(["plan", "program.py:example", *MESH, "--compiler-options", text, "-o", "plan.json", "--brief"]) == 0
        return Plan.load("plan.json").compiler_options

    assert planned("none") == {}
    asked = {"xla_gpu_enable_while_loop_double_buffering": True, "xla_gpu_all_gather_combine_threshold_bytes": 4096}
    assert planned("xla_gpu_enable_while_loop_double_buffering=true,xla_gpu_all_gather_combine_threshold_bytes=4096") == asked
    assert main(["plan", "program.py:example", *MESH, "--compiler-options", "fast"]) == 2
    assert "'fast' is none of auto, none and NAME=VALUE,..." in capsys.readouterr().err


def test_a_step_made_by_auto_keeps_its_own_pins(here, capsys):
    assert main(["plan", "program.py:decorated", *MESH, "-o", "plan.json"]) == 0
    plan = Plan.load("plan.json")
    assert plan.mesh.axes == ("data", "model")
    assert next(x for x in plan.inputs if x.path == "w/up").layout.dims == ((), ("model",))
    assert main(["plan", "program.py:decorated", *MESH, "--donate", "1", "-o", "donates.json"]) == 0
    assert Plan.load("donates.json").donated == ("x",)
    assert main(["plan", "program.py:unpinned", *MESH, "--pin", "w/up=model,None", "-o", "plan.json"]) == 0
    assert next(x for x in Plan.load("plan.json").inputs if x.path == "w/up").layout.dims == (("model",), ())


def test_show(here, capsys):
    plan = transformer()
    plan.save("plan.json")
    assert main(["show", "plan.json", "--html", "page.html"]) == 0
    assert capsys.readouterr().out == plan.explain()
    assert (here / "page.html").read_text() == plan.html()
    assert main(["show", "plan.json", "--brief"]) == 0
    assert capsys.readouterr().out == f"{plan}\n"


def test_diff_returns_what_diff_returns(here, capsys):
    transformer().save("a.json")
    transformer(layers=2).save("b.json")
    assert main(["diff", "a.json", "a.json"]) == 0
    assert "the plans shard everything the same way" in capsys.readouterr().out
    assert main(["diff", "a.json", "b.json"]) == 1
    assert "not there" in capsys.readouterr().out
    assert main(["diff", "a.json", "c.json"]) == 2


def values(capsys, *argv, status=0):
    """What a command prints as JSON."""
    capsys.readouterr()
    assert main([*argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_every_command_prints_json_of_the_same_figures(here, capsys):
    planned = values(capsys, "plan", "program.py:example", *MESH, "-o", "plan.json")
    plan = Plan.load("plan.json")
    assert planned["seconds"]["total"] == pytest.approx(plan.seconds["total"], rel=1e-5)
    assert {x["path"]: x["spec"] for x in planned["inputs"]} == {x.path: [*x.layout.spec()] for x in plan.inputs}
    assert sum(c["sent_bytes"] for c in planned["collectives"]) == pytest.approx(plan.comm_bytes, rel=1e-5)
    assert planned["saves"] and values(capsys, "show", "plan.json") == planned
    assert "inputs" not in values(capsys, "show", "plan.json", "--brief")
    assert values(capsys, "diff", "plan.json", "plan.json")["same"] is True
    transformer().save("other.json")
    other = values(capsys, "diff", "plan.json", "other.json", status=1)
    assert other["same"] is False and other["same_program"] is False and other["inputs"] and other["program"]
    assert {x["primitive"] for x in values(capsys, "rules")} >= {"dot_general", "add"}
    (fact,) = values(capsys, "facts", "combine-threshold")
    assert fact["id"] == "combine-threshold" and fact["test"]
    assert len(values(capsys, "facts")) > 50


def test_a_plan_is_checked_in_continuous_integration(here, capsys):
    assert main(["plan", "program.py:example", *MESH, "-o", "plan.json", "--brief"]) == 0
    limits = ["--tolerance", "100", "--max-seconds", "10"]
    found = values(capsys, "check", "plan.json", "program.py:example", *limits)
    plan = Plan.load("plan.json")
    assert found["ok"] and found["plan"]["peak_bytes"] == pytest.approx(plan.memory_report.peak, rel=1e-5)
    assert found["plan"]["sent_bytes"] == pytest.approx(plan.comm_bytes, rel=1e-5) and found["xla"]["peak_bytes"] > 0
    assert main(["check", "plan.json", "program.py:example", "--max-seconds", "1e-9", "--markdown"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("### ❌ plan.json program.py:example\n") and "| per device and step | planned | XLA |" in said
    assert "- ❌ the step is predicted to take " in said and "</details>" in said
    claims = json.loads((here / "plan.json").read_text())
    claims["memory"]["peak"] /= 2
    (here / "claims.json").write_text(json.dumps(claims))
    assert main(["check", "claims.json", "program.py:example", "--tolerance", "0.1"]) == 1
    assert "more than planned" in capsys.readouterr().out


def test_a_stale_plan_fails_the_check(here, capsys):
    assert main(["plan", "program.py:example", *MESH, "-o", "plan.json", "--brief"]) == 0
    (here / "changed.py").write_text(PROGRAM.replace("a - 0.1 * b", "a - jnp.tanh(b)"))
    found = values(capsys, "check", "plan.json", "changed.py:example", status=1)
    assert any(text.startswith("the plan is for another step: ") for text in found["failures"])
    sys.modules.pop("changed", None)


def test_the_version_and_examples_are_printed(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert not done.value.code and re.fullmatch(r"shardplan \d+\.\d+\.\d+, jax \S+\n", capsys.readouterr().out)
    for command, words in cli.EXAMPLES.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert all(f"  shardplan {command} {line}\n" in said for line in words.splitlines())
        for line in words.splitlines():
            cli._parser().parse_args([command, *shlex.split(line)])  # an example is no error


def test_rules(capsys):
    assert main(["rules"]) == 0
    assert "dot_general" in capsys.readouterr().out


def test_check_passes_and_fails(here, capsys):
    (here / "jitted.py").write_text(
        "import jax\ns = jax.ShapeDtypeStruct\ndef f():\n    return jax.jit(lambda x: x @ x), (s((8, 8), 'float32'),)\n"
    )
    assert main(["check", "jitted.py:f"]) == 0
    assert "compiled for" in capsys.readouterr().out
    assert main(["check", "jitted.py:f", "--max-memory", "1B"]) == 1
    assert "more than" in capsys.readouterr().out
    sys.modules.pop("jitted", None)


PLAN = ["plan", "program.py:example"]

WRONG = [
    ([], "the following arguments are required: command"),
    (["frob"], "invalid choice: 'frob'"),
    ([*PLAN], "the following arguments are required: --mesh"),
    ([*PLAN, "--mesh", "data:2"], "--mesh data:2: 'data:2' is no axis with a size.\n  way out: --mesh data=2,model=4"),
    ([*PLAN, "--mesh", "data=0"], "'data=0' is no axis with a size"),
    ([*PLAN, "--mesh", "x=2,x=2"], "axis 'x' stands twice"),
    ([*PLAN, *MESH, "--memory", "lots"], "memory='lots' is no amount of memory"),
    ([*PLAN, *MESH, "--memory", "1MB"], "no plan fits"),
    ([*PLAN, "--mesh", "x=2", "--cluster", "abacus"], "cluster 'abacus' is not known"),
    ([*PLAN, *MESH, "--time-limit", "soon"], "'soon' is no number above 0, such as 0.1"),
    ([*PLAN, *MESH, "--donate", "w"], "'w' is no list of argument numbers"),
    ([*PLAN, *MESH, "--pin", "nothing"], "--pin nothing: has no path and spec"),
    ([*PLAN, *MESH, "--pin", "w/upp=None,model"], "pin 'w/upp' matches no input"),
    ([*PLAN, *MESH, "--pin", "w/up=modle"], "names mesh axis 'modle', the mesh has data=2, model=4"),
    ([*PLAN, *MESH, "-o", "no/where/plan.json"], "no/where/plan.json: cannot be written: No such file or directory"),
    (["plan", "program", *MESH], "'program' names no function.\n  way out: module:function or path/to/file.py:function"),
    (["plan", "absent.py:f", *MESH], "absent.py: no such file"),
    (["plan", "absent_module:f", *MESH], "no module 'absent_module' here"),
    (["plan", "program.py:exampel", *MESH], "program.py has no function 'exampel'.\n  it has: step, shapes, example"),
    (["plan", "program.py:step", *MESH], "program.py:step takes w, x.\n  way out: name a function that takes nothing"),
    (["plan", "program.py:wrong", *MESH], "program.py:wrong returned function, not a step with its arguments"),
    (["plan", "program.py:breaks", *MESH], "program.py:breaks failed at program.py:37: NameError: name 'undefined_name'"),
    (["plan", "program.py:breaks_inside", *MESH], "planning failed at program.py:41: TypeError: dot_general requires"),
    (["plan", "program.py:leaves", *MESH], "program.py:leaves failed at program.py:45: SystemExit: bye"),
    (["show", "missing.json"], "missing.json: cannot be read: No such file or directory"),
    (["show", "program.py"], "program.py: this is no plan file: it is not JSON"),
    (["check", "program.py:example", "--fail-on", "boredom"], "fail_on has 'boredom'"),
    (["check", "program.py:example", "--tolerance", "0.1"], "--tolerance and --max-seconds compare with a plan"),
    (["check", "missing.json", "program.py:example"], "missing.json: cannot be read"),
    (["solve", "missing.json"], "missing.json: cannot be read: No such file"),
]


@pytest.mark.parametrize(("argv", "text"), WRONG, ids=lambda v: " ".join(v)[-40:] if isinstance(v, list) else "")
def test_an_error_is_one_message_and_status_2(here, capsys, argv, text):
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shardplan: ")
    assert text in said.err
    assert "Traceback" not in said.err
    assert said.err.count("shardplan: ") == 1


def test_traceback_shows_more(here, capsys):
    assert main(["plan", "program.py:breaks", *MESH, "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


def run(*argv, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-m", "shardplan", *argv],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        timeout=120,
    )


def test_as_a_program_it_needs_no_devices_and_no_settings(here):
    done = run("plan", "program.py:example", *MESH, "--brief")
    assert done.returncode == 0
    assert done.stdout.startswith("mesh    data=2, model=4 (8 devices)")
    assert done.stderr == ""


def test_a_terminal_without_greek_and_a_reader_that_leaves(here):
    transformer().save("plan.json")
    done = run("show", "plan.json", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    command = f"{sys.executable} -m shardplan show plan.json | head -1"
    piped = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert piped.stdout.startswith("mesh")
    assert piped.stderr == ""
