"""A character-level transformer on a text, trained elastically.

    python examples/char_transformer.py                                  # one process
    tensorforge run --workers 3 examples/char_transformer.py --steps 400 # three workers that may come and go

Both give the same weights, bit for bit: the digest at the end says so.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from tensorforge.catalog import CheckpointSchedule
from tensorforge.train import CheckpointPlan, Evaluation, Run, RunConfig

TEXT = Path(__file__).parent / "data" / "lighthouse.txt"
CONTEXT = 48


class Characters(Dataset):
    """Every window of the text: the characters, and for each the character that follows."""

    def __init__(self, text: str, stride: int = 3) -> None:
        letters = sorted(set(text))
        self.letters = letters
        numbers = {letter: number for number, letter in enumerate(letters)}
        self._codes = torch.tensor([numbers[letter] for letter in text])
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._codes) - CONTEXT - 1) // self._stride

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._codes[index * self._stride :][: CONTEXT + 1]
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        parts = self.queries_keys_values(self.before_attention(x)).view(shape)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + self.mlp(self.before_mlp(x))


class CharacterTransformer(nn.Module):
    def __init__(self, letters: int, width: int = 64, depth: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(self.letters(x) + places))


def make_run(steps: int, checkpoints: Path | None = None, seed: int = 1) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dataset = Characters(TEXT.read_text())
    model = CharacterTransformer(len(dataset.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps + 1)

    def held_out(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"loss": F.cross_entropy(model(x).flatten(0, 1), y.flatten())}

    plan = None
    if checkpoints is not None:
        plan = CheckpointPlan(location=checkpoints, schedule=CheckpointSchedule(every_steps=100))
    return Run(
        model,
        optimizer,
        dataset,
        RunConfig(batch_size=48, shards=12, seed=seed, clip_grad_norm=1.0),
        scheduler=scheduler,
        evaluation=Evaluation(held_out, Characters(TEXT.read_text(), stride=97), every=steps),
        checkpoints=plan,
    )


def train(steps: int, checkpoints: Path | None = None, seed: int = 1) -> Run:
    with make_run(steps, checkpoints, seed) as run:
        for step in run.steps(total=steps):
            for x, y in step.batches():
                logits = run.model(x)
                step.backward(F.cross_entropy(logits.flatten(0, 1), y.flatten()))
            if step.commit() and run.rank == 0 and step.number % 20 == 0:
                print(f"step {step.number}: loss {step.metrics['loss']:.4f}", flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, help="save here and go on from here")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    run = train(arguments.steps, arguments.checkpoints, arguments.seed)
    print(f"{run.outcome}: digest {run.digest()}; {run.state.require_exactly_once()}")


if __name__ == "__main__":
    main()
