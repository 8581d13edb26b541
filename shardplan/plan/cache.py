"""A folder of plans, so that nobody plans the same thing twice: named by what a plan depends on, and by nothing else.

The name is a digest of the program, the mesh, the cluster's figures, the options and pins, and the versions of jax and shardplan.
What a damaged file holds is planned anew, and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardplan import __version__
from shardplan.errors import PlanFileError, ShardingError
from shardplan.files import write_atomically
from shardplan.plan.io import dumps
from shardplan.plan.plan import Plan


@dataclass(frozen=True)
class CachedPlan:
    """The place of one plan in a folder."""

    path: Path

    @classmethod
    def of(cls, folder: str | os.PathLike[str], depends_on: Mapping[str, Any]) -> CachedPlan:
        """The place of the plan that depends on these values; values that are no JSON stand as their text."""
        everything = {**depends_on, "jax": jax.__version__, "shardplan": __version__}
        digest = hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()
        return cls(Path(os.path.expanduser(folder)) / f"{digest[:32]}.json")

    def load(self) -> Plan | None:
        """The plan, or None if there is none that can be read."""
        if not self.path.is_file():
            return None
        try:
            found = Plan.load(self.path)
        except PlanFileError as error:
            logging.getLogger("shardplan").warning("planned anew: %s", error)
            return None
        logging.getLogger("shardplan").info("a plan is taken from %s", self.path)
        return found

    def save(self, plan: Plan) -> None:
        """Keep a plan.

        Raises:
            ShardingError: the folder cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, dumps(plan.with_baselines()))
        except OSError as error:
            raise ShardingError(
                f"cache={str(self.path.parent)!r} cannot be written: {error.strerror}.\n  way out: a folder that you may write"
            ) from None
        logging.getLogger("shardplan").info("a plan is kept in %s", self.path)
