"""How amounts, types and names read: "41 µs", "12.6 MB", "74.5 GiB", `f32[8@x, 4@y]`; one way of writing each, everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardplan.mesh.layout import Layout

SECONDS = (("µs", 1e-6), ("ms", 1e-3), ("s", 1.0))
DECIMAL = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
BINARY = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def _amount(n: float, units: tuple[tuple[str, float], ...]) -> str:
    for unit, size in units:
        if abs(n) < 999.5 * size or unit == units[-1][0]:
            break
    x = n / size
    digits = 0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2
    text = f"{x:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def time_text(seconds: float) -> str:
    """ "41 µs", "1.83 ms"."""
    return _amount(seconds, SECONDS)


def bytes_text(n: float) -> str:
    """Bytes that are sent, in decimal units: "12.6 MB"."""
    return _amount(n, DECIMAL)


def memory_size(n: float) -> str:
    """Bytes of memory, in binary units: "74.5 GiB"."""
    return _amount(n, BINARY)


def percent(x: float) -> str:
    """ "0.4 %", "54 %"; never a rounded 0 for something that is there."""
    p = 100 * x
    return "0 %" if p <= 0 else "<0.01 %" if p < 0.01 else f"{p:.2g} %" if p < 9.95 else f"{p:.0f} %"


def times(n: float) -> str:
    """ "×12", and nothing for once."""
    return "" if n == 1 else f"×{n:.0f}" if n == int(n) else f"×{n:.3g}"


# ---- types


def split_type(text: str) -> tuple[str, tuple[int, ...]] | None:
    """("float32", (8, 4)) of "float32[8,4]"; None for what is no such type."""
    found = re.fullmatch(r"(.+)\[((?:\d+(?:,\s*\d+)*)?)\]", text)
    return (found[1], tuple(int(n) for n in found[2].split(",") if n)) if found else None


def itemsize(dtype: str) -> float:
    """Bytes of one element: by the first number in the type's name; 1 for bool, 8 for a key."""
    bits = re.search(r"\d+", dtype)
    if dtype.startswith("key<") or bits is None:
        return 8.0 if dtype.startswith("key<") else 1.0
    return int(bits[0]) / 8


def short_dtype(dtype: str) -> str:
    """ "bf16" of "bfloat16", as JAX shortens."""
    return next((short + dtype[len(long) :] for long, short in SHORT if dtype.startswith(long)), dtype)


def type_text(dtype: str, shape: Sequence[int], layout: Layout) -> str:
    """A type as JAX prints it, split dims with their axes: "f32[8@x, 4@(y,z)]"; what is still to be reduced in braces."""

    def dim(n: int, axes: tuple[str, ...]) -> str:
        return str(n) if not axes else f"{n}@{axes[0]}" if len(axes) == 1 else f"{n}@({','.join(axes)})"

    dims = ", ".join(map(dim, shape, layout.dims))
    kinds = sorted({kind for _, kind in layout.partial})
    partial = "".join(f" {{{kind} over {','.join(a for a, k in layout.partial if k == kind)}}}" for kind in kinds)
    return clean(f"{short_dtype(dtype)}[{dims}]{partial}")


def placed(text: str, layout: Layout) -> str:
    """`type_text` of a type that is text already."""
    found = split_type(text)
    return type_text(*found, layout) if found and len(found[1]) == layout.rank else f"{clean(text)} {clean(str(layout))}".strip()


def axes_text(axes: Iterable[str]) -> str:
    return clean(", ".join(axes))


# ---- names


def clean(text: str) -> str:
    """Text that cannot steer a terminal: what is not printable is written as its escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fit(text: str, width: int) -> str:
    """At most `width` columns, cut at the end."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def fit_middle(text: str, width: int) -> str:
    """At most `width` columns, cut where it matters least: a path's start and end tell most."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
