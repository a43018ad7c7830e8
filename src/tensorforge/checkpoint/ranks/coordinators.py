"""Messages between the ranks of a save or load: of one process, of torch.distributed, or of threads.

Messages are bytes. Every wait has a timeout, so that a dead rank makes the others fail in time. The messages
use no collective of torch.distributed, so that training may go on at the same time.
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
    """One of the ranks that save and load together. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def barrier(self, timeout: float) -> None:
        """Return when all ranks have called this; `DeadlineExceededError` after `timeout` seconds."""

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:
        """The payloads of all ranks, by rank, on rank 0; `None` on the others."""

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:
        """The payload of rank 0, on every rank."""


class SingleProcess:
    """The coordinator of a process that saves and loads alone."""

    rank = 0
    world_size = 1

    def barrier(self, timeout: float) -> None:
        """Return at once."""

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:  # noqa: ARG002
        """The payload alone."""
        return [payload]

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:  # noqa: ARG002
        """The payload."""
        return payload or b""


class _MessageStore(Protocol):
    """Messages by key, which every rank can write and wait for."""

    def post(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout: float) -> bytes: ...

    def remove(self, key: str) -> None: ...


class _MessageCoordinator:
    """Gather, broadcast and barrier by means of a message store."""

    def __init__(self, messages: _MessageStore, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise ConfigurationError("rank", rank, f"must be from 0 to {world_size - 1}")
        self._messages = messages
        self._rank = rank
        self._world_size = world_size
        self._rounds: Iterator[int] = itertools.count()

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    def barrier(self, timeout: float) -> None:
        """Return when all ranks have called this."""
        deadline = time.monotonic() + timeout
        self.gather(b"", timeout)
        self.broadcast(b"", max(0.001, deadline - time.monotonic()))

    def gather(self, payload: bytes, timeout: float) -> list[bytes] | None:
        """The payloads of all ranks, by rank, on rank 0; `None` on the others."""
        number = next(self._rounds)
        if self._rank:
            self._messages.post(f"{number}/{self._rank}", payload)
            return None
        deadline = time.monotonic() + timeout
        received = [payload]
        for rank in range(1, self._world_size):
            received.append(self._take(number, rank, rank, deadline))
            self._messages.remove(f"{number}/{rank}")
        return received

    def broadcast(self, payload: bytes | None, timeout: float) -> bytes:
        """The payload of rank 0, on every rank."""
        number = next(self._rounds)
        if self._rank:
            value = self._take(number, self._rank, 0, time.monotonic() + timeout)
            self._messages.remove(f"{number}/{self._rank}")
            return value
        for rank in range(1, self._world_size):
            self._messages.post(f"{number}/{rank}", payload or b"")
        return payload or b""

    def _take(self, number: int, slot: int, sender: int, deadline: float) -> bytes:
        remaining = max(0.001, deadline - time.monotonic())
        try:
            return self._messages.take(f"{number}/{slot}", remaining)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"rank {sender} sent no message in time; it has ended, hangs, or did not make this call"
            ) from error


class InMemoryRanks:
    """Coordinators for ranks that are threads of one process."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ConfigurationError("world_size", world_size, "must be at least 1")
        self.world_size = world_size
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def coordinator(self, rank: int) -> DistributedCoordinator:
        """The coordinator of one rank."""
        return _MessageCoordinator(self, rank, self.world_size)

    def post(self, key: str, value: bytes) -> None:
        """Store a message."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def take(self, key: str, timeout: float) -> bytes:
        """Wait for a message and return it; `TimeoutError` after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(key)
            return self._values[key]

    def remove(self, key: str) -> None:
        """Remove a message."""
        with self._changed:
            self._values.pop(key, None)


class _TorchStore:
    """Messages in the store of torch.distributed, over a connection of their own."""

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


class TorchDistributed(_MessageCoordinator):
    """The coordinator for the default process group of torch.distributed, which must be initialised.

    Messages go through the store of the group, not through collectives, so that a save in the background does
    not disturb training. All ranks make their coordinators in the same order.
    """

    def __init__(self) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            raise ConfigurationError(
                "process group", None, "call torch.distributed.init_process_group first"
            )
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch offers no public way
        messages = _TorchStore(store, str(next(_groups)))
        super().__init__(messages, distributed.get_rank(), distributed.get_world_size())
