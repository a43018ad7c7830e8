"""Runs on a device: what the workers of the device tests do, alone, in fixed sets and in clusters."""

from __future__ import annotations

import os
import time
from itertools import chain

import torch
from tests.integration.train_cases import MODELS, data, free_port
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tensorforge.testing.training_cluster import forking_context
from tensorforge.train import Run, RunConfig
from tensorforge.train.group.membership import FixedMembership

ENDLESS = 1_000_000


def load(device, schedule="on demand"):
    """Load the simulated accelerator if the device is one; without its module torch does not know the name."""
    torch.set_num_threads(1)
    if device.startswith("sim"):
        from tests.accelerator import sim

        sim.set_schedule(schedule)
    if device.startswith("cuda"):
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(mode=True)


def make_run(kind, device, *, membership=None, before_update=None, checkpoints=None, **settings):
    """A run with AdamW, clipping and a moving average, of a model on `device`."""
    torch.manual_seed(11)
    model = MODELS[kind]().to(device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    config = {"batch_size": 30, "clip_grad_norm": 1.0, "seed": 3} | settings
    return Run(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        data(kind),
        RunConfig(**config),
        stateful={"average": average},
        before_update=before_update,
        after_update=lambda: average.update_parameters(model),
        checkpoints=checkpoints,
        membership=membership,
    )


def steps(run, total, pause=0.0):
    """Train to the end; yield after each attempt at a step."""
    with run:
        for step in run.steps(total=total):
            time.sleep(pause)
            for batch in step.batches():
                x, y = (on_device(each, run.device) for each in batch)
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
            yield step


def on_device(tensor, device):
    """A copy on the device that nobody waits for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def digest(kind, device, total=6, **settings):
    """The digest and losses of a run."""
    run = make_run(kind, device, **settings)
    losses = [step.metrics["loss"] for step in steps(run, total)]
    return run.digest(), losses


def member(rank, world_size, master, answers, kind, device, schedule, settings):
    """One member of a fixed set; it answers with its rank and with `digest`'s result."""
    load(device, schedule)
    membership = FixedMembership(rank, world_size, master)
    answers.put((rank, digest(kind, device, membership=membership, **settings)))


def counting_member(rank, world_size, master, answers, kind, device, schedule, settings):
    """The same, with the reasons for which each step but the first waited for the device."""
    load(device, schedule)
    from tests.accelerator import sim

    run = make_run(kind, device, membership=FixedMembership(rank, world_size, master), **settings)
    counts = []
    for _ in steps(run, 6):
        counts.append(sim.synchronizations())
        sim.reset_synchronizations()
    answers.put((rank, counts[2:]))


def locating_member(rank, world_size, master, answers, kind, device, schedule, settings):
    """The same, with the devices of every tensor that an update has to do with."""
    load(device, schedule)
    found = set()

    def look():
        engine = run._engine
        reduction, prepared = engine._reduction, engine.prepared
        flats = [*reduction._memory.values(), *chain(*reduction._totals.values())]
        flats += [flat for buffer in reduction._send_buffers.values() for flat in buffer.flats]
        sums = [*prepared.gradients._sums.values()]
        entries = [*prepared.total, *(group for each in sums for group in each.values)]
        values = [value for each in sums for row in each.metrics.values() for value in row]
        grads = [parameter.grad for parameter in run.model.parameters()]
        tensors = [*flats, *chain(*entries), *grads, *values]
        found.update(str(tensor.device) for tensor in tensors)
        assert len(flats) > 2
        assert len(values) >= run.config.shards // run.world_size

    membership = FixedMembership(rank, world_size, master)
    run = make_run(kind, device, membership=membership, before_update=look, **settings)
    list(steps(run, 4))
    answers.put((rank, sorted(found)))


def endless_worker(kind, device, schedule, settings):
    """What every worker of a test cluster runs."""
    load(device, schedule)
    for _ in steps(make_run(kind, device, **settings), ENDLESS, pause=0.01):
        pass


def on_members(world_size, main, kind, device, schedule="on demand", **settings):
    """What each of so many processes answered, by rank. `main` is one of the members above."""
    context = forking_context()
    answers, master = context.SimpleQueue(), f"127.0.0.1:{free_port()}"
    members = [
        context.Process(
            target=main,
            args=(rank, world_size, master, answers, kind, device, schedule, settings),
        )
        for rank in range(world_size)
    ]
    for each in members:
        each.start()
    for each in members:
        each.join()
    assert [each.exitcode for each in members] == [0] * world_size
    found = sorted(answers.get() for _ in members)
    answers.close()
    return [answer for _, answer in found]
