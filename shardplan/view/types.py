"""How arrays and their layouts read: as JAX prints types, `f32[8@x, 4@y]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardplan.mesh.layout import Layout
from shardplan.units import clean

SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


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
    """A dtype as JAX shortens it: "bf16" of "bfloat16"."""
    return next((short + dtype[len(long) :] for long, short in SHORT if dtype.startswith(long)), dtype)


def type_text(dtype: str, shape: Sequence[int], layout: Layout) -> str:
    """A type as JAX prints it, sharded dims with their axes: "f32[8@x, 4@(y,z)]"; partial axes in braces."""

    def dim(n: int, axes: tuple[str, ...]) -> str:
        return str(n) if not axes else f"{n}@{axes[0]}" if len(axes) == 1 else f"{n}@({','.join(axes)})"

    dims = ", ".join(map(dim, shape, layout.dims))
    kinds = sorted({kind for _, kind in layout.partial})
    partial = "".join(f" {{{kind} over {','.join(a for a, k in layout.partial if k == kind)}}}" for kind in kinds)
    return clean(f"{short_dtype(dtype)}[{dims}]{partial}")


def array_type(text: str, layout: Layout) -> str:
    """`type_text` of a type that is text already."""
    found = split_type(text)
    return type_text(*found, layout) if found and len(found[1]) == layout.rank else f"{clean(text)} {clean(str(layout))}".strip()


def join_axes(axes: Iterable[str]) -> str:
    """Names of mesh axes as a list."""
    return clean(", ".join(axes))
