r"""Layouts by path as a short list of regular expressions, of which the first that is found in a path holds: as in flax and EasyLM.

    params/blocks/0/up, params/blocks/1/up    P(None, 'model')          (^|/)up$     P(None, 'model')
    params/blocks/0/down, ...                 P('model', None)          (^|/)down$   P('model')
    params/norm, step, ...                    replicated                             P()

Patterns are ends, beginnings and parts of paths, numbers in them literally or as `\d+`. A rule is only put before others if all paths
that it takes from them have one spec; so taking more paths never hurts, and such rules are chosen until no path is left: greedily,
then shorter lists by depth-first search. Also known as a decision list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

Entries = tuple[str | tuple[str, ...] | None, ...]
"""Entries of a PartitionSpec without the Nones at its end."""
PathRule = tuple[str, Entries]

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
    rules = _shortest(specs, literal=False) if len(specs) >= MANY_PATHS else None
    if rules is None or len(rules) > len({*specs.values()}):
        rules = _shortest(specs, literal=True)
    assert rules is not None, "internal error: every path has a literal pattern"
    rules = tuple(_tidy(rules, specs))
    wrong = [path for path, spec in specs.items() if matching(rules, path) != spec]
    assert not wrong, wrong
    return rules


def _shortest(specs: Mapping[str, Entries], literal: bool) -> list[PathRule] | None:
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
    among = _Paths(paths)
    for pattern, words in dict(p for path in paths for p in _patterns(path, literal)).items():
        bits = among.matching(pattern, words)
        if bits not in known or (len(pattern), pattern) < (len(known[bits]), known[bits]):
            known[bits] = pattern
    return sorted(known.items(), key=lambda x: (-x[0].bit_count(), len(x[1]), x[1]))


class _Paths:
    """Paths as bits, by their segments: most patterns can match few of them."""

    def __init__(self, paths: Sequence[str]):
        self._paths = paths
        self._with_segment: dict[str, int] = {}
        for n, path in enumerate(paths):
            for segment in path.split("/"):
                self._with_segment[segment] = self._with_segment.get(segment, 0) | 1 << n
        self._with_word: dict[str, int] = {}

    def matching(self, pattern: str, words: Sequence[str]) -> int:
        """Paths that a pattern of one of them matches, in which each of these words begins a segment."""
        some = (1 << len(self._paths)) - 1
        for word in words:
            some &= self._with(word)
        if some.bit_count() == 1 and ".*" not in pattern:
            return some  # the path that it was made from
        found = re.compile(pattern)
        return sum(1 << n for n in _numbers(some) if found.search(self._paths[n]))

    def _with(self, word: str) -> int:
        if word not in self._with_word:
            bits = 0
            for segment, own in self._with_segment.items():
                bits |= own if re.match(word, segment) else 0
            self._with_word[word] = bits
        return self._with_word[word]


def _numbers(bits: int) -> Iterator[int]:
    """Numbers of the bits that are set."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _patterns(path: str, literal: bool) -> Iterator[tuple[str, Sequence[str]]]:
    """(pattern, its words) of one path, those of any path of this form first, then perhaps those with its own numbers."""
    own = [re.escape(x).replace(r"\-", "-") for x in path.split("/")]
    wild = [re.sub(r"\d+", r"\\d+", x) for x in own]
    yield ".*", ()
    for words in dict.fromkeys((tuple(wild), tuple(own)) if literal else (tuple(wild),)):
        n = len(words)
        yield from ((f"(^|/){'/'.join(words[k:])}$", words[k:]) for k in range(n - 1, 0, -1))
        yield from ((f"^{'/'.join(words[:k])}/", words[:k]) for k in range(1, n))
        yield f"^{'/'.join(words)}$", words
        yield from ((f"(^|/){word}/", (word,)) for word in words[:-1])
        yield from ((f"(^|/){a}/{b}/", (a, b)) for a, b in pairwise(words[:-1]))
        yield from ((f"(^|/){word}.*/{words[-1]}$", (word, words[-1])) for word in words[:-1])


# ---- the list


class _Search:
    """Chooses rules one after the other; `left` are the paths, as bits, that no rule before has taken."""

    def __init__(self, candidates: Sequence[tuple[int, str]], of_spec: Mapping[Entries, int]):
        self.candidates, self.of_spec = candidates, of_spec
        self.nodes = 0

    def pure(self, left: int) -> list[tuple[int, str, Entries]]:
        """(paths, pattern, spec) of patterns all of whose paths that are left have one spec, those of most paths first."""
        of = [(spec, bits & left) for spec, bits in self.of_spec.items() if bits & left]
        found: dict[int, tuple[int, str, Entries]] = {}
        for bits, pattern in self.candidates:
            here = bits & left
            spec = next((spec for spec, own in of if here and here & own == here), None)
            if spec is not None and (here not in found or len(pattern) < len(found[here][1])):
                found[here] = here, pattern, spec
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
