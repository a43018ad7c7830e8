import pytest

from tensorforge.errors import NotFoundError
from tensorforge.memory import open_trace
from tensorforge.memory.traces.bundled_traces import bundled_trace, bundled_traces


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
