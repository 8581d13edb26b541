"""Which digits of a Pallas kernel's grid may be sharded, derived from its block mappings and from what its body reads.

    grid (4, 2, 8)   q (1, 64, 1, 32) at (b, i, h, 0)   k (1, 128, 1, 32) at (b, 0, h // 4, 0)   o as q; the body reads the index i

    b (i q1) (h1 h0) q3,  b k1 h1 k3  ->  b (i q1) (h1 h0) q3     replicated i h0? q1 q3 k1 k3

A grid axis is a product of digits (`steps_along`); an axis that is used as one index is one digit. A digit is a factor if

- every map that mentions it adds a constant per step, so that blocks tile one dim of the array, without overlap and to the dim's end;
- every result mentions it: otherwise programs that differ in it write to one block;
- the body does not read the axis' index or size otherwise (`program_id`), and hands nothing on along it in scratch memory.

Operands that do not mention it are replicated along it. The rest of a block, and a dim that no digit mentions, needs replication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardplan import _jax
from shardplan.strategies.kernel.index_maps import GridEvaluator, Place, RunTimeValue, axes_of, digit_places, steps_along
from shardplan.strategies.rule import Dims


class Digit(NamedTuple):
    """One digit of a grid axis: the axis' index is the sum of digit * place."""

    axis: int
    place: int
    size: int

    @property
    def name(self) -> str:
        """Its factor."""
        return f"g{self.axis}" if self.place == 1 else f"g{self.axis}_{self.place}"


@dataclass(frozen=True)
class KernelDim:
    """One dim of an operand or result: digits that index it, major to minor, and the elements that one step of the last moves on.

    Attributes:
        digits: () where none does, or where they do not tile the dim.
        rest: elements from one step of the minor digit to the next; of a dim without digits all of it.
        unit: elements that the index map counts in: the block's size, or 1.
    """

    digits: tuple[Digit, ...] = ()
    rest: int = 1
    unit: int = 1


@dataclass(frozen=True, eq=False)
class KernelGrid:
    """How a kernel's grid lies over its operands and results.

    Attributes:
        grid: its size, per axis.
        digits: per axis, minor first.
        operands, results: per tensor its dims, in the call's order; operands that only hold scalars for index maps come first.
        stopped: digit -> why it needs replication.
    """

    grid: tuple[int, ...]
    digits: tuple[tuple[Digit, ...], ...]
    operands: tuple[tuple[KernelDim, ...], ...]
    results: tuple[tuple[KernelDim, ...], ...]
    stopped: Mapping[Digit, str]

    @property
    def free(self) -> frozenset[Digit]:
        """Digits that may be sharded."""
        return frozenset(d for axis in self.digits for d in axis if d not in self.stopped)

    def factor_dims(self, tensor: int) -> Dims:
        """The factors of an operand, or behind them of a result."""
        dims = (*self.operands, *self.results)[tensor]
        rests = ([(f"x{tensor}_{d}",)] if dim.rest > 1 or not dim.digits else [()] for d, dim in enumerate(dims))
        return tuple((*(x.name for x in dim.digits), *rest) for dim, (rest,) in zip(dims, rests, strict=True))

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all factors."""
        tensors = (*self.operands, *self.results)
        rests = {f"x{k}_{d}": dim.rest for k, dims in enumerate(tensors) for d, dim in enumerate(dims)}
        found = {name for k in range(len(tensors)) for dim in self.factor_dims(k) for name in dim}
        known = rests | {d.name: d.size for axis in self.digits for d in axis}
        return {name: size for name, size in known.items() if name in found}

    @property
    def reason(self) -> str:
        """Why no digit may be sharded, one clause per grid axis; "" if one may."""
        return "" if self.free else self.stops or "its grid is a single program"

    @property
    def stops(self) -> str:
        """What stops the digits that may not be sharded, one clause per grid axis."""
        return "; ".join(dict.fromkeys(f"grid axis {d.axis}: {why}" for d, why in self.stopped.items()))


def kernel_grid(params: Mapping[str, Any], n_operands: int) -> KernelGrid | str:
    """How the grid of a `pallas_call` lies over its arrays, from the equation's parameters; or why that cannot be said."""
    mapping = params["grid_mapping"]
    if not all(isinstance(n, int) for n in mapping.grid):
        return "its grid's size is known only at run time"
    n_scalars = mapping.num_index_operands
    if n_operands != n_scalars + mapping.num_inputs:
        return "it takes operands of which its block mappings say nothing"
    if (why := _body_position(params)) is not None:
        return why
    return _Derivation(params, tuple(mapping.grid), n_scalars).derive()


def _body_position(params: Mapping[str, Any]) -> str | None:
    """What of the whole call a body depends on that no grid axis stands for."""
    for eqn in _jax.equations(params["jaxpr"]):
        name = eqn.primitive.name
        if name.startswith("prng_"):
            return f"its body draws random numbers in the order in which programs run ({name})"
        if name in ("dma_start", "semaphore_signal") and _remote(eqn):
            return f"its body sends to other devices ({name})"
    return None


def _remote(eqn) -> bool:
    """Whether a copy or a signal names another device."""
    if eqn.primitive.name == "dma_start":
        *_, device = eqn.params["tree"].unflatten(list(eqn.invars))
        return device is not None
    *_, device, _ = eqn.params["args_tree"].unflatten(list(eqn.invars))
    return device is not None


@dataclass
class _Derivation:
    """The state of one derivation: digits that are stopped, each with the first reason."""

    params: Mapping[str, Any]
    grid: tuple[int, ...]
    n_scalars: int
    stopped: dict[int, str] = field(default_factory=dict)  # by axis
    stopped_digits: dict[Digit, str] = field(default_factory=dict)
    not_nested: set[int] = field(default_factory=set)  # axes whose digits are unknown

    def derive(self) -> KernelGrid:
        mapping = self.params["grid_mapping"]
        evaluator = GridEvaluator(self.grid)
        starts = []  # per block mapping, per dim: (name, value of the index, unit, block, size)
        for block in mapping.block_mappings:
            indices = evaluator.index_map(block.index_map_jaxpr)
            shape = block.array_aval.shape
            name = _origin(block)
            if len(indices) != len(shape):  # slices of sizes that are known at run time
                self.stop(frozenset().union(*map(axes_of, indices)), f"the index map of {name} gives slices")
                indices = [np.zeros((1,) * len(self.grid), int)] * len(shape)
            blocks = (_block(b) for b in block.block_shape)
            starts.append([(f"dim {d} of {name}", x, *b, n) for d, (x, b, n) in enumerate(zip(indices, blocks, shape, strict=True))])
        scalars = self.scalar_indices(evaluator)
        self.body()
        tensors = [*scalars, *starts]
        steps = [[self.steps(what, value, unit) for what, value, unit, _, _ in dims] for dims in tensors]
        digits = self.digits([s for dims in steps for s in dims])
        outputs = self.n_scalars + mapping.num_inputs
        dims = []
        for k, (tensor, of) in enumerate(zip(tensors, steps, strict=True)):
            found = [self.dim(k >= outputs, x, s, digits) for x, s in zip(tensor, of, strict=True)]
            dims.append(self.without_diagonals(tensor, found))
        self.results_mention(dims[outputs:], digits)
        self.aliases(dims, outputs)
        axes = {d: self.stopped[a] for a, of in enumerate(digits) for d in of if a in self.stopped}
        return KernelGrid(self.grid, digits, tuple(dims[:outputs]), tuple(dims[outputs:]), self.stopped_digits | axes)

    def stop(self, axes, why: str) -> None:
        for axis in sorted(axes):
            if self.grid[axis] > 1:
                self.stopped.setdefault(axis, why)

    def scalar_indices(self, evaluator: GridEvaluator) -> list[list[tuple]]:
        """Operands of index maps, as blocks of one element at the place that all maps read; without digits where they differ."""
        avals = self.params["grid_mapping"].index_map_avals[len(self.grid) :]
        used = _used_inputs(self.params["jaxpr"])
        out = []
        for k, aval in enumerate(avals):
            reads = [r for r in evaluator.reads if r.operand == k]
            shape = tuple(aval.shape)
            zero = np.zeros((1,) * len(self.grid), int)
            dims = [(f"dim {d} of index operand {k}", zero, 1, 1, n) for d, n in enumerate(shape)]
            axes = frozenset().union(*(axes_of(i) for r in reads for i in r.index if i is not None))
            same = all(_same(r.index, reads[0].index) for r in reads)
            if reads and axes:
                if k in used or not same or len(reads[0].index) != len(shape):
                    why = "the body reads it, too" if k in used else "at several places"
                    self.stop(axes, f"index maps read index operand {k} by it, and {why}")
                else:
                    dims = [(what, zero if i is None else i, 1, 1, n) for (what, *_, n), i in zip(dims, reads[0].index, strict=True)]
            out.append(dims)
        return out

    def body(self) -> None:
        """Stop the axes whose index or size the body reads, and those along which scratch memory may carry values."""
        mapping, jaxpr = self.params["grid_mapping"], self.params["jaxpr"]
        own = [a for a in range(len(self.grid)) if a not in mapping.vmapped_dims]
        names = list(mapping.grid_names or ())
        for eqn in _read_positions(jaxpr):
            name = eqn.primitive.name
            if name in ("program_id", "num_programs"):
                self.stop([own[eqn.params["axis"]]], f"the body reads {name}({eqn.params['axis']})")
            elif name == "axis_index":
                axes = eqn.params["axis_name"]
                axes = axes if isinstance(axes, tuple) else (axes,)
                self.stop([names.index(a) for a in axes if a in names], "the body reads axis_index")
        if mapping.num_scratch_operands and not all(_is_semaphore(x) for x in mapping.scratch_avals):
            parallel = _parallel_axes(self.params, len(self.grid))
            for axis in range(len(self.grid)):
                if axis not in parallel and not _scratch_starts_anew(self.params, own, axis):
                    self.stop([axis], "scratch memory may carry values along it (dimension_semantics does not say that it is parallel)")

    def steps(self, what: str, value, unit: int) -> dict[int, tuple[Place, ...]]:
        """Elements that an index moves on by, per axis and digit; an index that cannot be followed stops its axes."""
        if isinstance(value, RunTimeValue):
            self.stop(value.axes, f"the index map of {what} depends on it and on values that are known at run time")
            return {}
        if (found := steps_along(value)) is None:
            self.stop(axes_of(value), f"the index map of {what} is not linear in it")
            return {}
        if found and value.reshape(-1)[0] != 0:
            self.stop(found, f"the index map of {what} does not begin at 0")
            return {}
        return {axis: tuple(p._replace(step=p.step * unit) for p in places) for axis, places in found.items()}

    def digits(self, steps: Sequence[Mapping[int, tuple[Place, ...]]]) -> tuple[tuple[Digit, ...], ...]:
        """Per axis the digits that all maps agree on, minor first; none of an axis of one."""
        out = []
        for axis, n in enumerate(self.grid):
            places = digit_places(n, [s[axis] for s in steps if axis in s]) if n > 1 else ()
            if places is None:
                self.stop([axis], "its index maps take it apart in ways that do not nest")
                self.not_nested.add(axis)
                places = (1,)
            ends = (*places[1:], n)[: len(places)]
            out.append(tuple(Digit(axis, p, q // p) for p, q in zip(places, ends, strict=True)))
        return tuple(out)

    def dim(self, is_result: bool, tensor: tuple, steps: Mapping[int, tuple[Place, ...]], digits) -> KernelDim:
        """One dim; its digits are stopped where their blocks do not tile it."""
        what, _, unit, block, n = tensor
        if not self.not_nested.isdisjoint(steps):
            self.stop(steps, f"the index map of {what} adds it to an index that is taken apart")
            return KernelDim((), n, unit)
        found = []  # (step in elements, digit)
        for axis, places in steps.items():
            for digit in digits[axis]:
                inside = next((p for p in places if p.place <= digit.place < p.place * p.size), None)
                if inside is not None and inside.step:
                    found.append((inside.step * (digit.place // inside.place), digit))
        if not found:
            return KernelDim((), n, unit)
        found.sort()
        at, why = found[0][0], ""
        if at < block or (is_result and at > block):
            why = "blocks overlap" if at < block else "there are gaps between blocks"
        for step, digit in found:
            why = why or ("blocks are not in order" if step != at else "")
            at *= digit.size
        if why or at != n:
            why = why or f"blocks cover {at} of {n} elements"
            for _, digit in found:
                self.stopped_digits.setdefault(digit, f"of {what}, {why}")
            return KernelDim((), n, unit)
        return KernelDim(tuple(d for _, d in reversed(found)), found[0][0], unit)

    def without_diagonals(self, tensor, dims: list[KernelDim]) -> tuple[KernelDim, ...]:
        """Dims of one tensor; a digit that indexes two of them is stopped."""
        every = [d for dim in dims for d in dim.digits]
        for digit in {d for d in every if every.count(d) > 1}:
            what = " and ".join(t[0] for t, dim in zip(tensor, dims, strict=True) if digit in dim.digits)
            self.stopped_digits.setdefault(digit, f"it indexes both {what}")
            dims = [KernelDim((), x[-1], dim.unit) if digit in dim.digits else dim for x, dim in zip(tensor, dims, strict=True)]
        return tuple(dims)

    def results_mention(self, results, digits) -> None:
        """Stop digits that some result does not mention."""
        blocks = self.params["grid_mapping"].block_mappings[-len(results) :] if results else ()
        for block, dims in zip(blocks, results, strict=True):
            mentioned = {d for dim in dims for d in dim.digits}
            for digit in (d for axis in digits for d in axis if d not in mentioned):
                self.stopped_digits.setdefault(digit, f"the index map of {_origin(block)} does not mention it")

    def aliases(self, dims, outputs: int) -> None:
        """Stop the digits of results that are written over operands of which each program sees another block."""
        for i, o in self.params["input_output_aliases"]:
            mine, its = dims[i], dims[outputs + o]
            if [x.digits for x in mine] != [x.digits for x in its]:
                for digit in {d for dim in (*mine, *its) for d in dim.digits}:
                    self.stopped_digits.setdefault(digit, f"result {o} overwrites operand {i}, which has other blocks")


def _origin(block) -> str:
    """Where a block mapping's array stands in the user's call."""
    return str(block.origin)


def _block(dim) -> tuple[int, int]:
    """(elements that the index map counts in, elements of a block) along one dim of a block shape."""
    size = int(getattr(dim, "block_size", 1))
    return (size, size) if type(dim).__name__ == "Blocked" else (1, size)


def _same(x: Sequence, y: Sequence) -> bool:
    return len(x) == len(y) and all(
        a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)) for a, b in zip(x, y, strict=True)
    )


def _used(jaxpr) -> set[int]:
    """The variables that equations of a jaxpr, or its end, read: by id."""
    return {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}


def _used_inputs(jaxpr) -> frozenset[int]:
    """Numbers of the inputs that a jaxpr reads."""
    used = _used(jaxpr)
    return frozenset(k for k, x in enumerate(jaxpr.invars) if id(x) in used)


POSITIONS = "program_id", "num_programs", "axis_index"


def _read_positions(jaxpr) -> Iterator[Any]:
    """Every equation that reads a grid position and whose value is used."""
    used = _used(jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in POSITIONS and id(eqn.outvars[0]) in used:
            yield eqn
        for inner in _jax.jaxprs_in_params(eqn.params):
            yield from _read_positions(inner)


def _is_semaphore(aval) -> bool:
    return "semaphore" in str(getattr(aval, "dtype", "")) or "semaphore" in str(aval)


def _parallel_axes(params: Mapping[str, Any], n: int) -> frozenset[int]:
    """Grid axes that the caller declares parallel: programs along them may run in any order, and at once."""
    semantics = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    semantics = tuple(semantics) if not isinstance(semantics, str) else ()
    return frozenset(a for a, s in enumerate(semantics) if str(s).lower().endswith("parallel")) if len(semantics) == n else frozenset()


def _scratch_starts_anew(params: Mapping[str, Any], own: Sequence[int], axis: int) -> bool:
    """Whether every step along an axis begins by overwriting all scratch memory, before the body reads any.

    The first equation that mentions a scratch array has to overwrite all of it, or to be a conditional that does so where the index
    of an axis that runs faster than this one is 0.
    """
    jaxpr, n = params["jaxpr"], params["grid_mapping"].num_scratch_operands
    made = {id(v): eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    left = {id(v): v for v in jaxpr.invars[-n:] if not _is_semaphore(v.aval)}
    for eqn in jaxpr.eqns:
        mentioned = [k for k, v in enumerate(eqn.invars) if id(v) in left]
        for k in mentioned:
            if not (_overwrites(jaxpr, eqn, k) or _overwrites_first(eqn, k, made, own, axis)):
                return False
            left.pop(id(eqn.invars[k]), None)
    return True


def _overwrites(jaxpr, eqn, k: int) -> bool:
    """Whether an equation of a jaxpr writes all of the array that is its operand k, and what it held before is not used."""
    if eqn.primitive.name != "swap" or k != 0 or id(eqn.outvars[0]) in _used(jaxpr):
        return False
    return math.prod(eqn.invars[1].aval.shape) == math.prod(eqn.invars[0].aval.shape)


def _overwrites_first(eqn, k: int, made: Mapping[int, Any], own: Sequence[int], axis: int) -> bool:
    """Whether an equation is a conditional that overwrites operand k where a faster axis' index is 0, and else leaves it alone."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2 or k == 0:
        return False
    faster = _zero_test(eqn.invars[0], made)
    if faster is None or own[faster] <= axis:
        return False
    skip, start = (b.jaxpr for b in eqn.params["branches"])
    var, other = start.invars[k - 1], skip.invars[k - 1]
    first = next(((e, e.invars.index(var)) for e in start.eqns if var in e.invars), None)
    untouched = not any(other in e.invars for e in skip.eqns)
    return first is not None and untouched and _overwrites(start, *first)


def _zero_test(atom, made: Mapping[int, Any]) -> int | None:
    """The axis number of which a condition is that its `program_id` is 0, or None."""
    eqn = made.get(id(atom))
    while eqn is not None and eqn.primitive.name == "convert_element_type":
        eqn = made.get(id(eqn.invars[0]))
    if eqn is None or eqn.primitive.name != "eq":
        return None
    test, zero = eqn.invars
    asked = made.get(id(test))
    is_zero = isinstance(zero, _jax.Literal) and zero.val == 0
    return asked.params["axis"] if is_zero and asked is not None and asked.primitive.name == "program_id" else None
