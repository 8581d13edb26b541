"""Layers and transformations of flax and equinox as programs: each with the gradient of its loss, named by what it is made of."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from functions import KEY, VECTOR, X, loss_of, names
from jax import lax

IMAGES, SEQUENCE, VOLUME = (jax.random.normal(KEY, s) for s in [(4, 8, 8, 6), (4, 8, 6), (6, 4, 4, 4)])
TOKENS = (jnp.abs(SEQUENCE[..., 0]) * 5).astype(int)
FILMS = jnp.stack([IMAGES] * 3, 1)

NOT_LAYERS = {
    "linen": """
        Module Variable FrozenDict DenyList RNNCellBase  (what layers are written with, or of)
        Fp8DotGeneral Fp8EinsumBase  (another name, or the base, of what is a program)
        apply init init_with_output tabulate compact_name_scope nowrap intercept_methods merge_param share_scope fold_rngs
        disable_named_call enable_named_call override_named_call named_call unbox  (about modules, not about arrays)
        LogicallyPartitioned add_metadata_axis get_logical_axis_rules get_partition_spec get_sharding logical_axis_rules
        logical_to_mesh logical_to_mesh_axes logical_to_mesh_sharding set_logical_axis_rules  (flax's own layouts)
        compact  (in every program)
        ones_init zeros_init  (jax's)
    """,
    "nnx": """
        Module Object Pytree Rngs RngStream RngKey RngCount RngState RNNCellBase Param Variable VariableMetadata merge split
        Initializer graphdef state  (what layers are written with, or of)
        BatchStat Cache DiffState Intermediate LoRAParam OptArray OptState OptVariable Perturbation  (kinds of variables)
        All Any Everything Not Nothing OfType PathContains WithTag  (choose variables)
        FlatState GraphDef GraphState NodeStates PureState State StateAxes StateSharding Carry MergeContext SplitContext UpdateContext
        abstract_with_sharding as_abstract as_pure call capture check_pytree clone current_update_context data display dataclass
        filter_state find_duplicates flatten from_flat_state from_tree get_abstract_model has_data identity is_data iter_children
        iter_graph iter_module_children iter_modules map map_state merge_context merge_state pop prefix pure recursive_map
        register_data_type register_variable_name replace_by_pure_dict restore_int_paths set_metadata set_graph_mode
        set_graph_updates split_context split_state static tabulate to_flat_state to_pure_dict to_tree transform_metadata unflatten
        unpack update update_context use_eager_sharding using_eager_sharding var_defaults variable_name_from_type
        variable_type_from_name variables vars_as view view_info with_attributes with_metadata with_vars Data Static
        train_mode eval_mode  (about modules and their variables, not about arrays)
        fork_rngs reseed restore_rngs split_rngs with_rngs  (keys, which jax.random's programs split)
        get_named_sharding get_partition_spec logical_axis_rules with_partitioning  (flax's own layouts)
        cached_partial eval_shape jit_partial make_jaxpr  (do not run inside a step)
        pmap shard_map  (jax's, on devices of their own choice)
        Metric  (the base of what is a program)
    """,
    "equinox": """
        State StateIndex delete_init_state  (what stateful layers are written with)
    """,
}
"""Public names that are no programs, each group with its reason."""


def public(module) -> dict[str, set[str]]:
    """The module's own classes and functions under all their names; not what it hands on of jax's."""
    found: dict = {}
    for name, x in vars(module).items():
        theirs = str(getattr(x, "__module__", "")).split(".")[0] == module.__name__.split(".")[0]
        if callable(x) and theirs and not name.startswith("_") and not inspect.ismodule(x):
            found.setdefault(id(x), set()).add(name)
    return {min(same): same for same in found.values()}


def missing(family: str, module, programs: set[str]) -> list[str]:
    """Public names of which there is neither a program nor a reason why not."""
    words = {word for name in programs for word in name.split()}
    left = words | names(NOT_LAYERS[family])
    return [name for name, same in public(module).items() if same.isdisjoint(left)]


def linen_layers():
    nn = pytest.importorskip("flax.linen")

    class Calls(nn.Module):
        """A module that does to itself, or to another, what a function says."""

        call: Callable

        @nn.compact
        def __call__(self, x):
            return self.call(self, x)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(6)(nn.gelu(nn.Dense(8)(nn.LayerNorm()(x)))), None

    class Times(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, (6,))

    def synced(_, x):
        """Batch norm whose mean is that of all devices."""
        norm = nn.BatchNorm(use_running_average=False, axis_name="devices")
        on_each = nn.vmap(lambda norm, x: norm(x), {"params": None, "batch_stats": None}, {"params": False}, axis_name="devices")
        return on_each(norm, x[:, None])

    def scanned(_, x):
        """Layers as one scan, each computed again backwards."""
        return nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(x, None)[0]

    def counted(module, x):
        """A loop that counts its turns in a variable."""

        def turn(m, x):
            m.variable("state", "turns", lambda: jnp.array(0)).value += 1
            return x + jnp.tanh(nn.Dense(6, name="dense")(x))

        if module.is_initializing():
            return turn(module, x)
        return nn.while_loop(lambda m, _: m.variables["state"]["turns"] < 4, turn, module, x, carry_variables="state")

    def chosen(module, x):
        return nn.cond(x[0, 0] > 0, lambda m, x: nn.Dense(4, name="d")(x), lambda m, x: -nn.Dense(4, name="d")(x), module, x)

    def switched(module, x):
        branches = [lambda m, x, by=by: by * nn.Dense(4, name="d")(x) for by in (1, 2, 3)]
        return nn.switch((x[0, 0] * 3).astype(int), branches, module, x)

    def pulled(_, x):
        y, back = nn.vjp(lambda m, x: m(x), nn.Dense(4), x)
        return y, back(jnp.sin(y))

    def pushed(_, x):
        layer = Times()
        layer(x)
        return nn.jvp(lambda m, x: m(x), layer, (x,), (jnp.sin(x),), {"params": layer.variables["params"]})

    def signed(_, x):
        """A layer whose parameters learn by the sign of their gradients."""

        def backward(back, cotangent):
            params, *inputs = back(cotangent)
            return jax.tree.map(jnp.sign, params), *inputs

        forward = lambda m, x: nn.vjp(lambda m, x: m(x), m, x)  # noqa: E731
        return nn.custom_vjp(lambda m, x: m(x), forward, backward)(nn.Dense(4), x)

    def upper(module, x):
        triangular = lambda variables: jax.tree.map(jnp.triu, variables)  # noqa: E731
        return nn.map_variables(nn.Dense, "params", triangular, init=module.is_initializing())(6, use_bias=False)(x)

    def masked(_, x):
        """Attention of heads made by hand, causal and among positive tokens."""
        q, k, v = (nn.DenseGeneral((2, 4), name=name)(x) for name in "qkv")
        mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(x[..., 0] > 0, x[..., 0] > 0))
        return nn.dot_product_attention(q, k, v, mask=mask), nn.dot_product_attention_weights(q, k, mask=mask)

    def laid(_, x):
        inner = nn.with_partitioning(nn.initializers.ones, (None, "a"))
        outer = nn.with_logical_partitioning(nn.initializers.ones, (None, "mlp"))
        return nn.with_logical_constraint(nn.Dense(4, kernel_init=outer)(nn.Dense(8, kernel_init=inner)(x)), ("batch", "mlp"))

    layers = {
        "Dense": (nn.Dense(8), X), "DenseGeneral": (nn.DenseGeneral((2, 4)), X), "Embed": (nn.Embed(16, 6), TOKENS),
        "Conv": (nn.Conv(8, (3, 3)), IMAGES),
        "Conv of strides, of each feature": (nn.Conv(6, (3, 3), (2, 2), feature_group_count=6), IMAGES),
        "Conv in groups": (nn.Conv(6, (3, 3), feature_group_count=2), IMAGES), "ConvLocal": (nn.ConvLocal(8, (3, 3)), IMAGES),
        "ConvTranspose": (nn.ConvTranspose(8, (3, 3), (2, 2)), IMAGES), "Conv dilated": (nn.Conv(8, (3,), kernel_dilation=2), SEQUENCE),
        "LayerNorm": (nn.LayerNorm(), X), "RMSNorm": (nn.RMSNorm(), X), "GroupNorm": (nn.GroupNorm(2), IMAGES),
        "BatchNorm": (nn.BatchNorm(use_running_average=False), IMAGES), "InstanceNorm": (nn.InstanceNorm(), IMAGES),
        "WeightNorm": (nn.WeightNorm(nn.Dense(4)), X), "PReLU": (nn.PReLU(), X), "Dropout": (nn.Dropout(0.5, deterministic=False), X),
        "SpectralNorm": (Calls(lambda _, x: nn.SpectralNorm(nn.Dense(4))(x, update_stats=True)), X),
        "SelfAttention": (nn.SelfAttention(2), SEQUENCE), "MultiHeadAttention": (nn.MultiHeadAttention(2), SEQUENCE),
        "MultiHeadDotProductAttention": (nn.MultiHeadDotProductAttention(2, qkv_features=8), SEQUENCE),
        "dot_product_attention dot_product_attention_weights combine_masks make_causal_mask make_attention_mask": (
            Calls(masked), SEQUENCE),
        "vmap BatchNorm": (Calls(synced), IMAGES), "scan remat": (Calls(scanned), X),
        "Fp8DotGeneralOp": (nn.Dense(8, dot_general_cls=nn.Fp8DotGeneralOp), X),
        "Fp8DirectDotGeneralOp": (nn.Dense(8, dot_general_cls=nn.Fp8DirectDotGeneralOp), X),
        "NANOOFp8DotGeneralOp": (nn.Dense(8, dot_general_cls=nn.NANOOFp8DotGeneralOp), X),
        "Fp8Einsum": (Calls(lambda m, x: nn.Fp8Einsum()("bf,fh->bh", x, m.param("w", nn.initializers.normal(), (6, 4)))), X),
        "RNN LSTMCell": (nn.RNN(nn.LSTMCell(8)), SEQUENCE), "RNN OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(8)), SEQUENCE),
        "RNN SimpleCell": (nn.RNN(nn.SimpleCell(8)), SEQUENCE), "RNN MGUCell": (nn.RNN(nn.MGUCell(8)), SEQUENCE),
        "RNN GRUCell": (nn.RNN(nn.GRUCell(8)), SEQUENCE), "RNN ConvLSTMCell": (nn.RNN(nn.ConvLSTMCell(8, (3, 3))), FILMS),
        "Bidirectional": (nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.GRUCell(8))), SEQUENCE),
        "Einsum": (nn.Einsum((6, 4), "bf,fh->bh"), X), "BatchApply": (Calls(lambda _, x: nn.BatchApply(nn.Dense(4))(x)), SEQUENCE),
        "Sequential max_pool avg_pool": (
            nn.Sequential([lambda x: nn.max_pool(x, (2, 2), (2, 2)), lambda x: nn.avg_pool(x, (2, 2)), nn.Dense(4)]), IMAGES),
        "max_pool Conv": (nn.Sequential([lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), nn.Conv(4, (5, 5))]), IMAGES),
        "pool": (nn.Sequential([nn.Dense(4), lambda x: nn.pool(x, 0.0, lax.add, (2, 2), (2, 2), "VALID")]), IMAGES),
        "while_loop": (Calls(counted), X), "cond": (Calls(chosen), X), "switch": (Calls(switched), X), "vjp": (Calls(pulled), X),
        "jvp": (Calls(pushed), X), "custom_vjp": (Calls(signed), X), "map_variables": (Calls(upper), X),
        "grad": (Calls(lambda _, x: nn.grad(lambda m, x: (m(x) ** 3).sum(), nn.Dense(4), x)), X),
        "value_and_grad": (Calls(lambda _, x: nn.value_and_grad(lambda m, x: (m(x) ** 3).sum(), nn.Dense(4), x)), X),
        "remat_scan": (Calls(lambda _, x: nn.remat_scan(nn.Dense, (2, 2))(6)(x)), X), "jit": (nn.jit(nn.Dense)(8), X),
        "Partitioned with_partitioning with_logical_partitioning with_logical_constraint": (Calls(laid), X),
    }  # fmt: skip
    for name, (layer, x) in layers.items():
        variables = layer.init({"params": KEY, "dropout": KEY}, x)
        learnt = {k: v for k, v in variables.items() if k != "state"}

        def loss(learnt, x, layer=layer, variables=variables):
            said = {"mutable": ["batch_stats", "state"], "rngs": {"dropout": KEY}}
            return loss_of(lambda learnt: layer.apply(variables | learnt, x, **said)[0])(learnt)

        yield f"linen {name}", loss if name == "while_loop" else jax.value_and_grad(loss), (learnt, x)


def nnx_layers():
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
    r = nnx.Rngs(0)

    class Calls(nnx.Module):
        """A layer that is called as a function says."""

        def __init__(self, layer, call):
            self.layer, self.call = layer, call

        def __call__(self, x):
            return self.call(self.layer, x)

    def calls(call):
        return Calls(nnx.Linear(6, 6, rngs=r), call)

    def loss(layer, x):
        return (jnp.tanh(layer(x)) ** 2).sum()

    def whiled(layer, x):
        turn = lambda c: (jnp.tanh(c[1](c[0])), c[1], c[2] + 1)  # noqa: E731
        return nnx.while_loop(lambda c: c[2] < 3, turn, (x, layer, 0))[0]

    def signed(layer, x):
        """A layer whose input is led by the sign of its cotangent."""

        @nnx.custom_vjp
        def call(layer, x):
            return layer(x)

        def backward(kept, cotangent):
            return jax.tree.map(jnp.sign, cotangent[0][0]), jnp.sign(cotangent[1] @ kept.T)

        call.defvjp(lambda layer, x: (layer(x), layer.kernel[...]), backward)
        return call(layer, x)

    def trained(layer, x):
        optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
        optimizer.update(layer, nnx.grad(loss)(layer, x))
        return layer(x)

    def trained_within(layer, x):
        both = nnx.ModelAndOptimizer(layer, optax.sgd(1e-2), wrt=nnx.Param)
        both.update(nnx.grad(loss)(layer, x))
        return layer(x)

    def trained_apart(layer, x):
        graph, params = nnx.split(layer)
        state = nnx.TrainState.create(graph, params=params, tx=optax.sgd(1e-2)).apply_gradients(nnx.grad(loss)(layer, x))
        return nnx.merge(graph, state.params)(x)

    def measured(layer, x):
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average(), spread=nnx.metrics.Welford())
        metrics.update(values=layer(x))
        return metrics.compute()["loss"], layer(x)

    def averaged(layer, x):
        ema = nnx.EMA(layer, 0.9)
        ema.update(jax.tree.map(jnp.sin, nnx.state(layer)))
        return layer(x)

    def masked(layer, x):
        """Attention of two heads, causal and among positive tokens."""
        q = layer(x).reshape(*x.shape[:2], 2, 3)
        mask = nnx.combine_masks(nnx.make_causal_mask(x[..., 0]), nnx.make_attention_mask(x[..., 0] > 0, x[..., 0] > 0))
        return nnx.dot_product_attention(q, q, q, mask=mask)

    def pooled(x):
        return nnx.max_pool(x, (2, 2), (2, 2)), nnx.min_pool(x, (2, 2)), nnx.pool(x, 0.0, lax.add, (2, 2), (2, 2), "VALID")

    def scanned(layers, x):
        step = nnx.scan(nnx.remat(lambda x, layer: x + jnp.tanh(layer(x))), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, layers)

    stacked = nnx.vmap(lambda key: nnx.Linear(6, 6, rngs=nnx.Rngs(key)))(jax.random.split(KEY, 3))
    layers = {
        "Linear": (nnx.Linear(6, 4, rngs=r), X), "LinearGeneral": (nnx.LinearGeneral(6, (2, 4), rngs=r), X),
        "Einsum": (nnx.Einsum("bf,fh->bh", (6, 4), rngs=r), X), "Embed": (nnx.Embed(16, 6, rngs=r), TOKENS),
        "Conv": (nnx.Conv(6, 8, (3, 3), rngs=r), IMAGES), "ConvTranspose": (nnx.ConvTranspose(6, 8, (3, 3), (2, 2), rngs=r), IMAGES),
        "LoRA": (nnx.LoRA(6, 2, 4, rngs=r), X), "LoRALinear": (nnx.LoRALinear(6, 4, lora_rank=2, rngs=r), X), "PReLU": (nnx.PReLU(), X),
        "BatchNorm": (nnx.BatchNorm(6, rngs=r), IMAGES), "Dropout": (nnx.Dropout(0.5, rngs=r), X),
        "LayerNorm": (nnx.LayerNorm(6, rngs=r), X), "RMSNorm": (nnx.RMSNorm(6, rngs=r), X),
        "GroupNorm": (nnx.GroupNorm(6, 2, rngs=r), IMAGES), "InstanceNorm": (nnx.InstanceNorm(6, rngs=r), IMAGES),
        "WeightNorm": (nnx.WeightNorm(nnx.Linear(6, 4, rngs=r), rngs=r), X),
        "SpectralNorm": (nnx.SpectralNorm(nnx.Linear(6, 4, rngs=r), rngs=r), X),
        "MultiHeadAttention": (nnx.MultiHeadAttention(2, 6, 8, decode=False, rngs=r), SEQUENCE),
        "dot_product_attention combine_masks make_causal_mask make_attention_mask": (calls(masked), SEQUENCE),
        "RNN LSTMCell": (nnx.RNN(nnx.LSTMCell(6, 8, rngs=r)), SEQUENCE),
        "RNN SimpleCell": (nnx.RNN(nnx.SimpleCell(6, 8, rngs=r)), SEQUENCE),
        "RNN OptimizedLSTMCell": (nnx.RNN(nnx.OptimizedLSTMCell(6, 8, rngs=r)), SEQUENCE),
        "RNN GRUCell": (nnx.RNN(nnx.GRUCell(6, 8, rngs=r)), SEQUENCE),
        "Bidirectional": (nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(6, 8, rngs=r)) for _ in range(2)), rngs=r), SEQUENCE),
        "Sequential": (nnx.Sequential(nnx.Linear(6, 8, rngs=r), jax.nn.gelu, nnx.Linear(8, 4, rngs=r)), X),
        "max_pool min_pool pool": (calls(lambda layer, x: pooled(layer(x))), IMAGES),
        "avg_pool": (calls(lambda layer, x: nnx.avg_pool(layer(x), (2, 2))), IMAGES),
        "List": (Calls(nnx.List([nnx.Linear(6, 6, rngs=r) for _ in range(2)]), lambda layers, x: layers[1](layers[0](x))), X),
        "Dict": (Calls(nnx.Dict(a=nnx.Linear(6, 4, rngs=r)), lambda layers, x: layers["a"](x)), X),
        "scan vmap remat": (Calls(stacked, scanned), X), "jit": (calls(nnx.jit(lambda layer, x: layer(x))), X),
        "cond": (calls(lambda layer, x: nnx.cond(x[0, 0] > 0, lambda f, x: f(x), lambda f, x: -f(x), layer, x)), X),
        "switch": (calls(lambda layer, x: nnx.switch(1, [lambda f, x: f(x), lambda f, x: -f(x), lambda f, x: 2 * f(x)], layer, x)), X),
        "while_loop": (calls(whiled), X),
        "fori_loop": (calls(lambda layer, x: nnx.fori_loop(0, 3, lambda _, c: (jnp.tanh(c[1](c[0])), c[1]), (x, layer))[0]), X),
        "grad": (calls(lambda layer, x: jax.tree.leaves(nnx.grad(loss)(layer, x))), X),
        "value_and_grad": (calls(lambda layer, x: jax.tree.leaves(nnx.value_and_grad(loss)(layer, x))), X),
        "vjp": (calls(lambda layer, x: jax.tree.leaves(nnx.vjp(lambda f, x: f(x), layer, x, graph_updates=False)[1](x))), X),
        "jvp": (calls(lambda layer, x: nnx.jvp(lambda x: layer(x), (x,), (jnp.sin(x),), graph_updates=False)), X),
        "custom_vjp": (calls(signed), X),
        "checkify": (calls(lambda layer, x: nnx.checkify(lambda f, x: f(x))(layer, x)[1]), X),
        "Optimizer": (calls(trained), X), "ModelAndOptimizer": (calls(trained_within), X),
        "TrainState": (calls(trained_apart), X), "MultiMetric": (calls(measured), X), "EMA": (calls(averaged), X),
    }  # fmt: skip
    if hasattr(nnx, "RoPE"):
        attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
        turned = nnx.MultiHeadAttention(2, 6, 8, attention_fn=attend, decode=False, rngs=r)
        layers["dot_product_attention_with_rope RoPE"] = turned, SEQUENCE
    for name, (layer, x) in layers.items():
        graph, state = nnx.split(layer)
        floats = jax.tree.map(lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating), state)

        def loss_in(state, x, graph=graph):
            return loss_of(lambda s: nnx.merge(graph, s)(x))(state)

        learns = all(jax.tree.leaves(floats)) and name != "while_loop"
        yield f"nnx {name}", jax.value_and_grad(loss_in) if learns else loss_in, (state, x)


def equinox_layers():
    eqx = pytest.importorskip("equinox")
    image = jnp.moveaxis(IMAGES[0], -1, 0)
    norm = eqx.nn.BatchNorm(6, "batch", mode="batch")
    linear = eqx.nn.Linear(6, 4, key=KEY)

    class Calls(eqx.Module):
        """A layer that takes more than its input."""

        layer: eqx.Module
        call: Callable = eqx.field(static=True)

        def __call__(self, x):
            return self.call(self.layer, x)

    class Doubled(eqx.nn.StatefulLayer):
        layer: eqx.nn.BatchNorm

        def __call__(self, x, state, *, key=None):
            x, state = self.layer(x, state)
            return 2 * x, state

    def recurrent(start):
        return lambda cell, xs: lax.scan(lambda h, x: (cell(x, h), None), start, xs)[0]

    def with_state(layer, x):
        return layer(x, eqx.nn.State(layer))[0]

    def tied(pair):
        """An embedding whose table is the last layer's, too."""
        return eqx.nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    moving = functools.partial(eqx.nn.make_with_state(eqx.nn.BatchNorm), 6, "batch", mode="ema")
    pair = eqx.nn.Embedding(16, 6, key=KEY), eqx.nn.Linear(6, 16, use_bias=False, key=KEY)
    layers = {
        "MultiheadAttention": (Calls(eqx.nn.MultiheadAttention(2, 6, key=KEY), lambda layer, x: layer(x, x, x)), X),
        "GRUCell": (Calls(eqx.nn.GRUCell(6, 4, key=KEY), recurrent(jnp.zeros(4))), X),
        "LSTMCell": (Calls(eqx.nn.LSTMCell(6, 4, key=KEY), recurrent((jnp.zeros(4), jnp.zeros(4)))), X),
        "Dropout": (Calls(eqx.nn.Dropout(0.5), lambda layer, x: layer(x, key=KEY)), X),
        "inference_mode": (eqx.nn.inference_mode(eqx.nn.Sequential([linear, eqx.nn.Dropout(0.5)])), VECTOR),
        "BatchNorm": (Calls(norm, with_state), image),
        "Sequential StatefulLayer": (Calls(eqx.nn.Sequential([Doubled(norm)]), with_state), image),
        "make_with_state": (Calls(moving()[0], lambda layer, x: layer(x, moving()[1])[0]), image),
        "SpectralNorm": (Calls(eqx.nn.SpectralNorm(linear, "weight", key=KEY), with_state), VECTOR),
        "WeightNorm": (eqx.nn.WeightNorm(linear), VECTOR),
        "Shared": (Calls(tied(pair), lambda s, x: s()[1](jax.vmap(s()[0])(x)[0])), TOKENS[0]),
        "Conv": (eqx.nn.Conv(2, 6, 4, 3, key=KEY), image), "Conv1d": (eqx.nn.Conv1d(6, 4, 3, key=KEY), image[0, :6]),
        "Conv2d": (eqx.nn.Conv2d(6, 4, 3, key=KEY), image), "Conv3d": (eqx.nn.Conv3d(6, 4, 3, key=KEY), VOLUME),
        "ConvTranspose": (eqx.nn.ConvTranspose(2, 6, 4, 3, key=KEY), image),
        "ConvTranspose1d": (eqx.nn.ConvTranspose1d(6, 4, 3, key=KEY), image[0, :6]),
        "ConvTranspose2d": (eqx.nn.ConvTranspose2d(6, 4, 3, key=KEY), image),
        "ConvTranspose3d": (eqx.nn.ConvTranspose3d(6, 4, 3, key=KEY), VOLUME),
        "Pool": (eqx.nn.Pool(0.0, lax.add, 2, 2, 2), image), "AdaptivePool": (eqx.nn.AdaptivePool(4, 2, jnp.mean), image),
        "AvgPool1d": (eqx.nn.AvgPool1d(2), image[0]), "AvgPool2d": (eqx.nn.AvgPool2d(2), image),
        "AvgPool3d": (eqx.nn.AvgPool3d(2), VOLUME),
        "MaxPool1d": (eqx.nn.MaxPool1d(2), image[0]), "MaxPool2d": (eqx.nn.MaxPool2d(2), image),
        "MaxPool3d": (eqx.nn.MaxPool3d(2), VOLUME),
        "AdaptiveAvgPool1d": (eqx.nn.AdaptiveAvgPool1d(4), image[0]), "AdaptiveAvgPool2d": (eqx.nn.AdaptiveAvgPool2d(4), image),
        "AdaptiveAvgPool3d": (eqx.nn.AdaptiveAvgPool3d(2), VOLUME), "AdaptiveMaxPool1d": (eqx.nn.AdaptiveMaxPool1d(4), image[0]),
        "AdaptiveMaxPool2d": (eqx.nn.AdaptiveMaxPool2d(2), image), "AdaptiveMaxPool3d": (eqx.nn.AdaptiveMaxPool3d(2), VOLUME),
        "Sequential Lambda": (eqx.nn.Sequential([linear, eqx.nn.Lambda(jax.nn.gelu), eqx.nn.Linear(4, 8, key=KEY)]), VECTOR),
        "MLP": (eqx.nn.MLP(6, 4, 8, 2, key=KEY), VECTOR), "Linear": (linear, VECTOR), "Identity": (eqx.nn.Identity(), VECTOR),
        "Embedding": (eqx.nn.Embedding(16, 6, key=KEY), TOKENS[0, 0]), "LayerNorm": (eqx.nn.LayerNorm(6), VECTOR),
        "GroupNorm": (eqx.nn.GroupNorm(2, 6), image), "RMSNorm": (eqx.nn.RMSNorm(6), VECTOR), "PReLU": (eqx.nn.PReLU(), VECTOR),
        "RotaryPositionalEmbedding": (eqx.nn.RotaryPositionalEmbedding(6), X),
    }  # fmt: skip
    for name, (layer, x) in layers.items():
        floats, rest = eqx.partition(layer, eqx.is_inexact_array)

        def loss(f, x, rest=rest):
            return loss_of(jax.vmap(eqx.combine(f, rest), axis_name="batch"))(x)

        yield f"equinox {name}", jax.value_and_grad(loss), (floats, jnp.stack([x] * 4))
