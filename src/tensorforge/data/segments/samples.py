"""The schema of a data set: what one sample is, and how many samples there are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final, cast

from tensorforge.encoding import decode, encode
from tensorforge.errors import EncodingError, InvalidInputError
from tensorforge.validation import whole_number

_DTYPE: Final = re.compile(r"[<|][iufb](1|2|4|8)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSchema:
    """The type of every sample: an array of one dtype and shape, or a record of any number of bytes.

    `dtype` is a numpy type string such as `<i4` or `|u1`; `None` means records.
    """

    dtype: str | None = None
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype is not None and not _DTYPE.fullmatch(self.dtype):
            raise InvalidInputError(
                f"dtype = {self.dtype!r}: must be a little-endian numpy type such as '<i4', or None"
            )
        for axis, length in enumerate(self.shape):
            whole_number(f"shape[{axis}]", length, least=0)
        if self.dtype is None and self.shape:
            raise InvalidInputError(f"shape = {self.shape!r}: records have no shape")

    @property
    def sample_bytes(self) -> int | None:
        """The size of every sample in bytes; `None` for records, whose sizes differ."""
        if self.dtype is None:
            return None
        size = int(self.dtype[2:])
        for length in self.shape:
            size *= length
        return size

    def decode(self, data: memoryview) -> Any:
        """Turn a sample's bytes into a numpy array that owns its memory, or into `bytes`."""
        if self.dtype is None:
            return bytes(data)
        import numpy as np

        return np.frombuffer(data, dtype=self.dtype).reshape(self.shape).copy()

    def encode_range(self, start: int, stop: int, samples: Any) -> memoryview:
        """Turn the samples `[start, stop)`, an array or a list of records, into a segment's body."""
        if self.dtype is None:
            records = [bytes(record) for record in samples]
            if len(records) != stop - start:
                raise InvalidInputError(f"{len(records)} records were given for [{start}, {stop})")
            lengths = b"".join(len(record).to_bytes(8, "little") for record in records)
            return memoryview(lengths + b"".join(records))
        import numpy as np

        data = np.ascontiguousarray(samples, dtype=self.dtype)
        expected = (stop - start, *self.shape)
        if data.shape != expected:
            raise InvalidInputError(
                f"an array of shape {data.shape} was given, expected {expected}"
            )
        return memoryview(cast("Any", data.reshape(-1).view(np.uint8)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetInfo:
    """What every copy of a data set agrees on: the schema of a sample and the number of samples."""

    size: int
    schema: SampleSchema

    def to_json(self) -> bytes:
        """The content of `schema.json`."""
        return json.dumps(encode(self), indent=2).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> DatasetInfo:
        """Parse `schema.json`; invalid content is an `EncodingError` that names `where`."""
        try:
            return decode(json.loads(data), cls)
        except ValueError as error:
            raise EncodingError(f"{where} does not describe a data set: {error}") from error
