"""The classical layouts of a training step, found by its structure: data parallelism, ZeRO-1, FSDP, tensor parallelism and mixes.

Which dim of a parameter tensor parallelism shards follows from the graph, whatever the names. Ops of the forward pass are read in order
with their rules (factor maps). A dim of a value carries a label: `BATCH`, which starts at the batch and passes along factors; `MODEL`,
which starts where a parameter is sharded; or that of a parameter's dim that is not decided yet. A product of an activation with a
parameter decides that parameter:

    rows       the activation is sharded along the contracted factor: the parameter, too; the result is all-reduced
    experts    a factor of activation, parameter and result: one of the networks
    columns    else the parameter's largest factor that divides and is in the result alone; the result is sharded along it

which is Megatron's pairs for networks and heads, expert parallelism and vocabulary parallelism; a table that is read at places is
sharded along its rows. What is added or multiplied elementwise follows.

A search asks which of some of them is cheapest with all else adapted (`with_inputs`): one more node of the network, whose states are
the layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from shardplan.costs.network import CostNetwork
from shardplan.costs.space import StrategySpace
from shardplan.ilp.solver.problem import Edge, Problem
from shardplan.ir.graph import Graph, Op
from shardplan.mesh.layout import MeshShape
from shardplan.strategies.rule import Rule

BATCH, MODEL = "batch", "model"
Label = object
"""BATCH, MODEL, or (input, dim) of a parameter that is not decided."""
Axes = tuple[str, ...]


@dataclass(frozen=True)
class ClassicalLayout:
    """One classical layout of a training step.

    Attributes:
        name: for people.
        batch: mesh axes that shard the examples.
        params, state: mesh axes that shard parameters, or what the optimizer keeps, on the largest dim that divides.
        model: mesh axes of tensor parallelism.
    """

    name: str
    batch: Axes = ()
    params: Axes = ()
    state: Axes = ()
    model: Axes = ()

    @property
    def pure(self) -> bool:
        """Whether it is one kind of parallelism over all axes."""
        return not (self.batch and self.model)


def classical_layouts(mesh: MeshShape) -> list[ClassicalLayout]:
    """On all mesh axes, and on every split of the axes into outer and inner ones."""
    axes = tuple(axis for axis, n in mesh if n > 1)
    found = [
        ClassicalLayout("data parallel", axes),
        ClassicalLayout("ZeRO-1", axes, state=axes),
        ClassicalLayout("FSDP", axes, axes, axes),
        ClassicalLayout("tensor parallel", model=axes),
    ]
    for n in range(1, len(axes)):
        outer, inner = axes[:n], axes[n:]
        for first, second in ((outer, inner), (inner, outer)):
            over = f"{'·'.join(first)} × tensor over {'·'.join(second)}"
            found += [
                ClassicalLayout(f"data over {over}", first, model=second),
                ClassicalLayout(f"ZeRO-1 over {over}", first, state=first, model=second),
                ClassicalLayout(f"FSDP over {over}", first, first, first, second),
            ]
    return found if axes else []


def classical_inputs(space: StrategySpace) -> Iterator[tuple[ClassicalLayout, dict[int, tuple[Axes, ...]]]]:
    """Every classical layout that differs from those before it, and per input the mesh axes that shard each dim."""
    inputs, known = StepInputs.of(space.graph, space.rules), set()
    for classical in classical_layouts(space.mesh) if inputs.parameters else ():
        layouts = inputs.layouts(space.mesh, classical)
        key = tuple(sorted(layouts.items()))
        if key not in known:  # else there is nothing to shard in this way
            known.add(key)
            yield classical, layouts


def with_inputs(network: CostNetwork, choices: Sequence[Mapping[int, tuple[Axes, ...]]]) -> Problem:
    """The problem of a network in which all inputs are laid out as one of the choices says.

    Args:
        network: of a training step.
        choices: per choice, input -> mesh axes that shard each of its dims; other inputs are free.

    Returns:
        The problem with one more node at the end, whose states are the choices, each as an edge to every input.
    """
    space, problem, node = network.space, network.problem, len(network.problem.costs)
    tables: dict[tuple, np.ndarray] = {}  # repeated layers share them
    edges = []
    for a in space.graph.args:
        made, dims = space.strategies[a].results[0], tuple(layouts.get(a) for layouts in choices)
        key = (id(made), network.blocks.count(a), dims)
        if key not in tables:
            allowed = np.array([[want is None or (x.dims == want and not x.partial) for want in dims] for x in made])
            tables[key] = np.where(np.tile(allowed, (network.blocks.count(a), 1)), 0.0, np.inf)
        edges.append(Edge(a, node, tables[key]))
    ties = (*problem.ties, node) if problem.ties else ()
    costs = (*problem.costs, np.zeros(len(choices)))
    return replace(problem, costs=costs, edges=(*problem.edges, *edges), ties=ties)


class TensorParallel:
    """Labels of all values, op by op, and the dims of parameters that `n` devices share; `b` devices share the batch."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], n: int, b: int):
        self.graph, self.rules, self.n, self.b = graph, rules, n, b
        self.labels: dict[int, dict[int, Label]] = {}  # value -> dim -> label
        self.params: dict[int, int] = {}  # input -> its dim that is sharded

    def label(self, v: int | None, d: int) -> Label | None:
        """The label of a dim: of a parameter as it is decided by now."""
        found = self.labels.get(v, {}).get(d) if v is not None else None
        if isinstance(found, tuple) and found[0] in self.params:
            return MODEL if self.params[found[0]] == found[1] else None
        return found

    def by_factor(self, op: Op, rule: Rule, k: int) -> dict[str, Label]:
        """Factor -> label of operand k; of a dim of several factors the first has it."""
        found = {}
        for d, letters in enumerate(rule.operands[k] if k < len(rule.operands) else ()):
            if letters and (label := self.label(op.inputs[k], d)) is not None:
                found[letters[0]] = label
        return found

    def read(self, op: Op, rule: Rule) -> None:
        """Label the results of an op, and decide the parameters that it reads."""
        operands = [self.by_factor(op, rule, k) for k in range(len(op.inputs))]
        known = {f: x for of in operands for f, x in of.items() if x in (BATCH, MODEL) and f not in rule.replicated}
        for k, of in enumerate(operands):
            undecided = {f: x for f, x in of.items() if isinstance(x, tuple)}
            others = set().union(*(dims for j, dims in enumerate(rule.operands) if j != k)) if len(rule.operands) > 1 else set()
            if undecided and others and (chosen := self.choice(op, rule, k, undecided, known)):
                leaf, d = undecided[chosen]
                self.params[leaf] = d
                known[chosen] = MODEL
        alone = sum(v is not None and len(x.shape) > 0 for v, x in zip(op.inputs, op.ins, strict=True)) == 1  # still the parameter
        if op.traits.addition and MODEL in known.values():  # what a layer adds to the residual stream takes its layout
            known = {f: x for f, x in known.items() if x != MODEL or all(of.get(f) == MODEL for of in operands)}
        passed = {f: x for of in operands for f, x in of.items() if alone and isinstance(x, tuple) and x[0] not in self.params}
        for v, dims in zip(op.outputs, rule.results, strict=True):
            found: dict[int, Label] = {}
            for d, letters in enumerate(dims):
                label = (passed | known).get(letters[0]) if letters else None
                shards = self.b if label == BATCH else self.n if label == MODEL else 1
                if label is not None and label not in found.values() and self.graph.values[v].shape[d] % shards == 0:
                    found[d] = label
            self.labels[v] = found

    def choice(self, op: Op, rule: Rule, k: int, undecided: Mapping[str, Label], known: Mapping[str, Label]) -> str | None:
        """The factor along which the parameter of operand k is sharded, or None."""
        size = {f: op.ins[k].shape[d] for d, dims in enumerate(rule.operands[k]) for f in dims[:1]}
        results = {f for dims in rule.results for letters in dims for f in letters}
        others = {f for j, dims in enumerate(rule.operands) if j != k for letters in dims for f in letters}
        fits = [f for f in undecided if size[f] % self.n == 0 and size[f] >= self.n and f not in rule.replicated and f not in rule.halo]
        follow = [f for f in fits if known.get(f) == MODEL]
        product = op.traits.matmul or op.traits.convolution or op.traits.grouped_matmul
        if rule.is_lookup:
            return max((f for f in fits if f in rule.reduce), key=lambda f: size[f], default=None)
        if follow or not product or op.phase != "forward":
            return follow[0] if follow else None
        shared = [f for f in fits if f in others and f in results and f not in known]
        if shared or MODEL in known.values():
            return shared[0] if shared else None
        made = [f for f, n in size.items() if f in results and f not in others and n > 1]
        made = made[:-1] or made  # of heads and what a head has, the heads
        return next((f for f in made if f in fits), None)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a training step by what they are; ops that make them, in the order of the arguments.

    Attributes:
        parameters: state that the forward or backward pass reads.
        parameter_of: other state -> the parameter that the optimizer computes with together with it, elementwise.
        batch: what is no state.
        stacks: inputs whose first dim a loop reads row by row.
    """

    graph: Graph
    rules: Sequence[Rule]
    parameters: frozenset[int]
    parameter_of: Mapping[int, int]
    batch: frozenset[int]
    stacks: frozenset[int]

    @classmethod
    def of(cls, graph: Graph, rules: Sequence[Rule]) -> StepInputs:
        """The inputs of a step; without parameters if it keeps no state."""
        state = [a for a, _ in graph.same_layout if graph.ops[a].traits.step_input]
        parameters = frozenset(a for a in state if _phases(graph, a) & {"forward", "backward"})
        batch = frozenset(a for a in graph.args if a not in state and graph.ops[a].outs[0].shape)
        stacks = frozenset(
            a for a in graph.args if any(graph.ops[at].traits.loop_slice for at in graph.readers(graph.ops[a].outputs[0]))
        )
        return cls(graph, rules, parameters, _parameter_of(graph, rules, state, parameters), batch, stacks)

    def layouts(self, mesh: MeshShape, classical: ClassicalLayout) -> dict[int, tuple[Axes, ...]]:
        """Input -> per dim the mesh axes that shard it."""
        b, n = (prod(mesh.size(a) for a in axes) for axes in (classical.batch, classical.model))
        batch_dims = {a: d for a in self.batch if b > 1 and (d := self._batch_dim(a, b)) is not None}
        reader = TensorParallel(self.graph, self.rules, n, b)
        for a in self.graph.args:
            op = self.graph.ops[a]
            if a in batch_dims:
                reader.labels[op.outputs[0]] = {batch_dims[a]: BATCH}
            elif a in self.parameters and n > 1:
                reader.labels[op.outputs[0]] = {d: (a, d) for d in range(len(op.outs[0].shape))}
        for op, rule in zip(self.graph.ops, self.rules, strict=True) if n > 1 else ():
            if op.inputs and op.outputs:
                reader.read(op, rule)
        out = {a: self._state_layout(mesh, classical, reader.params, a) for a in (*sorted(self.parameters), *self.parameter_of)}
        for a in sorted(self.batch):
            rank = len(self.graph.ops[a].outs[0].shape)
            out[a] = tuple(classical.batch if batch_dims.get(a) == d else () for d in range(rank))
        return out

    def _batch_dim(self, a: int, devices: int) -> int | None:
        """The dim that is sharded: examples, else positions; not the rows that a loop reads."""
        shape = self.graph.ops[a].outs[0].shape
        return next((d for d in range(a in self.stacks, len(shape)) if shape[d] % devices == 0 and shape[d] >= devices), None)

    def _state_layout(self, mesh: MeshShape, classical: ClassicalLayout, sharded: Mapping[int, int], a: int) -> tuple[Axes, ...]:
        """What the optimizer keeps for a parameter is laid out as that is, and over more axes where the layout says so."""
        shape, of = self.graph.ops[a].outs[0].shape, self.parameter_of.get(a, a)
        entries: list[Axes] = [()] * len(shape)
        if classical.model and of in sharded and len(shape) > sharded[of]:
            entries[sharded[of]] = classical.model
        axes = classical.params if a in self.parameters else classical.state
        if axes:
            devices, first = prod(mesh.size(x) for x in axes), int(of in self.stacks)
            fits = [d for d in range(first, len(shape)) if not entries[d] and shape[d] % devices == 0 and shape[d] >= devices]
            if fits:
                entries[max(fits, key=lambda d: shape[d])] = axes
        return tuple(entries)


def _phases(graph: Graph, a: int) -> set[str]:
    return {graph.ops[at].phase for at in graph.readers(graph.ops[a].outputs[0]) if not graph.ops[at].traits.step_output}


def _parameter_of(graph: Graph, rules: Sequence[Rule], state: Sequence[int], parameters: frozenset[int]) -> dict[int, int]:
    """Other state of a parameter's shape -> the parameter, as elementwise ops of the optimizer join them."""
    root: dict[int, int] = {}

    def find(v: int) -> int:
        while (above := root.setdefault(v, v)) != v:
            root[v] = root[above]
            v = root[v]
        return v

    for op, rule in zip(graph.ops, rules, strict=True):
        joined = op.traits.copy or op.traits.step_output or (op.phase == "update" and rule.fusion == "loop")
        shape = op.outs[0].shape if joined and op.outs else ()
        same = [v for v in (*op.inputs, *op.outputs) if v is not None and shape and graph.values[v].shape == shape]
        for v in same[1:]:
            root[find(v)] = find(same[0])
    of = {find(graph.ops[a].outputs[0]): a for a in state if a in parameters}
    others = ((a, of.get(find(graph.ops[a].outputs[0]))) for a in state if a not in parameters and graph.ops[a].outs[0].shape)
    return {a: parameter for a, parameter in others if parameter is not None}
