"""A job as users write them.

The data set draws from three random streams. There are an average of the weights, two parameter groups, half
precision with loss scaling and overflows, clipping and a scheduler.
"""

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tensorforge.catalog import CheckpointSchedule
from tensorforge.errors import UnavailableError
from tensorforge.resilience import RetryPolicy
from tensorforge.train import CheckpointPlan, LossScaling, Run, RunConfig
from tensorforge.train.loop.engine import StepEngine

OVERFLOWS = (3, 4, 11)
"""The steps whose loss is infinite."""


class RandomCrops:
    """Draws from the streams of Python, numpy and torch while it makes a sample."""

    def __init__(self, size=150, pause=0.0):
        self.pause = pause
        source = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(size, 12, generator=source)
        self.labels = torch.randint(4, (size,), generator=source)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = random.random() + float(np.random.rand())
        time.sleep(self.pause)
        noise += random.random()
        crop = self.inputs[index] + 0.1 * torch.randn(12)
        return crop * (1 + 0.01 * noise), self.labels[index]


class WeightAverage:
    """An exponential moving average of the weights, which counts its updates."""

    def __init__(self, model, decay=0.9):
        self._model = model
        self._decay = decay
        self.updates = 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def update(self):
        self.updates += 1
        for name, parameter in self._model.named_parameters():
            self.average[name].lerp_(parameter.detach().float(), 1 - self._decay)

    def state_dict(self):
        return {"updates": self.updates, "average": self.average}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.average = {name: value.clone() for name, value in state["average"].items()}


def make_user_run(membership=None, checkpoints=None, *, dtype="bfloat16", pause=0.0, **settings):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    model = model.to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-2},
        ],
        lr=3e-3,
        eps=1e-3,  # 1e-8 is 0 in float16
    )
    average = WeightAverage(model)
    chosen = {"batch_size": 30, "clip_grad_norm": 1.0, "seed": 3, "accumulation": 2}
    scaling = LossScaling(initial=2.0**20, growth_interval=5)
    run = Run(
        model,
        optimizer,
        RandomCrops(pause=pause),
        RunConfig(**(chosen | {"loss_scaling": scaling} | settings)),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        stateful={"average": average},
        after_update=average.update,
        membership=membership,
        checkpoints=checkpoints,
    )
    return run, average


def train_user_job(run, average, total):
    """The digest, the losses that the loop saw, and the updates of the average."""
    losses = []
    with run:
        for step in run.steps(total=total):
            for x, y in step.batches():
                x = x.to(next(run.model.parameters()).dtype)
                loss = F.cross_entropy(run.model(x).float(), y)
                step.backward(loss * float("inf") if step.number in OVERFLOWS else loss)
            if step.commit():
                losses.append((step.number, step.metrics["loss"]))
    return run.digest(), losses, average.updates


def user_work(total, victim="", at_step=-1):
    """What every worker runs; the victim dies after it has prepared `at_step`, before it votes."""
    if os.environ["TENSORFORGE_WORKER_ID"] == victim:
        _die_before_the_vote(at_step)
    run, average = make_user_run()
    digest, losses, updates = train_user_job(run, average, total)
    run_log = os.environ["TENSORFORGE_RUN_DIR"]
    name = os.environ["TENSORFORGE_WORKER_ID"]
    with open(f"{run_log}/{name}.seen", "w") as file:  # noqa: PTH123
        file.write(repr((digest, [number for number, _ in losses], updates)))


def _die_before_the_vote(at_step):
    vote = StepEngine._vote

    def die(engine):
        if engine.prepared is not None and engine.prepared.step >= at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return vote(engine)

    StepEngine._vote = die


def hammered_work(total, folder):
    """The job with slow samples, a save after every few steps, and a thread that retries without a pause."""
    plan = CheckpointPlan(location=folder, schedule=CheckpointSchedule(every_steps=3))
    run, average = make_user_run(checkpoints=plan, pause=0.002)
    over = threading.Event()
    thread = threading.Thread(target=_retry_until, args=(over,))
    thread.start()
    try:
        train_user_job(run, average, total)
    finally:
        over.set()
        thread.join()


def _retry_until(over):
    policy = RetryPolicy(max_attempts=50, base_delay=0.001, max_delay=0.002)

    def fail():
        if not over.is_set():
            raise UnavailableError("again")

    while not over.is_set():
        with contextlib.suppress(UnavailableError):
            policy.run(fail)
