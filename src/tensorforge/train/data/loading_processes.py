"""Processes that load micro-batches ahead of the training loop.

The micro-batches to load next are predicted from the ledger and this worker's share of the work. After a change
of the cluster they are predicted again, and those that were loaded in vain are dropped. Each process has a
connection of its own, so the death of a process is noticed at once and does not harm the others.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tensorforge.errors import UnavailableError
from tensorforge.train.data import batch_pipe
from tensorforge.train.data.batch_loading import BatchSource, MicroBatch
from tensorforge.validation import one_of, whole_number

_PR_SET_PDEATHSIG = 1
_EXIT_SECONDS = 2.0
_REQUEST = struct.Struct("<3q")
_MAX_PREFETCH = 64
"""So many requests fit into a socket that nobody reads. A request that blocked would block for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Where batches are loaded. The names are those of torch's `DataLoader`.

    `num_workers`: processes per worker that load batches ahead of the training loop; with 0 the training
    process loads each batch itself, when it is needed. `prefetch_factor`: how many batches each process
    loads ahead. `worker_init_fn`: called in each process with its number. `multiprocessing_context`: how
    processes are started; `"fork"` takes any dataset, `"spawn"` and `"forkserver"` need one that can be
    pickled. None of this changes what is trained.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str = "fork"

    def __post_init__(self) -> None:
        whole_number("num_workers", self.num_workers, least=0)
        whole_number("prefetch_factor", self.prefetch_factor, least=1, most=_MAX_PREFETCH)
        known = multiprocessing.get_all_start_methods()
        one_of("multiprocessing_context", self.multiprocessing_context, known)


class LoadingProcesses:
    """Loads micro-batches in processes, which are started at once.

    `upcoming` returns the micro-batches that follow from a given one on.
    """

    def __init__(
        self,
        source: BatchSource,
        loading: Loading,
        upcoming: Callable[[MicroBatch], Iterator[MicroBatch]],
    ) -> None:
        self._upcoming = upcoming
        self._plan: Iterator[MicroBatch] = iter(())
        self._asked: deque[tuple[MicroBatch, _Process]] = deque()
        self._processes: list[_Process] = []
        for number in range(loading.num_workers):
            self._processes.append(_Process(source, loading, number, self._processes))
        self._idle = self._processes * loading.prefetch_factor
        # Runs before multiprocessing's own handler, which would wait for the processes.
        atexit.register(_close, weakref.ref(self), os.getpid())

    def load(self, micro_batch: MicroBatch) -> Any:
        """Return the collated samples.

        An error of the dataset is raised as it is; the death of a process is an `UnavailableError`.
        """
        if all(asked != micro_batch for asked, _ in self._asked):
            self._plan = self._upcoming(micro_batch)
        while True:
            self._ask()
            asked, process = self._asked.popleft()
            batch, error = process.answer()
            self._idle.append(process)
            if asked == micro_batch:
                self._ask()
                if error is not None:
                    raise error
                return batch
            # Otherwise the prediction was wrong: drop the batch, and its error if it has one.

    def _ask(self) -> None:
        while self._idle and (micro_batch := next(self._plan, None)) is not None:
            process = self._idle.pop(0)
            process.ask(micro_batch)
            self._asked.append((micro_batch, process))

    def close(self) -> None:
        """End the processes. Doing it again changes nothing."""
        for process in self._processes:
            process.connection.close()
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            process.end(deadline)
        self._processes, self._idle = [], []
        self._asked.clear()


def _close(processes: weakref.ref[LoadingProcesses], owner: int) -> None:
    if (found := processes()) is not None and os.getpid() == owner:
        found.close()


class _Process:
    def __init__(
        self, source: BatchSource, loading: Loading, number: int, older: list[_Process]
    ) -> None:
        context: Any = multiprocessing.get_context(loading.multiprocessing_context)
        self.connection, other_end = socket.socketpair()
        inherited = []
        if loading.multiprocessing_context == "fork":
            inherited = [self.connection, *(process.connection for process in older)]
        self._process = context.Process(
            target=_serve,
            args=(other_end, inherited, os.getpid(), source, loading.worker_init_fn, number),
            name=f"loading-{number}",
            daemon=True,
        )
        self._process.start()
        other_end.close()

    def ask(self, micro_batch: MicroBatch) -> None:
        try:
            self.connection.sendall(_REQUEST.pack(*micro_batch))
        except ConnectionError as error:
            raise self._death_error() from error

    def answer(self) -> Any:
        try:
            return batch_pipe.receive(self.connection)
        except (EOFError, ConnectionError) as error:
            raise self._death_error() from error

    def _death_error(self) -> UnavailableError:
        self._process.join(_EXIT_SECONDS)
        code = self._process.exitcode
        how = "closed its connection" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            names = {each.value: each.name for each in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        return UnavailableError(f"{self._process.name} (pid {self._process.pid}) {how}")

    def end(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    connection: socket.socket,
    inherited: list[socket.socket],
    parent: int,
    source: BatchSource,
    begin: Callable[[int], None] | None,
    number: int,
) -> None:
    """The main function of a loading process: it ends when the connection is closed or its parent is killed."""
    for (
        copy
    ) in inherited:  # otherwise the older processes would not notice that the parent closed them
        copy.close()
    # The training process decides on signals that go to the whole process group. They get a handler instead of
    # being ignored, because programs that the dataset starts would inherit an ignored signal.
    for number_of_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number_of_signal, _do_nothing)
    if os.getppid() == parent and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:  # the parent is a fork server, which lives as long as this process does
        threading.Thread(target=_exit_on_hangup, args=(connection,), daemon=True).start()
    torch.set_num_threads(1)
    load = source.load if begin is None else _prepared(source.load, begin, number)
    try:
        while request := connection.recv(_REQUEST.size, socket.MSG_WAITALL):
            _answer(connection, load, MicroBatch(*_REQUEST.unpack(request)))
    except (BrokenPipeError, ConnectionResetError):
        return


Load = Callable[[MicroBatch], Any]


def _prepared(load: Load, begin: Callable[[int], None], number: int) -> Load:
    """Call `begin`, then return `load`; if `begin` raises, return a function that raises its error."""
    try:
        begin(number)
    except Exception as error:  # noqa: BLE001  it is raised again where a batch is wanted
        problem = error

        def refuse(_: MicroBatch) -> Any:
            raise problem

        return refuse
    return load


def _exit_on_hangup(connection: socket.socket) -> None:
    """End this process as soon as the other end of the connection is closed, whatever its main thread does."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    os._exit(0)


def _do_nothing(_signal: int, _frame: object) -> None:
    pass


def _answer(connection: socket.socket, load: Load, micro_batch: MicroBatch) -> None:
    try:
        batch = load(micro_batch)
    except Exception as error:  # noqa: BLE001  it is raised again where the batch is wanted
        batch_pipe.send(connection, (None, _portable(error)))
        return
    try:
        batch_pipe.send(connection, (batch, None))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  the batch cannot be pickled
        batch_pipe.send(connection, (None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """A copy of the error with its traceback as a note; a `RuntimeError` if pickle cannot copy the error."""
    copy: Exception
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # noqa: BLE001  a class may make pickle raise anything
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note("In a loading process:\n" + "".join(traceback.format_exception(error)))
    return copy
