"""Facts about primitives stand beside their rules: no other code compares a primitive's name."""

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import shardplan
from shardplan.ir.traits import TRAITS, Traits, traits_of
from shardplan.strategies.rule import RULES

PACKAGE = Path(shardplan.__file__).parent
ALLOWED = "_jax.py", "_jax_kernels.py", "strategies", "ir/parse.py", "ir/traits.py", "testing"
"""The boundary to JAX, the rules and their proofs, and the parser."""


def is_name_of_primitive(node: ast.expr) -> bool:
    """`x.primitive`, `x.primitive.name` or a variable `primitive`."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        node = node.value
    return getattr(node, "attr", getattr(node, "id", "")) == "primitive"


def holds_text(node: ast.AST) -> bool:
    return any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in ast.walk(node))


def comparisons(tree: ast.AST):
    """Lines that compare a primitive's name with text."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(map(is_name_of_primitive, [node.left, *node.comparators])) and holds_text(node):
                yield node.lineno
            case ast.Match() if is_name_of_primitive(node.subject):
                yield node.lineno
            case ast.Call(func=ast.Attribute(attr="startswith" | "endswith", value=text)) if is_name_of_primitive(text):
                yield node.lineno


def test_no_other_room_compares_names_of_primitives():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(ALLOWED)
        for line in comparisons(ast.parse(path.read_text()))
    ]
    assert not found, f"ask for a trait instead (shardplan/ir/traits.py): {found}"


@pytest.mark.parametrize(
    "code",
    [
        'op.primitive == "add"',
        'eqn.primitive.name in ("add", "sub")',
        'primitive.startswith("reduce_")',
        'match op.primitive:\n case "add": pass',
    ],
)
def test_comparisons_are_found(code):
    assert list(comparisons(ast.parse(code)))


def test_every_trait_is_that_of_some_primitive_and_explained():
    source = inspect.getsource(Traits)
    for field in fields(Traits):
        assert any(getattr(traits, field.name) != field.default for traits in TRAITS.values()), field.name
        assert re.search(rf"^    {field.name}: .*  # \S", source, re.MULTILINE), field.name


def test_an_unknown_primitive_has_no_traits():
    assert traits_of("warp_drive") == Traits()


def test_traits_belong_to_border_ops_and_to_primitives_with_a_rule_or_a_program_of_their_own():
    others = {name for name, traits in TRAITS.items() if not (traits.border or traits.shapes_in_params or traits.layouts_in_params)}
    assert others <= set(RULES)


def test_a_border_op_is_no_primitive_of_jax():
    assert not {name for name, traits in TRAITS.items() if traits.border} & set(RULES)
