"""In which order XLA's memory scheduler puts kernels and collectives, what is in memory then, and peaks that follow from it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.costs.decided_memory import DecidedMemory
from shardplan.xla import available
from shardplan.xla_model.liveness import conditionals
from shardplan.xla_model.memory_order import Computation, depth_first_order, list_order, memory_orders, peak_bytes, post_order

F32, BF16, S = jnp.float32, jnp.bfloat16, jax.ShapeDtypeStruct
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
needs_gpu_compiler = pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')


def computation(*instructions: tuple[str, str, float], kept: str = "", **more) -> Computation:
    """Of (name, names of what it reads, bytes written): instruction n writes buffer n. The last one's results are handed out."""
    names = [name for name, *_ in instructions]
    before = [[names.index(x) for x in reads.split()] for _, reads, _ in instructions]
    handed_out = frozenset(names.index(x) for x in kept.split())
    sizes = {n: size for n, (*_, size) in enumerate(instructions)}
    return Computation(before, before, [[n] for n in sizes], sizes, handed_out, [len(names) - 1], {}, **more)


def named(order, instructions) -> str:
    return " ".join(instructions[n][0] for n in order)


BRANCHES = [("a", "", 4.0), ("b", "a", 1.0), ("c", "", 2.0), ("d", "c", 1.0), ("e", "b d", 1.0)]


def test_the_list_takes_what_adds_least_to_memory_the_others_come_from_the_results_back():
    """Of two branches the one of 4 bytes comes first from the results back, and last in the list."""
    of = computation(*BRANCHES, kept="e")
    assert named(list_order(of), BRANCHES) == "c d a b e"
    assert named(post_order(of), BRANCHES) == "a b c d e" == named(depth_first_order(of), BRANCHES)


def test_depth_first_takes_the_operand_first_behind_which_more_is_read_more_than_once():
    instructions = [("a", "", 1.0), ("b", "a", 1.0), ("c", "", 1.0), ("d", "c", 1.0), ("e", "c d", 1.0), ("f", "b e", 1.0)]
    of = computation(*instructions, kept="f")
    assert named(depth_first_order(of), instructions) == "c d e a b f"
    assert named(post_order(of), instructions) == "a b c d e f"


def test_a_module_takes_the_order_of_the_least_peak():
    of = computation(*BRANCHES, kept="e")
    peaks = [peak_bytes({-1: of}, {-1: order(of)}, -1) for order in (list_order, depth_first_order, post_order)]
    assert peaks == [6.0, 5.0, 5.0]
    assert named(memory_orders({-1: of}, -1)[-1], BRANCHES) == "a b c d e"


def test_inputs_are_in_memory_until_they_are_read_and_loops_hold_what_their_rounds_need():
    inside = computation(("x", "", 8.0), ("y", "x", 1.0), kept="y")
    of = Computation([[], [0]], [[9], [0]], [[0], [1]], {0: 2.0, 1: 1.0, 9: 4.0}, frozenset({1}), [1], {1: 0}, inputs=frozenset({9}))
    orders = {-1: [0, 1], 0: [0, 1]}
    assert peak_bytes({-1: of, 0: inside}, orders, -1) == 2 + 1 + 9  # the input of 4 bytes is no longer there


@pytest.mark.parametrize(("kind", "peak"), [("all-gather", 17.0), ("all-reduce", 16.0)])
def test_a_collective_starts_behind_its_operand_and_is_done_before_its_result_is_read(kind, peak):
    """`s` stands behind `b`, which it does not need, but starts before; an all-reduce holds no operand, once it has started."""
    instructions = [("a", "", 1.0), ("b", "", 8.0), ("c", "b", 1.0), ("s", "a", 8.0), ("e", "s c", 1.0)]
    of = computation(*instructions, kept="e", collectives={3: kind})
    assert peak_bytes({-1: of}, {-1: [0, 1, 2, 3, 4]}, -1) == peak + 1.0
    assert peak_bytes({-1: computation(*instructions, kept="e")}, {-1: [0, 1, 2, 3, 4]}, -1) == 10.0


# ---- peaks of compiled steps


def layers(weights, x):
    for w in weights:
        x = jax.nn.swish(x @ w.astype(x.dtype))
    return x


def two_networks(state, x):
    """Of which one may run to the end of its backward pass before the other one begins."""

    def loss(state):
        a, b = (layers(state[name], x).astype(F32) for name in ("a", "b"))
        return (a**2).mean() + (b**2).mean()

    grads = jax.grad(loss)(state)
    norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda w, g: w - 0.1 * g / norm, state, grads)


def one_network(state, x):
    """Of which the gradients are all-reduced together."""
    grads = jax.grad(lambda state: (layers(state, x).astype(F32) ** 2).mean())(state)
    return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), state, grads)


def sharded_optimizer(state, x):
    """Weights that are gathered again behind an update of their shards."""
    grad = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(state["w"])
    mean, square = 0.9 * state["mean"] + grad, 0.9 * state["square"] + grad**2
    return {"w": state["w"] - 0.1 * mean / jnp.sqrt(square + 1), "mean": mean, "square": square}


def peaks(step, state, x, weights):
    """Predicted and compiled bytes of a step that is data-parallel but for its `weights`."""
    made = shardplan.auto(MESH, donate_argnums=0, cluster="h100", compiler_options=None, in_shardings=(weights, P("data")))(step)
    plan = made.plan(state, x)
    found = plan.check("h100:8").report.compiled
    assert found.ok, found.error
    return plan.memory().peak, found.memory.peak_bytes


def test_what_a_branch_reshards_is_made_before_the_branch_reads_it():
    """Copies stand in the conditional whose branches alone read them, of values from within and from outside."""
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def layout(x, *spec):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, P(*spec)))

    def step(w, x, flag):
        def deep(w, x):
            h = layout(jax.nn.gelu(x @ w["a"]) @ w["b"], None, "model")
            return layout(jnp.tanh(h), "data", None) @ w["c"] + layout(h, "data", None) @ w["d"]

        def loss(w):
            return jnp.mean(jax.lax.cond(flag, deep, lambda w, x: layout(x @ w["c"], None, "model"), w, x) ** 2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    weights = {name: S((256, 256), F32) for name in "abcd"}
    planned = (
        shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(weights, S((1024, 256), F32), S((), bool)).context.planned
    )
    order, graph = DecidedMemory(planned.program(planned.xla)).order, planned.graph
    makers = [{graph.values[v].producer[0] for v in op.inputs if v is not None} for op in graph.ops]
    first = conditionals(graph)
    assert any(graph.ops[i].traits.copy and first[i] == first[j] != i for j, some in enumerate(makers) for i in some)
    assert all(order.places[i] < order.places[j] for j, some in enumerate(makers) for i in some)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("widths", [(1024, 1024), (2048, 1024)])
def test_two_networks_have_in_memory_what_xla_holds_of_them(widths):
    state = {name: [S((256, width), F32), *[S((width, width), F32)] * 3] for name, width in zip("ab", widths, strict=True)}
    planned, emitted = peaks(two_networks, state, S((65536, 256), BF16), P())
    assert planned == pytest.approx(emitted, rel=0.1)


@pytest.mark.slow
@needs_gpu_compiler
def test_the_buffer_of_combined_all_reduces_is_in_memory_besides_the_arrays():
    planned, emitted = peaks(one_network, [S((2048, 2048), BF16)] * 5, S((8192, 2048), BF16), P())
    assert planned == pytest.approx(emitted, rel=0.05)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_the_product_that_a_reduce_scatter_reads_is_in_memory_though_a_view_of_its_shard_is_read(spec):
    """And what is gathered along an inner dim is transposed when it leaves the step."""
    state = dict.fromkeys(("w", "mean", "square"), S((4096, 8192), F32))
    planned, emitted = peaks(sharded_optimizer, state, S((16384, 4096), F32), {"w": P(), "mean": spec, "square": spec})
    assert planned == pytest.approx(emitted, rel=0.01)
