"""A step that runs as planned, moving what lies elsewhere; and what a plan remembers of the program that it was made for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from shardplan import _jax
from shardplan.costs.options import Options
from shardplan.errors import ShardingError, warn
from shardplan.feedback import Verified
from shardplan.plan import Plan
from shardplan.plan.arguments import arguments_like, buffer
from shardplan.plan.data import Leaf
from shardplan.plan.padded import held, is_held, is_padded
from shardplan.plan.planned import Planned
from shardplan.plan.stand_ins import holds_stand_ins
from shardplan.plan.what_if import WhatIf
from shardplan.units import format_memory


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """The planned step of one signature; call it with the operands of a call.

    Attributes:
        jitted: raises `OtherSignature` when it is traced for other operands.
        traceable: the step to be traced into a larger program on a mesh with Explicit axes.
        in_shardings: per leaf of the operands.
        donated: numbers of donated leaves.
        returned: numbers of leaves that the step returns anew: its state.
        asked: what was planned for; None for a plan that was taken over.
    """

    plan: Plan
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    jitted: Callable
    traceable: Callable
    in_shardings: Sequence
    donated: Sequence[int]
    returned: Collection[int]
    asked: Options | None = None

    def __call__(self, *operands, expects_move: bool = False, foreign: bool = False):
        """Runs the step; operands that jit refuses for the devices they are on are moved first, with a warning unless it is expected.

        `foreign` operands may share memory though they are different objects; what the step itself returned does not.

        Raises:
            ShardingError: it was planned on an AbstractMesh.
        """
        if not isinstance(self.mesh, jax.sharding.Mesh):
            raise ShardingError(
                "this step was planned on an AbstractMesh, which has no devices to run on.\n"
                "  way out: auto(jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * n))"
            )
        if foreign and (filled := self.held(operands)) is not operands:
            return self._of_other_shapes(operands, filled, expects_move)
        if self.donated:
            operands = self._with_own_buffers(operands, foreign)
        if foreign and (placed := self._with_state_on_mesh(operands)) is not operands:
            out = self(*placed, expects_move=expects_move)
            self._delete_donated(jax.tree.leaves(operands))
            return out
        try:
            return self.jitted(*operands)
        except ValueError as error:
            if _jax.ORDERED_EFFECTS in str(error):
                raise ShardingError(
                    f"the step prints or calls back in order, which JAX does on one device only, not on {self.mesh.size}.\n"
                    "  way out: jax.debug.print(...) and jax.debug.callback(...) without ordered=True"
                ) from error
            if not _jax.refuses_placement(error) or any(_jax.is_tracer(x) for x in jax.tree.leaves(operands)):
                raise  # what is traced has no place of its own
        except (RuntimeError, TypeError) as error:
            self._refuse(jax.tree.leaves(operands), error)
            raise
        leaves, tree = jax.tree.flatten(operands)
        placed = [
            jax.device_put(x, s) if getattr(x, "committed", False) or (n in self.returned and _is_on_no_mesh(x)) else x
            for n, (x, s) in enumerate(zip(leaves, self.in_shardings, strict=True))
        ]
        if not expects_move:
            self._warn_of_moves(leaves)
        out = self.jitted(*jax.tree.unflatten(tree, placed))
        self._delete_donated(leaves)
        return out

    def held(self, operands: tuple) -> tuple:
        """The operands in the shapes in which the plan holds them between steps; the same object where they are already."""
        leaves, tree = jax.tree.flatten(operands, is_leaf=is_padded)
        pairs, mesh = [*zip(leaves, self.plan.inputs, self.in_shardings, strict=True)], self.plan.mesh
        if all(is_held(x, leaf, mesh) for x, leaf, _ in pairs):
            return operands
        return jax.tree.unflatten(tree, [held(x, leaf, mesh, s) for x, leaf, s in pairs])

    def _of_other_shapes(self, operands: tuple, filled: tuple, expects_move: bool) -> Any:
        """Runs the step on operands some of which were not held as the plan wants them."""
        leaves = jax.tree.leaves(operands)
        if not expects_move:
            self._warn_of_moves(leaves)
        out = self(*filled, expects_move=True, foreign=True)
        self._delete_donated(leaves)
        return out

    def _delete_donated(self, leaves: Sequence) -> None:
        """What was donated is gone, also where a copy of it was moved first."""
        for n in self.donated:
            if isinstance(leaves[n], jax.Array) and not leaves[n].is_deleted():
                leaves[n].delete()

    def _refuse(self, leaves: Sequence, error: Exception) -> None:
        """Says in words what jit says of donated arrays that are used again, and of shapes in place of arrays."""
        paths = [(leaf.path, x) for leaf, x in zip(self.plan.inputs, leaves, strict=True)]
        if "deleted" in str(error):
            self._refuse_deleted(leaves, error)
        if shapes := [path for path, x in paths if isinstance(x, jax.ShapeDtypeStruct)]:
            raise ShardingError(
                f"{shapes[0]} is a shape, which can be planned with but not run.\n"
                "  ways out: step.plan(...) plans from shapes; step.init(create_state, key) makes a state of arrays"
            ) from error

    def _refuse_deleted(self, leaves: Sequence, error: Exception | None = None) -> None:
        """Says which arrays were donated before: on several devices of a CPU XLA ends the process that donates them again."""
        if gone := [leaf.path for leaf, x in zip(self.plan.inputs, leaves, strict=True) if _is_deleted(x)]:
            more = f" and {len(gone) - 1} more arrays were" if len(gone) > 1 else " was"
            raise ShardingError(
                f"{gone[0]}{more} donated to an earlier call, or deleted; an array that was donated cannot be used again.\n"
                "  ways out: go on with what the step returns, state, loss = step(state, batch); or drop donate_argnums"
            ) from error

    def _with_own_buffers(self, operands: tuple, foreign: bool) -> tuple:
        """The operands, copied where a donated one is given twice: XLA refuses that, and ends the process on several devices."""
        leaves, tree = jax.tree.flatten(operands)
        if any(_is_deleted(leaves[n]) for n in self.donated):
            self._refuse_deleted(leaves)
        same = buffer if foreign else id
        if len(set(map(same, leaves))) == len(leaves):
            return operands
        kept, donated = Counter(map(same, leaves)), set(self.donated)
        for n, x in enumerate(leaves):
            if n in donated and kept[same(x)] > 1 and isinstance(x, (jax.Array, np.ndarray)):
                kept[same(x)] -= 1
                leaves[n] = x.copy()
        return jax.tree.unflatten(tree, leaves)

    def _with_state_on_mesh(self, operands: tuple) -> tuple:
        """The operands, with state that no mesh knows yet put where the plan wants it; the same object where there is none.

        The step returns its state on the mesh. For jit that is another type than that of arrays on no mesh, so that it would compile
        the step again for the second call. State that jit refuses is moved as a whole later.
        """
        leaves, tree = jax.tree.flatten(operands)
        put = [n for n in self.returned if _is_on_no_mesh(leaves[n])]
        wanted = [self.in_shardings[n] for n in put]
        if not put or not all(s.is_fully_addressable and _accepts(leaves[n], s) for n, s in zip(put, wanted, strict=True)):
            return operands
        for n, x in zip(put, jax.device_put([leaves[n] for n in put], wanted), strict=True):
            leaves[n] = x
        return jax.tree.unflatten(tree, leaves)

    def _warn_of_moves(self, leaves: Sequence) -> None:
        """Warns of arrays that lie otherwise than planned: whoever calls functions of other plans in turn moves the state each time."""
        moved = [
            (leaf, x, planned)
            for leaf, x, planned in zip(self.plan.inputs, leaves, self.in_shardings, strict=True)
            if getattr(x, "committed", False) and not x.sharding.is_equivalent_to(planned, x.ndim)
        ]
        if not moved:
            return
        leaf, x, planned = max(moved, key=lambda found: found[1].nbytes)
        n, wanted = x.sharding.num_devices, planned.num_devices
        was, will = getattr(x.sharding, "spec", x.sharding), str(leaf.layout)
        if x.sharding.device_set != planned.device_set:
            was, will = f"{was} on {n} {'other ' * (n == wanted)}devices", f"{will} on {wanted}"
        was = "on one device" if n == 1 else was
        was = f"{was} in {x.sharding.memory_kind}" if x.sharding.memory_kind != planned.memory_kind else was
        size = format_memory(sum(x.nbytes for _, x, _ in moved))
        warn(
            f"the call moved {len(moved)} of {len(leaves)} arrays, {size} in all, which are not where its plan wants them: "
            f"{leaf.path} was {was}, planned is {will}.\n"
            "  ways out: state from step.init after step.plan; for a second function of one state (another batch shape, an "
            "evaluation), auto(mesh, state_like=plan)"
        )

    @cached_property
    def stands_in(self) -> bool:
        """Whether its operands or results have stand-ins."""
        return any(map(holds_stand_ins, (self.plan.context.in_tree, self.plan.context.out_tree)))

    def argument_leaves(self, tree, same: Callable[[Any, Any], bool]) -> list[list[Leaf]]:
        """Planned leaves of every argument whose structure is the same."""
        return [*arguments_like(self.plan.inputs, self.plan.context.in_tree, tree, same)]


@dataclass(frozen=True, eq=False)
class PlanContext:
    """What a fresh plan was planned from.

    Attributes:
        program: gives the jitted step and shapes to trace it with, devices or not.
        replan: plans the step anew.
        decided: gives the plan of other decisions of the same program on the same mesh, and with what that is planned anew.
    """

    mesh: Any
    in_tree: Any
    out_tree: Any
    in_dtypes: Mapping[str, Any]
    replan: Callable[..., Plan]
    program: Callable[[Plan], tuple[Callable, tuple]]
    searches: Iterable[str]
    decided: Callable[[Planned, Callable[..., Plan]], Plan]
    planned: Planned | None = None
    verified: Verified | None = None

    @cached_property
    def prices(self) -> WhatIf:
        """Of changes of the plan that was solved."""
        assert self.planned is not None
        return WhatIf(self.planned)


def _is_on_no_mesh(x: Any) -> bool:
    """Whether it is an array of NumPy, or of JAX on a device as such."""
    if isinstance(x, jax.Array):
        return not _jax.is_tracer(x) and not isinstance(x.sharding, jax.sharding.NamedSharding)
    return isinstance(x, (np.ndarray, np.generic))


def _accepts(x: Any, planned: jax.sharding.Sharding) -> bool:
    """Whether jit takes an array that is on no mesh where another sharding is planned."""
    return not getattr(x, "committed", False) or planned.is_fully_replicated or x.sharding.is_equivalent_to(planned, x.ndim)


def _is_deleted(x: Any) -> bool:
    """Whether an array was donated or deleted; what is traced or is no JAX array was not."""
    return isinstance(x, jax.Array) and not _jax.is_tracer(x) and x.is_deleted()
