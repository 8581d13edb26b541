"""What would make a step faster that no sharding does: attention and cross-entropies that a fused kernel computes without their scores.

    attention at train.py:41: 3.1 ms between its products, 23 % of the step; 4.6 ms with them, 1.2 ms fused
      way out: jax.nn.dot_product_attention(..., implementation="cudnn")

A fused kernel takes the longer of its flops, at the rate at which cuDNN's attention is priced, and of the bytes of its operands and
results. It computes the scores again for the gradient: five products for two. Masks save it nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardplan.mesh.rates import Attention, attention_rate
from shardplan.plan.planned import Planned
from shardplan.plan.unfused import Kind, UnfusedSoftmax, unfused_softmaxes
from shardplan.units import format_percent, format_seconds

LEAST_SHARE = 0.1
"""Part of the step that the ops between the products take, from which advice is given."""

MOST_DEPTH = 256
"""Largest head that cuDNN's attention takes."""

HALF = ("bfloat16", "float16")
"""Dtypes of cuDNN's attention."""


@dataclass(frozen=True)
class Advice:
    """What a fused kernel would take of a step on one device; `print` it.

    Attributes:
        kind: "attention" or "cross-entropy".
        source: the user's line of the softmax, "train.py:41".
        seconds: of a step, that the ops between the products take.
        share: of the step's predicted seconds, at least `LEAST_SHARE`.
        unfused_seconds: the same with the products.
        fused_seconds: that the fused kernels would take in their place.
        use: the function that gives them.
    """

    kind: Kind
    source: str
    seconds: float
    share: float
    unfused_seconds: float
    fused_seconds: float
    use: str

    def __str__(self) -> str:
        return f"{self.finding}\n  way out: {self.use}"

    @property
    def finding(self) -> str:
        """In words, without the way out."""
        between = f"{format_seconds(self.seconds)} between its products, {format_percent(self.share)} of the step"
        both = f"{format_seconds(self.unfused_seconds)} with them, {format_seconds(self.fused_seconds)} fused"
        return f"{self.kind} at {self.source}: {between}; {both}"


def advice(planned: Planned) -> tuple[Advice, ...]:
    """Of a plan that was solved here for GPUs, what takes the largest share first."""
    if "cpu" in planned.space.cluster.platforms:  # the fused kernels are for GPUs
        return ()
    found: dict[tuple[str, str], Advice] = {}
    for part in unfused_softmaxes(planned.graph, planned.space.rules, planned.categories):
        if (one := _of(planned, part)) is not None:
            before = found.get((one.kind, one.source))
            found[one.kind, one.source] = one if before is None else _together(before, one)
    much = (x for x in found.values() if x.share >= LEAST_SHARE and x.fused_seconds < x.unfused_seconds)
    return tuple(sorted(much, key=lambda x: (-x.share, x.source)))


def _together(a: Advice, b: Advice) -> Advice:
    names = "seconds", "share", "unfused_seconds", "fused_seconds"
    return replace(a, **{name: getattr(a, name) + getattr(b, name) for name in names})


def _of(planned: Planned, part: UnfusedSoftmax) -> Advice | None:
    """What is known of one softmax; None where its heads are too wide for a fused kernel."""
    graph, step_s = planned.graph, planned.timeline.total_s
    if part.kind == "attention" and _shape(planned, part).head_size > MOST_DEPTH:
        return None
    own = planned.kernel_seconds
    between, products = math.fsum(own[i] for i in part.between), math.fsum(own[i] for i in part.products)
    inside = part.between | set(part.products)
    between += math.fsum(s for i, j, s in planned.edge_seconds if i in inside and j in inside)
    fused = _attention_seconds(planned, part) if part.kind == "attention" else _loss_seconds(planned, part)
    share = between / step_s if step_s else 0.0
    return Advice(part.kind, str(graph.ops[part.exponential].source), between, share, between + products, fused, _use(planned, part))


def _use(planned: Planned, part: UnfusedSoftmax) -> str:
    if part.kind == "cross-entropy":
        return "a linear cross-entropy, blockwise: product and loss in one kernel, which writes no logits"
    dtype = str(planned.graph.ops[part.scores].ins[0].dtype)
    cast = "" if dtype in HALF else f", for operands in {' or '.join(HALF)}"
    return 'jax.nn.dot_product_attention(..., implementation="cudnn")' + cast + (", which has no dropout" if part.dropout else "")


# ---- what the fused kernels would take


def _attention_seconds(planned: Planned, part: UnfusedSoftmax) -> float:
    """A forward kernel of two products and, if there are gradients, a backward one of five, which makes the scores again."""
    ops, made = planned.graph.ops, part.scores
    forward = [part.weighted[0]] if part.weighted else []
    scores, moved = _flops(planned, made), _bytes(planned, made, ops[made].inputs)
    if forward:
        values = _flops(planned, forward[0])
        moved += _bytes(planned, forward[0], (*_others(planned, part, forward[0]), *ops[forward[0]].outputs))
    else:  # of what is computed again, nothing reads the result: values are as long as keys
        values, moved = scores, 2 * moved
    shape = _shape(planned, part)
    seconds = _kernel_seconds(planned, made, scores + values, moved, shape)
    if part.gradients:
        gradients = scores + math.fsum(_flops(planned, i) for i in set(part.products) - {made, *forward})
        seconds += _kernel_seconds(planned, made, gradients, 2 * moved, shape._replace(backward=True))
    return seconds


def _shape(planned: Planned, part: UnfusedSoftmax) -> Attention:
    """Of the forward kernel. Keys are what the scores are contracted over; of what is computed again, the scores' last dim."""
    op = planned.graph.ops[part.scores]
    contracted = op.params["dimension_numbers"][0][0]
    head, keys = math.prod(op.ins[0].shape[d] for d in contracted), op.outs[0].shape[-1]
    if part.weighted:
        i, k = part.weighted
        weighted = planned.graph.ops[i]
        keys = math.prod(weighted.ins[k].shape[d] for d in weighted.params["dimension_numbers"][0][k])
    return Attention(head, keys, causal=False, backward=False)


def _others(planned: Planned, part: UnfusedSoftmax, i: int) -> list[int | None]:
    """Operands of a product that are not the scores."""
    scores = {k for at, k in part.readers if at == i}
    return [v for k, v in enumerate(planned.graph.ops[i].inputs) if k not in scores]


def _loss_seconds(planned: Planned, part: UnfusedSoftmax) -> float:
    """The product; for a gradient once more, with those that read it. What is recomputed is the second time already."""
    ops, made = planned.graph.ops, part.scores
    readers = {i for i, _ in part.readers}
    flops, moved = _flops(planned, made), _bytes(planned, made, ops[made].inputs)
    forward = _kernel_seconds(planned, made, flops, moved)
    if not readers:
        return forward
    flops += math.fsum(_flops(planned, i) for i in readers)
    moved += math.fsum(_bytes(planned, i, ops[i].outputs) for i in readers)
    backward = _kernel_seconds(planned, made, flops, moved)
    return backward + forward * (ops[made].phase == "forward")


def _kernel_seconds(planned: Planned, at: int, flops: float, moved: float, attention: Attention | None = None) -> float:
    """Of one kernel for each run of an op, from flops and bytes of a step."""
    device, op = planned.space.cluster.device, planned.graph.ops[at]
    dtype = str(op.ins[0].dtype)
    half = dtype if dtype in HALF else HALF[0]
    rate = attention_rate(device, half, attention) if attention else device.flops_per_s(dtype)
    return max(flops / rate, moved / device.memory_rate, op.runs * device.kernel_latency_s)


def _flops(planned: Planned, i: int) -> float:
    """Of an op in a step on one device."""
    work = planned.space.strategies[i].work[planned.strategies[i]]
    return float((planned.space.rules[i].flops or 0.0) * work * planned.graph.ops[i].runs)


def _bytes(planned: Planned, i: int, values: Iterable[int | None]) -> float:
    """Of operands or results of an op in a step on one device, in the layouts in which it takes and makes them."""
    graph, mesh, op = planned.graph, planned.space.mesh, planned.graph.ops[i]
    layouts = {v: planned.operand_layout(i, k) for k, v in enumerate(op.inputs)}
    layouts |= {v: planned.result_layout(i, r) for r, v in enumerate(op.outputs)}
    known = ((graph.values[v], layouts[v]) for v in values if v is not None)
    return op.runs * math.fsum(math.prod(of.local_shape(x.shape, mesh)) * x.itemsize for x, of in known)
