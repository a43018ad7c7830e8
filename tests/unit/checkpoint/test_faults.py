import pytest
from tests.unit.checkpoint.models import OneTensor

from tensorforge.checkpoint import (
    CheckpointError,
    CheckpointErrorType,
    DistributedCheckpoint,
    FaultToleranceHandler,
    RetryPolicy,
    SingleProcess,
)
from tensorforge.errors import UnavailableError
from tensorforge.storage.memory_store import MemoryStore


class Flaky(MemoryStore):
    """Fails so many times at each operation, after doing it: the answer got lost."""

    def __init__(self, failures):
        super().__init__()
        self.failures = failures
        self.failed = {}

    def _maybe_fail(self, operation):
        self.failed[operation] = self.failed.get(operation, 0) + 1
        if self.failed[operation] <= self.failures:
            raise UnavailableError(f"the answer to {operation} got lost")

    def create(self, key, data):
        done = super().create(key, data)
        if key.endswith(".metadata.json"):
            self._maybe_fail("commit")
        return done

    def read_into(self, key, offset, buffer):
        self._maybe_fail("read")
        super().read_into(key, offset, buffer)

    def open_writer(self, key, size_hint=None):
        self._maybe_fail("write")
        return super().open_writer(key, size_hint)


def test_what_may_be_repeated_is_repeated_even_if_an_answer_got_lost():
    store = Flaky(2)
    faults = FaultToleranceHandler(store, RetryPolicy(base_delay=0, max_delay=0))
    checkpoint = DistributedCheckpoint(SingleProcess(), store, faults)
    checkpoint.save(OneTensor(7))
    state = OneTensor()
    checkpoint.load(state)
    assert state.tensors["x"][0] == 7
    assert store.failed["commit"] == 1, "the second attempt found its own manifest there"


def test_giving_up_leaves_nothing():
    store = Flaky(99)
    faults = FaultToleranceHandler(store, RetryPolicy(max_attempts=2, base_delay=0, max_delay=0))
    checkpoint = DistributedCheckpoint(SingleProcess(), store, faults)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(OneTensor(7))
    assert caught.value.type is CheckpointErrorType.STORAGE_ERROR
    assert list(store.list()) == []
