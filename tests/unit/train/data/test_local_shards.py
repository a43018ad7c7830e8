import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tensorforge.data.segments.packed_dataset import pack_array
from tensorforge.errors import ConfigurationError, ConflictError, InvalidInputError, NotFoundError
from tensorforge.storage.local_store import LocalStore
from tensorforge.train import Loading, LocalShards, Run, RunConfig

CONFIG = RunConfig(batch_size=8, shards=4, shuffle="within_shards")


@pytest.fixture
def packed(tmp_path):
    pack_array(LocalStore(tmp_path / "packed"), np.arange(200, dtype="<f4").reshape(50, 4))
    return tmp_path / "packed"


def train(data, config=CONFIG, epochs=1):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with Run(model, torch.optim.SGD(model.parameters(), lr=1e-6), data, config) as run:
        for step in run.steps(epochs=epochs):
            for x in step.batches():
                step.backward(F.mse_loss(model(x), x.sum(dim=1, keepdim=True)))
            step.commit()
    return run.digest()


def segments(place):
    return sorted((place / "segments").iterdir())


def test_a_run_fetches_its_shards_and_leaves_them_for_the_next(packed, tmp_path):
    first = train(LocalShards(packed, tmp_path / "held"), epochs=3)
    assert len(segments(tmp_path / "held" / "place-0")) == 4
    assert train(LocalShards(packed, tmp_path / "held"), epochs=3) == first


def test_each_worker_of_a_machine_has_a_place_of_its_own(packed, tmp_path):
    one, other = LocalShards(packed, tmp_path / "held"), LocalShards(packed, tmp_path / "held")
    assert one.open().folder.name == "place-0"
    assert other.open().folder.name == "place-1"
    one.close()
    third = LocalShards(packed, tmp_path / "held")
    assert third.open().folder.name == "place-0"
    third.close()
    other.close()


def test_samples_come_from_the_origin_before_and_from_the_disk_after_they_are_held(
    packed, tmp_path
):
    data = LocalShards(packed, tmp_path / "held", decode=lambda row: row * 2)
    assert len(data) == 50
    assert list(data[3]) == [24, 26, 28, 30]
    data.open().put(0, 10, np.zeros((10, 4), "<f4"))
    assert list(data[3]) == [0, 0, 0, 0]
    assert list(data.__getitems__([3, 12])[1]) == [96, 98, 100, 102]
    data.close()


def test_a_damaged_copy_is_dropped_and_fetched_again(packed, tmp_path, caplog):
    healthy = train(LocalShards(packed, tmp_path / "held"))
    victim = segments(tmp_path / "held" / "place-0")[1]
    damaged = bytearray(victim.read_bytes())
    damaged[100] ^= 4
    victim.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        assert train(LocalShards(packed, tmp_path / "held"), epochs=1) == healthy
    assert "fetched again from the origin" in caplog.text
    assert victim.read_bytes() != damaged


def test_what_the_settings_or_the_folder_do_not_allow_is_refused(packed, tmp_path):
    with pytest.raises(ConfigurationError, match="within_shards"):
        train(LocalShards(packed, tmp_path / "held"), RunConfig(batch_size=8))
    with pytest.raises(InvalidInputError, match="max_concurrent_transfers"):
        LocalShards(packed, tmp_path / "held", max_concurrent_transfers=0)
    with pytest.raises(NotFoundError, match="no packed data set"):
        LocalShards(tmp_path / "nothing", tmp_path / "held")
    pack_array(LocalStore(tmp_path / "other"), np.zeros((9, 4), dtype="<f4"))
    train(LocalShards(packed, tmp_path / "held"))
    with pytest.raises(ConflictError, match="a folder of its own"):
        train(LocalShards(tmp_path / "other", tmp_path / "held"))


def test_local_shards_are_loaded_by_the_one_process_that_holds_them(packed, tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = LocalShards(packed, tmp_path / "held")
    with pytest.raises(ConfigurationError, match="num_workers = 2: must be 0 for local shards"):
        Run(model, optimizer, data, CONFIG, loading=Loading(num_workers=2))
