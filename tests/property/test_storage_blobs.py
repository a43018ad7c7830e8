"""Any sequence of operations does to a real store what it does to a dictionary."""

import shutil
import tempfile

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tensorforge.errors import AlreadyExistsError, EncodingError, NotFoundError
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

# No key is a folder of another one: a folder and a file of one name cannot be on one disk.
KEYS = st.sampled_from(["a", "b/c", "b/d.bin", "b-", "ä/x y/%", "z"])
DATA = st.binary(max_size=300)


class BlobMachine(RuleBasedStateMachine):
    make_store = None

    def __init__(self):
        super().__init__()
        self.store = self.make_store()
        self.model = {}
        self.writer = None

    def teardown(self):
        if self.writer is not None:
            self.writer[1].abort()
        for info in list(self.store.list()):
            self.store.delete(info.key)
        self.store.close()

    @rule(key=KEYS, pieces=st.lists(DATA, max_size=3))
    def write(self, key, pieces):
        info = self.store.write(key, pieces)
        self.model[key] = b"".join(pieces)
        assert (info.key, info.size) == (key, len(self.model[key]))

    @rule(key=KEYS, data=DATA)
    def create(self, key, data):
        if key in self.model:
            with pytest.raises(AlreadyExistsError):
                self.store.create(key, data)
        else:
            self.store.create(key, data)
            self.model[key] = data

    @rule(key=KEYS)
    def read(self, key):
        if key in self.model:
            assert self.store.read(key) == self.model[key]
        else:
            with pytest.raises(NotFoundError):
                self.store.read(key)

    @rule(key=KEYS, offset=st.integers(0, 320), length=st.integers(0, 320))
    def read_into(self, key, offset, length):
        target = bytearray(length)
        if key not in self.model:
            with pytest.raises(NotFoundError):
                self.store.read_into(key, offset, memoryview(target))
        elif offset + length > len(self.model[key]):
            with pytest.raises(EncodingError):
                self.store.read_into(key, offset, memoryview(target))
        else:
            self.store.read_into(key, offset, memoryview(target))
            assert target == self.model[key][offset : offset + length]

    @rule(key=KEYS)
    def delete(self, key):
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, data=DATA)
    def begin_or_go_on_writing(self, key, data):
        if self.writer is None:
            self.writer = (key, self.store.open_writer(key), [])
        self.writer[1].append(data)
        self.writer[2].append(data)

    @rule(commit=st.booleans())
    def end_writing(self, commit):
        if self.writer is not None:
            key, writer, written = self.writer
            self.writer = None
            if commit:
                writer.commit()
                self.model[key] = b"".join(written)
            else:
                writer.abort()

    @rule()
    def sweep(self):
        assert self.store.sweep() == 0

    @rule(prefix=st.sampled_from(["", "b", "b/", "b/d", "ä/", "nothing"]))
    def list_some(self, prefix):
        expected = sorted(key for key in self.model if key.startswith(prefix))
        assert [info.key for info in self.store.list(prefix)] == expected

    @invariant()
    def it_lists_what_the_model_has(self):
        listed = [(info.key, info.size) for info in self.store.list()]
        assert listed == sorted((key, len(data)) for key, data in self.model.items())


def check(make_store, examples, steps):
    machine = type("Machine", (BlobMachine,), {"make_store": staticmethod(make_store)})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps)
    )


def test_memory_behaves_like_a_dictionary():
    check(lambda: MemoryStore("property"), 60, 40)


def test_a_folder_behaves_like_a_dictionary():
    folder = tempfile.mkdtemp()
    try:
        check(lambda: LocalStore(folder), 25, 30)
    finally:
        shutil.rmtree(folder)


def test_s3_behaves_like_a_dictionary(s3_server):
    check(s3_server.store, 15, 25)
