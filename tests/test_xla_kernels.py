"""Kernels of small programs on one device: XLA's read and write as many bytes as those that are planned."""

import jax
import jax.numpy as jnp
import pytest
from test_fusion import F32, S, megabytes, needs_gpu_compiler

from shardplan.xla import compile
from shardplan.xla.hlo.schedule import kernels

BF16, I32 = jnp.bfloat16, jnp.int32
X, AT, ROWS = S((4096, 1024), F32), S((256,), I32), S((256, 1024), F32)


def scattered(at, rows):
    return jnp.zeros(X.shape, rows.dtype).at[at].add(rows)


def picked(w, x, labels):
    """The loss of a classifier by the logits at its labels."""
    logits = (x @ w).astype(F32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()


INTO_SUM = {
    "an input": (lambda x, at, rows: x + scattered(at, rows), (X, AT, ROWS)),
    "what a kernel makes": (lambda x, at, rows: jnp.tanh(x) + scattered(at, rows), (X, AT, ROWS)),
    "what another one reads, too": (
        lambda x, at, rows: (lambda y: (jnp.exp(y + scattered(at, rows)), y))(jnp.tanh(x)), (X, AT, ROWS)),
    "with a kernel behind the sum": (lambda x, at, rows: jnp.exp(jnp.tanh(x) + scattered(at, rows)), (X, AT, ROWS)),
    "no sum": (lambda x, at, rows: jnp.tanh(x) - scattered(at, rows), (X, AT, ROWS)),
    "gradients of logits": (jax.grad(picked), (S((512, 16000), BF16), S((4096, 512), BF16), S((4096,), I32))),
}  # fmt: skip


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("name", INTO_SUM)
def test_a_scatter_into_zeros_that_are_added_to_something_writes_into_that(name):
    fun, args = INTO_SUM[name]
    assert megabytes(fun, *args) == pytest.approx(emitted_megabytes(fun, *args), rel=0.02)


def emitted_megabytes(fun, *args) -> float:
    done = compile(jax.jit(fun), *args, target="h100:1")
    assert done.ok, done.error
    return sum(work.bytes * runs for work, runs in kernels(done.module).values()) / 1e6
