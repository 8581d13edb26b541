"""Tables of the documentation that are read off the code: the files of every room, each with the first line of its docstring.

python docs/generate.py           writes them into docs/rooms/
python docs/generate.py --check   says which page is out of date
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTION = re.compile(r"<!-- begin files -->\n.*?<!-- end files -->", re.DOTALL)


def files(room: Path) -> str:
    """The table of a room's files."""
    rows = ["| file | decides |", "|---|---|"]
    for path in sorted(room.rglob("*.py"), key=lambda p: (len(p.relative_to(room).parts) > 1, p)):
        head = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        if path.name != "__init__.py" and head:
            rows.append(f"| `{path.relative_to(room)}` | {head} |")
    return "\n".join(rows)


def main(check: bool) -> int:
    """Writes every page, or only compares; the number of pages that were out of date."""
    stale = []
    for page in sorted((ROOT / "docs" / "rooms").glob("*.md")):
        text = page.read_text()
        table = f"<!-- begin files -->\n{files(ROOT / 'shardplan' / page.stem)}\n<!-- end files -->"
        made = SECTION.sub(lambda _, table=table: table, text)
        if made != text:
            stale.append(page.name)
            if not check:
                page.write_text(made)
    print(f"{'out of date' if check else 'written'}: {', '.join(stale) or 'none'}")
    return len(stale) if check else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
