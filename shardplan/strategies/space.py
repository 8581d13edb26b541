"""What every op of a graph may do on a mesh, and the compute seconds of each way: the graph x the rules x the mesh.

Compute is a roofline over XLA's fusions: chains of elementwise ops form one *group*, which reads every array from outside once and
writes only what somebody outside the group reads. A value nobody outside reads never materialises: no bytes, no memory.

    seconds(s) = max(flops / n_shards / peak(dtype), bytes moved locally / bandwidth)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from shardplan._jax import itemsize, shard_map_specs
from shardplan.ir.graph import BORDER, Graph, Op, Path
from shardplan.ir.share import with_shares
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.strategies.enumerate import Choices, enumerate_choices, given_choices
from shardplan.strategies.halo import Exchange, exchanges
from shardplan.strategies.rule import Rule, letter_sizes, letters
from shardplan.strategies.rules import rule_for

FUSIBLE = ("loop", "view", "reduce")


@dataclass(frozen=True, eq=False)
class Space:
    """The strategies of every op.

    Attributes:
        rules, choices: per op.
        signature: per op, equal numbers for ops that differ in nothing the planner looks at.
        materialised: per value, whether it is ever written to memory.
        seconds: per op, [s] -> seconds of one run on one device.
        unknown: (primitive, source) of ops without a rule, kept whole.
    """

    graph: Graph
    mesh: MeshShape
    cluster: Cluster
    rules: tuple[Rule, ...]
    choices: tuple[Choices, ...]
    signature: tuple[int, ...]
    materialised: tuple[bool, ...]
    seconds: tuple[np.ndarray, ...]
    unknown: tuple[tuple[str, str], ...]


def make_space(
    graph: Graph,
    mesh: MeshShape,
    cluster: Cluster,
    within: Mapping[Path, Sequence[str | None]] | None = None,
    others: Sequence[str | None] | None = None,
) -> Space:
    """Rules, strategies and compute seconds of every op of a step, copies for shared readers put in between.

    Ops of one signature share rule and strategies.

    Args:
        graph, mesh, cluster: the step, and what it runs on.
        within: by path of an op, what is settled on each axis (`enumerate_choices`), and the same for all `others`.
    """
    table = _Table(mesh)
    nothing = (None,) * len(mesh.axes)
    first = table.read(graph, {}, nothing)
    graph = with_shares(graph, [e.rule.fusion in FUSIBLE and not e.rule.halo for e in first], [e.sums for e in first])
    entries = table.read(graph, within or {}, others)
    rules = tuple(e.rule for e in entries)
    choices = tuple(e.choices for e in entries)
    signature = tuple(e.number for e in entries)
    materialised = _materialised(graph, rules, [e.sums for e in entries])
    unknown = dict.fromkeys((op.primitive, str(op.source)) for op, e in zip(graph.ops, entries, strict=True) if not e.known)
    seconds = _seconds(graph, mesh, cluster, rules, choices, signature, materialised)
    return Space(graph, mesh, cluster, rules, choices, signature, materialised, seconds, tuple(unknown))


@dataclass(frozen=True, eq=False)
class _Entry:
    """What ops of one signature share; `sums` tells whether the result may be partial."""

    number: int
    rule: Rule
    known: bool
    sums: bool
    choices: Choices


class _Table:
    """One entry per op signature."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.rules: dict = {}
        self.entries: dict = {}

    def read(self, graph: Graph, within: Mapping[Path, Sequence[str | None]], others: Sequence[str | None] | None) -> list[_Entry]:
        """The entries of all ops, in order."""
        out: list[_Entry] = []
        for op in graph.ops:
            handed = bool(op.inputs) and all(v is not None and out[graph.values[v].producer[0]].sums for v in op.inputs)
            out.append(self._entry(op, handed, within.get(op.path, others)))
        return out

    def _entry(self, op: Op, handed: bool, within: Sequence[str | None] | None) -> _Entry:
        """`handed`: every operand may be a partial sum."""
        key = _key(op)
        if key not in self.rules:
            rule, known = border_rule(op) or rule_for(op.primitive, op.ins, op.outs, op.params)
            shapes = [tuple(tuple(getattr(x, "shape", ())) for x in xs) for xs in (op.ins, op.outs)]
            sizes = letter_sizes(rule, *shapes)
            if op.primitive != "arg" and any(0 in shape for side in shapes for shape in side):  # XLA does not split nothing
                rule = replace(rule, whole=frozenset(sizes))
            self.rules[key] = rule, known, sizes
        rule, known, sizes = self.rules[key]
        # Partial sums of arrays pass through; a single number is summed up at once, which costs next to nothing.
        linear = rule.linear and handed and bool(op.outs[0].shape)
        if (key, linear, within) not in self.entries:
            given = _given(op, self.mesh)
            choices, known = (given, True) if given else (enumerate_choices(rule, sizes, self.mesh, linear, within), known)
            sums = linear or (op.primitive not in BORDER and bool(rule.reduce))
            self.entries[key, linear, within] = _Entry(len(self.entries), rule, known, sums, choices)
        return self.entries[key, linear, within]


def _given(op: Op, mesh: MeshShape) -> Choices | None:
    """What a `shard_map` says of its operands and results: its specs are pins."""
    specs = shard_map_specs(op.params) if op.primitive == "shard_map" else None
    if specs is None:
        return None

    def layouts(specs, avals):
        return [Layout.from_spec(spec, len(aval.shape)) for spec, aval in zip(specs, avals, strict=True)]

    return given_choices(layouts(specs[0], op.ins), layouts(specs[1], op.outs), mesh)


def border_rule(op: Op) -> tuple[Rule, bool] | None:
    """The rule of an op that carries values over a border of the program; None for a JAX primitive."""
    match op.primitive:
        case "arg":
            return Rule((), (letters(op.outs[0]),)), True
        case "const":
            a = letters(op.outs[0])
            return Rule((), (a,), whole=frozenset(x for d in a for x in d)), True
        case "out" | "share" | "loop_const" | "loop_carry" | "loop_next" | "barrier" | "branch_in" | "branch_out":
            a = letters(op.outs[0])
            return Rule((a,) * len(op.ins), (a,), fusion="view"), True
        case "branch_index":
            return Rule(((),), ()), True
        case "loop_slice":
            a = letters(op.outs[0])
            return Rule(((("trip",), *a),), (a,), whole=frozenset({"trip"}), fusion="loop"), True
        case "loop_stack":
            a = letters(op.ins[0])
            return Rule((a,), ((("trip",), *a),), whole=frozenset({"trip"}), fusion="none"), True
    return None


def _key(op: Op):
    def aval(x):
        return tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", None))

    literal = tuple(v is None for v in op.inputs)
    return op.primitive, _freeze(op.params), tuple(map(aval, op.ins)), tuple(map(aval, op.outs)), literal


def _freeze(params: Mapping):
    out = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
            out.append((name, value))
        except TypeError:
            out.append((name, repr(value)))
    return tuple(out)


def _materialised(graph: Graph, rules: tuple[Rule, ...], sums: Sequence[bool]) -> tuple[bool, ...]:
    """Per value: written to memory, or only ever seen inside fusions (and views of what is written elsewhere)."""
    out = [True] * len(graph.values)
    prologue = _prologues(graph, rules)
    for v in reversed(range(len(graph.values))):
        at, _ = graph.values[v].producer
        op, fusion = graph.ops[at], rules[at].fusion
        if op.primitive in ("arg", "const", "loop_carry", "loop_next", "branch_out"):
            continue
        if sums[at] and any(graph.ops[c].primitive == "share" for c, _ in graph.values[v].consumers):
            continue  # partial sums are written, reduced and read again
        if fusion == "view" or (is_spread(op) and not any(graph.ops[c].primitive in STORED for c in _readers(graph, v))):
            out[v] = op.primitive == "out"
        elif fusion == "loop" and not is_spread(op):
            out[v] = not all(_absorbs(graph, rules, op, reader, v in prologue) for reader in _readers(graph, v))
    for v in _turned(graph, rules):
        out[v] = True
    return tuple(out)


def _turned(graph: Graph, rules: tuple[Rule, ...]) -> set[int]:
    """What XLA writes because it has to transpose it: what an elementwise op reads beside another product's result in another order.

    Dims that one operand brings into a product, and those of its batch, lie in its result one after the other. Of two products whose
    results do not agree XLA turns the later one, behind the last op that computes with nothing else.
    """
    rows: dict[int, tuple[int, frozenset[tuple[int, int]]]] = {}  # value -> the product's, and neighbouring dims in their order
    later: set[int] = set()
    for at, op in enumerate(graph.ops):
        if op.primitive == "dot_general":
            rows[op.outputs[0]] = op.outputs[0], frozenset(_in_a_row(op))
        elif op.primitive == "transpose" and op.inputs[0] in rows:
            made, pairs = rows[op.inputs[0]]
            place = op.params["permutation"].index
            rows[op.outputs[0]] = made, frozenset((place(a), place(b)) for a, b in pairs)
        elif op.primitive == "share" or rules[at].fusion == "loop":
            alike = (v for v, x in zip(op.inputs, op.ins, strict=True) if v in rows and x.shape == op.outs[0].shape)
            found = sorted((rows[v] for v in alike if v is not None), key=lambda r: r[0])
            if found:
                rows[op.outputs[0]] = found[0]
                later.update(made for made, pairs in found if any((b, a) in found[0][1] for a, b in pairs))
    out = set()
    for v in later:
        last = v
        while len(graph.values[v].consumers) == 1:
            op = graph.ops[graph.values[v].consumers[0][0]]
            if [u for u in op.inputs if u is not None] != [v]:
                break
            v = op.outputs[0]
            last = last if op.primitive == "share" else v
        out.add(last)
    return out


def _in_a_row(op: Op) -> list[tuple[int, int]]:
    """Neighbouring dims of a product's result that lie one after the other."""
    (left, right), (batch, batch_right) = op.params["dimension_numbers"]
    free = [len(x.shape) - len(c) - len(b) for x, c, b in zip(op.ins, (left, right), (batch, batch_right), strict=True)]
    ends, out = (0, len(batch), len(batch) + free[0], sum(free) + len(batch)), []
    for start, stop in pairwise(ends):
        out += pairwise(d for d in range(start, stop) if op.outs[0].shape[d] > 1)
    return out


STORED = frozenset({"out", "loop_carry", "loop_next", "loop_stack", "branch_in", "branch_out"})
"""Border ops that keep what they are handed in a buffer of its own."""


def is_spread(op: Op) -> bool:
    """One number spread out, which XLA writes where it is read and nowhere else, in loops too."""
    return op.primitive == "broadcast_in_dim" and not op.ins[0].shape


def _readers(graph: Graph, v: int):
    """The ops that read a value, looking through its shares."""
    for at, _ in graph.values[v].consumers:
        op = graph.ops[at]
        if op.primitive == "share":
            yield from _readers(graph, op.outputs[0])
        else:
            yield at


RECOMPUTED = frozenset(("abs", "add", "add_any", "exp", "log", "logistic", "max", "min", "mul", "neg", "rsqrt", "sqrt", "sub", "tanh"))
"""Elementwise ops that XLA does again in every product that reads their result."""


def _prologues(graph: Graph, rules: tuple[Rule, ...]) -> set[int]:
    """Values that XLA computes inside the products that read them: one array after elementwise work that reads it once.

    A change of dtype on the way, a selection or a second use of the array (gelu's) is written before the product.
    """
    out: set[int] = set()
    for op in graph.ops:
        if op.primitive in RECOMPUTED and op.outs[0].shape:
            whole = [_root(graph, v) for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.size == op.outs[0].size]
            made = [graph.values[v].producer[0] for v in whole]
            arrays = [(v, at) for v, at in zip(whole, made, strict=True) if graph.ops[at].primitive != "broadcast_in_dim"]
            if len(arrays) == 1 and all(v in out or rules[at].fusion != "loop" for v, at in arrays):
                out.add(op.outputs[0])
    return out


def _absorbs(graph: Graph, rules: tuple[Rule, ...], producer: Op, at: int, prologue: bool) -> bool:
    reader = graph.ops[at]
    if reader.primitive in ("out", "loop_const", "loop_carry", "loop_next", "loop_stack", "branch_in", "branch_out", "barrier"):
        return False
    return producer.loop == reader.loop and (rules[at].fusion in FUSIBLE or (prologue and reader.primitive == "dot_general"))


def _seconds(graph, mesh, cluster, rules, choices, signature, materialised) -> tuple[np.ndarray, ...]:
    group = _groups(graph, materialised)
    charged: set[tuple[int, int, str]] = set()
    cache: dict = {}
    out = []
    for at, op in enumerate(graph.ops):
        reads = []
        for v in op.inputs:
            if v is None:
                reads.append(False)
                continue
            read = _root(graph, v), group[at], op.phase  # what a fusion computes again in another phase it also reads again
            reads.append(materialised[read[0]] and read not in charged)
            charged.add(read)
        writes = tuple(materialised[v] for v in op.outputs)
        key = signature[at], tuple(reads), writes
        if key not in cache:
            cache[key] = _op_seconds(op, rules[at], choices[at], mesh, cluster, reads, writes)
        out.append(cache[key])
    return tuple(out)


def _root(graph: Graph, v: int) -> int:
    """The value whose bytes are read when `v` is: copies are priced as reshards, not as reads."""
    op = graph.ops[graph.values[v].producer[0]]
    while op.primitive == "share" and (source := op.inputs[0]) is not None:
        v = source
        op = graph.ops[graph.values[v].producer[0]]
    return v


def _groups(graph: Graph, materialised) -> list[int]:
    """Fusion group of every op: producers and readers of values that never materialise."""
    parent = list(range(len(graph.ops)))

    def find(a: int) -> int:
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    for v, value in enumerate(graph.values):
        if not materialised[v]:
            for at, _ in value.consumers:
                parent[find(at)] = find(value.producer[0])
    return [find(a) for a in range(len(graph.ops))]


def exchanged(op: Op, rule: Rule, choices: Choices, s: int, mesh: MeshShape, cluster: Cluster) -> list[Exchange]:
    """What an op exchanges with its neighbours under strategy s."""
    layouts = [of[s] for of in choices.operands]
    return exchanges(rule, choices.letters[s], op.ins, op.outs, layouts, mesh, cluster) if rule.exchanged else []


def _op_seconds(op: Op, rule: Rule, choices: Choices, mesh, cluster: Cluster, reads, writes) -> np.ndarray:
    moved = np.zeros(len(choices))
    tensors = [(x, ls) for x, ls, read in zip(op.ins, choices.operands, reads, strict=True) if read]
    tensors += [(x, ls) for x, ls, write in zip(op.outs, choices.results, writes, strict=True) if write]
    if op.primitive not in ("arg", "const", "out", "branch_index", "loop_carry", "loop_next", "branch_out", "loop_const"):
        if op.primitive == "loop_stack":  # one row per run
            tensors = [(op.ins[0], choices.operands[0])] * 2
        elif op.primitive == "loop_slice":
            tensors = [(op.outs[0], choices.results[0])] * (2 if writes[0] else 1)
        for x, layouts in tensors:
            if hasattr(x, "dtype"):
                size = float(np.prod(x.shape)) * itemsize(x.dtype)
                moved += [size / layout.shards(mesh) for layout in layouts]
    if rule.prefix:  # one more pass joins what is made with the totals of the shards before
        moved *= [1 if rule.prefix.isdisjoint(letters) else 2 for letters in choices.letters]
    device = cluster.device
    seconds = moved / device.memory_rate
    if rule.flops and op.ins:
        dtype = str(op.ins[0].dtype) if hasattr(op.ins[0], "dtype") else "float32"
        seconds = np.maximum(rule.flops * choices.work / device.flops_per_s(dtype), seconds)
    if rule.exchanged:
        found = (exchanged(op, rule, choices, s, mesh, cluster) for s in range(len(choices)))
        seconds = seconds + np.array([sum(x.seconds for x in exchange) for exchange in found])
    return seconds + (device.kernel_latency_s if rule.fusion == "none" and moved.any() else 0.0)
