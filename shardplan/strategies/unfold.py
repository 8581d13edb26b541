"""Which dims of weights are held unfolded, as the heads that the step reshapes them into: 1600 as 25 x 64.

    q = (x @ w).reshape(b, t, 25, 64)    on 4 devices    w f32[1600, 1600] is read as f32[1600, 25, 64]; then q needs no reshape

25 heads in blocks of 7, filled up, are columns in blocks of 448, but a block of the 1600 columns has 400: no split of the flat dim is
one of heads, and nothing that is sharded by heads passes the reshape. Dims of 25 and 64 shard as any dims do (`uneven.py`). So before
it is planned a step is rewritten: the dims that ops share with the reshaped one are unfolded up to its inputs and outputs. These stay
as they are, and are reshaped there: a weight is sharded along another dim, and moved once it is unfolded.

A dim is unfolded if a product reads it of an input of the step (a weight, cast or cut as may be) or makes it of an output (a gradient),
a reshape takes it apart or joins it, and a mesh axis shards a part before the last one unevenly, which is no dim of a convolution:
patches of an image are no heads, and XLA finds no tiles for a product that contracts their rows and columns. Other steps stay as they
were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from shardplan import _jax, _jax_programs
from shardplan.ir.traits import traits_of
from shardplan.mesh.layout import MeshShape, splits_unevenly
from shardplan.strategies.rules import rule_for
from shardplan.strategies.rules.shape import reshape_factors
from shardplan.strategies.unfolded_ops import WRITERS, Parts, aligned_parts, shape_of, write

Scope = tuple[int, ...]
"""Where a jaxpr runs: numbers of the equations around it, outermost first."""
Dim = tuple[Scope, Any, int]
"""A dim of a variable."""


def unfolded(program, mesh: MeshShape):
    """A closed jaxpr with its dims unfolded for a mesh; itself where none is."""
    if not any(_units(eqn, mesh) for eqn in _jax.equations(program.jaxpr)):
        return program
    dims = _Dims(mesh)
    inputs = [*program.jaxpr.constvars, *program.jaxpr.invars]
    outputs = [v for v in program.jaxpr.outvars if not isinstance(v, _jax.Literal)]
    dims.read(program.jaxpr, (), set(inputs))
    dims.read_back(program.jaxpr, (), set(outputs))
    dims.unfold([*inputs, *outputs])
    return _Writer(dims, ()).program(program) if dims.units else program


def _units(eqn, mesh: MeshShape) -> list[tuple[int, int, list[int], list[int]]]:
    """Of a reshape: the dims that are to be unfolded.

    Returns:
        (0 for one of the operand or 1 of the result, the dim, elements of each part but the first, dims of the other tensor that are
        parts which an axis shards unevenly).
    """
    if eqn.primitive.name != "reshape" or eqn.params["dimensions"] is not None or 0 in eqn.outvars[0].aval.shape:
        return []
    *tensors, sizes, replicated = reshape_factors(tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape))
    found = []
    for tensor, dims in enumerate(tensors):
        for d, dim in enumerate(dims):
            parts = [sizes[a] for a in dim]
            uneven = {a for a in dim[:-1] if any(splits_unevenly(sizes[a], k) for k in mesh.sizes)}
            if uneven and replicated.isdisjoint(dim):
                apart = [e for e, other in enumerate(tensors[1 - tensor]) if not uneven.isdisjoint(other)]
                found.append((tensor, d, [prod(parts[i:]) for i in range(1, len(parts))], apart))
    return found


@dataclass
class _Dims:
    """Which dims of a program go together: classes of a union-find structure.

    Attributes:
        parent: of a dim, towards the one that stands for its class.
        sizes, links: of a class, the sizes of its dims, and those of equal pieces that dims are cut into or joined from.
        units: of a class that is unfolded, the elements of each part but the first, of the largest dim.
        seeds: what reshapes ask for, in program order: a dim, the elements of each part but the first, and the dims that are its parts.
        weighed: dims that products read of inputs of the step, or make of outputs.
        convolved: dims that convolutions have.
        kept: dims that stay as they are.
    """

    mesh: MeshShape
    parent: dict[Dim, Dim] = field(default_factory=dict)
    sizes: dict[Dim, set[int]] = field(default_factory=dict)
    links: dict[Dim, set[int]] = field(default_factory=dict)
    units: dict[Dim, set[int]] = field(default_factory=dict)
    seeds: list[tuple[Dim, list[int], list[Dim]]] = field(default_factory=list)
    weighed: list[Dim] = field(default_factory=list)
    convolved: list[Dim] = field(default_factory=list)
    kept: list[Dim] = field(default_factory=list)

    def root(self, dim: Dim) -> Dim:
        while (above := self.parent.get(dim, dim)) != dim:
            self.parent[dim] = dim = self.parent.get(above, above)
        return dim

    def join(self, a: Dim, b: Dim, piece: int = 0) -> None:
        """Puts two dims into one class, one of them a whole number of pieces of the size of the other."""
        one, other = self.root(a), self.root(b)
        for dim, root in ((a, one), (b, other)):
            self.sizes.setdefault(root, set()).add(dim[1].aval.shape[dim[2]])
        if one != other:
            self.parent[other] = one
            self.sizes[one] |= self.sizes.pop(other)
            self.links.setdefault(one, set()).update(self.links.pop(other, ()))
        if piece:
            self.links.setdefault(one, set()).add(piece)

    # ---- reading

    def read(self, jaxpr, scope: Scope, of_inputs: set) -> set:
        """Records which dims go together; adds to `of_inputs` the variables that are inputs of the step, as they are, cast or cut."""
        for n, eqn in enumerate(jaxpr.eqns):
            inner, within = _jax_programs.body(eqn), (*scope, n)
            if inner is not None:
                self._read_body(eqn, inner.jaxpr, scope, within, of_inputs)
                continue
            name, first = eqn.primitive.name, next((v for v in eqn.invars if not isinstance(v, _jax.Literal)), None)
            if first in of_inputs and _hands_on(eqn):
                of_inputs.update(eqn.outvars)
            ends, traits = (*eqn.invars[:1], *eqn.outvars), traits_of(name)
            for t, d, units, apart in _units(eqn, self.mesh):
                self.seeds.append(((scope, ends[t], d), units, [(scope, ends[1 - t], e) for e in apart]))
            self._read_op(eqn, scope)
            arrays = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
            if traits.convolution:
                self.convolved += [(scope, v, d) for v in (*arrays, *eqn.outvars) for d in range(_rank(v))]
            read = [v for v in arrays if v in of_inputs] if traits.matmul else []
            self.weighed += [(scope, v, d) for v in read for d in range(_rank(v))]
        return of_inputs

    def read_back(self, jaxpr, scope: Scope, of_outputs: set) -> set:
        """Records which dims of outputs products make; adds to `of_outputs` the variables that come out cast, cut or added."""
        for n, eqn in reversed(list(enumerate(jaxpr.eqns))):
            wanted = [v for v in eqn.outvars if v in of_outputs]
            if not wanted:
                continue
            if (inner := _jax_programs.body(eqn)) is not None:
                pairs = zip(eqn.outvars, inner.jaxpr.outvars, strict=True)
                own = {w for v, w in pairs if v in of_outputs and not isinstance(w, _jax.Literal)}
                found = self.read_back(inner.jaxpr, (*scope, n), own)
                pairs = zip(eqn.invars, inner.jaxpr.invars, strict=True)
                of_outputs.update(v for v, w in pairs if w in found and not isinstance(v, _jax.Literal))
            elif _hands_on(eqn) or traits_of(eqn.primitive.name).addition:
                of_outputs.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
            elif traits_of(eqn.primitive.name).matmul:
                self.weighed += [(scope, v, d) for v in wanted for d in range(_rank(v))]
        return of_outputs

    def _read_body(self, eqn, inner, scope: Scope, within: Scope, of_inputs: set) -> None:
        handed = [(v, w) for v, w in zip(eqn.invars, inner.invars, strict=True) if not isinstance(v, _jax.Literal)]
        made = [(v, w) for v, w in zip(eqn.outvars, inner.outvars, strict=True) if not isinstance(w, _jax.Literal)]
        for outer, own in handed + made:
            row = _rank(outer) - _rank(own)  # 1 for what a scan stacks
            self.kept += [(scope, outer, 0)] if row else []
            for d in range(_rank(own)):
                self.join((scope, outer, d + row), (within, own, d))
        if eqn.primitive.name == "scan":
            _, consts, carries = _jax.scan_parts(eqn)
            for after, carry in zip(inner.outvars[:carries], inner.invars[consts : consts + carries], strict=True):
                for d in range(_rank(carry) if not isinstance(after, _jax.Literal) else 0):
                    self.join((within, after, d), (within, carry, d))
        found = self.read(inner, within, {w for v, w in handed if v in of_inputs})
        of_inputs.update(v for v, w in made if w in found)

    def _read_op(self, eqn, scope: Scope) -> None:
        for (v, d), (w, e), piece in aligned_parts(eqn):
            self.join((scope, v, d), (scope, w, e), piece)
        if eqn.primitive.name not in WRITERS:
            return
        rule, _ = rule_for(eqn.primitive.name, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
        first: dict[str, Dim] = {}
        for v, dims in zip((*eqn.invars, *eqn.outvars), rule.operands + rule.results, strict=True):
            for d, dim in enumerate(dims):
                if len(dim) == 1 and dim[0] not in rule.replicated and dim[0] not in rule.halo and not isinstance(v, _jax.Literal):
                    self.join(first.setdefault(dim[0], (scope, v, d)), (scope, v, d))

    # ---- deciding

    def unfold(self, ends: Sequence) -> None:
        """Unfolds the classes that weights are in, as far as what reshapes ask for nests; `ends` are inputs and outputs of the step."""
        of_ends = {self.root(((), v, d)) for v in ends for d in range(_rank(v))}
        allowed = (of_ends & {self.root(dim) for dim in self.weighed}) - {self.root(dim) for dim in self.kept}
        convolved = {self.root(dim) for dim in self.convolved}
        for dim, units, apart in self.seeds:
            root = self.root(dim)
            known = self.units.get(root, set())
            every = sorted(known | {*units} | self.links.get(root, set()) | self.sizes.get(root, set()))
            nests = all(b % a == 0 for a, b in pairwise(every))
            if root in allowed and nests and convolved.isdisjoint(map(self.root, apart)):
                self.units[root] = known | {*units}

    def parts(self, scope: Scope, v) -> Parts:
        """Per dim of a variable, the sizes that it is held as."""
        return tuple(self._parts_of((scope, v, d), n) for d, n in enumerate(getattr(v.aval, "shape", ())))

    def _parts_of(self, dim: Dim, n: int) -> tuple[int, ...]:
        root = self.root(dim)
        if root not in self.units:
            return (n,)
        cuts = sorted((u for u in self.units[root] | self.links.get(root, set()) if 1 < u < n), reverse=True)
        return tuple(a // b for a, b in pairwise((n, *cuts, 1)))


class _Writer:
    """One jaxpr being written.

    Attributes:
        held: variable -> the one that holds it in its parts.
        flat: variable that has parts -> the one that holds it without.
        eqns: written so far.
    """

    def __init__(self, dims: _Dims, scope: Scope):
        self.dims, self.scope = dims, scope
        self.held: dict = {}
        self.flat: dict = {}
        self.eqns: list = []

    def program(self, program):
        """The whole step, whose inputs and outputs keep their shapes."""
        jaxpr = program.jaxpr
        self.flat.update((v, v) for v in (*jaxpr.constvars, *jaxpr.invars))
        outvars = [self.as_traced(v, maker) for v, maker in self._write(jaxpr)]
        return _jax.closed_over(jaxpr.replace(eqns=self.eqns, outvars=outvars), program)

    def inner(self, closed):
        """A body, whose inputs and outputs come in parts."""
        jaxpr = closed.jaxpr
        self.flat.update((v, v) for v in jaxpr.constvars)
        for v in jaxpr.invars:
            parts = self.dims.parts(self.scope, v)
            self.held[v] = v if _is_flat(parts) else _jax_programs.variable(v, shape_of(parts))
        outvars = [self.in_parts(v, maker) for v, maker in self._write(jaxpr)]
        pairs = (zip(self.eqns, jaxpr.eqns, strict=False), ((self.held[v], v) for v in jaxpr.invars))
        changed = len(self.eqns) != len(jaxpr.eqns) or any(a is not b for of in pairs for a, b in of)
        made = jaxpr.replace(invars=[self.held[v] for v in jaxpr.invars], eqns=self.eqns, outvars=outvars)
        return _jax.closed_over(made, closed) if changed else closed

    def _write(self, jaxpr) -> list[tuple]:
        """Writes the equations; the outputs, as they were traced, with the equations that make them, None where none does."""
        for n, eqn in enumerate(jaxpr.eqns):
            ins, outs = ([self.dims.parts(self.scope, v) for v in of] for of in (eqn.invars, eqn.outvars))
            inner = _jax_programs.body(eqn)
            if all(map(_is_flat, (*ins, *outs))) and inner is None:
                made = self._as_it_is(eqn)
            elif inner is not None:
                made = self._with_body(eqn, inner, n, outs)
            else:
                made = write(self, eqn, [self.in_parts(v, eqn) for v in eqn.invars], ins, outs)
            if made is None:
                made = self._as_it_is(eqn)
                self.flat.update(zip(eqn.outvars, made, strict=True))
            else:
                self.held.update(zip(eqn.outvars, made, strict=True))
        makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        return [(v, None if isinstance(v, _jax.Literal) else makers.get(v)) for v in jaxpr.outvars]

    def _as_it_is(self, eqn) -> list:
        """The equation on operands without parts."""
        operands = [self.as_traced(v, eqn) for v in eqn.invars]
        same = all(a is b for a, b in zip(operands, eqn.invars, strict=True))
        self.eqns.append(eqn if same else eqn.replace(invars=operands))
        return list(eqn.outvars)

    def _with_body(self, eqn, inner, n: int, outs: Sequence[Parts]) -> list:
        operands = [self.in_parts(v, eqn) for v in eqn.invars]
        closed = _Writer(self.dims, (*self.scope, n)).inner(inner)
        if closed is inner:
            return self._as_it_is(eqn)
        made = _jax_programs.with_body(eqn, closed, operands, [shape_of(parts) for parts in outs])
        self.eqns.append(made)
        return list(made.outvars)

    # ---- what is read

    def in_parts(self, v, at):
        """A variable in its parts."""
        if isinstance(v, _jax.Literal):
            return v
        if v not in self.held:
            self.held[v] = self.reshape(self.flat.get(v, v), shape_of(self.dims.parts(self.scope, v)), at)
        return self.held[v]

    def as_traced(self, v, at):
        """A variable in the shape that it was traced with."""
        if isinstance(v, _jax.Literal):
            return v
        if v not in self.flat:
            self.flat[v] = self.reshape(self.held[v], v.aval.shape, at)
        return self.flat[v]

    # ---- what is written (`unfolded_ops.py`)

    def reshape(self, x, shape: Sequence[int], at):
        """A variable in another shape."""
        if tuple(x.aval.shape) == tuple(shape):
            return x
        self.eqns.append(_jax_programs.reshape_equation(x, shape, at))
        return self.eqns[-1].outvars[0]

    def run(self, eqn, operands: Sequence, shapes: Sequence[Sequence[int]], **params) -> list:
        """The results of an equation on other operands."""
        self.eqns.append(_jax_programs.equation(eqn, operands, params, shapes))
        return list(self.eqns[-1].outvars)


def _rank(v) -> int:
    return len(getattr(v.aval, "shape", ()))


def _hands_on(eqn) -> bool:
    """Whether an op casts or cuts its operand, and does no more."""
    traits = traits_of(eqn.primitive.name)
    return traits.forwards_value or traits.reads_part or eqn.primitive.name in ("copy", "split")


def _is_flat(parts: Parts) -> bool:
    return all(len(sizes) == 1 for sizes in parts)
