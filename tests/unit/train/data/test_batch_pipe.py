"""Batches through a socket: as they were, writable, and without a trace."""

import os
import resource
import socket
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.errors import UnavailableError
from tensorforge.train.data import batch_pipe


def through(thing):
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(target=batch_pipe.send, args=(here, thing))
        sender.start()
        try:
            return batch_pipe.receive(there)
        finally:
            sender.join()


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SHAPES = st.lists(st.integers(0, 5), max_size=4)
TENSORS = st.builds(
    lambda dtype, shape: (torch.rand(shape) * 3).to(dtype), st.sampled_from(DTYPES), SHAPES
)
THINGS = st.recursive(
    st.one_of(TENSORS, st.integers(), st.text(), st.binary(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@given(THINGS)
def test_everything_arrives_as_it_was(thing):
    assert same(thing, through(thing))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(4, 6).t(),
        torch.arange(10)[::3],
        torch.ones(3).expand(5, 3),
        torch.eye(3).to_sparse(),
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "strided", "expanded", "sparse", "conjugate", "parameter"],
)
def test_tensors_of_every_kind_arrive(tensor):
    arrived = through(tensor)
    assert torch.equal(arrived.to_dense(), tensor.to_dense())
    assert (arrived.requires_grad, type(arrived)) == (tensor.requires_grad, type(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(2, 5, 6, 3).permute(0, 3, 1, 2),
        torch.rand(2, 3, 5, 6).contiguous(memory_format=torch.channels_last),
        torch.rand(4, 9)[:, 1:],
        torch.rand(9)[::3],
        torch.rand(3, 1).expand(3, 4),
    ],
    ids=["permuted", "channels last", "cut", "strided", "expanded"],
)
def test_tensors_lie_in_memory_as_they_did(tensor):
    arrived = through(tensor)
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.eye(3).to_sparse_csc(),
    ],
    ids=["with repeated entries", "coordinates", "rows", "columns"],
)
def test_sparse_tensors_arrive_as_they_were_and_are_not_remembered(make):
    tensor = make()
    arrived = through(tensor)
    assert arrived.layout is tensor.layout
    assert torch.equal(arrived.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo:
        assert arrived.is_coalesced() == tensor.is_coalesced()
    gone = weakref.ref(arrived)
    del arrived
    assert gone() is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_arrives():
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    arrived = through(torch.nested.nested_tensor(parts))
    assert all(map(torch.equal, arrived.unbind(), parts))


def test_arrays_of_numpy_arrive_and_what_arrives_can_be_written_to():
    array, tensor = through((np.arange(100_000), torch.arange(7)))
    array[0], tensor[0] = 5, 5
    assert (array[:3].tolist(), tensor[:3].tolist()) == ([5, 1, 2], [5, 1, 2])


def test_what_is_larger_than_any_buffer_arrives_and_leaves_no_descriptor():
    before = len(list(Path("/proc/self/fd").iterdir()))
    thing = {"x": torch.rand(3_000_000), "words": "long" * 500_000}
    arrived = through(thing)
    assert same(thing, arrived)
    assert len(list(Path("/proc/self/fd").iterdir())) == before  # also while it is kept
    del arrived
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_process_that_may_not_open_files_says_so():
    here, there = socket.socketpair()
    with here, there:
        batch_pipe.send(here, torch.ones(3))
        most = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, most[1]))
        try:
            with pytest.raises(UnavailableError, match="may not open any more files"):
                batch_pipe.receive(there)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_what_cannot_be_pickled_is_an_error_before_anything_is_sent():
    here, there = socket.socketpair()
    with here, there:
        with pytest.raises((AttributeError, TypeError)):
            batch_pipe.send(here, (torch.ones(3), lambda: 1))
        there.setblocking(False)
        with pytest.raises(BlockingIOError):
            there.recv(1)


@pytest.mark.parametrize("sent", [0, 5, 12, 15, 40])
def test_an_end_that_closes_is_told_wherever_it_does(sent):
    here, there = socket.socketpair()
    with here, there:
        batch_pipe.send(here, ["x"] * 100)
        whole = there.recv(10_000)
        here.sendall(whole[:sent])
        here.close()
        with pytest.raises(EOFError):
            batch_pipe.receive(there)
