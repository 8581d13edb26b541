"""What XLA did with a step: compiles it for devices present or absent, reads the result, checks it, compares it with the plan."""

from shardplan.mesh.gpus import Gpu, gpus
from shardplan.xla.compiler.compile import Compiled, CompilerMissingError, XlaMemory, available, compile, lower
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import CombinedTensor, HloCollective, collectives
from shardplan.xla.hlo.peak import Buffer
from shardplan.xla.hlo.products import HloProduct, flops, products
from shardplan.xla.hlo.remat import Rematerialization, rematerializations
from shardplan.xla.hlo.schedule import KernelWork, Overlap, Timeline, overlaps, simulate
from shardplan.xla.report.check import ReplicatedArgument, SourceLineCollectives, XlaReport, check
from shardplan.xla.report.compare import CollectiveComparison, CollectiveFinding, EmittedTensor, ExpectedCollective, compare
from shardplan.xla.report.plan_report import PlanReport
from shardplan.xla.report.seconds import CompiledSeconds, seconds

__all__ = [
    "Buffer",
    "CollectiveComparison",
    "CollectiveFinding",
    "CombinedTensor",
    "Compiled",
    "CompiledSeconds",
    "CompilerMissingError",
    "EmittedTensor",
    "ExpectedCollective",
    "Gpu",
    "HloCollective",
    "HloProduct",
    "KernelWork",
    "Overlap",
    "PlanReport",
    "Rematerialization",
    "ReplicatedArgument",
    "SourceLineCollectives",
    "Target",
    "Timeline",
    "XlaMemory",
    "XlaReport",
    "available",
    "check",
    "collectives",
    "compare",
    "compile",
    "flops",
    "gpus",
    "lower",
    "overlaps",
    "products",
    "rematerializations",
    "seconds",
    "simulate",
]
