"""Which collectives XLA for GPU runs in a wider dtype than the array's, and how many bytes they send.

Facts: promote-small-integers (pass AllReducePromotion), accumulate-before-cast.
"""

from __future__ import annotations

SUMS = ("all-reduce", "reduce-scatter")


def byte_factors(dtype, summed_fraction: float = 1.0) -> tuple[tuple[str, float], ...]:
    """(kind, factor) of the collectives that send `factor` times the bytes of an array; kinds that are not listed send its bytes.

    Args:
        dtype: of the array. No device adds 16- or 4-bit integers: they are sent as integers twice as wide.
        summed_fraction: bytes of a partial sum over those of the array: below 1 where XLA reduces before a cast to a wider dtype.
    """
    factors = dict.fromkeys(SUMS, summed_fraction) if summed_fraction != 1 else {}
    small_integers = {"int16": SUMS, "uint16": SUMS, "int4": (*SUMS, "all-to-all"), "uint4": (*SUMS, "all-to-all")}
    for kind in small_integers.get(str(dtype), ()):
        factors[kind] = 2.0 * factors.get(kind, 1.0)
    return tuple(factors.items())
