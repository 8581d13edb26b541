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
    """Facts about a primitive that hold whatever its operands are. `Rule` holds what depends on shapes and parameters.

    Attributes:
        border: op of the planner's own that carries a value across the border of the step, a loop, a branch or a phase.
        step_input: `arg`, an input of the step.
        constant: `const`, a constant of the step.
        step_output: `out`, an output of the step.
        copy: one copy of a value, in one layout, for several readers.
        loop_const: hands a loop a loop-invariant operand.
        loop_slice: hands a loop one iteration's row of `xs`.
        loop_carry: the carry as the loop body sees it.
        loop_next: what the body makes of the carry.
        loop_stack: writes one iteration's row of `ys`.

        alias: the result is the operand's buffer, unless their layouts differ.
        same_array: the result is the operand's array; collectives of either belong to the same origin.
        own_copy: is a copy of its operand already, so it reads no shared copy.
        stores_operand: keeps its operand in a buffer of its own.
        materialised: the result is in memory whoever reads it.
        leaves_region: hands a value out of a loop or out of the step.
        known_early: the result is known before most of its readers run, so its collectives can be prefetched.

        addition: adds two arrays.
        forwards_value: the result has the elements of the one operand in another shape, order, dtype or sign.
        runs_with_reader: the scheduler runs it right before its reader, not when its operand is ready.
        deferrable: XLA's scheduler defers it in the backward pass when only later phases read its result.
        matmul: a product that XLA runs as a GEMM.
        grouped_matmul: a ragged product: groups of rows, each with a right-hand side of its own.
        convolution: a convolution.
        matmul_prologue: elementwise op that XLA computes again in every GEMM that reads its result.
        transpose: permutes dims.
        broadcast: broadcasts its operand.
        gather: looks up places of a table.
        scatter: how a scatter joins updates with the operand; "" for other ops.
        reduction: reduces dims named by the parameter `axes` with a fixed function.
        sum_reduction: reduces dims by a sum.
        reads_part: reads as many bytes of its first operand as it makes.
        writes_part: (operand, times): writes as many bytes of the result as that operand has, so often; None for all of it.
        in_place: writes into the buffer of its first operand if that dies here.
        zeros_after: operand after which XLA allocates the zeros that the op writes into, or None.

        runs_on_shards: a device runs the primitive itself on its shards of the operands.
        row_major: needs row-major operands and results (XLA for CPU fails otherwise).
        barrier_operands: needs an optimization barrier before sharded operands.
        shapes_in_params: its parameters hold the global shapes of its results, so it cannot run on shards.
        sharding_constraint: the user's own layout of a value.
        layouts_in_params: its parameters hold the layouts of operands and results (`shard_map`).
    """

    border: bool = False
    step_input: bool = False
    constant: bool = False
    step_output: bool = False
    copy: bool = False
    loop_const: bool = False
    loop_slice: bool = False
    loop_carry: bool = False
    loop_next: bool = False
    loop_stack: bool = False

    alias: bool = False
    same_array: bool = False
    own_copy: bool = False
    stores_operand: bool = False
    materialised: bool = False
    leaves_region: bool = False
    known_early: bool = False

    addition: bool = False
    forwards_value: bool = False
    runs_with_reader: bool = False
    deferrable: bool = False
    matmul: bool = False
    grouped_matmul: bool = False
    convolution: bool = False
    matmul_prologue: bool = False
    transpose: bool = False
    broadcast: bool = False
    gather: bool = False
    scatter: ScatterKind = ""
    reduction: bool = False
    sum_reduction: bool = False
    reads_part: bool = False
    writes_part: tuple[int, int] | None = None
    in_place: bool = False
    zeros_after: int | None = None

    runs_on_shards: bool = False
    row_major: bool = False
    barrier_operands: bool = False
    shapes_in_params: bool = False
    sharding_constraint: bool = False
    layouts_in_params: bool = False

    @property
    def persistent(self) -> bool:
        """In memory from the start of the step: inputs and constants."""
        return self.step_input or self.constant

    @property
    def endpoint(self) -> bool:
        """An end of the program: input, constant or output of the step."""
        return self.persistent or self.step_output

    @property
    def carry(self) -> bool:
        """One of the two ops of a loop's carry."""
        return self.loop_carry or self.loop_next

    @property
    def loop_operand(self) -> bool:
        """Hands a loop an operand, resharded once before the loop begins."""
        return self.loop_const or self.loop_slice

    @property
    def moves_nothing(self) -> bool:
        """A border op for which no bytes move; rows are read and written."""
        return self.border and not (self.loop_slice or self.loop_stack)

    @property
    def product(self) -> bool:
        """A matrix product or a convolution."""
        return self.matmul or self.grouped_matmul or self.convolution


NONE = Traits()

TRAITS: dict[str, Traits] = {
    "arg": Traits(border=True, step_input=True, materialised=True, known_early=True),
    "const": Traits(border=True, constant=True, materialised=True, known_early=True),
    "out": Traits(border=True, step_output=True, own_copy=True, stores_operand=True, materialised=True, leaves_region=True),
    "shared_copy": Traits(border=True, copy=True, alias=True, same_array=True, forwards_value=True, runs_with_reader=True),
    "loop_const": Traits(border=True, loop_const=True, alias=True, same_array=True),
    "loop_slice": Traits(border=True, loop_slice=True, known_early=True, reads_part=True),
    "loop_carry": Traits(border=True, loop_carry=True, stores_operand=True, materialised=True),
    "loop_next": Traits(border=True, loop_next=True, stores_operand=True, materialised=True, leaves_region=True),
    # A stack is all zeros before its rows are written.
    "loop_stack": Traits(border=True, loop_stack=True, stores_operand=True, leaves_region=True, writes_part=(0, 2)),
    "branch_in": Traits(border=True, alias=True, own_copy=True, stores_operand=True),
    "branch_out": Traits(border=True, stores_operand=True, materialised=True),
    "barrier": Traits(border=True, alias=True, same_array=True, own_copy=True),
}
"""Primitive -> traits: the border ops, and every primitive whose rule declares some."""


def traits_of(primitive: str) -> Traits:
    """The traits of a primitive, by name."""
    return TRAITS.get(primitive, NONE)


def declare_traits(primitives: tuple[str, ...], traits: Traits) -> None:
    """Record the traits of primitives that do the same."""
    TRAITS.update(dict.fromkeys(primitives, traits))
