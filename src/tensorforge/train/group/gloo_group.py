"""The process group of one generation: gloo, in this process, without torch's global state.

gloo offers no way to interrupt an operation, so three rules hold here:

1. The training thread never blocks inside gloo. It waits until an operation is done *or* the group is
   aborted, whichever comes first.
2. Aborting shuts down the group's own sockets, which are known by their inode numbers. So peers notice the
   abort at once, and a late abort can never hit the sockets of the next generation.
3. A closed group is dropped by a thread of its own. The thread waits for the operations that gloo has not
   ended yet (they end with their timeout at the latest). The interpreter does not end while a group is being
   dropped: a thread that returns from gloo after the interpreter's end would abort the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tensorforge.errors import UnavailableError

_POLL_SECONDS = 0.1
_TCP_ESTABLISHED = 1
_OPERATION_SECONDS = 600.0
"""The longest that gloo lets an operation take if nobody aborts the group."""

_drop_lock = threading.Lock()
"""Acquired while a group is dropped, and never released again once the interpreter ends."""
atexit.register(_drop_lock.acquire, timeout=10.0)

dist: Any = torch.distributed
"""Typed as `Any` because torch has no type stubs for the names that are used here."""


class GroupAbortedError(UnavailableError):
    """The group cannot be used any more: it was aborted, or the connection to a peer broke."""


class GenerationStore:
    """The key-value store at which the members of one generation find each other. Rank 0 serves it.

    It listens at `host` only; by itself torch's store would listen at every address of the machine.
    """

    def __init__(self, host: str) -> None:
        listener = _listen(host)
        port = listener.getsockname()[1]
        self._server: Any = dist.TCPStore(
            host,
            port,
            None,
            True,
            timeout=timedelta(seconds=10),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = f"{host}:{port}"

    def close(self) -> None:
        """Stop serving; members that wait for a key get an error."""
        self._server = None


def _listen(host: str) -> socket.socket:
    """A listening socket at a free port of this address."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(f"cannot listen at {host}: {error.strerror}") from error
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen at {host}: {error.strerror}") from error
    return listener


class GenerationGroup:
    """The collective operations of one generation, over gloo. `form` connects it; one thread at a time uses it.

    `abort` may be called by any thread at any time, also while the group is still being formed; every wait
    then ends with `GroupAbortedError`. Each member publishes the port at which gloo listens; the connections
    with such a port at one end are the group's and are shut down with it. Other connections that this process
    opens meanwhile, to an object store or a service, are left alone.
    """

    def __init__(
        self,
        *,
        store: str,
        generation: int,
        rank: int,
        world_size: int,
        host: str = "127.0.0.1",
        connect_timeout: float = 10.0,
    ) -> None:
        self.generation = generation
        self.rank = rank
        self.world_size = world_size
        self._store_address = store
        self._host = host
        self._connect_timeout = connect_timeout
        self._backend: Any = None
        self._pending: list[Any] = []
        self._sockets: dict[int, str] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._aborted: str | None = None
        self._closed = False

    @property
    def is_aborted(self) -> bool:
        """Whether the group cannot be used any more."""
        return self._aborted is not None

    def form(self) -> None:
        """Connect to all members. Raise `GroupAbortedError` if aborted or if a member does not come in time."""
        result: dict[str, Any] = {}
        thread = threading.Thread(
            target=self._connect, args=(result,), name=f"gloo-form-{self.generation}", daemon=True
        )
        thread.start()
        with self._lock:
            while not result and self._aborted is None:
                if not self._wake.wait(self._connect_timeout + 1.0):
                    self._aborted = "the members did not connect in time"
            if self._aborted is not None:
                self._closed = True  # the thread drops what it may still build
                raise GroupAbortedError(f"generation {self.generation}: {self._aborted}")
            if "error" in result:
                self._aborted = str(result["error"])
                self._closed = True
                raise GroupAbortedError(
                    f"generation {self.generation} could not connect: {result['error']}"
                ) from result["error"]
            self._backend, self._sockets = result["backend"], result["sockets"]

    def _connect(self, result: dict[str, Any]) -> None:
        found: dict[str, Any] = {}
        try:
            found["backend"], found["sockets"] = self._build()
        except Exception as error:  # noqa: BLE001  handed to the thread that asked
            found["error"] = error
        with self._lock:
            if not self._closed:
                result.update(found)
                self._wake.notify_all()
        # If nobody waits for the group any more it is destroyed here, because its destructor may block.
        found.clear()

    def _build(self) -> tuple[Any, dict[int, str]]:
        host, _, port = self._store_address.rpartition(":")
        limit = timedelta(seconds=self._connect_timeout)
        client = dist.TCPStore(host, int(port), None, False, timeout=limit, wait_for_workers=False)
        store = dist.PrefixStore(f"generation-{self.generation}", client)
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  torch has no public name for it
        before = _sockets()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]  # noqa: SLF001
        options._timeout = limit  # noqa: SLF001
        own = _new_listening_ports(before)
        store.set(f"ports-{self.rank}", json.dumps(own))
        backend = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
        backend._set_default_timeout(  # noqa: SLF001
            timedelta(seconds=_OPERATION_SECONDS)
        )
        # Every connection of gloo has a port at one end at which a member listens for the others.
        ports = {p for r in range(self.world_size) for p in json.loads(store.get(f"ports-{r}"))}
        opened = {
            fd: name
            for fd, name in _sockets().items()
            if before.get(fd) != name and _has_port(fd, name, ports)
        }
        return backend, opened

    def abort(self, reason: str) -> None:
        """Make every current and later operation raise. Never blocks; doing it again changes nothing."""
        with self._lock:
            if self._aborted is None:
                self._aborted = reason
                _shut_down(self._sockets)
            self._wake.notify_all()

    def close(self) -> None:
        """Abort the group and drop it in the background."""
        self.abort("the group was closed")
        with self._lock:
            self._closed = True
            # In a list, so that the other thread drops the last reference: gloo's destructor may block.
            backend, pending = [self._backend], self._pending
            self._backend, self._pending, self._sockets = None, [], {}
        if backend[0] is not None:
            name = f"gloo-drop-{self.generation}"
            threading.Thread(target=_drop, args=(backend, pending), name=name, daemon=True).start()

    def _wait(self, work: Any) -> None:
        done: list[bool] = []

        def finished(_future: object) -> None:
            with self._lock:
                done.append(True)
                self._wake.notify_all()

        work.get_future().add_done_callback(finished)
        with self._lock:
            self._wait_for(done)
            if not done:
                raise GroupAbortedError(f"generation {self.generation}: {self._aborted}")
        with self._translated_errors():
            work.wait()

    def _wait_for(self, done: list[bool]) -> None:
        """Wait until the operation is done or the group is aborted. The caller has acquired the lock.

        gloo never ends an operation whose connection broke in the middle of a message. So this polls the
        connections itself, and aborts the group if one is found closed twice in a row.
        """
        closed = 0
        while not done and self._aborted is None:
            if self._wake.wait(_POLL_SECONDS):
                continue
            any_closed = any(_is_closed(fd, name) for fd, name in self._sockets.items())
            closed = closed + 1 if any_closed else 0
            if closed == 2:
                self._aborted = "a peer broke off (its connection is closed)"
                _shut_down(self._sockets)

    def _start(self, begin: Callable[[Any], Any]) -> Any:
        with self._lock:
            if self._aborted is not None or self._backend is None:
                reason = self._aborted or "the group is not formed"
                raise GroupAbortedError(f"generation {self.generation}: {reason}")
            backend = self._backend
        with self._translated_errors():
            work = begin(backend)
        self._pending = [*(w for w in self._pending if not w.is_completed()), work]
        return work

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Abort the group and raise `GroupAbortedError` if gloo raises."""
        try:
            yield
        except RuntimeError as error:
            reason = f"a peer broke off ({_cause(error)})"
            self.abort(reason)
            raise GroupAbortedError(f"generation {self.generation}: {reason}") from error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all members, in place."""
        options = dist.AllreduceOptions()
        self._wait(self._start(lambda backend: backend.allreduce([tensor], options)))

    def all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate the members' equally long `tensor`s in `into`, by rank."""
        self.start_all_gather(into, tensor)()

    def start_all_gather(self, into: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        """Start `all_gather` and return at once; call the result to wait."""
        work = self._start(lambda backend: backend._allgather_base(into, tensor))  # noqa: SLF001
        return lambda: self._wait(work)

    def start_all_to_all(
        self,
        into: torch.Tensor,
        tensor: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Callable[[], None]:
        """Start to send `send[rank]` elements of `tensor` to each member and to receive `receive[rank]`
        from each.

        What is received is concatenated in `into`, by rank. Returns at once; call the result to wait.
        """
        work = self._start(
            lambda backend: backend.alltoall_base(into, tensor, list(receive), list(send))
        )
        return lambda: self._wait(work)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every member's `data`, by rank, on every member."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
        width = int(sizes.max())
        if width == 0:
            return [b""] * self.world_size
        padded = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        gathered = torch.empty(self.world_size * width, dtype=torch.uint8)
        self.all_gather(gathered, padded)
        rows = gathered.view(self.world_size, width).numpy()
        return [bytes(rows[rank, : int(sizes[rank])]) for rank in range(self.world_size)]


def _drop(backend: list[Any], pending: list[Any]) -> None:
    """Drop a group once its operations have ended.

    Polls instead of waiting in gloo, because a thread that returns from gloo while the interpreter ends
    would abort the process.
    """
    while not all(work.is_completed() for work in pending):
        time.sleep(_POLL_SECONDS)
    with _drop_lock:
        pending.clear()
        backend.clear()


def _sockets() -> dict[int, str]:
    """This process's sockets: the number of each descriptor, and a name that has the socket's inode."""
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
    """A duplicate of the socket `fd` if `fd` still is the socket called `name`, otherwise `None`.

    The name is read from the duplicate, which no other thread can close; `fd` may be another socket by now.
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
    with socket.socket(fileno=copy) as duplicate:
        yield duplicate


def _new_listening_ports(before: dict[int, str]) -> list[int]:
    """The ports of the sockets that have begun to listen since `before`."""
    ports = []
    for fd, name in _sockets().items():
        if before.get(fd) == name:
            continue
        with _duplicate(fd, name) as copy, contextlib.suppress(OSError, IndexError, TypeError):
            if copy is not None and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.append(int(copy.getsockname()[1]))
    return ports


def _has_port(fd: int, name: str, ports: set[int]) -> bool:
    """Whether `fd` is a TCP connection that has one of these ports at one end."""
    with _duplicate(fd, name) as copy:
        if copy is None:
            return False
        try:
            return bool(ports & {copy.getsockname()[1], copy.getpeername()[1]})
        except (OSError, IndexError, TypeError):
            return False


def _is_closed(fd: int, name: str) -> bool:
    """Whether the other end of a connection is closed."""
    with _duplicate(fd, name) as copy:
        if copy is None:
            return False
        try:
            state = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return False
        return state != _TCP_ESTABLISHED


def _shut_down(sockets: dict[int, str]) -> None:
    for fd, name in sockets.items():
        with _duplicate(fd, name) as copy, contextlib.suppress(OSError):
            if copy is not None:
                copy.shutdown(socket.SHUT_RDWR)


def _cause(error: BaseException) -> str:
    """gloo's message without its source position and its advice."""
    text = str(error).strip().partition("\n")[0]
    if text.startswith("["):
        text = text.partition("] ")[2]
    return text.partition(". ")[0] or type(error).__name__
