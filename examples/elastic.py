"""`plain.py`, made elastic.

python examples/elastic.py                         one process
tensorforge run --workers 4 examples/elastic.py    four workers that may come and go, the same weights
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import TensorDataset

from tensorforge.train import Run, RunConfig

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x[:, :3].sum(dim=1) > 0).long()
dataset = TensorDataset(x, y)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with Run(model, optimizer, dataset, RunConfig(batch_size=64)) as run:
    for step in run.steps(epochs=4):
        for features, labels in step.batches():
            loss = F.cross_entropy(model(features), labels)
            step.backward(loss)
        step.commit()

print(f"loss {step.metrics['loss']:.4f}, digest {run.digest()}")
