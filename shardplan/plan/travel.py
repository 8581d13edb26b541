"""A plan for programs without shardplan: rules by path, Python source, logical axes of flax and MaxText, and a file's contract.

These carry the layouts of the step's inputs and outputs between steps. What the plan decides inside the step is left to XLA, which
propagates shardings from there; a planned step is `auto(mesh, plan="plan.json")`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan import __version__
from shardplan.costs.pins import matches, nearest_paths
from shardplan.errors import ShardingError
from shardplan.plan.data import Leaf, PlanRecord
from shardplan.plan.partition_rules import Entries, PathRule, entries, path_rules
from shardplan.units import clean

LogicalRule = tuple[str, str | tuple[str, ...] | None]
"""Name of a logical axis, and the mesh axes that shard it."""


def rules(plan: PlanRecord, under: str = "") -> tuple[PathRule, ...]:
    """The answer of `Plan.to_rules`, as entries."""
    found = {path: entries(leaf.layout.spec()) for path, leaf in _leaves(plan, under).items()}
    return path_rules(found)


def _leaves(plan: PlanRecord, under: str) -> dict[str, Leaf]:
    """The inputs below a path, by the rest of their paths."""
    if not isinstance(under, str):
        raise ShardingError(f"rules are of the inputs below a path, not {type(under).__name__}.\n  way out: such as 'state/params'")
    head = f"{under.strip('/')}/" if under else ""
    found = {leaf.path[len(head) :]: leaf for leaf in plan.inputs if leaf.path.startswith(head)}
    if not found and plan.inputs:
        some = nearest_paths([x.path for x in plan.inputs], under)
        raise ShardingError(f"no input of the step is below {under!r}.\n  inputs: {some}\n  way out: to_rules() for all of them")
    return found


# ---- the contract of a plan file


def contract(plan: PlanRecord) -> dict[str, Any]:
    """What a program without shardplan needs of a plan: mesh, rules by path, donated arguments, versions, options, cluster.

    If state is held padded, its shapes, for which its layouts are.
    """
    padded = {x.path: list(shape) for x in plan.inputs if (shape := x.held_shape(plan.mesh)) != x.shape}
    return {
        "mesh": dict(plan.mesh),
        "rules": [[pattern, list(spec)] for pattern, spec in rules(plan)],
        "donated": list(plan.donated),
        "compiler_options": dict(plan.compiler_options),
        "cluster": plan.cluster,
        "versions": {"jax": plan.jax, "shardplan": __version__},
        **({"padded": padded} if padded else {}),
    }


# ---- Python


PYTHON = '''\
"""How a step is sharded over mesh {mesh}, as shardplan {version} planned it for {cluster}; needs nothing but jax.

    mesh = make_mesh()
    state = jax.device_put(state, shardings("{first}", state, mesh))
    step = jax.jit(train_step, in_shardings=..., out_shardings=..., donate_argnums=..., compiler_options=COMPILER_OPTIONS)
"""

import re

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {axes}
DONATED = {donated}
COMPILER_OPTIONS = {options}
RULES = [  # the first pattern that is found in a path holds; a path begins with the name of its argument
{rules}
]


def make_mesh(devices=None):
    """The mesh of the plan."""
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH), devices=devices)


def spec(path):
    """The PartitionSpec of an input, such as spec("{example}")."""
    return next(found for pattern, found in RULES if re.search(pattern, path))


def shardings(argument, tree, mesh):
    """NamedShardings of all leaves of an argument of the step, as a pytree."""

    def one(keys, _):
        rest = jax.tree_util.keystr(keys, simple=True, separator="/")
        return NamedSharding(mesh, spec(f"{{argument}}/{{rest}}" if rest else argument))

    return jax.tree_util.tree_map_with_path(one, tree)
'''


def python_source(plan: PlanRecord) -> str:
    """The answer of `Plan.to_python`."""
    path = plan.inputs[0].path if plan.inputs else ""
    return PYTHON.format(
        mesh=clean(str(plan.mesh)),
        version=__version__,
        cluster=clean(plan.cluster).replace('"', "'").replace("\\", "/"),
        first=_escaped(path.split("/")[0]),
        example=_escaped(path),
        axes=_literal(dict(plan.mesh)),
        donated=_literal(tuple(plan.donated)),
        options=_literal(dict(plan.compiler_options)),
        rules="\n".join(f"    ({_raw(pattern)}, {spec_text(spec)})," for pattern, spec in rules(plan)),
    )


def spec_text(spec: Entries) -> str:
    """Entries as the source of a PartitionSpec, P(None, "model")."""

    def one(entry: str | tuple[str, ...] | None) -> str:
        return f"({', '.join(map(json.dumps, entry))})" if isinstance(entry, tuple) else "None" if entry is None else json.dumps(entry)

    return f"P({', '.join(map(one, spec))})"


def _escaped(text: str) -> str:
    return clean(text).replace("\\", "\\\\").replace('"', '\\"')


def _literal(value: Any) -> str:
    return ascii(value) if not isinstance(value, dict) else "{" + ", ".join(f"{json.dumps(k)}: {value[k]!r}" for k in value) + "}"


def _raw(pattern: str) -> str:
    return f'r"{pattern}"' if '"' not in pattern and pattern.isprintable() else repr(pattern)


# ---- logical axes


def logical_rules(plan: PlanRecord, axes: Mapping[str, Sequence[str | None]]) -> tuple[LogicalRule, ...]:
    """The answer of `Plan.to_logical_rules`."""
    if not isinstance(axes, Mapping):
        raise ShardingError(
            f"logical axes are a mapping of path patterns to names, not {type(axes).__name__}.\n"
            '  way out: {"params/**/kernel": ("embed", "mlp")}'
        )
    named = {leaf.path: (leaf, names) for leaf in plan.inputs for pattern, names in axes.items() if matches(leaf.path, pattern)}
    for pattern, names in axes.items():
        if isinstance(names, str):
            raise ShardingError(
                f"{pattern!r} has the text {names!r}, not a name per dim.\n  way out: ('embed', 'mlp'), None for no name"
            )
        if odd := [name for name in names if not (name is None or isinstance(name, str))]:
            raise ShardingError(
                f"{pattern!r} has {odd[0]!r} among its names, which is no text.\n  way out: ('embed', 'mlp'), None for no name"
            )
        hits = [leaf for leaf in plan.inputs if matches(leaf.path, pattern)]
        if not hits:
            raise ShardingError(f"logical axes {pattern!r} match no input of the step.\n  way out: a path or pattern as in pins")
        if wrong := [leaf for leaf in hits if len(leaf.shape) != len(names)]:
            raise ShardingError(
                f"{pattern!r} names {len(names)} dims, {wrong[0].path} has {len(wrong[0].shape)}.\n  way out: a name, or None, per dim"
            )
        if len(given := [name for name in names if name is not None]) > len(set(given)):
            raise ShardingError(f"{pattern!r} names two dims of one array the same, which flax refuses.\n  way out: names that differ")
    wanted: dict[str, dict[tuple[str, ...], str]] = {}  # name -> mesh axes -> an input that has them
    for path, (leaf, names) in named.items():
        for name, dim in zip(names, leaf.layout.dims, strict=True):
            if name is not None:
                wanted.setdefault(name, {}).setdefault(dim, path)
    found = tuple(
        (name, None if not dim else dim[0] if len(dim) == 1 else dim)
        for name, dims in wanted.items()
        for dim in sorted(dims, key=lambda dim: (-len(dim), dim))
        if dim or len(dims) == 1
    )
    for path, (leaf, names) in named.items():
        given = _by_logical_rules(found, names)
        if given != leaf.layout.dims:
            d = next(d for d, (x, y) in enumerate(zip(given, leaf.layout.dims, strict=True)) if x != y)
            other = wanted[names[d] or ""].get(given[d], path)
            raise ShardingError(
                f"logical axis {names[d]!r} cannot say what the plan does: it is {given[d] or None} in {other}, "
                f"{leaf.layout.dims[d] or None} in {path}.\n  ways out: another name for one of them, or to_rules()"
            )
    return found


def _by_logical_rules(found: Sequence[LogicalRule], names: Sequence[str | None]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes per dim as flax assigns them: rules in order, a mesh axis once per array, the first rule of a name that fits."""
    given: dict[int, tuple[str, ...]] = {}
    for name, axes in found:
        dim = () if axes is None else (axes,) if isinstance(axes, str) else axes
        used = {a for x in given.values() for a in x}
        for d, other in enumerate(names):
            if other == name and d not in given and not used & set(dim):
                given[d] = dim
                break
    return tuple(given.get(d, ()) for d in range(len(names)))


def maxtext(plan: PlanRecord, axes: Mapping[str, Sequence[str | None]]) -> str:
    """The answer of `Plan.to_maxtext`."""
    lines = [f"mesh_axes: {json.dumps(list(plan.mesh.axes))}"]
    lines += [f"ici_{axis}_parallelism: {n}" for axis, n in plan.mesh]
    lines.append("logical_axis_rules: [")
    for name, found in logical_rules(plan, axes):
        lines.append(f"  {json.dumps([name, [] if found is None else [found] if isinstance(found, str) else list(found)])},")
    return "\n".join([*lines, "]"]) + "\n"
