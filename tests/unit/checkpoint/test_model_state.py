import pytest
import torch
from tests.unit.checkpoint.tied_weights import Tied, save

from tensorforge.checkpoint import CheckpointFormat, CompressionLevel, LoadOptions, TensorShard
from tensorforge.checkpoint.format.manifest import encode_manifest
from tensorforge.checkpoint.full_state import read_full_state
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


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
