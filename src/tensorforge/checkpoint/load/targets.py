"""Matches a checkpoint with a model and an optimizer by name: which memory each saved tensor is loaded into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch

from tensorforge.checkpoint import optimizers
from tensorforge.checkpoint.format.file_layout import MODEL, OPTIMIZER
from tensorforge.checkpoint.format.manifest import CheckpointManifest, TensorMetadata
from tensorforge.checkpoint.format.state_trees import Json, decode_tree
from tensorforge.checkpoint.load.tensor_reader import Destination
from tensorforge.checkpoint.model_state import CapturedState, tree_reader
from tensorforge.checkpoint.options import Mismatch, Stateful
from tensorforge.checkpoint.tensors import DTYPES, LocalTensor, TensorShard, describe
from tensorforge.errors import CapacityError

_SMALL = 256 << 20


class Targets:
    """Collects the destinations of a load and the mismatches.

    After the destinations were filled, `finish` passes the state to the model and the optimizer.
    """

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._manifest = manifest
        self.destinations: list[Destination] = []
        self.wanted: set[str] = set()
        self.missing: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self._filled: dict[str, Any] = {}
        self._by_memory: dict[object, TensorMetadata] = {}
        self._finish: list[Any] = []

    def mismatch(self) -> Mismatch:
        """The mismatches so far. Tensors that only the checkpoint has are not known here."""
        return Mismatch(tuple(self.missing), (), tuple(self.shapes), tuple(self.dtypes))

    def finish(self, *, strict: bool) -> None:
        """Call `load_state_dict` of the model and the optimizer; all destinations must be filled."""
        for step in self._finish:
            step(strict)

    def add_stateful(self, kind: str, target: Stateful) -> None:
        """Match a model, or any other object with a state dict, with the state saved as `kind`."""
        captured = CapturedState()
        captured.add(kind, target.state_dict())
        saved = self._manifest.state.get(kind)
        if not isinstance(saved, dict):
            self.missing.append(kind)
            return
        self._match_values(kind, captured.trees[kind], saved)
        is_live = _is_live(target)
        for name, source in captured.sources.items():
            tensor = source if is_live else _empty_like(source)
            if self.add_tensor(name, tensor):
                self._filled[name] = optimizers.unwrap(tensor)
        self._finish.append(lambda strict: self._apply(target, kind, saved, strict, is_live))

    def _match_values(self, kind: str, current: Json, saved: Json) -> None:
        """Note the values that are not tensors and not in the checkpoint."""
        for key, value in current.items():
            if key not in saved and not _is_tensor_entry(value):
                self.missing.append(f"{kind}/{key}")

    def _apply(
        self, target: Stateful, kind: str, saved: dict[str, Json], strict: bool, is_live: bool
    ) -> None:
        if is_live:
            others = {key: value for key, value in saved.items() if not _is_tensor_entry(value)}
            if others:
                state = self._decode(kind, others)
                target.load_state_dict(state, strict=False)  # type: ignore[call-arg]  # it is a module
            return
        state = self._decode(kind, saved)
        if isinstance(target, torch.nn.Module):
            target.load_state_dict(state, strict=strict)
        else:
            target.load_state_dict(state)

    def _decode(self, kind: str, saved: dict[str, Json]) -> Any:
        """The saved state, without the entries that have tensors for which there is no destination."""
        loaded = {
            key: value
            for key, value in saved.items()
            if all(name in self._filled for name in tensor_names(value))
        }
        return decode_tree(loaded, tree_reader(self._filled), kind)

    def add_optimizer(self, optimizer: Any, model: Stateful | None) -> None:
        """Match the state of an optimizer with the saved one, parameter by parameter."""
        if not optimizers.is_keyed(optimizer):
            self.add_stateful("optimizer", optimizer)
            return
        saved = self._manifest.state.get("optimizer")
        if not isinstance(saved, dict) or not {"groups", "state"} <= set(saved):
            self.missing.append("optimizer")
            return
        names = optimizers.parameter_names(model, optimizer)
        model_state = model.state_dict() if model is not None else {}
        state: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                entry = saved["state"].get(name)
                if entry is None:
                    if optimizer.state.get(parameter):
                        self.missing.append(f"optimizer/state/{name}")
                elif self._fits(name, parameter, model_state.get(name)):
                    state[name] = self._parameter_state(
                        name, entry, parameter, optimizer, model_state.get(name)
                    )
        groups = decode_tree(saved["groups"], tree_reader({}), "optimizer/groups")

        def finish(_strict: bool) -> None:
            keyed = {"groups": groups, "state": state}
            optimizer.load_state_dict(optimizers.positional_state(keyed, optimizer, names))

        self._finish.append(finish)

    def _fits(self, name: str, parameter: torch.Tensor, shard: Any) -> bool:
        """Whether the parameter has the same shape as in the checkpoint; otherwise its state is not loaded."""
        saved = self._manifest.tensors.get(f"{MODEL}{name}")
        full_shape = shard.global_shape if isinstance(shard, TensorShard) else parameter.shape
        if saved is None or saved.shape == tuple(full_shape):
            return True
        entry = self._manifest.state["optimizer"]["state"][name]
        self.wanted.update(tensor_names(entry))
        self.shapes.append(f"{OPTIMIZER}state/{name} belongs to shape {list(saved.shape)}")
        return False

    def _parameter_state(
        self,
        name: str,
        entry: Mapping[str, Json],
        parameter: torch.Tensor,
        optimizer: Any,
        shard: Any,
    ) -> dict[str, Any]:
        existing = optimizer.state.get(parameter, {})
        values = {}
        for key, tree in entry.items():

            def read(tag: str, value: Json, where: str, key: str = key) -> object:
                if tag == "$tensor" and value in self._manifest.tensors:
                    return self._optimizer_tensor(value, existing.get(key), parameter, shard)
                return tree_reader({})(tag, value, where)

            values[key] = decode_tree(tree, read, f"optimizer/state/{name}/{key}")
        return values

    def _optimizer_tensor(
        self, name: str, existing: Any, parameter: torch.Tensor, shard: Any
    ) -> Any:
        saved = self._manifest.tensors[name]
        require_memory(saved.nbytes, name)
        dtype = DTYPES[saved.dtype]
        target = optimizers.destination_for(saved.shape, dtype, existing, parameter, shard)
        self.add_tensor(name, target)
        return optimizers.unwrap(target)

    def add_tensor(self, name: str, target: Any) -> bool:
        """Add the destination of a tensor; if name or shape does not match, note that and return `False`."""
        self.wanted.add(name)
        saved = self._manifest.tensors.get(name)
        if saved is None:
            self.missing.append(name)
            return False
        local = describe(target, name)
        if local.shape != saved.shape:
            self.shapes.append(f"{name} is {list(saved.shape)}, not {list(local.shape)}")
            return False
        if local.dtype != saved.dtype:
            self.dtypes.append(f"{name} is {saved.dtype}, not {local.dtype}")
        if self._is_known_tie(local, saved):
            return True
        for box, tensor in local.boxes:
            if box.size:
                self.destinations.append(Destination(name, box, tensor))
        return True

    def _is_known_tie(self, local: LocalTensor, saved: TensorMetadata) -> bool:
        """Whether the tensor is tied to an earlier one, both in the checkpoint and in the model."""
        memory = local.memory()
        if memory is None:
            return False
        first = self._by_memory.setdefault(memory, saved)
        return first is not saved and first == saved


def tensor_names(tree: Json) -> Iterator[str]:
    """The names of all tensors that a tree refers to."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_names(item)
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("$tensor", "$array") and isinstance(value, str):
                yield value
            else:
                yield from tensor_names(value)


def _is_tensor_entry(value: Json) -> bool:
    return isinstance(value, dict) and set(value) == {"$tensor"}


def _is_live(target: Stateful) -> bool:
    """Whether the tensors that `state_dict` returns are those that the target computes with.

    True for modules without hooks or loading code of their own. Their tensors are then loaded in place.
    """
    if not isinstance(target, torch.nn.Module):
        return False
    if type(target).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    for module in target.modules():
        custom = type(module)._load_from_state_dict is not torch.nn.Module._load_from_state_dict  # noqa: SLF001
        is_torchs = type(module).__module__.startswith("torch.nn.")
        hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks  # noqa: SLF001
        if hooks or (custom and not is_torchs) or module._state_dict_hooks:  # noqa: SLF001
            return False
    return True


def _empty_like(source: Any) -> Any:
    if isinstance(source, TensorShard):
        return TensorShard(torch.empty_like(source.tensor), source.offset, source.global_shape)
    return torch.empty_like(source, requires_grad=False)


def allocate_tensor(saved: TensorMetadata) -> torch.Tensor:
    """Uninitialised memory for a complete saved tensor; `CapacityError` if there is not enough."""
    require_memory(saved.nbytes, "a tensor of the checkpoint")
    return torch.empty(saved.shape, dtype=DTYPES[saved.dtype])


def require_memory(nbytes: int, what: str) -> None:
    """Raise `CapacityError` if fewer bytes of memory are free.

    A few compressed bytes can decode to any number of zeros, so the sizes in a manifest are not trusted.
    """
    if nbytes < _SMALL:
        return
    available = psutil.virtual_memory().available
    if nbytes > available:
        raise CapacityError(
            f"{what} needs {nbytes} bytes of memory, and {available} are free",
            requested=nbytes,
            available=available,
        )
