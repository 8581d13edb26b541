"""Checkpoints of a planned state through orbax: its plan is kept with it, and compared where the state is restored by another plan.

    manager = orbax.checkpoint.CheckpointManager(folder)
    checkpoints.save(manager, n, state, plan)                 # asynchronous, as the manager's options say
    restored = checkpoints.restore(manager, other_plan)       # another mesh, more or fewer devices: `.state` lies as that plan wants it

A checkpoint is a folder of orbax's: `state` (a pytree, which orbax alone restores, too), `plan/metadata` (a plan file), and `notes`.
What is held padded (`plan/padded.py`) is saved so, under its path and "padded_from_50257x768", and read with any other padding or none.
Orbax writes it under another name and renames it when it is complete, so that a crash leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from shardplan.errors import ShardingError
from shardplan.files import read_limited
from shardplan.plan import Plan
from shardplan.plan.arguments import path_text, tree_paths
from shardplan.plan.padded import Padded, array_of, is_padded, padded_from, padded_key
from shardplan.plan.program import differences_of_plans
from shardplan.plan.stand_ins import stood_back, stood_in
from shardplan.units import format_array, format_bytes

LOG = logging.getLogger("shardplan")
MAX_LISTED = 5
MAX_NOTES_BYTES = 10_000_000


class Restored(NamedTuple):
    """What was restored.

    Attributes:
        step: number of the checkpoint.
        state: where the plan wants it.
        plan: that the checkpoint was saved under; None where it has none.
        notes: what `save` was given.
    """

    step: int
    state: Any
    plan: Plan | None
    notes: Any


def save(manager: Any, step: int, state: Any, plan: Plan, notes: Mapping[str, Any] | None = None, **options: Any) -> bool:
    """Saves a state with its plan; what `manager.save` returns.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager`.
        step: number of the checkpoint.
        state: a pytree of arrays. When this returns they may be donated, also where the manager saves asynchronously.
        plan: that the state is laid out by.
        notes: JSON values to keep, such as how far the data has been read.
        **options: of `manager.save`, such as `force=True`.
    """
    args = _orbax().args
    state = jax.tree.map(lambda x: {padded_key(x.shape): x.array} if is_padded(x) else x, stood_in(state), is_leaf=is_padded)
    items = {"state": args.PyTreeSave(state), "plan": args.JsonSave(json.loads(plan.dumps()))}
    items |= {} if notes is None else {"notes": args.JsonSave(dict(notes))}
    return manager.save(step, args=args.Composite(**items), **options)


def restore(manager: Any, plan: Plan, *, step: int | None = None, argument: int | str = 0, initial: Any = None) -> Restored:
    """Restores a state to where a plan wants it, whatever plan it was saved under. Every device reads its own shards.

    Differences between the plans go to the logger "shardplan": the mesh and layouts as information, another program as a warning.

    Args:
        manager: an `orbax.checkpoint.CheckpointManager`.
        plan: of a step on its mesh, `step.plan(...)`.
        step: number of the checkpoint; None for the last complete one.
        argument: number or name of the step's argument that the state is.
        initial: a state such as `step.init` makes, for arrays that the checkpoint lacks or has in other shapes: those of a changed
            optimizer. Its other arrays are freed.

    Raises:
        ShardingError: there is no checkpoint, or it lacks arrays and `initial` is not given.
        PlanFileError: the checkpoint's plan is damaged.
    """
    ocp = _orbax()
    step = manager.latest_step() if step is None else step
    found = [path for path in ocp.utils.checkpoint_steps_paths(manager.directory) if _number(ocp, path.name) == step]
    if step is None or not found:
        raise ShardingError(
            f"{manager.directory} has no complete checkpoint{'' if step is None else f' {step}'}.\n"
            "  way out: step.init(create_state, key), where manager.latest_step() is None"
        )
    folder = found[0]
    saved = _saved_plan(folder)
    if saved is not None:
        _log_differences(saved, plan, step)
    kept = ocp.PyTreeCheckpointHandler().metadata(folder / "state")
    kept = getattr(kept, "tree", kept)
    wanted, tree = _wanted(plan, argument)
    there = dict(_own(path_text(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(kept))
    lacking = [path for path, x in wanted.items() if path not in there or _type(there[path]) != _type(x)]
    fresh = _fresh(initial, tree, wanted, lacking, there, step)

    def asked(keys: Sequence, x: Any) -> Any:
        path, _ = _own(path_text(keys), x)
        return ocp.PLACEHOLDER if path not in wanted or path in fresh else array_of(wanted[path])

    def read_as(keys: Sequence, x: Any, how: Any) -> Any:
        path, own = _own(path_text(keys), x)  # of another padding, what is too much is left out, and what lacks is zero
        refilled = path in wanted and path not in fresh and (is_padded(own) or is_padded(wanted[path]))
        return dataclasses.replace(how, strict=False) if refilled else how

    asked_for = jax.tree_util.tree_map_with_path(asked, kept)
    how = ocp.checkpoint_utils.construct_restore_args(asked_for)
    how = jax.tree_util.tree_map_with_path(read_as, kept, how)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        read = reader.restore(folder / "state", args=ocp.args.PyTreeRestore(asked_for, how))
    found = (_own(path_text(keys), x) for keys, x in jax.tree_util.tree_leaves_with_path(read))
    plain = {path: array_of(x) for path, x in found}
    arrays = {path: Padded(x, wanted[path].shape) if is_padded(wanted.get(path)) else x for path, x in plain.items()} | fresh
    state = stood_back(jax.tree.unflatten(tree, [arrays[path] for path in wanted]))
    return Restored(step, state, saved, _notes(folder / "notes" / "metadata"))


def _own(path: str, x: Any) -> tuple[str, Any]:
    """(path of an array in the state, the array): what was saved padded knows its own shape."""
    head, _, last = path.rpartition("/")
    shape = padded_from(last)
    return (path, x) if shape is None else (head, Padded(x, shape))


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        raise ShardingError("checkpoints need orbax.\n  way out: pip install orbax-checkpoint") from None
    return ocp


def _number(ocp: Any, name: str) -> int | None:
    try:
        return ocp.utils.step_from_checkpoint_name(name)
    except ValueError:
        return None


def _saved_plan(folder: Any) -> Plan | None:
    file = folder / "plan" / "metadata"
    return Plan.load(file) if file.exists() else None


def _notes(file: Any) -> Any:
    if not file.exists():
        return None
    try:
        if len(raw := read_limited(file, MAX_NOTES_BYTES)) > MAX_NOTES_BYTES:
            raise ValueError(f"more than {format_bytes(MAX_NOTES_BYTES)}")
        return json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise ShardingError(f"{file}: are no notes of a checkpoint: {error}.\n  way out: an earlier checkpoint, step=...") from None


def _log_differences(saved: Plan, plan: Plan, step: int) -> None:
    moved = saved.diff(plan).leaves
    if saved.mesh != plan.mesh or moved:
        text = "checkpoint %d was saved under a plan for mesh %s; restored for mesh %s, %d inputs lie otherwise"
        LOG.info(text, step, saved.mesh, plan.mesh, len(moved))
    if saved.fingerprint != plan.fingerprint:
        LOG.warning("checkpoint %d was saved by another program:\n  %s", step, "\n  ".join(differences_of_plans(saved, plan)))


def _wanted(plan: Plan, argument: int | str) -> tuple[dict[str, Any], Any]:
    """(path -> type and sharding of every leaf of an argument, in a `Padded` what is held so; its structure)."""
    if plan.context is None or not isinstance(plan.context.mesh, jax.sharding.Mesh):
        raise ShardingError("restore needs a plan with its devices.\n  way out: step.plan(...) of a step on a mesh of jax.devices()")
    args, kwargs = cast(tuple[tuple, dict], plan.abstract())
    try:
        tree = kwargs[argument] if isinstance(argument, str) else args[argument]
    except (KeyError, IndexError):
        has = f"{len(args)} positional arguments and {', '.join(kwargs) or 'no'} keyword arguments"
        raise ShardingError(f"argument={argument!r}: the plan's step has {has}.\n  way out: one of these") from None
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_padded)
    return dict(zip(tree_paths(structure), leaves, strict=True)), structure


def _type(x: Any) -> str:
    """Of an array as it is stored: keys as numbers."""
    if is_padded(x):
        return format_array(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return format_array(jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def _fresh(
    initial: Any, tree: Any, wanted: Mapping[str, Any], lacking: Sequence[str], there: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """The arrays of `initial` that stand for those that a checkpoint lacks, by path; the others are freed."""
    if not lacking and initial is None:
        return {}
    has = (f"{path} is {_type(wanted[path])}, the checkpoint has {_type(there[path]) if path in there else 'none'}" for path in lacking)
    listed = [*has][:MAX_LISTED] + ([f"... and {len(lacking) - MAX_LISTED} more"] if len(lacking) > MAX_LISTED else [])
    if initial is None:
        raise ShardingError(
            "\n  ".join((f"checkpoint {step} has another state than the plan's step takes.", *listed))
            + "\n  ways out: initial=step.init(create_state, key), for arrays that begin anew; or a plan of the step that was saved"
        )
    leaves, structure = jax.tree.flatten(initial, is_leaf=is_padded)
    if structure != tree:
        raise ShardingError(f"initial is {structure}, the state of the plan's step {tree}.\n  way out: step.init(create_state, key)")
    arrays = dict(zip(wanted, leaves, strict=True))
    for path in wanted:
        if path not in lacking and isinstance(array := array_of(arrays[path]), jax.Array):
            array.delete()
    if lacking:
        text = "%d of %d arrays are not in checkpoint %d and begin anew:\n  %s"
        LOG.warning(text, len(lacking), len(wanted), step, "\n  ".join(listed))
    return {path: arrays[path] for path in lacking}
