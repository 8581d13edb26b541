"""cuDNN's attention on the CPU, for proofs: lowerings that compute what the kernels are specified to compute.

Inside, tensors are (batch, heads, sequence, depth) in float32. What lies beyond the end of a sequence is zero in every result.
"""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir

PADDING, CAUSAL, ALIBI = (1, 3), (2, 3), (4,)
"""Values of `MaskType` with each."""


def turn(x, layout):
    """From the order of the layout to heads before the sequence, and back."""
    return jnp.swapaxes(x, 1, 2) if layout == 0 else x


def of_heads(x, q):
    """Keys or values, repeated for the query heads that share them."""
    return jnp.repeat(x, q.shape[1] // x.shape[1], axis=1)


def of_groups(x, k):
    """Gradients by `of_heads(k)`, summed to gradients by k."""
    return x.reshape(k.shape[0], k.shape[1], -1, *k.shape[2:]).sum(2)


def look_up(pages, table):
    """Keys or values of every row: pages (page, heads, place, depth) that its row of the table (batch, 1, number, 1) lists in order."""
    x = jnp.moveaxis(pages[table[:, 0, :, 0]], 2, 1)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def places(x, offsets, lengths):
    """(segment, place) -> token among those of the whole batch, one past the last where there is none; offsets count elements."""
    batch, heads, tokens, depth = x.shape
    starts = offsets.reshape(-1)[: lengths.size, None] // (heads * depth)
    at = jnp.arange(tokens)
    return jnp.where(at < lengths.reshape(-1, 1), starts + at, batch * tokens)


def split(x, at):
    """Packed sequences, each in a row of its own."""
    tokens = jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])
    return jnp.swapaxes(tokens.at[at].get(mode="fill", fill_value=0), 1, 2)


def join(rows, at, batch):
    """The opposite of `split`."""
    _, heads, tokens, depth = rows.shape
    x = jnp.zeros((batch * tokens, heads, depth)).at[at].set(jnp.swapaxes(rows, 1, 2), mode="drop")
    return jnp.swapaxes(x.reshape(batch, tokens, heads, depth), 1, 2)


def visible(q, k, lengths, kind, window):
    """Which keys each query sees."""
    row, column = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    seen = jnp.ones((1, 1, q.shape[2], k.shape[2]), bool)
    if kind in CAUSAL:
        seen &= column <= row
    if window:
        seen &= column > row - window
    if lengths:
        ends = [x.reshape(-1, 1, 1, 1) for x in lengths]
        seen &= (row < ends[0]) & (column < ends[1])
    return seen


def distances(q, k):
    """ALiBi's bias: slopes, one per head, times the distance."""
    heads = q.shape[1]
    slopes = 2.0 ** (-8 * jnp.arange(1, heads + 1) / heads)
    return slopes[:, None, None] * (jnp.arange(k.shape[2]) - jnp.arange(q.shape[2])[:, None])


def scores(q, k, bias, seen, scale):
    return jnp.where(seen, jnp.einsum("bnth,bnsh->bnts", q, of_heads(k, q)) * scale + bias, -1e9)


def unpack(q, k, v, bias, q_lengths, kv_lengths, q_offsets, kv_offsets, k_table, v_table, *, mask_type, layout, window):
    """(q, k, v), a bias of the scores, the mask, and places of packed queries and keys if there are any."""
    kind = int(getattr(mask_type, "value", mask_type))
    q, k, v = (turn(x, layout).astype("float32") for x in (q, k, v))
    paged, packed, at = k_table.ndim == 4, q_offsets.ndim == 2 and q_offsets.shape[1] > 2, ()
    if paged:
        k, v = look_up(k, k_table), look_up(v, v_table)
    if packed:
        at = places(q, q_offsets, q_lengths), places(k, kv_offsets, kv_lengths)
        q, k, v = split(q, at[0]), split(k, at[1]), split(v, at[1])
    lengths = (q_lengths, kv_lengths) if kind in PADDING or packed or paged else ()
    bias = (bias.astype("float32") if bias.size else 0.0) + (distances(q, k) if kind in ALIBI else 0.0)
    return (q, k, v), bias, visible(q, k, lengths, kind, window), at


def forward(q, *operands, scale, mask_type, layout, is_training, sliding_window_length, **_):
    (rows, k, v), bias, seen, at = unpack(q, *operands[:9], mask_type=mask_type, layout=layout, window=sliding_window_length)
    logits = scores(rows, k, bias, seen, scale)
    some = seen.any(-1)
    out = jnp.where(some[..., None], jnp.einsum("bnts,bnsv->bntv", jax.nn.softmax(logits), of_heads(v, rows)), 0.0)
    out = join(out, at[0], q.shape[0]) if at else out
    return [turn(out, layout).astype(q.dtype), jnp.where(some, jax.nn.logsumexp(logits, -1), 0.0)][: 1 + is_training]


def backward(q, k, v, bias, *operands, scale, mask_type, layout, variadic_args, sliding_window_length, **_):
    *extras, stats, out, grad = operands
    options = {"mask_type": mask_type, "layout": layout, "window": sliding_window_length}
    (rows, keys, values), added, seen, at = unpack(q, k, v, bias, *extras, **options)
    out, grad = (turn(x, layout).astype("float32") for x in (out, grad))
    out, grad = (split(out, at[0]), split(grad, at[0])) if at else (out, grad)
    p = jnp.where(seen, jnp.exp(scores(rows, keys, added, seen, scale) - stats[..., None]), 0.0)
    dp = jnp.einsum("bntv,bnsv->bnts", grad, of_heads(values, rows))
    ds = p * (dp - (grad * out).sum(-1, keepdims=True))
    dq = jnp.einsum("bnts,bnsh->bnth", ds, of_heads(keys, rows)) * scale
    dk = of_groups(jnp.einsum("bnts,bnth->bnsh", ds, rows) * scale, keys)
    dv = of_groups(jnp.einsum("bnts,bntv->bnsv", p, grad), values)
    if at:
        dq, dk, dv = (join(x, a, q.shape[0]) for x, a in ((dq, at[0]), (dk, at[1]), (dv, at[1])))
    results = [turn(x, layout).astype(y.dtype) for x, y in ((dq, q), (dk, k), (dv, v))]
    shared = [d for d in (0, 1) if variadic_args[1] and bias.shape[d] == 1]
    return [*results, ds.sum(shared, keepdims=True).astype(bias.dtype)][: 3 + variadic_args[1]]


def largest(x):
    return jnp.abs(x).max().reshape(1, 1, 1, 1)


def rounded(x, dtype):
    """To float8, ending at its largest numbers."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def forward_fp8(q, k, v, of_q, of_k, of_v, of_s, to_s, to_o, *, scale, use_causal_mask, layout, is_training):
    """Scales `of_` a tensor undo its scaling, scales `to_` one are applied before it is rounded."""
    kind, (q, k, v) = q.dtype, (turn(x, layout).astype("float32") for x in (q, k, v))
    logits = scores(q * of_q, k * of_k, 0.0, visible(q, k, (), 2 * use_causal_mask, None), scale)
    p = jax.nn.softmax(logits)
    p8 = rounded(p * to_s, kind).astype("float32")
    out = jnp.einsum("bnts,bnsv->bntv", p8 * of_s, of_heads(v * of_v, q))
    return [rounded(turn(out * to_o, layout), kind), largest(p), largest(out), jax.nn.logsumexp(logits, -1)][: 3 + is_training]


def backward_fp8(q, k, v, out, grad, stats, *scales, scale, use_causal_mask, layout):
    of_q, of_k, of_v, of_o, of_do, of_s, of_dp, to_s, to_dq, to_dk, to_dv, to_dp = scales
    kind, (q, k, v, out, grad) = q.dtype, (turn(x, layout).astype("float32") for x in (q, k, v, out, grad))
    q, k, v, out, grad = q * of_q, k * of_k, v * of_v, out * of_o, grad * of_do
    seen = visible(q, k, (), 2 * use_causal_mask, None)
    p = jnp.where(seen, jnp.exp(scores(q, k, 0.0, seen, scale) - stats[..., None]), 0.0)
    p8 = rounded(p * to_s, kind).astype("float32") * of_s
    dp = p * (jnp.einsum("bntv,bnsv->bnts", grad, of_heads(v, q)) - (grad * out).sum(-1, keepdims=True)) * scale
    dp8 = rounded(dp * to_dp, kind).astype("float32") * of_dp
    dq = jnp.einsum("bnts,bnsh->bnth", dp8, of_heads(k, q))
    dk = of_groups(jnp.einsum("bnts,bnth->bnsh", dp8, q), k)
    dv = of_groups(jnp.einsum("bnts,bntv->bnsv", p8, grad), v)
    results = [rounded(turn(x * to, layout), kind) for x, to in ((dq, to_dq), (dk, to_dk), (dv, to_dv))]
    return [*results, *map(largest, (dq, dk, dv, dp))]


KERNELS = {
    cudnn._dot_product_attention_fwd_p: forward,
    cudnn._dot_product_attention_bwd_p: backward,
    cudnn._dot_product_attention_fp8_fwd_p: forward_fp8,
    cudnn._dot_product_attention_fp8_bwd_p: backward_fp8,
}


def install() -> None:
    """Make the kernels run on the CPU in this process."""
    for primitive, run in KERNELS.items():
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")
