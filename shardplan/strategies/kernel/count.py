"""Floating point operations of a Pallas kernel: those that its cost estimate states, else those of its body at every grid point.

A loop's bounds that follow from the grid's indices, as in causal attention, are evaluated at every point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardplan import _jax
from shardplan.ir.parse import counted_bounds
from shardplan.strategies.kernel.index_maps import GridEvaluator, RunTimeValue

NO_ARITHMETIC = """
    get swap addupdate masked_load masked_swap load store broadcast_in_dim reshape transpose squeeze convert_element_type iota slice
    concatenate copy program_id num_programs multiple_of max_contiguous select_n stop_gradient bitcast_convert_type rev pad gather
    dynamic_slice dynamic_update_slice dma_start dma_wait semaphore_signal semaphore_wait get_barrier_semaphore debug_print
"""
MOVES = frozenset(NO_ARITHMETIC.split())
"""Primitives without arithmetic on elements."""


def kernel_flops(params: Mapping[str, Any]) -> float | None:
    """Of the whole call; None where its grid is known only at run time."""
    if (estimate := params.get("cost_estimate")) is not None:
        return float(estimate.flops)
    mapping = params["grid_mapping"]
    if not all(isinstance(n, int) for n in mapping.grid):
        return None
    own = [a for a in range(len(mapping.grid)) if a not in mapping.vmapped_dims]
    counter = _Counter(GridEvaluator(tuple(mapping.grid)), own)
    jaxpr = params["jaxpr"]
    per_point = counter.count(jaxpr, [RunTimeValue()] * len(jaxpr.invars))
    return float(np.mean(per_point)) * math.prod(mapping.grid)


def program_flops(jaxpr) -> float:
    """Of a program without a grid."""
    return float(np.mean(_Counter(GridEvaluator(()), ()).count(jaxpr, [RunTimeValue()] * len(jaxpr.invars))))


class _Counter:
    """Counts a body's operations as arrays over the grid."""

    def __init__(self, evaluator: GridEvaluator, own: Sequence[int]):
        self.evaluator, self.own = evaluator, own
        self.total = np.zeros(())
        self.times = np.ones(())

    def count(self, jaxpr, values: Sequence) -> np.ndarray:
        """Operations of a jaxpr, per grid point."""
        self.run(jaxpr, values)
        return self.total

    def run(self, jaxpr, values: Sequence) -> list:
        """Add the operations of a jaxpr; returns the values of its outputs."""
        return _jax.interpret(jaxpr, values, lambda _, eqn, xs: self.equation(eqn, xs), lambda atom: self.evaluator.constant(atom.val))

    def repeated(self, times, jaxpr, values: Sequence) -> None:
        outer = self.times
        self.times = outer * times
        self.run(jaxpr, values)
        self.times = outer

    def equation(self, eqn, operands: Sequence) -> list:
        name, p = eqn.primitive.name, eqn.params
        unknown = [RunTimeValue()] * len(eqn.outvars)
        if name == "program_id":
            return [self.evaluator.index(self.own[p["axis"]])]
        if (inner := _jax.inner_jaxpr(eqn)) is not None:
            return self.run(inner.jaxpr, [*[RunTimeValue()] * len(inner.consts), *operands])
        if (region := _jax.region(eqn)) == "scan":
            body, n_consts, _ = _jax.scan_parts(eqn)
            held = [*operands[:n_consts], *[RunTimeValue()] * (len(operands) - n_consts)]
            self.repeated(p["length"], body.jaxpr, [*[RunTimeValue()] * len(body.consts), *held])
            return unknown
        if region == "while":
            self.loop(eqn, operands)
            return unknown
        if region == "cond":
            self.branches(eqn, operands)
            return unknown
        for inner in _jax.jaxprs_in_params(p):  # scoped memory, and other bodies that run once
            self.run(inner, [RunTimeValue()] * (len(inner.constvars) + len(inner.invars)))
        self.total = self.total + self.times * _operations(eqn)
        return self.evaluator.apply(eqn, operands)

    def loop(self, eqn, operands: Sequence) -> None:
        _, n_cond, body, n_body = _jax.while_parts(eqn)
        bounds = counted_bounds(eqn)
        trips, values = np.ones(()), [self.atom(eqn, x, operands) for x in bounds or ()]
        found = [x for x in values if isinstance(x, np.ndarray)]
        if len(found) == 3:
            start, stop, step = found
            trips = np.maximum(0, np.ceil((stop - start) / np.maximum(step, 1)))
        held = [*operands[n_cond : n_cond + n_body], *[RunTimeValue()] * (len(operands) - n_cond - n_body)]
        self.repeated(trips, body.jaxpr, [*[RunTimeValue()] * len(body.consts), *held])

    def atom(self, eqn, atom, operands: Sequence):
        """The value of one of an equation's operands, or of a literal."""
        if isinstance(atom, _jax.Literal):
            return self.evaluator.constant(atom.val)
        return next(x for v, x in zip(eqn.invars, operands, strict=True) if v is atom)

    def branches(self, eqn, operands: Sequence) -> None:
        """Count the branch that a condition on grid indices takes, else the largest."""
        found, before = [], self.total
        for branch in _jax.branches(eqn):
            self.total = np.zeros(())
            self.run(branch.jaxpr, [*[RunTimeValue()] * len(branch.consts), *operands[1:]])
            found.append(self.total)
        which = operands[0]
        if isinstance(which, np.ndarray):
            taken = sum(x * (which.astype(int) == k) for k, x in enumerate(found))
        else:
            taken = max(found, key=lambda x: float(np.mean(x)))
        self.total = before + taken


def _operations(eqn) -> float:
    """Of one equation on the arrays of one grid point."""
    name = eqn.primitive.name
    if name in MOVES or not eqn.outvars:
        return 0.0
    shapes: list[tuple[int, ...]] = [tuple(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)]
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * math.prod((*shapes[-1], *(shapes[0][d] for d in contracted)))
    return float(max(math.prod(shape) for shape in shapes)) if any(shapes) else 0.0
