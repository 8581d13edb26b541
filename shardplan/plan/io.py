"""Plan files: written as diffable JSON, read as data only, bounded in size, and checked before anything uses them.

Types and ranges are those of the records (plan/data.py). Rules that need the mesh or a shape are checked here:

    inputs['state/w'].layout.dims[1]: axis 'modle' is not in mesh data=2, model=4
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from shardplan.errors import PlanFileError
from shardplan.files import read_limited, write_atomically
from shardplan.mesh.layout import REDUCTIONS, Layout, MeshShape
from shardplan.plan.data import VERSION, Leaf, PlanRecord
from shardplan.plan.leaf_patterns import WAY_OUT, folded, unfolded
from shardplan.plan.travel import contract
from shardplan.units import clean, fit, fit_middle, format_bytes

FORMAT = "shardplan-plan"
MAX_FILE_BYTES, MAX_VALUES = 256_000_000, 10_000_000
"""Of GPT-2 small unrolled, 9,525 equations, it has 1.3 MB and 117,687; a value takes up to 100 bytes of memory while it is read."""
MAX_DEVICES = 2**53
LEAVES = ("inputs", "outputs")
"""Fields that are written by pattern (`plan/leaf_patterns.py`)."""
ROWS = (*LEAVES, "lines", "decisions")
"""Fields of which every entry has a line of its own."""
RENAMED = {"reads": "operand_layouts", "copies": "copy_numbers", "results": "result_layouts", "result": "result_type"}
"""Fields of a decision of version 1 that have another name now; "moves" became "reshards", and their "value" "array"."""
SECONDS = {"compute", "communication", "hidden", "total", "bound"}
RANGE, INTERFERENCE = {"low", "high"}, {"interference"}
"""Seconds that files have since plans have a range, and since collectives slow kernels."""

P = TypeVar("P", bound=PlanRecord)


def dumps(plan: PlanRecord) -> str:
    """The JSON text of a plan."""
    fields, found = [], msgspec.to_builtins(plan)
    start = {name: found.pop(name) for name in ("format", "version")}
    found |= {name: folded(found[name]) for name in LEAVES}
    if plan.classical is None:
        del found["baselines"]
    for name, value in (start | {"contract": contract(plan)} | found).items():
        rows = ",\n".join(f"    {json.dumps(row)}" for row in value) if name in ROWS else ""
        fields.append(f"  {json.dumps(name)}: " + (f"[\n{rows}\n  ]" if rows else json.dumps(value)))
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write(path: str | os.PathLike[str], plan: PlanRecord) -> None:
    """Writes a plan whole or not at all."""
    write_text(path, dumps(plan))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes what is made of a plan whole or not at all; a PlanFileError names a file that cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        name = os.fspath(path)
        raise PlanFileError(
            f"{name}: cannot be written: {error.strerror or error}.\n  way out: a file in a folder that exists"
        ) from None


def schema(of: type[PlanRecord]) -> dict[str, Any]:
    """The JSON schema of files: that of the record, and the contract, which is derived from it."""
    found = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(of)}
    found["$defs"][of.__name__]["properties"]["contract"] = {"type": "object", "description": "mesh, rules by path, versions, options"}
    return found


def read(path: str | os.PathLike[str], of: type[P]) -> P:
    """The plan in a file of this version or an earlier one; a PlanFileError names the file and the field that is wrong."""
    if not isinstance(path, (str, os.PathLike)):
        raise PlanFileError(
            f"a plan file is named by its path, not by {type(path).__name__}.\n  way out: the path that plan.save() wrote"
        )
    name = os.fspath(path)
    if isinstance(name, str) and name.lstrip().startswith("{"):
        raise PlanFileError("this is the text of a plan file, not its path.\n  way out: Plan.loads(text)")
    try:
        raw = read_limited(path, MAX_FILE_BYTES)
    except OSError as error:
        raise PlanFileError(f"{name}: cannot be read: {error.strerror}.\n  way out: the path that plan.save() wrote") from None
    try:
        return loads(raw, of)
    except PlanFileError as wrong:
        raise PlanFileError(f"{name}: {wrong}") from None


def loads(text: str | bytes, of: type[P]) -> P:
    """The plan in the text of a file, or its bytes; a PlanFileError names the field that is wrong."""
    if not isinstance(text, (str, bytes)):
        raise PlanFileError(f"a plan is read from the text of its file, not from {type(text).__name__}.\n  way out: Plan.load(path)")
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_FILE_BYTES:
        raise PlanFileError(f"larger than {format_bytes(MAX_FILE_BYTES)}, the most a plan file may have")
    if sum(map(raw.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise PlanFileError(f"holds more than {MAX_VALUES:,} values, the most a plan file may have")
    value = _current(_json(raw))
    try:
        plan = msgspec.convert(value, of)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        raise _wrong(_named(at.rstrip("`"), value) or "the file", what[0].lower() + what[1:]) from None
    for at, what in _faults(plan):
        raise _wrong(at, what)
    return plan


def _wrong(at: str, what: str) -> PlanFileError:
    return PlanFileError(f"{clean(fit_middle(at, 200))}: {clean(fit_middle(what, 300))}.\n  {WAY_OUT}")


def _named(at: str, value: Mapping[str, Any]) -> str:
    """A place in the file, leaves by their path: "inputs['state/w'].shape" of "inputs[3].shape"."""
    found = re.match(r"(inputs|outputs)\[(\d+)\]", at)
    leaf = value[found[1]][int(found[2])] if found else None
    path = leaf.get("path") if isinstance(leaf, dict) else None
    return f"{found[1]}[{_short(path)}]{at[found.end() :]}" if found and isinstance(path, str) else at


def _short(value: Any) -> str:
    return fit(ascii(value), 60)


# ---- bytes to JSON values


def _json(raw: bytes) -> Any:
    if not raw.strip():
        raise PlanFileError("the file is empty.\n  way out: save the plan again")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # escapes of half a character are text in no encoding
        return value
    except UnicodeError:
        raise PlanFileError("this is no plan file: it is not text in UTF-8") from None
    except json.JSONDecodeError as error:
        if raw.lstrip()[:1] != b"{":
            raise PlanFileError("this is no plan file: it is not JSON") from None
        cut = "the file ends in the middle" if error.pos >= len(error.doc.rstrip()) or "Unterminated" in error.msg else error.msg
        at = f"line {error.lineno}, column {error.colno}"
        raise PlanFileError(f"damaged at {at}: {cut}.\n  way out: save the plan again") from None
    except RecursionError:
        raise PlanFileError("this is no plan file: it nests too deeply") from None
    except PlanFileError:
        raise
    except ValueError:
        raise PlanFileError("this is no plan file: it holds a number of thousands of digits") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise PlanFileError(f"damaged: {_short(name)} stands twice in one object")
        found[name] = value
    return found


def _no_constant(name: str):
    raise PlanFileError(f"damaged: {name} is no number that a plan may hold")


def _current(value: Any) -> dict[str, Any]:
    """The JSON of a plan of any version, as one of this version."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        said = f"its format is {_short(value['format'])}" if isinstance(value, dict) and "format" in value else "it has no format"
        raise PlanFileError(f"this is no plan file: {said}, a plan's is {FORMAT!r}")
    version = value.get("version")
    if type(version) is not int or version < 1:
        raise PlanFileError(f"version: {_short(version)} is no version of a plan file")
    if version > VERSION:
        raise PlanFileError(
            f"version: {version} is newer than this shardplan reads ({VERSION}).\n  ways out: a newer shardplan, or plan anew"
        )
    value = _from_version_1(value) if version == 1 else value
    value = _from_version_2(value) if value["version"] == 2 else value
    if version > 3:
        value = value | {name: unfolded(x, name) for name in LEAVES if isinstance(x := value.get(name), list)}
    return {name: x for name, x in (value | {"version": VERSION}).items() if name != "contract"}  # derived from the rest


# ---- earlier versions


def _from_version_1(value: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 1 in version 2: other names, leaves in a list, and every layout an object."""
    try:
        fields = {**value, "version": 2}
        fields["symmetric_layers"] = fields.pop("tied")
        for name in LEAVES:
            fields[name] = [{"path": path, **leaf, "layout": _layout(leaf["layout"])} for path, leaf in value[name].items()]
        fields["decisions"] = [_decision(d) for d in value["decisions"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanFileError(f"damaged: no plan of version 1 ({type(error).__name__}: {error}).\n  way out: plan anew") from None
    return fields


def _from_version_2(value: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 2 in version 3: its lines get the functions that its decisions know."""
    fields = {**value, "version": 3}
    try:
        functions = {(d["file"], d["line"]): d["function"] for d in reversed(value["decisions"])}
        fields["lines"] = [{**x, "function": functions.get((x["file"], x["line"]), "")} for x in value["lines"]]
    except (KeyError, TypeError):
        pass  # what is wrong with them the schema says
    return fields


def _layout(x: Any) -> Any:
    """A layout that was a list of its dims as an object; a partial layout was one already."""
    return {"dims": x} if isinstance(x, list) else x


def _decision(d: dict[str, Any]) -> dict[str, Any]:
    fields = {RENAMED.get(name, name): x for name, x in d.items()}
    fields["operand_layouts"] = [[_layout(x) for x in chain] for chain in d["reads"]]
    fields["result_layouts"] = [_layout(x) for x in d["results"]]
    fields["reshards"] = [_reshard(x) for x in fields.pop("moves")]
    return fields


def _reshard(x: dict[str, Any]) -> dict[str, Any]:
    fields = {**x, "before": _layout(x["before"]), "after": _layout(x["after"])}
    return fields | {"array": fields.pop("value")}


# ---- rules beyond the schema


def _faults(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    """(place, fault) of a plan whose types and ranges are right."""
    mesh = plan.mesh
    if any(size < 1 for size in mesh.sizes) or math.prod(mesh.sizes) > MAX_DEVICES or "" in mesh.axes:
        yield "mesh", f"{_short(str(mesh))} is no mesh"
    if plan.seconds.keys() not in (SECONDS, SECONDS | RANGE, SECONDS | RANGE | INTERFERENCE):
        yield "seconds", f"has {_short(sorted(plan.seconds))}, not {', '.join(sorted(SECONDS | RANGE | INTERFERENCE))}"
    for name, leaves in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        if len({x.path for x in leaves}) < len(leaves):
            yield name, "a path stands twice"
        for x in leaves:
            yield from _leaf_faults(f"{name}[{_short(x.path)}]", x, mesh)
    for n, d in enumerate(plan.decisions):
        at = f"decisions[{n}]"
        if n and d.op <= plan.decisions[n - 1].op:
            yield f"{at}.op", f"{d.op} does not come after {plan.decisions[n - 1].op}, the op decided before"
        yield from _axis_faults(f"{at}.strategy", d.strategy, mesh)
        for k, chain in enumerate(d.operand_layouts):
            for m, layout in enumerate(chain):
                yield from _layout_faults(f"{at}.operand_layouts[{k}][{m}]", layout, mesh)
        for k, result in enumerate(d.result_layouts):
            yield from _layout_faults(f"{at}.result_layouts[{k}]", result, mesh) if result else ()
        for k, r in enumerate(d.reshards):
            yield from _layout_faults(f"{at}.reshards[{k}].before", r.before, mesh)
            yield from _layout_faults(f"{at}.reshards[{k}].after", r.after, mesh)
            if r.before.rank != r.after.rank:
                yield f"{at}.reshards[{k}].after", f"has {r.after.rank} dims, before has {r.before.rank}"
            for m, c in enumerate(r.collectives):
                yield from _axis_faults(f"{at}.reshards[{k}].collectives[{m}].axes", c.axes, mesh)


def _leaf_faults(at: str, x: Leaf, mesh: MeshShape) -> Iterator[tuple[str, str]]:
    yield from _layout_faults(f"{at}.layout", x.layout, mesh)
    if x.layout.partial:
        yield f"{at}.layout", "is partial, which inputs and outputs of a step cannot be"
    if x.layout.rank != len(x.shape):
        yield f"{at}.layout", f"has {x.layout.rank} dims, the array {len(x.shape)}"
    for d, (n, axes) in enumerate(zip(x.shape, x.layout.dims, strict=True)):
        if not Layout((axes,)).splits((n,), mesh):
            yield f"{at}.layout.dims[{d}]", f"{mesh.size(*axes)} shards over {', '.join(axes)} do not divide {n}"


def _layout_faults(at: str, layout: Layout, mesh: MeshShape) -> Iterator[tuple[str, str]]:
    yield from _axis_faults(at, (*layout.sharded_axes, *layout.partial_axes), mesh)
    if list(layout.partial) != sorted(layout.partial):
        yield f"{at}.partial", "is not in the order of axis names"
    for _, kind in layout.partial:
        if kind not in REDUCTIONS:
            yield f"{at}.partial", f"{_short(kind)} is none of {', '.join(REDUCTIONS)}"


def _axis_faults(at: str, axes: Iterable[str], mesh: MeshShape) -> Iterator[tuple[str, str]]:
    for axis, uses in Counter(list(axes)).items():
        if axis not in mesh.axes:
            yield at, f"axis {_short(axis)} is not in mesh {mesh}"
        if uses > 1:
            yield at, f"axis {_short(axis)} is used twice"
