"""What the machine is: mesh axes, layouts, clusters, seconds of a collective, and the cheapest reshard between two layouts."""

from shardplan.mesh.cluster import Cluster, ClusterError, Measured, resolve
from shardplan.mesh.collective import seconds
from shardplan.mesh.device import Device, Link
from shardplan.mesh.layout import Layout, MeshShape
from shardplan.mesh.reshard import Resharder

__all__ = ["Cluster", "ClusterError", "Device", "Layout", "Link", "Measured", "MeshShape", "Resharder", "resolve", "seconds"]
