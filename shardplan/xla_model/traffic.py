"""What the kernels of an op move and multiply in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardplan.xla_model.stack_zeros import StackZeros


@dataclass(frozen=True)
class LibraryCall:
    """The call of cuDNN that a convolution becomes (`convolutions.py`).

    Attributes:
        kind: which one.
        flops: its multiply-adds over those of the convolution that meet data.
        sizes: elements of its operands and its result over those of the convolution.
        copied: (operand, bytes moved over its own) of kernels that only copy an operand before the call.
    """

    kind: Literal["forward", "input gradient", "filter gradient"]
    flops: float = 1.0
    sizes: tuple[float, ...] = (1.0, 1.0, 1.0)
    copied: tuple[tuple[int, float], ...] = ()


class MaskedRows(NamedTuple):
    """The masked copies of an operand of a ragged product, one per group (`ragged.py`).

    Attributes:
        operand: its number.
        together: of how many arrays one kernel writes the copies.
        turned: whether another product reads them in the other order, in which a kernel transposes them if this one is not split.
    """

    operand: int
    together: int
    turned: bool


@dataclass(frozen=True)
class KernelTraffic:
    """What an op moves between memory and the device in one run, and what it calls."""

    operand_reads: tuple[float, ...]  # how many times the bytes of each operand are moved
    result_writes: tuple[float, ...]  # how many times those of each result
    row_bytes: float  # of a reduction that stays on chip with its row: bytes that a later kernel reads again where the row is sharded
    kernel_bytes: float | None  # bytes that the kernel moves which the op stands for, of all shards; None if it stands for none
    kernel_elements: float  # results that this kernel computes, or what takes as long (`mesh/rates.py`)
    call: LibraryCall | None = None  # of a convolution
    masked: tuple[MaskedRows, ...] = ()  # of a ragged product
    transposed: tuple[tuple[int, bool], ...] = ()  # (operand, whether without tiles) that a kernel of its own transposes first
    copied: bool = False  # whether another kernel copies the result, new state, to where the old one is
    summed_by: int = 0  # of a product: fused kernels that read its result, and sum its parts
    partial_moves: int = 0  # how many times kernels move the bytes of a result that only partial sums are written of
    zeros: StackZeros | None = None  # of a stack that a loop writes
    apart: tuple[int, ...] = ()  # of a reduction whose reduced dims lie apart: the dims of its operand, the outermost first
