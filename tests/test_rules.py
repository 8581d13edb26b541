"""Every rule: frozen as text, proven in numbers on 8 devices, and wrong ones found out."""

import contextlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from shardplan.strategies.rule import RULES, Rule, RuleError, letters, parse, register_rule
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.shape import factors
from shardplan.strategies.rules.table import EXAMPLES, equations, rules_table
from shardplan.testing import check_rule

GOLDEN = Path(__file__).parent / "test_rules.txt"
BY_DEPENDENCE = {"random_bits", "random_split", "random_gamma"}
"""Primitives whose elements depend on their position: proven by what a shard depends on."""
WITHOUT_EXAMPLE = {
    "mulhi",  # jax does not lower it for CPU
    *"eq_to le_to lt_to threefry4x32 philox2x32 philox4x32 iota_2x32_shape geqp3 from_edtype to_edtype".split(),  # inside others
    *"empty empty2 broadcast_to tile stack unstack mulhi square zeros_like".split(),  # not made by every supported jax
    *"device_put sharding_constraint reshard layout_constraint with_memory_space_constraint".split(),  # placements
    *"scatter_add scatter_sub scatter_mul scatter_max scatter_min select_and_scatter cholesky_update".split(),  # other spellings
}


@contextlib.contextmanager
def ruled(primitive: str, function):
    """A rule in place of the one the primitive has."""
    old = RULES.get(primitive)
    RULES[primitive] = function
    try:
        yield
    finally:
        if old is None:
            del RULES[primitive]
        else:
            RULES[primitive] = old


def test_the_table_is_as_frozen():
    assert rules_table() == GOLDEN.read_text(), "the rules changed; if they are better now, write rules_table() to tests/test_rules.txt"


def test_every_rule_has_an_example():
    assert set(RULES) - {e.primitive for e in EXAMPLES} <= WITHOUT_EXAMPLE | {"threefry2x32", "random_clone"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.primitive}-{sum(x.primitive == e.primitive for x in EXAMPLES[:EXAMPLES.index(e)])}")
def test_the_split_op_equals_the_whole_one(example):
    for proof in check_rule(example.fn, *example.values(), primitive=example.primitive):
        assert proof.how == ("dependence" if example.primitive in BY_DEPENDENCE else "local")
