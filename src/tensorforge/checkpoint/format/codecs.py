"""How a chunk's bytes are stored: as they are, or smaller. A registry, so that others can be added."""

from __future__ import annotations

from typing import Protocol

import zstandard

from tensorforge.checkpoint.format.formats import CompressionLevel
from tensorforge.checkpoint.format.manifest import RAW
from tensorforge.errors import EncodingError, InvalidInputError


class Codec(Protocol):
    """One encoding. `name` stands in manifests, so it never changes its meaning.

    A codec with `needs_base` stores a difference; both calls then get the bytes that it is taken from, as
    long as the chunk itself.
    """

    @property
    def name(self) -> str:
        """What manifests call it."""

    @property
    def needs_base(self) -> bool:
        """Whether it stores a difference."""

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:
        """The bytes to store for `raw`, whose elements have `item_size` bytes."""

    def decode(
        self, stored: memoryview, into: memoryview, item_size: int, base: memoryview | None = None
    ) -> None:
        """Fill `into` exactly; `EncodingError` if `stored` holds more, less or nonsense."""


class ZstdCodec:
    """Zstandard after grouping the bytes of all elements by their place, which suits numbers."""

    name = "grouped-zstd"
    needs_base = False

    def __init__(self, level: int = 1) -> None:
        self._level = level

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:  # noqa: ARG002
        """Group and compress."""
        return zstandard.ZstdCompressor(level=self._level).compress(group_bytes(raw, item_size))

    def decode(
        self,
        stored: memoryview,
        into: memoryview,
        item_size: int,
        base: memoryview | None = None,  # noqa: ARG002
    ) -> None:
        """Decompress no more than fits, then put the bytes back in their order."""
        ungroup_bytes(decompress(stored, len(into)), into, item_size)


class DifferenceCodec:
    """What changed since a base: the exclusive or of both, grouped and compressed.

    Numbers that hardly moved keep their high bytes, and rows that did not move at all are zeros.
    """

    name = "xor-grouped-zstd"
    needs_base = True

    def encode(self, raw: memoryview, item_size: int, base: memoryview | None = None) -> bytes:
        """Compress the difference to `base`."""
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
    """The bytes that differ between two buffers of one length, in `into` or a new one."""
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
    """Decompress one frame that must hold exactly `size` bytes; never allocates more than that."""
    try:
        promised = zstandard.get_frame_parameters(stored).content_size
        if promised != size:
            raise EncodingError(f"the frame holds {promised} bytes instead of {size}")
        content = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    except zstandard.ZstdError as error:
        raise EncodingError(f"the frame cannot be decompressed: {error}") from error
    if len(content) != size:
        raise EncodingError(f"the frame holds {len(content)} bytes, although it promises {size}")
    return content


def group_bytes(raw: memoryview, item_size: int) -> bytes | memoryview:
    """All first bytes of the elements, then all second bytes, and so on."""
    if item_size == 1:
        return raw
    import numpy as np

    return np.frombuffer(raw, np.uint8).reshape(-1, item_size).T.tobytes()


def ungroup_bytes(grouped: bytes, into: memoryview, item_size: int) -> None:
    """The inverse of `group_bytes`, into a buffer."""
    import numpy as np

    planes = np.frombuffer(grouped, np.uint8).reshape(item_size, -1)
    elements = np.frombuffer(into, np.uint8).reshape(-1, item_size)
    for place in range(item_size):  # plane by plane: five times as fast as one transposed copy
        elements[:, place] = planes[place]


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
    """The codec that saves at a level, `None` for no compression."""
    return ZstdCodec(_LEVELS[level]) if level in _LEVELS else None


def codec_named(name: str) -> Codec:
    """The codec that manifests call `name`; `EncodingError` if nobody registered it."""
    codec = _CODECS.get(name)
    if codec is None:
        known = ", ".join(sorted([RAW, *_CODECS]))
        raise EncodingError(f"unknown codec {name!r}; known are {known}")
    return codec


def register_codec(codec: Codec) -> None:
    """Make a codec readable; registering another one under a taken name is an error."""
    taken = _CODECS.get(codec.name)
    if codec.name == RAW or (taken is not None and type(taken) is not type(codec)):
        raise InvalidInputError(f"the codec name {codec.name!r} is taken")
    _CODECS[codec.name] = codec
