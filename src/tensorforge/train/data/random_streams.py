"""Random streams that belong to a place in the training, such as a shard of a step, not to a process."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def stream_seed(seed: int, *place: int, purpose: str = "") -> int:
    """Return the 63-bit seed of one place in the training, such as (epoch, step, shard).

    The seed is a hash with a fixed definition, so it is the same on every machine, in every process and in
    every version of Python. Different purposes at the same place get unrelated seeds.
    """
    numbers = (seed, *place)
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose.encode()[:16]).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the process's generators of torch (of every device), numpy and the standard library."""
    torch.manual_seed(seed)
    _seed_on_host(seed)


def seed_host(seed: int) -> None:
    """Seed the process's generators of torch on the CPU, numpy and the standard library, and no device's."""
    torch.default_generator.manual_seed(seed)
    _seed_on_host(seed)


def _seed_on_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def restored_random_state(device: torch.device | None = None) -> Iterator[None]:
    """Restore the process's generators at the end to the state they had at the beginning.

    Of torch's generators these are the CPU's and that of `device`.
    """
    accelerator: Any = None
    if device is not None and device.type != "cpu":
        accelerator = torch.get_device_module(device)
    device_state = None if accelerator is None else accelerator.get_rng_state(device)
    numpy_state, python_state, torch_state = (
        np.random.get_state(),
        random.getstate(),
        torch.get_rng_state(),
    )
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if accelerator is not None:
            accelerator.set_rng_state(device_state, device)
