"""How a checkpoint is stored: its layout and its compression."""

from __future__ import annotations

from enum import Enum


class CheckpointFormat(Enum):
    """How a checkpoint is spread over files."""

    SINGLE_FILE = "single_file"
    MULTI_SHARD = "multi_shard"
    CONSOLIDATED = "consolidated"


class CompressionLevel(Enum):
    """How hard to try to make a checkpoint smaller."""

    NONE = "none"
    FAST = "fast"
    BALANCED = "balanced"
    MAXIMUM = "maximum"
