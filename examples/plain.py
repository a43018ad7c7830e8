"""A plain PyTorch training script. `elastic.py` is the same one made elastic: compare the two."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(2048, 20)
y = (x[:, :3].sum(dim=1) > 0).long()
dataset = TensorDataset(x, y)

model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(4):
    for features, labels in DataLoader(dataset, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()

print(f"loss {loss.item():.4f}")
