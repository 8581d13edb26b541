"""Every Pallas kernel that jax ships, and Tokamax': which digits of its grid the planner may shard, and why not the others.

    python benchmarks/pallas_kernels.py               a row per call that the kernel's function (and its gradient) makes
    python benchmarks/pallas_kernels.py --only tpu    functions with a word in their name

Kernels are traced, not run; functions that ask the device for its kind or its number of cores are told those of an H100. Kernels that
are collectives (`all_gather_mgpu`, `reduce_scatter_mgpu`, `collective_matmul_mgpu`, `tpu.all_gather`) are missing: they run under
`jax.shard_map`, inside of which the planner splits nothing. Tokamax' are there where `pip install tokamax` was.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from shardplan import _jax
from shardplan.strategies.kernel.grid import kernel_grid

OPS = "jax.experimental.pallas.ops"
CALLS = "pallas_call", "core_map", "mpmd_map"
DEFAULT_DEVICE = "jax.extend.backend.get_default_device"
FUNCTIONS: dict[str, Callable] = {}
"""Name of a module -> a function that traces what it offers."""


def kernel(*modules: str):
    """Register a function of the imported modules under the name of the first."""

    def register(fn):
        FUNCTIONS[modules[0]] = lambda: fn(*(importlib.import_module(f"{OPS}.{m}") for m in modules))
        return fn

    return register


def tokamax_kernel(implementation: str):
    """Register a function of Tokamax and the name of its implementation, where it is installed."""

    def register(fn):
        if find_spec("tokamax"):
            name = f"tokamax.{fn.__name__} ({implementation})"
            FUNCTIONS[name] = lambda: fn(importlib.import_module("tokamax"), implementation)
        return fn

    return register


class Hopper:
    """What functions ask of a device while they are traced."""

    platform = "gpu"
    device_kind = "NVIDIA H100 80GB HBM3"
    compute_capability = "9.0"
    core_count = 132


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def grad(fn, *args):
    """The jaxpr of a function and its gradient by all arguments."""
    return jax.make_jaxpr(jax.grad(lambda *xs: fn(*xs).astype("float32").sum(), tuple(range(len(args)))))(*args)


def halves(*shapes):
    return [array(*s, dtype="float16") for s in shapes]


GROUPS = array(8, dtype="int32")
PAGED = array(8, dtype="int32"), array(8, 16, dtype="int32")


@kernel("gpu.attention")
def _(m):
    q, sizes = array(4, 256, 8, 64), m.BlockSizes(64, 64, 64, 64, 64, 64)
    return grad(lambda q, k, v: m.mha(q, k, v, None, causal=True, block_sizes=sizes), q, q, q)


@kernel("gpu.decode_attention")
def _(m):
    return jax.make_jaxpr(m.gqa)(array(4, 8, 64), array(4, 1024, 2, 64), array(4, 1024, 2, 64))


@kernel("gpu.layer_norm")
def _(m):
    return grad(m.layer_norm, array(8, 128, 256), array(256), array(256))


@kernel("gpu.rms_norm")
def _(m):
    return grad(m.rms_norm, array(8, 128, 256), array(256), array(256))


@kernel("gpu.softmax")
def _(m):
    return jax.make_jaxpr(m.softmax)(array(128, 256))


@kernel("gpu.paged_attention")
def _(m):
    lengths, pages = PAGED
    return jax.make_jaxpr(m.paged_attention)(array(8, 8, 64), array(2, 64, 16, 64), array(2, 64, 16, 64), pages, lengths)


TILES = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "max_concurrent_steps": 2}
BLOCKS = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2, "grid_block_n": 1}


@kernel("gpu.attention_mgpu")
def _(m):
    config = m.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)
    return jax.make_jaxpr(lambda *qkv: m.attention(*qkv, config))(*halves(*[(2, 1024, 4, 64)] * 3))


@kernel("gpu.hopper_matmul_mgpu")
def _(m):
    return jax.make_jaxpr(lambda a, b: m.matmul(a, b, None, m.TuningConfig(**TILES)))(*halves((512, 512), (512, 512)))


@kernel("gpu.hopper_mixed_type_matmul_mgpu")
def _(m):
    def run(a, b):
        return m.mixed_matmul_kernel(a, b, out_dtype=jnp.bfloat16, config=m.TuningConfig(**TILES))

    return jax.make_jaxpr(run)(array(512, 512, dtype="int8"), array(512, 512, dtype="bfloat16"))


@kernel("gpu.blackwell_matmul_mgpu")
def _(m):
    config = m.TuningConfig(**TILES | {"tile_m": 128}, collective=False)
    return jax.make_jaxpr(lambda a, b: m.matmul_kernel(a, b, config))(*halves((512, 512), (512, 512)))


@kernel("gpu.ragged_dot_mgpu")
def _(m):
    def run(a, b, groups):
        return m.ragged_dot(a, b, group_sizes=groups, **BLOCKS)

    return jax.make_jaxpr(run)(*halves((1024, 256), (8, 256, 512)), GROUPS)


@kernel("gpu.transposed_ragged_dot_mgpu")
def _(m):
    def run(a, b, groups):
        return m.transposed_ragged_dot(a, b, group_sizes=groups, **BLOCKS)

    return jax.make_jaxpr(run)(*halves((1024, 256), (1024, 512)), GROUPS)


@kernel("gpu.blackwell_ragged_dot_mgpu", "gpu.blackwell_matmul_mgpu")
def _(m, dims):
    config = m.TuningConfig(**TILES | {"tile_m": 128}, collective=False, grid_tile_width=1, grid_minor_dim=dims.MatmulDimension.N)

    def run(a, b, groups):
        return m.ragged_dot_kernel(a, b, groups, config)

    return jax.make_jaxpr(run)(*halves((1024, 256), (8, 256, 512)), GROUPS)


@kernel("tpu.flash_attention")
def _(m):
    q = array(4, 8, 512, 128)
    return grad(lambda q, k, v: m.flash_attention(q, k, v, causal=True), q, q, q)


@kernel("tpu.matmul")
def _(m):
    return jax.make_jaxpr(lambda a, b: m.matmul(a, b, block_shape=(256, 256), block_k=256))(array(1024, 1024), array(1024, 1024))


@kernel("tpu.example_kernel")
def _(m):
    return jax.make_jaxpr(m.double)(array(128, 128))


@kernel("tpu.megablox.gmm")
def _(m):
    return jax.make_jaxpr(lambda a, b, g: m.gmm(a, b, g, interpret=True))(array(1024, 256), array(8, 256, 512), GROUPS)


@kernel("tpu.paged_attention")
def _(m):
    lengths, pages = PAGED

    def run(q, k, v, *rest):
        return m.paged_attention(q, k, v, *rest, pages_per_compute_block=4)

    return jax.make_jaxpr(run)(array(8, 8, 128), array(2, 64, 16, 128), array(2, 64, 16, 128), lengths, pages)


@kernel("tpu.ragged_paged_attention")
def _(m):
    lengths, pages = PAGED

    def run(*xs):
        return m.ragged_paged_attention(*xs, num_kv_pages_per_block=4, num_queries_per_block=8)

    ends, count = array(9, dtype="int32"), array(1, dtype="int32")
    return jax.make_jaxpr(run)(array(64, 8, 128), array(64, 16, 4, 128), lengths, pages, ends, count)


@kernel("tpu.splash_attention.splash_attention_kernel", "tpu.splash_attention.splash_attention_mask")
def _(m, masks):
    mask = masks.MultiHeadMask([masks.CausalMask((512, 512))] * 8)
    attend = m.make_splash_mha(mask, head_shards=1, q_seq_shards=1, interpret=True)
    q = array(4, 8, 512, 128)
    return grad(lambda q, k, v: jax.vmap(attend)(q, k, v), q, q, q)


@kernel("tpu.random.philox")
def _(m):
    def run(key):
        return m.philox_4x32_kernel(key, (512, 512), unpadded_shape=(512, 512), block_size=(256, 256))

    return jax.make_jaxpr(run)(array(2, dtype="uint32"))


@kernel("tpu.random.threefry")
def _(m):
    def run(key):
        return m.threefry_2x32_count(key, (512, 512), unpadded_shape=(512, 512), block_size=(256, 256))

    return jax.make_jaxpr(run)(array(2, dtype="uint32"))


@tokamax_kernel("triton")
@tokamax_kernel("mosaic")
def dot_product_attention(m, implementation):
    q = array(4, 256, 8, 64, dtype="bfloat16")
    return grad(lambda q, k, v: m.dot_product_attention(q, k, v, implementation=implementation), q, q, q)


@tokamax_kernel("triton")
def layer_norm(m, implementation):
    x, scale = array(4, 256, 512, dtype="bfloat16"), array(512, dtype="bfloat16")
    return grad(lambda x, scale, offset: m.layer_norm(x, scale, offset, implementation=implementation), x, scale, scale)


@tokamax_kernel("triton")
@tokamax_kernel("mosaic")
def gated_linear_unit(m, implementation):
    x, w = array(1024, 512, dtype="bfloat16"), array(512, 2, 1024, dtype="bfloat16")
    return jax.make_jaxpr(lambda x, w: m.gated_linear_unit(x, w, activation=jax.nn.silu, implementation=implementation))(x, w)


@tokamax_kernel("triton")
@tokamax_kernel("mosaic")
def ragged_dot(m, implementation):
    x, w = array(1024, 512, dtype="bfloat16"), array(8, 512, 1024, dtype="bfloat16")
    return jax.make_jaxpr(lambda x, w, groups: m.ragged_dot(x, w, groups, implementation=implementation))(x, w, GROUPS)


def rows(name: str, trace: Callable):
    """(function, kernel, grid, digits that may be sharded, why not the others) per call."""
    hopper = lambda *_: [Hopper()]  # noqa: E731
    try:
        with mock.patch.multiple(jax, devices=hopper, local_devices=hopper), mock.patch(DEFAULT_DEVICE, Hopper):
            closed = trace()
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        yield name, "", "", "", f"it cannot be traced here: {error or type(error).__name__}".splitlines()[0]
        return
    for eqn in _jax.equations(closed.jaxpr):
        if (primitive := eqn.primitive.name) not in CALLS:
            continue
        kernel = str(eqn.params.get("name") or "")
        if primitive != "pallas_call":
            yield name, kernel, "", "", f"{primitive}: no block mappings"
            continue
        grid = "x".join(map(str, eqn.params["grid_mapping"].grid)) or "1"
        found = kernel_grid(eqn.params, len(eqn.invars))
        if isinstance(found, str):
            yield name, kernel, grid, "", found
        else:
            stopped = "; ".join(f"{d.name}: {why}" for d, why in sorted(found.stopped.items()))
            yield name, kernel, grid, " ".join(sorted(d.name for d in found.free)), stopped or found.reason


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="functions with this word in their name")
    only = parser.parse_args().only
    logging.disable()  # Tokamax logs the traceback of an error that it raises,
    del sys.argv[1:]  # and reads flags of its own
    table = [row for name, trace in FUNCTIONS.items() if only in name for row in rows(name, trace)]
    print("| function | kernel | grid | sharded | not sharded, and why |\n|---|---|---|---|---|")
    for row in table:
        print("| " + " | ".join(row) + " |")
    print(f"\n{sum(bool(row[3]) for row in table)} of {len(table)} calls of {len({row[0] for row in table})} functions are sharded")


if __name__ == "__main__":
    main()
