"""What OneFlow's options change about a plan (docs/coming_from_oneflow.md); `user_shardings`, `compute_scale` and the words that save
memory are tried in test_auto.py, `overlap` in test_overlap.py."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan

MESH = jax.sharding.AbstractMesh((8,), ("x",))


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


W, X = {"up": shape(512, 2048), "down": shape(2048, 512)}, shape(8192, 512)


def loss(w, x):
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"]) ** 2)


def train(w, x):
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))


def planned(fun=train, *args, cluster="h100", **options):
    return shardplan.auto(MESH, cluster=cluster, **options)(fun).plan(*(args or (W, X)))


def slow_links(factor):
    """An H100 cluster on which every collective begins that much later."""
    cluster = shardplan.Cluster.preset("h100")
    intra, inter = (replace(link, latency_s=factor * link.latency_s) for link in (cluster.intra, cluster.inter))
    return replace(cluster, intra=intra, inter=inter)


def test_enable_auto_parallel():
    alone = planned(in_shardings=P(), out_shardings=P(), cluster=slow_links(1e6))
    assert not alone.comm_bytes and planned().seconds["total"] < 0.55 * alone.seconds["total"]


def test_wait_time_is_the_latency_of_a_collective():
    usual, late = planned(), planned(cluster=slow_links(100))

    def count(plan):
        return sum(c.kind != "slice" for d in plan.decisions for m in d.reshards for c in m.collectives)

    assert count(late) < count(usual) and late.seconds["total"] > usual.seconds["total"]


def test_sbp_collector_shares_what_several_ops_read():
    """Two products read one array that is split otherwise: it is gathered once for both."""

    def both(x, a, b):
        return x @ a, x @ b

    a = shape(4096, 1 << 15)
    options = {"in_shardings": (P(None, "x"), P(None, "x"), P(None, "x")), "out_shardings": P(None, "x")}
    plan = planned(both, shape(512, 4096), a, a, **options)
    moved = [c for d in plan.decisions for m in d.reshards for c in m.collectives]
    assert [c.kind for c in moved] == ["all-gather"] and plan.comm_bytes == 7 / 8 * 512 * 4096 * 4


@pytest.mark.parametrize(("word", "limit"), [("disable", None), ("adaptive", shardplan.Cluster.preset("h100").device.memory_bytes)])
def test_auto_memory_in_words(word, limit):
    assert planned(memory=word).memory().limit == limit
