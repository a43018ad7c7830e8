import random

import pytest
import torch
from tests.unit.checkpoint.models import build_normalized

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CheckpointFallbackWarning,
    CheckpointFormat,
    CheckpointValidator,
    CompressionLevel,
    DistributedCheckpoint,
    EveryByteIsIntact,
    LoadOptions,
    SaveOptions,
    SingleProcess,
)
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def same(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def flip(store, key, position, bit):
    content = bytearray(store.read(key))
    content[position] ^= 1 << bit
    store.write(key, bytes(content))


@pytest.mark.parametrize("level", [CompressionLevel.NONE, CompressionLevel.FAST])
@pytest.mark.parametrize("layout", CheckpointFormat)
def test_a_flipped_bit_anywhere_is_found_and_the_older_checkpoint_is_loaded(layout, level):
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    old, old_optimizer = build_normalized(0)
    checkpoint.save(old, old_optimizer, SaveOptions(checkpoint_prefix="old"))
    new, new_optimizer = build_normalized(1)
    options = SaveOptions(checkpoint_prefix="new", format=layout, compression_level=level)
    checkpoint.save(new, new_optimizer, options)
    target, optimizer = build_normalized(2)
    files = [blob for blob in store.list() if blob.key.startswith("new")]
    assert any(blob.key == "new.metadata.json" for blob in files)
    dice = random.Random(layout.value + level.value)
    for blob in files:
        for _ in range(12):
            position, bit = dice.randrange(blob.size), dice.randrange(8)
            flip(store, blob.key, position, bit)
            with pytest.warns(CheckpointFallbackWarning, match="loaded old instead"):
                result = checkpoint.load(target, optimizer)
            assert same(target, old)
            assert result.manifest.prefix == "old"
            assert [item.prefix for item in result.rejected] == ["new"]
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(target, optimizer, LoadOptions(checkpoint_prefix="new"))
            assert caught.value.type is CheckpointErrorType.CORRUPTED_CHECKPOINT
            assert blob.key in str(caught.value)
            flip(store, blob.key, position, bit)
    result = checkpoint.load(target, optimizer)
    assert result.manifest.prefix == "new"
    assert same(target, new)


def test_a_damaged_tensor_is_named():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, optimizer = build_normalized(0)
    checkpoint.save(model, optimizer, SaveOptions(checkpoint_prefix="c"))
    manifest = read_manifest(store, "c")
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            key = manifest.files[chunk.data.file].key
            flip(store, key, chunk.data.start, 3)
            with pytest.raises(CheckpointError) as caught:
                checkpoint.load(model, optimizer)
            assert repr(name) in str(caught.value)
            assert key in str(caught.value)
            assert caught.value.checkpoint_path in (key, "c.metadata.json")
            report = CheckpointValidator(store, [EveryByteIsIntact()]).validate("c")
            assert not report.is_valid
            assert repr(name) in report.summary()
            flip(store, key, chunk.data.start, 3)
    assert CheckpointValidator(store, [EveryByteIsIntact()]).validate("c").is_valid


@pytest.mark.parametrize("change", ["delete", "cut", "grow", "empty"])
def test_a_file_that_is_missing_or_has_another_length_is_found(change):
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, _ = build_normalized(0)
    checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
    key = next(blob.key for blob in store.list("c/"))
    content = store.read(key)
    store.delete(key)
    if change != "delete":
        store.write(key, {"cut": content[:-1], "grow": content + b"x", "empty": b""}[change])
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(model)
    assert caught.value.type is CheckpointErrorType.CORRUPTED_CHECKPOINT
    assert key in str(caught.value)
