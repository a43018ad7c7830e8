import pytest

from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
from tensorforge.storage.local_store import LocalStore


@pytest.fixture
def checkpoint(tmp_path):
    with DistributedCheckpoint(SingleProcess(), LocalStore(tmp_path / "ckpt")) as made:
        yield made
