"""cuDNN's attention on the CPU, for proofs: lowerings that compute what the kernels are specified to compute."""

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.interpreters import mlir


def attend(q, k, v, bias, q_lengths, kv_lengths, *, scale, mask_type, layout):
    """(result, logsumexp of every row) in float32."""
    if layout == 0:  # sequence before heads
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    q, k, v = (x.astype("float32") for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("bnth,bnsh->bnts", q, k) * scale
    logits = logits + bias.astype("float32") if bias.size else logits
    rows, columns = jnp.arange(q.shape[2])[:, None], jnp.arange(k.shape[2])
    seen = jnp.ones((q.shape[0], 1, *logits.shape[2:]), bool)
    if mask_type in (2, 3):
        seen &= rows >= columns
    if mask_type in (1, 3):
        seen &= (rows < q_lengths[:, None, None, None]) & (columns < kv_lengths[:, None, None, None])
    logits = jnp.where(seen, logits, -1e9)
    out = jnp.einsum("bnts,bnsv->bntv", jax.nn.softmax(logits), v)
    return jnp.swapaxes(out, 1, 2) if layout == 0 else out, jax.nn.logsumexp(logits, -1)


def forward(q, k, v, bias, q_lengths, kv_lengths, *_, scale, mask_type, layout, is_training, **__):
    kind = int(getattr(mask_type, "value", mask_type))
    out, stats = attend(q, k, v, bias, q_lengths, kv_lengths, scale=scale, mask_type=kind, layout=layout)
    return [out.astype(q.dtype), stats][: 1 + is_training]


def backward(q, k, v, bias, q_lengths, kv_lengths, *rest, scale, mask_type, layout, variadic_args, **_):
    def run(q, k, v, bias):
        kind = int(getattr(mask_type, "value", mask_type))
        return attend(q, k, v, bias, q_lengths, kv_lengths, scale=scale, mask_type=kind, layout=layout)[0]

    return list(jax.vjp(run, q, k, v, bias)[1](rest[-1].astype("float32")))[: 3 + variadic_args[1]]


def install() -> None:
    """Make the kernels run on the CPU in this process."""
    for primitive, run in ((cudnn._dot_product_attention_fwd_p, forward), (cudnn._dot_product_attention_bwd_p, backward)):
        mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform="cpu")
