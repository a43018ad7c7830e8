"""An arena of the simulated accelerator's memory, and one of pinned host memory."""

from __future__ import annotations

import pytest
import torch

from tensorforge.memory.arena.arena import TensorArena

pytestmark = pytest.mark.usefixtures("device_process")


def test_an_arena_lends_the_devices_memory_and_moves_its_blocks():
    arena = TensorArena(4096, device="sim:1")
    first, second = arena.allocate(1024), arena.allocate(1024)
    second.tensor(torch.float32, (256,)).copy_(torch.arange(256.0))
    first.free()
    assert arena.defragment() > 0
    moved = second.tensor(torch.float32, (256,))
    assert moved.device == torch.device("sim", 1)
    assert torch.equal(moved.cpu(), torch.arange(256.0))
    del moved
    second.free()
    arena.close()


def test_an_arena_of_pinned_memory_is_copied_to_the_device_later():
    arena = TensorArena(4096, pin_memory=True)
    staged = arena.lend((256,))
    assert staged.is_pinned()
    staged.fill_(2.0)
    with torch.get_device_module("sim").no_synchronization():
        copied = staged.to("sim", non_blocking=True)
    assert copied.sum().item() == 512.0
    del staged
    arena.close()
