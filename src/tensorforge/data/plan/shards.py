"""Shards: contiguous ranges of an epoch's positions, the unit in which data is owned and reduced."""

from __future__ import annotations

from dataclasses import dataclass

from tensorforge.errors import InvalidInputError
from tensorforge.validation import whole_number


@dataclass(frozen=True, slots=True, order=True)
class DataShard:
    """The half-open range `[start_index, end_index)` of the positions of an epoch, with a number."""

    shard_id: int
    start_index: int
    end_index: int

    def __post_init__(self) -> None:
        if (
            type(self.shard_id) is type(self.start_index) is type(self.end_index) is int
            and self.shard_id >= 0
            and 0 <= self.start_index <= self.end_index
        ):
            return
        for name in ("shard_id", "start_index", "end_index"):
            whole_number(name, getattr(self, name), least=0)
        raise InvalidInputError(
            f"start_index = {self.start_index}: must not exceed end_index = {self.end_index}"
        )

    @property
    def size(self) -> int:
        """How many samples the shard has."""
        return self.end_index - self.start_index

    def __str__(self) -> str:
        return f"shard {self.shard_id} [{self.start_index}, {self.end_index})"


def quotas(size: int, parts: int) -> tuple[int, ...]:
    """Split `size` into `parts` numbers that differ by at most one, the larger ones first."""
    if size < 0:
        raise InvalidInputError(f"size = {size}: must not be negative")
    if parts < 1:
        raise InvalidInputError(f"parts = {parts}: there must be at least 1")
    share, rest = divmod(size, parts)
    return (share + 1,) * rest + (share,) * (parts - rest)


def partition(size: int, shards: int) -> tuple[DataShard, ...]:
    """Split `[0, size)` into `shards` contiguous shards whose sizes differ by at most one.

    `size` need not be divisible and nothing is padded; if it is less than `shards`, the last are empty.
    """
    if shards < 1:
        raise InvalidInputError(f"shards = {shards}: there must be at least 1")
    result, start = [], 0
    for shard_id, length in enumerate(quotas(size, shards)):
        result.append(DataShard(shard_id, start, start + length))
        start += length
    return tuple(result)
