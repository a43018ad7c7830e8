"""How the ranks of one save or load agree: a process alone, torch.distributed, or threads in a test.

Messages are bytes. Every wait is bounded, so that a rank that died fails the others in time. The group
has a board of its own: it shares no collective with training, which may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

from tensorforge.errors import ConfigurationError, DeadlineExceededError, UnavailableError


@runtime_checkable
class DistributedCoordinator(Protocol):
    """The ranks that save and load together. All call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def barrier(self, timeout: float) -> None:
        """Return when everybody is here; `DeadlineExceededError` after `timeout` seconds."""

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:
        """Everybody's payload, by rank, on rank 0; `None` elsewhere."""

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:
        """Rank 0's payload, everywhere."""


class SingleProcess:
    """The only rank there is."""

    rank = 0
    world_size = 1

    def barrier(self, timeout: float) -> None:
        """Nobody to wait for."""

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:  # noqa: ARG002
        """What was passed."""
        return [payload]

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:  # noqa: ARG002
        """What was passed."""
        return payload or b""


class _Board(Protocol):
    """A place where ranks leave messages for one another."""

    def post(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout: float) -> bytes: ...

    def remove(self, key: str) -> None: ...


class _BoardCoordinator:
    """Gather, broadcast and barrier with nothing but a board."""

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError("rank", rank, f"must be from 0 to {world_size - 1}")
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._rounds: Iterator[int] = itertools.count()

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._world_size

    def barrier(self, timeout: float) -> None:
        """Return when everybody is here."""
        deadline = time.monotonic() + timeout
        self.gather(b"", timeout)
        self.broadcast(b"", max(0.001, deadline - time.monotonic()))

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:
        """Everybody's payload, by rank, on rank 0; `None` elsewhere."""
        number = next(self._rounds)
        if self._rank:
            self._board.post(f"{number}/{self._rank}", payload)
            return None
        deadline = time.monotonic() + timeout
        received = [payload]
        for rank in range(1, self._world_size):
            received.append(self._take(number, rank, rank, deadline))
            self._board.remove(f"{number}/{rank}")
        return received

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:
        """Rank 0's payload, everywhere."""
        number = next(self._rounds)
        if self._rank:
            value = self._take(number, self._rank, 0, time.monotonic() + timeout)
            self._board.remove(f"{number}/{self._rank}")
            return value
        for rank in range(1, self._world_size):
            self._board.post(f"{number}/{rank}", payload or b"")
        return payload or b""

    def _take(self, number: int, slot: int, sender: int, deadline: float) -> bytes:
        remaining = max(0.001, deadline - time.monotonic())
        try:
            return self._board.take(f"{number}/{slot}", remaining)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"rank {sender} did not answer in time: it died, hangs, or never called"
            ) from error


class InMemoryRanks:
    """Ranks that are threads of one process."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigurationError("world_size", world_size, "must be at least 1")
        self.world_size = world_size
        self._messages: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def coordinator(self, rank: int) -> DistributedCoordinator:
        """The coordinator of one rank."""
        return _BoardCoordinator(self, rank, self.world_size)

    def post(self, key: str, value: bytes) -> None:
        """Leave a message."""
        with self._changed:
            self._messages[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout: float) -> bytes:
        """Wait for a message."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._messages, timeout):
                raise TimeoutError(key)
            return self._messages[key]

    def remove(self, key: str) -> None:
        """Forget a message."""
        with self._changed:
            self._messages.pop(key, None)


class _StoreBoard:
    """Messages in a torch.distributed store, over a connection of its own."""

    def __init__(self, store: Any, name: str) -> None:
        # torch's own stubs know neither `clone` nor that values may be bytes, hence `Any`.
        from torch import distributed

        prefix_store: Any = getattr(distributed, "PrefixStore")  # noqa: B009
        self._store = prefix_store(f"tensorforge-checkpoint/{name}", store.clone())

    def post(self, key: str, value: bytes) -> None:
        with _store_errors():
            self._store.set(key, value)

    def take(self, key: str, timeout: float) -> bytes:
        with _store_errors():
            self._store.wait([key], timedelta(seconds=timeout))
            return bytes(self._store.get(key))

    def remove(self, key: str) -> None:
        with _store_errors():
            self._store.delete_key(key)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        if "timeout" in str(error).lower():
            raise TimeoutError(str(error)) from error
        raise UnavailableError(f"the store of torch.distributed failed: {error}") from error


_groups = itertools.count()


class TorchDistributed(_BoardCoordinator):
    """The ranks of the default process group, which must be initialised.

    They talk through the group's store, not through collectives, so that a checkpoint in the background
    never gets in the way of training. All ranks make their coordinators in the same order.
    """

    def __init__(self) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            raise ConfigurationError(
                "process group", None, "call torch.distributed.init_process_group first"
            )
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch offers no public way
        board = _StoreBoard(store, str(next(_groups)))
        super().__init__(board, distributed.get_rank(), distributed.get_world_size())
