"""Other libraries read what a checkpoint stores: safetensors and transformers."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from tests.unit.checkpoint.models import same, trained
from tests.unit.checkpoint.tied_weights import Tied, save

from tensorforge.checkpoint import (
    CheckpointFormat,
    DistributedCheckpoint,
    SaveOptions,
    SingleProcess,
)
from tensorforge.storage.local_store import LocalStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


@pytest.fixture
def checkpoint(tmp_path):
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path / "ckpt")) as made:
        yield made


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
