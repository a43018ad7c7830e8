"""Runs of models on the simulated accelerator: the CPU's bits, on any number of workers, through changes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tests.accelerator import device_training
from tests.faults.endless_training import start_together, wait_until_together

from tensorforge.catalog import CheckpointSchedule
from tensorforge.cluster.elastic_config import AdaptationStrategy, ElasticTrainingConfig
from tensorforge.errors import InvalidInputError
from tensorforge.testing.training_cluster import TrainingCluster, forking_context
from tensorforge.train import CheckpointPlan, Run, RunConfig
from tensorforge.train.group import host_staging

EARLY = {"bucket_bytes": 4096}
"""Small buckets, so that sums are sent during the last backward pass."""
SCHEDULES = ["on demand", "side streams first", "default stream first"]


@pytest.fixture(scope="module", autouse=True)
def warm_processes():
    """Start the process that others are forked from before the leak check looks."""
    first = forking_context().Process(target=len, args=("",))
    first.start()
    first.join()


@pytest.fixture(scope="module")
def alone():
    """The digest and losses of an undisturbed run on the CPU, remembered."""
    known = {}

    def get(kind, total=6, **settings):
        key = (kind, total, tuple(sorted(settings.items())))
        if key not in known:
            device_training.load("cpu")
            known[key] = device_training.digest(kind, "cpu", total, **settings)
        return known[key]

    return get


def on_members(world_size, main, kind, schedule="on demand", **settings):
    """What each of so many processes answered that use the simulated accelerator, by rank."""
    return device_training.on_members(world_size, main, kind, "sim:1", schedule, **settings)


@pytest.mark.usefixtures("device_library")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_runs_on_the_device_give_the_bits_of_one_process_on_the_cpu(kind, world_size, alone):
    expected = alone(kind, **EARLY)
    assert on_members(world_size, device_training.member, kind, **EARLY) == [expected] * world_size


@pytest.mark.usefixtures("device_library")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bits_do_not_depend_on_when_streams_work(schedule, alone):
    found = on_members(2, device_training.member, "transformer", schedule, **EARLY)
    assert found == [alone("transformer", **EARLY)] * 2


@pytest.mark.usefixtures("device_library")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_waits_twice_at_most_outside_of_collectives(world_size):
    """Collectives wait for the event after each copy to the host; accumulation adds no wait."""
    counts = on_members(
        world_size, device_training.counting_member, "transformer", accumulation=3, **EARLY
    )
    for member in counts:
        for step in member:
            assert sum(n for reason, n in step.items() if reason != "event.synchronize") <= 2, step
            assert world_size > 1 or "event.synchronize" not in step


@pytest.mark.usefixtures("device_library")
def test_every_tensor_of_an_update_is_on_the_device():
    found = on_members(2, device_training.locating_member, "transformer", **EARLY)
    assert found == [["sim:1"]] * 2


@pytest.mark.usefixtures("device_library")
def test_a_checkpoint_of_the_device_is_resumed_on_more_workers(tmp_path, alone):
    plan = CheckpointPlan(location=tmp_path / "saved", schedule=CheckpointSchedule(every_steps=2))
    more = {"checkpoints": plan, **EARLY}
    on_members(1, device_training.member, "transformer", total=3, **more)
    found = on_members(2, device_training.member, "transformer", total=6, **more)
    expected = alone("transformer", **EARLY)
    assert found == [(expected[0], expected[1][3:])] * 2


@pytest.mark.usefixtures("device_library")
def test_workers_on_the_device_are_killed_and_join(tmp_path, alone):
    config = ElasticTrainingConfig(
        lr_adaptation_strategy=AdaptationStrategy.NONE,
        stability_window_ms=150,
        worker_heartbeat_timeout_ms=30_000,
        rescale_timeout_ms=20_000,
        failure_tolerance_percentage=100,
        max_consecutive_failures=50,
    )
    arguments = ("transformer", "sim", "on demand", EARLY)
    cluster = TrainingCluster(
        device_training.endless_worker, arguments, tmp_path, config=config, desired_workers=3
    )
    with cluster as running:
        start_together(running, "a", "b", "c")
        running.kill("b")
        wait_until_together(running, "a", "c")
        running.start_worker("d")
        wait_until_together(running, "a", "c", "d")
        os.kill(running.workers["a"].pid, signal.SIGUSR2)
        running.wait_for_end()
        finals = running.finals()
        assert set(finals) == {"a", "c", "d"}, running.describe()
        done = {(final["committed_step"] + 1, final["digest"]) for final in finals.values()}
        assert "STRAY ACCESS" not in running.describe()
    ((total, digest),) = done
    assert digest == alone("transformer", total, **EARLY)[0]


@pytest.mark.usefixtures("device_process")
def test_a_model_on_two_devices_is_refused_with_the_names_of_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1).to("sim"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        InvalidInputError,
        match=r"1\.weight \(sim:0\), 1\.bias \(sim:0\) are on another device than 0\.weight \(cpu\)",
    ):
        Run(model, optimizer, [(torch.zeros(3), 0.0)] * 12, RunConfig(batch_size=12))


@pytest.mark.usefixtures("device_process")
def test_a_step_leaves_the_devices_random_stream_as_it_was():
    run = device_training.make_run("transformer", "sim:1")
    assert run.device == torch.device("sim", 1)
    before = torch.get_device_module("sim").get_rng_state("sim:1")
    assert len(list(device_training.steps(run, 2))) == 2
    assert torch.equal(torch.get_device_module("sim").get_rng_state("sim:1"), before)


@pytest.mark.usefixtures("device_process")
def test_bytes_leave_the_device_in_pieces():
    values = torch.arange(333, dtype=torch.int64).to(torch.uint8).view(3, 111).to("sim")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_staging, "PIECE_BYTES", 100)
        pieces = [piece.clone() for piece in host_staging.host_pieces(values.t())]
    assert [len(piece) for piece in pieces] == [100, 100, 100, 33]
    assert torch.equal(torch.cat(pieces), values.cpu().t().reshape(-1))
    assert list(host_staging.host_pieces(torch.empty(0, device="sim"))) == []


class Copy:
    """An event that happens when the test says so."""

    is_done = False

    def query(self):
        return self.is_done


@pytest.mark.usefixtures("device_process")
def test_a_host_buffer_is_not_lent_while_a_copy_uses_it():
    staging = host_staging.HostStaging(torch.device("sim", 0))
    buffer = staging.stage(torch.ones(8, device="sim"))
    buffer.wait()
    assert buffer.view(8, torch.float32).tolist() == [1.0] * 8
    buffer.copied = copy = Copy()
    staging.give_back(buffer)
    assert staging.lend(8) is not buffer
    copy.is_done = True
    assert staging.lend(8) is buffer
