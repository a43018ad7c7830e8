"""The state of a run as plain data and raw tensors, to be sent, compared and checkpointed.

Nothing is pickled. Nested dictionaries, lists and tuples of numbers, strings and tensors can be encoded;
for anything else the error says where in the state it is.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from tensorforge.errors import EncodingError, InvalidInputError
from tensorforge.train.group.host_staging import flat_bytes, host_pieces

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


@dataclass(frozen=True, slots=True)
class FlatState:
    """`structure` can be written as JSON and refers to `tensors` by number."""

    structure: Any
    tensors: list[torch.Tensor]

    def header(self) -> bytes:
        """The structure and the tensors' types and shapes; equal states have equal headers."""
        shapes = [[dtype_name(t.dtype), list(t.shape)] for t in self.tensors]
        return json.dumps([self.structure, shapes], separators=(",", ":"), sort_keys=True).encode()

    def digest(self) -> bytes:
        """A 128-bit hash of every bit of the state."""
        digest = xxhash.xxh3_128(self.header())
        for tensor in self.tensors:
            for piece in host_pieces(tensor):
                content: Any = piece.numpy()
                digest.update(content)
        return digest.digest()


def flatten(value: Any) -> FlatState:
    """Separate nested plain data from its tensors, which are not copied. Dictionaries are sorted."""
    tensors: list[torch.Tensor] = []
    return FlatState(_flatten(value, tensors, "state"), tensors)


def unflatten(flat: FlatState) -> Any:
    """The inverse of `flatten`. A malformed structure is an `EncodingError`."""
    return _unflatten(flat.structure, flat.tensors)


def empty_like_header(header: bytes) -> FlatState:
    """A state with the structure of `header` and uninitialised tensors."""
    try:
        structure, shapes = json.loads(header)
        tensors = [torch.empty(shape, dtype=_DTYPES[name]) for name, shape in shapes]
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise EncodingError(f"not the header of a state: {error}") from error
    return FlatState(structure, tensors)


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 tensor of the CPU; shares memory if it is contiguous there."""
    return flat_bytes(tensor.cpu())


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _flatten(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        pairs = [
            [_flatten(key, tensors, f"{where} key"), _flatten(item, tensors, f"{where}[{key!r}]")]
            for key, item in sorted(value.items(), key=lambda pair: (str(type(pair[0])), pair[0]))
        ]
        return {"$counter" if isinstance(value, Counter) else "$dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _flatten(value.item(), tensors, where)
    raise InvalidInputError(
        f"{where}: a {type(value).__name__} cannot be sent to other workers; "
        "a state may hold numbers, strings, tensors, and dictionaries, lists and tuples of them"
    )


def _unflatten(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(data, list):
        return [_unflatten(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        (kind, content), *more = data.items()
        if more:
            raise EncodingError(f"a marked value has one key, not {sorted(data)}")
        return _MARKED[kind](content, tensors)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise EncodingError(f"not the structure of a state: {error!r}") from error


def _pairs(content: Any, tensors: Sequence[torch.Tensor]) -> dict[Any, Any]:
    return {_unflatten(key, tensors): _unflatten(item, tensors) for key, item in content}


_MARKED: dict[str, Any] = {
    "$float": lambda content, _: float(content),
    "$tensor": lambda content, tensors: tensors[content],
    "$dict": _pairs,
    "$counter": lambda content, tensors: Counter(_pairs(content, tensors)),
    "$tuple": lambda content, tensors: tuple(_unflatten(item, tensors) for item in content),
    "$bytes": lambda content, _: base64.b64decode(content),
    "$dtype": lambda content, _: _DTYPES[content],
}
