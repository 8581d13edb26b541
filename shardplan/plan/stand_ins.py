"""Stand-ins for pytree nodes whose class takes nothing but arrays.

`jax.jit` rebuilds the arguments and results of a step with arrays and tracers alone, so that a class may look at its leaves as it is
made: it asks for their dtype, or multiplies them. Planning rebuilds them with shapes, shardings and numbers as well. Nodes that refuse
these are replaced where they come in, and are back where the step, or its caller, gets them.

    {"w": w, "scale": LossScale(x)}   stood_in ->   {"w": w, "scale": StandIn(x)}   stood_back ->   {"w": w, "scale": LossScale(x)}

JAX says that such classes should expect any object (docs.jax.dev, "Custom pytrees and initialization"); not all do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
class StandIn:
    """A node of a pytree in place of one of a class that takes nothing but arrays.

    Attributes:
        children: of the node.
        node: its structure, with the children as leaves.
        keys: of the children.
    """

    def __init__(self, children: Sequence, node: Any, keys: tuple):
        self.children, self.node, self.keys = tuple(children), node, keys

    def tree_flatten_with_keys(self):
        """As JAX takes it."""
        return (*zip(self.keys, self.children, strict=True),), (self.node, self.keys)

    @classmethod
    def tree_unflatten(cls, data: tuple, children: Sequence) -> StandIn:
        """As JAX gives it."""
        return cls(children, *data)

    def __repr__(self) -> str:
        return f"StandIn({self.node}, {', '.join(map(repr, self.children))})"


class _AnyObject:
    """A leaf that is no array."""


def stood_in(tree: Any) -> Any:
    """A pytree with stand-ins for nodes that refuse leaves other than arrays; the same object where none does."""
    return _replaced(tree) if _cached(_refuses, jax.tree.structure(tree)) else tree


def stood_back(tree: Any) -> Any:
    """A pytree with the nodes that stand-ins stand for; the same object where there are none."""
    if not holds_stand_ins(jax.tree.structure(tree)):
        return tree
    return jax.tree.map(lambda x: x.node.unflatten(map(stood_back, x.children)) if _is_stand_in(x) else x, tree, is_leaf=_is_stand_in)


def holds_stand_ins(structure: Any) -> bool:
    """Whether a structure has stand-ins."""
    return _cached(_holds, structure)


def on_stand_ins(fun: Callable) -> Callable:
    """A function that takes stand-ins for nodes of its arguments and returns them for nodes of its results."""

    @wraps(fun)
    def standing_in(*args, **kwargs):
        return stood_in(fun(*map(stood_back, args), **{k: stood_back(x) for k, x in kwargs.items()}))

    return standing_in


def _is_stand_in(x: Any) -> bool:
    return isinstance(x, StandIn)


def _replaced(node: Any) -> Any:
    """`stood_in`, node by node: from its children up."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if jax.tree_util.treedef_is_leaf(structure):
        return node
    children = [_replaced(child) for _, child in pairs]
    if _refuses(structure):
        return StandIn(children, structure, tuple(keys[0] for keys, _ in pairs))
    return structure.unflatten(children)


def _refuses(structure: Any) -> bool:
    """Whether some node of a structure cannot be made with any objects as leaves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            structure.unflatten([_AnyObject()] * structure.num_leaves)
        except Exception:  # whatever the class raises
            return True
    return False


def _holds(structure: Any) -> bool:
    node = structure.node_data()
    return node is not None and (node[0] is StandIn or any(map(_holds, structure.children())))


@lru_cache(maxsize=256)
def _known(asked: Callable[[Any], bool], structure: Any) -> bool:
    return asked(structure)


def _cached(asked: Callable[[Any], bool], structure: Any) -> bool:
    """The answer, found once per structure; each time for one without a hash, which may be of what a class keeps with its leaves."""
    try:
        return _known(asked, structure)
    except TypeError:  # no hash
        return asked(structure)
