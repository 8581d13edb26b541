"""One plan for all processes of a mesh: its first process plans, once all have traced the same step, and the others take its plan.

    every process     announces its n-th step: what it has traced, the memory of its devices, the plan file that it has
    first process     reads all announcements, compares them, plans, answers with the plan or with an error
    other processes   wait for the answer as long as the first process shows that it is alive; an error is raised by all

What they say goes through the key-value store of JAX's coordination service (`jax.distributed.initialize`). Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import msgspec

from shardplan import _jax
from shardplan.errors import ShardingError

ALIVE_S = 2.0
"""The first process shows that it is alive every so many seconds."""

MAX_LISTED = 5

S = TypeVar("S", bound=msgspec.Struct)

Announcements = Mapping[int, "Announcement"]
"""By number of the process."""


class Announcement(msgspec.Struct, frozen=True):
    """What a process is about to plan.

    Attributes:
        facts: name -> value of all that must be the same on every process: versions, types of inputs, source lines, the program.
        memory_bytes: the limit per device; None for none.
        plan_file: text of the plan that it was given to reuse; "" if it has none.
        error: why it cannot plan; "" if it can.
    """

    facts: dict[str, str] = {}
    memory_bytes: float | None = None
    plan_file: str = ""
    error: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What the first process answers: the text of a plan, or why there is none."""

    plan: str = ""
    error: str = ""


def process_numbers(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> tuple[int, ...]:
    """Of the processes that have devices of a mesh, in order; () for a mesh without devices."""
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else ()
    return tuple(sorted({d.process_index for d in devices}))


@dataclass(frozen=True)
class Processes:
    """The processes that have devices of one mesh.

    Attributes:
        numbers: of all of them, in order.
        own: number of this one.
        timeout_s: seconds to wait for a process that gives no sign.
    """

    numbers: tuple[int, ...]
    own: int
    timeout_s: float

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, timeout_s: float) -> Processes | None:
        """The processes of a mesh; None if it has no devices, or all of them are this process's own.

        Raises:
            ShardingError: the mesh has other processes' devices, and none of this one.
        """
        numbers, own = process_numbers(mesh), jax.process_index()
        if numbers in ((), (own,)):
            return None
        if own not in numbers or _jax.coordination_client() is None:
            raise ShardingError(
                f"the mesh has devices of processes {_listed(numbers)}, and this is process {own}.\n"
                "  ways out: a mesh of jax.devices() after jax.distributed.initialize(), or a step that only those processes call"
            )
        return cls(numbers, own, timeout_s)

    @property
    def first(self) -> int:
        """The process that plans."""
        return self.numbers[0]

    def one_plan(self, announce: Callable[[], Announcement], make: Callable[[Announcements], str]) -> str:
        """The text of the plan that all processes take; each of them calls this for the same steps in the same order.

        Args:
            announce: what this process is about to plan.
            make: plans; called on the first process alone, with what all have announced.

        Raises:
            ShardingError: a process has traced another step, cannot plan, or gives no sign.
        """
        store = _Store.of_next_step(self)
        try:
            announced = announce()
        except Exception as error:
            store.write(f"step {self.own}", Announcement(error=self._reported(error)))
            if self.own == self.first:
                store.write("answer", Answer(error=self._reported(error)))
            raise
        store.write(f"step {self.own}", announced)
        answer = self._answered(store, make) if self.own == self.first else self._received(store)
        if answer.error:
            raise ShardingError(answer.error)
        return answer.plan

    def _answered(self, store: _Store, make: Callable[[Announcements], str]) -> Answer:
        """The answer of the first process, which the others get before it raises."""
        try:
            with store.showing_life():
                announced = self._announcements(store)
                error = next((x.error for x in announced.values() if x.error), "") or _differences(announced)
                answer = Answer(error=error) if error else Answer(make(announced))
        except Exception as error:
            store.write("answer", Answer(error=self._reported(error)))
            raise
        store.write("answer", answer)
        return answer

    def _reported(self, error: Exception) -> str:
        """An error of this process, for the others."""
        kind = "" if isinstance(error, ShardingError) else f"{type(error).__name__}: "
        return f"on process {self.own}: {kind}{error}"

    def _announcements(self, store: _Store) -> Announcements:
        until = time.monotonic() + self.timeout_s
        found, missing = {}, []
        for n in self.numbers:
            got = store.read(f"step {n}", Announcement, max(0.1, until - time.monotonic()))
            if got is None:
                missing.append(n)
            else:
                found[n] = got
        if missing:
            raise ShardingError(
                f"{_named(missing)} of {len(self.numbers)} did not plan this step within {self.timeout_s:g} s.\n"
                "  ways out: every process plans the same steps in the same order, also where it only looks at a plan; "
                "auto(..., process_timeout=600) where one is slow to come; the logs of a process that has ended"
            )
        return found

    def _received(self, store: _Store) -> Answer:
        life, since = None, time.monotonic()
        while (answer := store.read("answer", Answer, ALIVE_S)) is None:
            if (now := store.life()) != life:
                life, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                was = "has not planned this step" if life is None else "has shown no life while it planned"
                raise ShardingError(
                    f"process {self.first}, whose plan process {self.own} waits for, {was} for {self.timeout_s:g} s.\n"
                    "  ways out: every process plans the same steps in the same order; auto(..., process_timeout=600) where it is slow "
                    "to come; its log, if it has ended"
                )
        return answer


@dataclass(frozen=True)
class _Store:
    """The part of the key-value store that belongs to one step."""

    prefix: str

    @classmethod
    def of_next_step(cls, processes: Processes) -> _Store:
        """That of the next step of these processes; a process counts its own steps in the store."""
        of_mesh = f"shardplan/{','.join(map(str, processes.numbers))}"
        n: int = _bounded(lambda client: client.key_value_increment(f"{of_mesh}/steps of {processes.own}", 1))
        if processes.own == processes.first:  # whoever announces step n has read the answer to step n - 1
            _bounded(lambda client: client.key_value_delete(f"{of_mesh}/{n - 2}/"))
        return cls(f"{of_mesh}/{n}")

    def write(self, name: str, value: msgspec.Struct) -> None:
        """Writes a value, once."""
        _bounded(lambda client: client.key_value_set_bytes(f"{self.prefix}/{name}", msgspec.json.encode(value)))

    def read(self, name: str, of: type[S], timeout_s: float) -> S | None:
        """A value, or None if nobody has written it in so many seconds."""
        raw = _bounded(lambda client: client.blocking_key_value_get_bytes(f"{self.prefix}/{name}", int(1000 * timeout_s)))
        return None if raw is None else msgspec.json.decode(raw, type=of)

    def life(self) -> str | None:
        """How often the first process has shown that it is alive."""
        return _bounded(lambda client: client.key_value_try_get(f"{self.prefix}/alive"))

    @contextlib.contextmanager
    def showing_life(self) -> Iterator[None]:
        """Shows meanwhile that this process is alive."""
        done = threading.Event()

        def show() -> None:
            with contextlib.suppress(ShardingError):  # the process itself meets it, too
                while not done.is_set():
                    _bounded(lambda client: client.key_value_increment(f"{self.prefix}/alive", 1))
                    done.wait(ALIVE_S)

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _bounded(ask: Callable[[Any], Any]) -> Any:
    """What the store answers; None if it has no such value in time.

    Raises:
        ShardingError: the service is gone, so that the process that ran it has ended.
    """
    try:
        return ask(_jax.coordination_client())
    except jax.errors.JaxRuntimeError as error:
        if any(word in str(error) for word in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        raise ShardingError(
            "JAX's coordination service does not answer, so a process of this job has ended: its log says why.\n"
            f"  {str(error).splitlines()[0]}\n  way out: start the job again"
        ) from error


def _differences(announced: Announcements) -> str:
    """In words, what differs between the steps of the first process and of others; "" for nothing."""
    first, *_ = announced
    mine = announced[first].facts
    others = [n for n, x in announced.items() if x.facts != mine]
    if not others:
        return ""
    theirs = announced[others[0]].facts
    names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    names = [name for name in names if name != PROGRAM] or names  # it differs because of the others
    lines = [
        f"{name}: {mine.get(name, 'none')} on process {first}, {theirs.get(name, 'none')} on process {others[0]}" for name in names
    ]
    left = len(lines) - MAX_LISTED
    return "\n  ".join(
        (
            f"{_named(others)} would run another step than process {first}; all processes of a mesh run one program.",
            *lines[:MAX_LISTED],
            *([f"... and {left} more"] if left > 0 else []),
            "way out: the same code, versions, shapes and options on every process",
        )
    )


PROGRAM = "ops, shapes and parameters (digest)"
"""Name of the fact that says whether two programs are the same."""


def _named(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:MAX_LISTED])) + (f" and {len(numbers) - MAX_LISTED} more" if len(numbers) > MAX_LISTED else "")
