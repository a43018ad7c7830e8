"""Shards that live on the workers' own disks: they move by the plan while training goes on."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integration.train_cases import MLP
from torch.nn import functional as F  # noqa: N812

from tensorforge.cluster.elastic_config import RedistributionType
from tensorforge.data.plan.shards import partition
from tensorforge.data.segments.packed_dataset import PackedDataset, pack_array
from tensorforge.storage.local_store import LocalStore
from tensorforge.testing.storms import check_history
from tensorforge.train import LocalShards, Run, RunConfig

ENDLESS = 1_000_000
LEAST = {"redistribution_type": RedistributionType.INCREMENTAL}


class GatedOrigin(PackedDataset):
    """Whole shards come only once the gate is open; single samples always do."""

    def __init__(self, blobs, gate):
        super().__init__(blobs)
        self._gate = gate

    def open_range(self, start, stop):
        while not self._gate.exists():
            time.sleep(0.01)
        return super().open_range(start, stop)


def train(total, folder, pause=0.0):
    folder = Path(folder)
    origin = GatedOrigin(LocalStore(folder / "packed"), folder / "gate")
    data = LocalShards(
        origin,
        folder / "held",
        decode=lambda row: (torch.from_numpy(row[:10].copy()), int(row[10])),
    )
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = RunConfig(batch_size=30, seed=3, shuffle="within_shards")
    with Run(model, optimizer, data, config) as run:
        for step in run.steps(total=total):
            computed = 0
            for x, y in step.batches():
                time.sleep(pause)
                step.backward(F.cross_entropy(model(x), y))
                computed += 1
            if step.commit():
                run._log.write("computed", step=step.number, shards=computed)
    return run.digest()


@pytest.fixture
def folder(tmp_path):
    generator = np.random.default_rng(5)
    rows = generator.normal(size=(203, 11)).astype("<f4")
    rows[:, 10] = generator.integers(0, 3, 203)
    pack_array(LocalStore(tmp_path / "data" / "packed"), rows)
    (tmp_path / "data" / "gate").touch()
    return tmp_path / "data"


@pytest.fixture
def undisturbed(folder):
    """The digest of a run on one worker."""
    copy = folder / "alone"
    copy.mkdir()
    (copy / "packed").symlink_to(folder / "packed")
    (copy / "gate").touch()
    return lambda total: train(total, copy)


def shards_on_disk(folder, shards=12):
    """Each place's shards, by number."""
    starts = {shard.start_index: shard.shard_id for shard in partition(203, shards)}
    return [
        {starts[int(path.name.partition("-")[0])] for path in place.glob("segments/*.tfs")}
        for place in sorted(folder.glob("held/place-*"))
    ]


def last_plan(running):
    return [e for e in running.events() if e["kind"] == "shards"][-1]


def computed_by(running, worker):
    events = [e for e in running.events() if e["kind"] == "computed" and e["worker"] == worker]
    return events[-1]["shards"] if events else 0


def finish(running, undisturbed):
    """Stop all workers after the same step: they have what one worker alone has after as many."""
    os.kill(running.workers["a"].pid, signal.SIGUSR2)
    running.wait_for_end()
    steps = running.committed_step() + 1
    finals = running.finals().values()
    assert {f["outcome"] for f in finals} == {"stopped"}
    assert {f["digest"] for f in finals} == {undisturbed(steps)}
    check_history(running.events(), steps)


@pytest.fixture
def three_workers(cluster, folder):
    """They have fetched their shards, and train on until they are stopped."""
    arguments = (ENDLESS, str(folder), 0.004)
    with cluster(main=train, arguments=arguments, workers=None, config=LEAST) as running:
        for name in "abc":
            running.start_worker(name)
        running.wait_until(
            lambda: sorted(map(len, shards_on_disk(folder))) == [4, 4, 4], "the first shards"
        )
        yield running


def test_a_newcomer_gets_its_shards_from_the_others_and_no_more_than_it_must(
    three_workers, folder, undisturbed
):
    three_workers.start_worker("d")
    three_workers.wait_until(lambda: computed_by(three_workers, "d") == 3, "its share of work")
    plan = last_plan(three_workers)
    assert (plan["moved_shards"], plan["minimum"], plan["from_origin"]) == (3, 3, 0)
    finish(three_workers, undisturbed)
    held = shards_on_disk(folder)
    assert sorted(len(place) for place in held) == [3, 3, 3, 3]
    assert set().union(*held) == set(range(12))


def test_training_goes_on_while_shards_are_on_their_way(cluster, folder, undisturbed):
    (folder / "gate").unlink()
    arguments = (ENDLESS, str(folder), 0.004)
    with cluster(main=train, arguments=arguments, workers=2) as running:
        running.start_worker("a")
        running.start_worker("b")
        running.wait_for_step(10)  # by single samples from the origin
        assert not any(shards_on_disk(folder))
        (folder / "gate").touch()
        running.wait_until(
            lambda: sorted(len(place) for place in shards_on_disk(folder)) == [6, 6], "shards"
        )
        finish(running, undisturbed)


def test_a_killed_workers_shards_come_back_with_whoever_takes_its_place(three_workers, undisturbed):
    three_workers.kill("b")
    three_workers.wait_until(lambda: computed_by(three_workers, "a") == 6, "more work for the rest")
    three_workers.start_worker("d")
    three_workers.wait_until(lambda: computed_by(three_workers, "d") == 4, "its share of work")
    assert last_plan(three_workers)["moved_shards"] == 0, "it found the shards on the disk"
    finish(three_workers, undisturbed)
