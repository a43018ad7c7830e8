"""Every flipped bit is found; nothing that a file can contain crashes a reader."""

import contextlib
import json
import random
import time
import tracemalloc

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

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
from tensorforge.checkpoint.format.manifest import (
    checksum,
    decode_manifest,
    encode_manifest,
    summarize_manifest,
)
from tensorforge.checkpoint.store_index import list_with_damaged, read_manifest
from tensorforge.errors import TensorForgeError
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


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
    old, old_optimizer = build(0)
    checkpoint.save(old, old_optimizer, SaveOptions(checkpoint_prefix="old"))
    new, new_optimizer = build(1)
    options = SaveOptions(checkpoint_prefix="new", format=layout, compression_level=level)
    checkpoint.save(new, new_optimizer, options)
    target, optimizer = build(2)
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
    model, optimizer = build(0)
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
    model, _ = build(0)
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


def test_a_newer_format_is_refused_by_name_and_an_unknown_codec_too():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, _ = build(0)
    checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
    manifest = read_manifest(store, "c")
    store.write("c.metadata.json", encode_manifest(msgspec.structs.replace(manifest, version=2)))
    with pytest.raises(
        CheckpointError, match="has format version 2; this release reads 1 to 1"
    ) as caught:
        checkpoint.load(model, options=LoadOptions(checkpoint_prefix="c"))
    assert caught.value.type is CheckpointErrorType.INCOMPATIBLE_VERSION
    name, tensor = next(iter(manifest.tensors.items()))
    data = msgspec.structs.replace(tensor.chunks[0].data, codec="magic", digest="0" * 32)
    chunk = msgspec.structs.replace(tensor.chunks[0], data=data)
    tensors = {**manifest.tensors, name: msgspec.structs.replace(tensor, chunks=(chunk,))}
    changed = msgspec.structs.replace(manifest, tensors=tensors)
    store.write("c.metadata.json", encode_manifest(changed))
    with pytest.raises(CheckpointError, match="unknown codec 'magic'"):
        checkpoint.load(model, options=LoadOptions(checkpoint_prefix="c"))


def test_a_manifest_under_another_name_is_refused():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, _ = build(0)
    checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
    store.write("d.metadata.json", store.read("c.metadata.json"))
    with pytest.raises(CheckpointError, match="manifest of another checkpoint"):
        checkpoint.load(model, options=LoadOptions(checkpoint_prefix="d"))


def test_a_list_tells_intact_manifests_from_others():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    for seed, prefix in enumerate(("b", "a", "damaged", "moved", "newer")):
        checkpoint.save(build(seed)[0], options=SaveOptions(checkpoint_prefix=prefix))
    store.write("damaged.metadata.json", store.read("damaged.metadata.json")[:-1])
    store.write("moved.metadata.json", store.read("a.metadata.json"))
    newer = msgspec.structs.replace(read_manifest(store, "newer"), version=2)
    store.write("newer.metadata.json", encode_manifest(newer))
    intact, others = list_with_damaged(store)
    assert [info.prefix for info in intact] == ["b", "a"]
    assert others == ["damaged", "moved", "newer"]
    manifest = read_manifest(store, "b")
    assert intact[0].size_bytes == manifest.size_bytes
    assert intact[0].timestamp == manifest.created_at


@pytest.fixture(scope="module")
def sample():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, optimizer = build(0)
    options = SaveOptions(checkpoint_prefix="c", compression_level=CompressionLevel.FAST)
    checkpoint.save(model, optimizer, options)
    body = json.loads(store.read("c.metadata.json"))["body"]
    return store, body, model, optimizer


def sealed(body):
    text = json.dumps(body).encode()
    return b'{"checksum":"xxh3_128:' + checksum(text).encode() + b'","body":' + text + b"}"


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=10),
    st.sampled_from(
        ["../../etc/passwd", "/etc/passwd", "c", "raw", "grouped-zstd", "F32", "$tensor"]
    ),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree, path=()):
    """Every place in a JSON document."""
    yield path
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


@settings(max_examples=250)
@given(st.data())
def test_a_manifest_with_anything_in_any_place_is_read_or_refused(sample, data):
    store, body, model, optimizer = sample
    body = json.loads(json.dumps(body))
    everywhere = list(places(body))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(everywhere))
        if not path:
            continue
        inside = body
        with contextlib.suppress(KeyError, IndexError, TypeError):
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = data.draw(values)
    changed = MemoryStore()
    for blob in store.list():
        changed.write(blob.key, store.read(blob.key))
    changed.write("c.metadata.json", sealed(body))
    started = time.monotonic()
    tracemalloc.start()
    try:
        options = LoadOptions(checkpoint_prefix="c", strict_mode=False)
        checkpoint = DistributedCheckpoint(SingleProcess(), changed)
        assert len(checkpoint.list_checkpoints()) <= 1
        checkpoint.load(model, optimizer, options)
    except TensorForgeError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 200 << 20
    assert time.monotonic() - started < 60


@settings(max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=300), values.map(lambda v: json.dumps(v).encode()), values.map(sealed)
    )
)
def test_any_bytes_are_a_manifest_or_refused(document):
    for read in (decode_manifest, summarize_manifest):
        with contextlib.suppress(CheckpointError):
            read(document, "c.metadata.json")


def test_a_deeply_nested_manifest_is_refused():
    for inner in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        text = f'{{"version":1,"state":{inner}}}'.encode()
        document = b'{"checksum":"xxh3_128:' + checksum(text).encode() + b'","body":' + text + b"}"
        for read in (decode_manifest, summarize_manifest):
            with pytest.raises(CheckpointError):
                read(document, "c.metadata.json")
