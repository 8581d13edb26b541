"""How a running state gets from where it lies to where another plan wants it: array by array, over the cheapest reshard path.

    from mesh data=2, model=4 to mesh x=4, y=2, of the same devices in the same order     both are parts of a mesh of 2 x 2 x 2
    P('data', 'model')  ->  P('y', None)        =  P('0', ('1', '2')) -> P('2', None)     a reshard on one mesh (`mesh/reshard.py`)

Where the devices are others, each device fetches the parts of its new shard that it lacks. Before anything moves it is known how many
bytes of the state every device holds at every moment: what has moved, what has not, and the array on its way with XLA's buffers.
Arrays that get smaller go first. An array that would not fit the plan's memory limit goes over the host, where a device holds the old
shard or the new one, never both; if even this does not fit, nothing is moved.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.device import Device, Link
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.plan.arguments import arguments_like, buffer, same_paths
from shardplan.plan.data import Leaf
from shardplan.plan.padded import Padded, array_of, is_held, is_padded
from shardplan.plan.padded import held as as_held
from shardplan.plan.plan import Plan
from shardplan.plan.stand_ins import stood_back, stood_in
from shardplan.units import format_array, format_memory

MAX_AXES = 5
"""A mesh of more axes, of which two meshes are parts, has too many layouts to search."""
NODE_RATE = 8.0
"""A path sends the fewest bytes, of which those between processes count so many times as much."""

Held: TypeAlias = Mapping[int, float]
"""Number of a device -> bytes."""
Box: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim, the first index and the one behind the last."""


def transfer(state: Any, plan: Plan, *, donate: bool = True) -> Any:
    """Moves a state to where another plan wants it: another mesh of the same or other devices, other layouts.

    Args:
        state: a pytree like one argument of the plan's step; on a mesh of several processes, all of them call this.
        plan: of a step on its mesh, `step.plan(...)`.
        donate: give up arrays of `state` as they are moved; False keeps them, and both have to fit.

    Returns:
        The state, bit for bit the same. Arrays that are already in place share their buffers with those of `state`.

    Raises:
        ShardingError: the step has no such argument, the plan was read from a file, processes are others, or it cannot be done
            within the plan's memory limit; then nothing has moved.
    """
    if not isinstance(plan, Plan) or plan.context is None or not isinstance(plan.context.mesh, Mesh):
        raise ShardingError("transfer needs a plan with its devices.\n  way out: step.plan(...) of a step on a mesh of jax.devices()")
    given, tree = jax.tree.flatten(stood_in(state), is_leaf=is_padded)
    given = [x if is_padded(x) or isinstance(x, jax.Array) else np.asarray(x) for x in given]
    leaves = _wanted(plan, tree, given)
    fitting = [is_held(x, leaf, plan.mesh) for x, leaf in zip(given, leaves, strict=True)]
    pairs = zip(given, leaves, fitting, strict=True)
    arrays = [array_of(x if fits else as_held(x, leaf, plan.mesh)) for x, leaf, fits in pairs]
    programs, moves = _Programs(), []
    for leaf, x in zip(leaves, arrays, strict=True):
        moves.append(Move.of(leaf, x, _jax.sharding(plan.context.mesh, leaf.layout.spec()), programs))
    moved: list[Any] = [None] * len(moves)
    uses = Counter(map(buffer, arrays))
    uses.update(buffer(move.array) for move in moves if move.in_place)  # which the result has, too
    for n, over_host in _schedule(moves, plan.memory_report.limit, donate):
        own = buffer(arrays[n])
        uses[own] -= 1
        last = not uses[own]  # of an array that a state holds twice
        moved[n] = moves[n].run(donate and last, over_host and last)
    for x, fits in zip(given, fitting, strict=True):  # another padding is another array
        if donate and not fits and isinstance(old := array_of(x), jax.Array):
            old.delete()
    own = (x if x.shape == leaf.shape else Padded(x, leaf.shape) for x, leaf in zip(moved, leaves, strict=True))
    return stood_back(jax.tree.unflatten(tree, own))


def _wanted(plan: Plan, tree: Any, arrays: Sequence) -> list[Leaf]:
    """Leaves of the argument that a state is."""
    given = [(x.shape, str(x.dtype)) for x in arrays]
    in_tree = plan.context.in_tree
    found = [leaves for same in (operator.eq, same_paths) for leaves in arguments_like(plan.inputs, in_tree, tree, same)]
    if not found:
        raise ShardingError(
            f"no argument of the plan's step is a pytree like this state: {tree}.\n"
            "  way out: a whole argument of that step; of a checkpoint of another state, checkpoints.restore(..., initial=...)"
        )
    same = [leaves for leaves in found if [(x.shape, x.dtype) for x in leaves] == given]
    if not same:
        leaf, (shape, dtype) = next((x, got) for x, got in zip(found[0], given, strict=True) if (x.shape, x.dtype) != got)
        raise ShardingError(
            f"{leaf.path} is {format_array(leaf)} in the plan's step, {dtype}[{','.join(map(str, shape))}] in this state.\n"
            "  way out: a plan for a state of these shapes"
        )
    return same[0]


# ---- one array


@dataclass(frozen=True, eq=False)
class Move:
    """How one array gets to its place.

    Attributes:
        steps: compiled programs, one collective each; () where it is in place, or parts of it are fetched.
        in_place: whether every device holds its new shard already.
        extra: bytes that a device holds meanwhile, besides the array as it was.
        before, after: bytes of it per device.
    """

    path: str
    array: jax.Array | np.ndarray
    target: NamedSharding
    steps: tuple[Any, ...] = ()
    in_place: bool = False
    extra: float = 0.0
    before: Held = field(default_factory=dict)
    after: Held = field(default_factory=dict)

    @classmethod
    def of(cls, leaf: Leaf, x: jax.Array | np.ndarray, target: NamedSharding, programs: _Programs) -> Move:
        """The move of an array, its programs compiled."""
        shard = _shard_bytes(target, x)
        after = dict.fromkeys((d.id for d in target.device_set), shard)
        if not isinstance(x, jax.Array):
            return cls(leaf.path, x, target, extra=shard, after=after)
        before = dict.fromkeys((d.id for d in x.sharding.device_set), _shard_bytes(x.sharding, x))
        if x.sharding.is_equivalent_to(target, x.ndim):
            return cls(leaf.path, x, target, in_place=True, before=before, after=before)
        if (path := _path(x, target)) is not None:
            steps = tuple(programs.step(x, a, b) for a, b in pairwise(path))
            extra = max(_extra(x, path, steps))
            return cls(leaf.path, x, target, steps, extra=extra, before=before, after=after)
        if not x.is_fully_addressable and x.sharding.device_set != target.device_set:
            raise ShardingError(
                f"{leaf.path} has to go to other devices, and some of either are other processes'.\n"
                "  way out: save a checkpoint, and restore it by the new plan"
            )
        # On each device at most: the shard in the making, the parts for it, and one part that another device fetches.
        return cls(leaf.path, x, target, extra=3.0 * shard, before=before, after=after)

    @property
    def by_parts(self) -> bool:
        """Whether this process can take the array apart and put it together."""
        x = self.array
        return isinstance(x, jax.Array) and x.is_fully_addressable

    def run(self, donate: bool, over_host: bool) -> jax.Array:
        """The array in its place."""
        x = self.array
        if self.in_place or not isinstance(x, jax.Array) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return jax.device_put(x, self.target)  # keys are few bytes, and may share their buffers
        if over_host:
            found = self._over_host(x)
        elif self.steps:
            found = jax.device_put(_stepped(x, self.steps), self.target)  # only the mesh is called otherwise
        elif self.by_parts:
            found = jax.make_array_from_single_device_arrays(x.shape, self.target, [*_fetched(x, self.target)])
        else:
            found = jax.device_put(x, self.target)
        found.block_until_ready()  # what it needed meanwhile is free before the next array is moved
        if donate and not x.is_deleted():
            x.delete()
        return found

    def _over_host(self, x: jax.Array) -> jax.Array:
        """The old shards go to the host and are given up before the new ones are made."""
        shards: dict[Box, np.ndarray] = {}
        boxes = {device: _box(index, x.shape) for device, index in self.target.addressable_devices_indices_map(x.shape).items()}
        for box in set(boxes.values()):
            shards[box] = np.empty([b - a for a, b in box], x.dtype)
            for inside, piece, cut in _parts(x, box, None):
                shards[box][inside] = np.asarray(piece)[cut]
        x.delete()
        parts = [jax.device_put(shards[box], device, may_alias=False) for device, box in boxes.items()]
        return jax.make_array_from_single_device_arrays(x.shape, self.target, parts)


def _shard_bytes(sharding: jax.sharding.Sharding, x: jax.Array | np.ndarray) -> float:
    return math.prod(sharding.shard_shape(x.shape)) * _jax.itemsize(x.dtype)


# ---- over the reshard paths of one mesh


def _path(x: jax.Array, target: NamedSharding) -> list[NamedSharding] | None:
    """Where the array lies before and after every collective, on a mesh of which both meshes are parts; None where there is none."""
    source = x.sharding
    if not isinstance(source, NamedSharding) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    devices: Any = _jax.devices(source)
    strides = {*_strides(source.mesh.axis_sizes), *_strides(target.mesh.axis_sizes), len(devices)}
    sizes = tuple(b // a for a, b in pairwise(sorted(strides)))[::-1]
    if devices != _jax.devices(target) or math.prod(sizes) != len(devices) or not 0 < len(sizes) <= MAX_AXES:
        return None
    names = tuple(map(str, range(len(sizes))))
    shape, node = MeshShape(names, sizes), sum(d.process_index == devices[0].process_index for d in devices)
    mesh = Mesh(np.array(devices, object).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))
    by_bytes = Cluster("", Device("", {"float32": 1.0}, 1.0, 1, 0.0), node, Link(NODE_RATE, 0.0), Link(1.0, 0.0))
    ends = [_on_parts(s, x.ndim, shape) for s in (source, target)]
    try:
        steps = Resharder(shape, by_bytes, kernels="none").path(x.shape, _jax.itemsize(x.dtype), ends[0], ends[1])
    except ValueError:
        return None
    return [_jax.sharding(mesh, layout.spec()) for layout in (ends[0], *(step.after for step in steps))]


def _strides(sizes: Sequence[int]) -> list[int]:
    """By how many devices the neighbours along every axis are apart."""
    return [*accumulate(reversed(sizes[1:]), operator.mul, initial=1)][::-1]


def _on_parts(sharding: NamedSharding, rank: int, parts: MeshShape) -> Layout:
    """The layout of a sharding on the mesh of parts of its axes."""
    sizes = sharding.mesh.axis_sizes
    starts, own = _strides(sizes), _strides(parts.sizes)
    part_of = {
        axis: tuple(name for name, at, n in zip(parts.axes, own, parts.sizes, strict=True) if n > 1 and start <= at < start * size)
        for axis, size, start in zip(sharding.mesh.axis_names, sizes, starts, strict=True)
    }
    return Layout(tuple(tuple(p for a in axes for p in part_of[a]) for axes in Layout.from_spec(sharding.spec, rank).dims))


class _Programs:
    """Compiled reshards of one collective; equal arrays share them."""

    def __init__(self):
        self._known: dict[tuple[Any, ...], Any] = {}

    def step(self, x: jax.Array, before: NamedSharding, after: NamedSharding) -> Any:
        """The program that brings an array of this type from one sharding to the other."""
        key = x.shape, x.dtype, before, after
        if key not in self._known:
            with jax.set_mesh(cast(Mesh, before.mesh)):
                program = jax.jit(lambda x: x, in_shardings=before, out_shardings=after)
                self._known[key] = program.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
        return self._known[key]


def _extra(x: jax.Array, path: Sequence[NamedSharding], steps: Sequence[Any]) -> Iterator[float]:
    """Bytes besides the array as it was, while every program runs."""
    for n, step in enumerate(steps):
        memory = step.memory_analysis()
        yield float(memory.output_size_in_bytes + memory.temp_size_in_bytes) + (_shard_bytes(path[n], x) if n else 0.0)


def _stepped(x: jax.Array, steps: Sequence[Any]) -> jax.Array:
    """The array after all programs; what lies between is given up."""
    (first,), _ = steps[0].input_shardings
    made = [jax.device_put(x, first)]
    with jax.set_mesh(first.mesh):
        for step in steps:
            made.append(step(made[-1]).block_until_ready())  # not before it runs has the next one its buffers
            if len(made) > 2:
                made[-2].delete()
    return made[-1]


# ---- by parts of shards


def _box(index: tuple[slice, ...] | None, shape: Sequence[int]) -> Box:
    return tuple((at.indices(n)[0], at.indices(n)[1]) for at, n in zip(index or (), shape, strict=True))


def _parts(x: jax.Array, box: Box, device: Any) -> Iterator[tuple[tuple[slice, ...], jax.Array, tuple[slice, ...]]]:
    """(place in the box, a shard, place in that shard) of the parts that make up a box; from the device's own shard where it can be."""
    shards: dict[Box, dict[Any, jax.Array]] = {}
    for shard in x.addressable_shards:
        shards.setdefault(_box(shard.index, x.shape), {})[shard.device] = shard.data
    for held, by_device in shards.items():
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held, strict=True)]
        if all(a < b for a, b in common):
            inside, cut = (tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, of, strict=True)) for of in (box, held))
            yield inside, by_device.get(device, next(iter(by_device.values()))), cut


def _fetched(x: jax.Array, target: NamedSharding) -> Iterator[jax.Array]:
    """Every device's new shard, made of what it has and of the parts that it lacks."""
    for device, index in target.addressable_devices_indices_map(x.shape).items():
        box = _box(index, x.shape)
        size, shard = [b - a for a, b in box], None
        for inside, held, cut in _parts(x, box, device):
            part = held if held.shape == tuple(s.stop - s.start for s in cut) else held[cut]
            part = jax.device_put(part, device, may_alias=False)
            if list(part.shape) == size:
                shard = part
            else:
                shard = jnp.zeros(size, x.dtype, device=device) if shard is None else shard
                shard = _written(shard, part, [s.start for s in inside])
        assert shard is not None or 0 in size, "internal error: shards cover their array"
        shard = jnp.zeros(size, x.dtype, device=device) if shard is None else shard
        yield shard.block_until_ready()  # the parts for it are free before the next shard is made


@functools.partial(jax.jit, donate_argnums=0)
def _written(shard: jax.Array, piece: jax.Array, at: list[int]) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, at)


# ---- in which order


def _schedule(moves: Sequence[Move], limit: float | None, donate: bool) -> Iterator[tuple[int, bool]]:
    """(number of a move, whether it goes over the host), such that no device ever holds more than the limit; all or none."""
    held: Counter = Counter()
    for move in moves:
        held.update(move.before)
    grows = [max(move.after.get(d, 0.0) - donate * move.before.get(d, 0.0) for d in {*move.before, *move.after}) for move in moves]
    found = []
    for n in sorted(range(len(moves)), key=lambda n: (grows[n], n)):
        move = moves[n]
        meanwhile = max((held[d] + move.extra for d in {*move.before, *move.after}), default=0.0)
        over_host = limit is not None and meanwhile > limit and donate and move.by_parts and not move.in_place
        if over_host:
            meanwhile = max(held[d] + max(0.0, move.after[d] - move.before.get(d, 0.0)) for d in move.after)
        if limit is not None and meanwhile > limit and not move.in_place:
            raise ShardingError(
                f"the state cannot be moved within {format_memory(limit)} per device: with {move.path} on its way a device holds "
                f"{format_memory(meanwhile)} of it.\n  ways out: save a checkpoint, and restore it by the new plan; a plan made with "
                "more memory" + ("" if donate else "; donate=True")
            )
        if not move.in_place:
            held.update(move.after)
            held.subtract(move.before if donate else {})
        found.append((n, over_host))
    yield from found
