"""What the program is: values, ops and loops, in the order they run.

A step's jaxpr is read as one flat list of ops. Nested calls are inlined; the bodies of `scan`, `while` and `cond` stand in the
same list between ops of our own that carry values over the border, so that one planner sees inside and outside at once:

    arg                     -> v        an input of the step                        out          v ->      an output of the step
    const                   -> v        a constant
    loop_const   v -> v'                loop-invariant operand                      loop_stack   v -> v'   one iteration's row of ys
    loop_carry   init -> v              the carry as the body sees it               loop_next    v -> v'   what the body makes of it
    loop_slice   xs -> x                one iteration's row of xs
    branch_in    v -> v'                operand of one branch                       branch_out   v, w -> u results of the branches
    barrier      v -> v'                operand of a body that XLA must recompute
    shared_copy  v -> v'                one copy of a value for several readers (`xla_model/copies.py`)

`loop_carry` and `loop_next` of one carry have one layout. So have an input and the output that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

from shardplan.files import base_name
from shardplan.ir.traits import Traits, traits_of

Phase = Literal["forward", "backward", "update"]

CAST = "convert_element_type"

Path = tuple[int | str, ...]


@dataclass(frozen=True)
class Source:
    """The user's own line that made an op."""

    file: str = ""
    line: int = 0
    function: str = ""
    traceback: Any = field(default=None, compare=False, repr=False)  # of JAX, for `_jax.call_stack`

    def __str__(self) -> str:
        return f"{base_name(self.file)}:{self.line}" if self.file else "?"


@dataclass(frozen=True)
class Value:
    """One array. `producer` is (op, result number), `consumers` are (op, operand number) in program order."""

    shape: tuple[int, ...]
    dtype: Any
    itemsize: float
    producer: tuple[int, int]
    consumers: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes of the global array."""
        return prod(self.shape, start=self.itemsize)


@dataclass(frozen=True)
class Loop:
    """A `scan` or `while` body (or its condition): ops start <= t < stop, run `trips` times per run of what is around it."""

    start: int
    stop: int
    trips: float
    rounds: float  # per step: trips of this loop and of those around it multiplied


@dataclass(frozen=True)
class Op:
    """One op."""

    primitive: str  # name of the JAX primitive, or of a border op (`ir/traits.py`)
    inputs: tuple[int | None, ...]  # value numbers; None for a literal
    outputs: tuple[int, ...]  # value numbers
    ins: tuple[Any, ...]  # avals of all operands: anything with shape and dtype
    outs: tuple[Any, ...]  # avals of all results
    params: Mapping[str, Any]  # the equation's parameters
    path: Path  # position of the op in the nested jaxprs; unique
    source: Source = Source()
    phase: Phase = "forward"
    runs: float = 1.0  # per step: trip counts multiplied; an unknown count is taken as 1
    reads: float = 1.0  # fetches of each operand per step: `runs`, or that of the outside for a border op
    loop: int = -1  # number of the innermost loop, or -1; a loop's entering border ops stand outside, its leaving ones inside
    held_during: int = -1  # number of the loop that keeps the operand (loop_const, loop_slice) or the result (loop_stack) alive, or -1
    label: str = ""  # for `arg` and `out` the pytree path
    is_follower: bool = False  # of a copy, whether its readers take the value in whatever layout it has
    operand_is_broadcast_scalar: bool = False  # whether the first operand is one number, broadcast
    operand_is_nonzero: bool = False  # whether the first operand is a number other than zero that the program writes out
    padded: bool = False  # of an `arg` or `out`, whether the array may be held padded between steps
    accumulates: bool = False  # whether it carries, or passes on, partial sums that a loop accumulates

    @cached_property
    def traits(self) -> Traits:
        """What holds for every op of the primitive."""
        return traits_of(self.primitive)

    @property
    def runs_in(self) -> int:
        """Number of the loop in whose rounds it is computed, or -1; a row is sliced in the loop that reads it."""
        return self.held_during if self.traits.loop_slice else self.loop

    @property
    def scalar_broadcast(self) -> bool:
        """Whether it broadcasts one number, in one step or several: XLA writes it where it is read and nowhere else, in loops too."""
        return self.traits.broadcast and (not self.ins[0].shape or self.operand_is_broadcast_scalar)

    @property
    def forwards_value(self) -> bool:
        """Whether the result has its operand's elements in another form; so has a sum over dims of size one."""
        return self.traits.forwards_value or (self.traits.sum_reduction and prod(self.ins[0].shape) == prod(self.outs[0].shape))


@dataclass(frozen=True)
class Graph:
    """A step. `args`, `outs` and `donated` are op numbers; inputs and outputs are in flat pytree order."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    loops: tuple[Loop, ...] = ()
    same_layout: tuple[tuple[int, int], ...] = ()  # ops of one layout: (loop_carry, loop_next), and (arg, out) of state
    args: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    donated: frozenset[int] = frozenset()
    retainable_from: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Copy -> (op, operand) that reads the same value in an earlier phase of the loop: its array may be retained or fetched again."""
    repeats: Mapping[Path, Path] = field(default_factory=dict)
    """Path of an equation that computes what an earlier one has computed, and is no op of its own -> path of that one."""

    @cached_property
    def loop_holders(self) -> list[tuple[int, ...]]:
        """Per loop, itself and the loops around it, innermost first, then -1 for outside; the last entry is that of -1."""
        loops = self.loops
        by_size = sorted(range(len(loops)), key=lambda n: (loops[n].stop - loops[n].start, -loops[n].start, -n))
        out: list[tuple[int, ...]] = [*[()] * len(loops), (-1,)]
        for at, n in reversed(list(enumerate(by_size))):
            around = (m for m in by_size[at + 1 :] if loops[m].start <= loops[n].start and loops[n].stop <= loops[m].stop)
            out[n] = (n, *out[next(around, -1)])
        return out

    @cached_property
    def dead(self) -> frozenset[int]:
        """Ops whose results nothing needs; XLA removes them."""
        dead: set[int] = set()
        for at in reversed(range(len(self.ops))):
            op = self.ops[at]
            kept = op.traits.leaves_region or not op.outputs or (op.traits.border and not op.traits.copy)
            if not kept and all(reader in dead for v in op.outputs for reader, _ in self.values[v].consumers):
                dead.add(at)
        return frozenset(dead)

    def origin(self, v: int, through: Callable[[int], bool]) -> int:
        """The value that v is derived from: operands are followed back as long as `through(op number)` holds.

        An op with one result hands on its first operand, one with several its k-th operand as its k-th result.
        """
        while True:
            at, k = self.values[v].producer
            op = self.ops[at]
            source = op.inputs[k if len(op.outputs) > 1 else 0] if op.inputs and through(at) else None
            if source is None:
                return v
            v = source

    def original(self, v: int) -> int:
        """The value that a chain of copies starts from; v itself if it is no copy."""
        return self.origin(v, lambda at: self.ops[at].traits.copy)

    def maker(self, v: int) -> int:
        """The op that produces a value, looking through copies."""
        return self.values[self.original(v)].producer[0]

    def reached(self, v: int, through: Callable[[int], bool]) -> Iterator[int]:
        """Numbers of the ops that read v, breadth first: the readers themselves and, behind those for which `through` holds, theirs.

        A value is visited once, however many paths lead to it; an op that reads several of them is there several times.
        """
        queue, known = [v], {v}
        for value in queue:
            for at, _ in self.values[value].consumers:
                yield at
                if through(at):
                    queue += (w for w in self.ops[at].outputs if w not in known)
                    known.update(self.ops[at].outputs)

    def readers(self, v: int) -> Iterator[int]:
        """The ops that read a value, directly or through copies."""
        return (at for at in self.reached(v, lambda at: self.ops[at].traits.copy) if not self.ops[at].traits.copy)


def components(n: int, pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Per node 0..n-1, the node that stands for its connected component."""
    parent = list(range(n))

    def find(a: int) -> int:
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    for a, b in pairs:
        parent[find(b)] = find(a)
    return [find(a) for a in range(n)]
