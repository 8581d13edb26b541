"""State whose dims a mesh axis does not divide, held between steps with these dims filled up with zeros.

    table   f32[50257, 768] as P('x', None) on 8 devices      Padded(f32[50264, 768], shape=(50257, 768))

`jax.jit` takes and returns only arrays that divide. A `Padded` is a node of the state's pytree around the array that does, and knows
the shape that the step computes with. So it moves, saves and copies like any state, and its zeros change no norm; but no function
takes it for an array, and no loss counts its zeros as words: `unpadded` gives arrays of the step's own shapes.

Fact: padded-state-is-cut-locally.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.errors import ShardingError
from shardplan.mesh.layout import MeshShape, even_layout
from shardplan.plan.data import Leaf

Shape = tuple[int, ...]


class NoArrayError(ShardingError, AttributeError):
    """What is held padded was used as an array."""


@jax.tree_util.register_pytree_with_keys_class
class Padded:
    """An array of a state, filled up with zeros.

    Attributes:
        array: as it is held.
        shape: without what it is filled up with, which comes last in every dim.
    """

    def __init__(self, array: Any, shape: Shape):
        self.array, self.shape = array, tuple(shape)

    @property
    def dtype(self) -> Any:
        """Of the array."""
        return self.array.dtype

    def tree_flatten_with_keys(self):
        """As JAX takes it: the key says which shape was padded."""
        return ((jax.tree_util.GetAttrKey(padded_key(self.shape)), self.array),), self.shape

    @classmethod
    def tree_unflatten(cls, shape: Shape, arrays: Sequence) -> Padded:
        """As JAX gives it."""
        return cls(arrays[0], shape)

    def __repr__(self) -> str:
        return f"Padded({self.array!r}, shape={self.shape})"

    def _refuse(self, *_: Any) -> NoReturn:
        raise NoArrayError(
            f"an array of shape {self.shape} is held padded to {self.array.shape} between steps, and is no array for other functions.\n"
            "  way out: shardplan.unpadded(state), outside or inside of the function"
        )

    __array__ = __jax_array__ = __getitem__ = __len__ = __iter__ = __float__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def padded_key(shape: Shape) -> str:
    """The last part of the path of a `Padded`'s array: "padded_from_50257x768"."""
    return f"padded_from_{'x'.join(map(str, shape))}"


def padded_from(key: str) -> Shape | None:
    """The shape that a `padded_key` names; None for any other key."""
    found = re.fullmatch(r"padded_from_(\d+(?:x\d+)*)", key)
    return found and tuple(map(int, found[1].split("x")))


def is_padded(x: Any) -> TypeGuard[Padded]:
    """Whether a node of a pytree is a `Padded`."""
    return isinstance(x, Padded)


def array_of(x: Any) -> Any:
    """The array that is held, padded or not."""
    return x.array if is_padded(x) else x


def unpadded(tree: Any) -> Any:
    """A pytree with every array that is held padded in its own shape; the others as they are.

    For evaluation, norms by axis, printing, or saving by other programs, inside a jitted function, too. Outside of one, such an array
    comes back sharded along dims that do divide.
    """
    return jax.tree.map(lambda x: resized(x.array, x.shape, x.shape) if is_padded(x) else x, tree, is_leaf=is_padded)


def with_own_shapes(tree: Any) -> Any:
    """A pytree with `ShapeDtypeStruct`s of the step's own shapes for arrays that are held padded."""
    if not any(map(is_padded, jax.tree.leaves(tree, is_leaf=is_padded))):
        return tree
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_padded(x) else x, tree, is_leaf=is_padded)


def held(x: Any, leaf: Leaf, mesh: MeshShape, sharding: jax.sharding.NamedSharding | None = None) -> Any:
    """An array of the state, in whatever shape it is held, as a plan holds it.

    Args:
        x: an array, a `ShapeDtypeStruct`, a tracer or a `Padded` of one of these.
        leaf: of the plan.
        mesh: of the plan.
        sharding: where the plan wants it.
    """
    want = leaf.held_shape(mesh)
    array = array_of(x)
    array = resized(array, leaf.shape, want, sharding) if np.shape(array) != want else array
    return array if want == leaf.shape else Padded(array, leaf.shape)


def is_held(x: Any, leaf: Leaf, mesh: MeshShape) -> bool:
    """Whether an array is in the shape in which the plan holds it."""
    want = leaf.held_shape(mesh)
    return is_padded(x) == (want != leaf.shape) and (not is_padded(x) or x.array.shape == want)


def resized(x: Any, own: Shape, want: Shape, sharding: jax.sharding.NamedSharding | None = None) -> Any:
    """An array of its own shape, or filled up from it, filled up to another shape with zeros.

    On the devices that it is on, and lying as `sharding` says if that is a layout of their mesh.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(want, x.dtype, weak_type=x.weak_type)
    if not isinstance(x, jax.Array):
        inside = np.asarray(x)[tuple(map(slice, own))]
        return np.pad(inside, [(0, b - a) for a, b in zip(own, want, strict=True)])
    if _jax.is_tracer(x) or not isinstance(x.sharding, jax.sharding.NamedSharding):
        return fill(cut(x, own), want)
    mesh: Any = x.sharding.mesh
    if sharding is None or sharding.mesh != mesh:
        layout = even_layout(want, MeshShape(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes)))
        sharding = _jax.sharding(mesh, layout.spec())
    return _resizing(own, want, sharding)(x)


@functools.lru_cache(maxsize=256)
def _resizing(own: Shape, want: Shape, sharding: jax.sharding.NamedSharding):
    """The jitted function that gives an array another filling."""
    mesh: Any = sharding.mesh
    twin = _jax.auto_twin(mesh)

    def change(x):
        with _jax.within(twin):
            return fill(cut(x, own), want)

    return jax.jit(_jax.on_auto_axes(change, mesh, sharding), out_shardings=sharding)  # type: ignore[arg-type]


def cut(x: jax.typing.ArrayLike, own: Shape) -> jax.typing.ArrayLike:
    """Without what an array is filled up with."""
    return x if np.shape(x) == own else jax.lax.slice(x, [0] * len(own), own)


def fill(x: jax.typing.ArrayLike, want: Shape) -> jax.typing.ArrayLike:
    """Filled up with zeros."""
    own = np.shape(x)
    return x if own == want else jnp.pad(x, [(0, b - a) for a, b in zip(own, want, strict=True)])
