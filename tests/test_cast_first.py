"""What is sent of an array that casts stand before or behind: which reads a collective brings narrower, and at what price."""

import jax
import jax.numpy as jnp
import pytest
from clusters import H100

import shardplan
from shardplan.costs.space import StepFacts
from shardplan.ir.parse import parse
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder
from shardplan.xla_model.cast_first import MOVES, Factors

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
TABLE, IDS = jax.ShapeDtypeStruct((2048, 1024), F32), jax.ShapeDtypeStruct((512,), jnp.int32)


def tied(table, ids):
    """Rows of the table, and their logits: both readers cast it, one of them its transpose."""
    return table.astype(BF16)[ids] @ table.T.astype(BF16)


def cast_first(function) -> set[Factors | None]:
    """Of all reads of the table and of its copies, what a collective sends of it; None for all of it."""
    facts = StepFacts.of(parse(jax.make_jaxpr(function)(TABLE, IDS)), MeshShape(("x",), (8,)))
    graph = facts.graph
    table = next(op.outputs[0] for op in graph.ops if op.traits.step_input and op.outs[0].shape == TABLE.shape)
    reads = ((j, k) for j, op in enumerate(graph.ops) for k, v in enumerate(op.inputs) if v is not None and graph.original(v) == table)
    return {facts.cast_first.get(read) for read in reads}


def once(table, ids):
    return jnp.tanh(table.reshape(4, 512, 1024).astype(BF16))


@pytest.mark.parametrize(
    ("function", "sent"),
    [
        (tied, {"all-to-all": 0.5}),
        (lambda table, ids: tied(table.reshape(2, 1024, 1024).reshape(2048, 1024), ids), {"all-to-all": 0.5}),
        (lambda table, ids: table.astype(jnp.float8_e4m3fn)[ids] @ table.T.astype(jnp.float8_e4m3fn), {"all-to-all": 0.25}),
        (once, dict.fromkeys(MOVES, 0.5)),
        (lambda table, ids: (once(table, ids), jnp.sin(table.reshape(4, 512, 1024).astype(BF16))), {"all-to-all": 0.5}),
        (lambda table, ids: (jnp.tanh(cast := table.astype(BF16)), jnp.sin(cast)), {"all-to-all": 0.5}),
        (lambda table, ids: (once(table, ids), jnp.tanh(table)), None),
        (lambda table, ids: table[ids].astype(BF16) @ table.T.astype(BF16), None),  # a lookup in the wide table
        (lambda table, ids: (tied(table, ids), jnp.tanh(table)), None),
        (lambda table, ids: (table.astype(BF16)[ids], table.T.astype(F16)), None),
        (lambda table, ids: (-table).T[ids], None),
    ],
)
def test_an_array_is_sent_narrower_if_all_that_read_it_cast_it_so(function, sent):
    assert cast_first(function) == {sent and tuple(sent.items())}


@pytest.mark.parametrize(
    ("dtype", "function", "fraction"),
    [
        (BF16, lambda w: w.astype(F32), 0.5),
        (jnp.int8, lambda w: w.astype(F32) * 0.5, 0.25),
        (BF16, lambda w: jnp.tanh(w.astype(F32)), 1.0),
        (F32, lambda w: w.astype(BF16), 1.0),
        (BF16, lambda w: w.astype(F32) * w.astype(F32), 1.0),
    ],
)
def test_a_widened_array_is_sent_as_it_was_before(dtype, function, fraction):
    closed = jax.make_jaxpr(lambda w: jnp.sin(function(w)))(jax.ShapeDtypeStruct((64, 64), dtype))
    facts = StepFacts.of(parse(closed), MeshShape(("x",), (8,)))
    made = next(v for op in facts.graph.ops if op.primitive == "sin" for v in op.inputs)
    resharder = Resharder(MeshShape(("x",), (8,)), H100)
    rows, columns = Layout((("x",), ())), Layout(((), ("x",)))
    (step,) = resharder.sending(facts.moved[made].byte_factors).path((64, 64), facts.graph.values[made].itemsize, rows, columns)
    assert (step.kind, step.bytes) == ("all-to-all", fraction * 64 * 64 * facts.graph.values[made].itemsize / 8)


def test_an_update_that_reads_the_wide_array_pays_for_it_alone():
    def step(table, ids):
        gradient = jax.grad(lambda table: jnp.sum(tied(table, ids).astype(F32) ** 2))(table)
        return table - 0.1 * gradient

    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    planned = shardplan.auto(mesh, cluster="h100", donate_argnums=0)(step).plan(TABLE, IDS).context.planned
    graph, network = planned.graph, planned.network
    before, after = Layout((("x",), ())), Layout(((), ("x",)))
    (table,) = (i for i, op in enumerate(graph.ops) if op.traits.step_input and op.outs[0].shape == TABLE.shape)
    sent = {}
    for j, k in graph.values[graph.ops[table].outputs[0]].consumers:
        (move,) = network.path(j, k, before, after)
        (gather,) = network.path(j, k, before, Layout(((), ())))
        sent[graph.ops[j].phase] = move.bytes
        alike = network.prices.resharder.path(TABLE.shape, 4 * move.bytes / (TABLE.size * 4 / 8), before, after)
        assert move.kind == "all-to-all" and move.seconds == pytest.approx(alike[0].seconds)
        assert (gather.kind, gather.bytes) == ("all-gather", TABLE.size * 4)
    assert sent == {"forward": TABLE.size * 2 / 8, "update": TABLE.size * 4 / 8}
