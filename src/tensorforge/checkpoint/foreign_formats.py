"""Checkpoints in the formats of other libraries: torch.save, safetensors, Hugging Face folders, DCP."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from tensorforge.checkpoint.full_state import FullState
from tensorforge.checkpoint.tensors import byte_view, describe
from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.typed_json import decode_typed

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Index(msgspec.Struct):
    """The part of a Hugging Face index that an import needs."""

    weight_map: dict[str, str]


def import_foreign(path: Path, *, trust_pickle: bool = False) -> FullState:
    """Read a file of torch.save or safetensors, a Hugging Face folder, or a DCP folder.

    The metadata of DCP is a pickle, which can run any code; it is read only with `trust_pickle`.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist")
    if path.is_dir():
        if (path / ".metadata").exists():
            return _import_dcp(path, trust_pickle=trust_pickle)
        return FullState(_import_huggingface(path))
    if path.suffix == ".safetensors":
        return FullState(_load_safetensors(path))
    return _import_torch(path)


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    try:
        loaded = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # any error that the library raises for a bad file
        raise InvalidInputError(f"{path} is not a valid safetensors file: {error}") from error
    return _restore_ties(loaded, metadata)


def _restore_ties(
    loaded: dict[str, torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """The tensors, with one memory for tied weights. Ties are in the metadata, as name → first name."""
    for name, first in metadata.items():
        if name == "format" or first not in loaded:
            continue
        if name not in loaded or _are_equal(loaded[name], loaded[first]):
            loaded[name] = loaded[first]
    return loaded


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, so that NaN equals itself."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
        (byte_view(one) == byte_view(other)).all()
    )


def _import_huggingface(folder: Path) -> dict[str, torch.Tensor]:
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise InvalidInputError(f"{folder} has neither {_INDEX}, {_SINGLE} nor .metadata")
        return _load_safetensors(folder / _SINGLE)
    try:
        index = decode_typed((folder / _INDEX).read_bytes(), _Index)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"{folder / _INDEX} is not a valid index: {error}") from error
    state: dict[str, torch.Tensor] = {}
    for file in sorted(set(index.weight_map.values())):
        if Path(file).name != file:
            raise InvalidInputError(f"{folder / _INDEX} points outside of its folder: {file!r}")
        loaded = _load_safetensors(folder / file)
        listed = {name for name in loaded if index.weight_map.get(name) == file}
        memory = {id(loaded[name]) for name in listed}
        tied = {name for name in loaded if id(loaded[name]) in memory} - set(index.weight_map)
        state.update({name: loaded[name] for name in listed | tied})
    missing = sorted(set(index.weight_map) - set(state))
    if missing:
        raise InvalidInputError(f"{folder}: no file has {', '.join(missing[:5])}")
    return state


def _import_torch(path: Path) -> FullState:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any error that the library raises for a bad file
        raise InvalidInputError(
            f"{path} is not a file of torch.save with tensors and plain values only: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise InvalidInputError(f"{path} has a {type(loaded).__name__} in it, not a state dict")
    model = loaded.get("model")
    if isinstance(model, dict):
        return FullState(model, loaded.get("optimizer"))
    return FullState(loaded)


def _import_dcp(folder: Path, *, trust_pickle: bool) -> FullState:
    if not trust_pickle:
        raise InvalidInputError(
            f"{folder} is a DCP checkpoint, whose metadata is a pickle and can run any code; "
            "pass --trust-pickle if you trust its origin"
        )
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "state.pt"
        dcp_to_torch_save(folder, path)
        return _import_torch(path)


def export_foreign(state: FullState, path: Path, kind: str) -> None:
    """Write the format `kind`: `torch`, `safetensors`, `huggingface` or `dcp`. The path must be new.

    `safetensors` and `huggingface` store the model only.
    """
    if path.exists():
        raise InvalidInputError(f"{path} exists already; choose another target or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        everything["optimizer"] = dict(state.optimizer)
    if kind == "torch":
        torch.save(everything, path)
    elif kind == "safetensors":
        _export_safetensors(state.model, path)
    elif kind == "huggingface":
        path.mkdir()
        _export_safetensors(state.model, path / _SINGLE)
    elif kind == "dcp":
        _export_dcp(everything, path)
    else:
        raise InvalidInputError(f"{kind!r} is not torch, safetensors, huggingface or dcp")


def _export_safetensors(model: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    others = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise InvalidInputError(f"safetensors stores tensors only, not {', '.join(others[:5])}")
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in model.items():
        memory = describe(tensor, name).memory()
        kept = name if memory is None else first.setdefault(memory, name)
        if kept != name:
            ties[name] = kept
        # Every name gets bytes of its own, for readers that do not know ties.
        tensors[name] = tensor if kept == name else tensor.clone()
    save_file(tensors, path, metadata={**ties, "format": "pt"})


def _export_dcp(state: dict[str, Any], path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "state.pt"
        torch.save(state, source)
        with contextlib.redirect_stdout(None):
            torch_save_to_dcp(source, path)
