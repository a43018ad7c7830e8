"""Models that a run can train, and clear errors for those that it cannot."""

from __future__ import annotations

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


def check_devices(model: nn.Module, supported: frozenset[str]) -> None:
    """Raise `InvalidInputError` if parameters or buffers are on a device that no group can exchange."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    odd = [f"{n} ({t.device})" for n, t in tensors if t.device.type not in supported]
    _refuse(
        odd, f"are on a device that this version cannot train on (it can on {', '.join(supported)})"
    )


def _refuse(names: list[str], why: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise InvalidInputError(
            f"model: {', '.join(names[:5])}{more} {why}; a run cannot train them"
        )
