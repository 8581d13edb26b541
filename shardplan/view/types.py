"""How arrays and their layouts read: as JAX prints types, `f32[8@x, 4@y]`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardplan.mesh.layout import Layout
from shardplan.units import clean

SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def itemsize(dtype: str) -> float:
    """Bytes of one element: by the first number in the type's name; 1 for bool, 8 for a key."""
    bits = re.search(r"\d+", dtype)
    return 8.0 if dtype.startswith("key<") else int(bits[0]) / 8 if bits else 1.0


def type_text(dtype: str, shape: Sequence[int], layout: Layout) -> str:
    """A type as JAX prints it, sharded dims with their axes: "f32[8@x, 4@(y,z)]"; partial axes in braces."""

    def dim(n: int, axes: tuple[str, ...]) -> str:
        return str(n) if not axes else f"{n}@{axes[0]}" if len(axes) == 1 else f"{n}@({','.join(axes)})"

    dims = ", ".join(map(dim, shape, layout.dims))
    kinds = sorted({kind for _, kind in layout.partial})
    partial = "".join(f" {{{kind} over {','.join(a for a, k in layout.partial if k == kind)}}}" for kind in kinds)
    name = next((short + dtype[len(long) :] for long, short in SHORT if dtype.startswith(long)), dtype)
    return clean(f"{name}[{dims}]{partial}")


def array_type(text: str, layout: Layout) -> str:
    """`type_text` of an array's type as text, "float32[8,4]"; another type is followed by its layout."""
    found = re.fullmatch(r"(.+)\[((?:\d+(?:,\s*\d+)*)?)\]", text)
    shape = [int(n) for n in found[2].split(",") if n] if found else []
    return type_text(found[1], shape, layout) if found and len(shape) == layout.rank else clean(f"{text} {layout}").strip()
