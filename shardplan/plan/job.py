"""Which leaves of several functions are one state, in which layouts their plans have it, and what other layouts of it would cost.

The state is the largest first argument. That of another function is a part of it: all its leaves, by path and type, below one path.

    train_step   state/params/up, state/params/down, state/moments/up, ...
    evaluate     params/up, params/down                                      at "params" of the state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import jax
import numpy as np
from msgspec import structs

from shardplan.errors import ShardingError
from shardplan.mesh.layout import Layout
from shardplan.plan.arguments import arguments, tree_paths
from shardplan.plan.data import JobPart, Leaf, seconds_per_call
from shardplan.plan.plan import Plan
from shardplan.units import fit, format_array

StateLayouts = Mapping[int, Layout]
"""Number of a leaf of the state -> its layout."""

MAX_LISTED = 5


@dataclass(frozen=True)
class JobLayout:
    """One layout of the state: where it comes from, and the weighted seconds with it.

    Attributes:
        name: in words.
        seconds: of a call on average; infinite where a function has no plan with it.
        why_not: the error of that function, else "".
    """

    name: str
    seconds: float
    why_not: str = ""


@dataclass(frozen=True, eq=False)
class Job:
    """Functions that share a state, planned with one layout of it. Iterating gives the steps; `print` it.

    Attributes:
        steps: of `auto`, as planned, one per function; each keeps the layout of the state for arguments of other shapes, too.
        plans: of every call that was planned, in the order of the arguments.
        parts: name, weight and seconds of each.
        alone_seconds: what each takes if it is planned alone, with a layout of its own.
        bound: seconds of a call on average that no layout of the state undercuts.
        layouts: of the state, that were planned: the one taken first.
        shared: how many arrays the state has.
    """

    steps: tuple[Any, ...]
    plans: tuple[Plan, ...]
    parts: tuple[JobPart, ...]
    alone_seconds: tuple[float, ...]
    bound: float
    layouts: tuple[JobLayout, ...]
    shared: int

    @property
    def seconds(self) -> float:
        """Of a call on average, by the weights."""
        return seconds_per_call(self.parts)

    @property
    def gap(self) -> float:
        """How far the job may be from the best layout of the state, relative to its seconds."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __str__(self) -> str:
        return resolve_name("shardplan.view.text:job_text")(self)


@dataclass(frozen=True, eq=False)
class SharedPart:
    """The first argument of one function as a part of the state.

    Attributes:
        alone: its plan without the others.
        numbers: of its leaves in the state.
    """

    alone: Plan
    numbers: tuple[int, ...]

    def layouts(self, plan: Plan) -> dict[int, Layout]:
        """Of the state, as a plan of the function has it."""
        return {n: leaf.layout for n, leaf in zip(self.numbers, plan.inputs, strict=False)}

    def pinned_to(self, state: StateLayouts, rest: Iterable[Leaf] = ()) -> Plan:
        """What `state_like` takes to give the function these layouts, and to leave room for the rest of the state."""
        leaves = zip(self.numbers, self.alone.inputs, strict=False)
        inputs = [structs.replace(leaf, layout=state[n], kind="parameters") for n, leaf in leaves if n in state]
        inputs += [structs.replace(leaf, path="", kind="optimizer") for leaf in rest]  # without a path it is no input of the function
        return structs.replace(self.alone, inputs=tuple(inputs))

    def seconds_with(self, state: StateLayouts) -> float:
        """Seconds with these layouts of the state, without planning anew; infinite if nothing near the own plan has them."""
        planned, prices = self.alone.context.planned, self.alone.context.prices
        masks: dict[bool, dict[int, np.ndarray]] = {True: {}, False: {}}
        for at, n in zip(planned.graph.args, self.numbers, strict=False):
            stays = planned.result_layout(at) == state[n]
            masks[stays][at] = np.array([x == state[n] for x in planned.space.strategies[at].results[0]])
        if not masks[False]:
            return planned.timeline.total_s
        states = prices.neighbourhood.states_with(masks[False], masks[True]) if all(m.any() for m in masks[False].values()) else None
        judged = None if states is None else prices.judged(states)
        return np.inf if judged is None or judged.excess_bytes else judged.timeline.total_s


def shared_parts(names: Sequence[str], plans: Sequence[Plan], given: Sequence[Any]) -> list[SharedPart]:
    """Each function's part of the state.

    Args:
        names: of the functions.
        plans: of each alone.
        given: the first argument of each; of several parts that fit, the one that is given in the state, too, is meant.

    Raises:
        ShardingError: a first argument is not a part of the largest one, or several parts of it fit.
    """
    states = [_first_argument(plan) for plan in plans]
    keeper = max(range(len(states)), key=lambda n: len(states[n]))
    if not states[keeper]:
        raise ShardingError(
            f"together: the first argument of {names[keeper]} has no arrays.\n  way out: steps that take the state first"
        )
    objects = [[*map(id, jax.tree.leaves(argument))] for argument in given]
    known = [dict(zip(state, ids, strict=True)) if len(state) == len(ids) else {} for state, ids in zip(states, objects, strict=True)]
    parts = zip(names, states, known, strict=True)
    found = (_numbers(names[keeper], states[keeper], known[keeper], *part) for part in parts)
    return [SharedPart(plan, numbers) for plan, numbers in zip(plans, found, strict=True)]


def _first_argument(plan: Plan) -> dict[str, Leaf]:
    """Path below the argument -> leaf."""
    first = next(iter(arguments(plan.context.in_tree)), None)
    return {} if first is None else dict(zip(tree_paths(first), plan.inputs, strict=False))


def _numbers(
    keeper: str, state: Mapping[str, Leaf], ids: Mapping[str, int], name: str, part: Mapping[str, Leaf], part_ids: Mapping[str, int]
) -> tuple[int, ...]:
    """Numbers in the state of the leaves of a function's first argument."""
    first, paths = next(iter(part), ""), list(state)
    tops = [""] if first in state else []
    tops += [path.removesuffix(first).removesuffix("/") for path in paths if f"/{path}".endswith(f"/{first}") and path != first]
    lost = {top: [path for path, leaf in part.items() if not _same(state.get(_joined(top, path)), leaf)] for top in dict.fromkeys(tops)}
    whole = [top for top, paths in lost.items() if not paths] if part else []
    if len(whole) > 1:
        whole = [top for top in whole if ids and all(ids[_joined(top, path)] == part_ids.get(path) for path in part)] or whole
    if len(whole) > 1:
        whole = [top for top in whole if all(state[_joined(top, path)].kind == "parameters" for path in part)] or whole
    if len(whole) == 1:
        return tuple(paths.index(_joined(whole[0], path)) for path in part)
    if whole:
        raise ShardingError(
            f"together: the first argument of {name} may be the state of {keeper} at {' or '.join(map(repr, whole))}.\n"
            f"  way out: {name} takes the whole state"
        )
    said = min(lost.values(), key=len, default=list(part))
    what = f"{len(said)} of {len(part)} arrays are not" if len(said) < len(part) else "it is not"
    some = ", ".join(f"{path} {format_array(part[path])}" for path in said[:MAX_LISTED])
    raise ShardingError(
        f"together: the first argument of {name} is no part of the state, the first argument of {keeper}: {what} in it.\n"
        f"  not there: {fit(some, 300) or 'it has no arrays'}\n  state: {_types(state)}\n"
        "  ways out: the state, or one part of it, as the first argument, and all else in further ones; auto(mesh) plans it alone"
    )


def _types(leaves: Mapping[str, Leaf]) -> str:
    some = ", ".join(f"{path} {format_array(leaf)}" for path, leaf in list(leaves.items())[:MAX_LISTED])
    return fit(some, 300) + (", ..." if len(leaves) > MAX_LISTED else "")


def _same(there: Leaf | None, leaf: Leaf) -> bool:
    return there is not None and (there.shape, there.dtype) == (leaf.shape, leaf.dtype)


def _joined(top: str, path: str) -> str:
    return "/".join(x for x in (top, path) if x)
