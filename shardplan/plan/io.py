"""Which files are plans: read as data only, bounded in size, and checked field by field before anything uses them.

    inputs['state/w'].layout[1]: axis 'modle' is not in mesh data=2, model=4

Each function below reads one kind of value at one place (`at`, as a person would write it) or raises `_Wrong` naming the place.
What the published schema (`plan.schema.json`) can say is said there too; what needs the mesh or the shape is said only here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardplan.errors import PlanFileError
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.plan.data import (
    FORMAT,
    MAX_FILE_BYTES,
    SEARCHES,
    VERSION,
    Leaf,
    MemoryReport,
    Plan,
    PlanDecision,
    PlannedCollective,
    PlannedReshard,
    SourceLine,
)

STATUSES = ("optimal", "feasible", "fallback")
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "slice")
REDUCTIONS = ("sum", "max", "min", "prod", "and", "or")
LARGEST_INT = 2**53
SCHEMA = Path(__file__).parent / "plan.schema.json"


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        PlanFileError: naming the file and the field that is wrong.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as f:
            raw = f.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PlanFileError(f"{name}: cannot be read: {error.strerror}.\n  way out: the path that plan.save() wrote") from None
    if len(raw) > MAX_FILE_BYTES:
        raise PlanFileError(f"{name}: larger than {MAX_FILE_BYTES / 1e6:.0f} MB, the most a plan file may have")
    try:
        return _plan(_json(raw))
    except _Wrong as wrong:
        raise PlanFileError(f"{name}: {wrong}") from None


def validate(value: Any) -> None:
    """Checks the JSON values of a plan, as `Plan.to_json` makes them.

    Raises:
        PlanFileError: naming the field that is wrong.
    """
    try:
        _plan(value)
    except _Wrong as wrong:
        raise PlanFileError(str(wrong)) from None


class _Wrong(Exception):
    def __init__(self, at: str, what: str):
        super().__init__(f"{at}: {what}" if at else what)


# ---- bytes to JSON values


def _json(raw: bytes) -> Any:
    if not raw.strip():
        raise _Wrong("", "the file is empty.\n  way out: save the plan again")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_object_once, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise _Wrong("", "this is no plan file: it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        if raw.lstrip()[:1] != b"{":
            raise _Wrong("", "this is no plan file: it is not JSON") from None
        cut = "the file ends in the middle" if error.pos >= len(error.doc.rstrip()) or "Unterminated" in error.msg else error.msg
        raise _Wrong("", f"damaged at line {error.lineno}, column {error.colno}: {cut}.\n  way out: save the plan again") from None
    except RecursionError:
        raise _Wrong("", "this is no plan file: it nests too deeply") from None
    except ValueError:
        raise _Wrong("", "this is no plan file: it holds a number of thousands of digits") from None


def _object_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise _Wrong("", f"damaged: {_short(twice)} stands twice in one object")
    return found


def _no_constant(name: str):
    raise _Wrong("", f"damaged: {name} is no number that a plan may hold")


# ---- one kind of value each


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True, default=repr) if not isinstance(value, str) else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _name(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}.get(type(value), "a number")


def _fail(at: str, value: Any, wanted: str):
    what = f"{_name(value)}" if isinstance(value, (dict, list)) or value is None else _short(value)
    raise _Wrong(at, f"{what} is not {wanted}")


def _object(value: Any, at: str, fields: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(at or "the file", value, "an object")
    if fields is not None:
        dot = f"{at}." if at else ""
        for name in fields:
            if name not in value:
                raise _Wrong(f"{dot}{name}", "is missing")
        for name in value:
            if name not in fields:
                raise _Wrong(at or "the file", f"has a field {_short(name)} that plan files do not have")
    return value


def _list(value: Any, at: str, length: int | None = None, longest: int | None = None) -> list:
    if not isinstance(value, list):
        _fail(at, value, "a list")
    if length is not None and len(value) != length:
        raise _Wrong(at, f"has {len(value)} entries, not {length}")
    if longest is not None and len(value) > longest:
        raise _Wrong(at, f"has {len(value)} entries, more than {longest}")
    return value


def _items(value: Any, at: str, item: Callable[[Any, str], Any]) -> tuple:
    return tuple([item(x, f"{at}[{n}]") for n, x in enumerate(_list(value, at))])


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        _fail(at, value, "text")
    if any("\ud800" <= c <= "\udfff" for c in value):
        _fail(at, value, "text in Unicode")
    return value


def _filled(value: Any, at: str) -> str:
    if not _text(value, at):
        _fail(at, value, "a name")
    return value


def _one_of(words: tuple[str, ...]) -> Callable[[Any, str], str]:
    def item(value: Any, at: str) -> str:
        if not isinstance(value, str) or value not in words:
            _fail(at, value, "one of " + ", ".join(words))
        return value

    return item


def _number(value: Any, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _fail(at, value, "a number")
    if not 0 <= value <= 1e300:  # NaN is neither
        _fail(at, value, "a finite number of at least 0")
    return value


def _bool(value: Any, at: str) -> bool:
    if not isinstance(value, bool):
        _fail(at, value, "true or false")
    return value


def _int(least: int) -> Callable[[Any, str], int]:
    def item(value: Any, at: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST_INT:
            _fail(at, value, f"a whole number of at least {least}")
        return value

    return item


def _amounts(value: Any, at: str) -> dict[str, float]:
    return {_filled(k, at): _number(x, f"{at}[{_short(k)}]") for k, x in _object(value, at).items()}


# ---- the plan

FIELDS = (
    "format", "version", "mesh", "cluster", "search", "status", "gap", "tied", "seconds", "memory", "fingerprint",
    "donated", "inputs", "outputs", "unknown", "lines", "decisions",
)  # fmt: skip


def _plan(value: Any) -> Plan:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        said = f"its format is {_short(value['format'])}" if isinstance(value, dict) and "format" in value else "it has no format"
        raise _Wrong("", f"this is no plan file: {said}, a plan's is {FORMAT!r}")
    version = _int(1)(value.get("version"), "version")
    if version > VERSION:
        raise _Wrong(
            "version", f"{version} is newer than this shardplan reads ({VERSION}).\n  ways out: a newer shardplan, or plan anew"
        )
    _object(value, "", FIELDS)
    mesh = _mesh(value["mesh"], "mesh")
    return Plan(
        mesh=mesh,
        cluster=_text(value["cluster"], "cluster"),
        inputs=_leaves(value["inputs"], "inputs", mesh),
        outputs=_leaves(value["outputs"], "outputs", mesh),
        decisions=_decisions(value["decisions"], "decisions", mesh),
        seconds=_seconds(value["seconds"], "seconds"),
        status=_one_of(STATUSES)(value["status"], "status"),
        gap=_number(value["gap"], "gap"),
        symmetric_layers=_bool(value["tied"], "tied"),
        memory_report=_memory(value["memory"], "memory"),
        search=_one_of(SEARCHES)(value["search"], "search"),
        fingerprint=_filled(value["fingerprint"], "fingerprint"),
        donated=_items(value["donated"], "donated", _text),
        lines=_items(value["lines"], "lines", _line),
        unknown=_items(value["unknown"], "unknown", _unknown),
    )


def _mesh(value: Any, at: str) -> MeshShape:
    _object(value, at, ("axes", "sizes"))
    axes = _items(value["axes"], f"{at}.axes", _filled)
    sizes = _items(_list(value["sizes"], f"{at}.sizes", len(axes)), f"{at}.sizes", _int(1))
    for n, axis in enumerate(axes):
        if axis in axes[:n]:
            raise _Wrong(f"{at}.axes[{n}]", f"axis {_short(axis)} stands twice")
    if math.prod(sizes) > LARGEST_INT:
        raise _Wrong(f"{at}.sizes", f"no mesh has {math.prod(sizes):.3g} devices")
    return MeshShape(axes, sizes)


def _seconds(value: Any, at: str) -> dict[str, float]:
    names = ("compute", "communication", "hidden", "total", "bound")
    return {k: _number(x, f"{at}.{k}") for k, x in _object(value, at, names).items()}


def _memory(value: Any, at: str) -> MemoryReport:
    _object(value, at, ("peak", "limit", "where", "at_peak", "profile"))
    return MemoryReport(
        peak=_number(value["peak"], f"{at}.peak"),
        limit=None if value["limit"] is None else _number(value["limit"], f"{at}.limit"),
        where=_text(value["where"], f"{at}.where"),
        at_peak=_amounts(value["at_peak"], f"{at}.at_peak"),
        profile=_items(_list(value["profile"], f"{at}.profile", longest=1000), f"{at}.profile", _amounts),
    )


def _unknown(value: Any, at: str) -> tuple[str, str]:
    primitive, source = _items(_list(value, at, 2), at, _text)
    return primitive, source


def _line(value: Any, at: str) -> SourceLine:
    _object(value, at, ("file", "line", "code", "seconds"))
    return SourceLine(
        file=_text(value["file"], f"{at}.file"),
        line=_int(0)(value["line"], f"{at}.line"),
        code=_text(value["code"], f"{at}.code"),
        seconds=_number(value["seconds"], f"{at}.seconds"),
    )


def _leaves(value: Any, at: str, mesh: MeshShape) -> tuple[Leaf, ...]:
    return tuple(_leaf(path, x, f"{at}[{_short(path)}]", mesh) for path, x in _object(value, at).items())


def _leaf(path: str, value: Any, at: str, mesh: MeshShape) -> Leaf:
    _text(path, at)
    _object(value, at, ("shape", "dtype", "layout", "kind"))
    shape = _items(value["shape"], f"{at}.shape", _int(0))
    if isinstance(value["layout"], dict):
        raise _Wrong(f"{at}.layout", "is partial, which what goes in or out of a step cannot be")
    layout = _layout(value["layout"], f"{at}.layout", mesh)
    if layout.rank != len(shape):
        raise _Wrong(f"{at}.layout", f"has {layout.rank} dims, the array {len(shape)}")
    for d, (n, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        if n % mesh.size(*axes):
            raise _Wrong(f"{at}.layout[{d}]", f"{mesh.size(*axes)} shards over {', '.join(axes)} do not divide {n}")
    return Leaf(path, shape, _filled(value["dtype"], f"{at}.dtype"), layout, _text(value["kind"], f"{at}.kind"))


def _layout(value: Any, at: str, mesh: MeshShape) -> Layout:
    partial: tuple[tuple[str, str], ...] = ()
    used: dict[str, str] = {}
    if isinstance(value, dict):
        _object(value, at, ("dims", "partial"))
        dims = _dims(value["dims"], f"{at}.dims", mesh, used)
        partial = _items(value["partial"], f"{at}.partial", lambda x, where: _partial(x, where, mesh, used))
        if list(partial) != sorted(partial):
            raise _Wrong(f"{at}.partial", "is not in the order of axis names")
    else:
        dims = _dims(value, at, mesh, used)
    return Layout(dims, partial)


def _dims(value: Any, at: str, mesh: MeshShape, used: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    return _items(value, at, lambda axes, where: _items(axes, where, lambda a, _: _axis(a, where, mesh, used)))


def _partial(value: Any, at: str, mesh: MeshShape, used: dict[str, str]) -> tuple[str, str]:
    axis, kind = _list(value, at, 2)
    return _axis(axis, at, mesh, used), _one_of(REDUCTIONS)(kind, f"{at}[1]")


def _axis(value: Any, at: str, mesh: MeshShape, used: dict[str, str] | None) -> str:
    _text(value, at)
    if value not in mesh.axes:
        raise _Wrong(at, f"axis {_short(value)} is not in mesh {mesh}")
    if used is not None:
        if value in used:
            raise _Wrong(at, f"axis {_short(value)} is used twice, also at {used[value]}")
        used[value] = at
    return value


DECISION = (
    "op", "file", "line", "function", "primitive", "occurrence", "phase", "result", "runs", "seconds", "strategy", "reads", "copies",
    "results", "moves",
)  # fmt: skip


def _decisions(value: Any, at: str, mesh: MeshShape) -> tuple[PlanDecision, ...]:
    found = _items(value, at, lambda x, where: _decision(x, where, mesh))
    for n in range(1, len(found)):
        if found[n].op <= found[n - 1].op:
            raise _Wrong(f"{at}[{n}].op", f"{found[n].op} does not come after {found[n - 1].op}, the op decided before")
    return found


def _decision(value: Any, at: str, mesh: MeshShape) -> PlanDecision:
    _object(value, at, DECISION)

    def layout(x: Any, where: str) -> Layout:
        return _layout(x, where, mesh)

    return PlanDecision(
        file=_text(value["file"], f"{at}.file"),
        line=_int(0)(value["line"], f"{at}.line"),
        function=_text(value["function"], f"{at}.function"),
        primitive=_filled(value["primitive"], f"{at}.primitive"),
        occurrence=_int(0)(value["occurrence"], f"{at}.occurrence"),
        phase=_text(value["phase"], f"{at}.phase"),
        strategy=_strategy(value["strategy"], f"{at}.strategy", mesh),
        operand_layouts=_items(value["reads"], f"{at}.reads", lambda chain, where: _items(chain, where, layout)),
        result_layouts=_items(value["results"], f"{at}.results", lambda x, where: None if x is None else layout(x, where)),
        reshards=_items(value["moves"], f"{at}.moves", lambda x, where: _move(x, where, mesh)),
        seconds=_number(value["seconds"], f"{at}.seconds"),
        runs=_number(value["runs"], f"{at}.runs"),
        result_type=_text(value["result"], f"{at}.result"),
        op=_int(0)(value["op"], f"{at}.op"),
        copy_numbers=_items(value["copies"], f"{at}.copies", _int(-1)),
    )


def _strategy(value: Any, at: str, mesh: MeshShape) -> Mapping[str, str]:
    return {_axis(k, at, mesh, None): _text(x, f"{at}[{_short(k)}]") for k, x in _object(value, at).items()}


def _move(value: Any, at: str, mesh: MeshShape) -> PlannedReshard:
    _object(value, at, ("operand", "value", "before", "after", "collectives", "pins"))
    before, after = (_layout(value[k], f"{at}.{k}", mesh) for k in ("before", "after"))
    if before.rank != after.rank:
        raise _Wrong(f"{at}.after", f"has {after.rank} dims, before has {before.rank}")
    return PlannedReshard(
        operand=_int(0)(value["operand"], f"{at}.operand"),
        array=_text(value["value"], f"{at}.value"),
        before=before,
        after=after,
        collectives=_items(value["collectives"], f"{at}.collectives", lambda x, where: _collective(x, where, mesh)),
        pins=_items(_list(value["pins"], f"{at}.pins", longest=2), f"{at}.pins", _text),
    )


def _collective(value: Any, at: str, mesh: MeshShape) -> PlannedCollective:
    _object(value, at, ("kind", "axes", "bytes", "seconds"))
    used: dict[str, str] = {}
    return PlannedCollective(
        kind=_one_of(COLLECTIVES)(value["kind"], f"{at}.kind"),
        axes=_items(value["axes"], f"{at}.axes", lambda x, where: _axis(x, where, mesh, used)),
        bytes=_number(value["bytes"], f"{at}.bytes"),
        seconds=_number(value["seconds"], f"{at}.seconds"),
    )
