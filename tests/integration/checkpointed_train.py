"""A small job with checkpoints. Arguments: how many steps, the checkpoints' folder, the step that breaks it."""

import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from tensorforge.catalog import CheckpointSchedule
from tensorforge.train import CheckpointPlan, Run, RunConfig

total, folder, broken_at = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
plan = CheckpointPlan(
    location=folder, schedule=CheckpointSchedule(every_steps=4), run_id="a real run"
)
config = RunConfig(batch_size=24, shards=6, seed=3)
with Run(model, optimizer, data, config, checkpoints=plan) as run:
    for step in run.steps(total=total):
        for x, y in step.batches():
            step.backward(nn.functional.mse_loss(model(x), y))
        if step.commit() and step.number == broken_at and run.rank == 0:
            shutil.rmtree(folder)
            folder.write_text("not a folder any more")
if run.outcome == "complete":
    print("digest", run.digest(), flush=True)
