"""Small programs whose compiled text is kept beside this file; run it to compile them again, once per supported jax."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sds = jax.ShapeDtypeStruct


def fsdp(mesh):
    """Six scanned layers under remat; parameters split over both axes, batch over `data`."""

    def step(w1, w2, x):
        def loss(ws):
            def body(h, w):
                h = jax.nn.gelu(h @ w[0])
                return h @ w[1], None

            h, _ = jax.lax.scan(jax.checkpoint(body), x, ws)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)((w1, w2))
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, (w1, w2), grads)

    s = partial(_sharding, mesh)
    ws = (s(None, "data", "model"), s(None, "model", "data"))
    fn = jax.jit(step, in_shardings=(*ws, s("data", None)), out_shardings=(s(), ws), donate_argnums=(0, 1))
    return fn, [sds(shape, jnp.float32) for shape in [(6, 256, 1024), (6, 1024, 256), (64, 256)]]


def nested(mesh):
    """Every collective by hand: loops in loops, branches, a loop whose trip count nobody knows."""

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data", "model"),), out_specs=P("data", "model"), check_vma=False)
    def f(x):
        def body(c, i):
            c = jax.lax.psum(c, "model") * 0.5

            def inner(j, c):
                return jax.lax.ppermute(c, "data", [(i, (i + 1) % 4) for i in range(4)])

            return jax.lax.fori_loop(0, 3, inner, c), None

        x, _ = jax.lax.scan(body, x, jnp.arange(5))
        x = jax.lax.cond(
            x[0, 0] > 0,
            lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
            lambda x: jax.lax.pmax(x, "data"),
            x,
        )
        y = jax.lax.all_gather(x, ("data", "model"), axis=0, tiled=True)
        z = jax.lax.psum_scatter(y * 2, ("data", "model"), scatter_dimension=0, tiled=True)

        def again(state):
            i, x = state
            return i + 1, x + jax.lax.psum(x.astype(jnp.bfloat16), ("data", "model")).astype(x.dtype)

        return jax.lax.while_loop(lambda s: s[1].sum() < 100.0, again, (0, z))[1] + x

    return jax.jit(f), [sds((64, 32), jnp.float32)]


def conv(mesh):
    """Gradients of a strided convolution and a dense layer, data parallel."""

    def step(k, w, x):
        def loss(kw):
            k, w = kw
            y = jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return (jax.nn.relu(y).mean((1, 2)) @ w).sum()

        return jax.grad(loss)((k, w))

    s = partial(_sharding, mesh)
    fn = jax.jit(step, in_shardings=(s(), s(), s("data")), out_shardings=s())
    return fn, [sds(shape, jnp.float32) for shape in [(3, 3, 16, 32), (32, 128), (32, 16, 16, 16)]]


def rare(mesh):
    """Ragged all-to-all, broadcast from one device, a library product (complex numbers), an all-gather of bytes."""

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P(None, "model"), P("model")),
        out_specs=(P("data"), P("data"), P("data"), P()),
        check_vma=False,
    )
    def f(x, sizes, c, b):
        offsets = jnp.cumsum(sizes) - sizes
        got = jax.lax.all_to_all(sizes, "data", 0, 0, tiled=True)
        moved = jax.lax.ragged_all_to_all(x, jnp.zeros_like(x), offsets, sizes, jnp.zeros_like(offsets), got, axis_name="data")
        one = jax.lax.pbroadcast(x, ("data",), 2)
        product = jax.lax.psum_scatter(c @ c.T, "data", scatter_dimension=0, tiled=True)
        return moved, one, product, jax.lax.all_gather(b, "model", tiled=True)

    args = [sds((64, 8), jnp.float32), sds((16,), jnp.int32), sds((32, 64), jnp.complex64), sds((64,), jnp.int8)]
    return jax.jit(f), args


def _sharding(mesh, *entries):
    return NamedSharding(mesh, P(*entries))


if __name__ == "__main__":
    import gzip
    import pathlib

    from jax.sharding import AbstractMesh, AxisType

    from shardplan.xla.compiler.compile import compile

    here, version = pathlib.Path(__file__).parent, ".".join(jax.__version__.split(".")[:2])
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for program in (fsdp, nested, conv, rare):
        for place, target in (("cpu", None), ("gpu", "h200:8")):
            if (program, place) == (rare, "cpu"):
                continue  # XLA for CPU has no broadcast from one device
            fn, args = program(mesh)
            done = compile(fn, *args, target=target)
            text = done.module and done.text.replace(f"{here}/", "")
            (here / f"{program.__name__}_{place}_{version}.hlo.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
