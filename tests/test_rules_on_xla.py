"""A part of what XLA makes of the rules, held against the frozen deviations: `benchmarks/rules_on_xla.py` compiles all of it."""

import sys
import zlib
from pathlib import Path

import pytest

from shardplan.xla import available

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import rules_on_xla

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

def part(shard: int, shards: int):
    """Programs by a hash of what they are."""
    for number, example in enumerate(rules_on_xla.EXAMPLES):
        for n, program in enumerate(rules_on_xla.programs(number)):
            if zlib.crc32(f"{example.primitive} {number} {n}".encode()) % shards == shard:
                yield program


def test_collectives_are_those_predicted_or_a_known_deviation():
    golden = rules_on_xla.GOLDEN.read_text()
    found = list(rules_on_xla.measure(list(part(0, 15))))
    assert len(found) > 20
    assert [v.line for v in found if v.kind != "same" and v.line not in golden] == []


def test_every_frozen_deviation_has_its_reason():
    blocks = rules_on_xla.GOLDEN.read_text().strip().split("\n\n")
    assert sorted(block.split("\n")[0] for block in blocks) == sorted(why for *_, why in rules_on_xla.REASONS)


def test_a_deviation_is_seen():
    program = next(p for n in range(len(rules_on_xla.EXAMPLES)) for p in rules_on_xla.programs(n) if p.planned)
    assert rules_on_xla.Verdict(program, ()).kind == "cheaper"
    assert rules_on_xla.Verdict(program, (*program.planned, ("all-gather", 1e9))).kind == "dearer"
    assert rules_on_xla.Verdict(program, program.planned).kind == "same"
    assert rules_on_xla.Verdict(program, "crash").kind == "uncompiled"
