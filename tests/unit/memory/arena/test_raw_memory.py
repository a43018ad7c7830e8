import re
from pathlib import Path

import pytest
import torch

from tensorforge.memory import TensorArena
from tensorforge.memory.arena.raw_memory import move_in_chunks


def mapping_flags(address):
    """The kernel's flags of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages"
)
def test_huge_pages_are_asked_for_when_they_are_wanted():
    for wanted in (True, False):
        # So large that it is a mapping of its own, not a part of the heap that was advised before.
        with TensorArena(64 << 20, alignment=2 << 20, huge_pages=wanted) as arena:
            block = arena.allocate(3 << 20)
            address = block.tensor().data_ptr()
            assert address % (2 << 20) == 0
            assert ("hg" in mapping_flags(address)) is wanted


def test_chunked_moves_survive_overlap():
    memory = torch.arange(100, dtype=torch.uint8)
    expected = memory[30:90].clone()
    move_in_chunks(memory.untyped_storage(), 30, 13, 60, chunk=7)
    assert torch.equal(memory[13:73], expected)
