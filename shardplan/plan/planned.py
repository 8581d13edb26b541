"""The result of planning with everything it was found from; `describe` turns it into a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.costs.network import CostNetwork
from shardplan.costs.options import Options
from shardplan.costs.pins import pin_description, pins_by_op
from shardplan.costs.space import StrategySpace
from shardplan.emit.emit import EmitDecision
from shardplan.ilp.solver.problem import Solution
from shardplan.ir.graph import Graph, Path
from shardplan.ir.traced import Traced
from shardplan.mesh.layout import Layout
from shardplan.mesh.reshard import ReshardStep
from shardplan.plan.conflicts import conflicts


@dataclass(frozen=True, eq=False)
class Planned:
    """The result of planning.

    Attributes:
        strategies: [op of the graph] -> number of its strategy.
        decisions: by path, what emission applies.
        exposed_fraction: share of a hidden collective's seconds that the step still pays; 1 where none is hidden.
        seconds: planning time by stage.
    """

    traced: Traced
    network: CostNetwork
    solution: Solution
    strategies: tuple[int, ...]
    decisions: Mapping[Path, EmitDecision]
    options: Options
    exposed_fraction: float
    seconds: Mapping[str, float]

    @property
    def space(self) -> StrategySpace:
        """The strategies of every op."""
        return self.network.space

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.space.graph

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

    def reshards(self, i: int) -> Iterator[tuple[int, int, int, tuple[ReshardStep, ...]]]:
        """Reshards of the operands of op i, and of a copy of an array at its first reader.

        Yields:
            (k, op, operand, steps): `steps` reshard operand `operand` of `op`, which is operand k of op i or one of a copy it reads.
        """
        graph = self.graph
        for k, v in enumerate(graph.ops[i].inputs):
            op, operand, found = i, k, []
            while v is not None and op not in self.retained:
                value = graph.values[v]
                if steps := self.network.path(v, self.result_layout(*value.producer), self.operand_layout(op, operand)):
                    found.append((k, op, operand, steps))
                maker = value.producer[0]
                first_of_copy = graph.ops[maker].traits.copy and value.consumers[0] == (op, operand)
                v, op, operand = graph.ops[maker].inputs[0] if first_of_copy else None, maker, 0
            yield from reversed(found)

    @cached_property
    def conflicts(self) -> Mapping[tuple[int, int], tuple[str, str]]:
        """(op, operand) -> the two pins between whose regions the operand changes its layout."""
        graph, pins = self.graph, pins_by_op(self.graph, self.options)
        if len(pins) < 2:
            return {}
        reads = ((i, k, graph.values[v].producer) for i, op in enumerate(graph.ops) for k, v in enumerate(op.inputs) if v is not None)
        changed = {(i, k) for i, k, made in reads if self.result_layout(*made) != self.operand_layout(i, k)}
        return conflicts(graph, changed, {i: pin_description(graph.ops[i], asked) for i, asked in pins.items()})

    @property
    def product_flops(self) -> float:
        """Flops of the matrix products and convolutions that one device does in one step."""
        space, ops = self.space, enumerate(self.graph.ops)
        products = [(i, op.runs) for i, op in ops if op.traits.matmul or op.traits.grouped_matmul or op.traits.convolution]
        return float(sum((space.rules[i].flops or 0) * space.strategies[i].work[self.strategies[i]] * runs for i, runs in products))
