"""The package keeps the house rules: short files and functions, one name per class, the field's words (docs/glossary.md)."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardplan"
FILES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 450, 60
LONG: dict[str, str] = {}
"""Functions that may be longer, each with its reason."""

RETIRED = (
    "aside", "askers?", "awaited", "bargain\\w*", "beside", "crowds?", "ease[ds]?", "haste", "lean", "leanest", "narrow(?:ed|ing)",
    "put_off", "quoted?", "settled?", "shrink\\w*", "shrunk\\w*", "thrift\\w*", "told", "toll", "untold", "alike", "heat", "stake",
)  # fmt: skip
"""Everyday words that once stood for a term of the field; `shard_alike` is a primitive of JAX."""
WORD = re.compile(rf"(?<![a-z])(?:{'|'.join(RETIRED)})(?![a-z])", re.IGNORECASE)


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_are_short_and_say_what_they_decide(path):
    source = path.read_text()
    tree = ast.parse(source)
    assert not source or ast.get_docstring(tree), "the first line of a file says what it decides"
    assert source.count("\n") <= FILE_LINES
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))
    long = {f"{name(path)}:{f.name}": f.end_lineno - f.lineno + 1 for f in functions}
    assert not {k: n for k, n in long.items() if n > FUNCTION_LINES and k not in LONG}


def test_class_names_are_unique():
    classes = Counter(n.name for path in FILES for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef))
    assert not {k: n for k, n in classes.items() if n > 1}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_retired_words_do_not_return(path):
    found = [
        f"{token.start[0]}: {token.string.strip()[:80]} ({hit[0]})"
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type in (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
        and (hit := WORD.search(token.string.replace("shard_alike", "")))
    ]
    assert not found


INTERNALS = "_jax.py", "_jax_expanded.py", "_jax_kernels.py", "_jax_programs.py"


@pytest.mark.parametrize("path", [p for p in FILES if p.name not in INTERNALS], ids=name)
def test_internals_of_jax_are_used_in_four_files(path):
    tree = ast.parse(path.read_text())
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert not [m for m in modules if re.match(r"jax\._src|jax\.extend|jaxlib|jax\.interpreters", m)]
