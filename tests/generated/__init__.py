"""Calls of every primitive with everything drawn: shapes that mesh axes divide or do not, types, values and parameters.

    @made("sort")
    def _(draw, name):                      -> a function and its operands
        ...
        return (lambda *xs: lax.sort(xs, dimension=d)), *operands

`CASES` has a hypothesis strategy per primitive, `FAMILIES` one per family of them. Sizes that 8 devices divide come first, so the
simplest case of a family is one that is sharded.
"""

from . import draw, elementwise, products, indexing, programs  # noqa: F401, I001  (the order of families)
from .draw import CASES as CASES
from .draw import FAMILIES as FAMILIES
from .draw import Case as Case
