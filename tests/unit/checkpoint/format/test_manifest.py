import contextlib
import json
import time
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.checkpoint.models import build_normalized

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    CompressionLevel,
    DistributedCheckpoint,
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
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.errors import TensorForgeError
from tensorforge.storage.memory_store import MemoryStore

pytestmark = pytest.mark.may_leak("files", "torch.optim makes the cache folder of torch's compiler")


def test_a_newer_format_is_refused_by_name_and_an_unknown_codec_too():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, _ = build_normalized(0)
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
    model, _ = build_normalized(0)
    checkpoint.save(model, options=SaveOptions(checkpoint_prefix="c"))
    store.write("d.metadata.json", store.read("c.metadata.json"))
    with pytest.raises(CheckpointError, match="manifest of another checkpoint"):
        checkpoint.load(model, options=LoadOptions(checkpoint_prefix="d"))


@pytest.fixture(scope="module")
def sample():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    model, optimizer = build_normalized(0)
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
