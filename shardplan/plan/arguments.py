"""Which leaves of a plan belong to which argument of its step, which argument a pytree is, and which arrays are one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import jax

from shardplan.plan.data import Leaf


def path_text(keys: Sequence) -> str:
    """A pytree path: "dense/kernel"."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def tree_paths(tree) -> list[str]:
    """The path of every leaf of a structure."""
    return [path_text(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(range(tree.num_leaves)))]


def arguments(in_tree) -> list:
    """Structures of the single arguments of a call, from that of (args, kwargs)."""
    return [part for side in in_tree.children() for part in side.children()]


def same_paths(tree, other) -> bool:
    """Whether two trees have leaves at the same paths; what else they hold, as the functions in a flax `TrainState`, may differ."""
    return tree.num_leaves == other.num_leaves and tree_paths(tree) == tree_paths(other)


def arguments_like(inputs: Sequence[Leaf], in_tree: Any, tree: Any, same: Callable[[Any, Any], bool]) -> Iterator[list[Leaf]]:
    """Planned leaves of every argument whose structure is the same as that of `tree`."""
    left = iter(inputs)
    for part in arguments(in_tree):
        leaves = list(islice(left, part.num_leaves))
        if same(part, tree):
            yield leaves


def buffer(x) -> int | tuple[int, int]:
    """The memory of an array on its first device here, or the identity of anything else."""
    try:
        first = x.addressable_data(0)
        return (first.unsafe_buffer_pointer(), first.nbytes) if first.nbytes else id(x)
    except Exception:  # no array, of no memory, deleted, of keys, or of another process
        return id(x)
