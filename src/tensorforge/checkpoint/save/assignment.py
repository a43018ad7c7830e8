"""Assigns boxes to ranks for writing: every element is written once, and the work is balanced. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

from tensorforge.checkpoint.format.boxes import Box, TensorBox, check_partition, divide
from tensorforge.checkpoint.format.formats import ITEM_SIZES
from tensorforge.errors import InvalidInputError

RankBoxes = Sequence[Sequence[TensorBox]]
"""For each rank the boxes that are in its memory."""

MIN_SPLIT_BYTES = 1 << 20
"""A replicated box of at least this size is divided between the ranks that have it."""


def assign(rank_boxes: RankBoxes, *, split: bool = True) -> list[list[TensorBox]]:
    """For each rank the boxes to write: together every element of every tensor exactly once.

    A box that several ranks have is taken to be equal on all of them. It goes to the ranks with the least to
    write; a large one is divided between them, unless `split` is off. `InvalidInputError` if ranks disagree
    about a tensor, or have boxes that overlap without being equal.
    """
    tensors = _ranks_by_box(rank_boxes)
    for name, boxes in tensors.items():
        shape = next(iter(boxes)).shape
        check_partition(shape, [each.box for each in boxes], f"tensor {name!r}")
    load = [0] * len(rank_boxes)
    assigned: list[list[TensorBox]] = [[] for _ in rank_boxes]

    def give(rank: int, tensor_box: TensorBox, box: Box) -> None:
        assigned[rank].append(tensor_box.with_box(box))
        load[rank] += box.size * ITEM_SIZES[tensor_box.dtype]

    replicated: list[tuple[TensorBox, list[int]]] = []
    for boxes in tensors.values():
        for tensor_box, ranks in boxes.items():
            if len(ranks) == 1:
                give(ranks[0], tensor_box, tensor_box.box)
            else:
                replicated.append((tensor_box, ranks))
    replicated.sort(key=lambda item: (-item[0].nbytes, item[0].name))
    for tensor_box, ranks in replicated:
        if split and tensor_box.nbytes >= MIN_SPLIT_BYTES:
            ordered = sorted(ranks, key=lambda rank: load[rank])
            for rank, box in zip(ordered, divide(tensor_box.box, len(ranks)), strict=False):
                give(rank, tensor_box, box)
        else:
            give(min(ranks, key=lambda rank: load[rank]), tensor_box, tensor_box.box)
    return assigned


def _ranks_by_box(rank_boxes: RankBoxes) -> dict[str, dict[TensorBox, list[int]]]:
    """Tensor name → box → the ranks that have the box."""
    tensors: dict[str, dict[TensorBox, list[int]]] = {}
    for rank, boxes in enumerate(rank_boxes):
        for each in boxes:
            known = tensors.setdefault(each.name, {})
            first = next(iter(known), each)
            if (each.dtype, each.shape) != (first.dtype, first.shape):
                raise InvalidInputError(
                    f"tensor {each.name!r} is {each.dtype} {each.shape} on rank {rank} "
                    f"and {first.dtype} {first.shape} on rank {known[first][0]}"
                )
            known.setdefault(each, []).append(rank)
    return tensors


def owners(rank_boxes: RankBoxes, ranks: int) -> dict[str, int]:
    """For each tensor the rank that writes all of it, balanced over the first `ranks` ranks.

    A rank that has the complete tensor in memory is preferred to one that must collect it from others.
    """
    complete: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for rank, boxes in enumerate(rank_boxes):
        for each in boxes:
            sizes[each.name] = each.tensor_bytes
            if each.is_complete and rank < ranks:
                complete[each.name].add(rank)
    load, turn = [0] * ranks, count()
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        candidates = sorted(complete[name]) or range(ranks)
        rank = min(candidates, key=lambda rank: load[rank]) if sizes[name] else next(turn) % ranks
        chosen[name] = rank
        load[rank] += sizes[name]
    return chosen


def agreed_ties(rank_boxes: RankBoxes, ties: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The ties, name → first name, that are the same on every rank with elements of the tied tensor.

    `ties` has, for each rank, name → first name. A rank without elements of a tensor cannot tell.
    """
    found: dict[str, str | None] = {}
    for boxes, tied in zip(rank_boxes, ties, strict=True):
        for name in {each.name for each in boxes if each.nbytes}:
            first = tied.get(name)
            found[name] = first if found.get(name, first) == first else None
    return {name: first for name, first in found.items() if first is not None}
