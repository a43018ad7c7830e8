import os
import pickle

import pytest
from tests.unit.memory.traces.making import trace_of

from tensorforge.errors import EncodingError, NotFoundError
from tensorforge.memory import replay_trace, save_snapshot
from tensorforge.memory.traces.torch_snapshot import (
    load_trace,
    snapshot_of_replay,
    trace_of_snapshot,
)


def cuda_snapshot():
    """What `torch.cuda.memory._dump_snapshot` writes, cut down."""
    frames = [{"name": "forward", "filename": "model.py", "line": 12}]
    return {
        "segments": [
            {
                "device": 0,
                "address": 4096,
                "total_size": 8192,
                "blocks": [
                    {"size": 1024, "state": "active_allocated", "frames": frames},
                    {"size": 2048, "state": "active_allocated", "frames": []},
                    {"size": 5120, "state": "inactive"},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": "segment_alloc", "addr": 4096, "size": 8192, "time_us": 10},
                {"action": "alloc", "addr": 5120, "size": 2048, "time_us": 20, "frames": frames},
                {"action": "free_requested", "addr": 9000, "size": 64, "time_us": 30},
                {"action": "free_completed", "addr": 9000, "size": 64, "time_us": 30},
            ]
        ],
    }


def test_a_cuda_snapshot_becomes_a_trace_with_what_was_there_before(tmp_path):
    path = tmp_path / "cuda.pickle"
    path.write_bytes(pickle.dumps(cuda_snapshot()))
    trace = load_trace(path)
    assert trace.name == "cuda"
    assert [(event.size, event.label) for event in trace.events] == [
        (64, ""),
        (1024, "forward (model.py:12)"),
        (2048, "forward (model.py:12)"),
        (-64, ""),
    ]
    with pytest.raises(NotFoundError, match="device 3"):
        load_trace(path, device=3)


class Attack:
    def __reduce__(self):
        return (os.system, ("true",))


def test_a_snapshot_that_names_code_is_refused_unexecuted(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [Attack()]}))
    with pytest.raises(EncodingError, match=r"names (posix|nt|os)\.system"):
        load_trace(path)


def test_a_snapshot_without_its_parts_is_refused():
    with pytest.raises(EncodingError, match="not a memory snapshot"):
        trace_of_snapshot({"device_traces": [[{"action": "alloc"}]], "segments": []})


def test_pytorchs_viewer_opens_our_snapshot(tmp_path):
    from torch.cuda import _memory_viz

    trace = trace_of((0, 4096, "aten::mm"), (1, 512, "aten::add"), (0, -4096), (2, 700, "aten::mm"))
    path = tmp_path / "ours.pickle"
    save_snapshot(snapshot_of_replay(trace, replay_trace(trace, "best-fit")), path)
    snapshot = pickle.loads(path.read_bytes())
    assert "MemoryViz" in _memory_viz.trace_plot(snapshot)
    assert "MemoryViz" in _memory_viz.segment_plot(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "total_allocated: 1.2KiB" in _memory_viz.segsum(snapshot)
