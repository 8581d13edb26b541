"""The command line: plan a step without devices, show and compare plan files, check them against XLA.

    shardplan plan train.py:example --mesh data=2,model=4 --cluster h100 -o plan.json --html plan.html
    shardplan show plan.json
    shardplan diff plan.json other.json
    shardplan check plan.json train.py:example --target h100:8 --tolerance 0.1 --markdown

What `plan` and `check` are given is a function without parameters that returns the step and what it is called with, arrays or
`jax.ShapeDtypeStruct`s: `return train_step, (state, batch)` or `return train_step, state, batch`.

Exit status: 0 all is well; 1 `diff` found differences or `check` found faults; 2 an error, reported in one message.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import jax

from shardplan import __version__
from shardplan.api import Auto, auto
from shardplan.errors import ShardingError, ShardingWarning
from shardplan.files import write_atomically
from shardplan.plan import Plan, io
from shardplan.plan.program import differences_of_plans
from shardplan.searches import SEARCHES
from shardplan.units import format_seconds
from shardplan.view.values import VIEWERS, diff_values, fact_values, plan_values, report_markdown, report_values, rule_values, to_json
from shardplan.words import UsageError, amount, compiler_options, numbers, parse_mesh, parse_pin, positive
from shardplan.xla.report.check import PlanReport
from shardplan.xla_model.facts import facts, facts_text

SAME, DIFFERENT, ERROR = 0, 1, 2
NOT_OF_USER = (f"{Path(__file__).parent}{os.sep}", "<", os.path.dirname(os.__file__))
"""File names of this package, of code without a file, and of the standard library begin so."""

EXAMPLES = {
    "plan": """job.py:example --mesh data=2,model=4 --cluster h100 -o plan.json
job.py:example --mesh data=8 --cluster a100 --memory 40GB --pin 'state/**/up=None,data' --html plan.html
job.py:example --mesh data=8,model=8 --cluster h100 --perfetto trace.json --brief --json""",
    "show": "plan.json --json",
    "diff": "plan.json other.json",
    "check": """job.py:example --target h100:8 --fail-on memory,remat
plan.json job.py:example --target h100:8 --tolerance 0.1 --max-seconds 0.02 --markdown""",
    "rules": "--json",
    "facts": "combine-threshold",
}
"""Command -> arguments that its help gives as examples."""


USER_ERRORS = UsageError, ShardingError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n  see: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without "µ" shows "?"
    _stay_on_cpu()
    try:
        if argv[:1] == ["solve"]:
            return _solve(argv[1:])
        options = _parser().parse_args(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            warnings.simplefilter("always", ShardingWarning)
            return options.run(options) or SAME
    except USER_ERRORS as error:
        print(f"shardplan: {error}", file=sys.stderr)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return SAME
    except KeyboardInterrupt:
        print("shardplan: interrupted", file=sys.stderr)
        return 130
    return ERROR


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    name = "" if issubclass(category, ShardingWarning) else f"{category.__name__}: "
    print(f"shardplan: warning: {name}{message}", file=sys.stderr)


# ---- arguments


def _parser() -> argparse.ArgumentParser:
    as_written, examples = argparse.RawDescriptionHelpFormatter, _examples("plan", "show", "diff", "check")
    parser = _Parser("shardplan", None, "Plans how a JAX step is sharded over a device mesh.", examples, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=f"shardplan {__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, parser_class=_Parser)

    plan = _command(commands, "plan", _plan, "plan a step; needs no devices")
    _add_target(plan)
    plan.add_argument("--mesh", required=True, metavar="AXIS=N,...", help="mesh axes, major to minor, e.g. data=2,model=4")
    plan.add_argument("--cluster", metavar="NAME", help="prices: a preset (h100, a100, ...) or a cluster file; default: this machine")
    plan.add_argument("--memory", metavar="BYTES", help="budget per device, e.g. 80GB, slight or disable; default: what the device has")
    plan.add_argument("--search", choices=SEARCHES, help="default: ilp")
    plan.add_argument("--time-limit", type=positive, metavar="S", help="seconds for the search; default: by counted work")
    pin = "e.g. 'params/**/kernel=None,model'; * leaves a dim free, data+model shards one dim over both"
    plan.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help=pin)
    donate = "numbers of donated arguments, as donate_argnums"
    plan.add_argument("--donate", dest="donate_argnums", type=numbers, metavar="N,...", help=donate)
    given = "of XLA, on GPUs: auto (the default) chooses, none leaves XLA alone, or e.g. xla_gpu_enable_pipelined_all_gather=true"
    plan.add_argument("--compiler-options", type=compiler_options, metavar="NAME=VALUE,...", help=given)
    plan.add_argument("--state-like", metavar="FILE", help="plan file of another step, whose layouts of the shared state are kept")
    plan.add_argument("--pad-state", action="store_true", default=None, help="hold state that does not divide padded where that pays")
    plan.add_argument("--cache", metavar="FOLDER", help="folder of plans: take the plan from there, or keep it there")
    plan.add_argument("-o", "--output", metavar="FILE", help="save the plan as JSON")
    _add_views(plan)
    for name, what in VIEWERS.items():
        plan.add_argument(f"--{name.replace('_', '-')}", metavar="FILE", help=what)

    show = _command(commands, "show", lambda options: _print(Plan.load(options.file), options), "print a plan file")
    show.add_argument("file")
    _add_views(show)

    diff = _command(commands, "diff", _diff, "what the second plan shards otherwise; exit status 1 if anything")
    diff.add_argument("a")
    diff.add_argument("b")
    _add_json(diff)

    check = _command(commands, "check", _check, "what XLA makes of a step as it is sharded or planned; exit status 1 on a fault")
    check.add_argument(
        "plan", nargs="?", metavar="plan.json", help="a plan of the step: stale plans fail, and XLA's program is compared"
    )
    _add_target(check)
    check.add_argument("--target", metavar="GPU:N", help="GPUs, present or not, e.g. h100:8 or h100:8x8; default: devices at hand")
    check.add_argument("--max-bytes", type=amount, metavar="BYTES", help="most that collectives may move per device and step")
    check.add_argument("--max-memory", type=amount, metavar="BYTES", help="most memory that a device may need")
    check.add_argument("--fail-on", default="", metavar="WORD,...", help="remat, memory, replicated, twice, guess")
    more = "part by which XLA's program may send or hold more than planned, e.g. 0.1"
    check.add_argument("--tolerance", type=positive, metavar="PART", help=f"with a plan: {more}")
    check.add_argument(
        "--max-seconds", type=positive, metavar="S", help="with a plan: most seconds that the step may be predicted to take"
    )
    check.add_argument("--markdown", action="store_true", help="print Markdown, for a comment of continuous integration")
    _add_json(check)

    _add_json(_command(commands, "rules", _rules, "print the rule of every primitive"))
    known = _command(commands, "facts", _facts, "print what the planner takes XLA for GPU to do")
    known.add_argument("id", nargs="?", help="print one fact in full: source, flag, versions, test")
    _add_json(known)
    commands.add_parser("solve", help="solve an instance of the public IOPDDL benchmark", add_help=False)
    return parser


def _command(commands, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    description = text[0].upper() + text[1:] + "."
    parser = commands.add_parser(
        name, help=text, description=description, epilog=_examples(name), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def _examples(*names: str) -> str:
    return "\n".join(["examples:", *(f"  shardplan {name} {words}" for name in names for words in EXAMPLES[name].splitlines())])


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON: seconds of a step, bytes per device")


def _add_target(parser: argparse.ArgumentParser) -> None:
    takes = "or file.py:function; it takes nothing and returns (step, args) or (step, arg, ...)"
    parser.add_argument("step", metavar="module:function", help=takes)
    parser.add_argument("--traceback", action="store_true", help="show where an error in the step comes from")


def _add_views(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--brief", action="store_true", help="print the summary only")
    _add_json(parser)


# ---- the commands


def _plan(options: argparse.Namespace) -> None:
    axes = parse_mesh(options.mesh)
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    names = "cluster", "memory", "search", "time_limit", "donate_argnums", "state_like", "pad_state", "cache"
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.compiler_options:
        asked["compiler_options"] = options.compiler_options[0]
    if options.pin:
        pins = [*map(parse_pin, options.pin)]
        asked["pins"] = dict(pins)
        if twice := [path for n, (path, _) in enumerate(pins) if path in dict(pins[:n])]:
            raise UsageError(f"--pin {twice[0]}: stands twice.\n  way out: one spec for each path, its entries separated by commas")
    step, args = _step(options)
    if not isinstance(step, Auto):
        planned = auto(mesh, **asked)(step)
    else:  # its own options stand where the command line has none
        pins = {**(step.options.pins or {}), **asked.pop("pins", {})}
        planned = step.with_options(mesh=mesh, plan=None, pins=pins, **asked)
    with _blamed(options, "planning"):
        plan = planned.plan(*args)
    if options.output:
        _write(options.output, io.dumps(plan.with_baselines()))
    _print(plan, options)


def _diff(options: argparse.Namespace) -> int:
    diff = Plan.load(options.a).diff(Plan.load(options.b))
    print(to_json(diff_values(diff)) if options.json else str(diff).rstrip("\n"))
    return DIFFERENT if diff else SAME


def _check(options: argparse.Namespace) -> int:
    words = tuple(w.strip() for w in options.fail_on.split(",") if w.strip())
    limits: dict[str, Any] = dict(max_bytes=options.max_bytes, max_memory=options.max_memory, fail_on=words)
    step, args = _step(options)
    if options.plan is None:
        if options.tolerance is not None or options.max_seconds is not None:
            raise UsageError("--tolerance and --max-seconds compare with a plan.\n  way out: shardplan check plan.json " + options.step)
        from shardplan.xla.report.check import check

        with _blamed(options, "checking"):
            report = check(step, *args, target=options.target, **limits)
    else:
        report = _checked_plan(options, Plan.load(options.plan), step, args, limits)
    if options.json:
        print(to_json(report_values(report)))
    else:
        print(report_markdown(report, f"{options.plan or ''} {options.step}".strip()) if options.markdown else report)
    return SAME if report.ok else DIFFERENT


def _checked_plan(options: argparse.Namespace, plan: Plan, step: Callable, args: tuple, limits: dict[str, Any]) -> PlanReport:
    """The report on a step as a plan file says; a plan of another step, and a slow one, are failures, too."""
    mesh = jax.sharding.AbstractMesh(plan.mesh.sizes, plan.mesh.axes)
    if isinstance(step, Auto):
        planned = step.with_options(mesh=mesh, plan=plan)
    else:
        planned = auto(mesh, plan=plan, donate_argnames=[name for name in plan.donated if "/" not in name] or None)(step)
    with _blamed(options, "checking"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ShardingWarning)  # what they say of another step is a failure here
        found = planned.plan(*args)
        report = found.check(options.target, tolerance=options.tolerance, **limits)
    failures = [f"the plan is for another step: {text}" for text in differences_of_plans(plan, found)] if found.context.planned else []
    took = found.seconds["total"]
    if options.max_seconds is not None and took > options.max_seconds:
        failures.append(f"the step is predicted to take {format_seconds(took)}, more than {format_seconds(options.max_seconds)}")
    return replace(report, report=replace(report.report, failures=(*report.failures, *failures)))


def _facts(options: argparse.Namespace) -> None:
    try:
        some = facts().values() if options.id is None else [facts()[options.id]]
        print(to_json(fact_values(some)) if options.json else facts_text(options.id))
    except KeyError:
        raise ShardingError(f"there is no fact {options.id!r}.\n  facts: {', '.join(facts())}") from None


def _rules(options: argparse.Namespace) -> None:
    text = (Path(__file__).parent / "strategies" / "rules.txt").read_text()
    print(to_json(rule_values(text)) if options.json else text.rstrip("\n"))


def _solve(argv: list[str]) -> int:
    from shardplan.ilp.solver import iopddl

    try:
        return iopddl.main(argv) or SAME
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UsageError(f"this is no instance of the IOPDDL benchmark ({type(error).__name__}: {error})") from None


def _print(plan: Plan, options: argparse.Namespace) -> None:
    if options.html:
        _write(options.html, plan.html())
    for name in [name for name in VIEWERS if getattr(options, name, None)]:
        getattr(plan, f"to_{name}")(getattr(options, name))
    print(to_json(plan_values(plan, options.brief)) if options.json else plan if options.brief else plan.explain().rstrip("\n"))


def _write(path: str, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}.\n  way out: a file in a folder that exists") from None
    print(f"wrote {path}", file=sys.stderr)


def _stay_on_cpu() -> None:
    """Keeps JAX from looking for devices, which no command needs, unless the user chose a platform."""
    if not os.environ.get("JAX_PLATFORMS") and not getattr(jax.config, "jax_platforms", None):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for child processes
        jax.config.update("jax_platforms", "cpu")


# ---- the step


def _step(options: argparse.Namespace) -> tuple[Callable, tuple]:
    """The step and its arguments, from the function that the user named."""
    make = _function(options)
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(make).parameters.values()
        if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
            raise UsageError(
                f"{options.step} takes {', '.join(needed)}.\n"
                "  way out: name a function that takes nothing and returns (step, args), args being arrays or ShapeDtypeStructs"
            )
    with _blamed(options, options.step):
        made = make()
    if not isinstance(made, (tuple, list)) or len(made) < 2 or not callable(made[0]):
        raise UsageError(
            f"{options.step} returned {type(made).__name__}, not a step with its arguments.\n"
            "  way out: return train_step, (state, batch)"
        )
    step, *rest = made
    args = tuple(rest[0]) if len(rest) == 1 and type(rest[0]) in (tuple, list) else tuple(rest)
    with contextlib.suppress(ValueError):  # a step without a signature
        signature = inspect.signature(step)
        try:
            signature.bind(*args)
        except TypeError as error:
            given = f"{len(args)} argument{'s' * (len(args) != 1)}"
            raise UsageError(
                f"{options.step} returned a step that takes {', '.join(signature.parameters)} and {given} for it: {error}.\n"
                "  way out: return train_step, (state, batch)"
            ) from None
    return step, args


def _function(options: argparse.Namespace) -> Callable:
    where, colon, name = options.step.rpartition(":")
    if not colon or not where or not name:
        plan = options.step.endswith(".json")
        step = f"the step as well: {options.step} job.py:example" if plan else "module:function or path/to/file.py:function"
        raise UsageError(f"{options.step!r} names no function.\n  way out: {step}")
    with _blamed(options, where):
        module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), module)
    if not callable(found):
        some = [n for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]
        raise UsageError(
            f"{where} has no function {name!r}.\n"
            + (f"  it has: {', '.join(some[:8])}" if some else "  way out: one that takes nothing and returns (step, args)")
        )
    return found


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file.\n  way out: a path from here, {os.getcwd()}")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"no module {error.name!r} here or among the installed ones.\n  way out: path/to/file.py:function, or PYTHONPATH"
            ) from None
        raise


@contextlib.contextmanager
def _blamed(options: argparse.Namespace, what: str):
    """Turns errors of the user's own code into one message with the line that they come from."""
    try:
        yield
    except USER_ERRORS:
        raise
    except (Exception, SystemExit) as error:
        if options.traceback:
            traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        files = ((f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__))
        lines = [(file, n) for file, n in files if not file.startswith(NOT_OF_USER) and "site-packages" not in file]
        at = f" at {Path(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""
        hint = "" if options.traceback else "\n  --traceback shows more"
        raise UsageError(f"{what} failed{at}: {type(error).__name__}{f': {text}' if text else ''}{hint}") from None
