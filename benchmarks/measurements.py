"""The page docs/measurements.md: every benchmark writes its own section of it.

    python benchmarks/fidelity.py --docs       measures, prints, and puts the table into the page
    python benchmarks/measurements.py           lists the sections, their commands and when they were measured

A section stands between two comments that name it. `write` replaces it, with the command, the day and the versions that made it.
"""

import datetime
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "measurements.md"
SECTION = re.compile(r"<!-- begin (?P<name>[\w-]+) -->\n(?P<text>.*?)<!-- end (?P=name) -->", re.DOTALL)


def write(name: str, command: str, text: str) -> None:
    """Replaces a section of the page.

    Args:
        name: of the section, which the page must have.
        command: that makes it again.
        text: markdown.

    Raises:
        KeyError: if the page has no such section.
    """
    page = PAGE.read_text()
    if name not in {m["name"] for m in SECTION.finditer(page)}:
        raise KeyError(f"{PAGE} has no section {name!r}; add the comments '<!-- begin {name} -->' and '<!-- end {name} -->'")
    made = f"`{command}`, {datetime.date.today()}, Python {sys.version.split()[0]}, jax {version('jax')}, OR-Tools {version('ortools')}"
    body = f"<!-- begin {name} -->\n{made}\n\n{text.strip()}\n\n<!-- end {name} -->"
    PAGE.write_text(SECTION.sub(lambda m: body if m["name"] == name else m[0], page))


def table(head: tuple[str, ...], rows: Iterable[tuple]) -> str:
    """A markdown table."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    for section in SECTION.finditer(PAGE.read_text()):
        print(f"{section['name']:<20} {section['text'].splitlines()[0]}")
