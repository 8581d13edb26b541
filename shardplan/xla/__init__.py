"""What XLA made of it: compile for devices present or absent, read the result, check it, compare it with what was planned."""

from shardplan.xla.compiler.compile import Compiled, CompilerMissing, Memory, available, compile, lower
from shardplan.xla.compiler.targets import Gpu, Target, gpus
from shardplan.xla.hlo.collectives import Collective, Part, Product, collectives, flops, products
from shardplan.xla.hlo.peak import Buffer
from shardplan.xla.hlo.remat import Rematerialization, rematerializations
from shardplan.xla.hlo.schedule import Overlap, Timeline, Work, overlaps, simulate
from shardplan.xla.report.check import Line, Replica, Report, check
from shardplan.xla.report.compare import Comparison, Emitted, Expected, Finding, compare
from shardplan.xla.report.plan_report import PlanReport
from shardplan.xla.report.seconds import Seconds, seconds

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
