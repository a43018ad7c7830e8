"""A checkpoint as dictionaries of complete tensors, read or written without the model it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tensorforge.checkpoint import store_index
from tensorforge.checkpoint.api import DistributedCheckpoint
from tensorforge.checkpoint.format.boxes import Box
from tensorforge.checkpoint.format.file_layout import MODEL, OPTIMIZER
from tensorforge.checkpoint.format.manifest import CheckpointManifest, TensorMetadata, corrupted
from tensorforge.checkpoint.format.state_trees import decode_tree
from tensorforge.checkpoint.load.stored_chunks import StoredChunks
from tensorforge.checkpoint.load.targets import allocate_tensor, require_memory
from tensorforge.checkpoint.load.tensor_reader import Destination, read_tensors
from tensorforge.checkpoint.model_state import tree_reader
from tensorforge.checkpoint.options import Progress, SaveOptions
from tensorforge.checkpoint.parallel import Deadline
from tensorforge.checkpoint.ranks.coordinators import SingleProcess
from tensorforge.storage.blobs import BlobStore


@dataclass(frozen=True, slots=True)
class FullState:
    """The state dictionaries of a checkpoint, with complete tensors."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] | None = None


class _StateHolder:
    """Gives a dictionary the methods of `Stateful`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict


def read_full_tensors(
    store: BlobStore,
    manifest: CheckpointManifest,
    names: list[str],
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Some tensors of a checkpoint, complete and verified; `CapacityError` if memory does not suffice."""
    require_memory(sum(manifest.tensors[name].nbytes for name in names), manifest.key)
    tensors = {name: allocate_tensor(manifest.tensors[name]) for name in names}
    destinations = [
        Destination(name, Box.full(tuple(tensor.shape)), tensor)
        for name, tensor in tensors.items()
        if tensor.numel()
    ]
    source = StoredChunks(store, manifest)
    read_tensors(source, destinations, deadline=Deadline(), progress=progress)
    return tensors


def read_full_state(store: BlobStore, prefix: str, progress: Progress | None = None) -> FullState:
    """The model and the optimizer of a checkpoint. Tied weights share memory, as they did when saved."""
    manifest = store_index.read_manifest(store, prefix)
    ties = _tied_weights(manifest)
    wanted = (name for name in manifest.tensors if name.startswith((MODEL, OPTIMIZER)))
    names = [name for name in wanted if name not in ties]
    tensors = read_full_tensors(store, manifest, names, progress)
    tensors |= {name: tensors[first] for name, first in ties.items()}
    states = {
        kind: decode_tree(manifest.state[kind], tree_reader(tensors), kind)
        for kind in ("model", "optimizer")
        if kind in manifest.state
    }
    if not isinstance(states.get("model"), dict):
        raise corrupted(f"{manifest.key} has no model in it", manifest.key)
    return FullState(states["model"], states.get("optimizer"))


def _tied_weights(manifest: CheckpointManifest) -> dict[str, str]:
    """The names of model tensors that have the same chunks as an earlier one: name → first name."""
    first: dict[TensorMetadata, str] = {}
    ties = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith(MODEL) and tensor.chunks:
            kept = first.setdefault(tensor, name)
            if kept != name:
                ties[name] = kept
    return ties


def write_full_state(
    store: BlobStore,
    state: FullState,
    options: SaveOptions,
    progress: Progress | None = None,
) -> str:
    """Save dictionaries of complete tensors as a checkpoint, and return its prefix."""
    checkpoint = DistributedCheckpoint(SingleProcess(), store)
    optimizer = None if state.optimizer is None else _StateHolder(state.optimizer)
    return checkpoint.save(_StateHolder(state.model), optimizer, options, progress=progress)
