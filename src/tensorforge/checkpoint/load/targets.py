"""Where a checkpoint's tensors go: the memory of a model and an optimizer, matched by name."""

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
from tensorforge.checkpoint.model_state import Captured, tree_reader
from tensorforge.checkpoint.options import Mismatch, Stateful
from tensorforge.checkpoint.tensors import DTYPES, LocalTensor, TensorShard, describe
from tensorforge.errors import CapacityError

_ALWAYS_THERE = 256 << 20


class Targets:
    """Collects destinations and what does not match, then hands the filled state over."""

    def __init__(self, manifest: CheckpointManifest) -> None:
        self._manifest = manifest
        self.destinations: list[Destination] = []
        self.wanted: set[str] = set()
        self.missing: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []
        self._filled: dict[str, Any] = {}
        self._read: dict[object, TensorMetadata] = {}
        self._finish: list[Any] = []

    def mismatch(self, unexpected: tuple[str, ...] = ()) -> Mismatch:
        """What was found not to match."""
        return Mismatch(tuple(self.missing), unexpected, tuple(self.shapes), tuple(self.dtypes))

    def finish(self, *, strict: bool) -> None:
        """Hand the states over, after all destinations were filled."""
        for step in self._finish:
            step(strict)

    def add_stateful(self, kind: str, target: Stateful) -> None:
        """Match a model, or anything else with a state dict, with what was saved as `kind`."""
        captured = Captured()
        captured.add(kind, target.state_dict())
        saved = self._manifest.state.get(kind)
        if not isinstance(saved, dict):
            self.missing.append(kind)
            return
        self._match_plain(kind, captured.trees[kind], saved)
        is_live = _is_live(target)
        for name, source in captured.sources.items():
            place = source if is_live else _fresh(source)
            if self.add_tensor(name, place):
                self._filled[name] = optimizers.unwrap(place)
        self._finish.append(lambda strict: self._apply(target, kind, saved, strict, is_live))

    def _match_plain(self, kind: str, current: Json, saved: Json) -> None:
        """Entries that are not tensors must be there too."""
        for key, value in current.items():
            if key not in saved and not _is_tensor_entry(value):
                self.missing.append(f"{kind}/{key}")

    def _apply(
        self, target: Stateful, kind: str, saved: dict[str, Json], strict: bool, is_live: bool
    ) -> None:
        keep = _Pruned(self._filled)
        if is_live:
            others = {key: value for key, value in saved.items() if not _is_tensor_entry(value)}
            if others:
                state = decode_tree(keep.prune(others), tree_reader(self._filled), kind)
                target.load_state_dict(state, strict=False)  # type: ignore[call-arg]  # it is a module
            return
        state = decode_tree(keep.prune(saved), tree_reader(self._filled), kind)
        if isinstance(target, torch.nn.Module):
            target.load_state_dict(state, strict=strict)
        else:
            target.load_state_dict(state)

    def add_optimizer(self, optimizer: Any, model: Stateful | None) -> None:
        """Match an optimizer's state with what was saved, parameter by parameter."""
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
                    self._missing_state(name, optimizer.state.get(parameter))
                elif self._fits(name, parameter, model_state.get(name)):
                    state[name] = self._parameter_state(
                        name, entry, parameter, optimizer, model_state.get(name)
                    )
        groups = decode_tree(saved["groups"], tree_reader({}), "optimizer/groups")

        def finish(_strict: bool) -> None:
            keyed = {"groups": groups, "state": state}
            optimizer.load_state_dict(optimizers.positional_state(keyed, optimizer, names))

        self._finish.append(finish)

    def _missing_state(self, name: str, existing: Any) -> None:
        if existing:
            self.missing.append(f"optimizer/state/{name}")

    def _fits(self, name: str, parameter: torch.Tensor, shard: Any) -> bool:
        """Whether the parameter has the shape that it had; state of another shape is of no use."""
        saved = self._manifest.tensors.get(f"{MODEL}{name}")
        whole = shard.global_shape if isinstance(shard, TensorShard) else parameter.shape
        if saved is None or saved.shape == tuple(whole):
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
        target = optimizers.target_for(saved.shape, DTYPES[saved.dtype], existing, parameter, shard)
        self.add_tensor(name, target)
        return optimizers.unwrap(target)

    def add_tensor(self, name: str, target: Any) -> bool:
        """Ask for a tensor; `False` if it is missing or has another shape, which is noted."""
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
        if self._is_read_already(local, saved):
            return True
        for box, tensor in local.parts:
            if box.size:
                self.destinations.append(Destination(name, box, tensor))
        return True

    def _is_read_already(self, local: LocalTensor, saved: TensorMetadata) -> bool:
        """Whether the same bytes go to the same memory under another name: tied, then and now."""
        memory = local.memory()
        if memory is None:
            return False
        first = self._read.setdefault(memory, saved)
        return first is not saved and first == saved


class _Pruned:
    """Trees without the tensors that are not wanted."""

    def __init__(self, filled: Mapping[str, Any]) -> None:
        self._filled = filled

    def prune(self, tree: dict[str, Json]) -> dict[str, Json]:
        return {key: value for key, value in tree.items() if self._is_wanted(value)}

    def _is_wanted(self, value: Json) -> bool:
        return all(name in self._filled for name in tensor_names(value))


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
    """Whether what `state_dict` returns is the memory that the target computes with.

    True for modules without hooks or loading code of their own; then their tensors are read in place.
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


def _fresh(source: Any) -> Any:
    if isinstance(source, TensorShard):
        return TensorShard(torch.empty_like(source.tensor), source.offset, source.global_shape)
    return torch.empty_like(source, requires_grad=False)


def whole_tensor(saved: TensorMetadata) -> torch.Tensor:
    """Memory for a whole saved tensor."""
    require_memory(saved.nbytes, "a tensor of the checkpoint")
    return torch.empty(saved.shape, dtype=DTYPES[saved.dtype])


def require_memory(nbytes: int, what: str) -> None:
    """Raise `CapacityError` if so many bytes would not fit.

    A few bytes of a file can stand for any number of zeros, so what a manifest asks for must not be believed.
    """
    if nbytes < _ALWAYS_THERE:
        return
    available = psutil.virtual_memory().available
    if nbytes > available:
        raise CapacityError(
            f"{what} asks for {nbytes} bytes of memory, and {available} are free",
            requested=nbytes,
            available=available,
        )
