import random
import threading

import numpy as np
import pytest
import torch
from tests.unit.checkpoint.models import build, same, train, trained

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    LoadOptions,
    RandomStateOutcome,
    SaveOptions,
    SingleProcess,
    StaleSaveWarning,
)
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.mark.parametrize("level", CompressionLevel)
@pytest.mark.parametrize("layout", CheckpointFormat)
def test_what_was_saved_is_loaded_in_every_format_and_at_every_level(checkpoint, layout, level):
    model, optimizer = trained()
    prefix = checkpoint.save(model, optimizer, SaveOptions(format=layout, compression_level=level))
    other = build(seed=1)
    fresh = torch.optim.AdamW(other.parameters(), lr=1.0)
    result = checkpoint.load(other, fresh)
    assert result.manifest.prefix == prefix
    assert same(model.state_dict(), other.state_dict())
    assert same(optimizer.state_dict(), fresh.state_dict())
    assert not result.was_resharded
    assert not result.mismatch


@pytest.mark.parametrize("store", [MemoryStore, lambda: None])
def test_training_goes_on_as_if_nothing_had_happened(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with DistributedCheckpoint(SingleProcess(), store()) as checkpoint:
        model, optimizer = trained()
        checkpoint.save(model, optimizer)
        train(model, optimizer, steps=3)
        other = build(seed=1)
        resumed = torch.optim.AdamW(other.parameters())
        checkpoint.load(other, resumed)
        train(other, resumed, steps=3)
    assert same(model.state_dict(), other.state_dict())


def test_random_generators_continue_where_they_were(checkpoint):
    model = build()
    checkpoint.save(model)
    expected = (random.random(), np.random.random(), torch.rand(3))
    result = checkpoint.load(model)
    assert result.random_state is RandomStateOutcome.EXACT
    assert same(expected, (random.random(), np.random.random(), torch.rand(3)))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    skipped = checkpoint.load(model, options=LoadOptions(load_rng_state=False))
    assert skipped.random_state is RandomStateOutcome.SKIPPED
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_not_included_is_not_saved(checkpoint):
    model, optimizer = trained()
    options = SaveOptions(include_optimizer=False, include_rng_state=False)
    checkpoint.save(model, optimizer, options)
    with pytest.raises(CheckpointError, match="missing in the checkpoint: optimizer"):
        checkpoint.load(model, optimizer)
    result = checkpoint.load(model, optimizer, LoadOptions(load_optimizer=False))
    assert result.random_state is RandomStateOutcome.SKIPPED
    assert result.optimizer_state == {}


def test_custom_metadata_comes_back_with_its_types(checkpoint):
    metadata = {"step": 12, "scores": (0.5, float("inf")), "note": None, "raw": b"\0", 3: "three"}
    checkpoint.save(build(), options=SaveOptions(custom_metadata=metadata))
    assert checkpoint.load(build()).custom_metadata == metadata


class Counter:
    """Not a module: nested state, no tensors of its own to load in place."""

    def __init__(self, value=0):
        self.state = {"value": value, "history": [np.arange(3), (1, torch.ones(2))]}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_anything_with_a_state_dict_can_be_saved(checkpoint):
    checkpoint.save(Counter(5), Counter(6))
    model, other = Counter(), Counter()
    model.state["history"][0][:] = 0
    checkpoint.load(model, other)
    assert (model.state["value"], other.state["value"]) == (5, 6)
    assert model.state["history"][0].tolist() == [0, 1, 2]
    assert isinstance(model.state["history"][1], tuple)


@pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")
def test_odd_tensors_survive(checkpoint):
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "strided": torch.arange(20)[::3],
        "complex": torch.tensor([1 + 2j]),
        "bfloat16": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
        "expanded": torch.ones(1).expand(4),
    }
    for layout in CheckpointFormat:
        saved, loaded = Counter(), Counter()
        saved.state = state
        loaded.state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpoint.save(saved, options=SaveOptions(format=layout))
        checkpoint.load(loaded)
        for name, tensor in state.items():
            assert torch.equal(
                tensor.float() if name == "float8" else tensor,
                loaded.state[name].float() if name == "float8" else loaded.state[name],
            ), name


def test_progress_is_told_in_bytes_and_ends_at_the_total(checkpoint):
    model, optimizer = trained()
    calls = []
    for operation in (checkpoint.save, checkpoint.load):
        calls.clear()
        operation(model, optimizer, progress=lambda done, total: calls.append((done, total)))
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert calls[-1][0] == calls[-1][1] > 1000


def test_a_background_save_is_of_the_state_at_the_call(checkpoint):
    model, optimizer = trained()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for level in (CompressionLevel.NONE, CompressionLevel.FAST):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.0)
        handle = checkpoint.async_save(model, optimizer, SaveOptions(compression_level=level))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        handle.result()
        assert handle.is_done
        checkpoint.load(model, options=LoadOptions(checkpoint_prefix=handle.prefix))
        assert same(dict(model.state_dict()), expected)
        model[0].bias.data.add_(1)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_failed_background_save_surfaces_once_at_the_next_call(checkpoint):
    cancel = threading.Event()
    cancel.set()
    checkpoint.save(build(), options=SaveOptions(checkpoint_prefix="good"))
    with pytest.raises(CheckpointError, match="cancelled"):
        checkpoint.async_save(build(), cancel=cancel)
    blocker = threading.Event()

    def fail_later(done, total):
        blocker.wait(10)
        raise RuntimeError("the callback broke")

    checkpoint.async_save(build(1), progress=fail_later)
    blocker.set()
    with pytest.raises(CheckpointError, match="the callback broke"):
        checkpoint.load(build())
    checkpoint.load(build())
    assert [info.prefix for info in checkpoint.list_checkpoints()] == ["good"]
    assert {blob.key.split("/")[0] for blob in checkpoint.storage.list()} == {
        "good",
        "good.metadata.json",
    }


def test_saving_the_same_state_twice_warns(checkpoint):
    model = build()
    checkpoint.save(model)
    with pytest.warns(StaleSaveWarning, match="equals the checkpoint saved before"):
        checkpoint.save(model)
    model[0].bias.data.add_(1)
    checkpoint.save(model)


def test_a_cancelled_save_leaves_nothing(checkpoint):
    cancel = threading.Event()
    with pytest.raises(CheckpointError, match="cancelled"):
        checkpoint.save(build(), cancel=cancel, progress=lambda done, total: cancel.set())
    assert list(checkpoint.storage.list()) == []


def test_what_cannot_be_saved_is_refused_by_name(checkpoint):
    broken = Counter()
    broken.state["history"].append(object())
    with pytest.raises(CheckpointError, match=r"model/history\[2\] is a object"):
        checkpoint.save(broken)
    assert list(checkpoint.storage.list()) == []


def test_there_is_nothing_to_load_in_an_empty_store(checkpoint):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.load(build())
    with pytest.raises(CheckpointError, match="there is no checkpoint 'x'"):
        checkpoint.load(build(), options=LoadOptions(checkpoint_prefix="x"))
