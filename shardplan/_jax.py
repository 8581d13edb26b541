"""The module that touches `jax.extend`, `jax._src` or versions of JAX; `_jax_expanded` and `_jax_programs` are parts of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import numpy as np
from jax._src import compiler, config, core, distributed, source_info_util
from jax._src.interpreters import mlir, partial_eval, pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params
from jax.extend.core import Literal as Literal
from jax.extend.mlir import ir  # pyright: ignore[reportAttributeAccessIssue]
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan._jax_expanded import closed as closed
from shardplan._jax_expanded import expansion
from shardplan.errors import ForeignMeshError
from shardplan.files import is_library

CALLS = """
    jit pjit call closed_call core_call core_closed_call eval_jaxpr remat remat2 remat_opt checkpoint composite linear_call
    custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call custom_lin
"""
INLINED = frozenset(CALLS.split())
"""Primitives that only wrap a jaxpr."""
HELD = "jaxpr", "call_jaxpr", "fwd_jaxpr", "callee", "call"
"""Parameters that hold it."""


def inner_jaxpr(eqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls or stands for (traced on its line), closed; None for one that is an op of its own."""
    if run := expansion(eqn):
        if eqn.effects or not all(isinstance(a.aval, core.ShapedArray) for a in (*eqn.invars, *eqn.outvars)):
            return None
        with source_info_util.user_context(eqn.source_info.traceback), eqn.ctx.manager:
            return jax.make_jaxpr(lambda *xs: run(eqn, *xs))(*(abstract(a.aval) for a in eqn.invars))
    held = (eqn.params.get(param) for param in HELD) if eqn.primitive.name in INLINED else ()
    return next((closed(inner) for inner in held if inner is not None), None)


def without_refs(program):
    """The same program with the mutable arrays it makes (`jax.new_ref`) as values handed from op to op."""
    mutable = any(isinstance(e, core.InternalMutableArrayEffect) for e in program.effects)
    return pxla._discharge_internal_refs(program) if mutable else program


def without_dead_code(program):
    """The same program, of the same inputs, without what no result and no effect needs: XLA leaves it out, too."""
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    return closed_over(jaxpr, program)


def with_lines(program):
    """The same program, in which equations whose stack names no line of the user's have that of their first reader that does.

    What JAX moves out of a loop while it differentiates has a stack that begins in the loop's body.
    """
    reader: dict = {}
    made = []
    for eqn in reversed(program.jaxpr.eqns):
        own = eqn.source_info.traceback
        if not names_user(own):
            own = next((reader[v] for v in eqn.outvars if v in reader), own)
        made.append(eqn.replace(source_info=eqn.source_info.replace(traceback=own)))
        if names_user(own):
            reader.update((v, own) for v in eqn.invars if not isinstance(v, Literal))
    return closed_over(program.jaxpr.replace(eqns=made[::-1]), program)


def closed_over(jaxpr, like):
    """A jaxpr with the constants of a closed one."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else like.replace(jaxpr=jaxpr)


def is_ref(x) -> bool:
    """Whether an argument or a constant is a mutable array."""
    return isinstance(x, core.Ref)


def is_tracer(x) -> bool:
    """Whether a value is traced, and so is in no place."""
    return isinstance(x, core.Tracer)


def equations(jaxpr) -> Iterator:
    """Every equation, those of inner jaxprs behind the one that holds them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def interpret(jaxpr, values: Iterable, run: Callable[..., Iterable], literal: Callable = lambda atom: atom.val) -> list:
    """Values of an open jaxpr's outputs: the skeleton of parsing, emission and proofs.

    Args:
        jaxpr: an open jaxpr.
        values: of its constants, then of its inputs; anything that `run` understands.
        run: (number of the equation, equation, values of its operands) -> values of its results.
        literal: value of a literal operand.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))

    def read(atom):
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for n, eqn in enumerate(jaxpr.eqns):
        env.update(zip(eqn.outvars, run(n, eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def region(eqn) -> str:
    """The name "scan", "while" or "cond" for an equation of that kind, else ""."""
    return eqn.primitive.name if eqn.primitive.name in ("scan", "while", "cond") else ""


def scan_parts(eqn) -> tuple[ClosedJaxpr, int, int]:
    """(body, number of constants, number of carries) of a `scan` equation."""
    p = eqn.params
    if "num_consts" in p:
        return closed(p["jaxpr"]), p["num_consts"], p["num_carry"]
    consts, carry, _ = p["ft_in"].update(list(range(len(eqn.invars)))).unpack()  # jax 0.12
    return closed(p["jaxpr"]), len(list(consts)), len(list(carry))


def while_parts(eqn) -> tuple[ClosedJaxpr, int, ClosedJaxpr, int]:
    """(condition, number of its constants, body, number of its constants) of a `while` equation."""
    p = eqn.params
    return closed(p["cond_jaxpr"]), p["cond_nconsts"], closed(p["body_jaxpr"]), p["body_nconsts"]


def branches(eqn) -> list[ClosedJaxpr]:
    """The branches of a `cond` equation."""
    return [closed(b) for b in eqn.params["branches"]]


def behind_barrier(eqn) -> tuple[bool, ...]:
    """Per operand, whether it goes through an optimization barrier: before a rematerialised body, so that XLA computes it again."""
    recomputes = eqn.primitive.name in ("remat", "remat2", "checkpoint") and eqn.params.get("differentiated")
    which = eqn.params["prevent_cse"] if recomputes else eqn.primitive is jax.lax.optimization_barrier_p
    return which if isinstance(which, tuple) else (which,) * len(eqn.invars)


def source(eqn) -> tuple[str, int, str]:
    """File, line and function of the innermost frame outside installed packages, else outside jax; ("", 0, "") when there is none."""
    return _source(eqn.source_info.traceback)


@functools.lru_cache(maxsize=1 << 16)
def _source(traceback) -> tuple[str, int, str]:
    innermost = next(call_stack(traceback), ("", 0, ""))
    return next((frame for frame in call_stack(traceback) if not is_library(frame[0])), innermost)


@functools.lru_cache(maxsize=1 << 16)
def names_user(traceback) -> bool:
    """Whether a frame is the user's own: in a jitted function, be it of a library, JAX cuts the stack of equations at the call."""
    return any(not is_library(file) for file, _, _ in call_stack(traceback))


def call_stack(traceback) -> Iterator[tuple[str, int, str]]:
    """(file, line, function) of the frames outside jax, innermost first."""
    return ((x.file_name, x.start_line, x.function_name) for x in source_info_util.user_frames(traceback))


BACKWARD, DIFFERENTIATED, REMATERIALISED = "transpose(", "jvp(", "rematted_computation"
"""What JAX writes into the name stack of an op, and so into HLO's `op_name`: of a backward pass, of a pass that is differentiated, of
what `jax.checkpoint` recomputes."""


def name_stack(eqn) -> str:
    """The name stack of an equation, with these words in it."""
    return str(eqn.source_info.name_stack)


def bind(eqn, operands, params=None, context: bool = True):
    """Run one equation on `operands` under its own source line, name scopes and (for its mesh) context; returns a list of results."""
    found = eqn.primitive.get_bind_params({**eqn.params, **(params or {})})
    subfuns, bind_params = found if isinstance(found, tuple) else ((), found)  # jax < 0.10.2 gives the functions apart
    with at_source(eqn), eqn.ctx.manager if context else contextlib.nullcontext():
        out = eqn.primitive.bind(*subfuns, *operands, **bind_params)
    return list(out) if eqn.primitive.multiple_results else [out]


def row_major(x):
    """The array with its last dim in a row in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def at_source(eqn) -> contextlib.AbstractContextManager:
    """Whatever is traced inside carries the equation's name scopes and line; that of its call, where it has none of the user's."""
    current, own = source_info_util._source_info_context.context, eqn.source_info.traceback
    kept = own if current.traceback is None or names_user(own) else None
    return source_info_util.user_context(kept, name_stack=current.name_stack + eqn.source_info.name_stack)


@functools.cache
def itemsize(dtype) -> float:
    """Bytes per element, also of typed keys and of types narrower than a byte."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return float(getattr(dtype, "itemsize", 8))
    try:
        return jax.dtypes.itemsize_bits(dtype) / 8
    except (AttributeError, TypeError, ValueError):
        return float(np.dtype(dtype).itemsize)


def auto_twin(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same mesh with every axis of type Auto, on which sharding constraints are requests to XLA."""
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def abstract_mesh(axes: Mapping[str, int], like: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh of these axes without devices, of the kind that another one has."""
    device = getattr(like.abstract_mesh if isinstance(like, Mesh) else like, "abstract_device", None)
    return AbstractMesh(tuple(axes.values()), tuple(axes), **({} if device is None else {"abstract_device": device}))


def is_auto(mesh) -> bool:
    return all(t == AxisType.Auto for t in mesh.axis_types)


def on_auto_axes(flat, mesh: Mesh, out_shardings: tuple) -> Callable[..., tuple]:
    """`flat`, written for axes of type Auto, on a mesh of any kind: arrays in and out are typed as the user's mesh is."""
    if is_auto(mesh):
        return flat
    return jax.sharding.auto_axes(flat, axes=tuple(mesh.axis_names), out_sharding=out_shardings)  # type: ignore[return-value]


def on_twin(jitted, twin: Mesh | AbstractMesh, mesh: Mesh | AbstractMesh):
    """`jitted`, compiled for the twin, called with and giving arrays of the user's mesh."""

    def moved(x, to):
        sharding = getattr(x, "sharding", None)
        known = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == to.axis_names
        return jax.device_put(x, NamedSharding(to, sharding.spec)) if known and sharding is not None else x

    def call(*args):
        with jax.set_mesh(twin):  # type: ignore[arg-type]
            out = jitted(*jax.tree.map(lambda x: moved(x, twin), args))
        return jax.tree.map(lambda x: moved(x, mesh), out)

    call.trace = jitted.trace
    return call


def is_foreign(x, mesh: Mesh) -> bool:
    """Whether an array is typed with the axes of another mesh."""
    axes = getattr(getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None), "axis_names", ())
    return tuple(axes) not in ((), tuple(mesh.axis_names))


def typed_sharding(x, mesh: Mesh) -> NamedSharding | None:
    """The sharding in an array's type where it is typed on this mesh with Explicit axes."""
    found = jax.typeof(x).sharding
    same = tuple(getattr(found.mesh, "axis_names", ())) == tuple(mesh.axis_names)
    return NamedSharding(mesh, found.spec) if same and not is_auto(mesh) else None


def under_jit() -> bool | None:
    """Whether what runs now becomes part of a jaxpr; None where it runs at once, but traced, as under `jax.grad` alone."""
    if core.trace_ctx.is_top_level():
        return False
    trace = core.trace_ctx.trace
    while not isinstance(trace, partial_eval.DynamicJaxprTrace | None):
        trace = getattr(trace, "parent_trace", None)
    return None if trace is None else True


def within(mesh: Mesh | AbstractMesh):
    """Context in which tracing sees `mesh` as the current one."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh)


def without_mesh(fun):
    """`fun` where it sees no current mesh, so that what only asks for layouts where there is one asks for none."""

    @functools.wraps(fun)
    def alone(*args, **kwargs):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return fun(*args, **kwargs)

    return alone


def sharding(mesh, spec: tuple, memory_kind: str | None = None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)


def devices(sharding: NamedSharding) -> list:
    """Of a mesh, in its order."""
    return list(sharding.mesh.devices.flat)  # pyright: ignore[reportOptionalMemberAccess]


def abstract(x) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of an argument leaf, without its placement."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct | core.ShapedArray) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


UNCONSTRAINED = PartitionSpec.UNCONSTRAINED


def constraint_spec(params) -> tuple | None:
    """Entries of the PartitionSpec of a `sharding_constraint` equation, free dims as UNCONSTRAINED; None if it has none."""
    spec, free = getattr(params.get("sharding"), "spec", None), params.get("unconstrained_dims") or ()
    return None if spec is None else tuple(UNCONSTRAINED if d in free else e for d, e in enumerate(spec))


def is_placement(eqn) -> bool:
    """Whether an equation only asks for a sharding, which a plan decides in its stead."""
    on_device = getattr(eqn.params.get("sharding"), "memory_kind", None) in (None, "device")
    return eqn.primitive.name == "sharding_constraint" and on_device and eqn.params.get("layout") is None


def shard_map_specs(params) -> tuple[tuple, tuple] | None:
    """(in_specs, out_specs) of a `shard_map` equation, each a tuple of PartitionSpecs; None where it has others."""
    found = params.get("in_specs"), params.get("out_specs")
    known = all(isinstance(specs, tuple) and all(isinstance(s, PartitionSpec) for s in specs) for specs in found)
    return found if known else None  # type: ignore[return-value]


def broadcast_prefix(prefix, full, is_leaf) -> list:
    """Leaves of `prefix`, each repeated for every leaf of `full` below it; ValueError when it is no prefix."""
    out: list = []
    jax.tree.map(lambda x, subtree: out.extend([x] * len(jax.tree.leaves(subtree))), prefix, full, is_leaf=is_leaf)
    return out


def is_custom_vmap(eqn) -> bool:
    """Whether an equation calls a function with a batching rule of its own."""
    return eqn.primitive.name == "custom_vmap_call"


def batched_as(eqn, run: Callable) -> Callable:
    """`run` on the operands of a `custom_vmap_call`, batched by the equation's own rule."""
    wrapped = jax.custom_batching.custom_vmap(lambda *xs: tuple(run(*xs)))

    @wrapped.def_vmap
    def _(size, batched, *xs):
        out = jax.vmap(lambda *xs: tuple(bind(eqn, xs)), [0 if b else None for b in batched], axis_size=size)(*xs)
        return out, (True,) * len(out)

    return wrapped


def differentiable_as(run: Callable, traced: ClosedJaxpr) -> Callable:
    """`run` on flat leaves; its derivatives are those of `traced`, the step as the user wrote it."""
    if traced.effects:  # custom derivatives do not carry them
        return run
    wrapped = jax.custom_jvp(lambda *leaves: tuple(run(*leaves)))

    @wrapped.defjvp
    def _jvp(primals, tangents):
        return jax.jvp(lambda *leaves: tuple(jaxpr_as_fun(traced)(*leaves)), primals, tangents)

    return wrapped


def jit_argument(fun, name: str) -> tuple:
    """An option such as "static_argnums" of a jitted function, numbers and names completed from each other; () of a plain one."""
    return tuple(getattr(getattr(fun, "_jit_info", None), name, ()))


# ---- what JAX's errors say

OTHER_SHARD_MAP_MESH = "should match the mesh passed to shard_map"
"""A `shard_map` was given another mesh than the one in use."""
EXPLICIT_SPEC = "cannot contain axis names that are of type Auto"
"""`out_sharding=` or `reshard` was used under Auto axes."""
ORDERED_EFFECTS = "ordered effects are not supported for more than 1 device"
"""Ordered prints were asked for on several devices."""
UNKNOWN_AXIS = "is not found in mesh"
"""A PartitionSpec names an axis that the current mesh lacks."""


def refuses_placement(error: ValueError) -> bool:
    """Whether jit refused arguments because of the devices they are on; `device_put` helps."""
    texts = "does not match the sharding", "incompatible devices", "should be equal", "mesh should be the same", "aval mesh"
    return isinstance(error, ForeignMeshError) or any(text in str(error) for text in (*texts, "does not match memory kind"))


def hide_frames(folder: str) -> None:
    """Source lines leave out the frames of a folder's files."""
    source_info_util.register_exclusion(folder)


def coordination_client():
    """The client of JAX's coordination service; None without `jax.distributed.initialize`."""
    return distributed.global_state.client


def uses_shardy() -> bool:
    """Whether XLA partitions with Shardy."""
    return bool(config.use_shardy_partitioner.value)


def compile_args(lowered) -> dict:
    """The arguments with which jit compiles a `jax.stages.Lowered`."""
    return lowered._lowering.compile_args


def compiler_options(lowered) -> dict:
    """The `compiler_options` that jit was given for a `jax.stages.Lowered`."""
    return dict(getattr(lowered._lowering, "_compiler_options_kvs", ()))


def propagated(lowered) -> tuple[list[bool], list[bool]]:
    """Per input and per result of a lowered step, whether XLA chooses its sharding."""
    args = compile_args(lowered)
    found = pxla.get_prop_to_input_output(args["in_shardings"], args["out_shardings"], len(args["ordered_effects"]))
    return list(map(bool, found[0])), list(map(bool, found[1]))


def partitioned(module, n_devices: int):
    """A StableHLO module, for so many devices."""
    with module.context:
        module = ir.Module.parse(str(module.operation.get_asm(enable_debug_info=True)))
        module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), n_devices)
    return module


def compile_module(bytecode: bytes, devices, overrides: dict, tuple_args: bool, propagate: tuple[list[bool], list[bool]]):
    """The executable of StableHLO bytecode on devices; `propagate` as in `propagated`, `overrides` are XLA's debug options."""
    assigned = np.array(devices).reshape(1, -1)
    client = assigned.flat[0].client
    options = compiler.get_compile_options(1, assigned.size, assigned, env_options_overrides=overrides, backend=client)
    options.parameter_is_tupled_arguments = tuple_args
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters, build.allow_spmd_sharding_propagation_to_output = propagate
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
    return compiler.backend_compile_and_load(client, module, xla_client.DeviceList(tuple(assigned.flat)), options, [])


def unoptimized_hlo(bytecode: bytes) -> str:
    """StableHLO bytecode as HLO text before any pass, with source lines; '' where the conversion fails."""
    try:
        to_hlo = xla_client._xla.mlir.mlir_module_to_xla_computation  # pyright: ignore[reportPrivateImportUsage]
        return to_hlo(bytecode, use_tuple_args=False, return_tuple=False).get_hlo_module().to_string()
    except Exception:
        return ""
