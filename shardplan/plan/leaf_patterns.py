"""Leaves of a plan file by pattern: equal neighbours in the tree are one row.

    {"path": "state/params/blocks/{0..11}/norm{1,2}/scale", "shape": [768], ...}

Braces hold the names that stand in their place, three and more consecutive numbers as "0..11"; a brace that is part of a name is
doubled. Consecutive rows with the same text up to their first closing brace are one group: it is read with the first name in place of
the braces, then with the second, and so on, which is the order of the pytree.
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
Rest = tuple[tuple[str, ...], str]
"""The parts of a path below some place in the tree, and the JSON of its row without "path"."""
MAX_CHARACTERS = 10_000_000
"""Upper limit of the rows' JSON with every leaf written out, each with `LEAF_CHARACTERS` more, times the braces that are filled in."""
LEAF_CHARACTERS, MAX_BRACES, MAX_PARTS = 100, 10, 50
NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
RANGE = re.compile(rf"({NUMBER.pattern})\.\.({NUMBER.pattern})")
BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
"""A doubled brace, or braces around names, which are the group."""
WAY_OUT = "way out: a file that plan.save() wrote, or plan anew"
SHORTEST_RANGE = 3
"""Runs of at least so many consecutive numbers are written as a range."""


# ---- to patterns


def folded(leaves: Sequence[Row]) -> list[Row]:
    """Leaves, each a mapping with its "path", as the rows of a file: `unfolded` gives the leaves again, in their order."""
    plain = [{**leaf, "path": leaf["path"].replace("{", "{{").replace("}", "}}")} for leaf in leaves]
    paths = [leaf["path"].split("/") for leaf in leaves]
    if any(len(path) > MAX_PARTS or set("{},") & set("".join(path)) for path in paths):
        return plain
    rest = (json.dumps({key: x for key, x in leaf.items() if key != "path"}) for leaf in leaves)
    found = _folded([(tuple(path), row) for path, row in zip(paths, rest, strict=True)])
    rows = [{"path": "/".join(path), **json.loads(row)} for path, row in found]
    if _fault(rows) or json.dumps(unfolded(rows), sort_keys=True) != json.dumps(leaves, sort_keys=True):
        return plain  # they differ where a name has "..", or a "/" as in {"a/b": x, "a": {"b": y}}
    return rows


def _folded(leaves: Iterable[Rest]) -> list[Rest]:
    """The rows of the leaves of one part of the tree."""
    children = [(name, [(path[1:], row) for path, row in below]) for name, below in groupby(leaves, lambda x: x[0][:1])]
    subtrees = [(name, _folded(below) if name else below) for name, below in children]  # without a name where a path ends
    rows = []
    for subtree, equals in groupby(subtrees, lambda x: x[1]):
        names = [part for name, _ in equals for part in name]
        rows += [((_pattern(names), *path) if names else path, row) for path, row in subtree]
    return rows


def _pattern(names: Sequence[str]) -> str:
    """Names as one part of a path: "norm{1,2}", "{0..11}", "{bias,scale}"."""
    if len(names) == 1:
        return names[0]
    heads = {re.sub(r"[0-9]+$", "", name) for name in names}
    head = heads.pop() if len(heads) == 1 else ""
    rest = [name[len(head) :] for name in names]
    if all(map(NUMBER.fullmatch, rest)):
        return f"{head}{{{','.join(_ranges([int(x) for x in rest]))}}}"
    return f"{{{','.join(names)}}}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Numbers, consecutive ones as ranges."""
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1), len(numbers)]
    for first, end in pairwise(starts):
        run = numbers[first:end]
        yield from [f"{run[0]}..{run[-1]}"] if len(run) >= SHORTEST_RANGE else map(str, run)


# ---- from patterns


def unfolded(rows: Sequence[Any], field: str = "inputs") -> list[Any]:
    """The leaves of the rows of a file; what has no text as its path is returned unchanged.

    Args:
        field: of the file, as errors name it.

    Raises:
        PlanFileError: braces of a path are in no pairs or too many, or the paths name more than a plan may have.
    """
    if fault := _fault(rows):
        raise PlanFileError(f"{field}: {fault}.\n  {WAY_OUT}")
    return _unfolded(list(rows))


def _fault(rows: Sequence[Any]) -> str:
    """What is wrong with the patterns of rows; "" if nothing is."""
    characters = 0
    for row in rows:
        path, braces = _path(row), _braces(_path(row))
        if len(braces) > MAX_BRACES or set("{}") & set(BRACES.sub("", path)):
            return f"{fit(ascii(path), 100)} is no pattern of paths"
        sizes = [_size(found[1]) for found in braces]
        count = math.prod(n for n, _ in sizes)
        literal = len(json.dumps(row)) - sum(len(found[0]) for found in braces) + LEAF_CHARACTERS
        characters += len(sizes) * (count * literal + sum(length * count // n for n, length in sizes))
    return f"the paths name arrays of more than {format_bytes(MAX_CHARACTERS)} of text" if characters > MAX_CHARACTERS else ""


def _unfolded(rows: list[Any]) -> list[Any]:
    out, n = [], 0
    while n < len(rows):
        path = _path(rows[n])
        if not (braces := _braces(path)):
            out.append({**rows[n], "path": path.replace("{{", "{").replace("}}", "}")} if path else rows[n])
            n += 1
            continue
        start, end = braces[0].span()
        stop = n
        while stop < len(rows) and _path(rows[stop]).startswith(path[:end]):
            stop += 1
        for name in _names(braces[0][1]):
            out += _unfolded([{**row, "path": path[:start] + name + row["path"][end:]} for row in rows[n:stop]])
        n = stop
    return out


def _path(row: Any) -> str:
    """The path of a row; "" of what has none."""
    path = row.get("path") if isinstance(row, dict) else None
    return path if isinstance(path, str) else ""


def _braces(path: str) -> list[re.Match[str]]:
    """The braces of a path around names."""
    return [found for found in BRACES.finditer(path) if found[1] is not None]


def _size(inner: str) -> tuple[int, int]:
    """(how many names stand in braces, at most how many characters they have in all)."""
    every = [_range(name) for name in inner.split(",")]
    return sum(map(len, every)), sum(len(names) * len(str(names[-1])) for names in every)


def _names(inner: str) -> Iterator[str]:
    """What stands in braces, one by one."""
    for name in inner.split(","):
        yield from map(str, names) if isinstance(names := _range(name), range) else names


def _range(name: str) -> range | list[str]:
    """The numbers "2..9", or one name."""
    found = RANGE.fullmatch(name)
    return range(int(found[1]), int(found[2]) + 1) if found and int(found[1]) < int(found[2]) else [name]
