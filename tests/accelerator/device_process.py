"""A process in which the simulated accelerator is loaded, and which runs test functions by name.

pytest's own process never loads the device. torch counts the devices of a process at its first backward pass,
which may have been another test's; and a loaded device changes what torch answers to every later test.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import traceback
import warnings
from multiprocessing.connection import Connection


class DeviceProcess:
    """One such process. A test that ends it (a fault, an exit) fails; the next test gets a new one."""

    def __init__(self) -> None:
        self._start()

    def run(self, module: str, name: str, arguments: dict[str, object]) -> str | None:
        """Call a function there; return the traceback of what it raised, or nothing."""
        if not self._process.is_alive():
            self.end()
            self._start()
        self._connection.send((module, name, arguments))
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return f"{name} ended its process with exit code {self._process.exitcode}"

    def end(self) -> None:
        self._connection.close()
        self._process.join()
        self._process.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def serve(connection: Connection) -> None:
    """Run what is asked for until the other side closes the connection."""
    warnings.simplefilter("error")
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(module, name, arguments))


def _outcome(module: str, name: str, arguments: dict[str, object]) -> str | None:
    try:
        _reset()
        getattr(importlib.import_module(module), name)(**arguments)
        _require_no_memory()
    except BaseException:  # noqa: BLE001 - pytest's own outcomes are no Exception; the other side reports them
        return traceback.format_exc()
    return None


def _reset() -> None:
    """Let every test begin alike."""
    import torch
    import torch._dynamo  # the first optimizer would import it, which leaves a folder behind
    from tests.accelerator import sim

    sim.set_schedule("on demand")
    sim.reset_synchronizations()
    sim.set_device(0)
    torch.set_num_threads(1)
    torch.manual_seed(0)


def _require_no_memory() -> None:
    """Fail a test that leaves tensors on a device."""
    from tests.accelerator import sim

    gc.collect()
    left = {index: sim.memory_allocated(index) for index in range(sim.device_count())}
    assert not any(left.values()), f"the test left bytes on devices: {left}"
