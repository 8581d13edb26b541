"""What XLA makes of convolutions: cuDNN's calls, and the copies before them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import H100
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.costs.convolution_calls import local_sizes
from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh import rates
from shardplan.mesh.cluster import Cluster
from shardplan.mesh.layout import MeshShape
from shardplan.xla import available, compile
from shardplan.xla.hlo.products import products
from shardplan.xla_model.convolutions import call_orders
from shardplan.xla_model.physical_order import physical_orders

needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
SIZE, WIDTH = 32, 64
OPTIONS = {
    "plain": {},
    "strides": {"window_strides": (2, 2), "padding": ((1, 1), (1, 1))},
    "uneven": {"padding": ((2, 0), (2, 0))},
    "strides, uneven": {"window_strides": (2, 2), "padding": ((0, 1), (0, 1))},
    "dilated": {"padding": ((3, 3), (2, 2)), "rhs_dilation": (3, 2)},
    "dilated, uneven": {"padding": ((6, 0), (4, 0)), "rhs_dilation": (3, 2)},
    "dilated input": {"padding": ((2, 1), (2, 1)), "lhs_dilation": (2, 2)},
    "groups": {"feature_group_count": 4},
    "groups, strides": {"feature_group_count": 4, "window_strides": (2, 2)},
    "groups, dilated, uneven": {"feature_group_count": 4, "padding": ((6, 0), (4, 0)), "rhs_dilation": (3, 2)},
}


def case(name: str, dtype=jnp.float32):
    """A convolution's value and gradients, and its arguments."""
    options = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), **OPTIONS[name]}
    groups = options.get("feature_group_count", 1)

    def fn(x, w):
        def loss(x, w):
            y = jax.lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)
            return (y.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(x, w)

    shapes = (8, SIZE, SIZE, WIDTH), (3, 3, WIDTH // groups, WIDTH)
    return fn, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def facts_of(fn, args) -> StepFacts:
    return StepFacts.of(parse(jax.make_jaxpr(fn)(*args)), MeshShape(("x",), (1,)), H100.device)


def flops(facts: StepFacts) -> list[float]:
    """Of every convolution, as cuDNN multiplies."""
    found = zip(facts.graph.ops, facts.rules, facts.traffic, strict=True)
    return sorted((rule.flops or 0.0) * moves.call.flops for op, rule, moves in found if op.traits.convolution)


def as_products(facts: StepFacts, mesh: MeshShape) -> list[np.ndarray]:
    """Of every convolution, (batch, rows, columns, contracted elements) on a device as a product, per strategy."""
    found = zip(facts.graph.ops, facts.signatures.read(facts.graph, {}, None), facts.traffic, strict=True)
    out = []
    for op, signature, moves in found:
        if op.traits.convolution:
            work = (signature.rule.flops or 0.0) * moves.call.flops * signature.strategies.work
            sizes = local_sizes(op, signature.rule, signature.strategies, mesh, moves.call, work)
            out.append(np.stack(np.broadcast_arrays(*sizes), axis=1))
    return out


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_convolution_and_its_gradients_are_the_products_that_the_calls_of_cudnn_are(name):
    """XLA swaps the operands of a dilated input's filter gradient, of which it then pads the other one: 3 %."""
    fn, args = case(name)
    facts = facts_of(fn, args)
    done = compile(jax.jit(fn, in_shardings=NamedSharding(MESH, P())), *args, target="h100:8")
    found = products(done.module)
    assert flops(facts) == pytest.approx(sorted(p.flops for p in found), rel=0.04)
    planned = sorted(tuple(sizes[0]) for sizes in as_products(facts, MeshShape(("x",), (1,))))
    assert planned == [pytest.approx(sizes, rel=0.04) for sizes in sorted(p.sizes for p in found if p.sizes)]


@pytest.mark.parametrize(("name", "dims"), [("plain", {(), (1,), (2,), (3,)}), ("groups", {(), (0,)})])
def test_shards_of_a_convolution_are_smaller_products(name, dims):
    fn, args = case(name)
    mesh = MeshShape(("x", "y"), (2, 4))
    facts = StepFacts.of(parse(jax.make_jaxpr(fn)(*args)), mesh, H100.device)
    for sizes in as_products(facts, mesh):
        split = [tuple(np.flatnonzero(sizes[0] != of).tolist()) for of in sizes]
        assert dims <= set(split)
        assert {sizes[s].prod() / sizes[0].prod() for s, found in enumerate(split) if len(found) == 1} <= {1 / 2, 1 / 4, 1 / 8}


def test_few_channels_of_a_convolution_take_as_long_as_64_bytes_of_them():
    few, many = (rates.convolution_sizes(1, 2**20, 64, 2.0 * 2**20 * 9 * c, c, 2, False, (3, 3)) for c in (3, 32))
    assert few == pytest.approx(many)
    rows, more = (rates.convolution_sizes(1, 9 * c * 64, 64, 2.0 * 2**20 * 9 * c, c, 2, True, (3, 3))[1] for c in (3, 32))
    assert rows == more == 9 * 32


def test_a_dilated_window_is_filled_with_zeros_only_where_the_padding_is_uneven():
    plain, dilated, uneven = (flops(facts_of(*case(name)))[-1] for name in ("plain", "dilated", "dilated, uneven"))
    assert dilated < 1.05 * plain
    assert uneven == pytest.approx(7 / 3 * 5 / 3 * plain, rel=0.1)


def test_unevenly_padded_input_is_copied_once_for_both_calls_that_read_it():
    fn, args = case("uneven")
    facts = facts_of(fn, args)
    (copy,) = (copy for copy in facts.copies if copy.operand == 0 and facts.graph.ops[copy.op].phase == "forward")
    readers = [at for at, op in enumerate(facts.graph.ops) if op.traits.convolution and op.ins[0].shape == args[0].shape]
    assert copy.times == pytest.approx(((SIZE + 2) / SIZE) ** 2)
    assert copy.op < copy.last and {copy.op, copy.last} <= {*readers}


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("space", ["W", "HW", "DHW"])
@pytest.mark.parametrize("gpu", ["h100", "a100", "b200"])
def test_activations_of_convolutions_are_transposed_unless_channels_are_where_the_call_has_them(gpu, space, dtype):
    """In a residual network, whose activations all take the order of its convolutions."""
    device, size = Cluster.preset(gpu).device, {"N": 4, "D": 8, "H": 8, "W": 24, "C": 48}
    for dims, weights in (f"N{space}C", f"{space}IO"), (f"NC{space}", f"OI{space}"):

        def loss(ws, x, dims=dims, weights=weights):
            for w in ws:
                y = jax.lax.conv_general_dilated(x, w, (1,) * len(space), "SAME", dimension_numbers=(dims, weights, dims))
                x = x + jax.nn.relu(y)
            return (x.astype(jnp.float32) ** 2).mean()

        of = {"I": 48, "O": 48, "D": 3, "H": 3, "W": 3}
        image = jax.ShapeDtypeStruct([size[d] for d in dims], dtype)
        args = [jax.ShapeDtypeStruct([of[d] for d in weights], dtype)] * 2, image
        done = compile(jax.grad(loss), *args, target=f"{gpu}:1")
        labels = set(re.findall(r"dim_labels=b(\w+)_\w+->b(\w+)", done.text))
        last = labels == {("".join(map(str, range(len(space)))) + "f",) * 2}
        assert last or labels == {("f" + "".join(map(str, range(len(space)))),) * 2}
        kernels = [i for i in done.module.computations[done.module.entry] if "transpose" in i.name]
        moved = [x for i in kernels for x in i.arrays if x.size == image.size]
        facts = StepFacts.of(parse(jax.make_jaxpr(jax.grad(loss))(*args)), MeshShape(("x",), (1,)), device)
        orders = physical_orders(facts.graph, facts.rules, call_orders(facts.graph, device))
        planned = any(facts.graph.ops[at].ins[k].size == image.size for at, some in orders.transposed.items() for k, _ in some)
        assert bool(moved) == planned == (last != (dims[-1] == "C"))


@needs_gpu_compiler
@pytest.mark.slow
def test_weights_are_transposed_before_a_convolution():
    """Of the weights [h, w, i, o] one kernel makes a transposed copy for value and gradient."""
    weights, image = jax.ShapeDtypeStruct((3, 3, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((8, SIZE, SIZE, WIDTH), jnp.float32)

    def fn(w, x):
        return jax.lax.conv_general_dilated(jnp.tanh(x), w, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC"))

    done = compile(jax.jit(fn, in_shardings=NamedSharding(MESH, P())), weights, image, target="h100:8")
    moved = [i for i in done.module.computations[done.module.entry] if re.match(r"(wrapped_transpose|copy)(\.|$)", i.name)]
    assert [(i.name.partition(".")[0], i.arrays[0].size) for i in moved] == [("wrapped_transpose", 9 * WIDTH * WIDTH)]
    assert [times for moves in facts_of(fn, (weights, image)).traffic if moves.call for _, times in moves.call.copied] == [2.0]


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dims", "states", "copies"),
    [
        (jnp.bfloat16, "HWIO", 1, 1),
        (jnp.bfloat16, "HWIO", 3, 3),
        (jnp.float32, "HWIO", 1, 0),  # the gradient has the dtype of one
        (jnp.float32, "HWIO", 3, 2),
        (jnp.bfloat16, "OHWI", 3, 0),  # as gradients are
    ],
)
def test_the_state_that_an_update_of_weights_writes_is_copied(dtype, dims, states, copies):
    def step(state, x):
        def loss(w):
            y = jax.lax.conv_general_dilated(x, w.astype(dtype), (1, 1), "SAME", dimension_numbers=("NHWC", dims, "NHWC"))
            return (y.astype(jnp.float32) ** 2).mean()

        new = jax.grad(loss)(state[0])
        out = [new := 0.9 * old + new for old in state[1:]]
        return [state[0] - 0.1 * new, *out]

    size = {"H": 3, "W": 3, "I": WIDTH, "O": 2 * WIDTH}
    state = [jax.ShapeDtypeStruct([size[d] for d in dims], jnp.float32)] * states
    image, numbers = jax.ShapeDtypeStruct((8, SIZE, SIZE, WIDTH), dtype), range(states)
    jitted = jax.jit(step, in_shardings=NamedSharding(MESH, P()), out_shardings=NamedSharding(MESH, P()), donate_argnums=0)
    done = compile(jitted, state, image, target="h100:8")
    assert sum(i.opcode == "copy" for i in done.module.computations[done.module.entry]) == copies

    graph = parse(jax.make_jaxpr(step)(state, image), tied=[(n, n) for n in numbers], donated=tuple(numbers))
    traffic = StepFacts.of(graph, MeshShape(("x",), (1,)), H100.device).traffic
    assert sum(moves.copied for moves in traffic) == copies
