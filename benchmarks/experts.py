"""Expert layouts, as rules on a parameter's path and shape: the baseline of plans.

    data         parameters replicated, the batch sharded over all devices
    zero1        the same, the optimizer's state sharded
    fsdp         parameters and optimizer sharded on their largest dim, activations constrained to the batch's sharding
    tensor       Megatron: column and row pairs, heads, vocabulary, experts sharded inside a node; data parallel between nodes
    tables       vocabularies and embedding tables sharded over all devices, the rest data parallel
    fsdp,tensor  FSDP over the outer mesh axis, tensor parallel over the inner
    tensor,fsdp  the other way round
    batch        only the batch is sharded; XLA propagates the rest

The step is the same unmodified one for all; constraints on activations are put into its jaxpr.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan import _jax
from shardplan.emit.emit import EmitDecision, emit
from shardplan.ir.parse import parse

FREE = P.UNCONSTRAINED
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Expert:
    """One expert layout.

    Attributes:
        batch: mesh axes that shard the batch.
        params: mesh axes that shard parameters on their largest dim (FSDP).
        state: mesh axes that shard the optimizer's state on its largest dim.
        model: mesh axes of tensor parallelism.
        roles: which parameters are tensor parallel.
        written: whether parameters are laid out at all; else XLA chooses.
    """

    name: str
    batch: Axes = ()
    params: Axes = ()
    state: Axes = ()
    model: Axes = ()
    roles: tuple[str, ...] = ("table", "column", "row", "expert")
    written: bool = True


def experts(mesh, node_size: int) -> list[Expert]:
    """What experts would try on a mesh of two axes, the inner one inside a node."""
    outer, inner = mesh.axis_names
    both = (outer, inner)
    one_node = mesh.size <= node_size
    return [
        Expert("data", both),
        Expert("zero1", both, state=both),
        Expert("fsdp", both, both, both),
        Expert("tensor", () if one_node else (outer,), model=both if one_node else (inner,)),
        Expert("tables", both, model=both, roles=("table",)),
        Expert("fsdp,tensor", (outer,), (outer,), (outer,), (inner,)),
        Expert("tensor,fsdp", (inner,), (inner,), (inner,), (outer,)),
        Expert("batch", both, written=False),
    ]


# ---- a parameter's role, from its path

STACKED = re.compile(r"(layers|blocks)/(?!\d)")
"""Where one array holds the weights of all layers: its first dim is the layer's number."""

ROLES = (
    ("table", r"\b(tokens|embed|tables/\d+|people|head|classes)\b"),
    ("row", r"\b(out|down|project)\b"),
    ("column", r"\b(query|key|value|qkv|gate|up|conv\d*|hidden|into)\b"),
)


LARGE = 1 << 15
"""Rows from which on a matrix is a table, whatever its name."""


def tensor_dims(path: str, shape: tuple[int, ...], n: int, roles: tuple[str, ...]) -> tuple[int, ...]:
    """Dims of a parameter that tensor parallelism may shard over n devices, the first choice first."""
    role = next((role for role, pattern in ROLES if re.search(pattern, path)), "")
    role = "table" if max(shape, default=0) >= LARGE else role
    first = 1 if STACKED.search(path) else 0
    dims = range(first, len(shape))
    if role in ("row", "column") and len(dims) == 3 and re.search(r"\b(up|down)\b", path):
        role = "expert"
    if role not in roles:
        return ()
    if role == "table":
        wanted = sorted(dims, key=lambda d: -shape[d])[:1]
    elif role == "expert":
        wanted = [first]
    elif role == "row":
        wanted = [] if len(dims) == 1 else [len(shape) - 2] if len(dims) == 2 else [first]
    elif re.search(r"\bconv\d*\b", path):
        wanted = [len(shape) - 1]
    elif re.search(r"\bqkv\b", path):
        wanted = [first + 2] if len(dims) > 2 else [len(shape) - 1]
    else:
        wanted = [first + 1] if len(dims) > 1 else [first]
    return tuple(d for d in wanted if d < len(shape) and shape[d] % n == 0)


def param_spec(expert: Expert, path: str, shape: tuple[int, ...], mesh) -> P:
    """Layout of one leaf of the state."""
    size = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    entries: list = [None] * len(shape)
    if expert.model:
        for d in tensor_dims(path, shape, math.prod(size[a] for a in expert.model), expert.roles)[:1]:
            entries[d] = expert.model
    axes = expert.params if is_param(path) else expert.state
    if axes:
        n = math.prod(size[a] for a in axes)
        first = 1 if STACKED.search(path) else 0
        fits = [d for d in range(first, len(shape)) if entries[d] is None and shape[d] % n == 0 and shape[d] >= n]
        if fits:
            entries[max(fits, key=lambda d: shape[d])] = axes
    return P(*entries)


def is_param(path: str) -> bool:
    """Parameters, and not what the optimizer keeps: the first part of a state."""
    return path.split("/")[0] in ("params", "0")


# ---- the step, laid out so


@dataclass(frozen=True)
class _Hint:
    """A layout for `emit` that fixes one dim and leaves the others to XLA, or unsplit."""

    rank: int
    entries: tuple

    def spec(self) -> P:
        return P(*self.entries)


def laid_out(expert: Expert, step, state, batch, mesh):
    """The jitted step as an expert lays it out; `mesh` has Auto axes."""
    size = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    n = math.prod(size[a] for a in expert.batch)

    def batch_dim(shape) -> int | None:
        """The dim of a batch that is sharded: examples, else positions."""
        return next((d for d in range(len(shape)) if shape[d] % n == 0 and shape[d] >= n), None) if expert.batch else None

    def batch_spec(x) -> P:
        d = batch_dim(x.shape)
        return P() if d is None else P(*[None] * d, expert.batch)

    traced = jax.jit(step).trace(state, batch)
    hints = {}
    if expert.params:
        others = None if not expert.model else FREE
        leaves = [x for x in jax.tree.leaves(batch) if x.shape]
        d = batch_dim(max(leaves, key=lambda x: math.prod(x.shape)).shape)
        length = 0 if d is None else max(leaves, key=lambda x: math.prod(x.shape)).shape[d]
        params = {x.shape for x in jax.tree.leaves(state)} | {x.shape[1:] for x in jax.tree.leaves(state)}
        for op in parse(traced.jaxpr).ops:
            shape = tuple(op.outs[0].shape) if op.outs else ()
            big = op.primitive in ("dot_general", "conv_general_dilated", "gather") or (op.primitive == "add" and len(shape) == 3)
            if big and d is not None and len(shape) > d + 1 and shape[d] == length and shape not in params:
                entries = tuple(expert.batch if k == d else others for k in range(len(shape)))
                hints[op.path] = EmitDecision(results=(_Hint(len(shape), entries),))  # pyright: ignore[reportArgumentType]
    run = emit(traced.jaxpr, hints, mesh)
    tree = jax.tree.structure(traced.out_info)

    def flat(state, batch):
        return jax.tree.unflatten(tree, run(*jax.tree.leaves((state, batch))))

    def lay(keys, x):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return NamedSharding(mesh, param_spec(expert, path, x.shape, mesh))

    states = jax.tree_util.tree_map_with_path(lay, state) if expert.written else None
    batches = jax.tree.map(lambda x: NamedSharding(mesh, batch_spec(x)), batch)
    return jax.jit(flat, in_shardings=(states, batches), out_shardings=(states, None), donate_argnums=0)


def twin(mesh):
    """The mesh with Auto axes."""
    return _jax.auto_twin(mesh)
