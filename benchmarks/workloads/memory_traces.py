"""The training runs behind the bundled traces: real architectures, made small enough for a CPU."""

import random
from pathlib import Path

import torch
import transformers

from tensorforge.memory import record_allocations


def gpt2() -> None:
    """A language model on sequences of several lengths, with gradient clipping."""
    random.seed(0)
    config = transformers.GPT2Config(
        vocab_size=2000, n_positions=128, n_embd=192, n_layer=6, n_head=6
    )
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        tokens = torch.randint(0, 2000, (4, random.choice([64, 96, 128])))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def bert() -> None:
    """A classifier with two accumulated batches a step, of any length, and an evaluation."""
    random.seed(1)
    config = transformers.BertConfig(
        vocab_size=2000,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=768,
        max_position_embeddings=128,
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 2000, (8, random.randint(32, 128)))
            (model(input_ids=tokens, labels=torch.randint(0, 2, (8,))).loss / 2).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(input_ids=torch.randint(0, 2000, (16, 128)))


def vit() -> None:
    """A vision transformer; every step is the same."""
    config = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()


def resnet() -> None:
    """A convolutional network with momentum, then an evaluation with twice the batch."""
    config = transformers.ResNetConfig(
        embedding_size=32,
        hidden_sizes=[32, 64, 128, 256],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,
    )
    model = transformers.ResNetForImageClassification(config)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
        model(pixel_values=images, labels=labels).loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(pixel_values=torch.randn(32, 3, 64, 64))


def record_all(folder: Path) -> None:
    """Record every run into `folder`."""
    for run in (gpt2, bert, vit, resnet):
        torch.manual_seed(0)
        with record_allocations(name=run.__name__) as recording:
            run()
        recording.trace.save(folder / f"{run.__name__}.json.gz")
        print(run.__name__, len(recording.trace), "events")
