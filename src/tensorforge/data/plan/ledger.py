"""Which samples of an epoch have been learned from: the proof that each comes exactly once.

A ledger knows nothing of workers. Its cursors move with a committed step and in no other way, and whoever
reads it later, on any number of workers, goes on from the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from tensorforge.data.plan.intervals import (
    NOTHING,
    IntervalSet,
    Range,
    pack_numbers,
    unpack_numbers,
)
from tensorforge.data.plan.shards import DataShard, partition
from tensorforge.errors import ConflictError, EncodingError, IntegrityError, InvalidInputError
from tensorforge.validation import whole_number

_PACKED_FORMAT = 1

_cached_partition = lru_cache(maxsize=64)(partition)


@dataclass(frozen=True, slots=True)
class LedgerProof:
    """What `Ledger.prove` found to be true."""

    epoch: int
    committed_step: int
    size: int
    consumed: IntervalSet
    remaining: IntervalSet

    @property
    def is_complete(self) -> bool:
        """Whether the epoch is over: every sample was in exactly one committed step."""
        return not self.remaining

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}, step {self.committed_step}: {self.consumed.size} consumed + "
            f"{self.remaining.size} remaining = {self.size} samples, none twice, none missing"
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of one epoch: `consumed` positions, and the step that was committed last (-1: none).

    A value: `commit` returns the next ledger and leaves this one as it was, so a step that fails
    has changed nothing. `samples` counts what was committed, apart from `consumed`; `prove` compares.
    """

    size: int
    shards: int
    epoch: int = 0
    committed_step: int = -1
    consumed: IntervalSet = NOTHING
    samples: int = 0

    def __post_init__(self) -> None:
        for name, least in (("size", 0), ("shards", 1), ("epoch", 0), ("committed_step", -1)):
            whole_number(name, getattr(self, name), least=least)
        whole_number("samples", self.samples)
        if self.consumed and self.consumed.ranges[-1][1] > self.size:
            raise InvalidInputError(f"consumed reaches beyond the {self.size} samples of an epoch")

    @property
    def partition(self) -> tuple[DataShard, ...]:
        """The shards of the epoch, by number."""
        return _cached_partition(self.size, self.shards)

    @property
    def remaining(self) -> IntervalSet:
        """The positions that no committed step has taken."""
        return IntervalSet.span(self.size) - self.consumed

    @property
    def is_complete(self) -> bool:
        """Whether nothing remains."""
        return self.consumed.size == self.size

    def cursor(self, shard_id: int) -> int:
        """The first position of the shard that remains; its end if none does."""
        return self.batch(shard_id, 1).start_index

    def batch(self, shard_id: int, batch_size: int) -> DataShard:
        """The next neighbouring positions of a shard, at most `batch_size`; empty when none remain."""
        shard = self._shard(shard_id)
        if batch_size < 1:
            raise InvalidInputError(f"batch_size = {batch_size}: must be at least 1")
        start, stop = self.consumed.next_gap(shard.start_index)
        end = shard.end_index if stop is None else min(stop, shard.end_index)
        start = min(start, shard.end_index)
        return DataShard(shard_id, start, max(start, min(end, start + batch_size)))

    def next_batches(self, batch_size: int) -> tuple[DataShard, ...]:
        """What the next step takes: one micro-batch from every shard that has samples left."""
        batches = (self.batch(shard.shard_id, batch_size) for shard in self.partition)
        return tuple(batch for batch in batches if batch.size)

    def steps(self, batch_size: int) -> Iterator[tuple[DataShard, ...]]:
        """The batches of each step from here to the end of the epoch, if every step is committed."""
        ledger = self
        while taken := ledger.next_batches(batch_size):
            yield taken
            ledger = ledger.commit(ledger.committed_step + 1, taken)

    def commit(self, step: int, taken: Iterable[DataShard | Range]) -> Ledger:
        """The ledger after `step` has taken these ranges: all of them, or an error and none.

        `step` must follow the last one; a range that was taken before, comes twice, or lies outside
        the epoch is a `ConflictError`.
        """
        if step != self.committed_step + 1:
            raise ConflictError(f"step {step} does not follow {self.committed_step}")
        ranges = [as_range(item) for item in taken]
        added = IntervalSet.of(ranges)
        count = sum(stop - start for start, stop in ranges)
        if not added:
            raise ConflictError(f"step {step} takes no sample")
        if added.size != count:
            raise ConflictError(f"step {step} takes a sample twice")
        if added.ranges[-1][1] > self.size:
            raise ConflictError(f"step {step} takes {added}, beyond the {self.size} of an epoch")
        if again := added & self.consumed:
            raise ConflictError(f"step {step} takes {again} again")
        return replace(
            self,
            committed_step=step,
            consumed=self.consumed | added,
            samples=self.samples + count,
        )

    def next_epoch(self) -> Ledger:
        """The empty ledger of the following epoch; an error while samples remain."""
        if not self.is_complete:
            raise ConflictError(f"epoch {self.epoch} is not over: {self.remaining} remain")
        return Ledger(self.size, self.shards, self.epoch + 1, self.committed_step)

    def prove(self) -> LedgerProof:
        """Check that consumed and remaining are disjoint and complete; otherwise `IntegrityError`."""
        consumed, remaining = self.consumed, self.remaining
        if self.samples != consumed.size:
            raise IntegrityError(
                f"epoch {self.epoch}: {self.samples} samples were committed, "
                f"but {consumed.size} different ones"
            )
        whole = consumed | remaining
        if not consumed.isdisjoint(remaining) or whole != IntervalSet.span(self.size):
            raise IntegrityError(f"epoch {self.epoch}: consumed and remaining do not add up")
        return LedgerProof(self.epoch, self.committed_step, self.size, consumed, remaining)

    def pack(self) -> bytes:
        """A few bytes for a checkpoint or a message: three or four per unfinished shard."""
        numbers = (self.size, self.shards, self.epoch, self.committed_step + 1, self.samples)
        return pack_numbers((_PACKED_FORMAT, *numbers)) + self.consumed.pack()

    @classmethod
    def unpack(cls, data: bytes) -> Ledger:
        """The ledger that `pack` wrote; anything else is an `EncodingError`."""
        numbers = unpack_numbers(data)
        if len(numbers) < 6 or numbers[0] != _PACKED_FORMAT:
            raise EncodingError("not a packed ledger of a known format")
        size, shards, epoch, steps, samples = numbers[1:6]
        consumed = IntervalSet.unpack(pack_numbers(numbers[6:]))
        try:
            ledger = cls(size, shards, epoch, steps - 1, consumed, samples)
            ledger.prove()
        except (InvalidInputError, IntegrityError) as error:
            raise EncodingError(f"not a ledger: {error}") from error
        return ledger

    def _shard(self, shard_id: int) -> DataShard:
        if not 0 <= shard_id < self.shards:
            raise InvalidInputError(f"shard_id = {shard_id}: there are {self.shards} shards")
        return self.partition[shard_id]


def as_range(item: DataShard | Range) -> Range:
    """A shard or a pair as a pair."""
    return (item.start_index, item.end_index) if isinstance(item, DataShard) else item
