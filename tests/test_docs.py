"""Every snippet of the README and of docs/ runs as it is written, page by page, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import sweep

from shardplan.plan import Plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW_PAGES = ("training_jobs.md", "clusters.md", "frameworks.md")
"""Pages whose snippets plan many steps."""
BLOCK = re.compile(r"^(?:<!-- )?```(?P<kind>python|sh)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
INSTALLS = ("git clone", "make ", "pip install", "export ")
SOURCES = [
    path
    for room in ("shardplan", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / room).rglob("*.py"))
    if path != Path(__file__)
]
NAMED = re.compile(r"`(?P<file>(?:[\w-]+/)*\w[\w-]*\.(?:py|toml|txt|json|md|ipynb))`(?:: `(?P<name>[\w.]+)`)?")
"""A file of this repository as pages and docstrings name it, by the end of its path; behind it, perhaps, a name in it."""
ELSEWHERE = {"docs/clusters.md": {"doc/PERFORMANCE.md"}, "shardplan/xla/compiler/_backend.py": {"request.json", "result.json"}}
"""Files of other projects, and files that a program makes."""


def blocks(page: Path) -> list[tuple[str, str, int]]:
    """(kind, text, line) of each block; those in an HTML comment prepare what the page leaves out."""
    source = page.read_text()
    return [(m["kind"], m["text"], source.count("\n", 0, m.start("text")) + 1) for m in BLOCK.finditer(source)]


PRINTED = re.compile(r"^```python\n(?:print\([^\n]*\)\n)+```\n\n```\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
"""What a page says that its snippet prints."""


def plain(text: str) -> str:
    """Without source lines, which are those of the page, and the spaces that align columns."""
    return re.sub(r" +", " ", re.sub(r"\w+\.py:\d+", "*.py:*", text))


def run(command: list[str], folder: Path) -> str:
    """What the command prints."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}  # platform, devices and flags are those of conftest.py
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


DOCTEST = """import doctest
runner = doctest.DocTestRunner()
runner.run(doctest.DocTestParser().get_doctest({text!r}, globals(), "page", None, 0))
assert not runner.failures
"""
"""A block of a Python prompt as a program that checks what it prints."""


@pytest.mark.parametrize(
    "page",
    sweep(PAGES, lambda page: page.name in SLOW_PAGES),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_snippets_run(page, tmp_path):
    """Python blocks are one session per page; a block that begins with `# name.py` is that file, too; commands run between them.

    What stands below a block of `print(...)` is what it prints.
    """
    program = ""

    def add(text: str, line: int) -> None:
        nonlocal program
        program += "\n" * max(0, line - 1 - program.count("\n")) + text

    for kind, text, line in blocks(page):
        if named := re.match(r"# (\w+\.py)\n", text):
            (tmp_path / named[1]).write_text(text)
        if kind == "python":
            text = DOCTEST.format(text=text) if text.startswith(">>>") else text
            add(text, line)
        else:
            for number, command in enumerate(text.splitlines()):
                if command.startswith(("shardplan ", "python ")):
                    words = command.split("#")[0].split()
                    words = words[1:] if words[0] == "python" else ["-m", *words]
                    ok = (0, 1) if "diff" in words else (0,)  # like diff, 1 says "they differ"
                    add(f"assert __import__('subprocess').run({[sys.executable, *words]}).returncode in {ok}\n", line + number)
                else:
                    assert command.startswith(INSTALLS), f"{page.name}: who runs {command!r}?"
    if program:
        (tmp_path / "page.py").write_text(program)
        said = plain(run([sys.executable, "page.py"], tmp_path))
        for printed in PRINTED.finditer(page.read_text()):
            assert plain(printed["text"]) in said, f"{page.name} shows what is not printed:\n{printed['text']}\n{said}"


@pytest.fixture(scope="module")
def known() -> dict[str, list[Path]]:
    """End of a path -> the files of this repository that it may name."""
    folders = ("shardplan", "docs", "tests", "benchmarks", "examples", "notebooks")
    files = (*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*")))
    out: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(ROOT).parts
        for n in range(len(parts)):
            out.setdefault("/".join(parts[n:]), []).append(path)
    return out


def stale_names(text: str, known: dict[str, list[Path]], elsewhere=frozenset()) -> list[str]:
    """What a text names that is not there: a file, or `name` in "`file.py`: `name`"."""
    found = [match for match in NAMED.finditer(text) if match["file"] not in elsewhere]

    def there(match) -> bool:
        word = re.compile(rf"\b{(match['name'] or '').split('.')[-1]}\b")
        return any(word.search(path.read_text()) for path in known.get(match["file"], ()))

    return [match[0] for match in found if not there(match)]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md", *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_page_or_docstring_names_exists(path, known):
    assert not stale_names(path.read_text(), known, ELSEWHERE.get(str(path.relative_to(ROOT)), frozenset()))


def test_a_stale_name_is_found(known):
    text = "`search/bound.py`: `lower_bound`, `bound.py`, `search/moved.py`, `search/bound.py`: `upper_bound`, `docs/other.md`"
    assert stale_names(text, known) == ["`search/moved.py`", "`search/bound.py`: `upper_bound`", "`docs/other.md`"]


def test_the_first_program_is_an_example_that_runs():
    assert f"```python\n{(ROOT / 'examples' / 'job.py').read_text()}```" in (ROOT / "README.md").read_text()


def test_the_command_line_takes_the_decorated_step_and_the_first_program_is_sharded_on_gpus(tmp_path):
    words = f"-m shardplan plan {ROOT / 'examples' / 'job.py'}:example --mesh data=8,model=8 --cluster h100 -o wide.json"
    run([sys.executable, *words.split()], tmp_path)
    plan = Plan.load(tmp_path / "wide.json")
    assert all(x.layout.shards(plan.mesh) > 1 for x in plan.inputs if x.kind == "parameters")
    assert plan.donated == ("state",)  # as the decorated step says


def test_recipes_are_short_and_apply():
    """Each recipe of CONTRIBUTING.md is a diff of under 30 lines of the code as it stands."""
    recipes = re.findall(r"^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(recipes) == 5
    for recipe in recipes:
        assert recipe.count("\n") < 30
        subprocess.run(["git", "apply", "--check", "-"], cwd=ROOT, input=recipe, text=True, check=True)


def test_a_reader_finds_ten_answers_in_two_steps():
    """From concepts.md to a page that it links, and from there to a file that has the name."""
    docs, concepts = ROOT / "docs", (ROOT / "docs" / "concepts.md").read_text()
    row = re.compile(r"^\| .* \| \[.*\]\((.*)\) \| `(.*)`: `(\w+)` \|$", re.MULTILINE)
    answers = row.findall((docs / "readers_test.md").read_text())
    assert len(answers) == 10
    for page, file, name in answers:
        text = (ROOT / "CONTRIBUTING.md" if page == "contributing.md" else docs / page).read_text()
        room = page.removeprefix("rooms/").removesuffix(".md")
        assert f"({page})" in concepts, f"concepts.md links no {page}"
        assert file.removeprefix(f"{room}/") in text, f"{page} does not name {file}"
        assert re.search(rf"\b{name}\b", (ROOT / "shardplan" / file).read_text()), f"{file} has no {name}"
