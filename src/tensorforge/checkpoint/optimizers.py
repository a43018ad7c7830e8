"""Optimizer state keyed by parameter name, so that it outlives another order, grouping or number of ranks.

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
    """Whether the optimizer is torch's, with groups of parameters; others are saved as they are."""
    return isinstance(optimizer, torch.optim.Optimizer)


def parameter_names(model: Stateful | None, optimizer: Any) -> dict[int, str]:
    """Parameter (by identity) → name: the model's, else its place in the optimizer."""
    names: dict[int, str] = {}
    if isinstance(model, torch.nn.Module):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    place = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names.setdefault(id(parameter), f"parameter-{place}")
            place += 1
    return names


def keyed_state(
    optimizer: Any, names: Mapping[int, str], model_state: Mapping[str, Any]
) -> dict[str, Any]:
    """The optimizer's state by parameter name.

    Where the model's state dict says that a parameter is a part of a larger tensor, so are the tensors of
    its shape that the optimizer keeps for it.
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
        options = {key: value for key, value in group.items() if key not in _PLACES}
        groups.append({**options, "params": [names[id(p)] for p in live["params"]]})
    return {"groups": groups, "state": state}


_PLACES = ("params", "param_names")


def _like_shard(value: Any, shard: Any) -> Any:
    if (
        isinstance(shard, TensorShard)
        and isinstance(value, torch.Tensor)
        and value.shape == shard.tensor.shape
    ):
        return TensorShard(value, shard.offset, shard.global_shape)
    return value


def unwrap(value: Any) -> Any:
    """The memory of a part of a tensor; anything else as it is."""
    return value.tensor if isinstance(value, TensorShard) else value


def target_for(
    shape: tuple[int, ...], dtype: torch.dtype, existing: Any, parameter: torch.Tensor, shard: Any
) -> Any:
    """Where a saved tensor of an optimizer's state goes: what is there already, or new memory like it.

    A tensor of the parameter's own shape lies as the parameter does (in parts, on its device).
    """
    if isinstance(existing, torch.Tensor) and existing.dtype == dtype:
        wrapped = _like_shard(existing, shard)
        whole = wrapped.global_shape if isinstance(wrapped, TensorShard) else existing.shape
        if tuple(whole) == shape:
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
    """What `optimizer.load_state_dict` expects, from a state keyed by name."""
    state, groups, place = {}, [], 0
    for number, live in enumerate(optimizer.param_groups):
        held = [names[id(parameter)] for parameter in live["params"]]
        source = _matching_group(saved["groups"], held, number)
        current = {key: value for key, value in live.items() if key not in _PLACES}
        options = {key: value for key, value in source.items() if key != "params"}
        places = list(range(place, place + len(held)))
        groups.append({**current, **options, "params": places})
        for index, name in zip(places, held, strict=True):
            if name in saved["state"]:
                values = saved["state"][name]
                state[index] = {key: unwrap(value) for key, value in values.items()}
        place += len(held)
    return {"state": state, "param_groups": groups}


def _matching_group(groups: list[Any], held: list[str], number: int) -> Any:
    """The saved group whose options apply: the one that holds these parameters."""
    if not held:
        return groups[number] if number < len(groups) else {}
    candidates = [group for group in groups if set(held) & set(group["params"])]
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        return {}
    raise InvalidInputError(
        f"parameter group {number} mixes parameters of {len(candidates)} saved groups, whose options differ; "
        "group them as they were when the checkpoint was saved"
    )
