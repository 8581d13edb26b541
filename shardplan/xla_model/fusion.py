"""What XLA's GPU back end runs as one kernel: which values are written to memory, and which kernel reads what.

Elementwise ops, views and the reductions behind them fuse. A value that only fusions read never materialises; they compute it again.
What stands behind a reduction, a product or a collective waits for it in a later kernel, and reads anew what an earlier one read:

    y -> cast -+-> sum ------+            kernel 1 reads y, writes the sum
               +-> minus <---+-> cast     kernel 2 reads y and the sum, writes the normalised y
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardplan.ir.graph import BORDER, Graph, Op, components
from shardplan.strategies.rule import Rule

FUSIBLE = ("loop", "view", "reduce")

Kernel = tuple
"""Group of ops, how many kernels it waits for, phase, loop, and what it sums up over which dims."""

IDLE = BORDER - {"loop_slice", "loop_stack"}
"""Border ops that move nothing."""

PARTLY = frozenset({"dynamic_slice", "gather", "loop_slice", "slice"})
"""Ops that read of their first operand no more than they make."""

PUTS = {"dynamic_update_slice": (1, 1), "loop_stack": (0, 2)}
"""Ops that write of their result no more than they have of an operand: which, and how often. A stack is all zeros before."""


def materialised(graph: Graph, rules: tuple[Rule, ...], sums: Sequence[bool]) -> tuple[bool, ...]:
    """Per value: written to memory, or only ever seen inside fusions (and views of what is written elsewhere)."""
    out = [True] * len(graph.values)
    prologue = _prologues(graph, rules)
    for v in reversed(range(len(graph.values))):
        at, _ = graph.values[v].producer
        op, fusion = graph.ops[at], rules[at].fusion
        if op.primitive in ("arg", "const", "loop_carry", "loop_next", "branch_out"):
            continue
        if fusion == "view":
            out[v] = op.primitive == "out"
            continue
        seen = list(_seen_by(graph, rules, v))
        if op.scalar_broadcast and not any(graph.ops[c].primitive in STORED for c in seen):
            out[v] = False
        elif sums[at] and any(graph.ops[c].primitive == "share" for c in seen):
            continue  # partial sums are written, reduced and read again
        elif fusion == "loop" and not op.scalar_broadcast:
            readers = [c for c in seen if not _looked_through(graph, rules, c)]
            put = len(readers) == 1 and graph.ops[readers[0]].primitive == "loop_stack"  # computed as the row is written
            out[v] = not put and not all(_absorbs(graph, rules, op, reader, v in prologue) for reader in readers)
    for op in graph.ops:
        if (v := _product(graph, op)) is not None and out[op.outputs[0]]:
            out[v] = False
    for v in (*_turned(graph, rules), *_also_zeros(graph)):
        out[v] = True
    for v in _cheaper_kept(graph, rules, out, sums):
        out[v] = True
    return tuple(out)


def _product(graph: Graph, op: Op) -> int | None:
    """The product that XLA writes in the order in which op, a transpose and the only one to read it, turns it."""
    v = op.inputs[0] if op.primitive == "transpose" and len(op.ins[0].shape) == 2 else None
    if v is None or len(graph.values[v].consumers) > 1 or graph.ops[graph.values[v].producer[0]].primitive != "dot_general":
        return None
    return v


def _also_zeros(graph: Graph) -> Iterator[int]:
    """Numbers spread out like those that a scatter writes into, taken to be zeros, too: XLA makes one array of both, and a copy."""
    spread = [op for op in graph.ops if op.scalar_broadcast and op.loop < 0]
    into = [any(graph.ops[reader].traits.in_place for reader in graph.readers(op.outputs[0])) for op in spread]
    alike = {(op.outs[0].shape, op.outs[0].dtype) for op, updated in zip(spread, into, strict=True) if updated}
    for op, updated in zip(spread, into, strict=True):
        if not updated and (op.outs[0].shape, op.outs[0].dtype) in alike:
            yield op.outputs[0]


def _looked_through(graph: Graph, rules: Sequence[Rule], at: int) -> bool:
    return graph.ops[at].primitive == "share" or (rules[at].fusion == "view" and graph.ops[at].primitive not in BORDER)


def _seen_by(graph: Graph, rules: Sequence[Rule], v: int) -> Iterator[int]:
    """The ops that read a value, itself or through views and copies, and those."""
    values = [v]
    for seen in values:
        for at, _ in graph.values[seen].consumers:
            yield at
            if _looked_through(graph, rules, at):
                values += graph.ops[at].outputs


def _cheaper_kept(graph: Graph, rules: tuple[Rule, ...], written: Sequence[bool], sums: Sequence[bool]) -> set[int]:
    """What is written once rather than computed again by every kernel that reads it, because that reads more.

    Of k kernels, each reads the sources, or one reads them and writes the value, which the others read:
    k * sources  >  sources + value + (k - 1) * value.
    """
    own = _own(graph, rules, written, sums)
    inside = _kernels(graph, written, own)
    out: set[int] = set()
    sources: list[dict[int, float]] = []
    for v, value in enumerate(graph.values):
        at = value.producer[0]
        op = graph.ops[at]
        found: dict[int, float] = {}
        for u in op.inputs:
            if u is not None:
                root = _root(graph, rules, u)
                found |= {root: graph.values[root].bytes} if written[root] or root in out else sources[root]
        sources.append(found)
        if written[v] or rules[at].fusion != "loop" or op.scalar_broadcast:
            continue
        k = len(inside[at])
        if (k - 1) * (sum(found.values()) - value.bytes) > value.bytes:
            out.add(v)
    return out


def _turned(graph: Graph, rules: tuple[Rule, ...]) -> set[int]:
    """What XLA writes because it has to transpose it: what an elementwise op reads beside another product's result in another order.

    Dims that one operand brings into a product, and those of its batch, lie in its result one after the other. Of two products whose
    results do not agree XLA turns the later one, behind the last op that computes with nothing else.
    """
    rows: dict[int, tuple[int, frozenset[tuple[int, int]]]] = {}  # value -> the product's, and neighbouring dims in their order
    later: set[int] = set()
    for at, op in enumerate(graph.ops):
        if op.primitive == "dot_general" and rules[at].fusion == "none":
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


RECOMPUTED = frozenset(("abs", "add", "add_any", "exp", "log", "logistic", "max", "min", "mul", "neg", "rsqrt", "sqrt", "sub", "tanh"))
"""Elementwise ops that XLA does again in every product that reads their result."""


def _prologues(graph: Graph, rules: tuple[Rule, ...]) -> set[int]:
    """Values that XLA computes inside the products that read them: one array after elementwise work that reads it once.

    A change of dtype on the way, a selection or a second use of the array (gelu's) is written before the product.
    """
    out: set[int] = set()
    for op in graph.ops:
        if op.primitive in RECOMPUTED and op.outs[0].shape:
            whole = [graph.original(v) for v, x in zip(op.inputs, op.ins, strict=True) if v is not None and x.size == op.outs[0].size]
            made = [graph.values[v].producer[0] for v in whole]
            arrays = [(v, at) for v, at in zip(whole, made, strict=True) if graph.ops[at].primitive != "broadcast_in_dim"]
            if len(arrays) == 1 and all(v in out or rules[at].fusion != "loop" for v, at in arrays):
                out.add(op.outputs[0])
    return out


def _absorbs(graph: Graph, rules: tuple[Rule, ...], producer: Op, at: int, prologue: bool) -> bool:
    reader = graph.ops[at]
    if reader.primitive in (*STORED, "loop_const", "loop_slice", "barrier"):
        return False
    return _runs_in(producer) == reader.loop and (rules[at].fusion in FUSIBLE or (prologue and reader.primitive == "dot_general"))


@dataclass(frozen=True)
class KernelTraffic:
    """What an op moves between memory and the device in one run.

    Attributes:
        operand_reads, result_writes: how often as many bytes as the operand, or the result, has are read or written.
        kernel_bytes: bytes that the kernel moves which the op stands for, all shards together; None if it stands for none.
    """

    operand_reads: tuple[int, ...]
    result_writes: tuple[int, ...]
    kernel_bytes: float | None


def kernel_traffic(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> tuple[KernelTraffic, ...]:
    """What every op moves.

    Args:
        written: per value, whether it materialises.
        sums: per op, whether its result may be partial.
    """
    own = _own(graph, rules, written, sums)
    inside = _kernels(graph, written, own)
    found = ((_product(graph, op), op.outputs[0]) for op in graph.ops if op.outputs)
    turned = {v: w for v, w in found if v is not None and written[w]}
    done = frozenset(turned.values())
    seen: set[tuple[Kernel, int]] = set()  # what a kernel has read or made
    moved: dict[Kernel, float] = {}
    stands: dict[Kernel, int] = {}
    counts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for at, op in enumerate(graph.ops):
        operands, results = [0] * len(op.inputs), [0] * len(op.outputs)
        idle = op.primitive in IDLE
        for k, v in enumerate(op.inputs):
            if v is None or idle or rules[at].fusion == "view" or (k == 0 and op.traits.in_place):
                continue
            root = _root(graph, rules, v)
            if not written[root]:
                continue
            new = [kernel for kernel in inside[at] if (kernel, root) not in seen]
            partly = k == 0 and op.primitive in PARTLY
            (results if partly else operands)[k] += len(new)
            for kernel in new:
                seen.add((kernel, root))
                moved[kernel] = moved.get(kernel, 0.0) + graph.values[op.outputs[0] if partly else root].bytes
        for k, v in enumerate(op.outputs):
            if v in turned:
                results[k] += 1
            elif v in done:
                seen.add((own[at], v))
            elif written[v] and not idle:
                stands.setdefault(own[at], at)
                seen.add((own[at], v))
                if op.primitive in PUTS:
                    part, times = PUTS[op.primitive]
                    operands[part] += times
                else:
                    results[k] += 1
                    moved[own[at]] = moved.get(own[at], 0.0) + graph.values[v].bytes
        counts.append((tuple(operands), tuple(results)))
    kernel = {at: moved.get(key, 0.0) for key, at in stands.items()}
    return tuple(KernelTraffic(operands, results, kernel.get(at)) for at, (operands, results) in enumerate(counts))


def _own(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> list[Kernel]:
    """Per op, the kernel that it belongs to where it writes.

    One kernel sums up over the same dims of arrays of one shape; what is written on the way is written by any of them.
    """
    groups, levels = _groups(graph, rules, written), _levels(graph, rules, written, sums)
    own: list[Kernel] = []
    over = [_summed(op) if rule.fusion == "reduce" else None for op, rule in zip(graph.ops, rules, strict=True)]
    first: dict[Kernel, tuple] = {}
    for at, op in enumerate(graph.ops):
        alone = op.primitive in PARTLY and not any(_along(graph, rules, reader) for v in op.outputs for reader in graph.readers(v))
        own.append((-1 - at if alone else groups[at], levels[at], op.phase, _runs_in(op)))
        if summed := over[at]:
            first.setdefault(own[at], summed)
    return [(*key, summed or first.get(key)) for key, summed in zip(own, over, strict=True)]


def _runs_in(op: Op) -> int:
    """The loop in which an op is computed; rows are cut out in the loop that reads them."""
    return op.held_during if op.primitive == "loop_slice" else op.loop


def _summed(op: Op) -> tuple:
    """What sums have in common that one kernel does together."""
    over = next((op.params[name] for name in ("axes", "dimensions", "dimension_numbers", "window_dimensions") if name in op.params), ())
    return tuple(x.shape for x in op.ins), str(over)


def _along(graph: Graph, rules: Sequence[Rule], reader: int) -> bool:
    """Whether an op may be part of a kernel that writes what it reads."""
    return rules[reader].fusion in FUSIBLE and graph.ops[reader].primitive not in BORDER


def _kernels(graph: Graph, written: Sequence[bool], own: Sequence[Kernel]) -> list[set[Kernel]]:
    """Per op, the kernels that compute it: its own where it writes, those of all its readers where it does not."""
    out: list[set[Kernel]] = [set() for _ in graph.ops]
    for at in reversed(range(len(graph.ops))):
        for v in graph.ops[at].outputs:
            if not written[v]:
                out[at].update(*(out[reader] for reader, _ in graph.values[v].consumers))
            elif graph.ops[at].primitive not in IDLE:
                out[at].add(own[at])
    return out


def _root(graph: Graph, rules: Sequence[Rule], v: int) -> int:
    """The array whose bytes are read when `v` is, views looked through: copies are priced as reshards, not as reads."""
    while True:
        at, k = graph.values[v].producer
        op = graph.ops[at]
        source = op.inputs[k if len(op.outputs) > 1 else 0] if op.inputs and rules[at].fusion == "view" else None
        if source is None:
            return v
        v = source


def _groups(graph: Graph, rules: Sequence[Rule], written: Sequence[bool]) -> list[int]:
    """Ops that one kernel may run if nothing stands between them: what makes and what reads a value inside fusions."""

    def pairs():
        for v, value in enumerate(graph.values):
            at, loop = value.producer[0], rules[value.producer[0]].fusion == "loop"
            for reader, _ in value.consumers:
                if value.shape and (not written[v] or (loop and _along(graph, rules, reader))):
                    yield at, reader

    return components(len(graph.ops), pairs())


def _levels(graph: Graph, rules: Sequence[Rule], written: Sequence[bool], sums: Sequence[bool]) -> list[int]:
    """How many reductions, products and partial sums stand before an op, one behind the other."""
    out = [0] * len(graph.ops)
    for at, op in enumerate(graph.ops):
        for v in op.inputs:
            if v is not None:
                before = graph.values[v].producer[0]
                overlap_windows = written[v] and (rules[before].fusion in ("reduce", "none") or sums[before])
                out[at] = max(out[at], out[before] + overlap_windows)
    return out
