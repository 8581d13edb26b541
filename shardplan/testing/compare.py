"""Whether two arrays are equal up to rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def difference(got, want) -> str | None:
    """None when equal up to rounding of the dtype (NaN equals NaN), else where and by how much they differ."""
    if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    got, want = jax.device_get((got, want))
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
        bound = 0.0
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    else:
        wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
        digits = {8: 1e-11, 4: 3e-5, 2: 4e-2}.get(want.dtype.itemsize // (2 if wide is np.complex128 else 1), 0.6)
        got, want = got.astype(wide), want.astype(wide)
        finite = np.isfinite(want)
        bound = digits * max(1.0, np.abs(want[finite]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            gap = np.where(finite, np.abs(got - want), np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.inf))
        wrong = ~(gap <= bound)
    if not wrong.any():
        return None
    return f"{wrong.sum()} of {wrong.size} elements differ by up to {np.where(wrong, gap, 0).max():.3g} (allowed {bound:.3g})"
