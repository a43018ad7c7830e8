"""The simulated accelerator as torch sees it: the device `sim`, with `torch.sim` as its module.

Import this module before the first backward pass of a process: torch counts a process's devices only then.

- `SIM_VISIBLE_DEVICES` lists the devices, `0,1` by default.
- `SIM_SCHEDULE` says when streams work, `on demand` by default; see `set_schedule`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from tests.accelerator.extension import library

torch.ops.load_library(str(library()))
_native = torch.ops.sim

Where = torch.device | str | int | None


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return _native.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(where: Where) -> None:
    torch.accelerator.set_device_index(_index(where))


def device(where: Where) -> AbstractContextManager[object]:
    """A context in which this is the current device."""
    return torch.accelerator.device_index(_index(where))


def is_initialized() -> bool:
    return _native.is_initialized()


def __getattr__(name: str) -> object:
    if name == "_initialized":  # torch.utils.checkpoint asks for it
        return is_initialized()
    raise AttributeError(name)


def _is_in_bad_fork() -> bool:
    return _native.in_bad_fork()


def synchronize(where: Where = None) -> None:
    torch.accelerator.synchronize(_index(where))


def Stream(device: Where = None, priority: int = 0) -> torch.Stream:  # noqa: N802
    """A queue of work of one device; of the current device, if none is named."""
    return torch.Stream(device=torch.device("sim", _index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:  # noqa: N802
    """A point in a stream's work."""
    return torch.Event(device=torch.device("sim"), enable_timing=enable_timing)


def current_stream(where: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(where))


def default_stream(where: Where = None) -> torch.Stream:
    place = torch.device("sim", _index(where))
    return torch.Stream(stream_id=0, device_index=place.index, device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(chosen: torch.Stream | None) -> AbstractContextManager[object]:
    """A context in which this is the current stream; nothing changes for `None`."""
    return nullcontext() if chosen is None else chosen


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(where: Where = "sim") -> torch.Tensor:
    return default_generators[_index(where)].get_state()


def set_rng_state(state: torch.Tensor, where: Where = "sim") -> None:
    default_generators[_index(where)].set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def memory_allocated(where: Where = None) -> int:
    """The bytes of this device in which tensors live."""
    return torch.accelerator.memory_allocated(_index(where))


def max_memory_allocated(where: Where = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(where))


def memory_reserved(where: Where = None) -> int:
    return torch.accelerator.memory_reserved(_index(where))


def memory_stats(where: Where = None) -> dict[str, int]:
    return torch.accelerator.memory_stats(_index(where))


def reset_peak_memory_stats(where: Where = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(where))


def mem_get_info(where: Where = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(where))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def get_device_name(where: Where = None) -> str:
    return "simulated accelerator"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def set_schedule(name: str, *, latency: float = 0.001, seed: int = 0) -> None:
    """Say when streams do their work.

    - `on demand`: a stream does nothing before the program waits or asks (`query`) for it, and then only what
      the answer needs.
    - `side streams first`: work of streams other than the default stream is done when it is enqueued; the
      default stream works on demand.
    - `default stream first`: the same with the roles exchanged.
    - `jittered`: streams work beside the program, with seeded random stalls around `latency` seconds.

    Only the last depends on the machine's speed. Where a wait is missing between the default stream and another
    one, one of the two middle schedules does the later work first, so the numbers are wrong.
    """
    _native.set_schedule(name, latency, seed)


def synchronizations() -> dict[str, int]:
    """How often the program has waited for a device since the last reset, by reason."""
    return dict(_native.synchronizations())


def reset_synchronizations() -> None:
    _native.reset_synchronizations()


@contextlib.contextmanager
def no_synchronization() -> Iterator[None]:
    """A context in which waiting for a device raises `RuntimeError` where it happens."""
    _native.forbid_synchronization(True)
    try:
        yield
    finally:
        _native.forbid_synchronization(False)


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor's memory holds at this moment, late work not done; only a simulation can tell."""
    return _native.peek(tensor)


def _index(where: Where) -> int:
    if isinstance(where, int):
        return where
    place = torch.device("sim") if where is None else torch.device(where)
    if place.type != "sim":
        raise ValueError(f"{place} is no simulated accelerator")
    return current_device() if place.index is None else place.index


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1.value)
default_generators = tuple(_native.default_generator(index) for index in range(device_count()))
set_schedule(os.environ.get("SIM_SCHEDULE", "on demand"))
atexit.register(_native.end)
