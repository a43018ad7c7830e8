"""Which files a checkpoint consists of, and which rank writes what into each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.checkpoint.format.file_layout import (
    MODEL,
    consolidated_key,
    part_key,
    shard_key,
    single_key,
)
from tensorforge.checkpoint.format.formats import CheckpointFormat
from tensorforge.checkpoint.save.assignment import Holding, assign, owners

MAX_CONSOLIDATED_BYTES = 5 << 30
"""A model larger than this is spread over several files, as its readers expect."""


class FileAssignment(msgspec.Struct, frozen=True, array_like=True):
    """A file and the pieces in it."""

    key: str
    pieces: tuple[Holding, ...]


class RankPlan(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes: its files, and a part for others to put together, if they need one."""

    files: tuple[FileAssignment, ...]
    part: FileAssignment | None = None


def plan_files(
    layout: CheckpointFormat,
    prefix: str,
    holdings: Sequence[Sequence[Holding]],
    *,
    compressed: bool,
) -> list[RankPlan]:
    """Plan a checkpoint from what each rank holds."""
    if layout is CheckpointFormat.MULTI_SHARD:
        return _plan_shards(prefix, holdings, compressed=compressed)
    ranks = 1 if layout is CheckpointFormat.SINGLE_FILE else len(holdings)
    owner = owners(holdings, ranks)
    whole = {holding.name: holding for held in holdings for holding in held}
    parts = _plan_parts(prefix, holdings, owner)
    if layout is CheckpointFormat.SINGLE_FILE:
        key = single_key(prefix, compressed=compressed)
        files = {0: [FileAssignment(key, _whole_pieces(whole, sorted(whole)))]}
    else:
        files = _plan_consolidated(prefix, whole, owner, compressed=compressed)
    return [RankPlan(tuple(files.get(rank, ())), part) for rank, part in enumerate(parts)]


def _plan_shards(
    prefix: str, holdings: Sequence[Sequence[Holding]], *, compressed: bool
) -> list[RankPlan]:
    plans = []
    for rank, pieces in enumerate(assign(holdings)):
        key = shard_key(prefix, rank, len(holdings), compressed=compressed)
        plans.append(RankPlan((FileAssignment(key, tuple(pieces)),) if pieces else ()))
    return plans


def _plan_parts(
    prefix: str, holdings: Sequence[Sequence[Holding]], owner: dict[str, int]
) -> list[FileAssignment | None]:
    at_home = {
        holding.name
        for rank, held in enumerate(holdings)
        for holding in held
        if owner[holding.name] == rank and holding.extent == holding.shape
    }
    scattered = [[held for held in rank if held.name not in at_home] for rank in holdings]
    # Ranks must agree about tensors that stay at home too; `assign` finds out if they do not.
    assign(holdings, split=False)
    parts: list[FileAssignment | None] = []
    for rank, pieces in enumerate(assign(scattered, split=False)):
        sent = tuple(piece for piece in pieces if owner[piece.name] != rank)
        parts.append(FileAssignment(part_key(prefix, rank), sent) if sent else None)
    return parts


def _plan_consolidated(
    prefix: str, whole: dict[str, Holding], owner: dict[str, int], *, compressed: bool
) -> dict[int, list[FileAssignment]]:
    groups: dict[str, list[tuple[int, list[str]]]] = {"model": [], "optimizer": []}
    for rank in sorted(set(owner.values())):
        names = sorted(name for name, owning in owner.items() if owning == rank)
        for kind, group in groups.items():
            chosen = [name for name in names if name.startswith(MODEL) == (kind == "model")]
            group.extend((rank, batch) for batch in _batches(chosen, whole))
    files: dict[int, list[FileAssignment]] = {}
    for kind, group in groups.items():
        for number, (rank, names) in enumerate(group, start=1):
            key = consolidated_key(prefix, kind, number, len(group), compressed=compressed)
            files.setdefault(rank, []).append(FileAssignment(key, _whole_pieces(whole, names)))
    return files


def _batches(names: list[str], whole: dict[str, Holding]) -> list[list[str]]:
    batches: list[list[str]] = []
    room = 0
    for name in names:
        nbytes = Box.whole(whole[name].shape).size * ITEM_SIZES[whole[name].dtype]
        if not batches or nbytes > room:
            batches.append([])
            room = MAX_CONSOLIDATED_BYTES
        batches[-1].append(name)
        room -= nbytes
    return batches


def _whole_pieces(whole: dict[str, Holding], names: list[str]) -> tuple[Holding, ...]:
    return tuple(whole[name].part(Box.whole(whole[name].shape)) for name in names)
