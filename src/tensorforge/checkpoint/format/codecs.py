"""Codecs: how the bytes of a chunk are compressed for storage."""

from __future__ import annotations

from typing import Protocol

import zstandard

from tensorforge.checkpoint.format.formats import CompressionLevel
from tensorforge.checkpoint.format.manifest import RAW
from tensorforge.errors import EncodingError


class Codec(Protocol):
    """One encoding of bytes.

    A codec with `needs_base` stores the difference between a chunk and a base of the same length, which
    `encode` and `decode` then both receive.
    """

    @property
    def name(self) -> str:
        """The name in manifests. The meaning of a name never changes."""

    @property
    def needs_base(self) -> bool:
        """Whether the codec stores a difference."""

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:
        """The bytes to store for `raw`, whose elements are `item_size` bytes long."""

    def decode(
        self, stored: memoryview, into: memoryview, item_size: int, base: memoryview | None = None
    ) -> None:
        """Fill `into` exactly; `EncodingError` if `stored` decodes to another length or not at all."""


class ZstdCodec:
    """Zstandard on grouped bytes (see `group_bytes`), which compresses numbers better than plain Zstandard."""

    name = "grouped-zstd"
    needs_base = False

    def __init__(self, level: int = 1) -> None:
        self._level = level

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:  # noqa: ARG002
        """Group the bytes and compress them."""
        return zstandard.ZstdCompressor(level=self._level).compress(group_bytes(raw, item_size))

    def decode(
        self,
        stored: memoryview,
        into: memoryview,
        item_size: int,
        base: memoryview | None = None,  # noqa: ARG002
    ) -> None:
        """Decompress at most `len(into)` bytes and restore their order."""
        ungroup_bytes(decompress(stored, len(into)), into, item_size)


class DifferenceCodec:
    """The exclusive or of a chunk and its base, grouped and compressed.

    A number that changed little has equal high bytes in both, and an unchanged row becomes zeros.
    """

    name = "xor-grouped-zstd"
    needs_base = True

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:
        """Compress the difference between `raw` and `base`."""
        changed = exclusive_or(raw, base)
        return zstandard.ZstdCompressor(level=1).compress(group_bytes(changed, item_size))

    def decode(
        self, stored: memoryview, into: memoryview, item_size: int, base: memoryview | None = None
    ) -> None:
        """Decompress the difference and apply it to `base`."""
        ungroup_bytes(decompress(stored, len(into)), into, item_size)
        exclusive_or(into, base, into)


def exclusive_or(
    left: memoryview, right: memoryview | None, into: memoryview | None = None
) -> memoryview:
    """The exclusive or of two buffers of equal length, written to `into` or to a new buffer."""
    if right is None or len(right) != len(left):
        raise EncodingError(f"a difference of {len(left)} bytes needs a base of that length")
    import numpy as np

    target = memoryview(bytearray(len(left))) if into is None else into
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in (left, right, target)]
    words = len(left) // 8 * 8
    a, b, out = (array[:words].view(np.uint64) for array in arrays)
    np.bitwise_xor(a, b, out=out)
    np.bitwise_xor(arrays[0][words:], arrays[1][words:], out=arrays[2][words:])
    return target


def decompress(stored: memoryview, size: int) -> bytes:
    """Decompress one Zstandard frame of exactly `size` bytes; never allocates more than that."""
    try:
        declared = zstandard.get_frame_parameters(stored).content_size
        if declared != size:
            raise EncodingError(f"the frame declares {declared} bytes instead of {size}")
        content = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    except zstandard.ZstdError as error:
        raise EncodingError(f"the frame cannot be decompressed: {error}") from error
    if len(content) != size:
        raise EncodingError(f"the frame has {len(content)} bytes, although it declares {size}")
    return content


def group_bytes(raw: memoryview, item_size: int) -> bytes | memoryview:
    """The first bytes of all elements, then the second bytes of all elements, and so on."""
    if item_size == 1:
        return raw
    import numpy as np

    return np.frombuffer(raw, np.uint8).reshape(-1, item_size).T.tobytes()


def ungroup_bytes(grouped: bytes, into: memoryview, item_size: int) -> None:
    """The inverse of `group_bytes`, written to a buffer."""
    import numpy as np

    planes = np.frombuffer(grouped, np.uint8).reshape(item_size, -1)
    elements = np.frombuffer(into, np.uint8).reshape(-1, item_size)
    for index in range(item_size):  # plane by plane: five times as fast as one transposed copy
        elements[:, index] = planes[index]


_LEVELS = {
    CompressionLevel.FAST: 1,
    CompressionLevel.BALANCED: 6,
    CompressionLevel.MAXIMUM: 19,
}

_CODECS: dict[str, Codec] = {
    ZstdCodec.name: ZstdCodec(),
    DifferenceCodec.name: DifferenceCodec(),
}


def encoder_for(level: CompressionLevel) -> Codec | None:
    """The codec for saving at a level; `None` for no compression."""
    return ZstdCodec(_LEVELS[level]) if level in _LEVELS else None


def codec_named(name: str) -> Codec:
    """The codec with this name in manifests; `EncodingError` if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        known = ", ".join(sorted([RAW, *_CODECS]))
        raise EncodingError(f"unknown codec {name!r}; known are {known}")
    return codec
