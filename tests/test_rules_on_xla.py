"""A part of what XLA makes of the rules, held against the frozen deviations: `benchmarks/rules_on_xla.py` compiles all of it."""

import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from shardplan.strategies.register import register_rule
from shardplan.strategies.rule import RULES
from shardplan.testing import check_rule
from shardplan.xla import available
from shardplan.xla.report.one_op import OneOpVerdict

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
                yield number, program


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
    assert OneOpVerdict(program, ()).kind == "cheaper"
    assert OneOpVerdict(program, (*program.planned, ("all-gather", 1e9))).kind == "dearer"
    assert OneOpVerdict(program, program.planned).kind == "same"
    assert OneOpVerdict(program, "crash").kind == "uncompiled"


@pytest.fixture
def mine():
    """A function as a primitive of the user's own."""
    made = []

    def primitive(name, fn):
        found = Primitive(name)
        found.def_impl(fn)
        found.def_abstract_eval(lambda *xs: jax.typeof(jax.eval_shape(fn, *xs)))
        mlir.register_lowering(found, mlir.lower_fun(fn, multiple_results=False))
        made.append(name)
        return found

    yield primitive
    for name in made:
        del RULES[name]


def test_a_rule_of_the_users_is_proven_three_ways_with_one_call(mine, tmp_path):
    product, transform = mine("my_product", jnp.dot), mine("my_transform", jnp.fft.fft)
    register_rule(product, "a b, b c -> a c", reduce="b")
    register_rule(transform, "a b -> a b", replicated="b")

    def both(x, y):
        return transform.bind(product.bind(x, y))

    args = jnp.ones((16, 64)), jnp.ones((64, 32))
    first, second = check_rule(both, *args, target="h100:2", golden=tmp_path / "rules.txt")
    assert first.shardings and first.deviations == ()
    assert [(v.kind, v.program.strategy, v.program.planned) for v in second.deviations] == [("dearer", "sharded a:2", ())]
    text = (tmp_path / "rules.txt").read_text()
    assert text.startswith("my_product  float32[16,64], float32[64,32] -> float32[16,32]  a b, b c -> a c  reduce b\nmy_transform  ")
    assert "\n    dearer     sharded a:2            -                            all-gather " in text
    register_rule(transform, "a b -> a b", replicated="b", shard_local=True)
    assert [proof.deviations for proof in check_rule(both, *args, target="h100:2")] == [(), ()]
