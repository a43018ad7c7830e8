"""Runs of models on a CUDA device. Without one nothing here is tested, and pytest's summary says so.

    python -m pytest -rs tests/gpu     # on a machine with a GPU and a torch that was built for it

One GPU is enough: all workers share it.
"""

import pytest
import torch
from tests.accelerator import device_training

from tensorforge.testing.training_cluster import forking_context

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NOT TESTED, CUDA: this machine has no GPU for torch"
)
EARLY = {"bucket_bytes": 4096}
"""Small buckets, so that sums are sent during the last backward pass."""


@pytest.fixture(scope="module", autouse=True)
def warm_processes():
    """Start the process that others are forked from before the leak check looks."""
    first = forking_context().Process(target=len, args=("",))
    first.start()
    first.join()


@pytest.mark.parametrize("kind", ["mlp", "transformer", "convnet"])
def test_one_two_and_three_workers_end_with_one_digest(kind):
    found = [
        device_training.on_members(size, device_training.member, kind, "cuda:0", **EARLY)
        for size in (1, 2, 3)
    ]
    digests = {digest for members in found for digest, _ in members}
    assert len(digests) == 1


def test_every_tensor_of_an_update_is_on_the_device():
    found = device_training.on_members(
        2, device_training.locating_member, "transformer", "cuda:0", **EARLY
    )
    assert found == [["cuda:0"]] * 2
