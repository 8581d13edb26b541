"""The answer of `Plan.why` as text: at most 120 columns, the same for the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardplan.plan.why import ArrayUse, LayoutChoice, Why
from shardplan.units import clean, fit, fit_middle, format_bytes, format_count, format_memory, format_percent, format_seconds, table
from shardplan.view.rows import array_type

WIDTH = 120
MAX_READERS = 12
MAX_FRAMES = 8
SHOWN = 3
"""Other choices in the table: the next best ones."""


def why_text(found: Why) -> str:
    """Who makes and reads the array, the call stack, the next best choices, what binds."""
    head = fit_middle(clean(f"{found.name}  {array_type(found.array, found.layout)}  {found.layout}"), WIDTH)
    parts = [head, *_uses(found), "", *_stack(found), *_choices(found), "", "what binds"]
    parts += [fit(f"  {clean(text)}", WIDTH) for text in found.constraints] or ["  nothing: the choice is the cheapest"]
    return "\n".join(parts) + "\n"


def _uses(found: Why) -> Iterator[str]:
    yield fit(f"made by   {clean(found.maker.what)}", WIDTH)
    counts: dict[tuple, list[ArrayUse]] = {}
    for use in found.readers:
        counts.setdefault((use.phase, use.what, use.layout, use.collectives), []).append(use)
    cells, times = [], []
    for (phase, what, layout, collectives), uses in counts.items():
        how = "as it is" if layout == found.layout else f"as {layout}, {', '.join(collectives) or 'a copy that is there already'}"
        sent, took = (sum(getattr(u, name) for u in uses) for name in ("sent_bytes", "seconds"))
        figures = [format_bytes(sent) if sent else "", format_seconds(took) if took else ""]
        cells.append([phase, clean(what), clean(how), *figures])
        times.append(f" {format_count(len(uses))}".rstrip())
    shown = cells[:MAX_READERS]
    room = _room(shown, 1, 2) - len("  ")
    places = [cell[1].rpartition(" in ")[0] or cell[1] for cell in shown]
    widest = max((len(f"{place}…{n}") for place, n in zip(places, times, strict=False)), default=0)
    reads = min(max((len(cell[2]) for cell in shown), default=0), max(room // 2, room - widest))
    for cell, n in zip(shown, times, strict=False):  # the line and the layout say more than the name of a function
        cell[1] = fit(cell[1], room - reads - len(n)) + n
    lines = table(shown, right=(3, 4), widths={2: reads}, indent="  ")
    yield "read by"
    yield from lines
    if len(cells) > MAX_READERS:
        yield f"  ... and {len(cells) - MAX_READERS} more"


def _stack(found: Why) -> Iterator[str]:
    uses = [u for u in (found.maker, *found.readers) if u.stack]
    if not uses:
        return
    yield fit(f"call stack of {clean(uses[0].what)}", WIDTH)
    for frame in reversed(uses[0].stack[:MAX_FRAMES]):
        yield fit_middle(f"  {clean(frame)}", WIDTH)
    yield ""


def _choices(found: Why) -> Iterator[str]:
    cells = [["choice", "step", "", "peak", "", "sent", ""]]
    cells.append(_row("  chosen", found.chosen, found.chosen))
    cells += [_row(f"  {n}", choice, found.chosen) for n, choice in enumerate(found.choices[:SHOWN], 1)]
    yield from table(cells, right=(1, 2, 3, 4, 5, 6), widths={0: _room(cells, 0)}, indent="")
    rest = [f"{len(found.choices) - SHOWN} more cost more"] if len(found.choices) > SHOWN else []
    rest += [f"{found.unpriced} cost more on the plan's cost network and were not scheduled"] if found.unpriced else []
    rest += [f"{len(found.impossible)} cannot be made near this plan"] if found.impossible else []
    if rest:
        yield fit(f"  {'; '.join(rest)}", WIDTH)
    if found.choices:
        if found.estimated:
            yield "  estimated at the plan's prices: the steps were not scheduled"
        yield "  ops near the array adapt, all others stay; plan.fix plans anew, and often finds less"


def _room(rows: Sequence[Sequence[str]], *columns: int) -> int:
    """Characters of a line that the other columns of a table leave for these."""
    taken = [max(map(len, column)) for k, column in enumerate(zip(*rows, strict=True)) if k not in columns]
    return WIDTH - sum(taken) - 2 * (len(taken) + len(columns) - 1)


def _row(mark: str, choice: LayoutChoice, chosen: LayoutChoice) -> list[str]:
    text = clean(f"{mark:<9}{choice.text}") + ("" if choice.fits else ", DOES NOT FIT")
    if choice is chosen:
        sizes = format_seconds(choice.seconds), "", format_memory(choice.peak_bytes), "", format_bytes(choice.sent_bytes), ""
        return [text, *sizes]
    return [
        text,
        format_seconds(choice.seconds),
        _change(choice.seconds, chosen.seconds, lambda x: format_percent(x / (chosen.seconds or 1.0))),
        format_memory(choice.peak_bytes),
        _change(choice.peak_bytes, chosen.peak_bytes, format_memory),
        format_bytes(choice.sent_bytes),
        _change(choice.sent_bytes, chosen.sent_bytes, format_bytes),
    ]


def _change(now: float, before: float, text) -> str:
    return "same" if now == before else f"{'+' if now > before else '−'}{text(abs(now - before))}"
