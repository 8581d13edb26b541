"""What XLA did with a step: compiles it for devices present or absent, reads the result, checks it, compares it with the plan."""

from shardplan.mesh.device import Gpu, gpus
from shardplan.xla.compiler.compile import Compiled, CompilerMissingError, XlaMemory, available, compile, lower
from shardplan.xla.compiler.targets import Target
from shardplan.xla.hlo.collectives import CombinedTensor, HloCollective, collectives
from shardplan.xla.hlo.diagnostics import Buffer, Rematerialization, rematerializations
from shardplan.xla.hlo.products import HloProduct, flops, products
from shardplan.xla.hlo.schedule import CompiledSeconds, KernelWork, Overlap, Timeline, overlaps, seconds, simulate
from shardplan.xla.report.check import PlanReport, ReplicatedArgument, SourceLineCollectives, XlaReport, check
from shardplan.xla.report.compare import CollectiveComparison, CollectiveFinding, EmittedTensor, ExpectedCollective, compare

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
