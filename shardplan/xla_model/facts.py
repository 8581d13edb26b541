"""What XLA for GPU does, as far as a price, a plan or the emitted program depends on it: one registry, `facts.toml`.

Code that relies on a fact names its id: "Fact: combine-threshold." in a docstring or comment.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Fact:
    """One fact about XLA."""

    id: str  # its name, subject first
    says: str  # the fact, in one sentence
    source: str  # file in the XLA repository that decides it
    seen: str  # versions of jax on which `test` passed
    test: str  # pytest node id of the test that shows it; "" if none does
    used: str  # module of the package that relies on it
    flag: str = ""  # debug option of XLA that changes it

    def __str__(self) -> str:
        rest = (f"  {f.name:7} {v}" for f in fields(self)[2:] if (v := getattr(self, f.name)))
        return "\n".join((f"{self.id}: {self.says}", *rest))


@cache
def facts() -> dict[str, Fact]:
    """All facts by id, in the order of the file."""
    found = tomllib.loads(files("shardplan.xla_model").joinpath("facts.toml").read_text("utf-8"))
    return {name: Fact(name, **{"seen": found["seen"], **fact}) for name, fact in found["facts"].items()}


def facts_text(name: str | None = None) -> str:
    """All facts as a table, or the one of this id in full; KeyError if there is none."""
    if name is not None:
        return str(facts()[name])
    width = max(map(len, facts()))
    return "\n".join(f"{fact.id:{width}}  {fact.says}" for fact in facts().values())
