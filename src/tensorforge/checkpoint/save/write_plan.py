"""Plans the files of a checkpoint, and which rank writes which boxes into each. Pure."""

from __future__ import annotations

import msgspec

from tensorforge.checkpoint.format.boxes import Box, TensorBox
from tensorforge.checkpoint.format.file_layout import (
    MODEL,
    consolidated_key,
    exchange_key,
    shard_key,
    single_key,
)
from tensorforge.checkpoint.format.formats import CheckpointFormat
from tensorforge.checkpoint.save.assignment import RankBoxes, assign, owners

MAX_CONSOLIDATED_BYTES = 5 << 30
"""A model larger than this is stored in several files, as Hugging Face libraries expect."""


class FileAssignment(msgspec.Struct, frozen=True, array_like=True):
    """A file and the boxes in it."""

    key: str
    boxes: tuple[TensorBox, ...]


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """The files that one rank writes.

    `exchange` is a temporary file with boxes that other ranks need to complete their tensors, if there are any.
    """

    files: tuple[FileAssignment, ...]
    exchange: FileAssignment | None = None


def plan_files(
    layout: CheckpointFormat, prefix: str, rank_boxes: RankBoxes, *, compressed: bool
) -> list[RankPlan]:
    """The plan of each rank for a checkpoint."""
    if layout is CheckpointFormat.MULTI_SHARD:
        return _plan_shards(prefix, rank_boxes, compressed=compressed)
    ranks = 1 if layout is CheckpointFormat.SINGLE_FILE else len(rank_boxes)
    owner = owners(rank_boxes, ranks)
    complete = {
        each.name: each.with_box(Box.full(each.shape)) for boxes in rank_boxes for each in boxes
    }
    exchanges = _plan_exchanges(prefix, rank_boxes, owner)
    if layout is CheckpointFormat.SINGLE_FILE:
        boxes = tuple(complete[name] for name in sorted(complete))
        files = {0: [FileAssignment(single_key(prefix, compressed=compressed), boxes)]}
    else:
        files = _plan_consolidated(prefix, complete, owner, compressed=compressed)
    return [RankPlan(tuple(files.get(rank, ())), file) for rank, file in enumerate(exchanges)]


def _plan_shards(prefix: str, rank_boxes: RankBoxes, *, compressed: bool) -> list[RankPlan]:
    plans = []
    for rank, boxes in enumerate(assign(rank_boxes)):
        key = shard_key(prefix, rank, len(rank_boxes), compressed=compressed)
        plans.append(RankPlan((FileAssignment(key, tuple(boxes)),) if boxes else ()))
    return plans


def _plan_exchanges(
    prefix: str, rank_boxes: RankBoxes, owner: dict[str, int]
) -> list[FileAssignment | None]:
    """For each rank the exchange file with the boxes that the owners of incomplete tensors lack."""
    complete_on_owner = {
        each.name
        for rank, boxes in enumerate(rank_boxes)
        for each in boxes
        if owner[each.name] == rank and each.is_complete
    }
    scattered = [
        [each for each in boxes if each.name not in complete_on_owner] for boxes in rank_boxes
    ]
    # Ranks must agree about the other tensors too; `assign` raises an error if they do not.
    assign(rank_boxes, split=False)
    files: list[FileAssignment | None] = []
    for rank, boxes in enumerate(assign(scattered, split=False)):
        sent = tuple(each for each in boxes if owner[each.name] != rank)
        files.append(FileAssignment(exchange_key(prefix, rank), sent) if sent else None)
    return files


def _plan_consolidated(
    prefix: str, complete: dict[str, TensorBox], owner: dict[str, int], *, compressed: bool
) -> dict[int, list[FileAssignment]]:
    groups: dict[str, list[tuple[int, list[TensorBox]]]] = {"model": [], "optimizer": []}
    for rank in sorted(set(owner.values())):
        names = sorted(name for name, owning in owner.items() if owning == rank)
        for kind, group in groups.items():
            boxes = [complete[n] for n in names if n.startswith(MODEL) == (kind == "model")]
            group.extend((rank, batch) for batch in _batches(boxes))
    files: dict[int, list[FileAssignment]] = {}
    for kind, group in groups.items():
        for number, (rank, boxes) in enumerate(group, start=1):
            key = consolidated_key(prefix, kind, number, len(group), compressed=compressed)
            files.setdefault(rank, []).append(FileAssignment(key, tuple(boxes)))
    return files


def _batches(boxes: list[TensorBox]) -> list[list[TensorBox]]:
    batches: list[list[TensorBox]] = []
    left = 0
    for each in boxes:
        if not batches or each.nbytes > left:
            batches.append([])
            left = MAX_CONSOLIDATED_BYTES
        batches[-1].append(each)
        left -= each.nbytes
    return batches
