"""Expert layouts found by structure: which dims of parameters and products tensor parallelism shards, whatever their names.

The program's ops are read in order with their rules (factor maps). A dim of a value carries a label: `BATCH`, which starts at the batch
and passes along factors; `MODEL`, which starts where a parameter is sharded; or that of a parameter's dim that is not decided yet. A
product of an activation with a parameter decides that parameter:

    rows       the activation is sharded along the contracted factor: the parameter, too; the result is all-reduced
    experts    a factor of activation, parameter and result: one of the networks
    columns    else the parameter's largest factor that divides and is in the result alone; the result is sharded along it

which is Megatron's pairs for networks and heads, expert parallelism, and vocabulary parallelism; a table that is read at places is
sharded along its rows. What is added or multiplied elementwise follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.emit.emit import EmitDecision, emit
from shardplan.ir.graph import Graph, Op, Path
from shardplan.ir.parse import parse
from shardplan.mesh.layout import MeshShape
from shardplan.search.classical import BATCH, MODEL, TensorParallel
from shardplan.strategies.rule import Rule
from shardplan.strategies.signature import Signatures

Axes = tuple[str, ...]
FREE = P.UNCONSTRAINED


@dataclass(frozen=True)
class Way:
    """One expert layout.

    Attributes:
        batch: mesh axes that shard the examples.
        params, state: mesh axes that shard parameters, or what the optimizer keeps, on the largest dim that divides.
        model: mesh axes of tensor parallelism.
        roles: which parameters are tensor parallel: "rows", "columns", "experts", "tables".
    """

    name: str
    batch: Axes = ()
    params: Axes = ()
    state: Axes = ()
    model: Axes = ()
    roles: tuple[str, ...] = ("rows", "columns", "experts", "tables")


def ways(mesh, node_size: int) -> list[Way]:
    """What experts would try: on all axes, and on every split of the axes into outer and inner ones."""
    axes = tuple(mesh.axis_names)
    found = [
        Way("data", axes),
        Way("zero1", axes, state=axes),
        Way("fsdp", axes, axes, axes),
        Way("tables", axes, model=axes, roles=("tables",)),
        Way("experts", axes, model=axes, roles=("experts",)),
        Way("fsdp+experts", axes, axes, axes, axes, ("experts",)),
    ]
    if mesh.size <= node_size:
        found.append(Way("tensor", (), model=axes))
    for n in range(1, len(axes)):
        outer, inner = axes[:n], axes[n:]
        mark = "" if len(axes) == 2 else f" {n}"
        found += [
            Way(f"data,tensor{mark}", outer, model=inner),
            Way(f"zero1,tensor{mark}", outer, state=outer, model=inner),
            Way(f"fsdp,tensor{mark}", outer, outer, outer, inner),
            Way(f"tensor,fsdp{mark}", inner, inner, inner, outer),
        ]
    return found


# ---- what tensor parallelism shards


@dataclass(frozen=True)
class Found:
    """What one way shards by structure.

    Attributes:
        params: leaf of the step's inputs -> its dim that is sharded over the model axes.
        products: path of a product -> per dim of its result, BATCH, MODEL or None.
    """

    params: Mapping[int, int]
    products: Mapping[Path, tuple]


class _Reader(TensorParallel):
    """What each role shards, and the layouts of products; labels spread as in the planner's classical layouts."""

    def __init__(self, graph: Graph, rules: list[Rule], n: int, b: int, roles: tuple[str, ...]):
        super().__init__(graph, rules, n, b)
        self.roles = roles
        self.products: dict[Path, tuple] = {}

    def read(self, op: Op, rule: Rule) -> None:
        """Label the results of an op, and decide the parameters that it reads."""
        super().read(op, rule)
        if op.traits.matmul or op.traits.convolution or op.traits.gather or op.traits.addition:
            labels = (self.labels[op.outputs[0]].get(d) for d in range(len(op.outs[0].shape)))
            self.products[op.path] = tuple(x if x in (BATCH, MODEL) else None for x in labels)

    def choice(self, op: Op, rule: Rule, k: int, open_: dict, settled: dict) -> str | None:
        """The factor along which the parameter of operand k is sharded, or None."""
        size = {f: op.ins[k].shape[d] for d, dims in enumerate(rule.operands[k]) for f in dims[:1]}
        results = {f for dims in rule.results for letters in dims for f in letters}
        others = {f for j, dims in enumerate(rule.operands) if j != k for letters in dims for f in letters}
        fits = [f for f in open_ if size[f] % self.n == 0 and size[f] >= self.n and f not in rule.replicated and f not in rule.halo]
        follow = [f for f in fits if settled.get(f) == MODEL]
        if not (op.traits.matmul or op.traits.convolution or op.traits.grouped_matmul or rule.is_lookup):
            return follow[0] if follow else None
        if rule.is_lookup:
            return max((f for f in fits if f in rule.reduce), key=lambda f: size[f], default=None) if "tables" in self.roles else None
        if follow:
            return follow[0] if self.roles != ("tables",) else None
        if op.phase != "forward":
            return None
        shared = [f for f in fits if f in others and f in results and f not in settled]
        if shared and "experts" in self.roles:
            return shared[0]
        if shared or MODEL in settled.values():
            return None
        made = [f for f, n in size.items() if f in results and f not in others and n > 1]
        made = made[:-1] or made  # of heads and what a head has, the heads
        columns = next((f for f in made if f in fits), None)
        wide = columns and size[columns] >= max(LARGE, 8 * max((n for f, n in size.items() if f != columns), default=1))
        return columns if "columns" in self.roles or (wide and "tables" in self.roles) else None


LARGE = 4096
"""Columns from which on a matrix that is eight times as wide as high is a vocabulary."""


def read(graph: Graph, rules: list[Rule], batch: Mapping[int, int], params: set[int], n: int, b: int, roles: tuple[str, ...]) -> Found:
    """What is sharded over n devices.

    Args:
        batch: leaf -> its dim that holds the examples.
        params: leaves that are parameters.
    """
    reader = _Reader(graph, rules, n, b, roles)
    for number, at in enumerate(graph.args):
        v, rank = graph.ops[at].outputs[0], len(graph.ops[at].outs[0].shape)
        if number in batch:
            reader.labels[v] = {batch[number]: BATCH}
        elif number in params and n > 1:
            reader.labels[v] = {d: (number, d) for d in range(rank)}
    for op, rule in zip(graph.ops, rules, strict=True):
        if op.inputs and op.outputs:
            reader.read(op, rule)
    return Found(reader.params, reader.products)


# ---- a step, laid out so


@dataclass(frozen=True)
class _Hint:
    """A layout for `emit` that fixes some dims and leaves others to XLA."""

    rank: int
    entries: tuple

    def spec(self) -> P:
        return P(*self.entries)


@dataclass(frozen=True)
class Laid:
    """A step as an expert lays it out: `function` has constraints on products, `specs` are layouts of (state, batch)."""

    way: Way
    function: Callable
    specs: tuple
    mesh: Any

    def jitted(self):
        """The jitted step, whose state keeps its layout; the rest is left to XLA."""
        states, batches = (jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), x, is_leaf=_is_spec) for x in self.specs)
        return jax.jit(self.function, in_shardings=(states, batches), out_shardings=(states, None), donate_argnums=0)


def _is_spec(x) -> bool:
    return isinstance(x, P)


class Structure:
    """A step read once, for all ways to lay it out on a mesh with Auto axes."""

    def __init__(self, step, state, batch, mesh):
        self.state, self.batch, self.mesh = state, batch, mesh
        self.size = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        self.traced = jax.jit(step).trace(state, batch)
        self.graph = parse(self.traced.jaxpr)
        names, sizes = (mesh.axis_names[:1], mesh.axis_sizes[:1])
        self.rules = [s.rule for s in Signatures(MeshShape(tuple(names), tuple(sizes))).read(self.graph, {}, None)]
        leaves = jax.tree_util.tree_leaves_with_path((state, batch))
        self.paths = [tuple(jax.tree_util.keystr((k,), simple=True) for k in path) for path, _ in leaves]
        self.shapes = [tuple(x.shape) for _, x in leaves]
        self.n_state = len(jax.tree.leaves(state))
        self.params = {n for n in range(self.n_state) if self.paths[n][1] in ("params", "frozen")}
        self.sliced = {n for n in range(len(leaves)) if any(self.graph.ops[i].traits.loop_slice for i in self._readers(n))}

    def _readers(self, n: int):
        return self.graph.readers(self.graph.ops[self.graph.args[n]].outputs[0])

    def devices(self, axes: Axes) -> int:
        return math.prod(self.size[a] for a in axes)

    def batch_dim(self, n: int, devices: int) -> int | None:
        """The dim of a batch's leaf that is sharded: examples, else positions. The rows that a loop reads are not sharded."""
        shape = self.shapes[n]
        return next((d for d in range(n in self.sliced, len(shape)) if shape[d] % devices == 0 and shape[d] >= devices), None)

    def laid_out(self, way: Way) -> Laid:
        """The step laid out in one way."""
        b, n = self.devices(way.batch), self.devices(way.model)
        dims = {k: d for k in range(self.n_state, len(self.shapes)) if b > 1 and (d := self.batch_dim(k, b)) is not None}
        found = read(self.graph, self.rules, dims, self.params, n, b, way.roles)
        specs = [self.state_spec(way, found, k) for k in range(self.n_state)]
        specs += [P(*[None] * dims[k], way.batch) if k in dims else P() for k in range(self.n_state, len(self.shapes))]
        tree = jax.tree.structure((self.state, self.batch))
        run = emit(self.traced.jaxpr, self.hints(way, found), self.mesh)
        out = jax.tree.structure(self.traced.out_info)

        def step(state, batch):
            return jax.tree.unflatten(out, run(*jax.tree.leaves((state, batch))))

        return Laid(way, step, jax.tree.unflatten(tree, specs), self.mesh)

    def state_spec(self, way: Way, found: Found, k: int) -> P:
        """Layout of a leaf of the state; what the optimizer keeps for a parameter is laid out as that is."""
        shape, of = self.shapes[k], k if k in self.params else self.parameter_of(k)
        entries: list = [None] * len(shape)
        if way.model and of is not None and of in found.params:
            entries[found.params[of]] = way.model
        axes = way.params if k in self.params else way.state
        overlap = set(axes) & set(way.model)
        if axes and not (overlap and any(entries)):
            devices = self.devices(axes)
            first = 1 if of in self.sliced else 0
            fits = [d for d in range(first, len(shape)) if entries[d] is None and shape[d] % devices == 0 and shape[d] >= devices]
            if fits:
                entries[max(fits, key=lambda d: shape[d])] = axes
        return P(*entries)

    def parameter_of(self, k: int) -> int | None:
        """The parameter that a leaf of the optimizer's state belongs to: the path of one ends in that of the other."""
        same = (
            n for n in self.params if self.shapes[n] == self.shapes[k] and self.paths[n][2:] == self.paths[k][-len(self.paths[n][2:]) :]
        )
        return next(same, None)

    def hints(self, way: Way, found: Found) -> dict[Path, EmitDecision]:
        """Constraints on the results of products whose examples are known."""
        both = set(way.batch) & set(way.model)
        hints = {}
        for op in self.graph.ops:
            labels = found.products.get(op.path)
            if labels is None or BATCH not in labels or not (way.params or way.model):
                continue
            if op.traits.addition and (len(labels) < 3 or MODEL in labels or not way.params):
                continue
            shape = op.outs[0].shape
            entries = [way.batch if x == BATCH else way.model if x == MODEL and not both else FREE for x in labels]
            sizes = {BATCH: self.devices(way.batch), MODEL: self.devices(way.model)}
            if all(shape[d] % sizes[x] == 0 for d, x in enumerate(labels) if x):
                entries = [None if e is FREE and not way.model else e for e in entries]
                hints[op.path] = EmitDecision(results=(_Hint(len(entries), tuple(entries)),))  # pyright: ignore[reportArgumentType]
        return hints
