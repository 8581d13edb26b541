"""Which ops of a step are attention or a cross-entropy written as products and elementwise ops, found by their structure.

    q k -> product -> scale, mask, bias, cast -> exp(. - max) -> / sum -> dropout, cast -> product with v      attention
    x w -> product -> cast, scale -> exp(. - max) -> sum -> log, and the label's logit -> loss                 cross-entropy

The scores are all arrays of as many elements as the first product makes, or almost, that elementwise work, views, slices, reductions
and broadcasts join, across the borders of loops and recomputation: those of the backward pass, too. What makes them or reads them as a
product is no part of them. They are a softmax if exponentials of the product are summed along one dim, with nothing but casts and masks
between. It is attention if a second product contracts that dim of the exponentials, normalised or masked, or if another product makes a
gradient of what follows them; else a cross-entropy, whose gradient is a difference.

Also known as scaled dot-product attention; softmax cross-entropy with logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from shardplan.ir.graph import Graph, Op
from shardplan.strategies.rule import Rule
from shardplan.xla_model.fusible import FUSIBLE
from shardplan.xla_model.kernel_groups import EXPONENTIALS

Kind = Literal["attention", "cross-entropy"]

MASKING = ("select_n", "mul", "div")
"""Primitives that mask or scale exponentials, if nothing else that they read depends on the product, but for a number per row."""

LEAST_PART = 0.9
"""Part of the scores that a slice has at least to stand for them: that of all positions but the last, from ten positions on."""
LARGE_VOCABULARY = 4096
"""Words from which a cross-entropy is fused with the product that makes its logits."""


@dataclass(frozen=True)
class UnfusedSoftmax:
    """One softmax between products, numbers of ops.

    Attributes:
        kind: what a fused kernel would be.
        exponential: the op that exponentiates the scores.
        between: all ops on the scores.
        scores: the product that makes them.
        gradients: products that make gradients of them.
        readers: (product, operand) that read them.
        weighted: the one of these that makes attention's result; None in what is recomputed for gradients alone.
        dropout: whether random numbers meet them.
    """

    kind: Kind
    exponential: int
    between: frozenset[int]
    scores: int
    gradients: tuple[int, ...]
    readers: tuple[tuple[int, int], ...]
    weighted: tuple[int, int] | None
    dropout: bool

    @property
    def products(self) -> tuple[int, ...]:
        """All products on either side."""
        return tuple(dict.fromkeys((self.scores, *self.gradients, *(i for i, _ in self.readers))))


def unfused_softmaxes(graph: Graph, rules: Sequence[Rule], kinds: Mapping[int, str]) -> list[UnfusedSoftmax]:
    """All of a step, in the order of the products that make their scores.

    Args:
        graph: the step.
        rules: per op.
        kinds: category of what each op makes (`costs.memory_categories`).
    """
    seen: set[int] = set()
    found = []
    for i, op in enumerate(graph.ops):
        if op.traits.matmul and i not in graph.dead and op.outputs[0] not in seen:
            scores = _Scores(graph, rules, op.outputs[0])
            seen |= scores.values
            if (of := scores.classified(kinds)) is not None:
                found.append(of)
    return found


class _Scores:
    """The arrays of as many elements as one product makes that ops other than products join, and these ops."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], v: int):
        self.graph, self.rules, self.size = graph, rules, prod(graph.values[v].shape)
        self.values = {v}
        self.ops: set[int] = set()
        self.makers: dict[int, None] = {}  # products, in the order in which they are found
        self.readers: dict[tuple[int, int], None] = {}
        self.needed = False  # outside: by the step's results, or by ops that no kernel fuses
        queue = [v]
        for at in queue:
            queue += [x for x in self._joined(at) if x not in self.values and not self.values.add(x)]

    def _joined(self, v: int) -> Iterator[int]:
        """The arrays on the other side of the ops around an array."""
        value, ops = self.graph.values[v], self.graph.ops
        alone = self._holds_scores(value.shape)  # else the stack of a loop's
        for i, k in ((value.producer[0], None), *value.consumers):
            op = ops[i]
            if i in self.graph.dead or op.traits.persistent or op.traits.loop_carry or op.traits.loop_next:
                continue
            if op.traits.step_output:
                self.needed = True
            elif op.traits.border:
                yield from (x for x in (*op.inputs, *op.outputs) if x is not None)
            elif alone and op.traits.matmul:
                if k is None:
                    self.makers[i] = None
                else:
                    self.readers[i, k] = None
            elif alone and self._is_fusible(i):
                self.ops.add(i)
                arrays = (x for x in (*op.inputs, *op.outputs) if x is not None)
                yield from (x for x in arrays if self._holds_scores(self.graph.values[x].shape))
            elif alone and k is not None:
                self.needed = True

    def _holds_scores(self, shape: Sequence[int]) -> bool:
        """Whether an array is as large as the product's result, or almost: logits of all positions but the last."""
        return LEAST_PART * self.size <= prod(shape) <= self.size

    def _is_fusible(self, i: int) -> bool:
        traits = self.graph.ops[i].traits
        makes_from_nothing = not any(prod(x.shape) > 1 for x in self.graph.ops[i].ins)
        return self.rules[i].fusion in FUSIBLE or traits.gather or bool(traits.scatter) or makes_from_nothing

    def classified(self, kinds: Mapping[int, str]) -> UnfusedSoftmax | None:
        """What a fused kernel would be; None where they are no softmax, or something else needs them."""
        exponentials = sorted(i for i in self.ops if self.graph.ops[i].primitive in EXPONENTIALS)
        if self.needed or not exponentials:
            return None
        derived = {i: self._derived(i) for i in self.makers}
        for maker, after in derived.items():
            for i in exponentials:
                if i not in after or (axis := self._summed_axis(i, after)) is None:
                    continue
                gradients = [x for x in derived if not any(e in derived[x] for e in exponentials)]
                found = self._found(maker, i, axis, after, gradients)
                if found.kind == "cross-entropy" and (len(derived) > 1 or self.graph.ops[i].ins[0].shape[axis] < LARGE_VOCABULARY):
                    return None
                return None if found.kind == "attention" and self._reads_parameters(found, kinds) else found
        return None

    def _found(self, maker: int, exponential: int, axis: int, after: set[int], gradients: list[int]) -> UnfusedSoftmax:
        """The softmax along this dim of what follows the product."""
        ops, readers, weights = self.graph.ops, tuple(self.readers), self._weights(after)
        made = [
            (i, k) for i, k in readers if i in weights and ops[i].inputs[k] in weights[i] and self._contracts(i, k, exponential, axis)
        ]
        kind: Kind = "attention" if gradients or made else "cross-entropy"
        weighted = min(made) if made else None
        return UnfusedSoftmax(kind, exponential, frozenset(self.ops), maker, tuple(gradients), readers, weighted, self._drawn())

    def _drawn(self) -> bool:
        """Whether a random number generator is among what makes them, up to products."""
        ops, seen, queue = self.graph.ops, set(self.ops), sorted(self.ops)
        for i in queue:
            if any(str(getattr(x, "dtype", "")).startswith("key<") for x in ops[i].ins):
                return True
            makers = {self.graph.values[v].producer[0] for v in ops[i].inputs if v is not None} - seen
            queue += sorted(x for x in makers if not ops[x].traits.matmul)
            seen |= makers
        return False

    def _weights(self, after: set[int]) -> dict[int, list[int]]:
        """Op -> its operands that are the exponentials, normalised, masked or scaled: nothing is added to them."""
        ops, values, found = self.graph.ops, self.graph.values, dict[int, list[int]]()
        queue = sorted(i for i in self.ops & after if ops[i].primitive in EXPONENTIALS)
        for at in queue:
            for v in ops[at].outputs:
                for i, _ in values[v].consumers:
                    found.setdefault(i, []).append(v)
                    others = [x for x in ops[i].inputs if x not in (None, v) and values[x].producer[0] in after]
                    rows = all(not self._holds_scores(values[x].shape) or ops[values[x].producer[0]].traits.broadcast for x in others)
                    scales = ops[i].primitive in MASKING and rows
                    if i not in queue and (scales or ops[i].traits.border or ops[i].forwards_value):
                        queue.append(i)
        return found

    def _contracts(self, i: int, k: int, exponential: int, axis: int) -> bool:
        """Whether a product of several rows contracts the dim along which the exponentials are summed."""
        contracted, batch = (dims[k] for dims in self.graph.ops[i].params["dimension_numbers"])
        shape, scores = self.graph.ops[i].ins[k].shape, self.graph.ops[exponential].outs[0].shape
        if self.size == prod(shape[d] for d in (*contracted, *batch)):
            return False
        return tuple(contracted) == (axis,) if shape == scores else prod(shape[d] for d in contracted) == scores[axis]

    def _derived(self, maker: int) -> set[int]:
        """The ops that depend on a product's result, up to the next products."""
        found, queue = set[int](), [maker]
        for at in queue:
            for i in (i for v in self.graph.ops[at].outputs for i, _ in self.graph.values[v].consumers):
                if i not in found:
                    found.add(i)
                    if self.graph.ops[i].traits.border or self._is_fusible(i):
                        queue.append(i)
        return found

    def _summed_axis(self, exponential: int, derived: set[int]) -> int | None:
        """The dim along which the exponentials are summed; None if they are not."""
        ops, queue = self.graph.ops, [exponential]
        for at in queue:
            for i in (i for v in ops[at].outputs for i, _ in self.graph.values[v].consumers):
                op = ops[i]
                if op.traits.sum_reduction and len(op.params["axes"]) == 1 and op.ins[0].shape == ops[exponential].outs[0].shape:
                    return op.params["axes"][0]
                if i not in queue and (op.traits.border or op.forwards_value or self._masks(op, derived)):
                    queue.append(i)
        return None

    def _masks(self, op: Op, derived: set[int]) -> bool:
        makers = [self.graph.values[v].producer[0] for v in op.inputs if v is not None]
        return op.primitive in MASKING and sum(i in derived for i in makers) == 1

    def _reads_parameters(self, found: UnfusedSoftmax, kinds: Mapping[int, str]) -> bool:
        """Whether the product makes the scores of a parameter, or the values are one: a layer, no attention."""
        ops, operands = self.graph.ops, list(self.graph.ops[found.scores].inputs)
        if found.weighted is not None:
            operands += [v for k, v in enumerate(ops[found.weighted[0]].inputs) if k != found.weighted[1]]
        origins = (self.graph.origin(v, lambda i: ops[i].forwards_value or ops[i].traits.border) for v in operands if v is not None)
        return any(kinds[self.graph.values[v].producer[0]] == "parameters" for v in origins)
