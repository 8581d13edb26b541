"""What XLA for GPU and the planner know of a primitive: one frozen `Traits` per primitive, looked up by name.

The traits of JAX's primitives stand next to their rules (`strategies/rules/`, `@rule(..., traits=Traits(...))`); those of the
planner's own border ops stand here. A primitive that nobody describes has no traits: every flag is False.

    op.traits.copy                      the op is one copy of a value for several readers
    traits_of("dot_general").matmul     the same for a name
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScatterKind = Literal["", "set", "add", "sub", "mul", "min", "max"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts about a primitive that hold whatever its operands are. `Rule` holds what depends on shapes and parameters."""

    border: bool = False  # op of the planner's own that carries a value across the border of the step, a loop, a branch or a phase
    step_input: bool = False  # `arg`, an input of the step
    constant: bool = False  # `const`, a constant of the step
    step_output: bool = False  # `out`, an output of the step
    copy: bool = False  # one copy of a value, in one layout, for several readers
    loop_const: bool = False  # hands a loop a loop-invariant operand
    loop_slice: bool = False  # hands a loop one iteration's row of `xs`
    loop_carry: bool = False  # the carry as the loop body sees it
    loop_next: bool = False  # what the body makes of the carry
    loop_stack: bool = False  # writes one iteration's row of `ys`

    alias: bool = False  # the result is the operand's buffer, unless their layouts differ
    same_array: bool = False  # the result is the operand's array; collectives of either belong to the same origin
    own_copy: bool = False  # is a copy of its operand already, so it reads no shared copy
    stores_operand: bool = False  # keeps its operand in a buffer of its own
    materialised: bool = False  # the result is in memory whoever reads it
    recompute_barrier: bool = False  # keeps XLA from using what it computed before: what stands behind waits for all operands
    leaves_region: bool = False  # hands a value out of a loop or out of the step
    known_early: bool = False  # the result is known before most of its readers run, so its collectives can be prefetched

    addition: bool = False  # adds two arrays
    scaling: bool = False  # multiplies or divides the first operand by the second
    forwards_value: bool = False  # the result has the elements of the one operand in another shape, order, dtype or sign
    runs_with_reader: bool = False  # the scheduler runs it right before its reader, not when its operand is ready
    deferrable: bool = False  # XLA's scheduler defers it in the backward pass when only later phases read its result
    matmul: bool = False  # a product that XLA runs as a GEMM
    grouped_matmul: bool = False  # a ragged product: groups of rows, each with a right-hand side of its own
    convolution: bool = False  # a convolution
    fused_attention: bool = False  # attention in one kernel of a library
    matmul_prologue: bool = False  # elementwise op that XLA computes again in every GEMM that reads its result
    bounds_twice: bool = False  # bounds from both sides
    transpose: bool = False  # permutes dims
    broadcast: bool = False  # broadcasts its operand
    reversal: bool = False  # reverses dims
    selects: bool = False  # takes every element from one of several operands, the first of which says from which
    gather: bool = False  # looks up places of a table
    draws: bool = False  # draws random numbers: kernels read them, or what is made of them, rather than draw them again
    joins_branches: bool = False  # its operands are the results of the branches of a conditional, one each
    scatter: ScatterKind = ""  # how a scatter joins updates with the operand; "" for other ops
    concatenates: bool = False  # joins arrays along a dim
    reduction: bool = False  # reduces dims named by the parameter `axes` with a fixed function
    sum_reduction: bool = False  # reduces dims by a sum
    pads: bool = False  # makes an array around its first operand's elements
    reads_part: bool = False  # reads as many bytes of its first operand as it makes
    writes_part: tuple[int, int] | None = None  # (operand, n): writes n times that operand's bytes; None: the whole result
    in_place: bool = False  # writes into the buffer of its first operand if that dies here
    zeros_after: int | None = None  # operand after which XLA allocates the zeros that the op writes into, or None

    runs_on_shards: bool = False  # a device runs the primitive itself on its shards of the operands
    row_major: bool = False  # needs row-major operands and results (XLA for CPU fails otherwise)
    barrier_operands: bool = False  # needs an optimization barrier before sharded operands
    shapes_in_params: bool = False  # its parameters hold the global shapes of its results, so it cannot run on shards
    foreign: bool = False  # calls a foreign function, named by the parameter `target_name`
    sharding_constraint: bool = False  # the user's own layout of a value
    layouts_in_params: bool = False  # its parameters hold the layouts of operands and results (`shard_map`)

    @property
    def product(self) -> bool:
        """Multiplies and adds: a matrix product, a ragged one, or a convolution."""
        return self.matmul or self.grouped_matmul or self.convolution

    @property
    def persistent(self) -> bool:
        """In memory from the start of the step: inputs and constants."""
        return self.step_input or self.constant

    @property
    def endpoint(self) -> bool:
        """An end of the program: input, constant or output of the step."""
        return self.persistent or self.step_output

    @property
    def loop_operand(self) -> bool:
        """Hands a loop an operand, resharded once before the loop begins."""
        return self.loop_const or self.loop_slice

    @property
    def moves_nothing(self) -> bool:
        """A border op for which no bytes move; rows are read and written."""
        return self.border and not (self.loop_slice or self.loop_stack)


TRAITS: dict[str, Traits] = {
    "arg": Traits(border=True, step_input=True, materialised=True, known_early=True),
    "const": Traits(border=True, constant=True, materialised=True, known_early=True),
    "out": Traits(border=True, step_output=True, own_copy=True, stores_operand=True, materialised=True, leaves_region=True),
    "shared_copy": Traits(border=True, copy=True, alias=True, same_array=True, forwards_value=True, runs_with_reader=True),
    "loop_const": Traits(border=True, loop_const=True, alias=True, same_array=True),
    "loop_slice": Traits(border=True, loop_slice=True, known_early=True, reads_part=True),
    "loop_carry": Traits(border=True, loop_carry=True, stores_operand=True, materialised=True),
    "loop_next": Traits(border=True, loop_next=True, stores_operand=True, materialised=True, leaves_region=True),
    # A stack is all zeros before its rows are written
    "loop_stack": Traits(border=True, loop_stack=True, stores_operand=True, leaves_region=True, writes_part=(0, 1)),
    "branch_in": Traits(border=True, alias=True, own_copy=True, stores_operand=True),
    "branch_out": Traits(border=True, stores_operand=True, materialised=True, joins_branches=True),
    "barrier": Traits(border=True, recompute_barrier=True, alias=True, same_array=True, own_copy=True),
}
"""Primitive -> traits: the border ops, and every primitive whose rule declares some."""
NO_TRAITS = Traits()


def traits_of(primitive: str) -> Traits:
    """The traits of a primitive, by name."""
    return TRAITS.get(primitive, NO_TRAITS)


def declare_traits(primitives: tuple[str, ...], traits: Traits) -> None:
    """Record the traits of primitives that do the same."""
    TRAITS.update(dict.fromkeys(primitives, traits))
