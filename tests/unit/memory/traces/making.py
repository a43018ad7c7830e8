"""Traces for the tests of traces."""

from tensorforge.memory import AllocationTrace
from tensorforge.memory.traces.trace import Event


def trace_of(*rows, name="test"):
    """Events from (block, signed size[, label]), a millisecond apart."""
    return AllocationTrace(
        (Event(n / 1000, block, size, *label) for n, (block, size, *label) in enumerate(rows)),
        name=name,
    )
