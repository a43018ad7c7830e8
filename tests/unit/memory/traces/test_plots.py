import pytest
from tests.unit.memory.traces.making import trace_of

from tensorforge.errors import InvalidInputError, UnavailableError
from tensorforge.memory import AllocationTrace, replay_trace, save_plot


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
