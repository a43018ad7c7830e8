import pytest
import torch

from tensorforge.errors import ClosedError, InvalidInputError
from tensorforge.memory import record_allocations, replay_trace

pytestmark = pytest.mark.may_leak("files", "torch's profiler makes the compiler's cache folder")


def test_the_recorder_sees_what_is_allocated_and_freed():
    with record_allocations(name="mine") as recording:
        with pytest.raises(ClosedError, match="has not ended"):
            _ = recording.trace
        kept = torch.empty(1000, dtype=torch.uint8)
        temporary = torch.empty(5000, dtype=torch.uint8)
        del temporary
    trace = recording.trace
    assert trace.name == "mine"
    assert [event.size for event in trace.events] == [1000, 5000, -5000]
    assert all(event.label == "aten::empty" for event in trace.events if event.size > 0)
    assert replay_trace(trace, "best-fit").overhead == pytest.approx(1.0, abs=0.15)
    assert kept.numel() == 1000


def test_what_was_there_before_is_left_out():
    old = torch.empty(1000)
    with record_allocations() as recording:
        del old
        torch.empty(10, dtype=torch.uint8)
    assert [event.size for event in recording.trace.events] == [10, -10]


def test_the_trace_is_there_also_after_an_exception():
    with pytest.raises(KeyError), record_allocations() as recording:
        torch.empty(10, dtype=torch.uint8)
        raise KeyError
    assert len(recording.trace) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_recording_a_device_that_is_not_there_is_refused():
    with (
        pytest.raises(InvalidInputError, match="CUDA is not available"),
        record_allocations(device="cuda"),
    ):
        pass
