"""What the `partition` of a `custom_partitioning` call serves: asked for shardings, it answers with a `lower_fn` from shards to shards.

    x (a b), w (b c) -> y (a c), b over 2 devices    lambda x, w: psum(x @ w, "b")    y is joined over b by a sum

The only collectives that a `lower_fn` may run are sums, maxima and minima over all shards of a factor that its result does not have, as
the last thing it does with that result: they are left out, the result is partial, and the plan joins it where that is cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardplan import _jax, _jax_kernels
from shardplan.strategies.rule import Dims, Rule, flat_factors


@dataclass(frozen=True)
class AskedShardings:
    """Shardings asked of a `partition`: one mesh axis, of the factor's name, per sharded factor."""

    mesh: AbstractMesh
    operands: list[NamedSharding]
    results: list[NamedSharding]

    @classmethod
    def of(cls, rule: Rule, counts: Mapping[str, int]) -> AskedShardings:
        """With so many shards per factor."""
        axes = tuple(counts)
        mesh = AbstractMesh(tuple(counts.values()), axes, axis_types=(AxisType.Auto,) * len(axes))
        axes_of = [[[tuple(a for a in d if a in counts) for d in dims] for dims in side] for side in (rule.operands, rule.results)]
        return cls(mesh, *([NamedSharding(mesh, _spec(of)) for of in side] for side in axes_of))


def _spec(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(of[0] if len(of) == 1 else of or None for of in axes))


Specs = list[tuple[tuple[str, ...], ...] | None]
"""Of every tensor, per dim its mesh axes; None of a sharding that has none by dim."""


def answer(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int]) -> tuple[Callable, Specs, Specs]:
    """What a `partition` answers to so many shards per factor: its `lower_fn`, the specs of all tensors, and those it was asked for."""
    asked = AskedShardings.of(rule, counts)
    trees = params["in_tree"], params["out_tree"]
    types = [
        tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(xs, of, strict=True)])
        for xs, of, tree in zip((ins, out), (asked.operands, asked.results), trees, strict=True)
    ]
    _, run, results, operands = params["partition"](*params["static_args"], asked.mesh, *types)
    got = [s for tree, of in zip(trees, (operands, results), strict=True) for s in tree.flatten_up_to(of)]
    ranks = [len(x.shape) for x in (*ins, *out)]
    sides = (got, [*asked.operands, *asked.results])
    answered, wanted = ([_entries(s, n) for s, n in zip(of, ranks, strict=True)] for of in sides)
    return run, answered, wanted


def _entries(sharding, rank: int) -> tuple[tuple[str, ...], ...] | None:
    if not isinstance(sharding, NamedSharding):
        return None
    spec = (*sharding.spec, *[None] * (rank - len(sharding.spec)))
    return tuple((d,) if isinstance(d, str) else d or () for d in spec)


def refusal(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int]) -> str:
    """Why a call cannot run with so many shards per factor; "" if it can."""
    try:
        joins(params, rule, ins, out, counts)
    except Exception as error:  # of whichever kind: it is the user's code
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).split("\n")[0]


def joins(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int]) -> dict[str, str]:
    """Sharded factors that some results do not have -> how these are joined over the shards ("sum", "max", "min").

    Raises:
        ValueError: `partition` or its `lower_fn` does not serve so many shards per factor.
        Exception: what these two raise.
    """
    made: list[_Value] = []

    def run(*shards):
        made.extend(_run(params, rule, ins, out, counts, shards))
        return [x.array for x in made]

    shards = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(local_shapes(rule.operands, ins, counts), ins, strict=True)]
    got = [(tuple(x.shape), x.dtype) for x in jax.eval_shape(run, *shards)]
    wanted = [(s, x.dtype) for s, x in zip(local_shapes(rule.results, out, counts), out, strict=True)]
    if got != wanted:
        raise ValueError(f"its lower_fn makes {_text(got)} of shards where the rule has {_text(wanted)}")
    return _common_joins(made, rule.results)


def _common_joins(made: Sequence[_Value], results: Sequence[Dims]) -> dict[str, str]:
    """How the results that do not have a factor are joined over its shards.

    The plan joins all of them in one way. So each that differs between devices has to be joined, and where some are summed, so has each
    that is the same on all devices.
    """
    found: dict[str, str] = {}
    for k, (value, dims) in enumerate(zip(made, results, strict=True)):
        own = set(flat_factors(dims))
        if missing := value.varies - own:
            raise ValueError(f"its lower_fn does not join results[{k}] over the shards of {', '.join(sorted(missing))}")
        if own & value.joined.keys():
            raise ValueError(f"its lower_fn joins results[{k}] over shards that the rule keeps apart")
        for a, kind in value.joined.items():
            if found.setdefault(a, kind) != kind:
                raise ValueError(f"its lower_fn joins some results by {found[a]}, others by {kind}")
    for k, (value, dims) in enumerate(zip(made, results, strict=True)):
        for a in sorted(found.keys() - value.joined.keys() - set(flat_factors(dims))):
            if found[a] == "sum":  # the largest and the smallest of equal values are these
                raise ValueError(f"its lower_fn joins some results over the shards of {a} by a sum, and not results[{k}]")
    return found


def run_shards(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int], shards: Sequence) -> list:
    """Results of a call on shards, those of `joins` not joined."""
    return [x.array for x in _run(params, rule, ins, out, counts, shards)]


# ---- what `lower_fn` does with shards

COLLECTIVES = {"psum": "sum", "pmax": "max", "pmin": "min"}


@dataclass(frozen=True)
class _Value:
    """A value of `lower_fn`: the factors whose shards make it differ from device to device, and those it is yet to be joined over."""

    array: Any
    varies: frozenset[str] = frozenset()
    joined: Mapping[str, str] = field(default_factory=dict)


def _run(params: Mapping[str, Any], rule: Rule, ins, out, counts: Mapping[str, int], shards: Sequence) -> list[_Value]:
    """Values of all results; raises what `joins` does."""
    lower, answered, wanted = answer(params, rule, ins, out, counts)
    for got, want in zip(answered, wanted, strict=True):
        if got != want:
            raise ValueError(f"its partition answers {got and _spec(got)} where {_spec(want or ())} is asked for")
    closed = _jax_kernels.traced_on_axes(lambda *xs: jax.tree.leaves(lower(*params["in_tree"].unflatten(xs))), shards, counts)
    varies = [frozenset(flat_factors(dims)) & counts.keys() for dims in rule.operands]
    return _values(closed, [_Value(x, of) for x, of in zip(shards, varies, strict=True)])


def _values(closed, values: Sequence[_Value]) -> list[_Value]:
    """The results of a program traced on named axes; its last collectives become marks, and any other raises."""

    def run(_, eqn, operands: Sequence[_Value]) -> list[_Value]:
        if (inner := _jax.inner_jaxpr(eqn)) is not None:
            return _values(inner, operands)
        if any(x.joined for x in operands):
            raise ValueError(f"its lower_fn computes {eqn.primitive.name} of what it has joined over shards")
        kind = COLLECTIVES.get(eqn.primitive.name)
        if kind and eqn.params["axis_index_groups"] is None:
            return [_Value(x.array, x.varies.difference(eqn.params["axes"]), dict.fromkeys(eqn.params["axes"], kind)) for x in operands]
        if axes := _jax_kernels.named_axes(eqn):
            raise ValueError(f"its lower_fn runs {eqn.primitive.name} over the shards of {', '.join(axes)}")
        varies = frozenset[str]().union(*(x.varies for x in operands))
        return [_Value(x, varies) for x in _jax.bind(eqn, [x.array for x in operands], context=False)]

    return _jax.interpret(closed.jaxpr, [*map(_Value, closed.consts), *values], run, literal=lambda atom: _Value(atom.val))


def _text(types) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in types)


def local_shapes(tensors: Sequence[Dims], avals, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Shapes of the shards of tensors."""
    of = zip(tensors, avals, strict=True)
    return [tuple(n // math.prod(counts.get(a, 1) for a in d) for d, n in zip(dims, x.shape, strict=True)) for dims, x in of]
