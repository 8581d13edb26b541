"""Leaves of a plan file by pattern: equal parts of the state that follow each other are one row.

    {"path": "state/params/blocks/{0..11}/norm{1,2}/scale", "shape": [768], ...}

Braces hold what stands in their place, numbers that follow each other as "0..11"; a brace that is part of a path is doubled. Rows that
begin with the same text up to their first closing brace go together: for each name in the braces all of them are read, so that the
leaves come in the order of the pytree.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from shardplan.errors import PlanFileError
from shardplan.units import fit, format_bytes

Row = dict[str, Any]
Rest = tuple[tuple[str, ...], Row]
"""What is left of a path below some part of the tree, and its row without "path"."""
MAX_CHARACTERS = 30_000_000
"""Of the rows, were each leaf written out; a quarter of a million leaves."""
MAX_BRACES = 30
NUMBER = re.compile(r"0|[1-9]\d{0,8}")
RANGE = re.compile(rf"({NUMBER.pattern})\.\.({NUMBER.pattern})")
BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""A doubled brace, or braces around names, which are the group."""
WAY_OUT = "way out: a file that plan.save() wrote, or plan anew"
SHORTEST_RANGE = 3
"""Numbers from which on those that follow each other are written as a range."""


# ---- to patterns


def folded(leaves: Sequence[Row]) -> list[Row]:
    """Leaves, each a mapping with its "path", as the rows of a file: `unfolded` gives the leaves again, in their order."""
    plain = [{**leaf, "path": leaf["path"].replace("{", "{{").replace("}", "}}")} for leaf in leaves]
    if sum(len(json.dumps(row)) for row in plain) > MAX_CHARACTERS or any(c in leaf["path"] for leaf in leaves for c in "{},"):
        return plain
    rest = [(tuple(leaf["path"].split("/")), {key: x for key, x in leaf.items() if key != "path"}) for leaf in leaves]
    rows = [{"path": "/".join(path), **row} for path, row in _folded(rest)]
    return rows if unfolded(rows) == list(leaves) else plain  # unequal where a name has "..", or a "/" as {"a/b": x, "a": {"b": y}}


def _folded(leaves: Iterable[Rest]) -> list[Rest]:
    """The rows of the leaves of one part of the tree."""
    children = [(name, [(path[1:], row) for path, row in found]) for name, found in groupby(leaves, lambda x: x[0][:1])]
    inner = [(name, _folded(found) if name else found) for name, found in children]  # () where a path ends
    rows = []
    for found, same in groupby(inner, lambda x: x[1]):
        names = [part for name, _ in same for part in name]
        rows += [((_pattern(names), *rest) if names else rest, row) for rest, row in found]
    return rows


def _pattern(names: Sequence[str]) -> str:
    """Names as one part of a path: "norm{1,2}", "{0..11}", "{bias,scale}"."""
    if len(names) == 1:
        return names[0]
    heads = {re.sub(r"\d+$", "", name) for name in names}
    head = heads.pop() if len(heads) == 1 else ""
    rest = [name[len(head) :] for name in names]
    if all(map(NUMBER.fullmatch, rest)):
        return f"{head}{{{','.join(_ranges([int(x) for x in rest]))}}}"
    return f"{{{','.join(names)}}}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Numbers, those that follow each other as ranges."""
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    for first, end in pairwise(starts):
        run = numbers[first:end]
        yield from [f"{run[0]}..{run[-1]}"] if len(run) >= SHORTEST_RANGE else map(str, run)


# ---- from patterns


def unfolded(rows: Sequence[Any], field: str = "inputs") -> list[Any]:
    """The leaves of the rows of a file; what is no row with a path stays as it is.

    Args:
        field: of the file, as errors name it.

    Raises:
        PlanFileError: a pattern is none, or the patterns name more than a plan may have.
    """
    paths = [row["path"] if _has_path(row) else "" for row in rows]
    if wrong := [path for path in paths if len(_braces(path)) > MAX_BRACES or set("{}") & set(BRACES.sub("", path))]:
        raise PlanFileError(f"{field}: {fit(ascii(wrong[0]), 100)} is no pattern of paths.\n  {WAY_OUT}")
    characters = sum(len(json.dumps(row)) * _count(path) for row, path in zip(rows, paths, strict=True))
    if any(map(_braces, paths)) and characters > MAX_CHARACTERS:
        raise PlanFileError(f"{field}: the paths name arrays of more than {format_bytes(MAX_CHARACTERS)} of text.\n  {WAY_OUT}")
    return _unfolded(list(rows))


def _has_path(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("path"), str)


def _unfolded(rows: list[Any]) -> list[Any]:
    out, n = [], 0
    while n < len(rows):
        path = rows[n]["path"] if _has_path(rows[n]) else ""
        if not (braces := _braces(path)):
            out.append({**rows[n], "path": path.replace("{{", "{").replace("}}", "}")} if path else rows[n])
            n += 1
            continue
        start, end = braces[0].span()
        stop = n
        while stop < len(rows) and _has_path(rows[stop]) and rows[stop]["path"].startswith(path[:end]):
            stop += 1
        for name in _names(braces[0][1]):
            out += _unfolded([{**row, "path": path[:start] + name + row["path"][end:]} for row in rows[n:stop]])
        n = stop
    return out


def _braces(path: str) -> list[re.Match[str]]:
    """The braces of a path around names."""
    return [found for found in BRACES.finditer(path) if found[1] is not None]


def _count(path: str) -> int:
    """How many leaves a pattern names."""
    return math.prod(sum(len(names) for names in map(_range, found[1].split(","))) for found in _braces(path))


def _names(inner: str) -> Iterator[str]:
    """What stands in braces, one by one."""
    for name in inner.split(","):
        yield from map(str, names) if isinstance(names := _range(name), range) else names


def _range(name: str) -> range | list[str]:
    """The numbers "2..9", or one name."""
    found = RANGE.fullmatch(name)
    return [name] if found is None else range(int(found[1]), int(found[2]) + 1)
