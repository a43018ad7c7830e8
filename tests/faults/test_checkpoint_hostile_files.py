"""Shard headers and frames with anything in them: read or refused, in bounded memory, and nothing is run.

Two kinds of headers are read: those of compressed frames, through a manifest that vouches for them, and those
of safetensors files, which `convert` takes from anywhere.
"""

import contextlib
import json
import os
import resource
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tensorforge.checkpoint import (
    CheckpointFormat,
    CheckpointValidator,
    CompressionLevel,
    DistributedCheckpoint,
    EveryByteIsIntact,
    LoadOptions,
    SaveOptions,
    SingleProcess,
)
from tensorforge.checkpoint.foreign_formats import import_foreign
from tensorforge.checkpoint.format.manifest import checksum, encode_manifest
from tensorforge.checkpoint.full_state import read_full_state
from tensorforge.checkpoint.store_index import read_manifest
from tensorforge.cli.main import app
from tensorforge.errors import TensorForgeError
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

ROOM = 200 << 20
MAGIC = (0xFD2FB528).to_bytes(4, "little")
SOAK_SECONDS = 120


class State:
    def __init__(self):
        self.tensors = {
            "a": torch.arange(3000, dtype=torch.float32),
            "b": torch.zeros(40, 50),
            "c": torch.arange(7, dtype=torch.int8),
        }

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state


@contextlib.contextmanager
def bounded():
    """What happens inside is quick, small, and fails in no other way than ours."""
    started = time.monotonic()
    tracemalloc.start()
    try:
        with contextlib.suppress(TensorForgeError):
            yield
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < ROOM
    assert time.monotonic() - started < 60


def sample():
    store = MemoryStore()
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    options = SaveOptions(checkpoint_prefix="c", compression_level=CompressionLevel.FAST)
    checkpoint.save(State(), options=options)
    return store


def with_frame(store, name, frame, codec, digest):
    """A checkpoint whose tensor `name` is a frame of our making, and whose manifest vouches for it."""
    manifest = read_manifest(store, "c")
    tensor = manifest.tensors[name]
    chunk = tensor.chunks[0]
    entry = manifest.files[chunk.data.file]
    content = store.read(entry.key)
    data = msgspec.structs.replace(
        chunk.data,
        start=len(content),
        length=len(frame),
        checksum=checksum(frame),
        codec=codec,
        digest=digest or chunk.data.content,
    )
    changed = msgspec.structs.replace(chunk, data=data)
    tensors = {**manifest.tensors, name: msgspec.structs.replace(tensor, chunks=(changed,))}
    files = tuple(
        msgspec.structs.replace(file, size=file.size + len(frame)) if file is entry else file
        for file in manifest.files
    )
    made = MemoryStore()
    made.write(entry.key, content + frame)
    new = msgspec.structs.replace(manifest, files=files, tensors=tensors)
    made.write("c.metadata.json", encode_manifest(new))
    return made


def read_in_every_way(store):
    """load, verify, and what convert and show do."""
    with bounded():
        options = LoadOptions(checkpoint_prefix="c")
        DistributedCheckpoint(SingleProcess(), store).load(State(), options=options)
    with bounded():
        CheckpointValidator(store, [EveryByteIsIntact()]).validate("c")
    with bounded():
        read_full_state(store, "c")
    with bounded():
        read_manifest(store, "c")


def compressed(content):
    return zstandard.ZstdCompressor(level=1).compress(content)


SKIPPABLE = struct.pack("<II", 0x184D2A50, 12_000) + bytes(12_000)
"""A frame that promises 12,000 bytes and holds none."""

lying = st.builds(
    lambda flags, window, size, rest: MAGIC + bytes([0b1110_0000 | flags, window]) + size + rest,
    st.integers(0, 31),
    st.integers(0, 255),
    st.sampled_from([12_000, 8_000, 7, 0, 2**32, 2**40, 2**63, 2**64 - 1]).map(
        lambda n: n.to_bytes(8, "little")
    ),
    st.binary(max_size=40),
)
valid = st.sampled_from(
    [compressed(bytes(size)) for size in (0, 7, 8_000, 12_000, 12_001, 4 << 20, 64 << 20)]
)
broken = st.builds(
    lambda frame, at, bits, cut: bytes(
        byte ^ (bits if index == at else 0) for index, byte in enumerate(frame[:cut])
    ),
    st.just(compressed(State().tensors["a"].numpy().tobytes())),
    st.integers(0, 20),
    st.integers(0, 255),
    st.integers(0, 20_000),
)
frames = st.one_of(
    st.binary(max_size=60), lying, valid, broken, st.just(SKIPPABLE), valid.map(lambda f: f + f)
)
frame_cases = {
    "name": st.sampled_from(["model/a", "model/b", "model/c"]),
    "frame": frames,
    "codec": st.sampled_from(["grouped-zstd", "xor-grouped-zstd", "raw"]),
    "digest": st.sampled_from([None, "0" * 32, checksum(bytes(12_000)), checksum(bytes(8_000))]),
}


@settings(max_examples=150)
@given(**frame_cases)
def test_a_frame_with_any_header_is_decoded_or_refused(name, frame, codec, digest):
    store = with_frame(sample(), name, frame, codec, digest)
    read_in_every_way(store)


def test_a_frame_that_unpacks_to_gigabytes_is_refused_before_it_does():
    bomb = compressed(bytes(1 << 30))
    assert len(bomb) < 1 << 20
    store = with_frame(sample(), "model/a", bomb, "grouped-zstd", None)
    read_in_every_way(store)
    report = CheckpointValidator(store, [EveryByteIsIntact()]).validate("c")
    assert "the frame declares 1073741824 bytes instead of 12000" in report.summary()


def test_a_long_chain_of_differences_is_followed_without_recursion():
    store = sample()
    manifest = read_manifest(store, "c")
    tensor = manifest.tensors["model/c"]
    zeros = compressed(bytes(7))
    content = bytes(range(7))
    digest = checksum(content)
    key = manifest.files[tensor.chunks[0].data.file].key
    start = len(store.read(key))
    place = {"file": tensor.chunks[0].data.file}
    data = {**place, "start": start, "length": 7, "checksum": digest}
    link = {
        **place,
        "start": start + 7,
        "length": len(zeros),
        "checksum": checksum(zeros),
        "codec": "xor-grouped-zstd",
        "digest": digest,
    }
    for _ in range(150):
        data = {**link, "base": data}
    body = json.loads(msgspec.json.encode(manifest))
    body["tensors"]["model/c"]["chunks"][0]["data"] = data
    body["files"][place["file"]]["size"] += 7 + len(zeros)
    store.write(key, store.read(key) + content + zeros)
    text = json.dumps(body).encode()
    head = b'{"checksum":"xxh3_128:' + checksum(text).encode() + b'","body":'
    store.write("c.metadata.json", head + text + b"}")
    state = State()
    DistributedCheckpoint(SingleProcess(), store).load(state)
    assert state.tensors["c"].tolist() == list(range(7))


def test_a_header_as_long_as_a_huge_file_is_not_held_in_memory(tmp_path):
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path)) as checkpoint:
        checkpoint.save(State(), options=SaveOptions(checkpoint_prefix="c"))
    store = LocalStore(tmp_path)
    manifest = read_manifest(store, "c")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 30)
    entry = msgspec.structs.replace(manifest.files[0], key="huge", size=1 << 30, header=1 << 30)
    changed = msgspec.structs.replace(manifest, files=(*manifest.files, entry))
    store.write("c.metadata.json", encode_manifest(changed))
    with bounded():
        CheckpointValidator(store).validate("c")
    store.close()


def header(entries, *, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


numbers = st.one_of(
    st.integers(-5, 40),
    st.sampled_from([-(2**63), 2**31, 2**40, 2**63 - 1, 2**64, 1e300, None, "4"]),
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ["F32", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "C64", "O", "", "__import__", 3, None]
        ),
        "shape": st.one_of(st.lists(numbers, max_size=4), numbers),
        "data_offsets": st.one_of(st.lists(numbers, max_size=3), numbers),
    }
)
headers = st.dictionaries(
    st.one_of(st.text(max_size=8), st.sampled_from(["a", "__metadata__", "../x", "optimizer/"])),
    st.one_of(entries, numbers, st.dictionaries(st.text(max_size=4), st.text(max_size=4))),
    max_size=4,
)
safetensors_files = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda entries, data, length: header(entries, data=data, length=length),
        st.one_of(headers, st.binary(max_size=40)),
        st.binary(max_size=64),
        st.one_of(
            st.none(), st.sampled_from([0, 1, 10**8, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1])
        ),
    ),
    st.integers(1, 60).map(
        lambda n: header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})[:n]
    ),
    st.sampled_from(
        [
            header(b"[" * 100_000 + b"]" * 100_000),
            header(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
            header(b'{"a":1' + b"0" * 1_000_000 + b"}"),
            header(b'{"a":"' + b"\\u0041" * 200_000 + b'"}'),
            header(
                {
                    "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                    "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
                },
                data=bytes(24),
            ),
            header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
            header({"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}),
        ]
    ),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=safetensors_files)
def test_a_safetensors_file_with_any_header_is_converted_or_refused(tmp_path, content):
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with bounded():
        import_foreign(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=200), safetensors_files))
def test_a_torch_file_with_anything_in_it_is_converted_or_refused(tmp_path, content):
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    with bounded():
        import_foreign(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.one_of(
        st.binary(max_size=60),
        headers.map(lambda value: json.dumps({"weight_map": value}).encode()),
        st.sampled_from(
            [
                b'{"weight_map":{"a":"../outside.safetensors"}}',
                b'{"weight_map":{"a":"file\\u0000.safetensors"}}',
                b'{"weight_map":{"a":"' + b"x" * 300 + b'"}}',
                b'{"weight_map":{"a":"missing.safetensors"}}',
                b'{"weight_map":' + b"[" * 100_000 + b"}",
            ]
        ),
    )
)
def test_an_index_with_anything_in_it_is_converted_or_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with bounded():
        import_foreign(tmp_path)


def test_a_shard_whose_header_was_changed_is_refused_by_load_and_verify():
    for layout in CheckpointFormat:
        store = MemoryStore()
        checkpoint = DistributedCheckpoint(SingleProcess(), store)
        checkpoint.save(State(), options=SaveOptions(checkpoint_prefix="c", format=layout))
        manifest = read_manifest(store, "c")
        entry = next(file for file in manifest.files if file.key.endswith(".safetensors"))
        content = store.read(entry.key)
        text = content[8 : entry.header].replace(b'"F32"', b'"I32"')
        store.write(entry.key, content[:8] + text + content[entry.header :])
        with pytest.raises(TensorForgeError, match="its header has changed"):
            checkpoint.load(State(), options=LoadOptions(checkpoint_prefix="c"))
        assert not CheckpointValidator(store, [EveryByteIsIntact()]).validate("c").is_valid


@pytest.mark.parametrize(
    "content", [b"", header({}, length=2**40), header(b"[" * 100_000), header(b"nonsense")]
)
def test_the_command_line_refuses_a_bad_file_without_a_traceback(tmp_path, content):
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    words = ["checkpoint", "convert", str(path), "new", "--store", str(tmp_path / "store")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit | TensorForgeError)
    assert not list((tmp_path / "store").rglob("*.json"))


def test_the_worst_cases_fit_into_a_small_address_space(tmp_path):
    child(tmp_path, 5)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_cases_fit_into_a_small_address_space(tmp_path):
    child(tmp_path, SOAK_SECONDS)


def child(folder, seconds):
    command = [sys.executable, __file__, str(folder), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)


def main(folder, seconds):
    """Everything above, in a process that may not grow by more than a gigabyte."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    read_in_every_way(sample())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    ends, count = time.monotonic() + seconds, 0
    original = sample()
    path = folder / "file.safetensors"

    @settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(content=safetensors_files, **frame_cases)
    def both(content, name, frame, codec, digest):
        nonlocal count
        count += 1
        read_in_every_way(with_frame(original, name, frame, codec, digest))
        path.write_bytes(content)
        with bounded():
            import_foreign(path)

    while time.monotonic() < ends:
        both()
    print(count, "cases, peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "MiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
