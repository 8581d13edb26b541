"""What is in memory in every order of a step's ops, refuted by drawn orders; and what the error says that no plan takes less than."""

import random

import jax
import jax.numpy as jnp
import pytest
from models import MODELS
from sweeps import sweep

import shardplan
from shardplan.costs.build import build_network
from shardplan.ir.parse import parse
from shardplan.xla_model.copies import with_copies
from shardplan.xla_model.live_in_any_order import chain_through, live_in_any_order
from shardplan.xla_model.overlap_windows import OverlapWindows

WIDTH, LAYERS, ROWS = 256, 6, 4096


def planned(name):
    create, step, batches = MODELS[name]()
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    state = jax.eval_shape(create, jax.random.key(0))
    return shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(state, next(iter(batches(1)))).context.planned


def bounding(found, at):
    """The plan's network, with empty windows, and the places at which values are in memory in any order along a chain through an op."""
    space = found.space
    network = build_network(space, found.network.prices.resharder, 1e15, windows=OverlapWindows())
    chain = chain_through(space.graph, at)
    return network, chain, live_in_any_order(space.graph, space.materialised, network.prices.live, chain)


def drawn_order(graph, node, draw):
    """A time for every op, such that ops run behind what they read; loops at a stretch."""
    before = {n: set() for n in node}
    for j, op in enumerate(graph.ops):
        before[node[j]] |= {node[graph.values[v].producer[0]] for v in op.inputs if v is not None} - {node[j]}
    waiting = {n: len(some) for n, some in before.items()}
    after = {n: [m for m in before if n in before[m]] for n in before}
    ready, times = [n for n, some in waiting.items() if not some], {}
    while ready:
        n = ready.pop(draw.randrange(len(ready)))
        times[n] = len(times)
        for m in after[n]:
            waiting[m] -= 1
            if not waiting[m]:
                ready.append(m)
    return times


def last_reads(found, time, node, copied):
    """Per value, when it is read last, by what is written and reads it through what is not; or, if `copied`, a copy of it is."""
    graph, out = found.graph, [-1.0] * len(found.graph.values)
    for v in reversed(range(len(out))):
        for at, _ in graph.values[v].consumers:
            op = graph.ops[at]
            through = [w for w in op.outputs if (copied if op.traits.copy else not found.space.materialised[w])]
            here = float("inf") if op.traits.step_output else time[node[at]]
            out[v] = max([out[v], here, *(out[w] for w in through)])
    return out


@pytest.mark.parametrize("name", ["hybrid_mlp", "digits_cnn", "face_softmax"])
def test_no_drawn_order_frees_what_is_in_memory_in_any(name):
    found = planned(name)
    graph, draw = found.graph, random.Random(name)
    inside = {j: loop.start for loop in sorted(graph.loops, key=lambda x: x.stop - x.start) for j in range(loop.start, loop.stop)}
    node = [inside.get(j, j) for j in range(len(graph.ops))]
    counted = 0
    for _ in range(5):
        _, chain, live = bounding(found, draw.randrange(len(graph.ops)))
        for _ in range(5):
            time = drawn_order(graph, node, draw)
            in_copies = {v: interval for v, (interval, _) in live.copied.items()}
            for intervals, copied in ((enumerate(live.values), False), (in_copies.items(), True)):
                last = last_reads(found, time, node, copied)
                for v, interval in intervals:
                    maker = graph.ops[graph.values[v].producer[0]]
                    for at in chain[slice(*interval)] if interval else ():
                        counted += 1
                        assert maker.traits.persistent or time[node[graph.values[v].producer[0]]] <= time[at]
                        assert maker.traits.persistent or last[v] > time[at]
    assert counted > 1000


@pytest.mark.parametrize("name", sweep(MODELS, lambda name: name in ("gpt", "llama", "moe")))
def test_a_plan_takes_no_less_than_is_in_memory_in_any_order(name):
    found = planned(name)
    for at in range(0, len(found.graph.ops), max(1, len(found.graph.ops) // 7)):
        network, _, live = bounding(found, at)
        own = network.states_of(found.strategies, ())
        assert 0 < network.in_any_order(live).peak(own) <= network.peak(own)


def test_of_an_array_whose_narrower_copy_may_be_held_instead_the_copy_counts():
    """y is written, for two read it; its cast is not, and is copied for the last op: that copy may be made first, and y freed."""

    def step(x):
        y = jnp.sin(x * x.sum())
        narrow = y.astype(jnp.bfloat16)
        z = (narrow @ narrow + y.sum()).astype(jnp.bfloat16)
        return z @ z @ narrow

    graph = parse(jax.make_jaxpr(step)(jnp.ones((8, 8))))
    graph = with_copies(graph, [op.primitive != "dot_general" for op in graph.ops], [False] * len(graph.ops))
    (sine,) = (at for at, op in enumerate(graph.ops) if op.primitive == "sin")
    (cast,) = {at for v in graph.ops[sine].outputs for at in graph.readers(v) if graph.ops[at].primitive == "convert_element_type"}
    written = [value.producer[0] != cast for value in graph.values]
    live = live_in_any_order(graph, written, [(0, 1)] * len(graph.values), chain_through(graph, sine))
    assert live.copied[graph.ops[sine].outputs[0]][1] == 8 * 8 * 2


def test_two_networks_that_may_run_one_after_the_other_are_not_proven_to_need_the_memory_of_both():
    """Each holds its activations until its own backward pass, which XLA may run before the other's forward pass."""
    shape = jax.ShapeDtypeStruct
    params = [[shape((WIDTH, WIDTH), "bfloat16")] * LAYERS for _ in range(2)]
    mesh = jax.sharding.AbstractMesh((2,), ("data",))

    def step(params, x):
        def loss(layers):
            h = x
            for w in layers:
                h = jnp.tanh(h @ w)
            return (h.astype(jnp.float32) ** 2).mean()

        gradients = jax.grad(lambda params: sum(map(loss, params)))(params)
        return jax.tree.map(lambda w, g: w - g, params, gradients)

    def said(memory):
        with pytest.raises(shardplan.ShardingError) as refused:
            shardplan.auto(mesh, cluster="h100", donate_argnums=0, memory=memory)(step).plan(params, shape((ROWS, WIDTH), "bfloat16"))
        return str(refused.value)

    activations = LAYERS * ROWS * WIDTH * 2 / 2  # of one network, on one device
    weights = 2 * LAYERS * WIDTH * WIDTH * 2
    assert said(0.8 * activations).startswith("no plan fits")
    assert said(weights + 1.3 * activations).startswith("no plan found fits")
