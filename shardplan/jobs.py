"""`together`: functions that share a state, planned with one layout of it, by weighted seconds.

    1 alone     every function with a layout of its own: the sum of their bounds holds for every job
    2 in turn   the functions in an order, each with the layouts of the state that those before it took: all orders of a few functions
    3 by array  from the best layout, equal arrays together, one group after the other in each layout that it can have, as long as
                estimates (`Plan.what_if`) get less; then each function is planned with that

Of all layouts that every function has a plan with, the one of least weighted seconds is taken. The optimum is not proven unless the
bound says so. Also known as alternating minimisation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from msgspec import structs

from shardplan.api import Auto
from shardplan.errors import ShardingError
from shardplan.mesh.layout import Layout
from shardplan.plan import Plan
from shardplan.plan.data import JobPart, Leaf, seconds_per_call
from shardplan.plan.job import Job, JobLayout, SharedPart, StateLayouts, shared_parts
from shardplan.processes import process_numbers
from shardplan.search.objective import NEAR_TIE
from shardplan.units import format_array

ALL_ORDERS = 4
"""Functions up to which all orders are planned; of more, each comes first once, and the others follow by weighted seconds."""

OPS = 40_000
"""Ops of all estimates together."""

LESS = 1e-9
"""Relative difference of seconds below which two layouts are as good: the first one is taken."""


def together(weights: Mapping[Auto, float | Sequence[float]], *arguments: tuple) -> Job:
    """Plan functions that share a state with one layout of it: that of the least weighted seconds.

    The state is the largest first argument of the functions; that of every other one is the same or a part of it, by paths, shapes
    and dtypes. The layout is the best that was found; `Job.gap` says how far from the optimum it is at most.

    Args:
        weights: step of `auto` -> how often it is called, in proportion to the others; a sequence, one per shape, for a step that is
            called with arguments of several shapes.
        *arguments: per weight, in their order, the positional arguments of a call (arrays or ShapeDtypeStructs), as a tuple.

    Returns:
        A `Job`: `train_step, evaluate = together(...)` are the steps to call; `print` it.

    Raises:
        ShardingError: weights or arguments that cannot be; first arguments that are not one state; or no layout of it with which all
            functions have a plan.
    """
    return _Planning(_calls(weights, arguments)).job()


@dataclass(frozen=True, eq=False)
class _Call:
    """One call that is planned: a step, its arguments, and how often it is called."""

    step: Auto
    arguments: tuple
    weight: float
    name: str


def _calls(weights: Mapping[Auto, Any], arguments: Sequence[tuple]) -> list[_Call]:
    if not isinstance(weights, Mapping) or not weights:
        raise ShardingError(
            f"together() takes a mapping of steps to weights first, not {type(weights).__name__ if weights else 'an empty one'}.\n"
            "  way out: together({train_step: 0.95, evaluate: 0.05}, (state, batch), (state, images))"
        )
    every: list[tuple[Auto, Any]] = []
    for step, given in weights.items():
        if not isinstance(step, Auto):
            name = getattr(step, "__name__", repr(step))
            raise ShardingError(f"together() takes steps of auto, and {name} is none.\n  way out: auto(mesh)({name})")
        every += [(step, weight) for weight in (given if isinstance(given, Sequence) and not isinstance(given, str) else [given])]
    for step, weight in every:
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 < weight < math.inf:
            raise ShardingError(
                f"together(): the weight {weight!r} of {_name(step)} is no number above 0.\n"
                "  way out: how often it is called, such as 0.05"
            )
    if len(every) != len(arguments):
        raise ShardingError(
            f"together() has {len(every)} weights and the arguments of {len(arguments)} calls.\n"
            "  way out: a tuple of arguments per weight, in their order; a step of several shapes has a sequence of weights"
        )
    if len(every) < 2:
        raise ShardingError("together() plans two functions or more.\n  way out: auto(mesh)(step) plans one")
    for (step, _), given in zip(every, arguments, strict=True):
        if not isinstance(given, tuple):
            raise ShardingError(
                f"together(): the arguments of {_name(step)} are a {type(given).__name__}, not a tuple.\n  way out: (state, batch)"
            )
        if step.options.state_like is not None:
            raise ShardingError(
                f"together(): {_name(step)} has state_like=, which says already how its state lies.\n  way out: drop it"
            )
        if step.options.mesh != every[0][0].options.mesh:
            raise ShardingError(
                f"together(): {_name(every[0][0])} is for mesh {every[0][0].options.shape}, {_name(step)} for {step.options.shape}, or "
                "for other devices.\n  way out: one mesh; shardplan.transfer moves a state between two"
            )
    names = [_name(step) for step, _ in every]
    return [
        _Call(step, given, float(weight), name if names.count(name) == 1 else f"{name} {_shape(given)}")
        for (step, weight), given, name in zip(every, arguments, names, strict=True)
    ]


def _name(step: Auto) -> str:
    return getattr(step, "__name__", "step")


def _shape(arguments: tuple) -> str:
    """The type of the first array behind the state."""
    rest = (x for x in jax.tree.leaves(arguments[1:]) if hasattr(x, "shape"))
    return next((format_array(x) for x in rest), "")


@dataclass(frozen=True, eq=False)
class _Tried:
    """One layout of the state, and every call planned with it."""

    name: str
    state: StateLayouts
    steps: tuple[Auto, ...]
    seconds: float
    why_not: str = ""


@dataclass(eq=False)
class _Planning:
    """The calls of a job, and what was planned of them: a call with the same layouts of the state is planned once."""

    calls: list[_Call]
    known: dict[tuple, Auto | ShardingError] = field(default_factory=dict)
    parts: list[SharedPart] = field(default_factory=list)

    def job(self) -> Job:
        """The best one that was found."""
        alone = [self._plan(n, {}) for n in range(len(self.calls))]
        names = [call.name for call in self.calls]
        first = [next(iter(call.arguments), None) for call in self.calls]
        self.parts = shared_parts(names, [self._plan_of(n, step) for n, step in enumerate(alone)], first)
        own = [self._plan_of(n, step).seconds for n, step in enumerate(alone)]
        tried = [self._in_order(order) for order in self._orders([x["total"] for x in own])]
        best = min(tried, key=lambda x: x.seconds)
        if best.why_not:
            why = "\n".join(f"  {line}" for line in best.why_not.splitlines())
            raise ShardingError(f"together: no layout of the state was found with which all functions have a plan.\n{why}")
        bound = min(self._mean([x["bound"] for x in own]), best.seconds)
        near = best.seconds <= (1 + NEAR_TIE) * self._mean([x["total"] for x in own])  # one layout costs next to nothing
        if not near and (state := self._array_by_array(best, tried)) is not None:
            tried.append(self._tried("found array by array", state))
            best = tried[-1] if tried[-1].seconds < best.seconds * (1 - LESS) else best
        return self._named(best, tried, [x["total"] for x in own], min(bound, best.seconds))

    # ---- plans

    def _plan(self, n: int, state: StateLayouts, rest: Sequence[Leaf] = ()) -> Auto:
        """A call's step, planned with these layouts of the state, and with room for the rest of it.

        Raises:
            ShardingError: it has no plan with them.
        """
        mine = {k: state[k] for k in self.parts[n].numbers if k in state} if state else {}
        key = (n, tuple(sorted(mine.items())), tuple((leaf.path, leaf.layout) for leaf in rest))
        if key not in self.known:
            self.known[key] = self._known_plan(key, mine) or self._new_plan(n, mine, rest)
        found = self.known[key]
        if isinstance(found, ShardingError):
            raise found
        return found

    def _known_plan(self, key: tuple, mine: StateLayouts) -> Auto | None:
        """A step that was planned with fewer of these layouts, and has them all."""
        n, _, rest = key
        for (k, fewer, same), step in self.known.items():
            if (k, same) == (n, rest) and isinstance(step, Auto) and {*fewer} <= {*mine.items()}:
                had = self.parts[n].layouts(self._plan_of(n, step))
                if all(had[leaf] == layout for leaf, layout in mine.items()):
                    return step
        return None

    def _new_plan(self, n: int, mine: StateLayouts, rest: Sequence[Leaf]) -> Auto | ShardingError:
        step = self._step(n, mine, rest)
        try:
            step.plan(*self.calls[n].arguments)
            return step
        except ShardingError as error:
            return ShardingError(f"together: {self.calls[n].name}: {error}")

    def _step(self, n: int, mine: StateLayouts, rest: Sequence[Leaf]) -> Auto:
        """A call's step, not planned yet."""
        return self.calls[n].step.with_options(**({"state_like": self.parts[n].pinned_to(mine, rest)} if mine else {}))

    def _plan_of(self, n: int, step: Auto) -> Plan:
        return step.plan(*self.calls[n].arguments)

    def _mean(self, seconds: Sequence[float]) -> float:
        """Seconds of a call on average."""
        return seconds_per_call([JobPart(call.name, call.weight, x) for call, x in zip(self.calls, seconds, strict=True)])

    # ---- layouts of the state

    def _orders(self, seconds: Sequence[float]) -> Iterator[tuple[int, ...]]:
        """Orders of the calls, those that weigh most first."""
        heavy = sorted(range(len(self.calls)), key=lambda n: -self.calls[n].weight * seconds[n])
        if len(heavy) <= ALL_ORDERS:
            return itertools.permutations(heavy)
        return ((n, *(k for k in heavy if k != n)) for n in heavy)

    def _in_order(self, order: Sequence[int]) -> _Tried:
        """Each call planned with the layouts that those before it took."""
        state: dict[int, Any] = {}
        deciding: list[str] = []
        for n in order:
            try:
                found = self.parts[n].layouts(self._plan_of(n, self._plan(n, state)))
            except ShardingError as error:
                return _Tried(f"as {', then '.join(deciding)} has it", state, (), math.inf, str(error))
            deciding += [self.calls[n].name] if found.keys() - state.keys() else []
            state |= {k: layout for k, layout in found.items() if k not in state}
        return self._tried(f"as {', then '.join(deciding)} has it", state)

    def _tried(self, name: str, state: StateLayouts) -> _Tried:
        """Every call planned with one layout of all of the state, and with the room that the rest of it leaves."""
        steps, seconds = [], []
        for n in range(len(self.calls)):
            try:
                step = self._plan(n, state)
                plan = self._plan_of(n, step)
                rest, limit = self._rest(n, state), plan.memory_report.limit
                if limit is not None and plan.memory_report.peak + sum(x.device_bytes(plan.mesh) for x in rest) > limit:
                    step = self._plan(n, state, rest)
                    plan = self._plan_of(n, step)
                if (moved := self._elsewhere(n, plan, state)) is not None:
                    raise ShardingError(moved)
            except ShardingError as error:
                return _Tried(name, state, (), math.inf, str(error))
            steps.append(step)
            seconds.append(plan.seconds["total"])
        return _Tried(name, state, tuple(steps), self._mean(seconds))

    @property
    def _leaves(self) -> dict[int, Leaf]:
        """Of the state, by number."""
        return {k: leaf for part in self.parts for k, leaf in zip(part.numbers, part.alone.inputs, strict=False)}

    def _rest(self, n: int, state: StateLayouts) -> list[Leaf]:
        """What of the state a call does not take, but is there while it runs."""
        mine, leaves = {*self.parts[n].numbers}, self._leaves
        return [structs.replace(leaves[k], layout=layout) for k, layout in state.items() if k not in mine]

    def _elsewhere(self, n: int, plan: Plan, state: StateLayouts) -> str | None:
        """What a plan has in another layout, as pins of a step win over the layout of the state."""
        for (k, layout), leaf in zip(self.parts[n].layouts(plan).items(), plan.inputs, strict=False):
            if layout != state[k]:
                return (
                    f"together: {self.calls[n].name} pins {leaf.path} to {layout}, another function has it as {state[k]}.\n"
                    "  way out: the same pin for all of them"
                )
        return None

    def _array_by_array(self, best: _Tried, tried: Sequence[_Tried]) -> StateLayouts | None:
        """A layout of the state that is estimated to take less than the best one."""
        others = [x.state for x in tried if not x.why_not and x.state != best.state]
        plans = [part.alone.context.planned for part in self.parts]
        if None in plans or len(process_numbers(self.calls[0].step.options.mesh)) > 1:  # some process has no plan to ask
            return None
        ops = OPS
        groups: dict[tuple, list[int]] = {}
        for k, leaf in sorted(self._leaves.items()):
            groups.setdefault((leaf.shape, leaf.kind, best.state[k], *(x[k] for x in others)), []).append(k)
        state, least = dict(best.state), self._estimate(best.state)
        for (_, _, _, *layouts), some in groups.items():
            for layout in dict.fromkeys(x for x in (*layouts, *self._possible(some[0])) if x != state[some[0]]):
                ops -= sum(len(planned.graph.ops) for planned in plans)
                changed = {**state, **dict.fromkeys(some, layout)}
                if ops >= 0 and (seconds := self._estimate(changed)) < least * (1 - LESS):
                    state, least = changed, seconds
        return state if state != best.state and all(state != x for x in others) else None

    def _possible(self, k: int) -> Iterator[Layout]:
        """Layouts that the functions can give a leaf of the state."""
        for part in self.parts:
            if k in part.numbers:
                planned = part.alone.context.planned
                layouts = planned.space.strategies[planned.graph.args[part.numbers.index(k)]].results[0]
                yield from (x for x in layouts if not x.partial)

    def _estimate(self, state: StateLayouts) -> float:
        return self._mean([part.seconds_with(state) for part in self.parts])

    # ---- the answer

    def _named(self, best: _Tried, tried: Sequence[_Tried], alone: Sequence[float], bound: float) -> Job:
        plans = [self._plan_of(n, step) for n, step in enumerate(best.steps)]
        parts = [JobPart(call.name, call.weight, plan.seconds["total"]) for call, plan in zip(self.calls, plans, strict=True)]
        steps: dict[Auto, Auto] = {}
        for n, (call, step) in enumerate(zip(self.calls, best.steps, strict=True)):
            if call.step not in steps:
                steps[call.step] = self._step(n, {k: best.state[k] for k in self.parts[n].numbers}, self._rest(n, best.state))
            steps[call.step].adopt_plans(step, (parts[n], *(part for k, part in enumerate(parts) if k != n)))
        plans = [self._plan_of(n, steps[call.step]) for n, call in enumerate(self.calls)]
        others = {tuple(sorted(x.state.items())): x for x in tried if x is not best and x.state != best.state}
        layouts = [JobLayout(x.name, x.seconds, x.why_not) for x in (best, *sorted(others.values(), key=lambda x: x.seconds))]
        return Job(tuple(steps.values()), tuple(plans), tuple(parts), tuple(alone), bound, tuple(layouts), len(best.state))
