"""argmax and top_k sharded along the dim they select from: every shard selects, and one selection among these follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clusters import NEAR
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.mesh.layout import MeshShape
from shardplan.testing import difference
from shardplan.xla import available
from shardplan.xla.hlo.collectives import collectives

pytestmark = pytest.mark.usefixtures("first_plan")


def values(dtype: str):
    """Many equal numbers; of real ones infinities, NaN and zeros of both signs among them."""
    random = np.random.default_rng(0)
    x = random.integers(-3, 4, (5, 32)).astype("float32")
    if "float" in dtype:
        x[1, [3, 20]], x[2, 9], x[3, 31], x[4] = np.nan, np.inf, -np.inf, random.choice((0.0, -0.0), 32)
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 2, "y": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32"])
def test_same_places_the_first_of_equals(dtype, axes, kind):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))
    x = values(dtype)

    def run(x):
        first = {n: getattr(lax, n)(x, 1, index) for n, index in (("argmax", "int32"), ("argmin", "int8"))}
        return first, [lax.top_k(x, k) for k in (1, 3, 7, 32)]

    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(None, tuple(axes)))(run)
    for got, want in zip(jax.tree.leaves(step(x)), jax.tree.leaves(jax.jit(run)(x)), strict=True):
        assert difference(got, want) is None
    sent = collectives(step.compile(x).as_text(), MeshShape(tuple(axes), tuple(axes.values())))
    assert {c.kind for c in sent} == {"all-gather"} and max(c.bytes for c in sent) <= 5 * 32 * 4


def test_the_compiled_program_has_the_planned_collectives():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    step = shardplan.auto(mesh, cluster=NEAR, in_shardings=P(None, ("x", "y")))(lambda x: (x.argmax(1), lax.top_k(x, 3)))
    planned = [(c.kind, c.bytes, c.axes) for d in step.plan(values("float32")).decisions for m in d.reshards for c in m.collectives]
    assert planned == [("all-gather", 5 * n * 8 * 4, ("x", "y")) for n in (1, 1, 3, 3)]
    found = collectives(step.compile(values("float32")).as_text(), MeshShape(("x", "y"), (2, 4)))
    assert sorted(p.array.bytes for c in found for p in c.parts) == sorted(b for _, b, _ in planned)


ACCURACY = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 1 << 20), jnp.bfloat16)


def accuracy(x, w, labels):
    def loss(w):
        logits = (x @ w).astype(jnp.float32)
        hits = logits.argmax(-1) == labels, (lax.top_k(logits, 5)[1] == labels[:, None]).any(-1)
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, -1) - picked).mean(), [h.mean() for h in hits]

    (value, hits), grad = jax.value_and_grad(loss, has_aux=True)(w)
    return w - grad, value, hits


@pytest.mark.skipif(not available(), reason='needs pip install "shardplan[gpu-check]"')
def test_counting_hits_keeps_the_classes_sharded():
    """A million classes sharded over all devices; XLA would gather the logits to see which is the largest."""
    plan = shardplan.auto(AbstractMesh((8,), ("x",)), donate_argnums=1, cluster="h100")(accuracy).plan(
        *ACCURACY, jax.ShapeDtypeStruct((1024,), jnp.int32)
    )
    assert {leaf.path: leaf.layout.dims for leaf in plan.inputs}["w"] == ((), ("x",))
    found = plan.check("h100:8")
    assert not found.comparison.of("unplanned") and not found.comparison.of("dearer")
    assert max(c.bytes for c in found.compiled.collectives) <= 1024 * 512 * 2
