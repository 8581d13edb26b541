"""The registry of facts about XLA: every fact has a test and a user, every id in the code has a fact."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from shardplan import cli
from shardplan.xla_model.facts import facts, facts_text

ROOT = Path(__file__).parent.parent
NAME = r"[a-z0-9]+(?:-[a-z0-9]+)+"
CITED = re.compile(rf"\b[Ff]acts?: ({NAME}(?:,\s+{NAME})*)")


@cache
def functions(path: str) -> set[str]:
    return {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("fact", facts().values(), ids=lambda fact: fact.id)
def test_every_fact_has_a_test_a_user_and_a_source(fact):
    importlib.import_module(fact.used)
    assert fact.says.endswith(".") and re.fullmatch(r"xla/[a-z_/]+\.cc", fact.source) and fact.seen
    path, _, name = fact.test.partition("::")
    assert name in functions(path)


def test_every_id_in_the_code_is_a_fact():
    texts = (path.read_text() for path in (ROOT / "shardplan").rglob("*.py"))
    cited = {name for text in texts for ids in CITED.findall(text) for name in re.split(r",\s+", ids)}
    assert len(cited) > 20 and cited <= facts().keys()


def test_the_command_line_prints_them(capsys):
    assert cli.main(["facts"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == facts_text()
    assert cli.main(["facts", "combine-threshold"]) == 0
    assert "gpu_collective_combiner_utils.cc" in capsys.readouterr().out
    assert cli.main(["facts", "no-such-fact"]) == 2
    assert "combine-threshold" in capsys.readouterr().err
