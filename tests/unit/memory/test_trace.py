import math
import os
import pickle

import pytest

from tensorforge.errors import EncodingError, InvalidInputError, NotFoundError, UnavailableError
from tensorforge.memory import AllocationTrace, open_trace, replay_trace, save_plot, save_snapshot
from tensorforge.memory.pool.placement_policies import online_policy
from tensorforge.memory.traces.bundled_traces import bundled_trace, bundled_traces
from tensorforge.memory.traces.pool_advice import (
    advise_pool,
    fragmentation_sources,
    growth_per_second,
)
from tensorforge.memory.traces.torch_snapshot import (
    load_trace,
    snapshot_of_replay,
    trace_of_snapshot,
)
from tensorforge.memory.traces.trace import Event


def trace_of(*rows, name="test"):
    """Events from (block, signed size[, label]), a millisecond apart."""
    return AllocationTrace(
        (Event(n / 1000, block, size, *label) for n, (block, size, *label) in enumerate(rows)),
        name=name,
    )


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


def test_the_bundled_traces_are_real_training_runs():
    assert bundled_traces() == ("bert", "gpt2", "resnet", "vit")
    for name in bundled_traces():
        trace = bundled_trace(name)
        assert trace.name == name
        assert trace.peak_live > 40 << 20
        assert any("Optimizer.step" in life.label for life in trace.lifetimes())
    with pytest.raises(NotFoundError, match="bert, gpt2, resnet, vit"):
        bundled_trace("alexnet")
    with pytest.raises(NotFoundError, match="neither a file nor"):
        open_trace("alexnet")


def test_an_unknown_policy_is_named_with_those_there_are():
    with pytest.raises(
        NotFoundError, match="best-fit, two-ended, first-fit, tlsf, pytorch-like, offline"
    ):
        online_policy("magic")


def test_best_fit_reuses_the_hole_and_pytorchs_rules_round_to_segments():
    trace = trace_of((0, 3 << 20), (0, -(3 << 20)), (1, 2 << 20), (2, 100))
    assert replay_trace(trace, "best-fit").peak_reserved == 3 << 20
    assert replay_trace(trace, "pytorch-like").peak_reserved == (20 << 20) + (2 << 20)


def test_knowing_the_future_avoids_what_best_fit_walks_into():
    # The small block outlives the large one it follows, and stands in the way of a larger one.
    trace = trace_of((0, 4096), (1, 512), (0, -4096), (2, 8192), (1, -512), (2, -8192))
    assert replay_trace(trace, "best-fit").peak_reserved == 4096 + 512 + 8192
    assert replay_trace(trace, "offline").peak_reserved == 8704


def test_small_blocks_at_the_far_end_are_shown_at_the_end_of_the_pool():
    result = replay_trace(trace_of((0, 100), (1, 1 << 20)), "two-ended")
    assert result.position(1) == 0
    assert result.position(0) == result.peak_reserved - 512


def test_a_leak_is_found_and_an_end_predicted():
    rows = []
    for step in range(40):
        rows += [(3 * step, 8192, "work"), (3 * step + 1, 1024, "kept for ever"), (3 * step, -8192)]
    trace = trace_of(*rows)
    assert growth_per_second(trace) == pytest.approx(1024 / 0.003, rel=0.1)
    advice = advise_pool(trace, capacity=1 << 20)
    assert 1.0 < advice.oom_seconds < 4.0
    steady = trace_of(*[row for n in range(40) for row in ((n, 8192), (n, -8192))])
    assert growth_per_second(steady) == 0.0
    assert advise_pool(steady).oom_seconds == math.inf


def test_blame_falls_on_the_block_below_the_hole():
    trace = trace_of(
        (0, 4096, "big"), (1, 512, "keeper"), (2, 4096, "big"), (3, 512, "keeper"), (0, -4096),
        (2, -4096), (4, 8192, "huge"),
    )  # fmt: skip
    result = replay_trace(trace, "best-fit")
    culprits = fragmentation_sources(trace, result, len(trace) - 1)
    assert [(c.label, c.blocks, c.hole_bytes) for c in culprits] == [("keeper", 1, 4096)]


def test_a_pool_that_is_too_small_is_told_where_it_fails():
    advice = advise_pool(trace_of((0, 4096, "a"), (1, 4096, "b")), capacity=6000)
    assert not advice.fits
    assert "out of memory for 'b'" in advice.first_failure
    assert advice.pressure[2] == 1.0


def test_advice_on_nothing_is_refused():
    with pytest.raises(InvalidInputError, match="empty"):
        advise_pool(AllocationTrace([]))
    with pytest.raises(InvalidInputError, match="capacity"):
        advise_pool(trace_of((0, 1)), capacity=0)


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
    with pytest.raises(EncodingError, match=r"asks for (posix|nt|os)\.system"):
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


@pytest.mark.may_leak("descriptors", "matplotlib keeps its fonts open")
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_a_replay_can_be_drawn(tmp_path, suffix):
    trace = trace_of((0, 4096, "a"), (1, 512, "<b>"), (0, -4096), (2, 700))
    path = tmp_path / f"plot.{suffix}"
    save_plot(trace, replay_trace(trace, "best-fit"), path)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[suffix]
    assert path.read_bytes().startswith(start)


@pytest.mark.may_leak("descriptors", "matplotlib keeps its fonts open")
def test_a_plot_of_nothing_and_of_another_kind(tmp_path, monkeypatch):
    empty = AllocationTrace([])
    save_plot(empty, replay_trace(empty, "offline"), tmp_path / "empty.png")
    with pytest.raises(InvalidInputError, match=r"\.png, \.svg or \.html"):
        save_plot(empty, replay_trace(empty, "best-fit"), tmp_path / "plot.gif")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UnavailableError, match=r"tensorforge\[plot\]"):
        save_plot(empty, replay_trace(empty, "best-fit"), tmp_path / "plot.png")
