"""Who writes what: every element once, the work spread over the ranks that hold it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec

from tensorforge.checkpoint.format.boxes import Box, Shape, check_partition, share
from tensorforge.checkpoint.format.dtypes import ITEM_SIZES
from tensorforge.errors import InvalidInputError

WORTH_SHARING = 1 << 20
"""A replicated tensor of at least so many bytes is written by all its holders, a part each."""


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor: what lies in a rank's memory, or the piece of it that goes into a file."""

    name: str
    dtype: str
    shape: Shape
    offset: Shape
    extent: Shape

    @property
    def box(self) -> Box:
        """The indices that are held."""
        return Box(self.offset, self.extent)

    @property
    def nbytes(self) -> int:
        """The size of what is held."""
        return self.box.size * ITEM_SIZES[self.dtype]

    def part(self, box: Box) -> Holding:
        """A box of the same tensor."""
        return Holding(self.name, self.dtype, self.shape, box.offset, box.shape)


def assign(holdings: Sequence[Sequence[Holding]], *, split: bool = True) -> list[list[Holding]]:
    """For each rank the pieces that it writes: together every element of every tensor exactly once.

    `holdings` has one list per rank. Boxes that several ranks hold are taken to be equal everywhere; they
    go to the holders with the least to do, large ones in parts (unless `split` is off).
    `InvalidInputError` if ranks disagree about a tensor, or hold boxes that overlap without being equal.
    """
    tensors = _by_tensor(holdings)
    for name, boxes in tensors.items():
        check_partition(_shape(boxes), [box.box for box in boxes], f"tensor {name!r}")
    load = [0] * len(holdings)
    pieces: list[list[Holding]] = [[] for _ in holdings]

    def give(rank: int, holding: Holding, box: Box) -> None:
        pieces[rank].append(holding.part(box))
        load[rank] += box.size * ITEM_SIZES[holding.dtype]

    replicated: list[tuple[Holding, list[int]]] = []
    for boxes in tensors.values():
        for holding, ranks in boxes.items():
            if len(ranks) == 1:
                give(ranks[0], holding, holding.box)
            else:
                replicated.append((holding, ranks))
    replicated.sort(key=lambda item: (-item[0].nbytes, item[0].name))
    for holding, ranks in replicated:
        if split and holding.nbytes >= WORTH_SHARING:
            ordered = sorted(ranks, key=lambda rank: load[rank])
            for rank, box in zip(ordered, share(holding.box, len(ranks)), strict=False):
                give(rank, holding, box)
        else:
            give(min(ranks, key=lambda rank: load[rank]), holding, holding.box)
    return pieces


def _by_tensor(holdings: Sequence[Sequence[Holding]]) -> dict[str, dict[Holding, list[int]]]:
    tensors: dict[str, dict[Holding, list[int]]] = {}
    for rank, held in enumerate(holdings):
        for holding in held:
            boxes = tensors.setdefault(holding.name, {})
            first = next(iter(boxes), holding)
            if (holding.dtype, holding.shape) != (first.dtype, first.shape):
                raise InvalidInputError(
                    f"tensor {holding.name!r} is {holding.dtype} {holding.shape} on rank {rank} "
                    f"and {first.dtype} {first.shape} on rank {boxes[first][0]}"
                )
            boxes.setdefault(holding, []).append(rank)
    return tensors


def _shape(boxes: dict[Holding, list[int]]) -> Shape:
    return next(iter(boxes)).shape


def owners(holdings: Sequence[Sequence[Holding]], ranks: int) -> dict[str, int]:
    """For each tensor the rank that writes it whole, spread evenly over the first `ranks` ranks.

    A rank that holds all of the tensor goes before one that would have to collect it.
    """
    whole: dict[str, set[int]] = defaultdict(set)
    sizes: dict[str, int] = {}
    for rank, held in enumerate(holdings):
        for holding in held:
            sizes[holding.name] = Box.whole(holding.shape).size * ITEM_SIZES[holding.dtype]
            if holding.extent == holding.shape and rank < ranks:
                whole[holding.name].add(rank)
    load, turn = [0] * ranks, count()
    chosen = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        candidates = sorted(whole[name]) or range(ranks)
        rank = min(candidates, key=lambda rank: load[rank]) if sizes[name] else next(turn) % ranks
        chosen[name] = rank
        load[rank] += sizes[name]
    return chosen


def agreed_ties(
    holdings: Sequence[Sequence[Holding]], ties: Sequence[Mapping[str, str]]
) -> dict[str, str]:
    """The tensors that are only another name of one: on every rank that holds some of them.

    `ties` has, for each rank, name → first name. A rank that holds nothing of a tensor cannot tell.
    """
    found: dict[str, str | None] = {}
    for held, tied in zip(holdings, ties, strict=True):
        for name in {holding.name for holding in held if holding.nbytes}:
            first = tied.get(name)
            found[name] = first if found.get(name, first) == first else None
    return {name: first for name, first in found.items() if first is not None}
