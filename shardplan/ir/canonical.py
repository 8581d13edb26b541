"""What makes two programs the same for a plan, as text in which no mesh, device, source line or printout of JAX appears.

    4,3: dot_general float32[64,512] float32[512,2048] -> float32[64,2048]; dimension_numbers=(((1),(0)),((),()))

One line per op of the graph: the numbers of its operands, primitive, types, parameters. Numbers written in the program, such as a
learning rate, are left out like names: a plan does not depend on them. So are parameters that are None, False or empty, which
versions of JAX add and take away.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shardplan import _jax
from shardplan.ir.graph import Graph, Op

IGNORED = frozenset(
    {"accuracy", "backend", "ctx_mesh", "debug_info", "device", "mesh", "name", "out_sharding", "sharding", "weak_type"}
)
"""Parameters that a plan does not depend on; the `sharding` of a constraint counts."""
EMPTY = "None", "False", "()", "{}", "''"


class Identity(NamedTuple):
    """Digests of a program: of all of it, and of the part that is the same in every version of JAX."""

    fingerprint: str
    products: str


def identity(graph: Graph, labels: str) -> Identity:
    """What stands for a program with these names of inputs and outputs.

    All of it is a line per op, a line per loop, and the pairs of ops whose layouts must agree. The part of `products` is its
    products, lookups and loops, whatever their order and operands.
    """
    texts = [op_text(op) for op in graph.ops]
    wired = (f"{','.join('_' if v is None else str(v) for v in op.inputs)}: {text}" for op, text in zip(graph.ops, texts, strict=True))
    loops = [f"loop {x.start}:{x.stop} {x.trips:g}" for x in graph.loops]
    products = sorted(text for op, text in zip(graph.ops, texts, strict=True) if _is_product(op))
    trips = sorted(f"loop {x.trips:g}" for x in graph.loops)
    return Identity(_digest([*wired, *loops, f"same layout {graph.same_layout}", labels]), _digest([*products, *trips, labels]))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def _is_product(op: Op) -> bool:
    t = op.traits
    return bool(t.matmul or t.grouped_matmul or t.convolution or t.gather or t.scatter)


def op_text(op: Op) -> str:
    """An op without its operands: primitive, types, parameters."""
    ignored = IGNORED - {"sharding"} if op.traits.sharding_constraint else IGNORED
    params = _params(op.params, ignored)
    return f"{op.primitive} {_types(op.ins)} -> {_types(op.outs)}; {params}"


def _params(params: Mapping[str, Any], ignored: frozenset[str] = IGNORED) -> str:
    given = ((name, value_text(value)) for name, value in sorted(params.items()) if name not in ignored)
    return " ".join(f"{name}={text}" for name, text in given if text not in EMPTY)


def _types(avals: Iterable[Any]) -> str:
    return " ".join(f"{getattr(x, 'dtype', 'token')}[{','.join(map(str, getattr(x, 'shape', ())))}]" for x in avals)


def value_text(x: Any) -> str:
    """A parameter's value by what it holds, without addresses, devices and the names of modules."""
    if x is None or (isinstance(x, (bool, int, float, complex, str, bytes)) and not isinstance(x, enum.Enum)):
        return repr(x.item() if isinstance(x, np.generic) else x)
    if isinstance(x, np.generic):
        return value_text(x.item())
    if isinstance(x, np.ndarray):
        return f"{x.dtype}{list(x.shape)}{hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]}"
    if isinstance(x, jax.sharding.Sharding):
        x = getattr(x, "spec", jax.sharding.PartitionSpec())
    if isinstance(x, jax.sharding.PartitionSpec):
        return f"P{_joined(map(value_text, tuple(x)))}"
    if isinstance(x, Mapping):
        return "{" + ",".join(sorted(f"{value_text(k)}:{value_text(v)}" for k, v in x.items())) + "}"
    if isinstance(x, (set, frozenset)):
        return _joined(sorted(map(value_text, x)))
    if isinstance(x, (tuple, list)):
        return _joined(map(value_text, x))
    if hasattr(inner := getattr(x, "jaxpr", x), "eqns"):
        return f"[{'; '.join(_equations(inner))}]"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x).__name__ + _joined(value_text(getattr(x, f.name)) for f in dataclasses.fields(x) if f.compare)
    return str(getattr(x, "name", None) or getattr(x, "__name__", None) or type(x).__name__)


def _joined(texts: Iterable[str]) -> str:
    return f"({','.join(texts)})"


def _equations(jaxpr) -> Iterator[str]:
    """A jaxpr that an op carries in its parameters, variables by the order in which they come."""
    numbers: dict[Any, int] = {}

    def named(atoms) -> str:
        return ",".join("_" if isinstance(a, _jax.Literal) else str(numbers.setdefault(a, len(numbers))) for a in atoms)

    yield f"{named((*jaxpr.constvars, *jaxpr.invars))} {_types(v.aval for v in jaxpr.invars)}"
    for e in jaxpr.eqns:
        yield f"{named(e.outvars)}={e.primitive.name} {named(e.invars)} {_types(v.aval for v in e.outvars)} {_params(e.params)}"
    yield named(jaxpr.outvars)
