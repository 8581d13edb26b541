r"""Layouts by path as a short list of regular expressions, of which the first that is found in a path holds: as in flax and EasyLM.

    params/blocks/0/up, params/blocks/1/up    P(None, 'model')          (^|/)up$     P(None, 'model')
    params/blocks/0/down, ...                 P('model', None)          (^|/)down$   P('model')
    params/norm, step, ...                    replicated                             P()

Patterns are ends, beginnings and parts of paths, numbers in them literally or as `\d+`. A rule is only put before others if all paths
that it takes from them have one spec; so taking more paths never hurts, and such rules are chosen until no path is left: greedily,
then shorter lists by depth-first search. Also known as a decision list.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

Entries = tuple[str | tuple[str, ...] | None, ...]
"""Entries of a PartitionSpec without the Nones at its end."""
PathRule = tuple[str, Entries]
_Words = Sequence[str]
"""Segments of a path, each as a pattern."""

MANY_PATHS = 300
"""Of so many paths and more, those with numbers as `\\d+` are tried first: literal ones are as many as layers."""
MAX_NODES = 2000
"""Lists that are tried to find one that is shorter than the greedy one."""


def entries(spec: Sequence) -> Entries:
    """A PartitionSpec's entries without the Nones at their end, which shard nothing."""
    found = [tuple(e) if isinstance(e, list) else e for e in spec]
    while found and found[-1] is None:
        found.pop()
    return tuple(found)


def matching(rules: Iterable[PathRule], path: str) -> Entries | None:
    """The spec of the first rule that is found in a path; None if none is."""
    return next((spec for pattern, spec in rules if re.search(pattern, path)), None)


def path_rules(specs: Mapping[str, Entries]) -> tuple[PathRule, ...]:
    """The shortest list found that gives every path its spec.

    It is a shortest list if it has as many rules as there are different specs, and where the search was not cut off one of these
    patterns.
    """
    rules = shortest(specs, literal=False) if len(specs) >= MANY_PATHS else None
    if rules is None or len(rules) > len({*specs.values()}):
        rules = shortest(specs, literal=True)
    assert rules is not None, "internal error: every path has a literal pattern"
    rules = tuple(_tidy(rules, specs))
    wrong = [path for path, spec in specs.items() if matching(rules, path) != spec]
    assert not wrong, wrong
    return rules


def shortest(specs: Mapping[str, Entries], literal: bool) -> list[PathRule] | None:
    """The shortest list found of patterns with literal numbers, too, or without; None if there is none."""
    paths = list(specs)
    of_spec: dict[Entries, int] = {}
    for n, path in enumerate(paths):
        of_spec[specs[path]] = of_spec.get(specs[path], 0) | 1 << n
    search = _Search(_candidates(paths, literal), of_spec)
    best = search.greedy((1 << len(paths)) - 1)
    for length in range(len(of_spec), len(best or ())):
        found = search.within((1 << len(paths)) - 1, length)
        if found is not None:
            return found
    return best


# ---- patterns


def _candidates(paths: Sequence[str], literal: bool = True) -> list[tuple[int, str]]:
    """(paths that it matches as bits, pattern): of patterns that match the same the shortest."""
    known: dict[int, str] = {}
    for pattern, bits in found_in(paths, literal).items():
        if bits not in known or (len(pattern), pattern) < (len(known[bits]), known[bits]):
            known[bits] = pattern
    return sorted(known.items(), key=lambda x: (-x[0].bit_count(), len(x[1]), x[1]))


def found_in(paths: Sequence[str], literal: bool) -> dict[str, int]:
    """Pattern of any of these paths -> the paths, as bits, in which `re.search` finds it.

    Nothing is searched: a pattern is found in the paths that it is a pattern of, and in a few more.
    """
    found = {".*": (1 << len(paths)) - 1}
    words = [_words(path, literal) for path in paths]
    for n, path in enumerate(words):
        for pattern in itertools.chain.from_iterable(map(_patterns, path)):
            found[pattern] = found.get(pattern, 0) | 1 << n
    for n, path in enumerate(words):
        for some in path:
            if (end := f"(^|/){'/'.join(some)}$") in found:  # is all of this path
                found[end] |= 1 << n
    found |= _begun_and_ended(words)
    for n, path in enumerate(paths):
        for pattern in found if "\n" in path else ():  # where `$` and `.` have rules of their own
            found[pattern] = found[pattern] & ~(1 << n) | (1 << n if re.search(pattern, path) else 0)
    return found


def _begun_and_ended(paths: Sequence[Sequence[_Words]]) -> dict[str, int]:
    """The same for patterns of how a segment begins, and of the last one."""
    within: dict[str, int] = {}
    last: dict[str, int] = {}
    for n, path in enumerate(paths):
        for words in path:
            last[words[-1]] = last.get(words[-1], 0) | 1 << n
            for word in words[:-1]:
                within[word] = within.get(word, 0) | 1 << n
    begun, segments = dict(within), sorted(within)
    for n, word in enumerate(segments):
        while (n := n + 1) < len(segments) and segments[n].startswith(word):
            begun[word] |= within[segments[n]]
    pairs = {(word, words[-1]) for path in paths for words in path for word in words[:-1]}
    return {f"(^|/){word}.*/{end}$": begun[word] & last[end] for word, end in pairs}


def _words(path: str, literal: bool) -> list[_Words]:
    r"""The segments of a path as patterns: numbers as `\d+`, then perhaps literally where that differs."""
    own, wild = zip(*map(_word, path.split("/")), strict=True)
    return [wild, own] if literal and own != wild else [wild]


@lru_cache(maxsize=10_000)
def _word(segment: str) -> tuple[str, str]:
    r"""A segment as it is, and with its numbers as `\d+`."""
    own = re.escape(segment).replace(r"\-", "-")
    return own, re.sub(r"\d+", r"\\d+", own)


def _patterns(words: _Words) -> Iterator[str]:
    """Patterns of one path, those of how a segment begins left out."""
    n = len(words)
    yield from (f"(^|/){'/'.join(words[k:])}$" for k in range(n - 1, 0, -1))
    yield from (f"^{'/'.join(words[:k])}/" for k in range(1, n))
    yield f"^{'/'.join(words)}$"
    yield from (f"(^|/){word}/" for word in words[:-1])
    yield from (f"(^|/){a}/{b}/" for a, b in pairwise(words[:-1]))


# ---- the list


class _Search:
    """Chooses rules one after the other; `left` are the paths, as bits, that no rule before has taken."""

    def __init__(self, candidates: Sequence[tuple[int, str]], of_spec: Mapping[Entries, int]):
        self.candidates, self.of_spec = candidates, of_spec
        self.nodes = 0
        self._pure: dict[int, list[tuple[int, str, Entries]]] = {}

    def pure(self, left: int) -> list[tuple[int, str, Entries]]:
        """(paths, pattern, spec) of patterns all of whose paths that are left have one spec, those of most paths first."""
        if left not in self._pure:
            self._pure[left] = self._pure_of(left)
        return self._pure[left]

    def _pure_of(self, left: int) -> list[tuple[int, str, Entries]]:
        of = [(spec, bits & left) for spec, bits in self.of_spec.items() if bits & left]
        found: dict[int, tuple[int, str, Entries]] = {}
        for bits, pattern in self.candidates:
            here = bits & left
            for spec, own in of if here else ():
                if common := here & own:
                    if common == here and (here not in found or len(pattern) < len(found[here][1])):
                        found[here] = here, pattern, spec
                    break
        best = sorted(found.values(), key=lambda x: (-x[0].bit_count(), len(x[1]), x[1]))
        kept: list[tuple[int, str, Entries]] = []
        for rule in best:
            if all(rule[0] & other[0] != rule[0] for other in kept):  # a pattern that takes more of them is no worse
                kept.append(rule)
        return kept

    def greedy(self, left: int) -> list[PathRule] | None:
        """Rules, each of most paths; None where no pattern tells the specs of some paths apart."""
        rules: list[PathRule] = []
        while left:
            if not (pure := self.pure(left)):
                return None
            here, pattern, spec = pure[0]
            rules.append((pattern, spec))
            left &= ~here
        return rules

    def within(self, left: int, length: int) -> list[PathRule] | None:
        """At most so many rules; None if there are none, or too many lists to try."""
        if not left:
            return []
        self.nodes += 1
        if self.nodes > MAX_NODES or length < sum(bool(bits & left) for bits in self.of_spec.values()):
            return None
        for here, pattern, spec in self.pure(left):
            rest = self.within(left & ~here, length - 1)
            if rest is not None:
                return [(pattern, spec), *rest]
        return None


def _tidy(rules: Sequence[PathRule], specs: Mapping[str, Entries]) -> Iterator[PathRule]:
    """The rules, the last one for all paths that are left."""
    yield from rules[:-1]
    if rules:
        yield ".*", rules[-1][1]
