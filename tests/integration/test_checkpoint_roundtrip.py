"""Saving and loading in one process: every format, level and option."""

import json
import random
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFormat,
    CheckpointOptions,
    CompressionLevel,
    DistributedCheckpoint,
    Finding,
    LoadOptions,
    RandomStateOutcome,
    SaveOptions,
    Severity,
    SingleProcess,
    StaleSaveWarning,
    StorageOptions,
)
from tensorforge.errors import ConfigurationError
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def build(seed=0, width=64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train(model, optimizer, steps=2):
    for step in range(steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()


def trained(seed=0, make=torch.optim.AdamW, **options):
    model = build(seed)
    optimizer = make(model.parameters(), **(options or {"lr": 0.01}))
    train(model, optimizer)
    return model, optimizer


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def checkpoint(tmp_path):
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path / "ckpt")) as made:
        yield made


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


def test_a_single_file_is_read_by_plain_safetensors(checkpoint):
    model, _ = trained()
    options = SaveOptions(
        checkpoint_prefix="m", format=CheckpointFormat.SINGLE_FILE, include_rng_state=False
    )
    checkpoint.save_model_only(model, options)
    assert same(dict(model.state_dict()), load_file(checkpoint.storage.root / "m.safetensors"))


def test_a_consolidated_checkpoint_is_read_by_its_index(checkpoint):
    model, optimizer = trained()
    options = SaveOptions(checkpoint_prefix="m", format=CheckpointFormat.CONSOLIDATED)
    checkpoint.save(model, optimizer, options)
    folder = checkpoint.storage.root / "m"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state = {}
    for name, file in index["weight_map"].items():
        state[name] = load_file(folder / file)[name]
    assert same(state, dict(model.state_dict()))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in state.values())


@pytest.mark.may_leak("threads", "the progress bars of transformers keep a monitor")
def test_transformers_reads_a_consolidated_checkpoint(checkpoint):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    model = transformers.GPT2Model(config)
    options = SaveOptions(checkpoint_prefix="hf", format=CheckpointFormat.CONSOLIDATED)
    checkpoint.save_model_only(model, options)
    folder = checkpoint.storage.root / "hf"
    config.save_pretrained(folder)
    loaded = transformers.GPT2Model.from_pretrained(folder)
    assert same(model.state_dict(), loaded.state_dict())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.01}),
        (torch.optim.Adafactor, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.01}),
        (torch.optim.LBFGS, {"lr": 0.01}),
    ],
)
def test_optimizers_of_all_shapes_come_back(checkpoint, make, options):
    model = build()
    optimizer = make(model.parameters(), **options)

    def closure():
        optimizer.zero_grad()
        torch.manual_seed(7)
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    checkpoint.save(model, optimizer)
    other = build(1)
    fresh = make(other.parameters(), lr=1.0)
    checkpoint.load(other, fresh)
    assert same(optimizer.state_dict(), fresh.state_dict())


def grouped(model, *, turned=False):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
    return torch.optim.AdamW(groups[::-1] if turned else groups, lr=0.01)


def test_state_follows_the_parameters_name_not_its_place(checkpoint):
    model = build()
    optimizer = grouped(model)
    train(model, optimizer)
    checkpoint.save(model, optimizer)
    other = build(1)
    turned = grouped(other, turned=True)
    checkpoint.load(other, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.5, 0.01]
    expected = dict(zip(map(id, model.parameters()), model.named_parameters(), strict=True))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[mine], turned.state[theirs]), expected[id(mine)][0]


def test_groups_that_were_mixed_up_are_refused(checkpoint):
    model = build()
    optimizer = grouped(model)
    train(model, optimizer)
    checkpoint.save(model, optimizer)
    other = build()
    with pytest.raises(CheckpointError, match="mixes parameters of 2 saved groups"):
        checkpoint.load(other, torch.optim.AdamW(other.parameters()))


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


def test_every_disagreement_is_reported_by_name(checkpoint):
    checkpoint.save(build())
    other = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5), nn.Linear(5, 5)
    ).double()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(other)
    text = str(caught.value)
    assert caught.value.type is CheckpointErrorType.LOAD_FAILED
    assert "missing in the checkpoint: model/4.weight" in text
    assert "model/3.weight is [3, 64], not [5, 64]" in text
    assert "model/0.weight is F32, not F64" in text
    smaller = nn.Sequential(nn.Linear(8, 64))
    with pytest.raises(CheckpointError, match=r"not in the model: model/1\.bias"):
        checkpoint.load(smaller)


def test_without_strictness_what_fits_is_loaded_and_the_rest_reported(checkpoint):
    model, optimizer = trained()
    checkpoint.save(model, optimizer)
    other = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5), nn.Linear(5, 5)
    ).double()
    before = other[3].weight.clone()
    fresh = torch.optim.AdamW(other.parameters())
    result = checkpoint.load(other, fresh, LoadOptions(strict_mode=False))
    assert torch.equal(other[0].weight, model[0].weight.double())
    assert torch.equal(other[3].weight, before)
    assert "model/4.bias" in result.mismatch.missing
    assert any("model/3.bias" in text for text in result.mismatch.shapes)
    assert any("model/1.weight" in text for text in result.mismatch.dtypes)
    assert same(
        optimizer.state[model[0].weight]["exp_avg"].double(),
        fresh.state[other[0].weight]["exp_avg"],
    )


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


def test_a_module_with_loading_code_of_its_own_gets_to_run_it(checkpoint):
    class Extra(nn.Linear):
        seen = None

        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            self.seen = state

    class Hooked(Extra):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            self.loaded_from = sorted(state_dict)
            super()._load_from_state_dict(state_dict, prefix, *rest)

    for kind in (Extra, Hooked):
        saved = kind(2, 2)
        checkpoint.save(saved, options=SaveOptions(checkpoint_prefix=kind.__name__))
        loaded = kind(2, 2)
        checkpoint.load(loaded, options=LoadOptions(checkpoint_prefix=kind.__name__))
        assert loaded.seen == {"version": 3}
        assert torch.equal(saved.weight, loaded.weight)


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


def test_a_checkpoint_is_never_overwritten(checkpoint):
    options = SaveOptions(checkpoint_prefix="same")
    checkpoint.save(build(), options=options)
    with pytest.raises(CheckpointError, match="'same' exists already") as caught:
        checkpoint.save(build(1), options=options)
    assert caught.value.type is CheckpointErrorType.SAVE_FAILED
    checkpoint.load(build())


def test_checkpoints_are_listed_and_deleted(checkpoint):
    for index in range(3):
        checkpoint.save(build(index), options=SaveOptions(checkpoint_prefix=f"run/step-{index}"))
    listed = checkpoint.list_checkpoints()
    assert [info.prefix for info in listed] == ["run/step-0", "run/step-1", "run/step-2"]
    assert listed[0].world_size == 1
    assert listed[0].format == "multi_shard"
    assert listed[0].size_bytes > 1000
    checkpoint.delete_checkpoint("run/step-1")
    assert [info.prefix for info in checkpoint.list_checkpoints()] == ["run/step-0", "run/step-2"]
    keys = [blob.key for blob in checkpoint.storage.list()]
    assert not [key for key in keys if "step-1" in key]
    with pytest.raises(CheckpointError, match="there is no checkpoint 'run/step-1'"):
        checkpoint.delete_checkpoint("run/step-1")


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


def test_checkers_of_ones_own_are_asked(tmp_path):
    class OnlyFast:
        def check(self, manifest):
            if manifest.compression != "fast":
                yield Finding(Severity.ERROR, "not compressed")
            yield Finding(Severity.WARNING, "looked at")

    options = CheckpointOptions(
        storage=StorageOptions(connection_settings={"base_path": str(tmp_path)}),
        compatibility_checkers=(OnlyFast(),),
    )
    with DistributedCheckpoint.create(SingleProcess(), options) as checkpoint:
        model = build()
        prefix = checkpoint.save(model)
        with pytest.raises(CheckpointError, match="not compressed") as caught:
            checkpoint.load(model, options=LoadOptions(checkpoint_prefix=prefix))
        assert caught.value.type is CheckpointErrorType.VALIDATION_FAILED
        skip = LoadOptions(checkpoint_prefix=prefix, skip_validation=True)
        checkpoint.load(model, options=skip)
        model[0].bias.data.add_(1)
        checkpoint.save(model, options=SaveOptions(compression_level=CompressionLevel.FAST))
        with pytest.warns(UserWarning, match="looked at"):
            checkpoint.load(model)


def test_bad_options_are_refused_when_they_are_made():
    with pytest.raises(ConfigurationError, match="resharding_strategy"):
        LoadOptions(resharding_strategy="magic")
    with pytest.raises(ConfigurationError, match="timeout"):
        SaveOptions(timeout=0)
    with pytest.raises(ConfigurationError, match="format"):
        SaveOptions(format="zip")
    with pytest.raises(ConfigurationError, match="provider"):
        DistributedCheckpoint.create(
            SingleProcess(), CheckpointOptions(storage=StorageOptions(provider="floppy"))
        )
