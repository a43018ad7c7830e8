"""Optimizer state by parameter name, which stays valid if the order, the groups or the ranks change.

{"groups": [{"lr": 0.1, …, "params": ["layer.weight", …]}], "state": {"layer.weight": {"exp_avg": …}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorforge.checkpoint.options import Stateful
from tensorforge.checkpoint.tensors import TensorShard
from tensorforge.errors import InvalidInputError


def is_keyed(optimizer: Stateful) -> bool:
    """Whether the state can be saved by parameter name: torch optimizers can, others are saved as they are."""
    return isinstance(optimizer, torch.optim.Optimizer)


def parameter_names(model: Stateful | None, optimizer: Any) -> dict[int, str]:
    """Id of a parameter → its name in the model, or else a name made from its position in the optimizer."""
    names: dict[int, str] = {}
    if isinstance(model, torch.nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for position, parameter in enumerate(parameters):
        names.setdefault(id(parameter), f"parameter-{position}")
    return names


def keyed_state(
    optimizer: Any, names: Mapping[int, str], model_state: Mapping[str, Any]
) -> dict[str, Any]:
    """The optimizer's state by parameter name.

    If the model's state dict has a `TensorShard` for a parameter, optimizer tensors of the same shape become
    the same box of a larger tensor.
    """
    saved = optimizer.state_dict()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, parameter in enumerate(parameters):
        if index in saved["state"]:
            name = names[id(parameter)]
            shard = model_state.get(name)
            state[name] = {
                key: _like_shard(value, shard) for key, value in saved["state"][index].items()
            }
    groups = []
    for group, live in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        options = {key: value for key, value in group.items() if key not in _PARAMETERS}
        groups.append({**options, "params": [names[id(p)] for p in live["params"]]})
    return {"groups": groups, "state": state}


_PARAMETERS = ("params", "param_names")


def _like_shard(value: Any, shard: Any) -> Any:
    if (
        isinstance(shard, TensorShard)
        and isinstance(value, torch.Tensor)
        and value.shape == shard.tensor.shape
    ):
        return TensorShard(value, shard.offset, shard.global_shape)
    return value


def unwrap(value: Any) -> Any:
    """The local tensor of a `TensorShard`; any other value as it is."""
    return value.tensor if isinstance(value, TensorShard) else value


def destination_for(
    shape: tuple[int, ...], dtype: torch.dtype, existing: Any, parameter: torch.Tensor, shard: Any
) -> Any:
    """The memory into which a saved tensor of the optimizer's state is loaded.

    This is the optimizer's existing tensor if that fits, and new memory otherwise. A tensor with the shape
    of the parameter is sharded like the parameter and on the same device.
    """
    if isinstance(existing, torch.Tensor) and existing.dtype == dtype:
        wrapped = _like_shard(existing, shard)
        full_shape = wrapped.global_shape if isinstance(wrapped, TensorShard) else existing.shape
        if tuple(full_shape) == shape:
            return wrapped
    if isinstance(shard, TensorShard) and shape == tuple(shard.global_shape):
        return _like_shard(torch.empty_like(shard.tensor, dtype=dtype), shard)
    if isinstance(parameter, DTensor):
        if shape == tuple(parameter.shape):
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
    # A scalar such as Adam's step stays on the CPU, where torch keeps it.
    device = parameter.device if shape else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=device)


def positional_state(
    saved: Mapping[str, Any], optimizer: Any, names: Mapping[int, str]
) -> dict[str, Any]:
    """The state dictionary that `optimizer.load_state_dict` expects, from a state by parameter name."""
    state, groups, position = {}, [], 0
    for number, live in enumerate(optimizer.param_groups):
        members = [names[id(parameter)] for parameter in live["params"]]
        source = _matching_group(saved["groups"], members, number)
        current = {key: value for key, value in live.items() if key not in _PARAMETERS}
        options = {key: value for key, value in source.items() if key != "params"}
        positions = list(range(position, position + len(members)))
        groups.append({**current, **options, "params": positions})
        for index, name in zip(positions, members, strict=True):
            if name in saved["state"]:
                values = saved["state"][name]
                state[index] = {key: unwrap(value) for key, value in values.items()}
        position += len(members)
    return {"state": state, "param_groups": groups}


def _matching_group(groups: list[Any], members: list[str], number: int) -> Any:
    """The saved group whose options apply to group `number`: the one with the same parameters."""
    if not members:
        return groups[number] if number < len(groups) else {}
    candidates = [group for group in groups if set(members) & set(group["params"])]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        return {}
    raise InvalidInputError(
        f"parameter group {number} mixes parameters of {len(candidates)} saved groups, whose options differ; "
        "group them as they were when the checkpoint was saved"
    )
