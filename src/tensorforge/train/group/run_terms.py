"""The terms of a training run: what must be the same on all workers, as named facts in text.

Equal terms make equal numbers: the settings, the layout of the model, the optimizer, the data set, and how
torch computes here. They are taken before a checkpoint is restored, so that they are the same on
a worker that joins late.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from typing import Any

import torch
import xxhash

from tensorforge.train.loop.training_state import TrainingState
from tensorforge.train.run_config import RunConfig

_LONGEST = 200


def run_terms(state: TrainingState, config: RunConfig, dataset: Any) -> dict[str, str]:
    """The terms of a run with this state and data set, as this process would train it."""
    facts = {
        **{name: _text(value) for name, value in asdict(config).items()},
        "model layout": _model_layout(state.model),
        "samples": str(state.ledger.size),
        "data set": str(getattr(dataset, "identity", type(dataset).__qualname__)),
        **dict(_optimizer_settings(state.optimizer)),
        **_numerics(state.model),
    }
    return {name: text[:_LONGEST] for name, text in facts.items()}


def _model_layout(model: torch.nn.Module) -> str:
    """A hash of the names, types and shapes of all parameters and buffers, with the number of elements."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors]
    count = sum(tensor.numel() for _, tensor in tensors)
    return f"{count} elements, {xxhash.xxh3_64_hexdigest(chr(10).join(lines).encode())}"


def _optimizer_settings(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    yield "optimizer", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        settings = {name: value for name, value in group.items() if name != "params"}
        text = ", ".join(f"{name}={_text(value)}" for name, value in sorted(settings.items()))
        yield f"optimizer group {number}", f"{len(group['params'])} parameters, {text}"


def _numerics(model: torch.nn.Module) -> dict[str, str]:
    """How torch computes in this process, as far as it changes bits."""
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return {
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "devices": ", ".join(devices),
    }


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return str(value)
