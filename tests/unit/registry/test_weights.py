import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tensorforge.errors import IntegrityError, InvalidInputError, NotFoundError
from tensorforge.registry import TensorSpec
from tensorforge.registry.weights import describe_weights, read_header, require_checksum


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float16)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def test_a_file_says_what_is_in_it(file):
    weights = describe_weights(file)
    assert weights.tensors == {"w": TensorSpec("F32", (2, 3)), "b": TensorSpec("F16", (2,))}
    assert weights.size_bytes == file.stat().st_size
    assert weights.checksum.startswith("sha256:")


def test_a_folder_of_files_is_one_model(file):
    save_file({"c": np.zeros(1, np.int64)}, file.with_name("more.safetensors"))
    weights = describe_weights(file.parent)
    assert set(weights.tensors) == {"w", "b", "c"}
    assert len(weights.files) == 2
    done = []
    assert describe_weights(file.parent, progress=lambda *p: done.append(p)) == weights
    assert done[-1] == (weights.size_bytes, weights.size_bytes)
    save_file({"w": np.zeros(1)}, file.with_name("twice.safetensors"))
    with pytest.raises(InvalidInputError, match="in another file too"):
        describe_weights(file.parent)


def test_a_changed_file_is_not_what_was_registered(file):
    weights = describe_weights(file)
    require_checksum(weights, weights.checksum)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="other weights than those that were registered"):
        require_checksum(describe_weights(file), weights.checksum)


def test_nothing_is_not_found(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFoundError):
            describe_weights(path)


def write(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


BAD = [
    b"",
    b"[]",
    b"{",
    b"\xff",
    b"[" * 100_000,
    {"w": 5},
    {"w": {}},
    {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
    {"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    {"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
    {"w": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
]


@pytest.mark.parametrize("header", BAD)
def test_a_header_that_lies_is_refused(tmp_path, header):
    with pytest.raises(InvalidInputError):
        read_header(write(tmp_path / "x.safetensors", header, b"abcd"))


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except InvalidInputError:
        return
