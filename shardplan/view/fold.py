"""Which pytree paths are one row: paths that differ in one segment at a time.

state/blocks/{0..11}/attn/{key,query,value}/kernel  ->  state/blocks/*/attn/{key,query,value}/kernel   ×36
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from shardplan.units import clean


def fold(named: Sequence[tuple[str, int]], everything: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Paths that differ in one segment at a time, merged: (path with "*" or "{a,b}", numbers), in order of the first number."""
    groups: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for path, n in named:
        groups.setdefault(tuple((segment,) for segment in path.split("/")), []).append(n)
    for at in range(max(map(len, groups), default=0)):
        merged: dict[tuple, tuple[list[str], list[int]]] = {}
        for key, numbers in groups.items():
            here = key[at : at + 1]
            words, members = merged.setdefault((key[:at], key[at + 1 :], here and (_stem(here[0][0]),)), ([], []))
            words += [w for segment in here for w in segment if w not in words]
            members += numbers
        groups = {(*start, *[tuple(words)][: len(here)], *end): members for (start, end, here), (words, members) in merged.items()}
    known = _numbers(everything)
    out = [(clean("/".join(_segment(key, at, known) for at in range(len(key)))), sorted(n)) for key, n in groups.items()]
    return sorted(out, key=lambda row: row[1][0])


_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")


def _stem(segment: str) -> tuple[str, str] | None:
    """The text before and after the number of a segment; segments without a number merge with each other only."""
    found = _NUMBERED.fullmatch(segment)
    return (found[1], found[3]) if found else None


def _wild(path: Iterable[str]) -> tuple[str, ...]:
    return tuple("{}*{}".format(*stem) if (stem := _stem(s)) else s for s in path)


def _numbers(paths: Iterable[str]) -> Mapping[tuple[str, ...], set[int]]:
    """The start of a path, "*" for its numbers -> the numbers that occur in its last segment."""
    out: dict[tuple[str, ...], set[int]] = {}
    for path in paths:
        wild = _wild(segments := path.split("/"))
        for at, segment in enumerate(segments, 1):
            if found := _NUMBERED.fullmatch(segment):
                out.setdefault(wild[:at], set()).add(int(found[2]))
    return out


def _segment(key: tuple[tuple[str, ...], ...], at: int, known: Mapping[tuple[str, ...], set[int]]) -> str:
    words = key[at]
    if len(words) == 1:
        return words[0]
    if (stem := _stem(words[0])) is None:
        return "{" + ",".join(words) + "}"
    here = sorted(int(found[2]) for w in words if (found := _NUMBERED.fullmatch(w)))
    every = set(here) == known.get(_wild(k[0] for k in key[: at + 1]))
    return "*".join(stem) if every else f"{stem[0]}{{{_ranges(here)}}}{stem[1]}"


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: "0-3,6" of 0 1 2 3 6."""
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
