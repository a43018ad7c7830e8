import pytest
from tests.unit.memory.traces.making import trace_of

from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError
from tensorforge.memory import AllocationTrace
from tensorforge.memory.traces.torch_snapshot import (
    load_trace,
)
from tensorforge.memory.traces.trace import Event


def test_a_trace_knows_its_peak_and_its_lifetimes():
    trace = trace_of((0, 100, "a"), (1, 50, "b"), (0, -100), (2, 70, "c"))
    assert trace.live_bytes() == [100, 150, 50, 120]
    assert (trace.peak_live, trace.allocations, len(trace)) == (150, 3, 4)
    assert [(life.start, life.stop) for life in trace.lifetimes()] == [(0, 2), (1, 4), (3, 4)]
    assert trace.duration == pytest.approx(0.003)
    assert AllocationTrace([]).duration == 0.0


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([(0, 5), (0, 5)], "allocated twice"),
        ([(0, 5), (0, -5), (0, 5)], "allocated twice"),
        ([(0, -5)], "no such block is live"),
        ([(0, 5), (0, -6)], "no such block is live"),
        ([(0, 5), (0, -5), (0, -5)], "no such block is live"),
        ([(0, 0)], "no such block is live"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(rows, complaint):
    with pytest.raises(InvalidInputError, match=complaint):
        trace_of(*rows)


def test_time_does_not_run_backwards():
    with pytest.raises(InvalidInputError, match="backwards"):
        AllocationTrace([Event(2.0, 0, 1), Event(1.0, 1, 1)])


def test_a_missing_or_foreign_file_is_named(tmp_path):
    with pytest.raises(NotFoundError, match="there is no file"):
        AllocationTrace.load(tmp_path / "nothing.json")
    with pytest.raises(InvalidInputError, match="folder"):
        AllocationTrace.load(tmp_path)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(EncodingError, match="allocation-trace"):
        load_trace(tmp_path / "x.json")
    (tmp_path / "y.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(EncodingError, match=r"y\.gz is not a trace"):
        load_trace(tmp_path / "y.gz")


def test_a_newer_trace_is_refused():
    with pytest.raises(EncodingError, match="version 2"):
        AllocationTrace.from_json({"type": "allocation-trace", "version": 2})


@pytest.mark.parametrize("events", [[[0, -5, 0]], [[0, 5]], [[0, 1, 9]], [[0]], [[0, 1.5, 0]], 7])
def test_senseless_events_are_refused(events):
    data = {"type": "allocation-trace", "version": 1, "name": "x", "labels": [""], "events": events}
    with pytest.raises(EncodingError):
        AllocationTrace.from_json(data)
