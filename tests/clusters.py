"""Clusters that make planners split what is small."""

from dataclasses import replace

from shardplan.mesh import Cluster, Link

H100 = Cluster.preset("h100")
IDEAL = Link(1e15, 0.0)
NEAR = replace(
    H100,
    device=replace(H100.device, kernel_latency_s=0.0, products={}, attention={}),
    intra=IDEAL,
    inter=IDEAL,
    launch_s=0.0,
)
"""Links and kernels so fast that small arrays are split, too."""
EVEN = replace(NEAR, intra=Link(3e10, 1e-7), inter=Link(1e10, 3e-7))
"""Links and kernels of which neither decides alone, without the latencies that hide what is small."""
FAR = replace(NEAR, intra=Link(1e6, 0.0), inter=Link(1e6, 0.0))
"""Links so slow that bytes decide."""
