"""Why an array lies as it does: who makes and reads it, the call stack, the next best choices and their price, what binds.

    plan.why("params/blocks/3/up")             an input, or inputs of one shape, by path or pattern
    plan.why("train.py:41")                    the most expensive reshard on a line
    plan.why(plan.decisions[7].reshards[0])    a reshard of the plan

The next best choices are priced by `what_if.py`: nearby ops adapt, the rest of the plan stays.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.costs.memory_categories import categories
from shardplan.costs.pins import matches, nearest_paths, pin_description, pins_by_op
from shardplan.errors import ShardingError
from shardplan.files import is_library, portable
from shardplan.ir.graph import Graph, Source
from shardplan.mesh.collective import wire_bytes
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.plan.what_if import WhatIf, sent_bytes
from shardplan.search.objective import NEAR_TIE, Judged
from shardplan.units import format_array, format_memory, format_percent, format_seconds

PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
"""Frames of this package and what called it are none of the step's."""
JUDGED = 6
"""Choices that are judged by the objective: those of least cost on the plan's network."""
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

    def __str__(self) -> str:
        return resolve_name("shardplan.view.why:why_text")(self)


def why(plan: Plan, what: str | PlannedReshard) -> Why:
    """The answer of `Plan.why`."""
    planned = plan.context.planned
    if isinstance(what, PlannedReshard):
        return _of_reshard(plan, planned, *_place(plan, what))
    inputs = [i for i in planned.graph.args if matches(planned.graph.ops[i].label, what)]
    if inputs:
        return _of_inputs(plan, planned, what, inputs)
    found = [r for d in plan.decisions for r in d.reshards if what in (_short(d.file, d.line), f"{d.file}:{d.line}")]
    if found:
        runs = {id(r): d.runs for d in plan.decisions for r in d.reshards}
        return _of_reshard(plan, planned, *_place(plan, max(found, key=lambda r: r.seconds * runs[id(r)])))
    some = nearest_paths((x.path for x in plan.inputs), what)
    raise ShardingError(
        f"why({what!r}): no input of the step has this path, and no collective is on such a line.\n  inputs: {some}\n"
        '  ways out: a path or pattern as in pins, a line with collectives such as "train.py:41", or a reshard of plan.decisions'
    )


# ---- inputs


def _of_inputs(plan: Plan, planned: Planned, what: str, inputs: Sequence[int]) -> Why:
    graph, space = planned.graph, planned.space
    shapes = {graph.ops[i].outs[0].shape for i in inputs}
    if len(shapes) > 1:
        some = ", ".join(f"{graph.ops[i].label} {format_array(graph.ops[i].outs[0])}" for i in inputs[:4])
        raise ShardingError(f"why({what!r}) matches inputs of {len(shapes)} shapes: {some}, ...\n  way out: name those of one shape")
    at = inputs[0]
    present = planned.result_layout(at)
    pinned = pins_by_op(graph, planned.options)
    layouts = dict.fromkeys(x for x in space.strategies[at].results[0] if x != present and not x.partial)
    wanted = {layout: {i: np.array([x == layout for x in space.strategies[i].results[0]]) for i in inputs} for layout in layouts}
    what_if = WhatIf(planned)
    choices, unpriced, impossible = _priced(what_if, {str(layout): (layout, masks) for layout, masks in wanted.items()})
    name = graph.ops[at].label if len(inputs) == 1 else f"{what}, {len(inputs)} arrays"
    chosen = _choice(str(present), present, what_if.present)
    return Why(
        name=name,
        array=format_array(graph.ops[at].outs[0]),
        layout=present,
        maker=ArrayUse(f"input of the step, {categories(graph)[at]}", "", present),
        readers=tuple(_readers(planned, graph.ops[at].outputs[0])),
        chosen=chosen,
        choices=choices,
        unpriced=unpriced,
        impossible=impossible,
        constraints=tuple(_constraints(plan, planned, inputs, pinned, chosen, choices)),
    )


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
    return (
        f" at {_short(source.file, source.line)}{f' in {_function(source.function)}' if source.function else ''}" if source.file else ""
    )


def _function(name: str) -> str:
    """A function without those that it stands in: "loss_fn" of "train.<locals>.loss_fn"."""
    return name.rpartition("<locals>.")[2]


def _short(file: str, line: int) -> str:
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"


def _stack(source: Source) -> tuple[str, ...]:
    """The user's frames, innermost first; frames of installed packages only above the user's innermost line."""
    if source.traceback is None:
        return ()
    frames = list(itertools.takewhile(lambda frame: not frame[0].startswith(PACKAGE), _jax.call_stack(source.traceback)))
    own = [n for n, (file, *_) in enumerate(frames) if not is_library(file)]
    kept = [frame for n, frame in enumerate(frames) if n in own or (own and n == own[0] - 1)]
    return tuple(f"{portable(file)}:{line} in {_function(function)}" for file, line, function in kept)


# ---- reshards


def _place(plan: Plan, reshard: PlannedReshard) -> tuple[int, int]:
    """(op of the graph, number of the reshard at it) of a reshard of the plan: of equal ones the first, or the very object."""
    ops = [i for i, op in enumerate(plan.context.planned.graph.ops) if not op.traits.copy]
    every = [(ops[d.op], n, r) for d in plan.decisions for n, r in enumerate(d.reshards)]
    found = [(i, n) for i, n, r in every if r is reshard] or [(i, n) for i, n, r in every if r == reshard]
    if not found:
        raise ShardingError("why() takes a reshard of this very plan.\n  way out: one of plan.decisions[...].reshards")
    return found[0]


def _of_reshard(plan: Plan, planned: Planned, i: int, n: int) -> Why:
    graph, space = planned.graph, planned.space
    moves = list(planned.operand_reshards(i))
    if n < len(moves):
        shown, v, (j, k, before, after), steps = moves[n]
        uses = [(j, s) for s in steps]
    else:  # a halo exchange of the op itself
        shown = next(r for d in plan.decisions for m, r in enumerate(d.reshards) if _place(plan, r) == (i, n)).operand
        v, j, k = graph.ops[i].inputs[shown], i, shown
        assert v is not None
        before = after = planned.operand_layout(i, k)
        uses = []
    maker, r = graph.values[v].producer
    reads = {x: np.array([y == x for y in space.strategies[j].operands[k]]) for x in dict.fromkeys(space.strategies[j].operands[k])}
    makes = {
        x: np.array([y == x for y in space.strategies[maker].results[r]]) for x in dict.fromkeys(space.strategies[maker].results[r])
    }
    wanted = {f"read as {x}": (x, {j: mask}) for x, mask in reads.items() if x != after}
    wanted |= {f"made as {x}": (x, {maker: mask}) for x, mask in makes.items() if x != before}
    if before == after:
        own = space.strategies[j].factors[planned.strategies[j]]
        wanted = {"sharded otherwise": (after, {j: np.array([f != own for f in space.strategies[j].factors])})}
    what_if = WhatIf(planned)
    choices, unpriced, impossible = _priced(what_if, wanted)
    chosen = _choice("as planned", before, what_if.present)
    pinned = pins_by_op(graph, planned.options)
    made = graph.maker(v)
    return Why(
        name=array_name(graph, v),
        array=format_array(graph.values[v]),
        layout=before,
        maker=_use(planned, made, before),
        readers=(_use(planned, i, after, uses), *(u for u in _readers(planned, v) if u.stack != _stack(graph.ops[i].source))),
        chosen=chosen,
        choices=choices,
        unpriced=unpriced,
        impossible=impossible,
        constraints=tuple(_constraints(plan, planned, [made, j], pinned, chosen, choices)),
    )


def array_name(graph: Graph, v: int) -> str:
    """What a value is to the user: the path of an input, the gradient of a parameter, or the result of an op."""
    op = graph.ops[graph.maker(v)]
    if op.label:
        return op.label
    size, state = prod(graph.values[v].shape), {out: a for a, out in graph.same_layout if graph.ops[a].traits.step_input}

    def passes(at: int) -> bool:
        reader = graph.ops[at]
        return reader.phase != "forward" and any(prod(x.shape) == size for x in reader.outs if hasattr(x, "shape"))

    kinds = categories(graph) if op.phase == "backward" else {}
    for _, at in zip(range(GRADIENT_OPS), graph.reached(v, passes) if kinds and size > 1 else (), strict=False):
        if at in state and kinds[state[at]] == "parameters":
            return f"gradient of {graph.ops[state[at]].label}"
    return f"result of {op.primitive}{_at(op.source)}"


# ---- prices and constraints


def _priced(
    what_if: WhatIf, wanted: Mapping[str, tuple[Layout, Mapping[int, np.ndarray]]]
) -> tuple[tuple[LayoutChoice, ...], int, tuple[str, ...]]:
    """(choices that are judged, how many are not, those that cannot be)."""
    found, impossible = [], []
    for text, (layout, masks) in wanted.items():
        states = what_if.states_with(masks)
        if states is None:
            impossible.append(text)
        else:
            found.append((what_if.planned.network.problem.objective(states), len(found), text, layout, states))
    found.sort(key=lambda x: x[:2])
    judged = [_choice(text, layout, what_if.judged(states)) for _, _, text, layout, states in found[:JUDGED]]
    return tuple(sorted(judged, key=lambda c: (not c.fits, c.seconds))), max(0, len(found) - JUDGED), tuple(impossible)


def _choice(text: str, layout: Layout, judged: Judged) -> LayoutChoice:
    sent = sent_bytes(judged.network, judged.states)
    return LayoutChoice(text, layout, judged.timeline.total_s, judged.peak_bytes, sent, not judged.excess_bytes)


def _constraints(
    plan: Plan,
    planned: Planned,
    ops: Sequence[int],
    pinned: Mapping[int, Any],
    chosen: LayoutChoice,
    choices: Sequence[LayoutChoice],
) -> Iterator[str]:
    """In words, what keeps an array from other layouts, or from the fastest one."""
    graph, space = planned.graph, planned.space
    partners = [(a, b) for pair in graph.same_layout for a, b in (pair, pair[::-1]) if a in ops]
    for i in dict.fromkeys([*ops, *(b for _, b in partners)]):
        if i in pinned:
            yield f"pin: {pin_description(graph.ops[i], pinned[i])}"
    for _, b in partners[:1]:
        kind = "output" if graph.ops[b].traits.step_output else "input" if graph.ops[b].traits.step_input else "carry of the loop"
        yield f"tie: the {kind}{f' {graph.ops[b].label}' if graph.ops[b].label else ''} has the same layout, so that no step moves it"
    ties = planned.network.problem.ties
    equal = [j for j, c in enumerate(ties) if c == ties[ops[0]] and j not in ops] if plan.symmetric_layers and ties else []
    if equal:
        labels = [graph.ops[j].label for j in equal if graph.ops[j].label]
        yield f"tie: {len(equal)} ops of repeated layers were given the same strategy{f', {labels[0]} among them' if labels else ''}"
    shape = tuple(graph.ops[ops[0]].outs[0].shape)
    for d, n in enumerate(shape):
        if n > 1 and (bad := [f"{a}={size}" for a, size in space.mesh if n % size]):
            yield f"divisibility: dim {d} of {n} elements is no multiple of {', '.join(bad)}"
    limit = planned.network.limit
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
