# job.py
import jax
import jax.numpy as jnp

import shardplan

jax.config.update("jax_num_cpu_devices", 8)  # only without GPUs: the CPU plays 8 devices
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def create_state(key, width=512):
    up, down = jax.random.split(key)
    return {"up": 0.04 * jax.random.normal(up, (width, 4 * width)), "down": 0.02 * jax.random.normal(down, (4 * width, width))}


def loss_fn(params, batch):
    return jnp.mean((jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


@shardplan.auto(mesh, donate_argnums=0)
def train_step(state, batch):  # nothing in it speaks of devices
    loss, grads = jax.value_and_grad(loss_fn)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def example(width=8192, rows=16384):  # a step and its arguments, for `shardplan plan job.py:example`
    state = jax.eval_shape(lambda: create_state(jax.random.key(0), width))
    return train_step, (state, {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")})


if __name__ == "__main__":
    batch = {"x": jnp.ones((64, 512)), "y": jnp.ones((64, 512))}
    shapes = jax.eval_shape(create_state, jax.random.key(0))
    plan = train_step.plan(shapes, batch)  # shapes are enough
    print(plan.explain())
    plan.save("plan.json")

    state = train_step.init(create_state, jax.random.key(0))  # created sharded: no device ever holds all of it
    for _ in range(10):
        state, loss = train_step(state, batch)  # runs as planned
    print("loss", loss, "before the last update; after it, by plain JAX,", jax.jit(loss_fn)(state, batch))  # plain arrays
