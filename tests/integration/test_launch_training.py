"""Real training under the launcher: the worker that hangs is found, and the weights do not know of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from tensorforge.train import Run, RunConfig

def look_for_a_sample_that_never_comes():
    while True:
        time.sleep(0.05)

torch.set_num_threads(1)
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with Run(model, optimizer, data, RunConfig(batch_size=24, shards=6, seed=3)) as run:
    for step in run.steps(total=int(sys.argv[1])):
        for x, y in step.batches():
            if os.environ.get("TENSORFORGE_WORKER_ID") == "worker-1" and step.number == 5:
                look_for_a_sample_that_never_comes()
            step.backward(nn.functional.mse_loss(model(x), y))
        step.commit()
if run.outcome == "complete":
    print("digest", run.digest(), flush=True)
"""


def digests(lines):
    return {line.split()[-1] for line in lines if line.startswith("digest")}


@pytest.mark.soak
@pytest.mark.may_leak("files", "torch keeps a cache folder in the temporary folder")
def test_a_hang_in_real_training_is_cured_without_a_trace_in_the_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = subprocess.run(
        [sys.executable, str(script), "30"], capture_output=True, text=True, check=True
    )
    command = [sys.executable, "-m", "tensorforge", "run", "--json", "-n", "2", "--min-workers"]
    options = ["1", "--hang-timeout", "3", "--stability-window", "2", "--run-dir"]
    done = subprocess.run(
        [*command, *options, str(tmp_path / "run"), str(script), "30"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    notices = [event for event in events if event["event"] == "notice"]
    assert done.returncode == 0, notices
    killed = next(event["worker"] for event in events if event["event"] == "worker_exited")
    assert killed == "worker-1"
    hang = next(n for n in notices if "worker-1 hangs: no progress for 3 s" in n["text"])
    assert "in look_for_a_sample_that_never_comes" in hang["detail"]
    printed = [event["line"] for event in events if event["event"] == "log"]
    assert digests(printed) == digests(alone.stdout.splitlines())
