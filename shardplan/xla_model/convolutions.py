"""What XLA makes of a convolution: which call of cuDNN, over which operands, and the copies of these that it writes first.

cuDNN has three calls. XLA recognises gradients by their form; those of grouped or dilated convolutions are forward calls, too:

    input gradient     one group, no strides, no dilated windows, reversed weights
    filter gradient    one feature group, no strides, windows larger than the result, or dilated
    forward            all else

These calls know strides, and padding of one size at both ends; they read weights with output channels outermost. So XLA writes first:

    forward            uneven padding or a dilated input: the input with its padding and gaps; dilated windows are filled with zeros,
                       which are multiplied like data
    filter gradient    uneven padding: the input with the rest of it
    input gradient     uneven padding: a larger result, from which readers cut theirs
    weights [h w i o]  transposed, once for both calls that read them

If elementwise work makes the array, its kernel writes the copy; else a kernel of its own does. A copy that both the forward and the
backward pass read is written once, and held until the last of them.

A filter's gradient has output channels outermost, too. The kernel that updates the weights by it transposes it, so that it cannot write
over the donated state: what it writes is copied there by a kernel for each array, but for one if the gradient has the state's dtype.

Facts: convolution-padded-copy, convolution-filter-order, convolution-update-copies, convolution-channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from shardplan.ir.graph import Graph, Op
from shardplan.ir.windows import window_hits
from shardplan.mesh.device import Device, gpu_of_device_kind
from shardplan.strategies.rule import Rule
from shardplan.xla_model.physical_layout import CoupledState, coupled_state
from shardplan.xla_model.physical_order import CallOrders, Dims
from shardplan.xla_model.traffic import KernelTraffic, LibraryCall

HOPPER = (9, 0)
"""Compute capability from which rows and images in 32 bits have their channels last in memory, and rows in 16 bits; images in 16 bits
have so on every GPU, volumes on none."""


class WindowDim(NamedTuple):
    """One spatial dim of a convolution, as `conv_general_dilated` has it."""

    n: int  # elements of the input
    taps: int
    made: int  # elements of the result
    stride: int
    low: int
    high: int
    dilation: int  # of the input
    spread: int  # dilation of the window

    @property
    def hits(self) -> int:
        """Pairs of a tap and a result that meet data."""
        return window_hits(self.n, self.taps, self.made, self.stride, self.low, self.dilation, self.spread)


def is_hopper(device: Device | None) -> bool:
    """Whether a GPU is of Hopper's generation or a later one, as those are that are not known."""
    gpu = gpu_of_device_kind(device.name) if device else None
    return gpu is None or gpu.compute_capability >= HOPPER


def call_orders(graph: Graph, device: Device | None) -> dict[int, CallOrders]:
    """How the activations of every convolution lie in memory; not those of which a call reads a copy with padding."""
    out: dict[int, CallOrders] = {}
    for at, op in enumerate(graph.ops):
        if op.traits.convolution:
            call, (lhs, rhs, made) = library_call(op, reversal(graph, at) is not None), op.params["dimension_numbers"]
            specs = [lhs if lhs[0] == 0 else None, None, made if lhs[0] == 0 else None]
            if call.kind == "filter gradient":  # batch and channels are the other way round
                specs = [(lhs[1], lhs[0], *lhs[2:]), (rhs[1], rhs[0], *rhs[2:]), None]
            sizes = zip(specs, call.sizes, strict=True)
            orders = [None if x is None or n != 1 else in_memory(x, op, is_hopper(device)) for x, n in sizes]
            out[at] = CallOrders((orders[0], orders[1]), orders[2])
    return out


def in_memory(spec: Sequence[int], op: Op, hopper: bool) -> Dims:
    """(batch or output channels, channels, space) of an array of a call as they lie in memory: channels come last or second."""
    last = hopper if len(spec) == 3 else len(spec) == 4 and (op.ins[0].dtype.itemsize == 2 or hopper)
    return (spec[0], *spec[2:], spec[1]) if last else tuple(spec)


def reversal(graph: Graph, at: int) -> int | None:
    """The op that reverses the weights of a convolution."""
    v = graph.ops[at].inputs[1]
    maker = None if v is None else graph.maker(v)
    return maker if maker is not None and graph.ops[maker].traits.reversal else None


def library_call(op: Op, reversed_weights: bool) -> LibraryCall:
    """The call that a `conv_general_dilated` becomes."""
    windows = _windows(op)
    if (found := _input_gradient(op, windows, reversed_weights)) is not None:
        larger = [w._replace(made=w.made + abs(low - high)) for w, low, high in found]
        hits = [window_hits(w.made, w.taps, w.n, w.dilation, min(low, high)) for w, (_, low, high) in zip(larger, found, strict=True)]
        return _call("input gradient", windows, hits, larger)
    if (found := _filter_gradient(op, windows)) is not None:
        larger = [w._replace(n=w.n + abs(low - high)) for w, low, high in found]
        hits = [window_hits(w.n, w.made, w.taps, w.spread, min(low, high)) for w, (_, low, high) in zip(larger, found, strict=True)]
        return _call("filter gradient", windows, hits, larger)
    if all(w.low == w.high >= 0 and w.dilation == 1 for w in windows):
        return LibraryCall("forward")
    filled = [
        w._replace(n=(w.n - 1) * w.dilation + 1 + w.low + w.high, taps=(w.taps - 1) * w.spread + 1, low=0, dilation=1, spread=1)
        for w in windows
    ]
    return _call("forward", windows, [w.hits for w in filled], filled)


def _call(kind, windows: Sequence[WindowDim], hits: Sequence[int], larger: Sequence[WindowDim]) -> LibraryCall:
    sizes = (prod(new[k] for new in larger) / max(1, prod(old[k] for old in windows)) for k in range(3))
    return LibraryCall(kind, prod(hits) / max(1, prod(w.hits for w in windows)), tuple(sizes))


def _windows(op: Op) -> list[WindowDim]:
    p, (x, w), (out, *_) = op.params, op.ins, op.outs
    lhs, rhs, res = p["dimension_numbers"]
    sizes = ([array.shape[d] for d in spec[2:]] for array, spec in ((x, lhs), (w, rhs), (out, res)))
    low, high = zip(*p["padding"], strict=True) if p["padding"] else ((), ())
    return [WindowDim(*each) for each in zip(*sizes, p["window_strides"], low, high, p["lhs_dilation"], p["rhs_dilation"], strict=True)]


Padded = list[tuple[WindowDim, int, int]]
"""Windows, with the padding at both ends of the call that computes what they do."""


def _input_gradient(op: Op, windows: Sequence[WindowDim], reversed_weights: bool) -> Padded | None:
    if op.params["feature_group_count"] > 1 or any(w.stride > 1 or w.spread > 1 for w in windows):
        return None
    if not reversed_weights and not (any(w.dilation > 1 for w in windows) and all(w.taps == 1 for w in windows)):
        return None
    out: Padded = []
    for w in windows:
        low = w.taps - 1 - w.low
        least = w.taps + w.dilation * (w.n - 1) - w.made - low
        out.append((w, low, min(max(low, least), least + w.dilation - 1)))
    return out if all(low >= 0 and high >= 0 for _, low, high in out) else None


def _filter_gradient(op: Op, windows: Sequence[WindowDim]) -> Padded | None:
    if op.params["feature_group_count"] > 1 or any(w.stride > 1 or w.dilation > 1 for w in windows):
        return None
    larger = [w.taps > w.made for w in windows]
    dilated = any(w.spread > 1 for w in windows) and (any(larger) or op.params["batch_group_count"] > 1)
    if not windows or not (dilated or all(larger)):
        return None
    out: Padded = []
    for w in windows:
        least = w.made + (w.taps - 1) * w.spread - w.n - w.low
        out.append((w, w.low, min(max(w.low, least), least + w.spread - 1)))
    return out if all(low >= 0 and high >= 0 for _, low, high in out) else None


class HeldCopy(NamedTuple):
    """A copy of a call's operand, from when it is made until the last call that reads it."""

    op: int
    operand: int
    last: int
    times: float  # its bytes over those of the operand; less one where it is there instead of the operand


@dataclass(frozen=True)
class Convolutions:
    """What the convolutions of a step add to what its kernels move, and to what is in memory."""

    traffic: tuple[KernelTraffic, ...]
    copies: tuple[HeldCopy, ...]


def with_convolutions(graph: Graph, rules: Sequence[Rule], traffic: Sequence[KernelTraffic], device: Device | None) -> Convolutions:
    """Traffic and copies of a step's convolutions on a device."""
    return _Step(graph, rules, traffic, device).convolutions()


class _Step:
    """The convolutions of a step, one after the other: what each calls, and which copies are there already."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], traffic: Sequence[KernelTraffic], device: Device | None):
        self.graph, self.rules, self.traffic = graph, rules, list(traffic)
        self.hopper = is_hopper(device)
        self.calls: dict[int, LibraryCall] = {}
        self.copies: dict[int, dict[tuple, HeldCopy]] = {}  # array -> (order of its dims, size) -> the copy
        self.instead: set[int] = set()  # arrays of which only copies are written

    def convolutions(self) -> Convolutions:
        graph = self.graph
        found = [at for at, op in enumerate(graph.ops) if op.traits.convolution and at not in graph.dead]
        for at in found:
            self.calls[at] = library_call(graph.ops[at], reversal(self.graph, at) is not None)
        reversals = {reversal(self.graph, at) for at in found if self.calls[at].kind == "input gradient"}
        for at in sorted(turned for turned in reversals if turned is not None):
            readers = [self.calls.get(j) for j in graph.readers(graph.ops[at].outputs[0])]
            if all(call and call.kind == "input gradient" for call in readers):  # the call itself reverses them
                reads = (0.0,) * len(graph.ops[at].inputs)
                self.traffic[at] = replace(self.traffic[at], operand_reads=reads, result_writes=(0.0,), kernel_bytes=None)
        for at in found:
            self.convolution(at)
        for at in dict.fromkeys(i for gradient in found for i in self.copied_state(gradient)):
            self.traffic[at] = replace(self.traffic[at], copied=True)
        return Convolutions(tuple(self.traffic), tuple(self.held_copies()))

    def convolution(self, at: int) -> None:
        """What one call and the kernels before it move."""
        op, call, moves = self.graph.ops[at], self.calls[at], self.traffic[at]
        reads, copied = list(moves.operand_reads), []
        for k, order in enumerate(self.operand_orders(at)):
            ratio, v = call.sizes[k], op.inputs[k]
            if call.kind == "input gradient" and k == 1 and (turned := reversal(self.graph, at)) is not None:
                v = self.graph.ops[turned].inputs[0]
            if v is None or (ratio == 1 and _is_row_major(order, op.ins[k].shape)):
                continue
            reads[k] += ratio - 1
            root = self.graph.origin(v, lambda i: self.graph.ops[i].traits.copy or self.rules[i].fusion == "view")
            known = self.copies.setdefault(root, {})
            if (key := (order, ratio)) in known:
                known[key] = known[key]._replace(last=at)
                continue
            maker = self.graph.values[root].producer[0]
            fused = self.rules[maker].fusion == "loop" and not self.graph.ops[maker].traits.border
            instead = fused and not known and all(reader in self.calls for reader in self.graph.readers(root))
            known[key] = HeldCopy(at, k, at, ratio)
            if instead:
                self.instead.add(root)
            if not fused:
                copied.append((k, 1 + ratio))
            else:
                reads[k] += ratio - instead
        writes = [n * call.sizes[2] for n in moves.result_writes]
        call = replace(call, copied=tuple(copied))
        self.traffic[at] = replace(moves, operand_reads=tuple(reads), result_writes=tuple(writes), call=call)

    def copied_state(self, at: int) -> list[int]:
        """The ops that make new state which is copied, because a filter's gradient, this call's result, is transposed for them."""
        graph, batch, feature, *space = self.graph, *self.graph.ops[at].params["dimension_numbers"][2]
        v, outermost = graph.ops[at].outputs[0], self.calls[at].kind == "filter gradient"
        order = self.order((feature, batch, *space) if outermost else (batch, feature, *space), at)
        if not graph.donated or (state := self.coupled[v]) is None:
            return []
        updates = [i for i in graph.reached(v, self.is_elementwise) if self.is_elementwise(i)]
        written = (u for a, o in graph.same_layout if a in graph.donated for u in graph.ops[o].inputs if u is not None)
        into = {graph.maker(u): graph.values[u].itemsize for u in written}
        made = [i for i in dict.fromkeys(updates) if i in into]
        large = [[d for d in dims if graph.values[v].shape[d] > 1] for dims in (order, state.order)]
        same_dtype = bool(made) and into[made[0]] == graph.values[v].itemsize
        return made[same_dtype:] if large[0] != large[1] else []

    def is_elementwise(self, at: int) -> bool:
        """Whether a kernel that reads an op's operand may as well make its result."""
        op = self.graph.ops[at]
        return op.traits.copy or (self.rules[at].fusion == "loop" and not op.traits.border)

    @cached_property
    def coupled(self) -> list[CoupledState | None]:
        """Per value, the inputs of the step that the optimizer computes with together with it."""
        return coupled_state(self.graph, [rule.fusion == "loop" for rule in self.rules])

    def held_copies(self) -> Iterator[HeldCopy]:
        """The copies in memory; of an array that is written only so, the last one read is made with the first."""
        for root, known in self.copies.items():
            first, last = next(iter(known.values())), max(known.values(), key=lambda copy: copy.last)
            for copy in known.values():
                if root in self.instead and copy is last:
                    yield HeldCopy(first.op, first.operand, copy.last, copy.times - 1)
                else:
                    yield copy

    def operand_orders(self, at: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dims of both operands, outermost first, as the call reads them; of arrays that may lie so already, as they are."""
        op, kind = self.graph.ops[at], self.calls[at].kind
        lhs, rhs, _ = op.params["dimension_numbers"]
        as_it_is = tuple(range(len(lhs)))
        if kind == "filter gradient":
            return as_it_is, as_it_is
        if lhs[0] != 0:  # a filter gradient as a forward call: channels are its batch
            return self.order(lhs, at), self.order(rhs, at)
        return as_it_is, self.order((rhs[1], rhs[0], *rhs[2:]) if kind == "input gradient" else rhs, at)

    def order(self, spec: Sequence[int], at: int) -> Dims:
        """As of `in_memory`."""
        return in_memory(spec, self.graph.ops[at], self.hopper)


def _is_row_major(order: Sequence[int], shape: Sequence[int]) -> bool:
    order = [d for d in order if shape[d] > 1]
    return order == sorted(order)
