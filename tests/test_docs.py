"""Every snippet of the README and of docs/ runs as it is written, page by page, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- )?```(?P<kind>python|sh)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
INSTALLS = ("git clone", "make ", "pip install", "export ")


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(kind, text, line) of each block; those in an HTML comment prepare what the page leaves out."""
    source = page.read_text()
    return [(m["kind"], m["text"], source.count("\n", 0, m.start("text")) + 1) for m in BLOCK.finditer(source)]


def run(command: list[str], folder: Path) -> None:
    path = os.pathsep.join((str(folder), str(ROOT)))
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert not done.returncode, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


DOCTEST = """import doctest
runner = doctest.DocTestRunner()
runner.run(doctest.DocTestParser().get_doctest({text!r}, globals(), "page", None, 0))
assert not runner.failures
"""
"""A block of a Python prompt as a program that checks what it prints."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_run(page, tmp_path):
    """Python blocks are one program per page; a block that begins with `# name.py` is that file; commands run between them."""
    program = ""
    for kind, text, line in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
        elif kind == "python":
            text = DOCTEST.format(text=text) if text.startswith(">>>") else text
            program += "\n" * max(0, line - 1 - program.count("\n")) + text
        else:
            if program:
                (tmp_path / "page.py").write_text(program)
                run([sys.executable, "page.py"], tmp_path)
            for command in text.splitlines():
                if command.startswith(("shardplan ", "python ")):
                    run(
                        [
                            sys.executable,
                            *["-m"] * command.startswith("shardplan"),
                            *command.split("#")[0].split()[command.startswith("python") :],
                        ],
                        tmp_path,
                    )
                else:
                    assert command.startswith(INSTALLS), f"{page.name}: who runs {command!r}?"
    if program:
        (tmp_path / "page.py").write_text(program)
        run([sys.executable, "page.py"], tmp_path)
