"""The process group of one generation: gloo, in this process, without torch's global state.

gloo cannot be interrupted by its own means, so three rules hold here:

1. The training thread never blocks inside gloo. It waits until an operation is done *or* the group is
   aborted, whichever comes first.
2. Aborting shuts the group's own sockets down, by their inode numbers, so that peers learn of it at once
   and a late abort can never hit the sockets of the next generation.
3. A dead group is buried by a thread of its own, which waits for the operations that gloo still has in hand
   (they end with their timeout at the latest) and then drops everything. The interpreter does not end while
   a group is being dropped: a thread that came back from gloo after that would abort the process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tensorforge.errors import UnavailableError

_LOOK_SECONDS = 0.1
_TCP_ESTABLISHED = 1

_burials = threading.Lock()
"""Held while a group is dropped, and for good once the interpreter ends."""
atexit.register(_burials.acquire, timeout=10.0)

dist: Any = torch.distributed
"""Without types: torch tells type checkers nothing of the names that are used here."""


class GroupAbortedError(UnavailableError):
    """The group is no more: it was aborted, or a peer broke off."""


class GenerationStore:
    """The rendezvous of one generation, hosted by its rank 0 and gone with it."""

    def __init__(self, host: str) -> None:
        self._server: Any = dist.TCPStore(
            host, 0, None, True, timeout=timedelta(seconds=10), wait_for_workers=False
        )
        self.address = f"{host}:{self._server.port}"

    def close(self) -> None:
        """Stop serving; whoever waits for a key gets an error."""
        self._server = None


class GenerationGroup:
    """The collectives of one generation. Build it with `form`; it is used by one thread at a time.

    `abort` may be called by any thread at any time, also while the group is still being formed; every
    wait then ends with `GroupAbortedError`. `operation_timeout` bounds each operation even if nobody aborts.
    Other threads may open sockets while the group is formed: listening ones and those with one of
    `spared_ports` (the coordinator's, the workers') at either end are never cut.
    """

    def __init__(
        self,
        *,
        store: str,
        generation: int,
        rank: int,
        world_size: int,
        host: str = "127.0.0.1",
        operation_timeout: float = 600.0,
        connect_timeout: float = 10.0,
        spared_ports: Collection[int] = (),
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store_address = store
        self._host = host
        self._operation_timeout = operation_timeout
        self._connect_timeout = connect_timeout
        self._spared = frozenset(spared_ports)
        self._backend: Any = None
        self._pending: list[Any] = []
        self._sockets: dict[int, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._aborted: str | None = None
        self._closed = False

    @property
    def is_aborted(self) -> bool:
        """Whether the group can be used no more."""
        return self._aborted is not None

    def form(self) -> None:
        """Connect to all members. Ends with an error if it is aborted or a member does not come in time."""
        box: dict[str, Any] = {}
        thread = threading.Thread(
            target=self._connect, args=(box,), name=f"gloo-form-{self.generation}", daemon=True
        )
        thread.start()
        with self._lock:
            while not box and self._aborted is None:
                if not self._wake.wait(self._connect_timeout + 1.0):
                    self._aborted = "the members did not connect in time"
            if self._aborted is not None:
                self._closed = True  # the thread drops what it may still build
                raise GroupAbortedError(f"generation {self.generation}: {self._aborted}")
            if "error" in box:
                self._aborted = str(box["error"])
                self._closed = True
                raise GroupAbortedError(
                    f"generation {self.generation} could not connect: {box['error']}"
                ) from box["error"]
            self._backend, self._sockets = box["backend"], box["sockets"]

    def _connect(self, box: dict[str, Any]) -> None:
        found: dict[str, Any] = {}
        try:
            found["backend"], found["sockets"] = self._build()
        except Exception as error:  # noqa: BLE001  handed to the thread that asked
            found["error"] = error
        with self._lock:
            if not self._closed:
                box.update(found)
                self._wake.notify_all()
        # An abandoned group dies here, in this thread: its destructor may take as long as it likes.
        found.clear()

    def _build(self) -> tuple[Any, dict[int, str]]:
        host, _, port = self._store_address.rpartition(":")
        limit = timedelta(seconds=self._connect_timeout)
        client = dist.TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(f"generation-{self.generation}", client)
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  torch has no public name for it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]  # noqa: SLF001
        options._timeout = limit  # noqa: SLF001
        spared = self._spared | {int(port)}  # the store's connections are not the group's
        before = _sockets()
        backend = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
        backend._set_default_timeout(  # noqa: SLF001
            timedelta(seconds=self._operation_timeout)
        )
        opened = {
            fd: name
            for fd, name in _sockets().items()
            if before.get(fd) != name and _is_connection(fd, name, spared)
        }
        return backend, opened

    def abort(self, reason: str) -> None:
        """End every operation under way and to come. Never blocks; doing it again changes nothing."""
        with self._lock:
            if self._aborted is None:
                self._aborted = reason
                _shut_down(self._sockets)
            self._wake.notify_all()

    def close(self) -> None:
        """Give the group up; what gloo still holds is dropped in the background."""
        self.abort("the group was closed")
        with self._lock:
            self._closed = True
            # In a list, so that the last reference goes in the other thread: gloo's destructor may block.
            grave, pending = [self._backend], self._pending
            self._backend, self._pending, self._sockets = None, [], {}
        if grave[0] is not None:
            name = f"gloo-grave-{self.generation}"
            threading.Thread(target=_bury, args=(grave, pending), name=name, daemon=True).start()

    def _wait(self, work: Any) -> None:
        done: list[bool] = []

        def finished(_future: object) -> None:
            with self._lock:
                done.append(True)
                self._wake.notify_all()

        work.get_future().add_done_callback(finished)
        with self._lock:
            self._wait_for_the_end(done)
            if not done:
                raise GroupAbortedError(f"generation {self.generation}: {self._aborted}")
        try:
            work.wait()
        except RuntimeError as error:
            self.abort(f"a peer broke off ({_cause(error)})")
            raise GroupAbortedError(
                f"generation {self.generation}: a peer broke off ({_cause(error)})"
            ) from error

    def _wait_for_the_end(self, done: list[bool]) -> None:
        """Until the operation is done or the group aborted; the lock is held.

        gloo forgets to end an operation whose peer broke off while half of a message was sent. So we
        look ourselves: a peer that has been gone for two looks is gone.
        """
        looks = 0
        while not done and self._aborted is None:
            if self._wake.wait(_LOOK_SECONDS):
                continue
            looks = looks + 1 if any(_is_cut(fd, name) for fd, name in self._sockets.items()) else 0
            if looks == 2:
                self._aborted = "a peer broke off (its connection is closed)"
                _shut_down(self._sockets)

    def _start(self, begin: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._aborted is not None or self._backend is None:
                reason = self._aborted or "the group is not formed"
                raise GroupAbortedError(f"generation {self.generation}: {reason}")
            backend = self._backend
        try:
            work = begin(backend)
            self._pending = [*(w for w in self._pending if not w.is_completed()), work]
            return work
        except RuntimeError as error:
            self.abort(f"a peer broke off ({_cause(error)})")
            raise GroupAbortedError(
                f"generation {self.generation}: a peer broke off ({_cause(error)})"
            ) from error

    def _run(self, begin: Callable[[Any], Any]) -> None:
        self._wait(self._start(begin))

    def all_reduce(self, tensor: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Combine `tensor` over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._run(lambda backend: backend.allreduce([tensor], options))

    def all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Lay the members' equally long `tensor`s side by side in `into`, by rank."""
        self.start_all_gather(into, tensor)()

    def start_all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        """`all_gather` that returns at once; call the result to wait."""
        work = self._start(lambda backend: backend._allgather_base(into, tensor))  # noqa: SLF001
        return lambda: self._wait(work)

    def start_all_to_all(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Callable[[], None]:
        """Send a run of `tensor` to each member and lay what each sends side by side in `into`.

        Returns at once; call the result to wait.
        """
        work = self._start(
            lambda backend: backend.alltoall_base(into, tensor, list(receive), list(send))
        )
        return lambda: self._wait(work)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every member's `data`, by rank, on every member."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
        width = int(sizes.max())
        if width == 0:
            return [b""] * self.world_size
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        everything = torch.empty(self.world_size * width, dtype=torch.uint8)
        self.all_gather(everything, mine)
        rows = everything.view(self.world_size, width).numpy()
        return [bytes(rows[rank, : int(sizes[rank])]) for rank in range(self.world_size)]


def _bury(grave: list[Any], pending: list[Any]) -> None:
    """Asks again and again instead of waiting in gloo: a thread that comes back from there while the
    interpreter ends would abort the process."""
    while not all(work.is_completed() for work in pending):
        time.sleep(_LOOK_SECONDS)
    with _burials:
        pending.clear()
        grave.clear()


def _sockets() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name = str(entry.readlink())
        except OSError:
            continue
        if name.startswith("socket:"):
            found[int(entry.name)] = name
    return found


@contextlib.contextmanager
def _duplicate(fd: int, name: str) -> Iterator[socket.socket | None]:
    """A socket of our own for the same connection, or None if it is gone.

    Its name is asked of the duplicate, which nobody else can close: the number it was made from may stand
    for another socket, or for no socket at all, by now.
    """
    try:
        copy = os.dup(fd)
    except OSError:
        yield None
        return
    if str(Path(f"/proc/self/fd/{copy}").readlink()) != name:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as end:
        yield end


def _is_connection(fd: int, name: str, spared: Collection[int]) -> bool:
    """Whether it is a TCP connection with none of the spared ports at either end."""
    with _duplicate(fd, name) as end:
        if end is None:
            return False
        try:
            return not {end.getsockname()[1], end.getpeername()[1]} & set(spared)
        except (OSError, IndexError, TypeError):
            return False


def _is_cut(fd: int, name: str) -> bool:
    """Whether the other end of a connection is closed."""
    with _duplicate(fd, name) as end:
        if end is None:
            return False
        try:
            state = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state != _TCP_ESTABLISHED


def _shut_down(sockets: dict[int, str]) -> None:
    for fd, name in sockets.items():
        with _duplicate(fd, name) as end, contextlib.suppress(OSError):
            if end is not None:
                end.shutdown(socket.SHUT_RDWR)


def _cause(error: BaseException) -> str:
    """gloo's message without its source position and its advice."""
    text = str(error).strip().partition("\n")[0]
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". ")[0] or type(error).__name__
