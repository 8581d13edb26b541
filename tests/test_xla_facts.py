"""Facts of `shardplan/xla_model/facts.toml`, each seen in a program compiled for 8 absent GPUs: mesh data=4, model=2.

A release of JAX that changes one of them changes a price, a plan or the emitted program.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.costs.split_products import contracted_splits
from shardplan.ir.parse import parse
from shardplan.xla import available, compile
from shardplan.xla.hlo import schedule
from shardplan.xla.hlo.products import products
from shardplan.xla_model.ragged import masked_copies

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"'),
]

F32, BF16 = jnp.float32, jnp.bfloat16
MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
B, D = 512, 1024


def s(*entries):
    return NamedSharding(MESH, P(*entries))


def a(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def emitted(fn, *args, ins, outs=None) -> list[str]:
    """'kind over axes: arrays x runs' of every collective, sorted."""
    extra = {} if outs is None else {"out_shardings": outs}
    done = compile(jax.jit(fn, in_shardings=ins, **extra), *args, target="h200:8")
    assert done.ok, done.error

    def shape(part):
        flat = len(part.array.shape) == 1 and part.array.size > D
        return f"{part.array.dtype}:{part.array.size}" if flat else str(part.array)

    return sorted(
        f"{c.kind} over {','.join(c.axes)}: {' + '.join(map(shape, c.parts))}{f' x{c.runs:g}' if c.runs != 1 else ''}"
        for c in done.collectives
    )


PARTIAL = {"ins": (s(None, ("data", "model")), s(("data", "model"))), "args": (a(B, D), a(D, D))}


def partial_to(*steps):
    def fn(x, w):
        y = x @ w
        for entries in steps:
            y = constrain(y, s(*entries))
        return y * 2

    return emitted(fn, *PARTIAL["args"], ins=PARTIAL["ins"])


@pytest.mark.parametrize("entries", [(("data", "model"), None), (("model", "data"), None), (None, ("data", "model"))])
def test_a_partial_result_is_scattered_over_all_its_axes_on_one_dim(entries):
    assert partial_to(entries) == ["reduce-scatter over data,model: f32[512,1024]"]


@pytest.mark.parametrize(("mode", "kind"), [("fill", "all-reduce"), ("clip", "reduce-scatter")])
def test_a_lookup_that_fills_is_completed_before_it_selects(mode, kind):
    def look_up(table, ids):
        return constrain(constrain(jnp.take(table, ids, axis=0, mode=mode), s("data")), s(("data", "model"))) * 2

    found = emitted(look_up, a(2 * B, D), a(B, dtype=jnp.int32), ins=(s("model"), s("data")))
    assert found == [f"{kind} over model: f32[128,1024]"]


@pytest.mark.parametrize(("to", "kind"), [((), "all-reduce"), (("data",), "reduce-scatter")])
@pytest.mark.parametrize(("made", "cast"), [(F32, BF16), (BF16, F32)])
def test_a_partial_result_is_completed_before_it_is_cast(made, cast, to, kind):
    found = emitted(
        lambda x, w: constrain((x @ w).astype(cast), s(*to)) * 2,
        a(B, D, dtype=made), a(D, D, dtype=made), ins=(s(None, "data"), s("data")),
    )  # fmt: skip
    assert found == [f"{kind} over data: {'f32' if made == F32 else 'bf16'}[512,1024]"]


@pytest.mark.parametrize(("dtype", "gathered"), [(jnp.float16, 1), (BF16, 0), (F32, 0)])
def test_gradients_of_max_pooling_in_half_precision_are_gathered(dtype, gathered):
    def pooled(x):
        return (jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") * 2).sum()

    found = emitted(jax.grad(pooled), a(8, 8, 8, 256, dtype=dtype), ins=(s("data"),), outs=s("data"))
    assert len([x for x in found if x.startswith("all-gather over data")]) == len(found) == gathered


@pytest.mark.parametrize(("rows", "kind"), [(("data", "model"), "reduce-scatter"), (("model", "data"), "all-reduce")])
def test_scattered_updates_are_summed_in_the_order_of_their_axes(rows, kind):
    def fn(updates, ids):
        summed = constrain(jnp.zeros((4096, D)).at[ids].add(updates), s())
        return constrain(summed, s(("data", "model"))) * 2

    found = emitted(fn, a(B, D), a(B, dtype=jnp.int32), ins=(s(rows), s(rows)), outs=s(("data", "model")))
    assert [x.partition(" ")[0] for x in found] == [kind]


def test_a_partial_result_over_two_axes_to_two_dims_is_all_reduced():
    assert partial_to(("data", "model")) == ["all-reduce over data,model: f32[512,1024]"]


def test_but_scattered_twice_when_the_step_between_is_constrained():
    assert partial_to(("data", None), ("data", "model")) == [
        "reduce-scatter over data: f32[512,1024]",
        "reduce-scatter over model: f32[128,1024]",
    ]


def test_a_partial_result_scattered_over_one_axis_is_then_reduced_over_the_other():
    assert partial_to(("data", None)) == [
        "all-reduce over model: f32[128,1024]",
        "reduce-scatter over data: f32[512,1024]",
    ]


SUMS = {"ins": (s(None, "model"), s(None, "model"), s("model"), s("model"))}
SUM_ARGS = (a(B, D), a(B, D), a(D, D), a(D, D))


@pytest.mark.parametrize("other", [False, True])
def test_a_sliced_sum_is_scattered_if_there_is_a_sum_over_the_other_axis(other):
    def fn(x, w, z):
        y = constrain(constrain(x @ w, s(None, None)), s("model", None))
        return y * 2, constrain(z.sum(0), s(None)) if other else z

    args, ins = (*PARTIAL["args"], a(B, D)), (*PARTIAL["ins"], s("data"))
    found = emitted(fn, *args, ins=ins, outs=(s("model", None), s() if other else s("data")))
    parts = ["all-reduce over data: f32:262144 + f32[1024]", "reduce-scatter over model: f32[512,1024]"]
    assert found == (parts if other else ["all-reduce over data,model: f32[512,1024]"])


def test_a_sum_that_is_sliced_over_one_axis_after_the_other_stays():
    axes = ("data", "model")

    def fn(x, w, z):
        y = x @ w
        for to in (s(None, None), s("data", None), s(axes, None)):
            y = constrain(y, to)
        return y * 2, constrain(z.sum(0), s(None))

    found = emitted(fn, a(B, D), a(D, D), a(B, D), ins=(s(None, axes), s(axes, None), s(axes, None)), outs=(s(axes, None), s()))
    assert found == ["all-reduce over data,model: f32:524288 + f32[1024]"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_sum_that_is_sliced_over_all_its_axes_is_scattered_unless_it_is_read_whole(whole):
    axes = ("data", "model")

    def fn(x, w, z):
        y = x @ w
        read = constrain(y, s(None, None)) * 3 if whole else 0
        return constrain(constrain(y, s(None, None)), s(axes, None)) * 2, constrain(z.sum(0), s(None)), read

    outs = (s(axes, None), s(), s(None, None) if whole else s())
    found = emitted(fn, a(B, D), a(D, D), a(B, D), ins=(s(None, axes), s(axes, None), s(axes, None)), outs=outs)
    apart = ["all-reduce over data,model: f32[1024]", "reduce-scatter over data,model: f32[512,1024]"]
    assert found == (["all-reduce over data,model: f32:524288 + f32[1024]"] if whole else apart)


@pytest.mark.parametrize("read", ["sliced", "whole"])
def test_a_sum_that_is_handed_on_by_constraints_and_transposes_and_then_sliced_is_scattered(read):
    """As the gradient of weights that a layer gathers for itself."""

    def fn(rows, x):
        def layer(total, row):
            grad = constrain((row.T @ x).T, s(None, None))
            return total + (jnp.tanh(grad).sum() if read == "whole" else 0), constrain(grad, s("model", None))

        return jax.lax.scan(layer, jnp.zeros(()), rows)

    outs = s(), s(None, "model", None)
    found = emitted(fn, a(4, B, D), a(B, D), ins=(s(None, "model", None), s("model", None)), outs=outs)
    assert any("reduce-scatter over model" in x for x in found) == (read == "sliced")


def test_a_product_replicated_over_an_axis_may_be_sharded_over_it_and_permuted_unless_constrained():
    def fn(*between):
        def product(x, w):
            y = x @ w
            for entries in (*between, ("model", None)):
                y = constrain(y, square(*entries))
            return y * 2

        done = compile(jax.jit(product, in_shardings=(square(None, "model"), square("model"))), a(D, B), a(B, D), target="h200:4")
        return [(c.kind, c.axes) for c in done.collectives], done.flops

    def square(*entries):
        return NamedSharding(AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), P(*entries))

    whole = 2 * D * D * B
    assert fn() == ([("all-reduce", ("model",)), ("collective-permute", ("data", "model"))], whole / 4)
    assert fn((None, None)) == ([("reduce-scatter", ("model",))], whole / 2)


def test_a_sum_of_two_partial_results_is_reduced_once():
    found = emitted(lambda x, y, v, w: x @ v + y @ w, *SUM_ARGS, outs=s(), **SUMS)
    assert found == ["all-reduce over model: f32[512,1024]"]


def test_but_twice_when_anything_stands_between_them():
    found = emitted(lambda x, y, v, w: x @ v - y @ w, *SUM_ARGS, outs=s(), **SUMS)
    assert found == ["all-reduce over model: f32:524288 + f32:524288"]


@pytest.mark.parametrize("to", [s("data"), s()], ids=["reduce-scatter", "all-reduce"])
@pytest.mark.parametrize(
    ("add", "times"),
    [
        (lambda p, q, r: p + q, 1),
        (lambda p, q, r: p + q + r, 1),
        (lambda p, q, r: p.T + q.T, 1),
        (lambda p, q, r: p + 2 * q, 2),
        (lambda p, q, r: (p + q, jnp.tanh(p)), 2),
    ],
    ids=["two", "three", "transposed", "scaled", "read elsewhere"],
)
def test_addends_that_are_reduced_alike_are_reduced_once(to, add, times):
    def fn(x, y, v, w):
        return add(*(constrain(part, to) for part in (x @ v, y @ w, x @ w)))

    ins = (s(None, "data"), s(None, "data"), s("data"), s("data"))
    done = compile(jax.jit(fn, in_shardings=ins), a(B, 8 * D), a(B, 8 * D), a(8 * D, D), a(8 * D, D), target="h200:8")
    assert [c.kind for c in done.collectives] == ["reduce-scatter" if to.spec else "all-reduce"]
    assert len(done.collectives[0].parts) == times


def layer(gather):
    def fn(x, w):
        w = constrain(w, s()) if gather else w
        return jnp.tanh(x @ w) @ w.T

    return fn


@pytest.mark.parametrize(("gather", "times"), [(False, 2), (True, 1)])
def test_a_sharded_weight_used_as_it_is_and_transposed_is_gathered_twice_unless_constrained(gather, times):
    found = emitted(layer(gather), a(4 * B, D), a(D, D), ins=(s("data"), s("data")))
    assert found == ["all-gather over data: " + " + ".join(["f32[1024,1024]"] * times)]


def test_xla_gathers_the_activation_instead_when_it_is_the_smaller_one():
    found = emitted(layer(False), a(B, D), a(D, D), ins=(s("data"), s("data")))
    assert found == ["all-gather over data: f32[1024,1024]", "all-gather over data: f32[512,1024]"]


def test_nothing_is_gathered_for_arrays_without_elements():
    def fn(x, w):
        none = constrain(x[:, :0] * 2, s())
        return jnp.concatenate([constrain(x, s())[:, :0], x @ w, none], axis=1), none

    assert emitted(fn, a(B, D), a(D, D), ins=(s(("data", "model")), s()), outs=(s(("data", "model")), s())) == []


def test_a_forward_pass_beside_a_gradient_is_computed_once():
    def predict(w, x):
        return jax.nn.silu(x @ w) @ w

    def fn(w, x):
        return jax.grad(lambda w: (predict(w, x) ** 2).mean())(w), jnp.abs(predict(w, x)).max()

    done = compile(jax.jit(fn), a(D, D), a(B, D), target="h100:1")
    products = [product for product in done.products if product.runs]
    assert len(products) == 5  # two of the forward pass, three of the backward pass


def test_two_gathers_of_one_weight_are_one():
    def fn(x, w):
        return jnp.tanh(x @ constrain(w, s())) @ constrain(w, s())

    assert emitted(fn, a(B, D), a(D, D), ins=(s("data"), s("data"))) == ["all-gather over data: f32[1024,1024]"]


def test_two_sums_of_one_partial_result_are_one():
    def fn(x, w, v):
        y = x @ w
        return constrain(y, s()) @ v, jnp.tanh(constrain(y, s()))

    found = emitted(fn, a(B, D), a(D, D), a(D, D), ins=(s(None, "model"), s("model"), s()))
    assert found == ["all-reduce over model: f32[512,1024]"]


def test_and_stay_two_behind_a_barrier_of_weight_and_activation():
    def fn(x, w):
        y = x @ constrain(w, s())
        w, y = jax.lax.optimization_barrier((w, y))
        return jnp.tanh(y) @ constrain(w, s())

    assert emitted(fn, a(B, D), a(D, D), ins=(s("data"), s("data"))) == ["all-gather over data: f32[1024,1024]"] * 2


@pytest.mark.parametrize(("gather", "backward"), [(False, 2), (True, 1)])
def test_recomputed_fsdp_layers_gather_once_more_unless_constrained(gather, backward):
    def loss(w, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (layer(gather)(x, w), None)), x, w)
        return jnp.sum(x * x)

    split = s(None, "data")
    found = emitted(jax.value_and_grad(loss), a(6, D, D), a(4 * B, D), ins=(split, s("data")), outs=(s(), split))
    parts = sum(line.count("f32[1024,1024]") for line in found if line.startswith("all-gather"))
    assert parts == (2 if not gather else 1) + backward


def test_a_weight_is_cast_before_it_is_gathered():
    found = emitted(lambda x, w: x @ w.astype(BF16), a(B, D, dtype=BF16), a(D, D), ins=(s("data"), s("data")))
    assert found == ["all-gather over data: bf16[1024,1024]"]


@pytest.mark.parametrize(
    ("widened", "dtype", "sent"),
    [
        (lambda w, k: w.astype(BF16), jnp.float8_e4m3fn, "f8e4m3fn"),
        (lambda w, k: w.astype(BF16) * k, jnp.float8_e4m3fn, "f8e4m3fn"),
        (lambda w, k: w.astype(BF16) / k, jnp.int8, "s8"),
        (lambda w, k: w.astype(BF16) * k + k, jnp.float8_e4m3fn, "bf16"),
        (lambda w, k: jnp.tanh(w.astype(BF16)), jnp.float8_e4m3fn, "bf16"),
    ],
)
def test_a_widened_array_is_sent_before_it_is_widened(widened, dtype, sent):
    def fn(x, w, k):
        return x @ constrain(constrain(widened(w, k), s("data", None)), s(None, None))

    found = emitted(fn, a(B, D, dtype=BF16), a(D, D, dtype=dtype), a(dtype=BF16), ins=(s("data"), s("data"), s()))
    assert found == [f"all-gather over data: {sent}[1024,1024]"]


@pytest.mark.parametrize(
    ("made", "before", "after", "sent"),
    [
        (lambda w: w.astype(F32), ("data", None), (None, "data"), "all-to-all over data: bf16[256,4,256]"),
        (lambda w: 2 * w.astype(F32), ("data", None), (None, "data"), "all-to-all over data: bf16[256,4,256]"),
        (lambda w: jnp.sin(w.astype(F32)), ("data", None), (None, "data"), "all-to-all over data: f32[256,4,256]"),
        (
            lambda w: w.astype(F32),
            (("data", "model"), None),
            (("model", "data"), None),
            "collective-permute over data,model: bf16[128,1024]",
        ),
    ],
)
def test_so_is_what_changes_its_place(made, before, after, sent):
    def fn(w):
        return jnp.tanh(constrain(constrain(made(w), s(*before)), s(*after)))

    assert emitted(fn, a(D, D, dtype=BF16), ins=(s(*before),), outs=s(*after)) == [sent]


def cast_twice(i, y, w):
    return w.astype(BF16)[i], y @ w.T.astype(BF16)


@pytest.mark.parametrize(
    ("readers", "layouts", "sent"),
    [
        (cast_twice, [(None, "data")], ["all-to-all over data: bf16[512,4,256]"]),
        (lambda i, y, w: y @ w.T.astype(BF16), [(None, "data")], ["all-to-all over data: bf16[512,4,256]"]),
        (lambda i, y, w: (w[i].astype(BF16), y @ w.T.astype(BF16)), [(None, "data")], ["all-to-all over data: f32[512,4,256]"]),
        (lambda i, y, w: (w.astype(BF16)[i], y @ w.T.astype(jnp.float16)), [(None, "data")], ["all-to-all over data: f32[512,4,256]"]),
        (lambda i, y, w: (*cast_twice(i, y, w), jnp.tanh(w)), [(None, "data")], ["all-to-all over data: f32[512,4,256]"]),
        (cast_twice, [(None, "data"), (None, None)], ["all-gather over data: f32[2048,1024]", "all-to-all over data: f32[512,4,256]"]),
        (cast_twice, [(None, None)], ["all-gather over data: f32[2048,1024]"]),
        (lambda i, y, w: y @ w.T.astype(BF16), [(None, None)], ["all-gather over data: bf16[2048,1024]"]),
    ],
)
def test_an_array_is_sent_narrower_if_its_readers_cast_it(readers, layouts, sent):
    def fn(i, y, w):
        for entries in layouts:
            w = constrain(w, s(*entries))
        return readers(i, y, w)

    found = emitted(fn, a(B, dtype=jnp.int32), a(B, D, dtype=BF16), a(2 * D, D), ins=(s(), s(None, layouts[-1][1]), s("data")))
    assert [x for x in found if not x.startswith("all-reduce")] == sent


@pytest.mark.parametrize(
    ("readers", "dtype"),
    [
        (lambda w, y: y @ w.astype(BF16).T, "bf16"),
        (lambda w, y: jnp.tanh(w.reshape(2, D, D)[None].astype(BF16)), "bf16"),
        (lambda w, y: (jnp.tanh(w.astype(BF16)), jnp.sin(w.astype(BF16))), "f32"),  # equal casts are one, which is read twice
        (lambda w, y: (jnp.tanh(w.astype(BF16)), y @ w.T.astype(BF16)), "f32"),
        (lambda w, y: jax.grad(lambda y: jnp.sum(jnp.tanh(y @ w.astype(BF16).T)))(y), "f32"),
        (lambda w, y: (y @ w.T.astype(BF16), jnp.tanh(w)), "f32"),
    ],
)
def test_an_array_is_gathered_narrower_if_one_cast_alone_reads_it_and_is_read_once(readers, dtype):
    def fn(w, y):
        return readers(constrain(w, s()), y)

    found = emitted(fn, a(2 * D, D), a(B, D, dtype=BF16), ins=(s("data"), s()))
    assert [x for x in found if not x.startswith("all-reduce")] == [f"all-gather over data: {dtype}[2048,1024]"]


def test_and_permuted_so():
    def fn(w):
        return jnp.tanh(constrain(w, s(("model", "data"))).astype(BF16))

    found = emitted(fn, a(D, D), ins=(s(("data", "model")),), outs=s(("model", "data")))
    assert found == ["collective-permute over data,model: bf16[128,1024]"]


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def accumulated(w, x):
    return w - jax.lax.scan(lambda g, x: (g + gradient(w, x), None), jnp.zeros_like(w), x)[0]


def test_accumulated_gradients_are_reduced_once_after_the_loop():
    found = emitted(accumulated, a(D, D), a(8, B, D), ins=(s(), s(None, "data")), outs=s())
    assert found == ["all-reduce over data: f32[1024,1024]"]


def test_but_scattered_and_gathered_in_every_iteration_when_sharded():
    found = emitted(accumulated, a(D, D), a(8, B, D), ins=(s("data"), s(None, "data")), outs=s("data"))
    assert found == ["all-gather over data: f32[1024,1024] x8", "reduce-scatter over data: f32[1024,1024] x8"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (("model", None), ["all-reduce over model: f32[16,128,1024]"]),
        ((None, "model"), ["all-gather over model: f32[16,128,1024]"]),
    ],
)
def test_embedding_lookup_moves_activations(table, expected):
    def fn(table, tokens):
        return constrain(table[tokens], s("data", None, None)) * 2

    assert emitted(fn, a(32000, D), a(64, 128, dtype=jnp.int32), ins=(s(*table), s("data"))) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("data", None), (None, "data"), ["all-to-all over data: f32[128,4,128]"]),
        (("data", None), (("data", "model"), None), []),
        ((("data", "model"), None), ("data", "model"), ["all-to-all over model: f32[1,64,2,256]"]),
        ((("data", "model"), None), (("model", "data"), None), ["collective-permute over data,model: f32[64,512]"]),
        (
            ("data", "model"),
            ("model", "data"),
            ["all-to-all over data: f32[128,2,128]", "collective-permute over data,model: f32[256,128]"],
        ),
        (
            ("data", "model"),
            (None, None),
            ["all-gather over data: f32[512,512]", "all-gather over model: f32[256,256]"],
        ),
    ],
)
def test_reshards(before, after, expected):
    found = emitted(lambda x: constrain(jnp.sin(x), s(*after)) * 2, a(512, 512), ins=(s(*before),))
    assert found == expected


# ---- combining


def test_reductions_of_different_dtypes_are_not_combined():
    def gradients(ws, x):
        return jax.grad(lambda ws: jnp.sum((jnp.tanh(x @ ws[0]).astype(BF16) @ ws[1]).astype(F32) ** 2))(ws)

    weights = a(D, D), a(D, D, dtype=BF16)
    found = emitted(gradients, weights, a(B, D), ins=((s(), s()), s("data")), outs=(s(), s()))
    assert found == ["all-reduce over data: bf16[1024,1024]", "all-reduce over data: f32[1024,1024]"]


@pytest.mark.parametrize(("chain", "expected"), [(True, 3), (False, 1)])
def test_sums_in_a_chain_are_not_combined(chain, expected):
    def fn(*xs):
        ys = list(xs)
        for n in range(3):
            k = 0 if chain else n
            ys[k] = jnp.tanh(ys[k] - ys[k].sum(0))
        return ys

    assert len(emitted(fn, *[a(B, D)] * 3, ins=(s("data"),) * 3)) == expected


def around_loop(step):
    """The collectives of six rounds of a row-wise function of a matrix whose columns are sharded."""

    def fn(h, ws):
        def body(h, w):
            return constrain(step(h) @ w, s(None, "model")), None

        return jax.lax.scan(body, h, ws)[0]

    found = emitted(fn, a(B, D), a(6, D, D), ins=(s(None, "model"), s(None, None, "model")), outs=s(None, "model"))
    return [x for x in found if "f32[512]" in x or "f32:1024" in x or "f32[1024]" in x]


def test_sums_of_one_depth_are_combined_in_a_loop_too():
    found = around_loop(lambda h: jnp.tanh(h / jnp.sum(h * h, 1, keepdims=True) + jnp.sum(jnp.abs(h), 1, keepdims=True)))
    assert found == ["all-reduce over model: f32[512] + f32[512] x6"]


def test_collectives_are_combined_whatever_makes_their_arrays():
    def gathered(ws, ms):
        new = [0.9 * m + constrain(w, s("data")) for w, m in zip(ws, ms, strict=True)]
        return [constrain(constrain(w, s("data")) - m, s()) for w, m in zip(ws, new, strict=True)], new

    arrays = [a(D, D)] * 3
    found = emitted(gathered, arrays, arrays, ins=([s()] * 3, [s("data")] * 3), outs=([s()] * 3, [s("data")] * 3))
    assert found == [f"all-gather over data: {' + '.join(['f32[1024,1024]'] * 3)}"]

    def gradients_and_norms(ws, xs):
        norms = [jnp.sum(constrain(w, s("data")) ** 2) for w in ws]
        return [w - constrain(x.sum(0), s()) / n for w, x, n in zip(ws, xs, norms, strict=True)]

    (found,) = emitted(gradients_and_norms, [a(D)] * 2, [a(B, D)] * 2, ins=([s()] * 2, [s("data")] * 2), outs=[s()] * 2)
    assert found.startswith("all-reduce over data: ") and found.count(" + ") == 3


def test_but_not_sums_with_maxima():
    found = around_loop(lambda h: jnp.tanh(h / jnp.sum(h * h, 1, keepdims=True) + jnp.max(h, 1, keepdims=True)))
    assert found == ["all-reduce over model: f32[512] x6"] * 2


def test_a_combined_all_reduce_copies_its_arrays_and_other_collectives_do_not():
    def copies(fn, ins, outs):
        args = [a(64, B, n * 16) for n in (1, 2, 3)]
        done = compile(jax.jit(fn, in_shardings=ins, out_shardings=outs), *args, target="h200:8")
        assert len(done.collectives) == 1
        names = [i.name.partition(".")[0] for i in done.module.computations[done.module.entry]]
        return {name: names.count(name) for name in ("wrapped_concatenate", "wrapped_slice")}

    def sums(*xs):
        return [x.sum(0) for x in xs]

    def gathered(*xs):
        return [jnp.sin(constrain(x, s())) for x in xs]

    assert copies(sums, (s("data"),) * 3, [s()] * 3) == {"wrapped_concatenate": 1, "wrapped_slice": 3}
    assert copies(sums, (s("data"),) * 3, [s("data")] * 3) == {"wrapped_concatenate": 0, "wrapped_slice": 0}
    assert copies(gathered, (s("data"),) * 3, [s()] * 3) == {"wrapped_concatenate": 0, "wrapped_slice": 0}


def test_sums_of_small_integers_are_sent_in_a_wider_type():
    found = emitted(lambda x: x.sum(1, dtype=jnp.int16), a(B, D, dtype=jnp.int16), ins=(s(None, "data"),), outs=s())
    assert found == ["all-reduce over data: s32[512]"]


# ---- the schedule


@pytest.mark.parametrize("gathers", [False, True])
def test_a_prefetch_is_in_flight_across_a_loop_only_if_that_has_no_gathers(gathers):
    def fn(x, ws, w):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ (constrain(w, s()) if gathers else x)), None), x, ws)[0]
        return x @ constrain(w, s())

    ins = s(), s(None, "data"), s("data")
    done = compile(jax.jit(fn, in_shardings=ins), a(D, D), a(6, D, D), a(D, D), target="h200:8")
    steps = [i.opcode for i in done.module.computations[done.module.entry]]
    assert (steps.index("while") < steps.index("all-gather-start")) == gathers


def test_an_array_gathered_cast_and_gathered_again_may_be_in_flight_both_times():
    def fn(x, w1, w):
        for _ in range(3):
            x = jnp.tanh(x @ w1)
        once = constrain(w, s(None, "model")).astype(BF16)
        return x.astype(BF16) @ constrain(once, s())

    done = compile(jax.jit(fn, in_shardings=(s(), s(), s("data", "model"))), *[a(D, D)] * 3, target="h200:8")
    gathers = schedule.overlaps(done.module)
    assert len(gathers) == 2 and all(gather.flops > 0 for gather in gathers)


# ---- loops


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_loop_of_no_trip_or_one_is_none(rounds):
    def fn(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, ws)

    done = compile(jax.jit(fn, in_shardings=s()), a(D, D), a(rounds, D, D), target="h200:8")
    opcodes = [i.opcode for i in done.module.computations[done.module.entry]]
    assert ("while" in opcodes) == (rounds > 1)


# ---- fusion


def kernels(fn, *args) -> list[str]:
    """The fusions that the entry computation launches."""
    done = compile(jax.jit(fn, in_shardings=(s(),) * len(args)), *args, target="h200:8")
    return [i.name.partition(".")[0] for i in done.module.computations[done.module.entry] if i.opcode == "fusion"]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.tanh(x * 2) + 1, ["loop_add_fusion"]),
        (lambda x: x - x.sum(0), ["input_reduce_fusion", "loop_subtract_fusion"]),
        (lambda x: (x.sum(0), (x * x).sum(0)), ["input_reduce_fusion"]),
        (lambda x: x @ x[0], ["input_reduce_fusion"]),
    ],
)
def test_kernels_of_small_programs(fn, expected):
    assert kernels(fn, a(D, D)) == expected


@pytest.mark.parametrize(
    ("terms", "read"),
    [(lambda a, b, c, d: a + b + c + d, [3, 2, 0, 1]), (lambda a, b, c, d: (a + b) * (c - d), [2, 3, 0, 1])],
)
def test_a_kernel_reads_first_what_is_fused_last(terms, read):
    """Each op that is taken in leaves the operands of the kernel, and its own go to their end."""
    done = compile(jax.jit(terms, in_shardings=s()), *(a(D, D),) * 4, target="h200:8")
    (kernel,) = (i for i in done.module.computations[done.module.entry] if i.opcode == "fusion")
    assert [int(i.literal) for i in kernel.operands] == read


@pytest.mark.parametrize(("waits", "found"), [(False, 1), (True, 2)])
def test_sums_of_one_array_are_one_kernel_whatever_collectives_they_wait_for(waits, found):
    """One waits for a sum over the devices, the other for two sums, of which the second may in turn wait for the first one."""

    def fn(x, v):
        whole, over_devices = constrain(x, s()), v.sum()
        first = (whole * over_devices).sum(0)
        return first, (whole + (v + (first if waits else over_devices)).sum()).sum(0)

    done = compile(jax.jit(fn, in_shardings=s("data")), a(32 * B, D), a(B, D), target="h200:8")
    entry = done.module.computations[done.module.entry]
    assert len([i for i in entry if i.opcode == "fusion" and any(x.opcode == "all-gather-done" for x in i.operands)]) == found


def normalised(x):
    """Layer norm."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)


def both_passes(fn):
    """The results of a function and of its gradient."""

    def run(x, g):
        y, back = jax.vjp(fn, x)
        return y, back(g)[0]

    return run


@pytest.mark.parametrize(
    ("fn", "shapes", "expected"),
    [
        (jax.nn.softmax, [(1 << 8, 1 << 14)], 1),
        (jax.nn.softmax, [(1 << 8, (1 << 14) + 512)], 5),  # two kernels per reduction
        (lambda x: jax.nn.softmax(x, axis=0), [(4096, 4096)], 4),  # it writes the exponentials, too
        (lambda x: jax.nn.softmax(x.T), [(4096, 4096)], 3),  # it transposes x first
        (normalised, [(4096, 4096)], 1),
        (both_passes(normalised), [(4096, 4096)] * 2, 2),  # either computes the row's mean and variance
        (both_passes(jax.nn.softmax), [(4096, 4096)] * 2, 3),  # and the sum of the exponentials
        (lambda x: x / x.mean(-1, keepdims=True), [(4096, 4096)], 1),
        (lambda x, v: x / jnp.sqrt(0.9 * v + 0.1 * (x * x).mean(-1))[:, None], [(4096, 4096), (4096,)], 3),  # with another array
        (lambda x: x / x.mean(), [(1024,)], 2),  # with a number, of a vector
        (jax.nn.softmax, [(1024,)], 1),
    ],
)
def test_kernels_that_keep_rows_on_chip(fn, shapes, expected):
    assert len(kernels(fn, *(a(*shape) for shape in shapes))) == expected


def test_columns_behind_rows_are_read_from_memory():
    done = compile(jax.jit(lambda x, g: (g * normalised(x)).sum(0), in_shardings=(s(),) * 2), *[a(4096, 4096)] * 2, target="h200:8")
    assert done.memory is not None and done.memory.temp_bytes >= 4 * 4096 * 4096


@pytest.mark.parametrize(
    ("fn", "written"), [(jnp.tanh, True), (jnp.sin, True), (lambda x: x**1.5, True), (jax.lax.erfc, True), (jnp.exp, False)]
)
def test_expensive_functions_are_written_not_computed_again(fn, written):
    def run(x, w):
        y = fn(x)
        return ((y * x) @ w) * y

    done = compile(jax.jit(run, in_shardings=(s(),) * 2), a(4096, 4096), a(4096, 4096), target="h200:8")
    first = next(i for i in done.module.computations[done.module.entry] if i.opcode == "fusion")
    assert first.type.startswith("(") == written  # two results


@pytest.mark.parametrize(("gpu", "dtype", "kernels"), [("h100", F32, 2), ("h100", BF16, 1), ("h200", F32, 1), ("a100", F32, 1)])
def test_gelus_tanh_is_computed_again_for_the_gradient_where_memory_is_slow(gpu, dtype, kernels):
    def loss(w, x):
        return ((jax.nn.gelu(x @ w) @ w.T) ** 2).mean()

    args = a(768, 3072, dtype=dtype), a(8192, 768, dtype=dtype)
    done = compile(jax.jit(jax.grad(loss), in_shardings=(s(), s("data"))), *args, target=f"{gpu}:8")
    assert done.text.count(" tanh(") == kernels


def test_a_kernel_that_concatenates_writes_one_result():
    found = kernels(lambda x, y: (jnp.concatenate([x * 2, y + 1], 1), x * 3 + y), a(4096, 4096), a(4096, 4096))
    assert sorted(found) == ["input_concatenate_fusion", "loop_add_fusion"]


@pytest.mark.parametrize(("length", "expected"), [(1 << 14, 1), ((1 << 14) + 512, 2)])
def test_a_long_reduction_is_two_kernels(length, expected):
    assert len(kernels(lambda x: x.sum(1), a(8, length))) == expected


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [((8, 128, 8, 32), (1, 3), ["input", "input"]), ((8, 128, 8, 12), (1, 3), ["input", "loop"]), ((64, 8, 16, 8), (1, 3), ["input"])],
)
def test_dims_that_lie_apart_are_reduced_one_after_the_other(shape, axes, expected):
    """The longest first, if it has more than eight elements; few elements are left to elementwise kernels."""
    assert sorted(kernels(lambda x: x.sum(axes), a(*shape))) == [f"{kind}_reduce_fusion" for kind in expected]


def stacked(x):
    """A loop that stacks three arrays of one shape; two of them are computed elementwise from a product."""

    def body(c, _):
        product = c @ x
        grown = jnp.exp(product)
        part = grown / (1 + grown)
        return part @ x, (product, grown, part)

    return jax.lax.scan(body, x, length=4)


def stacked_in_a_body(x):
    def body(c, _):
        c, (product, grown, part) = stacked(c)
        return c + product[0] + grown[1] + part[2], None

    return jax.lax.scan(body, x, length=3)[0]


def compiled(fn):
    """A step with a square array."""
    done = compile(jax.jit(fn, in_shardings=s()), a(D, D), target="h200:8")
    assert done.ok, done.error
    return done.module


@pytest.mark.parametrize(("fn", "zeros", "copies"), [(stacked, 3, 0), (stacked_in_a_body, 1, 2)])
def test_the_zeros_of_stacks_are_copied_in_the_body_of_a_loop(fn, zeros, copies):
    """Elsewhere one kernel writes those of all stacks of one shape."""
    found = [i for i in compiled(fn) if i.arrays and i.arrays[0].shape == (4, D, D)]
    assert [len(i.arrays) for i in found if i.name.startswith("loop_broadcast_fusion")] == [zeros]
    assert sum(i.opcode == "copy" and i.operands[0].name.startswith("loop_broadcast_fusion") for i in found) == copies


def test_a_row_of_a_stack_is_computed_by_the_kernel_that_writes_it():
    """The exponential is written nowhere else; the quotient is, since a product reads it."""
    names = [i.name.partition(".")[0] for i in compiled(stacked) if i.opcode == "fusion"]
    assert names.count("loop_dynamic_update_slice_fusion") == 3
    assert names.count("loop_divide_fusion") == 1 and not any("exponential" in name for name in names)


def test_a_broadcast_scalar_takes_no_memory():
    done = compile(jax.jit(lambda x: jnp.tanh(x + jnp.full((D, D), x[0, 0])), in_shardings=s()), a(D, D), target="h200:8")
    assert done.memory is not None and done.memory.temp_bytes < 4 * D


def test_a_scalar_broadcast_in_two_steps_takes_no_memory_in_a_loop():
    def fn(x):
        number = jax.lax.broadcast_in_dim(jnp.broadcast_to(x[0, 0], (D,)), (D, D), (1,))
        return jax.lax.scan(lambda c, _: (jnp.tanh(c + number), None), x, length=4)[0]

    done = compile(jax.jit(fn, in_shardings=s(), donate_argnums=0), a(D, D), target="h200:8")
    assert done.memory is not None and done.memory.temp_bytes < 4 * D * D + 4 * D


PRODUCTS = ((128, 128, 2048), (256, 256, 8192), (1536, 256, 4096), (1024, 512, 1000), (1024, 1024, 1024), (2048, 1024, 8192))
"""Rows, columns, contracted elements."""


def test_a_product_of_few_tiles_is_split():
    """And `costs.split_products` says how often."""

    def products(*xs):
        return [x.T @ y for x, y in zip(xs[::2], xs[1::2], strict=True)]

    operands = [jax.ShapeDtypeStruct((k, size), jnp.bfloat16) for m, n, k in PRODUCTS for size in (m, n)]
    done = compile(jax.jit(products, in_shardings=s()), *operands, target="h100:8")
    for m, n, k in PRODUCTS:
        parts, padded = contracted_splits(1, m, n, k, 2, 132)
        split = f"f32[{parts},{m},{n}]" if parts > 1 else f"bf16[{m},{n}]"
        assert any("gemm_fusion" in line and f" = {split}" in line for line in done.text.splitlines()), (m, n, k, split)
        assert padded == k or f"bf16[{padded},{m}]" in done.text or f"bf16[{m},{padded}]" in done.text


@pytest.mark.parametrize(("k", "made"), [(9216, lambda x: x), (9250, lambda x: x), (9250, jnp.tanh)])
def test_a_split_product_holds_padded_operands_and_its_parts(k, made):
    """The parts divide 9216 and not 9250. What a kernel makes for the product alone is written padded."""
    (m, n), (parts, padded) = (512, 256), contracted_splits(1, 512, 256, k, 4, 132)
    assert (parts > 1, padded > k) == (True, k == 9250)
    asked = {"cluster": "h100", "in_shardings": P(), "out_shardings": P()}
    step = shardplan.auto(AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,)), **asked)(lambda x, w: made(x) @ w)
    done = compile(jax.jit(lambda x, w: made(x) @ w, in_shardings=s()), a(m, k), a(k, n), target="h100:8")
    assert done.memory.temp_bytes == pytest.approx(4 * parts * m * n + (padded > k) * 4 * padded * (m + n), rel=0.01)
    assert step.plan(a(m, k), a(k, n)).memory().peak == pytest.approx(done.memory.peak_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("size", "behind", "expected"),
    [
        (128, lambda y, z: jnp.tanh(y), 2),
        (128, lambda y, z: jax.nn.softmax(y), 2),
        (128, lambda y, z: y.sum(0), 3),  # the sums are written for the kernel that sums columns
        (128, lambda y, z: y @ z, 4),  # and for another product, which is split, too
        (256, lambda y, z: y * ((y + z) @ z), 4),  # two kernels sum 16 parts
        (128, lambda y, z: y * ((y + z) @ z), 5),  # a kernel of its own 32
    ],
)
def test_the_kernel_that_reads_a_split_product_sums_its_parts(size, behind, expected):
    shapes = (size, 2048), (2048, size), (size, size)
    assert len(kernels(lambda x, w, z: behind(x @ w, z), *(a(*shape) for shape in shapes))) == expected


@pytest.mark.parametrize(
    ("carried", "add", "expected"),
    [
        (BF16, lambda w, p: w + p, 1),
        (BF16, lambda w, p: w + p.T, 1),
        (BF16, lambda w, p: w + jnp.sin(w) * p, 2),
        (F32, lambda w, p: w + p.astype(F32), 2),
    ],
)
def test_a_products_kernel_adds_its_result_to_a_loops_carry(carried, add, expected):
    def fn(w, xs, y):
        return jax.lax.scan(lambda w, x: (add(w, x.T @ y), None), w, xs)[0]

    args = a(2048, 2048, dtype=carried), a(8, 4096, 2048, dtype=BF16), a(4096, 2048, dtype=BF16)
    done = compile(jax.jit(fn, in_shardings=s()), *args, target="h200:8")
    body = next(i.computation for i in done.module if "gemm_fusion" in i.name)
    results = [x.shape for i in done.module.computations[body] if i.opcode == "fusion" for x in i.arrays]
    assert results.count((2048, 2048)) == expected


def test_a_row_that_several_kernels_read_is_cut_out_by_each():
    def fn(c, rows, w):
        return jax.lax.scan(lambda c, row: (jnp.tanh(((c * row) @ w) * row) + c, None), c, rows)[0]

    done = compile(jax.jit(fn, in_shardings=s()), a(D, D), a(8, D, D), a(D, D), target="h200:8")
    stacks = [[o.arrays[0].shape for o in i.operands if o.arrays].count((8, D, D)) for i in done.module if i.opcode == "fusion"]
    assert sum(stacks) == 2


def test_a_library_call_moves_its_operands_and_its_result_and_not_its_workspace():
    options = {"xla_gpu_enable_triton_gemm": False}
    done = compile(jax.jit(jnp.matmul, in_shardings=s()), *[a(D, D, dtype=BF16)] * 2, target="h100:8", options=options)
    [(call, (work, _))] = schedule.kernels(done.module).items()
    assert call.opcode == "custom-call" and call.arrays[-1].dtype == "s8" and call.arrays[-1].bytes > work.bytes
    assert work.bytes == 3 * D * D * 2


def test_a_ragged_product_multiplies_all_rows_for_every_group():
    groups, rows, width = 8, 4096, 256
    args = a(rows, width, dtype=BF16), a(groups, width, 512, dtype=BF16), a(groups, dtype=jnp.int32)
    done = compile(jax.jit(jax.lax.ragged_dot, in_shardings=s()), *args, target="h100:8")
    masked = [i for i in done.module.computations[done.module.entry] if rows * groups * width in [x.size for x in i.arrays]]
    assert sum(p.flops for p in products(done.module)) == 2 * groups * rows * width * 512
    assert masked and not any(i.opcode == "custom-call" for i in masked)


@pytest.mark.parametrize(("gated", "dtype"), [(False, F32), (False, BF16), (True, BF16)])
def test_masked_copies_are_written_by_the_kernels_that_the_plan_counts(gated, dtype):
    groups, rows, d, h = 8, 1 << 14, 256, 512

    def loss(p, x, sizes):
        x = x @ p["into"]
        y = jax.nn.gelu(jax.lax.ragged_dot(x, p["up"], sizes))
        y = y * jax.lax.ragged_dot(x, p["gate"], sizes) if gated else y
        x = x + jax.lax.ragged_dot(y, p["down"], sizes)
        return ((x @ p["into"]) ** 2).mean()

    def step(p, x, sizes):
        return jax.tree.map(jnp.subtract, p, jax.grad(loss)(p, x, sizes))

    up, down = a(groups, d, h, dtype=dtype), a(groups, h, d, dtype=dtype)
    p = {"into": a(d, d, dtype=dtype), "up": up, "down": down} | ({"gate": up} if gated else {})
    args = p, a(rows, d, dtype=dtype), a(groups, dtype=jnp.int32)
    done = compile(jax.jit(step, in_shardings=s(), out_shardings=s(), donate_argnums=0), *args, target="h100:8")
    copies = {groups * rows * d, groups * rows * h}
    entry = done.module.computations[done.module.entry]
    written = [sum(x.size in copies for x in i.arrays) for i in entry if i.opcode == "fusion" and "dot" not in i.name]
    graph = parse(jax.jit(step).trace(*args).jaxpr)
    counted = {copy.lo: copy.together for copy in masked_copies(graph)}
    assert sorted(filter(None, written)) == sorted(counted.values()) == ([1, 2, 3, 4] if gated else [1, 2, 2, 3])


@pytest.mark.parametrize("complete", [False, True])
def test_the_sum_of_a_ragged_product_is_scattered_only_where_its_complete_sum_is_constrained(complete):
    def fn(x, w, sizes):
        y = jax.lax.ragged_dot(x, w, sizes)
        return constrain(constrain(y, s()) if complete else y, s(None, "data"))

    args = a(1 << 15, B), a(8, B, D), a(8, dtype=jnp.int32)
    found = emitted(fn, *args, ins=(s(None, "data"), s(None, "data"), s()))
    moved = ["reduce-scatter over data"] if complete else ["all-gather over data", "all-to-all over data"]
    assert [line.split(":")[0] for line in found] == moved


@pytest.mark.parametrize(
    ("spec", "gathered"), [(("data",), ["data"]), (("data", "model"), ["data", "model"]), ((("data", "model"),), [])]
)
def test_batches_of_a_top_k_are_gathered(spec, gathered):
    found = emitted(lambda x: jax.lax.top_k(x, 2), a(B, 256, 32), ins=(s(*spec),), outs=s(*spec))
    assert [line.split(":")[0] for line in found] == [f"all-gather over {axis}" for axis in gathered]


def test_rows_and_groups_of_a_ragged_product_are_gathered():
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    x, y, w, sizes = a(1 << 15, B), a(1 << 15, D), a(8, B, D), a(8, dtype=jnp.int32)

    def gradient(x, y, sizes):
        return jax.lax.ragged_dot_general(x, y, sizes, numbers)

    rows = emitted(jax.lax.ragged_dot, x, w, sizes, ins=(s("data"), s(), s()), outs=s("data"))
    groups = emitted(jax.lax.ragged_dot, x, w, sizes, ins=(s(), s("data"), s()), outs=s())
    both = emitted(gradient, x, y, sizes, ins=(s("data"), s("data"), s()), outs=s())
    assert (rows, groups) == (["all-gather over data: f32[32768,512]"], ["all-gather over data: f32[8,512,1024]"])
    assert both == ["all-gather over data: f32[32768,1024]", "all-gather over data: f32[32768,512]"]
    done = compile(jax.jit(gradient, in_shardings=s(), out_shardings=s("data")), x, y, sizes, target="h200:8")
    assert sum(p.flops for p in products(done.module)) == 2 * 8 * (1 << 15) * B * D


@pytest.mark.parametrize(("size", "widths"), [(D, [3 * D]), (4 * D, [4 * D] * 3)])
def test_products_of_one_array_are_one_kernel_unless_each_is_large(size, widths):
    """Which waits for the gathers of all weights; the large ones take 192 MiB each, the small ones 12."""

    def products(x, *weights):
        return [jnp.tanh(x @ constrain(w, s())) for w in weights]

    ins = s(), *(s("data"),) * 3
    done = compile(jax.jit(products, in_shardings=ins), *[a(size, size)] * 4, target="h200:8")
    entry = done.module.computations[done.module.entry]
    assert [i.arrays[0].shape for i in entry if i.name.startswith("gemm_fusion")] == [(size, width) for width in widths]


def test_unequal_blocks_are_moved_as_they_are_filled_up():
    def fn(x):
        y = constrain(constrain(x, s(None, "data")) * 2, s("data"))
        return constrain(y + 1, s())

    assert emitted(fn, a(1021, 768), ins=(s(None, "data"),), outs=s()) == [
        "all-gather over data: f32[1024,768]",
        "all-to-all over data: f32[4,256,192]",
    ]


def test_padded_state_is_cut_and_filled_up_on_every_device():
    def fn(x, y):
        z = constrain(jax.lax.slice(x, (0, 0), (1021, 768)), s("data")) * jnp.sin(y)
        return jnp.pad(constrain(z, s("data")), ((0, 3), (0, 0)))

    assert emitted(fn, a(1024, 768), a(1021, 768), ins=(s("data"), s()), outs=s("data")) == []


@pytest.mark.parametrize(("dim", "kind"), [(0, "all-reduce"), (1, "reduce-scatter")])
def test_a_partial_result_is_not_scattered_in_unequal_blocks(dim, kind):
    def fn(x, w):
        return constrain(x @ w, s(*[None] * dim, ("data", "model"))) * 2

    found = emitted(fn, a(1001, D), a(D, D), ins=PARTIAL["ins"], outs=s(None, ("data", "model")))
    assert f"{kind} over data,model: f32[1001,1024]" in found


def test_an_all_to_all_of_unequal_blocks_of_a_partial_result_gathers_the_operand():
    def fn(x, y):
        product = constrain(x, s("model", "data")).T @ constrain(y, s("model"))
        return constrain(product, s(None, ("data", "model"))) * 2

    rows = 8 * B
    found = emitted(fn, a(rows, 1001), a(rows, D), ins=(s("model"), s("model")), outs=s(None, ("data", "model")))
    assert any(line.startswith("all-gather over data") for line in found)
