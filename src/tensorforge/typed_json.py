"""JSON decoded directly into a type by msgspec, from any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec

Kind = TypeVar("Kind")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_lock = threading.Lock()


def decode_typed(data: bytes | str, kind: type[Kind]) -> Kind:
    """Decode `data` as a `kind`; msgspec's errors are raised unchanged, for the caller to translate."""
    return cast("Kind", _decoder(kind).decode(data))


def convert_typed(values: Mapping[str, Any], kind: type[Kind]) -> Kind:
    """Make a `kind` of values that may all be text, such as query parameters."""
    _decoder(kind)
    return msgspec.convert(dict(values), kind, strict=False)


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, made once and under a lock.

    When two threads are the first to decode the same type, msgspec may crash the process while it
    inspects that type.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder
