"""cuDNN's fused attention: batch and heads shard; sequences and the dims of a head do not.

fwd   b t (m g) h, b s m h, b s m v, ... -> b t (m g) v, b (m g) t         g query heads share a key head
bwd   the same, b (m g) t, b t (m g) v, b t (m g) v -> b t (m g) h, b s m h, b s m v, 1 (m g) t s    a bias' gradient is reduced over b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardplan.ir.traits import Traits
from shardplan.mesh.rates import Attention
from shardplan.strategies.rule import Dims, Rule, factors, flat_factors, rule
from shardplan.strategies.rules.kernel import unsharded_rule

ATTENTION = Traits(fused_attention=True)

CAUSAL, ALIBI = (2, 3), (4,)
"""Values of `MaskType` with a causal mask, and with a bias that grows with the distance, by the number of the head."""


@dataclass(frozen=True)
class Heads:
    """Dims of queries, keys and values in one of cuDNN's two orders, (batch, sequence, heads) or (batch, heads, sequence)."""

    query: Any
    key: Any
    value: Any
    heads_first: bool

    def tensor(self, batch: str, sequence: str, heads: tuple[str, ...], depth: str) -> Dims:
        """A tensor's factors in this order."""
        middle = (heads, (sequence,)) if self.heads_first else ((sequence,), heads)
        return ((batch,), *middle, (depth,))

    def count(self, x) -> int:
        """Its number of heads."""
        return x.shape[1 if self.heads_first else 2]

    def length(self, x) -> int:
        """Length of its sequences."""
        return x.shape[2 if self.heads_first else 1]

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.count(self.query) // self.count(self.key)

    @property
    def query_heads(self) -> tuple[str, ...]:
        """Factors of a dim of query heads."""
        return ("m", "g") if self.groups > 1 else ("m",)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the factors in it."""
        return {"m": self.count(self.key), "g": self.groups} if self.groups > 1 else {}

    def work(self, products: tuple[int, int], causal: bool, window: int | None = None, pages: int = 1) -> Work:
        """Of so many products over a query's depth and over a value's, of the pairs of queries and keys that masks leave."""
        keys = self.length(self.value) * pages
        pairs = self.query.shape[0] * self.count(self.query) * self.length(self.query) * keys
        seen = min(0.5 if causal else 1.0, window / keys if window else 1.0)
        flops = 2.0 * pairs * seen * (products[0] * self.query.shape[3] + products[1] * self.value.shape[3])
        return flops, Attention(self.query.shape[3], min(keys, window or keys), causal, products == BACKWARD)


Work = tuple[float, Attention]
"""Flops of an attention kernel, and what decides how fast they are."""

FORWARD, BACKWARD = (1, 1), (3, 2)
"""Products over the depth of queries and of values: q k, p v; again q k, then its two gradients, and those of p and v."""


def _unused(x, k: int) -> Dims:
    return factors(x, f"u{k}_")


@dataclass(frozen=True)
class Extras:
    """What else the kernels take, each an empty array where it is not used: bias, lengths, offsets of packed sequences, page tables."""

    bias: Any
    rest: tuple[Any, ...]

    @property
    def segments(self) -> int:
        """Packed sequences per row of the batch."""
        return max(1, self.rest[2].shape[1] - 1) if len(self.rest[2].shape) == 2 else 1

    @property
    def paged(self) -> bool:
        """Whether keys and values are pages that tables point into."""
        return 0 not in self.rest[4].shape

    @property
    def pages(self) -> int:
        """Pages of values per row of the batch; one where there are no tables."""
        return self.rest[5].shape[2] if self.paged else 1

    def bias_dims(self, heads: Heads) -> Dims:
        """Factors of the bias; a dim of one is shared."""
        names = (("b",), heads.query_heads, ("bt",), ("bs",))
        if 0 in self.bias.shape:
            return _unused(self.bias, 0)
        return tuple(name if n > 1 else () for name, n in zip(names, self.bias.shape, strict=True))

    def dims(self, heads: Heads) -> tuple[Dims, ...]:
        """Factors of all of them."""
        named = [_unused(x, k) if 0 in x.shape else (("b",), *_unused(x, k)[1:]) for k, x in enumerate(self.rest, 1)]
        return (self.bias_dims(heads), *named)


def _free(extras: Extras, mask_type) -> frozenset[str]:
    """Factors that shard. Of packed sequences the order of segments depends on the whole batch; gradients would not find theirs."""
    return frozenset("m" if extras.segments > 1 else "bm") - frozenset("m" if _number(mask_type) in ALIBI else "")


def _rule(operands, results, free: frozenset[str], sizes, work: Work, reduce: dict[str, str] | None = None) -> Rule:
    names = frozenset(flat_factors(*operands, *results))
    found = {"reduce": reduce or {}, "replicated": names - free, "shard_local": free & names, "sizes": sizes}
    return Rule(operands, results, flops=work[0], attention=work[1], **found)


def _queries_keys_values(heads: Heads, extras: Extras | None) -> tuple[Dims, Dims, Dims]:
    of_keys, of_values = (("kp", "ks"), ("vp", "vs")) if extras is not None and extras.paged else (("b", "s"),) * 2
    q = heads.tensor("b", "t", heads.query_heads, "h")
    return q, heads.tensor(*of_keys, ("m",), "h"), heads.tensor(*of_values, ("m",), "v" if _is_wider(heads) else "h")


def _is_wider(heads: Heads) -> bool:
    return heads.query.shape[3] != heads.value.shape[3]


DROPOUT = "cuDNN's dropout draws by position in the batch, so shards would draw the same masks"
SCORE_MOD = "its score_mod may depend on positions, which shards would count from their own start"
PAGED_GRADIENT = "cuDNN has no gradient of pages"


def _not_sharded(dropout_rate: float, score_mod) -> str:
    """Why no factor shards; "" where some do."""
    return DROPOUT if dropout_rate else SCORE_MOD if score_mod is not None else ""


def _statistics(heads: Heads, extras: Extras) -> tuple[Dims, dict[str, int]]:
    """Factors of the softmax statistics, and sizes in them."""
    n = extras.segments
    return ((("b", "seg") if n > 1 else ("b",)), heads.query_heads, ("t",)), {"seg": n, "b": heads.query.shape[0]} if n > 1 else {}


@rule("dot_product_attention_fwd_wrapper", traits=ATTENTION)
def attention_forward(q, k, v, bias, *rest, out, layout, mask_type, dropout_rate, sliding_window_length=None, score_mod=None, **_):
    if why := _not_sharded(dropout_rate, score_mod):
        return unsharded_rule((q, k, v, bias, *rest), out, why)
    heads, extras = Heads(q, k, v, layout == 1), Extras(bias, rest)
    of_q, of_k, of_v = _queries_keys_values(heads, extras)
    of_stats, sizes = _statistics(heads, extras)
    made = (of_q[:-1] + of_v[-1:], of_stats)[: len(out)]
    work = heads.work(FORWARD, _number(mask_type) in CAUSAL, sliding_window_length, extras.pages)
    return _rule((of_q, of_k, of_v, *extras.dims(heads)), made, _free(extras, mask_type), heads.sizes | sizes, work)


@rule("dot_product_attention_bwd_wrapper", traits=ATTENTION)
def attention_backward(q, k, v, bias, *rest, out, layout, mask_type, dropout_rate, sliding_window_length=None, score_mod=None, **_):
    heads, extras = Heads(q, k, v, layout == 1), Extras(bias, rest[:6])
    if why := _not_sharded(dropout_rate, score_mod) or (PAGED_GRADIENT if extras.paged else ""):
        return unsharded_rule((q, k, v, bias, *rest), out, why)
    free = _free(extras, mask_type)
    of_q, of_k, of_v = _queries_keys_values(heads, extras)
    of_stats, sizes = _statistics(heads, extras)
    of_out, of_bias = of_q[:-1] + of_v[-1:], extras.bias_dims(heads)
    operands = (of_q, of_k, of_v, *extras.dims(heads), of_stats, of_out, of_out)
    shared = free - set(flat_factors(of_bias)) if len(out) == 4 else ()
    return _rule(
        operands,
        (of_q, of_k, of_v, of_bias)[: len(out)],
        free,
        heads.sizes | sizes,
        heads.work(BACKWARD, _number(mask_type) in CAUSAL, sliding_window_length),
        dict.fromkeys(sorted(shared), "sum"),
    )


def _scalars(xs) -> tuple[Dims, ...]:
    """Scales and largest values: arrays of ones."""
    return tuple(((),) * len(x.shape) for x in xs)


@rule("dot_product_attention_fp8_fwd_wrapper", traits=ATTENTION)
def attention_forward_fp8(q, k, v, *scales, out, layout, use_causal_mask, **_):
    heads = Heads(q, k, v, layout == 1)
    of_q, of_k, of_v = _queries_keys_values(heads, None)
    made = (of_q, *_scalars(out[1:3]), (("b",), heads.query_heads, ("t",)))[: len(out)]
    work = heads.work(FORWARD, use_causal_mask)
    return _rule((of_q, of_k, of_v, *_scalars(scales)), made, frozenset("bm"), heads.sizes, work, {"b": "max", "m": "max"})


@rule("dot_product_attention_fp8_bwd_wrapper", traits=ATTENTION)
def attention_backward_fp8(q, k, v, made, grad, stats, *scales, out, layout, use_causal_mask, **_):
    heads = Heads(q, k, v, layout == 1)
    of_q, of_k, of_v = _queries_keys_values(heads, None)
    operands = (of_q, of_k, of_v, of_q, of_q, (("b",), heads.query_heads, ("t",)), *_scalars(scales))
    results = (of_q, of_k, of_v, *_scalars(out[3:]))
    return _rule(operands, results, frozenset("bm"), heads.sizes, heads.work(BACKWARD, use_causal_mask), {"b": "max", "m": "max"})


def _number(mask_type) -> int:
    return int(getattr(mask_type, "value", mask_type))
