"""Halo geometry: which elements of its neighbours a shard reads when windows slide over a sharded dim.

A dim of n elements lies in equal shards; each of m results reads a window of it. Shard q computes m / shards results in a row, so it
reads one range of elements. The part of the range that other shards hold is its halo, moved by collective-permutes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Halo:
    """How results along a factor read an operand: result i reads the elements whose positions, `dilation` apart, fall in its window.

        i * stride - low  <=  element * dilation  <  i * stride - low + window

    Attributes:
        window, stride, low, dilation: in positions; a negative stride reads backwards.
    """

    window: int = 1
    stride: int = 1
    low: int = 0
    dilation: int = 1

    def __str__(self) -> str:
        return f"{self.window}/{self.stride}" if self.stride != 1 else str(self.window)

    def span(self, results: int) -> int:
        """Positions from the first to the last that so many adjacent results read; windows of one skip the positions in between."""
        return results if self.window == 1 else (results - 1) * self.stride + self.window

    def growth(self, n: int, m: int) -> float:
        """Positions that all m results read, per element of the operand."""
        return self.span(m) / n

    def needs(self, n: int, m: int, shards: int, q: int) -> tuple[int, int]:
        """Range of elements (first, one past the last) that shard q reads for its m / shards results."""
        results = m // shards
        first, last = sorted((q * results * self.stride - self.low, (q * results + results - 1) * self.stride - self.low))
        return max(0, -(-first // self.dilation)), min(n, (last + self.window - 1) // self.dilation + 1)

    def pieces(self, n: int, m: int, shards: int) -> list[Piece]:
        """Everything that shards read of each other's elements."""
        own, out = n // shards, []
        for q in range(shards):
            first, stop = self.needs(n, m, shards, q)
            sources = range(first // own, -(-stop // own)) if first < stop else ()
            out += [Piece(at, q, max(first, at * own), min(stop, (at + 1) * own)) for at in sources if at != q]
        return out

    def hops(self, n: int, m: int, shards: int) -> dict[int, int]:
        """Distance (target - source) -> elements moved over it: the largest piece of any shard."""
        return dict(sorted((x.target - x.source, x.size) for x in self.pieces(n, m, shards)))  # of one distance the largest comes last

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def permutes(self, n: int, m: int, shards: int) -> tuple[tuple[Piece, ...], ...]:
        """All pieces packed into few collective-permutes, first fit by size; in one, a shard sends and receives at most one piece."""
        out: list[tuple[set[int], set[int], list[Piece]]] = []
        for x in sorted(self.pieces(n, m, shards), key=lambda x: (-x.size, abs(x.target - x.source), x.target - x.source)):
            permute = next((p for p in out if x.source not in p[0] and x.target not in p[1]), None)
            if permute is None:
                out.append(permute := (set(), set(), []))
            permute[0].add(x.source)
            permute[1].add(x.target)
            permute[2].append(x)
        return tuple(tuple(pieces) for _, _, pieces in out)


class Piece(NamedTuple):
    """Elements first .. stop - 1 of a dim, from the shard that holds them to one that reads them."""

    source: int
    target: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.first
