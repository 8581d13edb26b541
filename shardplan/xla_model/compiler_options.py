"""Which of XLA's compiler options a plan may set, what each does to the schedule, and which names this XLA knows them by.

    option             what a schedule model must know                                                  fact
    pipelined          in a loop, an all-gather of a row of what the loop does not change is issued     options-pipelined-gather
                       one iteration ahead; a gradient's reduction is finished one iteration later      options-pipelined-reduction
    double_buffering   a loop's body stands twice: what is carried over is not copied                   options-double-buffering
    thresholds         bytes of results up to which collectives are combined, by kind                   combine-threshold
    in_flight          collectives that may be in flight at once                                        options-in-flight
    latency_hiding     whether collectives overlap by design: always from Hopper on, else when asked    options-latency-hiding
    profiled           with a profile of the step collectives overlap, in an order by measured seconds  options-profile

Also known as XLA flags, debug options, or `compiler_options` of `jax.jit`. No option of a GPU is given to a CPU.
Facts: options-level-one, options-pipelined-scatter, options-threshold, options-windowed-einsum, options-names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardplan.mesh.cluster import CollectiveKind
from shardplan.mesh.device import gpu_of_device_kind
from shardplan.xla_model.combining import COMBINE_THRESHOLD_BYTES

Flag = bool | int | float | str
Flags = Mapping[str, Flag]
"""XLA's debug options and the levels of jit, by name."""

PIPELINED: Mapping[CollectiveKind, str] = {
    "all-gather": "xla_gpu_enable_pipelined_all_gather",
    "all-reduce": "xla_gpu_enable_pipelined_all_reduce",
    "reduce-scatter": "xla_gpu_enable_pipelined_reduce_scatter",
}
THRESHOLDS: Mapping[CollectiveKind, str] = {
    "all-gather": "xla_gpu_all_gather_combine_threshold_bytes",
    "all-reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "reduce-scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
}
DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
HOPPER = (9, 0)
"""Compute capability of the first GPUs for which XLA hides latency unasked."""
LEVEL = "optimization_level"
"""O1 (19) and above pipeline all kinds, double-buffer and hide latency (options-level-one)."""
LEVELS = {"O0": 9, "O1": 19, "O2": 29, "O3": 39}
"""jax's names of the levels; jit of jax 0.10 takes the numbers only."""
RENAMED: Mapping[str, tuple[str, Mapping[Flag, Flag]]] = {
    name: (name.replace("xla_gpu_enable_pipelined", "xla_gpu_pipeline"), {True: 2, False: 1}) for name in PIPELINED.values()
}
"""Names that a newer XLA calls otherwise, and its values for ours (fact: options-names); by its enum 1 is off, 2 on."""
NAMES = (*PIPELINED.values(), *THRESHOLDS.values(), DOUBLE_BUFFERING, IN_FLIGHT, LATENCY_HIDING, PROFILE, LEVEL)
"""All names above."""


@dataclass(frozen=True)
class XlaOptions:
    """What a plan asks of XLA's compiler, as the schedule sees it. The default is what XLA does on its own, from Hopper on.

    Attributes:
        pipelined: kinds that are pipelined in loops. "all-gather" issues the gathers of an iteration during the one before;
            "all-reduce" finishes the sums of gradients in the iteration after, also where they are then scattered;
            "reduce-scatter" takes what the program itself scatters (`jax.lax.psum_scatter`).
        double_buffering: whether the body of a loop with a known trip count is unrolled once; the first iteration of an odd count is
            peeled.
        thresholds: (kind, bytes of results up to which collectives of this kind are combined); 30 MiB for kinds that are absent.
        in_flight: collectives that may be in flight at once; predicted seconds assume one.
        latency_hiding: whether XLA's latency-hiding scheduler is asked for; predicted seconds assume its order.
        profiled: whether a user's own option names a profile of the step, whose seconds replace that scheduler's estimates.
    """

    pipelined: frozenset[CollectiveKind] = frozenset()
    double_buffering: bool = False
    thresholds: tuple[tuple[CollectiveKind, int], ...] = field(default=())
    in_flight: int = 1
    latency_hiding: bool = False
    profiled: bool = False

    def __bool__(self) -> bool:
        return self != DEFAULT

    def without_loops(self, own: XlaOptions) -> XlaOptions:
        """What is left of it for a step without loops of several rounds; latency is hidden if the user's own options ask for it."""
        return replace(self, pipelined=frozenset(), double_buffering=False, latency_hiding=own.latency_hiding)

    def hides_on(self, device_kind: str) -> bool:
        """Whether XLA orders a step for a GPU so that kernels hide collectives."""
        return self.latency_hiding or self.profiled or hides_unasked(device_kind)

    def threshold_bytes(self, kind: str) -> int:
        """Bytes of results up to which collectives of a kind are combined."""
        return next((size for some, size in self.thresholds if some == kind), COMBINE_THRESHOLD_BYTES)

    def combining(self, threshold_bytes: int | None) -> XlaOptions:
        """The same with one threshold for all kinds; None is XLA's own."""
        return replace(self, thresholds=() if threshold_bytes is None else tuple((kind, threshold_bytes) for kind in THRESHOLDS))

    def flags(self) -> dict[str, Flag]:
        """XLA's options that ask for this, by the names of jax 0.10, but for the profile; those that change nothing are left out."""
        return dict(self._flags())

    def _flags(self) -> Iterator[tuple[str, Flag]]:
        yield from ((name, True) for kind, name in PIPELINED.items() if kind in self.pipelined)
        if self.double_buffering:
            yield DOUBLE_BUFFERING, True
        yield from ((THRESHOLDS[kind], threshold) for kind, threshold in self.thresholds)
        if self.in_flight != 1:
            yield IN_FLIGHT, self.in_flight
        if self.latency_hiding:
            yield LATENCY_HIDING, True

    @classmethod
    def of(cls, flags: Flags) -> XlaOptions:
        """What options ask for, by their names of any version, as far as a schedule is changed by it."""
        flags = {old: flags[new] == values[True] for old, (new, values) in RENAMED.items() if new in flags} | dict(flags)
        level = flags.get(LEVEL, 0)
        all_on = int(LEVELS.get(level, 0) if isinstance(level, str) else level) >= LEVELS["O1"]
        return cls(
            frozenset(kind for kind, name in PIPELINED.items() if all_on or truth(flags.get(name, False))),
            all_on or truth(flags.get(DOUBLE_BUFFERING, False)),
            tuple((kind, int(flags[name])) for kind, name in THRESHOLDS.items() if name in flags),
            int(flags.get(IN_FLIGHT, 1)),
            all_on or truth(flags.get(LATENCY_HIDING, False)),
            bool(flags.get(PROFILE)),
        )


THRESHOLD_BYTES = (8 << 20,)
"""Combine thresholds worth trying: this one keeps layers apart and combines what is small (fact: options-threshold)."""
DEFAULT = XlaOptions()
PIPELINING = XlaOptions(frozenset(PIPELINED), double_buffering=True)
"""Everything that level 1 does to loops."""


def merged(planned: Flags, own: Flags) -> dict[str, Flag]:
    """A plan's options and a user's own, which win, by whatever name."""
    taken = {old for old, (new, _) in RENAMED.items() if new in own}
    return {name: value for name, value in planned.items() if name not in taken} | dict(own)


def truth(value: Flag) -> bool:
    """A flag as a bool: jax takes True, 1 and text for one."""
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)


def hides_unasked(device_kind: str) -> bool:
    """Whether XLA hides the latency of collectives on a GPU without being asked to (fact: options-latency-hiding)."""
    gpu = gpu_of_device_kind(device_kind)
    return gpu is None or gpu.compute_capability >= HOPPER


def candidates(hides_by_itself: bool = True) -> tuple[XlaOptions, ...]:
    """The options worth trying for a step, the plainest first; `thresholds` adds to them.

    `hides_by_itself` says whether the GPU is one for which XLA hides latency unasked; where not, asking for that hides more than
    pipelining does, and both together less (fact: options-latency-hiding).
    """
    base = replace(DEFAULT, latency_hiding=not hides_by_itself)
    kinds: tuple[tuple[CollectiveKind, ...], ...] = (("all-gather", "all-reduce"), ("all-gather",), ("all-reduce",))
    more = (replace(base, pipelined=frozenset(some), double_buffering=True) for some in kinds if hides_by_itself)
    return (base, *more)


def thresholds(options: XlaOptions) -> tuple[XlaOptions, ...]:
    """The same with each of `THRESHOLD_BYTES` as combine threshold of all kinds; XLA's own first."""
    return (options, *(options.combining(size) for size in THRESHOLD_BYTES))
