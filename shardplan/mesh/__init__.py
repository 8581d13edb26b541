"""What the machine is: mesh axes, layouts, clusters, seconds of a collective, and the cheapest reshard between two layouts."""

from shardplan.mesh.calibrate import calibrate
from shardplan.mesh.cluster import AxisLink, Cluster, ClusterError, Device, Link, Measured
from shardplan.mesh.collective import seconds
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.machine import physical_memory_bytes, resolve
from shardplan.mesh.reshard import Resharder, ReshardStep

__all__ = [
    "AxisLink",
    "Cluster",
    "ClusterError",
    "Device",
    "Layout",
    "Link",
    "Measured",
    "MeshShape",
    "ReshardStep",
    "Resharder",
    "calibrate",
    "physical_memory_bytes",
    "resolve",
    "seconds",
]
