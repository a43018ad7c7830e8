"""The one encoding of dataclasses as JSON-able data, for files, environment and wire.

    encode(WorkerId("a", "h", 1))
    {"type": "WorkerId", "version": 1, "data": {"id": "a", "hostname": "h", "port": 1}}

Type and version stand only at the outermost level; inside, the annotations of the dataclass give the types.
Decoding is strict: another type, a newer version, a missing or an unknown field, and a boolean in the place
of a number are each an `EncodingError` that names the place. A class whose encoding changes sets
`ENCODING_VERSION`; whoever reads older versions converts them before `decode`.

| annotation | JSON |
|---|---|
| `str`, `int`, `bool`, `None` | itself |
| `float` | a number; `"nan"`, `"inf"`, `"-inf"` |
| `bytes` | base64 |
| `datetime` | ISO 8601 in UTC; a naive one is an error |
| an enum | its value |
| a dataclass | an object with every field |
| `tuple[T, ...]` | an array |
| `Mapping[str, V]`, `Mapping[int, V]` | an object |
| `Mapping[K, V]` with other keys | an array of pairs; `{}` if there are none |
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar, cast

from tensorforge.errors import EncodingError, InvalidInputError
from tensorforge.validation import is_number, is_whole_number

Value = TypeVar("Value")

Json = Any
"""`None`, bool, int, float, str, or lists and string-keyed dictionaries of these."""

_NAMED_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: object) -> dict[str, Json]:
    """The dataclass instance as JSON-able data, with its type and version."""
    cls = type(value)
    if not dataclasses.is_dataclass(cls):
        raise EncodingError(f"{cls.__name__} is not a dataclass and has no encoding")
    return {"type": cls.__name__, "version": _version(cls), "data": _encode(value, cls.__name__)}


def decode(payload: Json, expected: type[Value]) -> Value:
    """The inverse of `encode` for an instance of `expected`; any other data is an `EncodingError`."""
    name = expected.__name__
    if not isinstance(payload, dict) or set(payload) != {"type", "version", "data"}:
        raise EncodingError(f"expected an encoded {name}: an object with type, version and data")
    if payload["type"] != name:
        raise EncodingError(f"expected an encoded {name}, found {payload['type']!r}")
    version = payload["version"]
    if not is_whole_number(version) or version < 1:
        raise EncodingError(f"{name}: version {version!r} is not a positive whole number")
    if version > _version(expected):
        raise EncodingError(
            f"{name}: version {version} is newer than {_version(expected)}, the newest known here; "
            "upgrade this side"
        )
    return cast("Value", _decode(payload["data"], expected, name))


def _version(cls: type) -> int:
    return cast("int", getattr(cls, "ENCODING_VERSION", 1))


def _encode(value: object, where: str) -> Json:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime):
        return _encode_time(value, where)
    if isinstance(value, Mapping):
        return _encode_mapping(value, where)
    if isinstance(value, (tuple, list)):
        return [_encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field: _encode(getattr(value, field), f"{where}.{field}")
            for field in _fields(type(value))
        }
    raise EncodingError(f"{where}: a {type(value).__name__} has no encoding")


def _encode_time(value: datetime, where: str) -> str:
    if value.tzinfo is None:
        raise EncodingError(f"{where}: {value.isoformat()} has no time zone; use UTC")
    return value.astimezone(UTC).isoformat()


def _encode_mapping(value: Mapping[Any, Any], where: str) -> Json:
    if all(isinstance(key, str) for key in value):
        return {key: _encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if all(type(key) is int for key in value):
        return {str(key): _encode(item, f"{where}[{key}]") for key, item in value.items()}
    return [
        [_encode(key, f"{where} key"), _encode(item, f"{where}[{key}]")]
        for key, item in value.items()
    ]


def _decode(data: Json, expected: Any, where: str) -> Any:
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(data, typing.get_args(expected), where)
    if origin is tuple:
        return _decode_tuple(data, typing.get_args(expected), where)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(data, typing.get_args(expected), where)
    if expected is Any:
        return data
    if dataclasses.is_dataclass(expected):
        return _decode_dataclass(data, cast("type", expected), where)
    if isinstance(expected, type) and issubclass(expected, Enum):
        return _decode_enum(data, expected, where)
    decoder = _SCALARS.get(expected)
    if decoder is None:
        raise EncodingError(f"{where}: {expected!r} has no encoding")
    return decoder(data, where)


def _decode_union(data: Json, options: tuple[Any, ...], where: str) -> Any:
    if data is None and type(None) in options:
        return None
    some = [option for option in options if option is not type(None)]
    if len(some) != 1:
        raise EncodingError(f"{where}: a union of several types has no encoding")
    return _decode(data, some[0], where)


def _decode_tuple(data: Json, parts: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _mismatch(data, "an array", where)
    if len(parts) == 2 and parts[1] is Ellipsis:
        kinds: list[Any] = [parts[0]] * len(data)
    else:
        kinds = list(parts)
    if len(kinds) != len(data):
        raise EncodingError(f"{where}: expected {len(kinds)} items, found {len(data)}")
    pairs = enumerate(zip(data, kinds, strict=True))
    return tuple(_decode(item, kind, f"{where}[{index}]") for index, (item, kind) in pairs)


def _decode_mapping(data: Json, kinds: tuple[Any, ...], where: str) -> Mapping[Any, Any]:
    key_kind, value_kind = kinds
    if key_kind is str or key_kind is int:
        if not isinstance(data, dict):
            raise _mismatch(data, "an object", where)
        return {
            (key if key_kind is str else _decode_int_key(key, where)): _decode(
                item, value_kind, f"{where}[{key!r}]"
            )
            for key, item in data.items()
        }
    if data == {}:  # an encoder sees no keys in an empty mapping, so it cannot tell their type
        return {}
    if not isinstance(data, list) or not all(isinstance(p, list) and len(p) == 2 for p in data):
        raise _mismatch(data, "an array of pairs", where)
    result = {
        _decode(key, key_kind, f"{where} key"): _decode(item, value_kind, f"{where}[...]")
        for key, item in data
    }
    if len(result) != len(data):
        raise EncodingError(f"{where}: a key comes twice")
    return result


def _decode_int_key(key: str, where: str) -> int:
    try:
        value = int(key)
    except ValueError:
        raise EncodingError(f"{where}: the key {key!r} is not a whole number") from None
    if str(value) != key:
        raise EncodingError(f"{where}: the key {key!r} is not in canonical form")
    return value


def _decode_dataclass(data: Json, cls: type, where: str) -> Any:
    if not isinstance(data, dict):
        raise _mismatch(data, f"an object ({cls.__name__})", where)
    fields = _fields(cls)
    unknown, missing = sorted(set(data) - set(fields)), sorted(set(fields) - set(data))
    if unknown:
        raise EncodingError(f"{where}: {cls.__name__} has no field {', '.join(unknown)}")
    if missing:
        raise EncodingError(f"{where}: {cls.__name__} lacks {', '.join(missing)}")
    values = {name: _decode(data[name], kind, f"{where}.{name}") for name, kind in fields.items()}
    try:
        return cls(**values)
    except InvalidInputError as error:
        raise EncodingError(f"{where}: {error}") from error


def _decode_enum(data: Json, expected: type[Enum], where: str) -> Enum:
    try:
        return expected(data)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in expected)
        raise EncodingError(f"{where}: {data!r} is none of {allowed}") from None


def _decode_str(data: Json, where: str) -> str:
    if not isinstance(data, str):
        raise _mismatch(data, "a string", where)
    return data


def _decode_bool(data: Json, where: str) -> bool:
    if not isinstance(data, bool):
        raise _mismatch(data, "true or false", where)
    return data


def _decode_int(data: Json, where: str) -> int:
    if not is_whole_number(data):
        raise _mismatch(data, "a whole number", where)
    return data


def _decode_float(data: Json, where: str) -> float:
    if isinstance(data, str) and data in _NAMED_FLOATS:
        return _NAMED_FLOATS[data]
    if not is_number(data):
        raise _mismatch(data, "a number", where)
    return float(data)


def _decode_bytes(data: Json, where: str) -> bytes:
    try:
        return base64.b64decode(_decode_str(data, where), validate=True)
    except (binascii.Error, ValueError) as error:
        raise EncodingError(f"{where}: not base64: {error}") from error


def _decode_time(data: Json, where: str) -> datetime:
    try:
        value = datetime.fromisoformat(_decode_str(data, where))
    except ValueError as error:
        raise EncodingError(f"{where}: not a time: {error}") from error
    if value.tzinfo is None:
        raise EncodingError(f"{where}: {data!r} has no time zone")
    return value.astimezone(UTC)


_SCALARS: dict[Any, Any] = {
    str: _decode_str,
    bool: _decode_bool,
    int: _decode_int,
    float: _decode_float,
    bytes: _decode_bytes,
    datetime: _decode_time,
}


def _mismatch(data: Json, expected: str, where: str) -> EncodingError:
    shown = repr(data)
    return EncodingError(f"{where}: expected {expected}, found {shown[:60]}")


@functools.cache
def _fields(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
