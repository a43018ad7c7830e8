"""Processes that load batches ahead of the training loop.

What to load next is predicted from the ledger and this worker's share of the work. After a change of the
cluster the prediction is made anew, and what was loaded in vain is dropped. Each process has a connection
of its own, so one that dies is noticed at once and harms no other.
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

from tensorforge.errors import ConfigurationError, UnavailableError
from tensorforge.train.data import batch_pipe
from tensorforge.train.data.batch_loading import BatchSource, Piece
from tensorforge.validation import whole_number

_PR_SET_PDEATHSIG = 1
_PATIENCE_SECONDS = 2.0
_REQUEST = struct.Struct("<3q")
_MOST_AHEAD = 64
"""Requests that a socket surely takes while nobody reads them; one that blocked would never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Where batches are loaded; the names are those of torch's `DataLoader`.

    `num_workers` processes per worker load `prefetch_factor` batches each ahead of the training loop; 0: the
    training process loads them itself, when they are needed. `worker_init_fn` is called in each process with
    its number. `multiprocessing_context` is the way to start them: `"fork"` takes any dataset; `"spawn"` and
    `"forkserver"` need one that can be pickled. None of this changes the numbers.
    """

    num_workers: int = 0
    prefetch_factor: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str = "fork"

    def __post_init__(self) -> None:
        whole_number("num_workers", self.num_workers, least=0)
        whole_number("prefetch_factor", self.prefetch_factor, least=1, most=_MOST_AHEAD)
        known = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context not in known:
            raise ConfigurationError(
                "multiprocessing_context",
                self.multiprocessing_context,
                f"must be one of {', '.join(known)}",
            )


class LoadingProcesses:
    """Starts the processes at once; `upcoming` tells what is to be loaded from a piece on."""

    def __init__(
        self,
        source: BatchSource,
        loading: Loading,
        upcoming: Callable[[Piece], Iterator[Piece]],
    ) -> None:
        self._upcoming = upcoming
        self._plan: Iterator[Piece] = iter(())
        self._asked: deque[tuple[Piece, _Process]] = deque()
        self._processes: list[_Process] = []
        for number in range(loading.num_workers):
            self._processes.append(_Process(source, loading, number, self._processes))
        self._idle = self._processes * loading.prefetch_factor
        # Before multiprocessing waits for them.
        atexit.register(_close, weakref.ref(self), os.getpid())

    def load(self, piece: Piece) -> Any:
        """The batch. An error of the dataset is raised as it is, a dead process as `UnavailableError`."""
        if all(asked != piece for asked, _ in self._asked):
            self._plan = self._upcoming(piece)
        while True:
            self._ask()
            asked, process = self._asked.popleft()
            batch, error = process.answer()
            self._idle.append(process)
            if asked == piece:
                self._ask()
                if error is not None:
                    raise error
                return batch
            # Otherwise nobody wants it any more, nor to hear what was wrong with it.

    def _ask(self) -> None:
        while self._idle and (piece := next(self._plan, None)) is not None:
            process = self._idle.pop(0)
            process.ask(piece)
            self._asked.append((piece, process))

    def close(self) -> None:
        """End the processes. Doing it again changes nothing."""
        for process in self._processes:
            process.hang_up()
        deadline = time.monotonic() + _PATIENCE_SECONDS
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
        self.ours, theirs = socket.socketpair()
        inherited = []
        if loading.multiprocessing_context == "fork":
            inherited = [self.ours, *(process.ours for process in older)]
        self._process = context.Process(
            target=_serve,
            args=(theirs, inherited, os.getpid(), source, loading.worker_init_fn, number),
            name=f"loading-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def ask(self, piece: Piece) -> None:
        try:
            self.ours.sendall(_REQUEST.pack(*piece))
        except ConnectionError as error:
            raise self._death() from error

    def answer(self) -> Any:
        try:
            return batch_pipe.receive(self.ours)
        except (EOFError, ConnectionError) as error:
            raise self._death() from error

    def _death(self) -> UnavailableError:
        self._process.join(_PATIENCE_SECONDS)
        code = self._process.exitcode
        how = "closed its connection" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            names = {each.value: each.name for each in signal.Signals}
            how = f"was killed by {names.get(-code, f'signal {-code}')}"
        return UnavailableError(f"{self._process.name} (pid {self._process.pid}) {how}")

    def hang_up(self) -> None:
        self.ours.close()

    def end(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    end: socket.socket,
    inherited: list[socket.socket],
    parent: int,
    source: BatchSource,
    begin: Callable[[int], None] | None,
    number: int,
) -> None:
    """What a process does until the other end is closed, or its parent is killed."""
    for one in inherited:  # else the older processes would not see when they are closed
        one.close()
    # Signals that go to a whole group are the training process's business. They are not ignored, because
    # programs that the dataset starts would ignore them, too.
    for number_of_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number_of_signal, _do_nothing)
    if os.getppid() == parent and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:  # started by a fork server, which lives on as long as this process does
        threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    torch.set_num_threads(1)
    load = source.load if begin is None else _prepared(source.load, begin, number)
    try:
        while request := end.recv(_REQUEST.size, socket.MSG_WAITALL):
            _answer(end, load, Piece(*_REQUEST.unpack(request)))
    except (BrokenPipeError, ConnectionResetError):
        return


Load = Callable[[Piece], Any]


def _prepared(load: Load, begin: Callable[[int], None], number: int) -> Load:
    """The function, after `begin`; if that raises, so does every call."""
    try:
        begin(number)
    except Exception as error:  # noqa: BLE001  it is raised again where a batch is wanted
        problem = error

        def refuse(_: Piece) -> Any:
            raise problem

        return refuse
    return load


def _end_with(end: socket.socket) -> None:
    """End the process once the other end is closed, whatever it does meanwhile."""
    hung_up = select.poll()
    hung_up.register(end, 0)
    hung_up.poll()
    os._exit(0)


def _do_nothing(_signal: int, _frame: object) -> None:
    pass


def _answer(end: socket.socket, load: Load, piece: Piece) -> None:
    try:
        batch = load(piece)
    except Exception as error:  # noqa: BLE001  it is raised again where the batch is wanted
        batch_pipe.send(end, (None, _portable(error)))
        return
    try:
        batch_pipe.send(end, (batch, None))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001  pickle does not take it
        batch_pipe.send(end, (None, _portable(error)))


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note; one that pickle cannot carry is told in words."""
    copy: Exception
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
    except Exception:  # noqa: BLE001  whatever its class does to pickle
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note("In a loading process:\n" + "".join(traceback.format_exception(error)))
    return copy
