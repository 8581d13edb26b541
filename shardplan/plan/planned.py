"""The result of planning with everything it was found from; `describe` turns it into a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardplan.costs.decided_program import DecidedProgram, decided_program
from shardplan.costs.halo_exchange import Exchange
from shardplan.costs.kernel_tasks import Tasks
from shardplan.costs.memory_categories import categories
from shardplan.costs.network import CostNetwork
from shardplan.costs.options import Options, ReshardKey
from shardplan.costs.pins import Pin, pin_description, pins_by_op
from shardplan.costs.shared_collectives import own_exchanges, own_moves
from shardplan.costs.space import StrategySpace
from shardplan.costs.states import PS
from shardplan.emit.emit import EmitDecision
from shardplan.files import base_name, short_place
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Graph, Path, components
from shardplan.ir.parse import Traced
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.data import PlanDecision
from shardplan.units import format_array
from shardplan.xla_model.compiler_options import XlaOptions
from shardplan.xla_model.timeline import Timeline


@dataclass(frozen=True, eq=False, repr=False)
class Planned:
    """The result of planning."""

    traced: Traced
    network: CostNetwork
    solution: Solution
    strategies: tuple[int, ...]  # per op of the graph, its number
    decisions: Mapping[Path, EmitDecision]  # what emission applies
    options: Options
    timeline: Timeline  # of one step: the objective
    xla: XlaOptions  # compiler options that the plan chose
    seconds: Mapping[str, float]  # of planning, by stage
    held: Mapping[int, np.ndarray] = field(default_factory=dict)  # op -> bool [strategy] of layouts that `Plan.what_if` was asked for
    tasks: Tasks | None = None  # of its program, where they are known
    kept: Mapping[int, PlanDecision | None] = field(default_factory=dict)  # op -> its record, as in the plan that this one came from

    def program(self, options: XlaOptions) -> DecidedProgram:
        """What the plan decides, as it is compiled with these options."""
        return decided_program(self.network, self.solution.states, options, self.tasks)

    @property
    def space(self) -> StrategySpace:
        """The strategies of every op."""
        return self.network.space

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.space.graph

    @cached_property
    def user_ops(self) -> tuple[int, ...]:
        """Numbers of the ops that are the program's own, as `PlanDecision.op` counts them: no copies."""
        return tuple(i for i, op in enumerate(self.graph.ops) if not op.traits.copy)

    @cached_property
    def addresses(self) -> Mapping[int, str]:
        """The program's own op -> what names it and its like in repeated layers: line, primitive, pass, type of its first result."""
        ops = ((i, self.graph.ops[i]) for i in self.user_ops)
        places = ((i, op, f"{base_name(op.source.file)}:{op.source.line}") for i, op in ops if op.outs)
        return {i: f"{place} {op.primitive} {op.phase} {format_array(op.outs[0])}" for i, op, place in places}

    @cached_property
    def addressed(self) -> Mapping[str, list[int]]:
        """Address -> its ops."""
        found: dict[str, list[int]] = {}
        for i, name in self.addresses.items():
            found.setdefault(name, []).append(i)
        return found

    @cached_property
    def asked(self) -> dict[Any, Any]:
        """What `Plan.why` was asked for -> what it is about (`asked.py`): a row that is opened is asked for several times."""
        return {}

    @cached_property
    def pins(self) -> Mapping[int, list[Pin]]:
        """Op -> the pins of its result."""
        return pins_by_op(self.graph, self.options)

    @cached_property
    def tied(self) -> Mapping[int, list[int]]:
        """Class of `Problem.ties` -> its ops, which repeated layers have in common."""
        found: dict[int, list[int]] = {}
        for i, c in enumerate(self.network.problem.ties):
            found.setdefault(c, []).append(i)
        return found

    @cached_property
    def categories(self) -> Mapping[int, str]:
        """Op -> category of what it makes, in a user's words."""
        return categories(self.graph)

    def result_layout(self, i: int, r: int = 0) -> Layout:
        """Layout in which op i makes its result r."""
        return self.space.strategies[i].results[r][self.strategies[i]]

    def operand_layout(self, i: int, k: int) -> Layout:
        """Layout in which op i takes its operand k."""
        return self.space.strategies[i].operands[k][self.strategies[i]]

    @cached_property
    def retained(self) -> frozenset[int]:
        """Copies that retain the array of an earlier phase: they reshard nothing."""
        return self.network.retained(self.solution.states)

    @cached_property
    def moved(self) -> Mapping[tuple[int, int], tuple[ReshardStep, ...]]:
        """(op, operand) -> its reshard path, where it has one; those of retained copies, too."""
        return {(i, k): steps for i, k, _, steps in self.network.moves(self.strategies, ())}

    def changed(self, other: Planned) -> set[int]:
        """Ops that another plan of the same strategy space computes, reshards or copies otherwise."""
        ours, theirs = (x.network.regathers(x.strategies, x.retained) for x in (self, other))
        found = {i for i, (s, t) in enumerate(zip(self.strategies, other.strategies, strict=True)) if s != t}
        found |= self.retained ^ other.retained | {j for j, n in ours.items() if theirs[j] != n}
        for mine, its in ((self.moved, other.moved), (self.shared, other.shared)):
            found |= {at[0] for at in {**mine, **its} if mine.get(at) != its.get(at)}
        return found

    @cached_property
    def shared(self) -> Mapping[tuple[int, int], int]:
        """(op, operand) -> how many of the first steps of its reshard path are collectives of an earlier reader of the array.

        Facts: cse-merges-equal-reshards, cse-merges-equal-sums.
        """
        own = own_moves(self.network, self.strategies, self.retained)
        every = self.network.moves(self.strategies, self.retained)
        return {(j, k): n for (j, k, _, left), (*_, steps) in zip(own, every, strict=True) if (n := len(steps) - len(left))}

    @cached_property
    def exchanges(self) -> Mapping[int, list[Exchange]]:
        """Op -> its exchanges that no earlier op has made (fact: cse-merges-equal-halos)."""
        found: dict[int, list[Exchange]] = {}
        for i, x in own_exchanges(self.network, self.strategies, self.retained):
            found.setdefault(i, []).append(x)
        return found

    def operand_reshards(self, i: int) -> Iterator[tuple[int, int, ReshardKey, tuple[ReshardStep, ...]]]:
        """Reshards of the operands of op i, and of a copy at its first reader; each collective at the first op that needs it.

        Yields:
            (k, v, key, steps): `steps` reshard value v on its way to operand k of op i, at the operand that `key` names: this one, or
            that of a copy that op i reads.
        """
        graph = self.graph
        for k, v in enumerate(graph.ops[i].inputs):
            op, operand, found = i, k, []
            while v is not None and op not in self.retained:
                value = graph.values[v]
                key = op, operand, self.result_layout(*value.producer), self.operand_layout(op, operand)
                if steps := self.moved.get((op, operand), ())[self.shared.get((op, operand), 0) :]:
                    found.append((k, v, key, steps))
                maker = value.producer[0]
                first_of_copy = graph.ops[maker].traits.copy and value.consumers[0] == (op, operand)
                v, op, operand = graph.ops[maker].inputs[0] if first_of_copy else None, maker, 0
            yield from reversed(found)

    def reshards_on_line(self, line: str) -> Iterator[tuple[ReshardKey, tuple[ReshardStep, ...], float]]:
        """(key, steps, seconds per training step) of the reshards on a line 'file:line', reductions on the line of the partial sum."""
        graph, place = self.graph, short_place(line)
        for i, op in enumerate(graph.ops):
            for _, v, key, steps in self.operand_reshards(i) if not op.traits.copy else ():
                reduces = any(s.kind in ("all-reduce", "reduce-scatter") for s in steps)
                if str(graph.ops[graph.maker(v)].source if reduces else op.source) == place:
                    yield key, steps, graph.ops[key[0]].reads * sum(s.seconds for s in steps)

    def replicated_seconds(self, primitive: str, source: str) -> tuple[float, float]:
        """Seconds per training step of the ops of a primitive on a line, and of the reshards of their operands; nothing hidden."""
        ops = [(i, op) for i, op in enumerate(self.graph.ops) if op.primitive == primitive and str(op.source) == source]
        compute_s = sum(float(self.space.kernel_seconds[i][self.strategies[i]]) * op.runs for i, op in ops)
        reshards = ((key[0], steps) for i, _ in ops for _, _, key, steps in self.operand_reshards(i))
        return compute_s, sum(self.graph.ops[i].reads * sum(s.seconds for s in steps) for i, steps in reshards)

    @cached_property
    def kernel_seconds(self) -> tuple[float, ...]:
        """Per op, compute on one device in one step."""
        return tuple(ps / PS for ps in self.network.kernel_ps(self.solution.states))

    @cached_property
    def edge_seconds(self) -> tuple[tuple[int, int, float], ...]:
        """(maker, reader, seconds per step) of the kernels around the collectives of an operand."""
        found = self.network.edge_kernels(self.solution.states)
        return tuple((edge.producer, edge.consumer, ps / PS) for edge, ps in found)

    def strategies_on_line(self, line: str) -> list[tuple[int, int]]:
        """(op, strategy) of the unfused ops on a line 'file:line'; where all are fused, of those that write an array to memory."""
        graph, space, place = self.graph, self.space, short_place(line)
        here = [i for i, op in enumerate(graph.ops) if str(op.source) == place and not op.traits.copy]
        kernels = [i for i in here if space.rules[i].fusion == "none" and not graph.ops[i].traits.border]
        ops = kernels or [i for i in here if any(space.materialised[v] for v in graph.ops[i].outputs)]
        return [(i, self.strategies[i]) for i in ops]

    @cached_property
    def conflicts(self) -> Mapping[tuple[int, int], tuple[str, str]]:
        """(op, operand) of an array resharded between two regions with pins -> the pins nearest to it on either side.

        A region is a set of ops between which arrays are read in the layouts they are made in.
        """
        graph, pins = self.graph, self.pins
        if len(pins) < 2:
            return {}
        words = {i: pin_description(graph.ops[i], asked) for i, asked in pins.items()}
        changed, near = [], [[] for _ in graph.ops]
        reads = ((i, k, graph.values[v].producer) for i, op in enumerate(graph.ops) for k, v in enumerate(op.inputs) if v is not None)
        for i, k, (j, r) in reads:
            if self.result_layout(j, r) != self.operand_layout(i, k):
                changed.append((i, k, j))
            else:
                near[i].append(j)
                near[j].append(i)
        region = components(len(near), ((i, j) for i, found in enumerate(near) for j in found))
        queue = sorted(pins)
        nearest = {i: i for i in queue}  # op -> the pin of its region that is the fewest arrays away, the first of the program
        for i in queue:
            for j in near[i]:
                if j not in nearest:
                    nearest[j] = nearest[i]
                    queue.append(j)
        out = {}
        for i, k, j in changed:
            if region[i] != region[j] and i in nearest and j in nearest:
                first, second = sorted((nearest[i], nearest[j]))
                out[i, k] = words[first], words[second]
        return out

    @property
    def product_flops(self) -> float:
        """Flops of the matrix products and convolutions that one device does in one step; those that XLA fuses are none."""
        space, ops = self.space, enumerate(self.graph.ops)
        kinds = ((i, op.runs, op.traits, space.rules[i].fusion) for i, op in ops)
        products = [(i, n) for i, n, t, fusion in kinds if (t.product and fusion == "none") or t.fused_attention]
        return float(sum((space.rules[i].flops or 0) * space.strategies[i].work[self.strategies[i]] * runs for i, runs in products))
