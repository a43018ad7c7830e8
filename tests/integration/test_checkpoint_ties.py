"""Tied weights: one memory with two names is written once and comes back under both."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from tensorforge.checkpoint import (
    CheckpointFormat,
    CompressionLevel,
    DistributedCheckpoint,
    LoadOptions,
    SaveOptions,
    SingleProcess,
    TensorShard,
)
from tensorforge.checkpoint.foreign_formats import export_foreign, import_foreign
from tensorforge.checkpoint.format.boxes import TensorBox
from tensorforge.checkpoint.format.manifest import encode_manifest
from tensorforge.checkpoint.full_state import read_full_state, write_full_state
from tensorforge.checkpoint.save.assignment import agreed_ties
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


class Tied(nn.Module):
    def __init__(self, seed, *, tied=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, index):
        return self.head(self.body(self.embed(index)))


def save(store, model, optimizer=None, **options):
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    checkpoint.save(model, optimizer, SaveOptions(checkpoint_prefix="c", **options))
    return checkpoint


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("layout", CheckpointFormat)
def test_tied_weights_are_written_once_and_loaded_under_both_names(layout, level):
    store = MemoryStore()
    model = Tied(0)
    checkpoint = save(store, model, format=layout, compression_level=level)
    manifest = read_manifest(store, "c")
    both = [manifest.tensors[f"model/{name}.weight"] for name in ("embed", "head")]
    assert both[0] == both[1]
    ends = {c.data.start + c.data.length for t in manifest.tensors.values() for c in t.chunks}
    data = sum(file.size - file.header for file in manifest.files)
    if level is CompressionLevel.NONE:
        assert data == sum(
            t.nbytes for n, t in manifest.tensors.items() if n != "model/head.weight"
        )
    assert len(ends) <= len(manifest.tensors) - 1
    for target in (Tied(1), Tied(1, tied=False)):
        checkpoint.load(target)
        assert torch.equal(target.embed.weight, model.embed.weight)
        assert torch.equal(target.head.weight, model.embed.weight)
    assert torch.equal(read_full_state(store, "c").model["head.weight"], model.embed.weight)


def test_an_optimizer_of_tied_weights_goes_on_where_it_was():
    store = MemoryStore()
    model = Tied(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)).sum().backward()
    optimizer.step()
    checkpoint = save(store, model, optimizer)
    other = Tied(1)
    restored = torch.optim.AdamW(other.parameters())
    checkpoint.load(other, restored)
    for each, its in ((model, optimizer), (other, restored)):
        its.zero_grad()
        each(torch.arange(7)).sum().backward()
        its.step()
    assert torch.equal(model.head.weight, other.head.weight)
    assert other.head.weight is other.embed.weight


def test_weights_that_are_equal_but_not_tied_are_written_apart():
    model = Tied(0, tied=False)
    model.head.weight.data.copy_(model.embed.weight.data)
    store = MemoryStore()
    save(store, model)
    tensors = read_manifest(store, "c").tensors
    assert tensors["model/embed.weight"] != tensors["model/head.weight"]


def test_another_view_of_the_same_memory_is_not_a_tie():
    weight = torch.arange(12.0).reshape(3, 4)
    state = {"a": weight, "flat": weight.view(-1), "row": weight[0], "turned": weight.T}

    class Views:
        def state_dict(self):
            return state

        def load_state_dict(self, loaded):
            self.loaded = loaded

    store = MemoryStore()
    checkpoint = save(store, Views())
    target = Views()
    checkpoint.load(target)
    assert all(torch.equal(target.loaded[name], tensor) for name, tensor in state.items())


def test_a_single_file_with_ties_is_read_by_safetensors(tmp_path):
    model = Tied(0)
    save(LocalStore(tmp_path), model, format=CheckpointFormat.SINGLE_FILE, include_rng_state=False)
    path = tmp_path / "c.safetensors"
    assert set(load_file(path)) == {"embed.weight", "body.weight", "body.bias"}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = Tied(1)
    load_model(other, path)
    assert torch.equal(other.head.weight, model.head.weight)


def test_a_consolidated_checkpoint_with_ties_is_read_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # it starts a thread
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save(LocalStore(tmp_path), model, format=CheckpointFormat.CONSOLIDATED)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    sizes = sum(p.nbytes for p in model.parameters())
    assert index["metadata"]["total_size"] == sizes
    config.save_pretrained(tmp_path / "c")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_manifest_from_before_ties_still_loads():
    store = MemoryStore()
    model = Tied(0, tied=False)
    checkpoint = save(store, model)
    document = encode_manifest(read_manifest(store, "c"))
    store.write("c.metadata.json", document)
    target = Tied(1, tied=False)
    checkpoint.load(target)
    assert torch.equal(target.head.weight, model.head.weight)
    missing = Tied(1)
    result = checkpoint.load(missing, options=LoadOptions(strict_mode=False))
    assert not result.mismatch


def test_parts_of_a_tied_tensor_are_tied_on_every_rank():
    part = torch.arange(6.0).reshape(3, 2)

    class Half:
        def __init__(self, content):
            self.content = content

        def state_dict(self):
            shard = TensorShard(self.content, (0, 0), (3, 2))
            return {"a": shard, "b": TensorShard(self.content, (0, 0), (3, 2))}

        def load_state_dict(self, state):
            self.loaded = state

    store = MemoryStore()
    checkpoint = save(store, Half(part))
    tensors = read_manifest(store, "c").tensors
    assert tensors["model/a"] == tensors["model/b"]
    target = Half(torch.zeros(3, 2))
    checkpoint.load(target)
    assert torch.equal(target.loaded["b"], part)


@given(st.data())
def test_a_tie_counts_only_if_every_rank_that_holds_something_has_it(data):
    ranks = data.draw(st.integers(1, 4))
    holdings, ties, verdicts = [], [], []
    for _ in range(ranks):
        rows = data.draw(st.integers(0, 2))
        tied = data.draw(st.booleans()) if rows else False
        holdings.append([TensorBox(name, "F32", (8,), (0,), (rows,)) for name in ("a", "b")])
        ties.append({"b": "a"} if tied else {})
        verdicts += [tied] if rows else []
    expected = {"b": "a"} if verdicts and all(verdicts) else {}
    assert agreed_ties(holdings, ties) == expected


@pytest.mark.parametrize("kind", ["torch", "safetensors", "huggingface"])
def test_tied_weights_go_to_other_formats_and_come_back_tied(tmp_path, kind):
    store = LocalStore(tmp_path / "store")
    save(store, Tied(0))
    path = tmp_path / {"torch": "model.pt", "safetensors": "m.safetensors"}.get(kind, "folder")
    export_foreign(read_full_state(store, "c"), path, kind)
    write_full_state(store, import_foreign(path), SaveOptions(checkpoint_prefix="back"))
    before, after = (read_manifest(store, prefix) for prefix in ("c", "back"))
    names = ("model/embed.weight", "model/head.weight")
    assert after.tensors[names[0]] == after.tensors[names[1]]
    contents = [
        [chunk.data.content for name in names for chunk in manifest.tensors[name].chunks]
        for manifest in (before, after)
    ]
    assert contents[0] == contents[1]
    store.close()


@pytest.mark.parametrize("layout", [CheckpointFormat.SINGLE_FILE, CheckpointFormat.CONSOLIDATED])
def test_a_file_that_holds_a_tied_weight_once_is_imported_under_both_names(tmp_path, layout):
    store = LocalStore(tmp_path)
    save(store, Tied(0), format=layout)
    single = layout is CheckpointFormat.SINGLE_FILE
    found = import_foreign(tmp_path / "c.safetensors" if single else tmp_path / "c").model
    assert found["head.weight"] is found["embed.weight"]
    assert set(found) >= {"embed.weight", "head.weight", "body.weight", "body.bias"}
    store.close()
