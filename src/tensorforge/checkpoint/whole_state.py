"""A checkpoint without the model it belongs to: read whole, compare, carry to other formats and back."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.api import DistributedCheckpoint
from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.file_layout import MODEL, OPTIMIZER
from tensorforge.checkpoint.format.manifest import CheckpointManifest, TensorMetadata, corrupted
from tensorforge.checkpoint.format.state_trees import decode_tree
from tensorforge.checkpoint.load.chunks import StoredChunks
from tensorforge.checkpoint.load.targets import require_memory, whole_tensor
from tensorforge.checkpoint.load.tensor_reader import Destination, read_tensors
from tensorforge.checkpoint.model_state import tree_reader
from tensorforge.checkpoint.options import Progress, SaveOptions
from tensorforge.checkpoint.parallel import Guard
from tensorforge.checkpoint.ranks.coordinators import SingleProcess
from tensorforge.checkpoint.tensors import byte_view, describe
from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.storage.blobs import BlobStore
from tensorforge.typed_json import decode_typed

_FOREVER = 1e9
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class WholeState:
    """The states of a checkpoint as plain dictionaries of whole tensors."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None


class _Index(msgspec.Struct):
    """What matters of a Hugging Face index."""

    weight_map: dict[str, str]


class _Holder:
    """Makes a dictionary something that can be saved."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


def read_whole_tensors(
    store: BlobStore,
    manifest: CheckpointManifest,
    names: list[str],
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint, whole and verified; `CapacityError` if there is no memory for them."""
    require_memory(sum(manifest.tensors[name].nbytes for name in names), manifest.key)
    tensors = {name: whole_tensor(manifest.tensors[name]) for name in names}
    destinations = [
        Destination(name, Box.whole(tuple(tensor.shape)), tensor)
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    source = StoredChunks(store, manifest)
    read_tensors(source, destinations, guard=Guard(_FOREVER), progress=progress)
    return tensors


def read_whole(store: BlobStore, prefix: str, progress: Progress | None = None) -> WholeState:
    """All of a checkpoint except its random states; tied weights are one memory again."""
    manifest = store_index.read_manifest(store, prefix)
    ties = _tied_weights(manifest)
    wanted = (name for name in manifest.tensors if name.startswith((MODEL, OPTIMIZER)))
    names = [name for name in wanted if name not in ties]
    tensors = read_whole_tensors(store, manifest, names, progress)
    tensors |= {name: tensors[first] for name, first in ties.items()}
    states = {
        kind: decode_tree(manifest.state[kind], tree_reader(tensors), kind)
        for kind in ("model", "optimizer")
        if kind in manifest.state
    }
    if not isinstance(states.get("model"), dict):
        raise corrupted(f"{manifest.key} has no model in it", manifest.key)
    return WholeState(states["model"], states.get("optimizer"))


def _tied_weights(manifest: CheckpointManifest) -> dict[str, str]:
    """Names of a model's tensors that are the same bytes as an earlier one: name → first name."""
    first: dict[TensorMetadata, str] = {}
    ties = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith(MODEL) and tensor.chunks:
            kept = first.setdefault(tensor, name)
            if kept != name:
                ties[name] = kept
    return ties


def write_whole(
    store: BlobStore,
    state: WholeState,
    options: SaveOptions,
    progress: Progress | None = None,
) -> str:
    """Save dictionaries of whole tensors as a checkpoint."""
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    optimizer = None if state.optimizer is None else _Holder(state.optimizer)
    return checkpoint.save(_Holder(state.model), optimizer, options, progress=progress)


def import_foreign(path: Path, *, trust_pickle: bool = False) -> WholeState:
    """Read what another library wrote: torch.save, safetensors, a Hugging Face folder, or DCP.

    DCP's metadata is a pickle, which can run anything; it is read only with `trust_pickle`.
    """
    if not path.exists():
        raise NotFoundError(f"{path} does not exist")
    if path.is_dir():
        if (path / ".metadata").exists():
            return _import_dcp(path, trust_pickle=trust_pickle)
        return WholeState(_import_huggingface(path))
    if path.suffix == ".safetensors":
        return WholeState(_load_safetensors(path))
    return _import_torch(path)


def _load_safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    try:
        loaded = load_file(path)
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
    except Exception as error:  # whatever a foreign library makes of foreign bytes
        raise InvalidInputError(f"{path} is not a valid safetensors file: {error}") from error
    return _tied_again(loaded, said)


def _tied_again(
    loaded: dict[str, torch.Tensor], said: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Tensors with those that a file says to be other names of them, by name → first name."""
    for name, first in said.items():
        if name == "format" or first not in loaded:
            continue
        if name not in loaded or _are_equal(loaded[name], loaded[first]):
            loaded[name] = loaded[first]
    return loaded


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that NaN equals itself."""
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
        raise InvalidInputError(f"{folder}: the files lack {', '.join(missing[:5])}")
    return state


def _import_torch(path: Path) -> WholeState:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a foreign library makes of foreign bytes
        raise InvalidInputError(
            f"{path} is not a file of torch.save with tensors and plain values only: {error}"
        ) from error
    if not isinstance(loaded, dict):
        raise InvalidInputError(f"{path} holds a {type(loaded).__name__}, not a state dict")
    model = loaded.get("model")
    if isinstance(model, dict):
        return WholeState(model, loaded.get("optimizer"))
    return WholeState(loaded)


def _import_dcp(folder: Path, *, trust_pickle: bool) -> WholeState:
    if not trust_pickle:
        raise InvalidInputError(
            f"{folder} is a DCP checkpoint, whose metadata is a pickle and can run any code; "
            "if you trust where it is from, say so with --trust-pickle"
        )
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "state.pt"
        dcp_to_torch_save(folder, path)
        return _import_torch(path)


def export_foreign(state: WholeState, path: Path, kind: str) -> None:
    """Write for another library: `torch`, `safetensors`, `huggingface` or `dcp`; the path must be new.

    `safetensors` and `huggingface` hold the model only.
    """
    if path.exists():
        raise InvalidInputError(f"{path} exists already; choose another target or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {"model": dict(state.model)}
    if state.optimizer is not None:
        whole["optimizer"] = dict(state.optimizer)
    if kind == "torch":
        torch.save(whole, path)
    elif kind == "safetensors":
        _export_safetensors(state.model, path)
    elif kind == "huggingface":
        path.mkdir()
        _export_safetensors(state.model, path / _SINGLE)
    elif kind == "dcp":
        _export_dcp(whole, path)
    else:
        raise InvalidInputError(f"{kind!r} is not torch, safetensors, huggingface or dcp")


def _export_safetensors(model: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    others = [name for name, value in model.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise InvalidInputError(f"safetensors holds tensors only, not {', '.join(others[:5])}")
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in model.items():
        memory = describe(tensor, name).memory()
        kept = name if memory is None else first.setdefault(memory, name)
        if kept != name:
            ties[name] = kept
        # Every name has bytes of its own, for readers that know nothing of ties.
        tensors[name] = tensor if kept == name else tensor.clone()
    save_file(tensors, path, metadata={**ties, "format": "pt"})


def _export_dcp(whole: dict[str, Any], path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "state.pt"
        torch.save(whole, source)
        with contextlib.redirect_stdout(None):
            torch_save_to_dcp(source, path)
