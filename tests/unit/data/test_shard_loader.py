import contextlib
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from tensorforge.data import (
    DatasetInfo,
    DataShard,
    Ledger,
    LoaderOptions,
    PackedDataset,
    SampleSchema,
    ShardLoader,
    ShardLocalOrder,
    ShardStore,
    ShuffledOrder,
    StepLoader,
    pack_array,
    partition,
)
from tensorforge.errors import (
    InvalidInputError,
)
from tensorforge.storage.local_store import LocalStore

SIZE = 50

DATASET = TensorDataset(torch.arange(SIZE), torch.arange(SIZE) * 2)

ORDER = ShuffledOrder(SIZE, seed=3)


def samples_of(batches):
    return [number for batch in batches for number in batch.data[0].tolist()]


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"num_workers": 2}, {"prefetch": 9}])
def test_a_shard_comes_in_batches_in_the_order_of_the_epoch(options):
    loader = ShardLoader(DATASET, ORDER, DataShard(2, 10, 33), 12, 5, **options)
    batches = list(loader)
    assert [batch.positions for batch in batches] == [
        DataShard(2, 12, 17),
        DataShard(2, 17, 22),
        DataShard(2, 22, 27),
        DataShard(2, 27, 32),
        DataShard(2, 32, 33),
    ]
    assert len(loader) == 5
    assert samples_of(batches) == ORDER.take(12, 33).tolist()
    assert torch.equal(batches[0].data[1], batches[0].data[0] * 2)


def test_a_collate_function_makes_the_batches():
    loader = ShardLoader(DATASET, ORDER, DataShard(0, 0, 4), batch_size=4, collate_fn=len)
    assert [batch.data for batch in loader] == [4]


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_steps_of_all_workers_together_take_every_sample_once(workers):
    ledger = Ledger(SIZE, 7)
    owners = [[n for n in range(7) if n % workers == rank] for rank in range(workers)]
    loaders = [StepLoader(DATASET, ORDER, ledger, owned, 3) for owned in owners]
    seen = []
    for parts in zip(*loaders, strict=True):
        taken = [batch for part in parts for batch in part]
        ledger = ledger.commit(ledger.committed_step + 1, [batch.positions for batch in taken])
        seen += samples_of(taken)
    assert ledger.prove().is_complete
    assert sorted(seen) == list(range(SIZE))


def test_leaving_the_loop_early_stops_the_loading():
    for options in ({}, {"num_workers": 1}):
        loader = ShardLoader(DATASET, ORDER, DataShard(0, 0, SIZE), batch_size=1, **options)
        batches = iter(loader)
        next(batches)
        batches.close()
    assert not [t for t in threading.enumerate() if t.name == "shard-loader"]


def test_an_error_in_the_data_set_arrives_where_the_batch_is_asked_for():
    class Broken:
        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            if index == ORDER[6]:
                raise RuntimeError("sample is broken")
            return index

    batches = iter(ShardLoader(Broken(), ORDER, DataShard(0, 0, SIZE), batch_size=4))
    assert next(batches).data.tolist() == ORDER.take(0, 4).tolist()
    with pytest.raises(RuntimeError, match="sample is broken"):
        next(batches)


def test_a_batch_waits_until_its_shard_has_arrived():
    asked = []
    loader = ShardLoader(
        DATASET, ORDER, DataShard(1, 0, 6), batch_size=3, prefetch=0, ready=asked.append
    )
    assert samples_of(loader) == ORDER.take(0, 6).tolist()
    assert asked == [DataShard(1, 0, 3), DataShard(1, 3, 6)]


@pytest.mark.parametrize(
    "changes", [{"cursor": 51}, {"cursor": 9}, {"batch_size": 0}, {"prefetch": -1}]
)
def test_wrong_arguments_are_refused(changes):
    with pytest.raises(InvalidInputError):
        ShardLoader(DATASET, ORDER, **{"shard": DataShard(0, 10, 50), **changes})
    with pytest.raises(InvalidInputError):
        LoaderOptions(num_workers=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_trains_from_the_shards_that_it_holds(tmp_path, workers):
    info = DatasetInfo(size=40, schema=SampleSchema(dtype="<i8", shape=(2,)))
    shards = partition(40, 4)
    with ShardStore(tmp_path, info) as store:
        for number in (1, 3):
            shard = shards[number]
            rows = np.arange(shard.start_index, shard.end_index)
            store.put(shard.start_index, shard.end_index, np.stack([rows, -rows], axis=1))
        order = ShardLocalOrder(40, 4, seed=5, epoch=2)
        steps = StepLoader(
            store, order, Ledger(40, 4), [1, 3], 4, LoaderOptions(num_workers=workers)
        )
        rows = torch.cat([batch.data for step in steps for batch in step])
        assert sorted(rows[:, 0].tolist()) == [*range(10, 20), *range(30, 40)]
        assert torch.equal(rows[:, 0], -rows[:, 1])
        again = pickle.loads(pickle.dumps(store))
        assert again.held == store.held
        again.close()


def test_without_an_accelerator_there_is_nothing_to_pin_for():
    data = TensorDataset(torch.arange(8))
    loader = ShardLoader(
        data, ShuffledOrder(8, 1), DataShard(0, 0, 8), batch_size=4, pin_memory=True
    )
    assert sorted(int(x) for batch in loader for x in batch.data[0]) == list(range(8))


@pytest.mark.parametrize("wanted", [True, False])
def test_pinned_memory_is_torchs_where_there_is_an_accelerator(monkeypatch, wanted):
    asked = []

    class Recording(torch.utils.data.DataLoader):
        def __init__(self, *arguments, pin_memory, **options):
            asked.append(pin_memory)
            super().__init__(*arguments, **options)

    monkeypatch.setattr("tensorforge.data.shard_loader.DataLoader", Recording)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    data, order = TensorDataset(torch.arange(8)), ShuffledOrder(8, 1)
    loader = ShardLoader(data, order, DataShard(0, 0, 8), batch_size=4, pin_memory=wanted)
    assert len(list(loader)) == 2
    assert asked == [wanted]


def test_worker_processes_load_from_a_packed_data_set(tmp_path):
    rows = np.arange(60, dtype=np.int32).reshape(20, 3)
    with contextlib.closing(LocalStore(tmp_path / "packed")) as blobs:
        pack_array(blobs, rows, segments=3)
        order = ShuffledOrder(20, 4)
        loader = ShardLoader(
            PackedDataset(blobs), order, DataShard(0, 0, 20), batch_size=6, num_workers=2
        )
        found = torch.cat([batch.data for batch in loader])
    assert np.array_equal(found.numpy(), rows[order.take(0, 20)])


KILLED = """
import os, signal
from torch.utils.data import get_worker_info
from tensorforge.data import DataShard, ShardLoader, ShuffledOrder
from tensorforge.errors import UnavailableError

class Deadly:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

loader = ShardLoader(Deadly(), ShuffledOrder(8, 1), DataShard(5, 0, 8), batch_size=1, num_workers=1)
try:
    next(iter(loader))
except UnavailableError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_killed_worker_process_is_a_clear_error(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert found.stdout.startswith("a loading process died: DataLoader worker (pid")
