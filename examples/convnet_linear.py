"""A convnet with batch norm on generated images, whose batch and learning rate grow with the workers.

python examples/convnet_linear.py
tensorforge run --workers 3 examples/convnet_linear.py

With LINEAR the numbers depend on the number of workers at each step; each sample still comes exactly once.
"""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from tensorforge.elastic import AdaptationStrategy
from tensorforge.train import Evaluation, Run, RunConfig


class Shapes(Dataset):
    """Images of bars and squares with noise; each is made from its own number."""

    def __init__(self, size: int, first: int = 0) -> None:
        self._size, self._first = size, first

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        source = torch.Generator().manual_seed(self._first + index)
        kind = int(torch.randint(0, 3, (1,), generator=source))
        row, column = torch.randint(2, 10, (2,), generator=source).tolist()
        image = torch.randn(1, 16, 16, generator=source) * 0.3
        height, width = ((2, 6), (6, 2), (4, 4))[kind]
        image[0, row : row + height, column : column + width] += 1.5
        return image, kind


def block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(block(1, 8), block(8, 16), nn.Flatten(), nn.Linear(16 * 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def held_out(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, kinds = batch
        return {"accuracy": (model(images).argmax(dim=1) == kinds).float().mean()}

    evaluation = Evaluation(held_out, Shapes(300, first=1_000_000), every=20)
    config = RunConfig(
        batch_size=24,
        shards=12,
        strategy=AdaptationStrategy.LINEAR,
        base_workers=1,
        metrics=("accuracy",),
    )
    with Run(model, optimizer, Shapes(1200), config, evaluation=evaluation) as run:
        for step in run.steps(epochs=2):
            for images, kinds in step.batches():
                answers = model(images)
                step.log(accuracy=(answers.argmax(dim=1) == kinds).float().mean())
                step.backward(F.cross_entropy(answers, kinds))
            if step.commit() and run.rank == 0 and step.number % 10 == 0:
                print(f"step {step.number}: {step.samples} samples, {step.metrics}", flush=True)
    print(f"held out: {evaluation.results}; {run.state.require_exactly_once()}")


if __name__ == "__main__":
    main()
