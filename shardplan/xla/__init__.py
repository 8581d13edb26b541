"""What XLA made of it: compile for devices present or absent, read the result, check it, compare it with what was planned."""

from shardplan.xla.check import Line, Replica, Report, check
from shardplan.xla.compare import Comparison, Emitted, Expected, Finding, compare
from shardplan.xla.compile import Compiled, CompilerMissing, Memory, available, compile, lower
from shardplan.xla.hlo import Collective, Part, Product, collectives, flops, products
from shardplan.xla.peak import Buffer
from shardplan.xla.planned import PlanReport
from shardplan.xla.remat import Rematerialization, rematerializations
from shardplan.xla.schedule import Overlap, Timeline, Work, overlaps, simulate
from shardplan.xla.seconds import Seconds, seconds
from shardplan.xla.targets import Gpu, Target, gpus

__all__ = [
    "Buffer",
    "Collective",
    "Comparison",
    "Compiled",
    "CompilerMissing",
    "Emitted",
    "Expected",
    "Finding",
    "Gpu",
    "Line",
    "Memory",
    "Overlap",
    "Part",
    "PlanReport",
    "Product",
    "Rematerialization",
    "Replica",
    "Report",
    "Seconds",
    "Target",
    "Timeline",
    "Work",
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
