"""shardplan: automatic sharding for JAX.

`@shardplan.auto(mesh)` on a train step that knows nothing of devices plans how it is split over the mesh, and runs it so.
"""

from shardplan.auto import Auto, auto
from shardplan.errors import PlanFileError, ShardingError, ShardingWarning
from shardplan.mesh import Cluster, Layout, MeshShape
from shardplan.mesh.calibrate import calibrate
from shardplan.plan import Plan, PlanDiff
from shardplan.strategies.rule import register_rule

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
    "register_rule",
]
