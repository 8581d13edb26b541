"""What a question to a plan is about: the arrays that are meant, and the strategies that each other layout of them asks for.

"params/blocks/*/up"                              inputs, by a path or pattern as in pins; or a sequence of paths
"train.py:41"                                     the most expensive reshard on a line
"train.py:41 dot_general forward f32[8,4]"        results of a line's ops, in all repeated layers (`Planned.addresses`)
"train.py:41 dot_general forward f32[8,4] operand 1"   reshards at that operand of these ops
"train.py:41 mul update f32[8,4] as P('data', None)"   those of them that lie so, where not all of them lie as the first one
"... operand 1 as P(None, None) -> P('data', None)"    the same of reshards
plan.decisions[7].reshards[0]                     a reshard of the plan
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.costs.pins import matches, nearest_paths
from shardplan.errors import ShardingError
from shardplan.files import short_place
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.data import PlannedReshard
from shardplan.plan.plan import Plan
from shardplan.plan.planned import Planned
from shardplan.units import format_array, listed

Masks = Mapping[int, np.ndarray]
"""Op -> bool [strategy]: those that are asked for."""

ADDRESS = re.compile(r"(?P<ops>.*:\d+ \S+ (?:forward|backward|update) \S+)(?: operand (?P<operand>\d+))?(?: as (?P<layout>P\(.*))?")


@dataclass(frozen=True, eq=False)
class Asked:
    """Arrays of one type, and what they could be instead.

    Attributes:
        kind: "inputs", "results" or "reshards".
        ops: numbers in the graph: of what makes them, or of what reads them after a reshard; the first one stands for all.
        value: the first array.
        layout: of the plan: in which it is made.
        wanted: choice in words -> (layout of the array, strategies that it asks for).
        reader: of a reshard, (op, layout in which it reads, [(op that pays, step)]).
    """

    kind: str
    ops: tuple[int, ...]
    value: int
    layout: Layout
    wanted: Mapping[str, tuple[Layout, Masks]]
    reader: tuple[int, Layout, list[tuple[int, ReshardStep]]] | None = None


def asked(plan: Plan, what: str | Sequence[str] | PlannedReshard) -> Asked:
    """The arrays that `what` names.

    Raises:
        ShardingError: nothing in the plan is so called, or inputs of several shapes are.
    """
    planned = plan.context.planned
    if isinstance(what, PlannedReshard):
        return _reshards(plan, planned, [place_of(plan, what)])
    if not isinstance(what, str) and not (isinstance(what, Sequence) and all(isinstance(path, str) for path in what)):
        raise ShardingError(
            f'why() takes no {type(what).__name__}.\n  ways out: the path of an input, a line such as "train.py:41", or a reshard'
        )
    key = what if isinstance(what, str) else tuple(what)
    if key not in planned.asked:
        planned.asked[key] = _named(plan, planned, what)
    return planned.asked[key]


def _named(plan: Plan, planned: Planned, what: str | Sequence[str]) -> Asked:
    paths = [what] if isinstance(what, str) else list(what)
    inputs = [i for i in planned.graph.args if any(matches(planned.graph.ops[i].label, path) for path in paths)]
    if inputs:
        return _inputs(planned, what, inputs)
    if isinstance(what, str):
        if (found := ADDRESS.fullmatch(what)) and (ops := planned.addressed.get(found["ops"])):
            if found["operand"] is None and (same := _of_one_layout(planned, ops, found["layout"])):
                return _results(planned, same)
            if places := list(_operand_reshards(plan, planned, ops, found["operand"], found["layout"])):
                return _reshards(plan, planned, places)
        here = [(d, r) for d in plan.decisions for r in d.reshards if what in (short_place(at := f"{d.file}:{d.line}"), at)]
        if here:
            return _reshards(plan, planned, [place_of(plan, max(here, key=lambda x: x[1].seconds * x[0].runs)[1])])
        if made := [name for name in planned.addressed if name.startswith(f"{what} ")]:
            raise ShardingError(
                f"why({what!r}): no collective is on this line.\n  results that it makes: {listed(made, 4)}\n"
                "  way out: the name of a result, such as the first of these"
            )
    some, lines = nearest_paths((x.path for x in plan.inputs), paths[0] if paths else ""), _costly_lines(plan)
    raise ShardingError(
        f"why({what!r}): no input of the step has this path, and no collective is on such a line.\n  inputs: {some}\n"
        f"  lines with collectives: {lines or 'none'}\n"
        '  ways out: a path or pattern as in pins, a line with collectives such as "train.py:41", or a reshard of plan.decisions'
    )


def _costly_lines(plan: Plan, most: int = 4) -> str:
    """Lines with collectives, those that take most seconds first."""
    seconds: dict[str, float] = {}
    for d in plan.decisions:
        if d.reshards:
            line = short_place(f"{d.file}:{d.line}")
            seconds[line] = seconds.get(line, 0.0) + d.comm_seconds
    return listed(sorted(seconds, key=lambda line: -seconds[line]), most)


# ---- inputs and results


def _inputs(planned: Planned, what: str | Sequence[str], inputs: Sequence[int]) -> Asked:
    graph = planned.graph
    if len({graph.ops[i].outs[0].shape for i in inputs}) > 1:
        shapes = {graph.ops[i].outs[0].shape for i in inputs}
        some = ", ".join(f"{graph.ops[i].label} {format_array(graph.ops[i].outs[0])}" for i in inputs[:4])
        raise ShardingError(f"why({what!r}) matches inputs of {len(shapes)} shapes: {some}, ...\n  way out: name those of one shape")
    return Asked("inputs", tuple(inputs), graph.ops[inputs[0]].outputs[0], planned.result_layout(inputs[0]), _made(planned, inputs))


def _results(planned: Planned, ops: Sequence[int]) -> Asked:
    at = ops[0]
    return Asked("results", tuple(ops), planned.graph.ops[at].outputs[0], planned.result_layout(at), _made(planned, ops))


def _made(planned: Planned, ops: Sequence[int]) -> dict[str, tuple[Layout, Masks]]:
    """Other layouts in which these ops can make their first result, complete."""
    space, present = planned.space, planned.result_layout(ops[0])
    layouts = dict.fromkeys(x for x in space.strategies[ops[0]].results[0] if x != present and not x.partial)
    masks = {i: _masks(space.strategies[i].results[0]) for i in ops}
    return {str(x): (x, {i: found[x] for i, found in masks.items()}) for x in layouts}


def _masks(layouts: Sequence[Layout]) -> Mapping[Layout, np.ndarray]:
    """Layout -> bool [strategy]: those that have it; none for a layout that none has."""
    numbers: dict[Layout, int] = {}
    own = np.array([numbers.setdefault(x, len(numbers)) for x in layouts])
    return defaultdict(lambda: np.zeros(len(own), bool), {x: own == n for x, n in numbers.items()})


def _of_one_layout(planned: Planned, ops: Sequence[int], layout: str | None) -> list[int]:
    """Those of some ops whose first result lies as that of the first one, or of the first one of this layout, when it is complete."""
    some = [i for i in ops if layout in (None, str(replace(planned.result_layout(i), partial=())))]
    return [i for i in some if planned.result_layout(i) == planned.result_layout(some[0])]


# ---- reshards


def place_of(plan: Plan, reshard: PlannedReshard) -> tuple[int, int]:
    """(op of the graph, number of the reshard at it) of a reshard of the plan: of equal ones the first, or the very object.

    Raises:
        ShardingError: it is none of this plan's.
    """
    ops = plan.context.planned.user_ops
    every = [(ops[d.op], n, r) for d in plan.decisions for n, r in enumerate(d.reshards)]
    found = [(i, n) for i, n, r in every if r is reshard] or [(i, n) for i, n, r in every if r == reshard]
    if not found:
        raise ShardingError("why() takes a reshard of this very plan.\n  way out: one of plan.decisions[...].reshards")
    return found[0]


def reshard_layouts(reshard: PlannedReshard) -> str:
    """What names the reshards of an operand that change one layout into the same other one."""
    return f"{reshard.before} -> {reshard.after}"


def _operand_reshards(
    plan: Plan, planned: Planned, ops: Iterable[int], operand: str | None, layouts: str | None
) -> Iterator[tuple[int, int]]:
    by_op = {planned.user_ops[d.op]: d for d in plan.decisions}
    for i in ops if operand is not None else ():
        reshards = enumerate(by_op[i].reshards if i in by_op else ())
        numbers = [n for n, r in reshards if str(r.operand) == operand and layouts in (None, reshard_layouts(r))]
        if numbers:
            yield i, numbers[-1]


def _reshards(plan: Plan, planned: Planned, places: Sequence[tuple[int, int]]) -> Asked:
    found = [_move(plan, planned, i, n) for i, n in places]
    v, reader, _, before, after, uses = found[0]
    same = [x for x in found if x[3:5] == (before, after)]
    if before == after:  # a halo exchange of the op itself
        own = planned.space.strategies[reader].factors[planned.strategies[reader]]
        masks = {j: np.array([f != own for f in planned.space.strategies[j].factors]) for _, j, *_ in same}
        wanted: dict[str, tuple[Layout, Masks]] = {"sharded otherwise": (after, masks)}
    else:
        wanted = _read_or_made_otherwise(planned, same)
    return Asked("reshards", tuple(i for i, _ in places), v, before, wanted, (reader, after, uses))


def _read_or_made_otherwise(planned: Planned, moves: Sequence[tuple]) -> dict[str, tuple[Layout, Masks]]:
    graph, strategies = planned.graph, planned.space.strategies
    v, reader, k, before, after, _ = moves[0]
    maker, r = graph.values[v].producer
    wanted: dict[str, tuple[Layout, Masks]] = {}
    read = {j: _masks(strategies[j].operands[at]) for _, j, at, *_ in moves}
    for x in dict.fromkeys(strategies[reader].operands[k]):
        if x != after:
            wanted[f"read as {x}"] = x, {j: found[x] for j, found in read.items()}
    made = {i: _masks(strategies[i].results[n]) for i, n in (graph.values[value].producer for value, *_ in moves)}
    for x in dict.fromkeys(strategies[maker].results[r]):
        if x != before:
            wanted[f"made as {x}"] = x, {i: found[x] for i, found in made.items()}
    return wanted


def _move(plan: Plan, planned: Planned, i: int, n: int) -> tuple:
    """(value, op that reads it, operand, layout before, layout after, [(op, step)]) of the n-th reshard at op i."""
    moves = list(planned.operand_reshards(i))
    if n < len(moves):
        _, v, (j, k, before, after), steps = moves[n]
        return v, j, k, before, after, [(j, s) for s in steps]
    decision = next(d for d in plan.decisions if planned.user_ops[d.op] == i)
    operand = decision.reshards[n].operand
    v, layout = planned.graph.ops[i].inputs[operand], planned.operand_layout(i, operand)
    assert v is not None
    return v, i, operand, layout, layout, []
