"""The signature of a call: which arguments are operands of the step, how their leaves are called, and which of them are state."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from typing import Any

import jax

from shardplan import _jax
from shardplan.costs.pins import PinDims, pin_dims
from shardplan.errors import ShardingError
from shardplan.plan.arguments import arguments, path_text
from shardplan.plan.padded import with_own_shapes
from shardplan.plan.stand_ins import stood_in

NO_NUMBERS = "OSUMm"
"""Kinds of numpy's dtypes that JAX has no arrays of: objects, bytes, text, dates, times."""


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, keywords sorted by name; `static` has the numbers and names of those that are static."""

    args: tuple
    kwargs: dict[str, Any]
    static: frozenset[int | str]

    @classmethod
    def of(cls, args: tuple, kwargs: Mapping[str, Any], numbers: frozenset[int], names: frozenset[str]) -> Call:
        """A call of a function with these static arguments; what takes nothing but arrays is stood in for."""
        n = len(args)
        static = frozenset(k % n for k in numbers if -n <= k < n) | (names & kwargs.keys())
        args = tuple(x if k in static else stood_in(x) for k, x in enumerate(args))
        return cls(args, {k: x if k in static else stood_in(x) for k, x in sorted(kwargs.items())}, static)

    @property
    def positional(self) -> tuple:
        """Positional arguments that are not static."""
        return tuple(x for n, x in enumerate(self.args) if n not in self.static)

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments that are not static."""
        return {k: x for k, x in self.kwargs.items() if k not in self.static}

    @property
    def operands(self) -> tuple:
        """What is not static, keyword arguments last."""
        return (*self.positional, *self.keywords.values())

    @property
    def signature(self):
        """Equal for calls that share a plan.

        Raises:
            ShardingError: a static argument is not hashable.
        """
        static = [(n, x) for n, x in (*enumerate(self.args), *self.kwargs.items()) if n in self.static]
        for n, x in static:
            try:
                hash(x)
            except TypeError:
                raise ShardingError(
                    f"static argument {n!r} of type {type(x).__name__} is not hashable.\n"
                    "  way out: make it hashable, or leave it out of static_argnums"
                ) from None
        leaves, tree = jax.tree.flatten((self.positional, self.keywords))
        return tree, tuple(map(_leaf_signature, leaves)), tuple(static)

    def with_own_shapes(self) -> Call:
        """The call with shapes in place of what is held padded."""

        def one(n: int | str, x):
            return x if n in self.static else with_own_shapes(x)

        return Call(tuple(one(n, x) for n, x in enumerate(self.args)), {k: one(k, x) for k, x in self.kwargs.items()}, self.static)

    def abstract(self) -> tuple[list, dict[str, Any]]:
        """The call with shapes for arrays, as `jax.jit(f).trace` takes it."""

        def one(n: int | str, x):
            return x if n in self.static else jax.tree.map(_jax.abstract, x)

        return [one(n, x) for n, x in enumerate(self.args)], {k: one(k, x) for k, x in self.kwargs.items()}

    def labels(self, fun: Callable) -> tuple[str, ...]:
        """Pytree path of every leaf of the operands, each once: "params/dense/kernel"; "[n]" for arguments without a name."""
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (ValueError, TypeError):
            parameters = []
        named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        heads = [name for n, name in enumerate(named) if n not in self.static][: len(self.positional)]
        heads += [f"[{n}]" for n in range(len(heads), len(self.positional))]
        paths = jax.tree_util.tree_leaves_with_path(dict(enumerate(self.operands)))
        heads += self.keywords
        return unique("/".join(x for x in (heads[keys[0].key], path_text(keys[1:])) if x) for keys, _ in paths)


def _leaf_signature(leaf):
    try:
        weak = getattr(leaf, "weak_type", getattr(getattr(leaf, "aval", None), "weak_type", False))
        return leaf.shape, leaf.dtype, bool(weak)
    except AttributeError:
        return type(leaf)


def unique(labels: Iterable[str]) -> tuple[str, ...]:
    """The labels, each once: a number is appended where keys with slashes make two paths equal."""
    labels = list(labels)
    given, numbers = set(labels), defaultdict(lambda: count(1))

    def name(label: str) -> str:
        n = next(n for n in numbers[label] if n == 1 or f"{label}~{n}" not in given)
        return label if n == 1 else f"{label}~{n}"

    return tuple(map(name, labels))


def refuse_non_arrays(call: Call, fun: Callable) -> None:
    """Raises ShardingError if a leaf of an operand is neither an array nor a number, or is a mutable array."""
    for n, leaf in enumerate(jax.tree.leaves(call.operands)):
        refuse_refs([leaf], "takes")
        array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        if array and getattr(leaf.dtype, "kind", "f") in NO_NUMBERS:
            raise ShardingError(
                f"argument {call.labels(fun)[n]} is an array of dtype {leaf.dtype}, which JAX has no arrays of.\n"
                "  way out: an array of numbers; what is none stays outside of the step"
            )
        if array and not all(isinstance(size, int) for size in leaf.shape):
            raise ShardingError(
                f"argument {call.labels(fun)[n]} has a symbolic size, {tuple(map(str, leaf.shape))}; a plan is for known sizes.\n"
                "  way out: plan with the largest sizes that you run"
            )
        if not array and not isinstance(leaf, (int, float, complex)):
            raise ShardingError(
                f"argument {call.labels(fun)[n]} is {type(leaf).__name__} {str(leaf)[:40]!r}, not an array.\n"
                f"  ways out: {_ways_out(call, leaf)}"
            )


def _ways_out(call: Call, leaf: Any) -> str:
    """How to keep what is no array out of the planned arguments: a whole argument, a function held by a module, anything else."""
    for n, argument in (*enumerate(call.args), *call.kwargs.items()):
        if argument is leaf:
            static = f"static_argnums={n}" if isinstance(n, int) else f"static_argnames={n!r}"
            bound = ", or a bound method: auto(mesh)(object.method)" if n == 0 and not isinstance(leaf, str) else ""
            return f"auto(mesh, {static}){bound}"
    if callable(leaf):
        return (
            "part the arrays from the rest outside of the step: arrays, rest = eqx.partition(module, eqx.is_array), and join them "
            "inside: eqx.combine(arrays, rest); or mark it as a static field of its module"
        )
    return "make it an array, or name it in static_argnums or static_argnames"


def refuse_refs(values: Iterable, how: str) -> None:
    """Raises ShardingError if a value is a mutable array."""
    if found := [jax.typeof(x) for x in values if _jax.is_ref(x)]:
        raise ShardingError(
            f"the step {how} a mutable array, {found[0]}, which a plan cannot place.\n"
            "  ways out: take the array and return the new one; or jax.new_ref inside the step"
        )


# ---- state


def state_pairs(in_tree, in_leaves: Sequence, out_tree, out_leaves: Sequence) -> Iterator[tuple[int, int]]:
    """(input, output) leaf numbers of state: arguments that are returned with the same structure, shapes and dtypes.

    Either the result is one such argument, or its parts are.
    """

    def parts(trees, leaves) -> list[tuple]:
        ends = list(accumulate((tree.num_leaves for tree in trees), initial=0))
        return [(a, (tree, [(x.shape, x.dtype) for x in leaves[a:b]])) for tree, (a, b) in zip(trees, pairwise(ends), strict=True)]

    taken = parts(arguments(in_tree), in_leaves)
    (result,) = parts([out_tree], out_leaves)
    whole = result[1] in [part for _, part in taken] or not out_tree.children()
    for start, part in [result] if whole else parts(out_tree.children(), out_leaves):
        found = next((k for k, (_, other) in enumerate(taken) if other == part), None) if part[1] else None
        if found is not None:
            in_start, _ = taken.pop(found)
            yield from ((in_start + n, start + n) for n in range(len(part[1])))


# ---- pins


def prefix_pins(prefix, tree, leaves: Sequence, who: str) -> dict[int, PinDims]:
    """Pins by flat number from a tree prefix of shardings, for leaves of this tree."""
    if prefix is None:
        return {}

    def is_leaf(x):
        return x is None or x is _jax.UNCONSTRAINED or isinstance(x, (jax.sharding.PartitionSpec, jax.sharding.Sharding))

    try:
        spread = _jax.broadcast_prefix(prefix, jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf)
    except ValueError as error:
        what, entry = ("takes", "argument") if who[0] == "i" else ("returns", "result")
        said = re.sub(r"\s+", " ", str(error).replace("tree_map tree", who))
        raise ShardingError(
            f"{who} is no tree prefix of what the step {what}: {said}\n"
            f"  way out: one entry per {entry}, each None, a spec for all arrays of it, or a tree of specs with its keys"
        ) from None
    given = ((n, sharding) for n, sharding in enumerate(spread) if sharding is not None and sharding is not _jax.UNCONSTRAINED)
    specs = {n: spec_of(sharding, who) for n, sharding in given}
    return {n: pin_dims(spec, max(len(leaves[n].shape), len(spec))) for n, spec in specs.items()}


def spec_of(sharding, who: str):
    """The PartitionSpec of a spec or a NamedSharding."""
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, (jax.sharding.PartitionSpec, tuple)):
        axes = [sharding] if isinstance(sharding, str) else sharding if isinstance(sharding, list) else []
        free = "or leave it out" if who.startswith("pin") else "None to have it planned"
        way = f"P({', '.join(map(repr, axes))})" + ("" if axes else f" for replicated, {free}")
        way = f"{sharding}, without quotes" if isinstance(sharding, str) and "(" in sharding else way
        raise ShardingError(f"{who}: {sharding!r} is no PartitionSpec or NamedSharding.\n  way out: {way}")
    names = [name for entry in spec for name in (entry if isinstance(entry, (tuple, list)) else (entry,))]
    if odd := [name for name in names if not (name is None or name is _jax.UNCONSTRAINED or isinstance(name, str))]:
        raise ShardingError(
            f"{who}: {odd[0]!r} in {spec!r} is no mesh axis.\n  way out: per dim the name of an axis, a tuple of names, or None"
        )
    return spec
