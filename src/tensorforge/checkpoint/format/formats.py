"""The names that a manifest uses: element types, layouts of files, levels of compression."""

from __future__ import annotations

from enum import Enum

_ELEMENT_TYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}

TORCH_NAMES = {name: torch_name for name, (torch_name, _) in _ELEMENT_TYPES.items()}
"""Element type by its safetensors name → its name in torch."""

ITEM_SIZES = {name: size for name, (_, size) in _ELEMENT_TYPES.items()}
"""Element type by its safetensors name → bytes per element."""


class CheckpointFormat(Enum):
    """How the tensors of a checkpoint are distributed over files."""

    SINGLE_FILE = "single_file"
    """One file with every tensor, written by rank 0."""
    MULTI_SHARD = "multi_shard"
    """One file per rank, with boxes of the tensors that are in the memory of that rank."""
    CONSOLIDATED = "consolidated"
    """Files with complete tensors and an index, as Hugging Face libraries read them."""


class CompressionLevel(Enum):
    """How much time a save spends on making its files smaller."""

    NONE = "none"
    FAST = "fast"
    BALANCED = "balanced"
    MAXIMUM = "maximum"
