"""Models that a run can train, and clear errors for those that it cannot."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorforge.errors import InvalidInputError

_WRAPPERS = {
    "DistributedDataParallel": "the run itself sums gradients over the workers",
    "FullyShardedDataParallel": "the run keeps whole parameters on each worker",
    "DataParallel": "each worker is one process",
}


def check_model(model: nn.Module) -> None:
    """Raise `InvalidInputError`, naming the parameters or modules, if a run cannot train the model."""
    for name, module in model.named_modules():
        reason = _WRAPPERS.get(type(module).__name__)
        if reason is not None and type(module).__module__.startswith("torch."):
            place = f"model.{name}" if name else "model"
            raise InvalidInputError(
                f"{place} is wrapped in {type(module).__name__}: pass the module inside it; {reason}"
            )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    _refuse([n for n, t in tensors if isinstance(t, DTensor)], "are DTensors, as FSDP2 makes them")
    _refuse(
        [n for n, t in tensors if t.device.type == "meta"], "are on the meta device, without values"
    )


def model_device(model: nn.Module) -> torch.device:
    """The device of all parameters and buffers.

    Raise `InvalidInputError`, naming the odd ones, if they are on several devices, or on one without streams.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not tensors:
        return torch.device("cpu")
    device = tensors[0][1].device
    odd = [f"{name} ({tensor.device})" for name, tensor in tensors if tensor.device != device]
    _refuse(odd, f"are on another device than {tensors[0][0]} ({device})")
    if not _can_train(device):
        _refuse([name for name, _ in tensors], f"are on {device}, a device without streams")
    return device


def _can_train(device: torch.device) -> bool:
    return device.type == "cpu" or hasattr(torch.get_device_module(device), "Stream")


def _refuse(names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise InvalidInputError(
            f"model: {', '.join(names[:5])}{more} {why}; a run cannot train them"
        )
