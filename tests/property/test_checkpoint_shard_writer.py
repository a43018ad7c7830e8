"""Property tests: whatever the sizes of tensors, blocks and writes, the file and its checksums are right."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorforge.checkpoint.format import file_layout
from tensorforge.checkpoint.format.boxes import TensorBox
from tensorforge.checkpoint.format.file_layout import plan_file
from tensorforge.checkpoint.format.manifest import checksum
from tensorforge.checkpoint.parallel import ByteCounter, Deadline
from tensorforge.checkpoint.save import staging
from tensorforge.checkpoint.save.file_contents import FileContents
from tensorforge.checkpoint.save.shard_writer import write_file
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore


def _written(store: BlobStore, sizes: list[int], *, staged: bool) -> None:
    boxes = [
        TensorBox(f"model/{index}", "U8", (size,), (0,), (size,))
        for index, size in enumerate(sizes)
    ]
    plan = plan_file("file", boxes)
    generator = np.random.default_rng(len(sizes))
    contents = {
        f"model/{index}": generator.integers(0, 256, size, dtype=np.uint8)
        for index, size in enumerate(sizes)
    }
    file = FileContents(plan, [functools.partial(contents.get, box.name) for box in plan.boxes])
    expected = plan.header + b"".join(contents[box.name].tobytes() for box in plan.boxes)
    deadline, done = Deadline(60), []
    if staged:
        area = staging.StagingArea()
        area.stage([file], deadline, 2)
    counter = ByteCounter(plan.size, lambda count, _total: done.append(count))
    written = write_file(store, file, None, deadline, counter)
    assert store.read("file") == expected
    assert done[-1] == len(expected)
    for name, tensor in written.tensors.items():
        for chunk in tensor.chunks:
            content = contents[name][chunk.offset[0] : chunk.offset[0] + chunk.shape[0]]
            assert chunk.data.checksum == checksum(content.tobytes()), name


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=6),
    chunk=st.sampled_from([1_000, 4_096, 9_999, 1 << 20]),
    block=st.sampled_from([4_096, 8_192, 20_480]),
    write=st.sampled_from([4_096, 8_192]),
    staged=st.booleans(),
    local=st.booleans(),
)
def test_a_file_has_every_byte_and_every_checksum(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    chunk: int,
    block: int,
    write: int,
    staged: bool,
    local: bool,
) -> None:
    folder: Path = tmp_path_factory.mktemp("store")
    store: BlobStore = LocalStore(folder) if local else MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_layout, "CHUNK_BYTES", chunk)
        patch.setattr(staging, "BLOCK_BYTES", block)
        patch.setattr(staging, "WRITE_BYTES", write)
        try:
            _written(store, sizes, staged=staged)
        finally:
            store.close()


@given(
    lengths=st.lists(st.integers(1, 30_000), max_size=30),
    header=st.integers(0, 3).map(lambda count: count * file_layout.ALIGNMENT),
    block=st.sampled_from([4_096, 8_192, 40_960]),
)
def test_blocks_make_up_the_file_and_leave_little_of_a_chunk_behind(
    lengths: list[int], header: int, block: int
) -> None:
    starts = [header + sum(lengths[:index]) for index in range(len(lengths))]
    size = header + sum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "BLOCK_BYTES", block)
        cut = list(staging.blocks(size, starts))
    assert [start for start, _ in cut] == [
        sum(n for _, n in cut[:index]) for index in range(len(cut))
    ]
    assert sum(length for _, length in cut) == size
    for start, length in cut[:-1]:
        assert 0 < length <= block
        assert length % file_layout.ALIGNMENT == 0
        inside = [
            begin
            for begin in starts
            if start < begin // file_layout.ALIGNMENT * file_layout.ALIGNMENT <= start + block
        ]
        if inside:
            assert 0 <= max(inside) - (start + length) < file_layout.ALIGNMENT
