"""shardplan: automatic sharding for JAX.

`@shardplan.auto(mesh)` on a train step that knows nothing of devices plans how it is sharded over the mesh, and runs it so.

Names are imported on first use (PEP 562): `import shardplan` loads neither jax nor a solver.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardplan.api import Auto, auto
    from shardplan.errors import PlanFileError, ShardingError, ShardingWarning
    from shardplan.jobs import together
    from shardplan.mesh import Cluster, Layout, MeshShape
    from shardplan.mesh.calibrate import calibrate
    from shardplan.plan import Plan, PlanDiff
    from shardplan.plan.job import Job
    from shardplan.plan.padded import unpadded
    from shardplan.plan.transfer import transfer
    from shardplan.strategies.register import register_rule
    from shardplan.xla.report.check import check

__version__ = "0.1.0"

HOME = {
    "Auto": "api",
    "Cluster": "mesh",
    "Job": "plan.job",
    "Layout": "mesh",
    "MeshShape": "mesh",
    "Plan": "plan",
    "PlanDiff": "plan",
    "PlanFileError": "errors",
    "ShardingError": "errors",
    "ShardingWarning": "errors",
    "auto": "api",
    "calibrate": "mesh.calibrate",
    "check": "xla.report.check",
    "register_rule": "strategies.register",
    "together": "jobs",
    "transfer": "plan.transfer",
    "unpadded": "plan.padded",
}

__all__ = [
    "Auto", "Cluster", "Job", "Layout", "MeshShape", "Plan", "PlanDiff", "PlanFileError", "ShardingError", "ShardingWarning", "auto",
    "calibrate", "check", "register_rule", "together", "transfer", "unpadded",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOME})
