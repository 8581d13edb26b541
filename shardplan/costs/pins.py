"""Which strategies pins leave to an op: in_shardings, out_shardings, path patterns, and the program's own constraints."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from shardplan import _jax
from shardplan.costs.options import FREE, Options, PinDims
from shardplan.costs.space import StrategySpace
from shardplan.errors import ShardingError
from shardplan.files import portable
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.units import listed

Pin = tuple[str, PinDims]
"""Its author in words, and the layout it asks for."""


def allowed_strategies(space: StrategySpace, axes: Collection[str] | None = None, *, options: Options) -> dict[int, np.ndarray]:
    """Pinned op -> bool [s], which of its strategies meet its pins on these mesh axes, by default all.

    Raises:
        ShardingError: on a pin that no strategy meets, saying why.
    """
    axes = space.mesh.axes if axes is None else tuple(axes)
    return {i: _allowed(space, i, wanted, axes) for i, wanted in sorted(pins_by_op(space.graph, options).items())}


def hinted_strategies(space: StrategySpace, *, options: Options) -> dict[int, np.ndarray]:
    """As `allowed_strategies`, with those of the program's own constraints that a strategy meets: a hint that none meets is none."""
    pins, allowed = pins_by_op(space.graph, options), allowed_strategies(space, options=options)
    for i, wanted in pins_by_op(space.graph, replace(options, constraints="keep")).items():
        with contextlib.suppress(ShardingError):
            allowed[i] = _allowed(space, i, wanted, space.mesh.axes) if wanted != pins.get(i) else allowed[i]
    return dict(sorted(allowed.items()))


def pins_by_op(graph: Graph, options: Options) -> dict[int, list[Pin]]:
    """Op -> the pins of its result.

    Raises:
        ShardingError: on a pin that matches no input.
    """
    pins: dict[int, list[Pin]] = {}
    for ops, by_number in ((graph.args, options.in_pins), (graph.outs, options.out_pins)):
        for n, dims in (by_number or {}).items():
            pins.setdefault(ops[n], []).append((f"{'in' if ops is graph.args else 'out'}_shardings", dims))
    for pattern, dims in (options.pins or {}).items():
        hits = [i for i in graph.args if matches(graph.ops[i].label, pattern)]
        if not hits:
            some = nearest_paths([graph.ops[i].label for i in graph.args], pattern)
            raise ShardingError(
                f"pin {pattern!r} matches no input of the step.\n  inputs: {some}\n"
                "  ways out: '**' matches any number of path segments, '*' any part of one"
            )
        for i in hits:
            rank = len(graph.ops[i].outs[0].shape)
            pins.setdefault(i, []).append((f"pin {pattern!r}", pin_dims(dims, max(rank, len(dims)))))
    for i, op in enumerate(graph.ops):
        spec = _jax.constraint_spec(op.params) if op.traits.sharding_constraint and options.constraints == "keep" else None
        if spec is not None:
            pins.setdefault(i, []).append(("with_sharding_constraint", pin_dims(spec, len(op.outs[0].shape))))
    return pins


def pin_description(op: Op, pins: Sequence[Pin]) -> str:
    """The pins of an op's result in words, the same for the program in any folder."""
    place = f" at {portable(op.source.file)}:{op.source.line}" if op.traits.sharding_constraint else ""
    return (f"{op.label}: " if op.label else "") + ", ".join(f"{who}{place} = {pin_text(dims)}" for who, dims in pins)


def untie_pinned_state(graph: Graph, options: Options) -> Graph:
    """The graph in which an input and an output with contradicting pins need not have one layout: they are no state."""
    pins = pins_by_op(graph, options)

    def agree(start: int, end: int) -> bool:
        both = ((x, y) for _, a in pins.get(start, ()) for _, b in pins.get(end, ()) for x, y in zip(a, b, strict=False))
        return all(x == y or FREE in (x, y) for x, y in both)

    return replace(graph, same_layout=tuple(pair for pair in graph.same_layout if agree(*pair)))


def _allowed(space: StrategySpace, i: int, wanted: list[Pin], axes: tuple[str, ...]) -> np.ndarray:
    """Bool [s]: whether a strategy of op i meets its pins on some axes."""
    op, layouts = space.graph.ops[i], space.strategies[i].results[0]
    shape, place = tuple(op.outs[0].shape), f" at {op.source}" if op.traits.sharding_constraint else ""
    ways, hint = ("ways out:", ', or auto(mesh, user_shardings="hint")') if place else ("way out:", "")
    what = _described(op)
    mask = np.ones(len(layouts), dtype=bool)
    for n, (who, dims) in enumerate(wanted):
        _check_pin(who := f"{who}{place} on {what}", dims, op, space.mesh)
        if 0 in shape:
            continue  # what has no elements stays whole, and lies in every layout
        mask = mask & np.array([meets(layout, dims, space.mesh, axes) for layout in layouts])
        if not mask.any():
            if n:
                others = " and ".join(f"{w}{place} = {pin_text(d)}" for w, d in wanted[: n + 1])
                raise ShardingError(f"conflicting pins on {what}: {others}.\n  way out: keep one of them")
            raise ShardingError(
                f"{who}: {pin_text(dims)} is no layout the planner can give it on mesh {space.mesh}.\n"
                f"  {ways} axes of one dim in mesh order, or one of them last, each axis once{hint}"
            )
    return mask


def _described(op: Op) -> str:
    return f"{op.label or op.primitive} {op.outs[0].dtype}[{','.join(map(str, op.outs[0].shape))}]"


def meets(layout: Layout, dims: PinDims, mesh: MeshShape, axes: Collection[str]) -> bool:
    """Whether a layout is what a pin asks for on these mesh axes; one of a single device leaves a dim whole: no layout names it."""
    known = (d if d == FREE else tuple(a for a in d if a in axes and mesh.size(a) > 1) for d in dims)
    return all(d in (FREE, x) for d, x in zip(known, layout.dims, strict=True))


def unmet_pin(graph: Graph, options: Options, layouts: Mapping[int, Layout], mesh: MeshShape) -> tuple[str, Layout] | None:
    """The first pin that these layouts of inputs and outputs, by op, do not meet, in words, and the layout; None if all are met.

    Raises:
        ShardingError: on a pin that matches no input or cannot be.
    """
    for i, wanted in sorted(pins_by_op(graph, options).items()):
        for who, dims in wanted if i in layouts else ():
            _check_pin(f"{who} on {_described(graph.ops[i])}", dims, graph.ops[i], mesh)
            if 0 not in graph.ops[i].outs[0].shape and not meets(layouts[i], dims, mesh, mesh.axes):
                return f"{who} on {_described(graph.ops[i])} asks for {pin_text(dims)}", layouts[i]
    return None


def _check_pin(who: str, dims: PinDims, op: Op, mesh: MeshShape) -> None:
    """Raises ShardingError for a pin of the wrong rank, an axis the mesh lacks, or a dim that does not divide."""
    text, shape = pin_text(dims), tuple(op.outs[0].shape)
    if len(dims) != len(shape):
        raise ShardingError(f"{who}: {text} has {len(dims)} entries, the array {len(shape)} dims.\n  way out: one entry per dim")
    sharded = {d: tuple(axes) for d, axes in enumerate(dims) if axes != FREE}
    used = [axis for axes in sharded.values() for axis in axes]
    for axis in used:
        if axis not in mesh.axes:
            raise ShardingError(f"{who}: {text} names mesh axis {axis!r}, the mesh has {mesh}.\n  way out: one of {mesh.axes}")
        if used.count(axis) > 1:
            raise ShardingError(f"{who}: {text} uses mesh axis {axis!r} twice.\n  way out: each axis on one dim")
    for d, axes in sharded.items():
        fills_up = Layout((axes,)).splits((shape[d],), mesh)
        if shape[d] % mesh.size(*axes) and not (fills_up and (op.padded or op.traits.sharding_constraint)):
            held = "pad_state=True for what the step returns in its place, or " if fills_up and not op.padded else ""
            alone = [a for a in axes if op.padded and Layout(((a,),)).splits((shape[d],), mesh)]
            held = f"{alone[-1]!r} alone, as dims that are held padded are sharded over one axis, or " if alone else held
            if op.traits.sharding_constraint:
                held = 'auto(mesh, user_shardings="hint"), '
            raise ShardingError(
                f"{who}: {text} shards dim {d} of size {shape[d]} over {mesh.size(*axes)} devices, which does not divide.\n"
                f"  way out: {held}pad dim {d} to {-(-shape[d] // mesh.size(*axes)) * mesh.size(*axes)}, or leave it replicated"
            )


def pin_dims(spec, rank: int) -> PinDims:
    """Entries of a PartitionSpec as a pin; a spec shorter than the rank leaves the last dims unsharded, as in JAX."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(FREE if e is _jax.UNCONSTRAINED else () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def pin_text(dims: PinDims) -> str:
    """A pin as JAX prints a PartitionSpec; `*` is a free dim."""

    def one(d):
        return "*" if d == FREE else "None" if not d else repr(d[0]) if len(d) == 1 else repr(tuple(d))

    return f"P({', '.join(map(one, dims))})"


def nearest_paths(labels: Iterable[str], pattern: str, most: int = 5) -> str:
    """Some of these paths for an error message: those that share most segments with a pattern, then the first."""
    wanted = set(pattern.split("/"))
    found = sorted(labels, key=lambda label: -len(wanted.intersection(label.split("/"))))
    return listed(found, most)


def matches(label: str, pattern: str) -> bool:
    """Whether a path ends in what `pattern` describes: '**' any segments, '*' and '?' inside one segment; a path matches itself."""
    pattern = pattern.strip("/")
    if label == pattern or label.endswith(f"/{pattern}"):  # whatever signs are in it, as in "w[0]"
        return True
    if "*" not in pattern and "?" not in pattern:
        return False
    want = pattern.split("/")
    if want[-1] != "**" and not segment_matches(label.rpartition("/")[2], want[-1]):  # most paths end otherwise
        return False

    def match(path: list[str], want: list[str]) -> bool:
        if not want:
            return not path
        if want[0] == "**":
            return any(match(path[n:], want[1:]) for n in range(len(path) + 1))
        return bool(path) and segment_matches(path[0], want[0]) and match(path[1:], want[1:])

    return match(label.split("/"), ["**", *want])


def segment_matches(segment: str, pattern: str) -> bool:
    """Whether one segment of a path is what '*' and '?' describe."""
    return fnmatchcase(segment, pattern.replace("[", "[[]"))
