"""A caller's extra state travels with the checkpoint, tensors and Python's types included."""

from collections import Counter

import pytest
import torch

from tensorforge.checkpoint import (
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    SingleProcess,
)
from tensorforge.errors import CheckpointError
from tensorforge.storage.memory_store import MemoryStore

EXTRA = {
    "ema": {"weight": torch.arange(6.0).reshape(2, 3), "empty": torch.empty(0)},
    "milestones": Counter({10: 2, 20: 1}),
    "position": (3, b"\x00\xff", float("inf"), 1 << 60, torch.float16),
    "nothing": None,
}


@pytest.mark.parametrize("layout", list(CheckpointFormat))
@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
def test_extra_state_comes_back_as_it_was(layout, level):
    model = torch.nn.Linear(3, 2)
    options = SaveOptions(
        checkpoint_prefix="c", format=layout, compression_level=level, extra_state=EXTRA
    )
    with DistributedCheckpoint(SingleProcess(), MemoryStore("extra")) as checkpoint:
        checkpoint.save(model, None, options)
        loaded = checkpoint.load(model, None, LoadOptions(checkpoint_prefix="c")).extra_state
    assert torch.equal(loaded["ema"]["weight"], EXTRA["ema"]["weight"])
    assert loaded["ema"]["empty"].shape == (0,)
    assert type(loaded["milestones"]) is Counter
    assert loaded["milestones"] == EXTRA["milestones"]
    assert (loaded["position"], loaded["nothing"]) == (EXTRA["position"], None)


def test_a_checkpoint_without_extra_state_has_an_empty_one():
    model = torch.nn.Linear(3, 2)
    with DistributedCheckpoint(SingleProcess(), MemoryStore("extra")) as checkpoint:
        checkpoint.save(model)
        assert checkpoint.load(model).extra_state == {}


def test_a_models_tensor_cannot_be_taken_for_extra_state():
    class Odd(dict):
        def state_dict(self):
            return {"extra/x": torch.zeros(1)}

    with (
        DistributedCheckpoint(SingleProcess(), MemoryStore("extra")) as checkpoint,
        pytest.raises(CheckpointError, match="may not be called that"),
    ):
        checkpoint.save(Odd())
