"""What XLA for GPU does, as far as a price, a plan or the emitted program depends on it: one registry, `facts.toml`.

    combine-threshold    XLA combines independent collectives of one kind up to 30 MiB of results.
        source  xla/backends/gpu/transforms/collectives/gpu_collective_combiner_utils.cc
        flag    xla_gpu_all_gather_combine_threshold_bytes
        seen    jax 0.10.2
        test    tests/test_xla_schedule.py::test_rule_2_xla_combines_up_to_the_threshold
        used    shardplan.xla_model.combining

Code that relies on a fact names its id: "Fact: combine-threshold." in a docstring or comment.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Fact:
    """One fact about XLA.

    Attributes:
        id: its name, subject first.
        says: the fact, in one sentence.
        source: file in the XLA repository that decides it.
        flag: debug option of XLA that changes it, or "".
        seen: versions of jax on which `test` passed.
        test: pytest node id of the test that shows it; "" if none does.
        used: module of the package that relies on it.
    """

    id: str
    says: str
    source: str
    seen: str
    test: str
    used: str
    flag: str = ""

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.says}"]
        return "\n".join(lines + [f"  {f.name:7} {v}" for f in fields(self)[2:] if (v := getattr(self, f.name))])


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
