"""Why an array lies as it does: who makes and reads it, the call stack, the next best choices and their price, what binds.

    plan.why("params/blocks/3/up")             an input, or inputs of one shape, by path or pattern
    plan.why("train.py:41")                    the most expensive reshard on a line; `asked.py` has all that can be asked for

The next best choices are priced by `what_if.py`: nearby ops adapt, the rest of the plan stays.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from pkgutil import resolve_name

from shardplan import _jax
from shardplan.costs.pins import pin_description
from shardplan.files import is_library, portable
from shardplan.ir.graph import Source
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout, splits_unevenly
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.asked import Asked, asked
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.what_if import WhatIf, sent_bytes
from shardplan.search.neighbourhood import Nearby
from shardplan.search.objective import NEAR_TIE
from shardplan.units import format_array, format_memory, format_percent, format_seconds, to_digits

PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
"""Frames of this package and what called it are none of the step's."""
JUDGED = 6
"""Choices that are given figures: those of least cost on the plan's network."""
GRADIENT_OPS = 64
"""Ops between a gradient and the state it updates, at most."""


@dataclass(frozen=True)
class ArrayUse:
    """An op that makes or reads an array.

    Attributes:
        what: primitive and place, "dot_general at train.py:41 in mlp"; or "input of the step".
        phase: "forward", "backward" or "update".
        layout: in which it makes or reads the array.
        collectives: that bring the array to it, "all-gather over data"; () where it reads the array as it is, or another reader's copy.
        sent_bytes, seconds: of these collectives, per step and device.
        stack: the user's frames, "train.py:41 in mlp", innermost first.
    """

    what: str
    phase: str
    layout: Layout
    collectives: tuple[str, ...] = ()
    sent_bytes: float = 0.0
    seconds: float = 0.0
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutChoice:
    """A choice that the plan did not make, with the figures of a plan that makes it.

    Attributes:
        text: what is chosen, such as "P(None, 'model')".
        layout: of the array.
        seconds, peak_bytes, sent_bytes: of the whole step, nearby ops adapted.
        fits: whether the peak is within the memory limit.
    """

    text: str
    layout: Layout
    seconds: float
    peak_bytes: float
    sent_bytes: float
    fits: bool


@dataclass(frozen=True)
class Why:
    """The answer of `Plan.why`; `print` it.

    Attributes:
        name: path of the inputs, or what a reshard moves.
        array: type of one of them.
        layout: of the plan: of the inputs, or before a reshard.
        maker, readers: who makes and reads it.
        chosen: the plan's own figures.
        choices: others that were priced, the next best first.
        unpriced: how many choices cost more on the plan's network and were not judged.
        impossible: choices that no plan near this one makes.
        constraints: what binds, in words.
        estimated: the figures of `choices` are those of the plan's cost network; their steps were not scheduled.
        pending: choices that are not priced yet; () in an answer of `Plan.why`.
    """

    name: str
    array: str
    layout: Layout
    maker: ArrayUse
    readers: tuple[ArrayUse, ...]
    chosen: LayoutChoice
    choices: tuple[LayoutChoice, ...]
    unpriced: int
    impossible: tuple[str, ...]
    constraints: tuple[str, ...]
    estimated: bool = False
    pending: tuple[str, ...] = ()

    def __str__(self) -> str:
        return resolve_name("shardplan.view.why:why_text")(self)


def why(plan: Plan, what: str | Sequence[str] | PlannedReshard, estimate: bool = False) -> Why:
    """The answer of `Plan.why`."""
    *_, found = growing(plan, what, estimate)
    if not estimate:
        answered(plan)[what if isinstance(what, (str, PlannedReshard)) else tuple(what)] = found
    return found


def answered(plan: Plan) -> dict[str | tuple[str, ...] | PlannedReshard, Why]:
    """What `Plan.why` was asked for -> its answer, which pages show, too; kept with the plan's own cached values."""
    return vars(plan).setdefault("_answered", {})


def growing(
    plan: Plan, what: str | Sequence[str] | PlannedReshard, estimate: bool = False, partly: Callable[[], bool] = lambda: False
) -> Iterator[Why]:
    """The answer of `Plan.why` in small pieces of work, between which other things can be done.

    Args:
        partly: whether somebody waits, so that the best choices of those that were estimated are said before all are.

    Yields:
        What is known before any other layout is priced; the same after every piece, with the best choices so far; last the answer.
    """
    found, what_if = asked(plan, what), plan.context.prices
    facts = replace(_facts(plan, what, found), estimated=estimate, pending=tuple(found.wanted))
    yield facts
    changes: dict[str, Nearby | None] = {}
    priced: dict[str, LayoutChoice] = {}

    def best() -> list[LayoutChoice]:
        """The choices of least cost so far, those that fit first."""
        least = [text for text in _possible(found.wanted, changes)[:JUDGED] if text in priced]
        return sorted((priced[text] for text in least), key=lambda c: (not c.fits, c.seconds))

    def price(text: str) -> None:
        if (change := changes.get(text)) and text not in priced:
            priced[text] = _priced(what_if, facts.chosen, text, found.wanted[text][0], change, estimate)

    for text, change in what_if.changing(found.wanted):
        changes[text] = change
        if estimate and partly():
            for one in _possible(found.wanted, changes)[:JUDGED]:
                price(one)
            facts = replace(facts, choices=tuple(best()), pending=tuple(text for text in found.wanted if text not in changes))
        yield facts
    possible = _possible(found.wanted, changes)
    for text in possible[:JUDGED]:
        price(text)
        yield facts
    choices = tuple(best())
    yield replace(
        facts,
        choices=choices,
        unpriced=max(0, len(possible) - JUDGED),
        impossible=tuple(text for text in found.wanted if changes.get(text) is None),
        constraints=(*facts.constraints, *_constraints_by_choices(facts.chosen, choices, what_if.present.limit)),
        pending=(),
    )


def _possible(wanted: Iterable[str], changes: Mapping[str, Nearby | None]) -> list[str]:
    """The choices that can be made, those of least cost first."""
    costs = {text: change.cost for text in wanted if (change := changes.get(text))}
    return sorted(costs, key=lambda text: costs[text])


def _facts(plan: Plan, what: str | Sequence[str] | PlannedReshard, found: Asked) -> Why:
    """All but what other layouts would cost."""
    planned, memory = plan.context.planned, plan.memory_report
    graph = planned.graph
    made = graph.maker(found.value)
    if found.kind == "reshards":
        assert found.reader is not None
        i, (_, after, uses) = found.ops[0], found.reader
        others = (u for u in _readers(planned, found.value) if u.stack != _stack(graph.ops[i].source))
        readers = _use(planned, i, after, uses), *others
        name, binding = "as planned", [made, found.reader[0]]
    else:
        readers = tuple(_readers(planned, found.value))
        name, binding = str(found.layout), found.ops
    fits = memory.limit is None or memory.peak <= memory.limit
    return Why(
        name=_name(planned, what, found),
        array=format_array(graph.values[found.value]),
        layout=found.layout,
        maker=_use(planned, made, found.layout),
        readers=readers,
        chosen=LayoutChoice(name, found.layout, plan.seconds["total"], memory.peak, plan.context.prices.sent_bytes, fits),
        choices=(),
        unpriced=0,
        impossible=(),
        constraints=tuple(_constraints(plan, planned, binding)),
    )


def _name(planned: Planned, what: str | Sequence[str] | PlannedReshard, found: Asked) -> str:
    name = array_name(planned, found.value)
    if found.kind == "reshards" or len(found.ops) == 1:
        return name
    return f"{what if isinstance(what, str) and found.kind == 'inputs' else name}, {len(found.ops)} arrays"


def _readers(planned: Planned, v: int) -> Iterator[ArrayUse]:
    """Who reads a value, directly or through copies, in program order."""
    graph = planned.graph
    values, read = [v], []
    for value in values:
        for j, k in graph.values[value].consumers:
            if graph.ops[j].traits.copy:
                values += graph.ops[j].outputs
            else:
                read.append((j, k))
    for j, k in sorted(dict.fromkeys(read)):
        steps = [(key[0], s) for shown, _, key, found in planned.operand_reshards(j) if shown == k for s in found]
        yield _use(planned, j, planned.operand_layout(j, k), steps)


def _use(planned: Planned, j: int, layout: Layout, steps: Iterable[tuple[int, ReshardStep]] = ()) -> ArrayUse:
    graph, mesh = planned.graph, planned.space.mesh
    op, found = graph.ops[j], list(steps)
    what = f"output {op.label} of the step" if op.traits.step_output else f"{op.primitive}{_at(op.source)}"
    if op.traits.step_input:
        return ArrayUse(f"input of the step, {planned.categories[j]}", "", layout)
    return ArrayUse(
        what,
        op.phase,
        layout,
        tuple(f"{s.kind} over {', '.join(s.axes)}" for _, s in found),
        sum(graph.ops[i].reads * wire_bytes(s.kind, s.bytes, mesh.size(*s.axes)) for i, s in found),
        sum(graph.ops[i].reads * s.seconds for i, s in found),
        _stack(op.source),
    )


def _at(source: Source) -> str:
    return f" at {source}{f' in {_function(source.function)}' if source.function else ''}" if source.file else ""


def _function(name: str) -> str:
    """A function without those that it stands in: "loss_fn" of "train.<locals>.loss_fn"."""
    return name.rpartition("<locals>.")[2]


def _stack(source: Source) -> tuple[str, ...]:
    """The user's frames, innermost first; frames of installed packages only above the user's innermost line."""
    if source.traceback is None:
        return ()
    frames = list(itertools.takewhile(lambda frame: not frame[0].startswith(PACKAGE), _jax.call_stack(source.traceback)))
    own = [n for n, (file, *_) in enumerate(frames) if not is_library(file)]
    kept = [frame for n, frame in enumerate(frames) if n in own or (own and n == own[0] - 1)]
    return tuple(f"{portable(file)}:{line} in {_function(function)}" for file, line, function in kept)


# ---- names


def array_name(planned: Planned, v: int) -> str:
    """What a value is to the user: the path of an input, the gradient of a parameter, or the result of an op."""
    graph = planned.graph
    op = graph.ops[graph.maker(v)]
    if op.label:
        return op.label
    size = prod(graph.values[v].shape)

    def passes(at: int) -> bool:
        reader = graph.ops[at]
        return reader.phase != "forward" and any(prod(x.shape) == size for x in reader.outs if hasattr(x, "shape"))

    if op.phase == "backward" and size > 1:
        state = {out: a for a, out in graph.same_layout if graph.ops[a].traits.step_input}
        for _, at in zip(range(GRADIENT_OPS), graph.reached(v, passes), strict=False):
            if at in state and planned.categories[state[at]] == "parameters":
                return f"gradient of {graph.ops[state[at]].label}"
    return f"result of {op.primitive}{_at(op.source)}"


# ---- prices and constraints


def _priced(what_if: WhatIf, chosen: LayoutChoice, text: str, layout: Layout, change: Nearby, estimate: bool) -> LayoutChoice:
    if estimate:
        seconds, more, sent = what_if.estimated(change)
        peak, limit = chosen.peak_bytes + more, what_if.present.limit
        return LayoutChoice(text, layout, to_digits(seconds), peak, sent, limit is None or peak <= limit)
    judged = what_if.judged(change.states)
    sent = sent_bytes(judged.network, judged.states)
    return LayoutChoice(text, layout, to_digits(judged.timeline.total_s), judged.peak_bytes, sent, not judged.excess_bytes)


def _constraints(plan: Plan, planned: Planned, ops: Sequence[int]) -> Iterator[str]:
    """In words, what keeps an array from other layouts, whatever they cost."""
    graph, space = planned.graph, planned.space
    partners = [(a, b) for pair in graph.same_layout for a, b in (pair, pair[::-1]) if a in ops]
    for i in dict.fromkeys([*ops, *(b for _, b in partners)]):
        if i in planned.pins:
            yield f"pin: {pin_description(graph.ops[i], planned.pins[i])}"
    for _, b in partners[:1]:
        kind = "output" if graph.ops[b].traits.step_output else "input" if graph.ops[b].traits.step_input else "carry of the loop"
        yield f"tie: the {kind}{f' {graph.ops[b].label}' if graph.ops[b].label else ''} has the same layout, so that no step moves it"
    ties = planned.network.problem.ties
    equal = [j for j in planned.tied[ties[ops[0]]] if j not in ops] if plan.symmetric_layers and ties else []
    if equal:
        labels = [graph.ops[j].label for j in equal if graph.ops[j].label]
        yield f"tie: {len(equal)} ops of repeated layers were given the same strategy{f', {labels[0]} among them' if labels else ''}"
    shape = tuple(graph.ops[ops[0]].outs[0].shape)
    end = graph.ops[ops[0]]
    whole = end.traits.endpoint and not end.padded  # inside the step, and in padded state, blocks may be nearly equal
    for d, n in enumerate(shape):
        if n > 1 and (bad := [f"{a}={k}" for a, k in space.mesh if n % k and (whole or not splits_unevenly(n, k))]):
            ways = "; pad_state=True would fill it up" if whole and any(splits_unevenly(n, k) for _, k in space.mesh) else ""
            yield f"divisibility: dim {d} of {n} elements is no multiple of {', '.join(bad)}{ways if partners else ''}"


def _constraints_by_choices(chosen: LayoutChoice, choices: Sequence[LayoutChoice], limit: float | None) -> Iterator[str]:
    """In words, what keeps an array from the fastest layout."""
    quicker = [c for c in choices if not c.fits and c.seconds < chosen.seconds]
    if quicker and limit is not None:
        c = min(quicker, key=lambda c: c.seconds)
        more = f"{format_memory(c.peak_bytes)} of {format_memory(limit)}"
        yield f"memory: {c.text} would take {format_seconds(c.seconds)}, and needs {more}"
    elif limit is not None:
        yield f"memory does not bind here: {format_memory(chosen.peak_bytes)} of {format_memory(limit)} at the peak"
    faster = [c for c in choices if c.fits and c.seconds < (1 - NEAR_TIE) * chosen.seconds]
    if faster:
        yield f"nothing: {faster[0].text} is faster than the plan, which no search came upon; plan.fix(...) takes it"
    near = [c for c in choices if c.fits and abs(c.seconds - chosen.seconds) <= NEAR_TIE * chosen.seconds]
    if near:
        yield f"near tie: {len(near)} of the other choices are within {format_percent(NEAR_TIE)}; the simplest plan is taken"
