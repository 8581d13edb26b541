"""shardplan: automatic sharding for JAX.

`@shardplan.auto(mesh)` on a train step that knows nothing of devices plans how it is split over the mesh, and runs it so.
"""

from typing import TYPE_CHECKING

from shardplan.api import Auto, auto
from shardplan.errors import PlanFileError, ShardingError, ShardingWarning
from shardplan.mesh import Cluster, Layout, MeshShape
from shardplan.mesh.calibrate import calibrate
from shardplan.plan import Plan, PlanDiff
from shardplan.strategies.register import register_rule

if TYPE_CHECKING:
    from shardplan.xla.report.check import check

__all__ = [
    "Auto",
    "Cluster",
    "Layout",
    "MeshShape",
    "Plan",
    "PlanDiff",
    "PlanFileError",
    "ShardingError",
    "ShardingWarning",
    "auto",
    "calibrate",
    "check",
    "register_rule",
]


def __getattr__(name: str):
    if name == "check":  # the compiler's room is entered on first use
        from shardplan.xla.report.check import check

        return check
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
