"""Chains of checkpoints: an incremental checkpoint, its parent, and so on to a root without a parent.

Each function takes all known checkpoints (in any order, or by id) and the id of one of them. An unknown id is a
`NotFoundError`. A parent that is missing or belongs to another run, and a cycle, are a `CheckpointError`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from tensorforge.catalog.chains.records import CheckpointRecord, CheckpointState, CheckpointType
from tensorforge.errors import CheckpointError, CheckpointErrorType, NotFoundError

Checkpoints: TypeAlias = Iterable[CheckpointRecord] | Mapping[str, CheckpointRecord]


def by_id(checkpoints: Checkpoints) -> Mapping[str, CheckpointRecord]:
    """The checkpoints by id; a mapping is returned as it is."""
    if isinstance(checkpoints, Mapping):
        return checkpoints
    return {record.checkpoint_id: record for record in checkpoints}


def lineage(checkpoints: Checkpoints, checkpoint_id: str) -> tuple[CheckpointRecord, ...]:
    """The checkpoint, its parent, and so on to the root."""
    known = by_id(checkpoints)
    record = known.get(checkpoint_id)
    if record is None:
        raise NotFoundError(f"there is no checkpoint {checkpoint_id!r}")
    path, seen = [record], {checkpoint_id}
    while (parent_id := path[-1].parent_id) is not None:
        if parent_id in seen:
            raise _broken(checkpoint_id, f"{parent_id!r} is its own ancestor (a cycle)")
        parent = known.get(parent_id)
        if parent is None:
            raise _broken(
                checkpoint_id, f"{path[-1].checkpoint_id!r} needs {parent_id!r}, which is missing"
            )
        if parent.training_run_id != record.training_run_id:
            raise _broken(checkpoint_id, f"{parent_id!r} belongs to another run")
        seen.add(parent_id)
        path.append(parent)
    return tuple(path)


def chain_length(checkpoints: Checkpoints, checkpoint_id: str) -> int:
    """The number of checkpoints that a restore reads, this one included; 1 for a self-contained one."""
    return len(lineage(checkpoints, checkpoint_id))


def find_chain_root(checkpoints: Checkpoints, checkpoint_id: str) -> str:
    """The id of the root of the chain, which has no parent."""
    return lineage(checkpoints, checkpoint_id)[-1].checkpoint_id


def restoration_chain(checkpoints: Checkpoints, target_id: str) -> tuple[str, ...]:
    """The ids of the chain in the order of a restore: the root first, the target last.

    `CheckpointError` if one of them is not complete.
    """
    path = lineage(checkpoints, target_id)
    for record in path:
        if not _is_complete(record):
            state = record.state.value
            raise _broken(target_id, f"{record.checkpoint_id!r} is {state}, not complete")
    return tuple(record.checkpoint_id for record in reversed(path))


def chain_size(checkpoints: Checkpoints, target_id: str) -> int:
    """The bytes of all checkpoints in the chain."""
    return sum(record.size_bytes for record in lineage(checkpoints, target_id))


def is_restorable(checkpoints: Checkpoints, checkpoint_id: str) -> bool:
    """Whether the checkpoint and all of its ancestors are complete."""
    try:
        restoration_chain(checkpoints, checkpoint_id)
    except CheckpointError:
        return False
    return True


def restorable_ids(known: Mapping[str, CheckpointRecord]) -> set[str]:
    """The ids of all checkpoints for which `is_restorable` holds, in one pass."""
    verdicts: dict[str, bool] = {}
    for name in known:
        path: list[str] = []
        here: str | None = name
        verdict = True
        while here is not None:
            if here in verdicts:
                verdict = verdicts[here]
                break
            record = known.get(here)
            run = known[name].training_run_id
            if record is None or record.training_run_id != run or not _is_complete(record):
                verdict = False
                break
            path.append(here)
            verdicts[here] = False  # a walk that returns here before the verdict is in a cycle
            here = record.parent_id
        for each in path:
            verdicts[each] = verdict
        verdicts.setdefault(name, verdict)
    return {name for name, verdict in verdicts.items() if verdict}


def validate_checkpoint(checkpoint: CheckpointRecord, all_checkpoints: Checkpoints) -> None:
    """Raise `CheckpointError` unless the record is consistent in itself and with its chain.

    A complete checkpoint has a storage path. A full one has no parent, an incremental one has. No checkpoint
    has a lower epoch or step than its parent. All ancestors of a complete checkpoint are complete.
    """
    name = checkpoint.checkpoint_id
    is_complete = checkpoint.state is CheckpointState.COMPLETE
    if is_complete and not checkpoint.storage_path:
        raise _invalid(name, "it is complete but has no storage path")
    if checkpoint.checkpoint_type is CheckpointType.FULL and checkpoint.parent_id is not None:
        raise _invalid(name, f"it is full but names the parent {checkpoint.parent_id!r}")
    if checkpoint.checkpoint_type is CheckpointType.INCREMENTAL and checkpoint.parent_id is None:
        raise _invalid(name, "it is incremental but names no parent")
    path = lineage({**by_id(all_checkpoints), name: checkpoint}, name)
    for child, parent in itertools.pairwise(path):
        if parent.epoch > child.epoch or parent.step > child.step:
            raise _invalid(
                name,
                f"{child.checkpoint_id!r} at epoch {child.epoch}, step {child.step} builds on "
                f"{parent.checkpoint_id!r} at epoch {parent.epoch}, step {parent.step}, which is later",
            )
        if is_complete and parent.state is not CheckpointState.COMPLETE:
            raise _invalid(name, f"its parent {parent.checkpoint_id!r} is {parent.state.value}")


def _is_complete(record: CheckpointRecord) -> bool:
    return record.state is CheckpointState.COMPLETE


def _broken(checkpoint_id: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the chain of checkpoint {checkpoint_id!r} is broken: {what}",
        checkpoint_id,
        CheckpointErrorType.VALIDATION_FAILED,
    )


def _invalid(checkpoint_id: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {checkpoint_id!r} is inconsistent: {what}",
        checkpoint_id,
        CheckpointErrorType.VALIDATION_FAILED,
    )
