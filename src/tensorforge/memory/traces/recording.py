"""Records the allocations of a PyTorch program with torch's profiler.

Start the recording before the model is created: blocks allocated earlier are unknown, and their release is
ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from tensorforge.errors import ClosedError, InvalidInputError
from tensorforge.memory.traces.trace import AllocationTrace, Event

_NOISE = "autograd::engine::evaluate_function: "


class Recording:
    """The result of `record_allocations`; its trace is available after the `with` block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._trace: AllocationTrace | None = None

    @property
    def trace(self) -> AllocationTrace:
        """The recorded trace; a `ClosedError` before the `with` block has ended."""
        if self._trace is None:
            raise ClosedError(f"the recording {self.name!r} has not ended yet")
        return self._trace

    def finish(self, trace: AllocationTrace) -> None:
        """Set the result."""
        self._trace = trace


@contextlib.contextmanager
def record_allocations(*, device: str = "cpu", name: str = "recording") -> Iterator[Recording]:
    """Record every allocation that torch makes on `device` inside the `with` block.

    The trace is also available if the block raises; the exception propagates.
    """
    wanted = torch.device(device)
    activities = [ProfilerActivity.CPU]
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidInputError(f"device = {device!r}: CUDA is not available")
        activities.append(ProfilerActivity.CUDA)
    recording = Recording(name)
    profiler = profile(activities=activities, profile_memory=True)
    profiler.start()
    try:
        yield recording
    finally:
        profiler.stop()
        recording.finish(_trace_of(profiler, wanted, name))


def _trace_of(profiler: Any, device: torch.device, name: str) -> AllocationTrace:
    results = profiler.profiler.kineto_results
    found = []
    for node, label in _walk(results.experimental_event_tree()):
        if node.tag == _EventType.Allocation and node.extra_fields.device.type == device.type:
            fields = node.extra_fields
            found.append((node.start_time_ns, fields.ptr, fields.alloc_size, label))
    found.sort(key=lambda row: row[0])
    return AllocationTrace(_number(found), name=name)


def _walk(roots: list[Any]) -> Iterator[tuple[Any, str]]:
    """Every node with a label: the outermost and the innermost operation around it.

    It does not recurse, because a program's operations may nest deeper than Python's recursion limit.
    """
    stack = [(root, "", "") for root in reversed(roots)]
    while stack:
        node, outer, inner = stack.pop()
        yield node, outer if outer == inner else f"{outer} > {inner}"
        name = "" if node.tag == _EventType.Allocation else node.name.removeprefix(_NOISE)
        stack.extend((child, outer or name, name) for child in reversed(node.children))


def _number(rows: list[tuple[int, int, int, str]]) -> Iterator[Event]:
    """Turn addresses, which are reused, into a number for each allocation."""
    live: dict[int, tuple[int, int]] = {}
    count = 0
    origin = rows[0][0] if rows else 0
    for nanoseconds, address, size, label in rows:
        time = (nanoseconds - origin) / 1e9
        if size > 0:
            if address in live:  # its release was not recorded
                number, old = live.pop(address)
                yield Event(time, number, -old)
            live[address] = (count, size)
            yield Event(time, count, size, label)
            count += 1
        elif address in live:
            number, old = live.pop(address)
            yield Event(time, number, -old)
