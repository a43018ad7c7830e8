"""Which positions of an epoch were consumed by committed steps: the proof that each is consumed once.

A ledger contains nothing about workers. Only a committed step changes it, so any number of workers that read
it later continue at the same position.
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
    """What `Ledger.prove` has checked: `consumed` and `remaining` together are every position, each once."""

    epoch: int
    committed_step: int
    size: int
    consumed: IntervalSet
    remaining: IntervalSet

    @property
    def is_complete(self) -> bool:
        """Whether the epoch is complete: every sample was in exactly one committed step."""
        return not self.remaining

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}, step {self.committed_step}: {self.consumed.size} consumed + "
            f"{self.remaining.size} remaining = {self.size} samples, none twice, none missing"
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of one epoch: the `consumed` positions and the last committed step (-1: none).

    A ledger is immutable: `commit` returns the next one, so a step that fails changes nothing. `samples`
    counts the committed samples independently of `consumed`; `prove` compares the two.
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
        """The positions that no committed step has consumed."""
        return IntervalSet.span(self.size) - self.consumed

    @property
    def is_complete(self) -> bool:
        """Whether nothing remains."""
        return self.consumed.size == self.size

    def cursor(self, shard_id: int) -> int:
        """The first remaining position of the shard; the shard's end if none remains."""
        return self.batch(shard_id, 1).start_index

    def batch(self, shard_id: int, batch_size: int) -> DataShard:
        """The next contiguous remaining positions of a shard, at most `batch_size`; empty if none remain."""
        shard = self._shard(shard_id)
        if batch_size < 1:
            raise InvalidInputError(f"batch_size = {batch_size}: must be at least 1")
        start, stop = self.consumed.next_gap(shard.start_index)
        end = shard.end_index if stop is None else min(stop, shard.end_index)
        start = min(start, shard.end_index)
        return DataShard(shard_id, start, max(start, min(end, start + batch_size)))

    def next_batches(self, batch_size: int) -> tuple[DataShard, ...]:
        """What the next step takes: one micro-batch from every shard with remaining samples."""
        batches = (self.batch(shard.shard_id, batch_size) for shard in self.partition)
        return tuple(batch for batch in batches if batch.size)

    def steps(self, batch_size: int) -> Iterator[tuple[DataShard, ...]]:
        """The batches of each step up to the end of the epoch, provided that every step is committed."""
        ledger = self
        while taken := ledger.next_batches(batch_size):
            yield taken
            ledger = ledger.commit(ledger.committed_step + 1, taken)

    def commit(self, step: int, taken: Iterable[DataShard | Range]) -> Ledger:
        """The ledger after `step` has consumed all of these ranges.

        `ConflictError` if `step` does not follow the last one, or if a range was consumed before, occurs
        twice or lies outside the epoch.
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
            raise ConflictError(
                f"step {step} takes {added}, beyond the {self.size} samples of an epoch"
            )
        if again := added & self.consumed:
            raise ConflictError(f"step {step} takes {again} again")
        return replace(
            self,
            committed_step=step,
            consumed=self.consumed | added,
            samples=self.samples + count,
        )

    def next_epoch(self) -> Ledger:
        """The ledger of the next epoch; a `ConflictError` while samples remain."""
        if not self.is_complete:
            raise ConflictError(f"epoch {self.epoch} is not over: {self.remaining} remain")
        return Ledger(self.size, self.shards, self.epoch + 1, self.committed_step)

    def prove(self) -> LedgerProof:
        """Check that consumed and remaining positions are disjoint and complete; otherwise `IntegrityError`."""
        consumed, remaining = self.consumed, self.remaining
        if self.samples != consumed.size:
            raise IntegrityError(
                f"epoch {self.epoch}: {self.samples} samples were committed, "
                f"but {consumed.size} different ones"
            )
        everything = consumed | remaining
        if not consumed.isdisjoint(remaining) or everything != IntervalSet.span(self.size):
            raise IntegrityError(f"epoch {self.epoch}: consumed and remaining do not add up")
        return LedgerProof(self.epoch, self.committed_step, self.size, consumed, remaining)

    def pack(self) -> bytes:
        """Encode the ledger for a checkpoint or a message, in three or four bytes per unfinished shard."""
        numbers = (self.size, self.shards, self.epoch, self.committed_step + 1, self.samples)
        return pack_numbers((_PACKED_FORMAT, *numbers)) + self.consumed.pack()

    @classmethod
    def unpack(cls, data: bytes) -> Ledger:
        """Decode what `pack` encoded; anything else is an `EncodingError`."""
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
    """A shard or a range as a range."""
    return (item.start_index, item.end_index) if isinstance(item, DataShard) else item
