"""Separates a state dictionary into a JSON tree and tensors, and joins them again; saves random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tensorforge.checkpoint.format.boxes import TensorBox
from tensorforge.checkpoint.format.file_layout import EXTRA, MODEL, OPTIMIZER, RANDOM
from tensorforge.checkpoint.format.formats import TORCH_NAMES
from tensorforge.checkpoint.format.state_trees import Json, encode_tree
from tensorforge.checkpoint.tensors import LocalTensor, describe, is_tensor
from tensorforge.errors import EncodingError, InvalidInputError

_CLASHING = tuple(f"{MODEL}{taken}" for taken in (OPTIMIZER, RANDOM, EXTRA, "__metadata__"))
"""Files name a model's tensors without `MODEL`; these names would be taken for other tensors there."""


@dataclass(slots=True)
class CapturedState:
    """A state as JSON trees with names in place of tensors, and the tensors by name.

    `sources` are the tensors as the caller passed them. `ties` are the further names of tensors that share
    memory (tied weights): name → first name.
    """

    trees: dict[str, Json] = field(default_factory=dict)
    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    sources: dict[str, Any] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    _by_memory: dict[Any, str] = field(default_factory=dict)

    def add(self, kind: str, state: Mapping[str, Any]) -> None:
        """Add a state dictionary as `kind` (`model`, `optimizer`, `rng` or `extra`)."""

        def leaf(value: object, where: str) -> Json | None:
            if is_tensor(value):
                return {"$tensor": self._put(where, value)}
            if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
                return {"$array": self._put(where, torch.from_numpy(np.ascontiguousarray(value)))}
            if isinstance(value, np.generic) and value.dtype.kind in "fiub":
                return encode_tree(value.item(), leaf, where)
            if isinstance(value, torch.dtype):
                return {"$dtype": str(value).removeprefix("torch.")}
            return None

        self.trees[kind] = encode_tree(state, leaf, kind)

    def _put(self, name: str, value: Any) -> str:
        if name in self.tensors:
            raise InvalidInputError(f"two tensors of the state are called {name!r}")
        if name.startswith(_CLASHING):
            raise InvalidInputError(f"{name!r}: a model's tensor may not be called that")
        local = self.tensors[name] = describe(value, name)
        self.sources[name] = value
        memory = local.memory()
        if memory is not None:
            # The first name is the one by which parameters and optimizers refer to the tensor.
            kept = self._by_memory.setdefault((name.partition("/")[0], memory), name)
            if kept != name:
                self.ties[name] = kept
        return name

    def boxes(self) -> list[TensorBox]:
        """The boxes of tensors that are in the memory of this rank."""
        return [
            TensorBox(name, tensor.dtype, tensor.shape, box.offset, box.shape)
            for name, tensor in self.tensors.items()
            for box, _ in tensor.boxes
        ]


def tree_reader(tensors: Mapping[str, Any]) -> Any:
    """A reader for `decode_tree` that looks tensors up in a dictionary."""

    def read(tag: str, value: Json, where: str) -> object:
        if tag in ("$tensor", "$array") and isinstance(value, str):
            if value not in tensors:
                raise EncodingError(f"{where}: there is no tensor {value!r}")
            tensor = tensors[value]
            return tensor.numpy() if tag == "$array" else tensor
        if tag == "$dtype" and value in TORCH_NAMES.values():
            return getattr(torch, value)
        raise EncodingError(f"{where}: unknown tag {tag}")

    return read


def random_state() -> dict[str, Any]:
    """The state of the random generators of Python, numpy and torch in this process."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "numbers": np.array(numbers, np.uint32), "gauss": gauss},
        "numpy": {
            "kind": str(kind),
            "keys": np.array(keys, np.uint32),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator to a state that `random_state` returned."""
    python, numpy_state = state["python"], state["numpy"]
    numbers = tuple(int(number) for number in python["numbers"])
    random.setstate((python["version"], numbers, python["gauss"]))
    np.random.set_state(
        (
            numpy_state["kind"],
            np.asarray(numpy_state["keys"], np.uint32),
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["cached"],
        )
    )
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def derive_random_state(digest: str, rank: int, world_size: int) -> None:
    """Seed every generator of a rank from the digest of a checkpoint that has another world size.

    The same digest, rank and world size always give the same random numbers; every rank gets different ones.
    """
    text = f"{digest}/{rank}/{world_size}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
