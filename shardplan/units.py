"""How amounts read: one unit per quantity, three significant digits, the same in plans, reports and errors.

format_seconds  a duration                                 µs, ms, s                  41 µs
format_bytes    bytes sent, and bytes on the wire          kB, MB, GB (powers of 10)  12.6 MB
format_memory   memory of a device, and what stands in it  KiB, MiB, GiB              74.5 GiB
format_flops    floating-point operations                  kflop ... Pflop            176 Mflop
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

DECIMAL = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
BINARY = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def _unit(n: float, units: Mapping[str, float]) -> tuple[str, float]:
    return next((unit for unit in units.items() if abs(n) < 999.5 * unit[1]), [*units.items()][-1])


def _digits(x: float) -> str:
    text = f"{x:.{0 if abs(x) >= 99.95 else 1 if abs(x) >= 9.995 else 2}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _amount(n: float, units: Mapping[str, float]) -> str:
    unit, size = _unit(n, units)
    return f"{_digits(n / size)} {unit}"


SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
format_seconds = partial(_amount, units=SECONDS)
format_bytes = partial(_amount, units=DECIMAL)
format_memory = partial(_amount, units=BINARY)
format_flops = partial(_amount, units={"flop": 1.0, "kflop": 1e3, "Mflop": 1e6, "Gflop": 1e9, "Tflop": 1e12, "Pflop": 1e15})


def format_range(low: float, high: float, of: float) -> str:
    """Two durations in the unit that `format_seconds` writes `of` in, as in "0.99–1.38"."""
    _, size = _unit(of, SECONDS)
    return f"{_digits(low / size)}–{_digits(high / size)}"


def format_percent(x: float) -> str:
    """A fraction in percent: 0.004 is "0.4 %"; "<0.01 %" instead of a rounded 0."""
    p = 100 * x
    return "0 %" if p <= 0 else "<0.01 %" if p < 0.01 else f"{p:.2g} %" if p < 9.95 else f"{p:.0f} %"


def format_count(n: float) -> str:
    """How often: "×12"; nothing for once."""
    return "" if n == 1 else f"×{n:.0f}" if n == int(n) else f"×{n:.3g}"


def to_digits(x: float) -> float:
    """A figure of a plan to ten significant digits: what is behind them is rounding, and makes files of equal plans differ."""
    return float(f"{x:.10g}")


def parse_bytes(amount: float | str) -> float:
    """Bytes of 80e9, "80GB" or "74.5GiB", in any case of letters; `inf` stays.

    Raises:
        ValueError: when the text is no amount of memory, or is not positive.
    """
    found = re.fullmatch(r"(.*?)\s*((?:[kmgt]i?)?b)?", str(amount).strip().lower())
    sizes = {unit.lower(): size for unit, size in (DECIMAL | BINARY).items()}
    try:
        value = float(found[1]) * sizes[found[2] or "b"] if found else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{amount!r} is no amount of memory, such as 80e9, '80GB' or '74.5GiB'")
    return value


def format_array(x: Any) -> str:
    """Type of an array, or of anything with dtype and shape: "float32[8,4]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


# ---- text that fits


def clean(text: str) -> str:
    """Text that cannot steer a terminal: unprintable characters become their escapes."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fit(text: str, width: int) -> str:
    """At most `width` columns, cut at the end."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def listed(texts: Sequence[str], most: int) -> str:
    """The first ones, and ", ..." if there are more."""
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")


def fit_middle(text: str, width: int) -> str:
    """At most `width` columns, cut in the middle: the start and the end of a path say most."""
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def table(
    rows: Sequence[Sequence[str] | str], right: Iterable[int] = (), widths: Mapping[int, int] | None = None, indent: str = "  "
) -> list[str]:
    """Aligned rows of text, columns two spaces apart; a row that is text is a title and stays as it is.

    Args:
        rows: cells, those at the end may be missing.
        right: columns aligned to the right.
        widths: column -> its greatest width in characters; longer cells are cut in the middle.
        indent: before every row of cells.
    """
    right, widths = frozenset(right), widths or {}
    shown = [row if isinstance(row, str) else [fit_middle(c, widths.get(k, len(c))) for k, c in enumerate(row)] for row in rows]
    columns = itertools.zip_longest(*(row for row in shown if not isinstance(row, str)), fillvalue="")
    size = [max(map(len, column)) for column in columns]

    def aligned(row: Sequence[str]) -> str:
        return "  ".join(c.rjust(size[k]) if k in right else c.ljust(size[k]) for k, c in enumerate(row))

    return [row if isinstance(row, str) else f"{indent}{aligned(row)}".rstrip() for row in shown]
