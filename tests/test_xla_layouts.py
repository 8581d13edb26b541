"""Order of dims in memory around collectives, each fact seen in a program compiled for 8 absent GPUs: mesh data=2, model=4."""

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, compile
from shardplan.xla_model.physical_order import physical_orders

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

F32, BF16 = jnp.float32, jnp.bfloat16
MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
MOVES = {"bitcast", "copy", "parameter", "transpose"}


def s(*entries):
    return NamedSharding(MESH, P(*entries))


def a(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def compiled(fn, *args, ins, outs, donate=()):
    done = compile(jax.jit(fn, in_shardings=ins, out_shardings=outs, donate_argnums=donate), *args, target="h200:8")
    assert done.ok, done.error
    return done.module


def transposes(fn, *args, **kw) -> list[str]:
    """Results of the kernels that only move: 'before' or 'behind' the collective, and their bytes in MB, sorted."""
    module, out, behind = compiled(fn, *args, **kw), [], False
    for i in module.computations[module.entry]:
        behind |= i.opcode.endswith("-start") or i.opcode in ("all-gather", "reduce-scatter", "all-to-all")
        inside = {x.opcode for n in i.callees.get("calls", ()) for x in module.computations[n]} if i.opcode == "fusion" else set()
        if (i.opcode in ("copy", "transpose") or (inside and inside <= MOVES)) and i.arrays[0].bytes > 1 << 20:
            out.append(f"{'behind' if behind else 'before'} {i.arrays[0].bytes >> 20}")
    return sorted(out)


ROWS = ("data", None, None)
"""x[b, s, d], 16 x 1024 x 2048 in bf16: 32 MB on the two shards of `data`, 8 MB on all."""


def along(dim):
    entries = [("data",), (), ()]
    entries[dim] += ("model",)
    return s(*entries)


@pytest.mark.parametrize(("dim", "expected"), [(0, []), (1, ["behind 32"]), (2, [])])
def test_a_product_reads_what_is_gathered_along_its_first_rows_or_its_columns(dim, expected):
    def fn(x, w):
        return constrain(constrain(jnp.tanh(x), along(dim)), s(*ROWS)) @ w

    assert transposes(fn, a(16, 1024, 2048), a(2048, 2048), ins=(along(dim), s()), outs=s(*ROWS)) == expected


@pytest.mark.parametrize(("dim", "expected"), [(0, []), (1, ["before 32"]), (2, [])])
def test_a_product_writes_what_is_scattered_along_its_first_rows_or_its_columns(dim, expected):
    def fn(x, w):
        return jnp.tanh(constrain(x @ w, along(dim)))

    ins = s("data", None, "model"), s("model")
    assert transposes(fn, a(16, 1024, 2048), a(2048, 2048), ins=ins, outs=along(dim)) == expected


@pytest.mark.parametrize(("spec", "outermost"), [(("data", None), "{1,0"), ((None, "data"), "{0,1")])
def test_gathered_shards_have_the_gathered_dim_outermost(spec, outermost):
    def fn(x, w):
        return x @ constrain(constrain(w.astype(BF16), s(*spec)), s())

    module = compiled(fn, a(16, 2048), a(2048, 4096, dtype=F32), ins=(s(), s(*spec)), outs=s())
    (gather,) = (i for i in module if i.opcode in ("all-gather", "all-gather-start"))
    assert gather.type.count(outermost) >= 1 and gather.type.count("{0,1" if outermost == "{1,0" else "{1,0") == 0


@pytest.mark.parametrize(("spec", "kernels"), [(("data", None), 0), ((None, "data"), 1)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_an_input_is_transposed_before_it_is_gathered_along_an_inner_dim_unless_a_kernel_casts_it(spec, kernels, dtype):
    def fn(x, w):
        return x @ constrain(constrain(w.astype(BF16), s(*spec)), s())

    args = a(1024, 2048), a(2048, 4096, dtype=dtype)
    expected = ["before 8"] * kernels if dtype == BF16 else []
    assert transposes(fn, *args, ins=(s(), s(*spec)), outs=s()) == expected


@pytest.mark.parametrize(("spec", "kernels"), [(("data", None), []), ((None, "data"), ["behind 32"])])
def test_what_is_gathered_along_an_inner_dim_and_leaves_the_step_is_transposed(spec, kernels):
    ins = s(*spec), s(*spec)
    assert transposes(lambda w, m: w - m, *[a(2048, 8192)] * 2, ins=ins, outs=s(None, None)) == kernels


def in_a_loop(reads):
    def fn(x, w):
        w = constrain(w, s())
        if reads == "rows of it, unrolled":
            for i in range(w.shape[0]):
                x = constrain(jnp.tanh(x @ w[i]), s("data"))
            return x
        if reads == "rows of it":
            return jax.lax.scan(lambda x, w: (constrain(jnp.tanh(x @ w), s("data")), None), x, w)[0]
        return jax.lax.scan(lambda x, _: (constrain(jnp.tanh(x @ w), s("data")), None), x, None, length=4)[0]

    return fn


@pytest.mark.parametrize(("reads", "kernels"), [("rows of it", 1), ("all of it", 1), ("rows of it, unrolled", 0)])
def test_what_a_loop_reads_is_row_major_also_if_it_was_gathered_along_an_inner_dim(reads, kernels):
    w, spec = (a(2048, 2048), s(None, "model")) if reads == "all of it" else (a(4, 2048, 2048), s(None, "model"))
    found = transposes(in_a_loop(reads), a(1024, 2048), w, ins=(s("data"), spec), outs=s("data"))
    assert found.count(f"behind {8 if w.ndim == 2 else 32}") == kernels


ALL = ("data", "model")
BLOCKS = {
    ("rows", 0, 1): ["before 8"],  # its second rows are the blocks that a product's result is sent in
    ("rows", 1, 0): [],
    ("product", 0, 1): [],
    ("product", 1, 0): ["behind 8"],  # as which it arrives
    ("product", 2, 0): ["behind 8"],
}


@pytest.mark.parametrize(("case", "expected"), BLOCKS.items(), ids=map(str, BLOCKS))
def test_blocks_of_an_all_to_all_are_outermost_where_they_are_sent_and_where_they_arrive(case, expected):
    side, at, to = case
    before, behind = (s(*[ALL if d == n else None for d in range(3)]) for n in (at, to))

    def product(x, w):
        return constrain(constrain(jnp.tanh(x), before), behind) @ w

    def rows(x, w):
        return jnp.tanh(constrain(constrain(x @ w, before), behind))

    fn = product if side == "product" else rows
    assert transposes(fn, a(16, 1024, 2048), a(2048, 2048), ins=(before, s()), outs=behind) == expected


@pytest.mark.parametrize(("spec", "copies"), [((("model", "data"), None), 0), (("model", "data"), 3)])
def test_every_array_that_an_update_writes_is_copied_if_the_gradient_is_scattered_along_an_inner_dim(spec, copies):
    def fn(x, dy, p, m, v):
        g = constrain(x.T @ dy, s(*spec)).astype(F32)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - m / (jnp.sqrt(v) + 1e-8), m, v

    state = [a(2048, 4096, dtype=F32)] * 3
    ins = s("data", "model"), s("data"), *[s(*spec)] * 3
    found = transposes(fn, a(1024, 2048), a(1024, 4096), *state, ins=ins, outs=(s(*spec),) * 3, donate=(2, 3, 4))
    assert found == ["behind 4"] * copies


@pytest.mark.parametrize(
    ("work", "results"),
    [
        (lambda z, b: z.astype(BF16), ["bf16"]),
        (lambda z, b: jnp.tanh(z * 0.5).astype(BF16), ["bf16"]),
        (lambda z, b: (z + b.astype(F32)).astype(BF16), ["f32", "bf16"]),
        (lambda z, b: (z.astype(BF16), jnp.tanh(z).astype(BF16)), ["f32", "bf16", "bf16"]),
    ],
)
def test_a_products_kernel_does_what_follows_on_its_result_alone(work, results):
    def fn(x, w, b):
        return work(jnp.dot(x, w, preferred_element_type=F32), b)

    module = compiled(fn, a(1024, 2048), a(2048, 4096), a(1024, 4096), ins=(s(), s(), s()), outs=s())
    found = [i.arrays[0].dtype for i in module.computations[module.entry] if i.opcode == "fusion"]
    assert found == results


@pytest.mark.parametrize(
    ("shape", "permutation"),
    [
        ((4, 8, 4, 256, 256), (0, 1, 4, 3, 2)),
        ((64, 7, 512), (0, 2, 1)),
        ((64, 12, 512), (0, 2, 1)),
        ((4, 64, 256), (2, 1, 0)),
        ((16, 64, 3, 256), (3, 1, 0, 2)),
        ((64, 16, 16), (0, 2, 1)),
        ((64, 8, 512), (2, 1, 0)),
        ((32, 64, 4, 256), (0, 3, 1, 2)),
        ((16, 12, 256, 64), (0, 3, 1, 2)),
        ((256, 64, 32), (2, 1, 0)),
        ((64, 512, 7), (0, 2, 1)),
        ((16, 256, 256, 4), (0, 1, 3, 2)),
        ((16, 256, 256, 4), (0, 3, 1, 2)),
        ((16, 256, 256, 4), (0, 2, 3, 1)),
        ((16, 256, 256, 4), (0, 3, 2, 1)),  # of 16 bits, the two last dims make a tile
        ((16, 4, 256, 256), (0, 3, 2, 1)),
        ((16, 4, 256, 256), (0, 3, 1, 2)),
        ((8, 256, 256, 8), (0, 3, 1, 2)),
        ((32, 256, 12), (2, 0, 1)),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_transpose_of_or_to_few_elements_moves_no_tiles(shape, permutation, dtype):
    def fn(x):
        return jnp.transpose(x, permutation) * 2

    x = jax.ShapeDtypeStruct(shape, dtype)
    module = compiled(fn, x, ins=s(), outs=s())
    (kernel,) = (i for i in module.computations[module.entry] if i.opcode == "fusion")
    facts = StepFacts.of(parse(jax.make_jaxpr(fn)(x)), MeshShape(("x",), (1,)))
    (v,) = (op.outputs[0] for op in facts.graph.ops if op.traits.transpose)
    assert (kernel.attribute("kind") == "kLoop") == physical_orders(facts.graph, facts.rules).written[v]
