"""The shuffled order of an epoch as a keyed bijection from position to sample: no permutation is stored.

A number below `m` is split into two digits of radix about √m. Each of a few rounds adds a keyed hash of one
digit to the other, modulo its radix. Every round can be inverted, so all rounds together are a bijection on a
domain barely larger than `m`. A result that is not below `m` goes through the rounds again until it is (cycle
walking; needed about once in √m). Every position costs the same, which makes seeking O(1).

With `block > 1` reads stay local: storage is split into blocks of consecutive samples, the blocks are put into
a keyed order, and samples are mixed only within windows of `window` consecutive blocks of that order.

`order[i]` computes in Python; `take` does the same arithmetic on numpy arrays.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tensorforge.data.plan.shards import DataShard, partition
from tensorforge.errors import InvalidInputError
from tensorforge.validation import whole_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.int64]
    Words = NDArray[np.uint64]

MAX_SIZE = 1 << 62
_ROUNDS = 6
_ROUNDS_WHEN_SMALL = 16
_SMALL = 1 << 10  # below this size six rounds visibly favour some orders
_WORD = (1 << 64) - 1
# Odd multipliers with many set bits: a change of any input bit changes many output bits.
_SPREAD = 0x9E3779B97F4A7C15
_FINISH = 0xD6E8FEB86659FD93
_TWEAK = 0xC2B2AE3D27D4EB4F
_CHUNK = 1 << 13  # numbers per pass: the four working arrays stay in the processor's cache


class Order(Protocol):
    """A bijection from the positions of an epoch to the samples."""

    @property
    def size(self) -> int:
        """The number of positions, which is the number of samples."""
        ...

    def __getitem__(self, position: int) -> int: ...

    def take(self, start: int, stop: int) -> Samples:
        """The samples at `[start, stop)` as an int64 array."""
        ...


class _Bijection:
    """A keyed bijection on `[0, size)`; each `tweak` selects another bijection."""

    __slots__ = ("_keys", "_radices", "size")

    def __init__(self, size: int, keys: tuple[int, ...]) -> None:
        high = math.isqrt(size - 1) + 1 if size else 1
        self.size = size
        self._keys = keys if size < _SMALL else keys[:_ROUNDS]
        self._radices = (high, max(1, -(-size // high)))

    def apply(self, value: int, tweak: int = 0) -> int:
        while True:
            value = self._once(value, tweak)
            if value < self.size:
                return value

    def invert(self, value: int, tweak: int = 0) -> int:
        while True:
            value = self._once_back(value, tweak)
            if value < self.size:
                return value

    def _once(self, value: int, tweak: int) -> int:
        digits = list(divmod(value, self._radices[1]))
        for number, key in enumerate(self._keys):
            mine, radix = number % 2, self._radices[number % 2]
            digits[mine] = (digits[mine] + _hash(digits[1 - mine], key, tweak, radix)) % radix
        return digits[0] * self._radices[1] + digits[1]

    def _once_back(self, value: int, tweak: int) -> int:
        digits = list(divmod(value, self._radices[1]))
        for number in reversed(range(len(self._keys))):
            mine, radix = number % 2, self._radices[number % 2]
            step = _hash(digits[1 - mine], self._keys[number], tweak, radix)
            digits[mine] = (digits[mine] - step) % radix
        return digits[0] * self._radices[1] + digits[1]

    def apply_array(self, values: Words, tweaks: Words | int = 0) -> Words:
        """`apply` to each value; `tweaks` is one number for all values or one for each."""
        result = self._once_array(values, tweaks)
        while (outside := (result >= self.size).nonzero()[0]).size:
            chosen = tweaks if isinstance(tweaks, int) else tweaks[outside]
            result[outside] = self._once_array(result[outside], chosen)
        return result

    def _once_array(self, values: Words, tweaks: Words | int) -> Words:
        import numpy as np

        digits = np.divmod(values, np.uint64(self._radices[1]))
        hashed, scratch = np.empty_like(values), np.empty_like(values)
        for number, key in enumerate(self._keys):
            mine, other = digits[number % 2], digits[1 - number % 2]
            radix = np.uint64(self._radices[number % 2])
            np.multiply(other, np.uint64(_SPREAD), out=hashed)
            hashed += _offset_array(key, tweaks)
            np.right_shift(hashed, np.uint64(29), out=scratch)
            hashed ^= scratch
            hashed *= np.uint64(_FINISH)
            hashed >>= np.uint64(32)
            hashed *= radix
            hashed >>= np.uint64(32)
            mine += hashed
            # The sum is below twice the radix; of it and the difference, which may wrap, the smaller is right.
            np.subtract(mine, radix, out=scratch)
            np.minimum(mine, scratch, out=mine)
        high, low = digits
        high *= np.uint64(self._radices[1])
        high += low
        return high


def _hash(digit: int, key: int, tweak: int, radix: int) -> int:
    word = (digit * _SPREAD + key + tweak * _TWEAK) & _WORD
    word ^= word >> 29
    word = word * _FINISH & _WORD
    return (word >> 32) * radix >> 32


def _offset_array(key: int, tweaks: Words | int) -> Any:
    import numpy as np

    if isinstance(tweaks, int):
        return np.uint64((key + tweaks * _TWEAK) & _WORD)
    return tweaks * np.uint64(_TWEAK) + np.uint64(key)


class ShuffledOrder:
    """The shuffled order of one epoch; equal arguments give the same order everywhere.

    Orders with different `stream` are independent. With `block = 1` all samples are mixed; with a
    larger block, every `window * block` consecutive positions read from `window` blocks.
    """

    def __init__(
        self,
        size: int,
        seed: int = 0,
        epoch: int = 0,
        block: int = 1,
        window: int = 16,
        stream: int = 0,
    ) -> None:
        whole_number("size", size, least=0, most=MAX_SIZE)
        whole_number("seed", seed)
        whole_number("epoch", epoch, least=0)
        whole_number("block", block, least=1)
        whole_number("window", window, least=1)
        whole_number("stream", stream, least=0)
        self.size, self.seed, self.epoch = size, seed, epoch
        self.block, self.window, self.stream = block, window, stream
        identity = f"{size} {seed} {epoch} {block} {window} {stream}"
        self._run = block * window
        self._tail = size % block
        self._blocks = _Bijection(size // block, _keys(f"blocks {identity}"))
        keys = _keys(f"window {identity}")
        self._inside = _Bijection(self._run, keys)
        self._inside_last = _Bijection(size % self._run, keys)
        # An incomplete last block gets a keyed place among the others.
        place = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8]) * (size // block + 1)
        self._tail_start = (place >> 64) * block

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is not in [0, {self.size})")
        return self._place(self._mix(position, back=False))

    def position_of(self, sample: int) -> int:
        """The position of `sample` in this epoch: the inverse of `order[position]`."""
        if not 0 <= sample < self.size:
            raise IndexError(f"sample {sample} is not in [0, {self.size})")
        number, offset = divmod(sample, self.block)
        if number == self.size // self.block:
            return self._mix(self._tail_start + offset, back=True)
        position = self._blocks.invert(number) * self.block
        if position >= self._tail_start:
            position += self._tail
        return self._mix(position + offset, back=True)

    def _mix(self, position: int, *, back: bool) -> int:
        """Shuffle (or, with `back`, undo it) within the window that contains `position`."""
        if self.block == 1:
            return position
        run, offset = divmod(position, self._run)
        last = run == self.size // self._run
        bijection = self._inside_last if last else self._inside
        moved = bijection.invert(offset, run) if back else bijection.apply(offset, run)
        return run * self._run + moved

    def _place(self, position: int) -> int:
        """The sample at `position` of the blocks in their keyed order."""
        if self._tail and position >= self._tail_start:
            if position < self._tail_start + self._tail:
                return self.size - self._tail + position - self._tail_start
            position -= self._tail
        number, offset = divmod(position, self.block)
        return self._blocks.apply(number) * self.block + offset

    def take(self, start: int, stop: int) -> Samples:
        """The samples at positions `[start, stop)`, in order, as an int64 array."""
        import numpy as np

        if not 0 <= start <= stop <= self.size:
            raise InvalidInputError(f"[{start}, {stop}) is not within [0, {self.size})")
        result = np.empty(stop - start, dtype=np.int64)
        for low in range(start, stop, _CHUNK):
            high = min(low + _CHUNK, stop)
            positions = np.arange(low, high, dtype=np.uint64)
            samples = self._place_array(self._mix_array(positions))
            result[low - start : high - start] = samples.view(np.int64)
        return result

    def _mix_array(self, positions: Words) -> Words:
        if self.block == 1:
            return positions
        whole = self.size - self.size % self._run
        split = int((positions < whole).sum())  # positions ascend: complete windows, then the last
        for part, bijection in (
            (positions[:split], self._inside),
            (positions[split:], self._inside_last),
        ):
            if part.size:
                runs, offsets = _divmod(part, self._run)
                part[:] = runs * self._run + bijection.apply_array(offsets, runs)
        return positions

    def _place_array(self, positions: Words) -> Words:
        import numpy as np

        if self.block == 1:
            return self._blocks.apply_array(positions)
        in_tail = (positions >= self._tail_start) & (positions < self._tail_start + self._tail)
        shifted = positions - np.uint64(self._tail) * (positions >= self._tail_start + self._tail)
        numbers, offsets = _divmod(shifted, self.block)
        samples = offsets
        if self._blocks.size:
            # A chunk of positions covers few blocks, which are consecutive before they are reordered.
            numbers[in_tail] = 0 if in_tail.all() else numbers[~in_tail][0]
            low = numbers.min()
            placed = self._blocks.apply_array(np.arange(low, numbers.max() + 1, dtype=np.uint64))
            samples = samples + placed[(numbers - low).view(np.int64)] * np.uint64(self.block)
        first = self.size - self._tail - self._tail_start
        samples[in_tail] = (positions[in_tail].view(np.int64) + first).view(np.uint64)
        return samples


class ShardLocalOrder:
    """An order that shuffles only within each shard, so that a shard has the same samples in every epoch.

    It is meant for workers that store their shards: no data moves between epochs. Shuffle the samples once
    when packing, so that every shard is a random sample of the data set.
    """

    def __init__(self, size: int, shards: int, seed: int = 0, epoch: int = 0) -> None:
        self.size, self.seed, self.epoch = size, seed, epoch
        self.shards = partition(size, shards)
        self._orders: dict[int, ShuffledOrder] = {}

    def __len__(self) -> int:
        return self.size

    @cached_property
    def _starts(self) -> list[int]:
        return [shard.start_index for shard in self.shards if shard.size]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is not in [0, {self.size})")
        shard = self._shard_at(position)
        return shard.start_index + self._order(shard)[position - shard.start_index]

    def take(self, start: int, stop: int) -> Samples:
        """The samples at positions `[start, stop)`, in order, as an int64 array."""
        import numpy as np

        if not 0 <= start <= stop <= self.size:
            raise InvalidInputError(f"[{start}, {stop}) is not within [0, {self.size})")
        parts = [np.empty(0, dtype=np.int64)]
        while start < stop:
            shard = self._shard_at(start)
            end, first = min(stop, shard.end_index), shard.start_index
            parts.append(self._order(shard).take(start - first, end - first) + first)
            start = end
        return np.concatenate(parts)

    def _shard_at(self, position: int) -> DataShard:
        return self.shards[bisect_right(self._starts, position) - 1]

    def _order(self, shard: DataShard) -> ShuffledOrder:
        number = shard.shard_id
        if number not in self._orders:
            self._orders[number] = ShuffledOrder(
                shard.size, self.seed, self.epoch, stream=number + 1
            )
        return self._orders[number]


def _divmod(values: Words, divisor: int) -> tuple[Words, Words]:
    import numpy as np

    return np.divmod(values, np.uint64(divisor))


def _keys(identity: str) -> tuple[int, ...]:
    words = hashlib.shake_256(identity.encode()).digest(8 * _ROUNDS_WHEN_SMALL)
    return tuple(int.from_bytes(words[at : at + 8]) for at in range(0, len(words), 8))
