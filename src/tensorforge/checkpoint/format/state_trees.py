"""Encodes a state dictionary as JSON that keeps Python's types. Decoding executes nothing, unlike pickle.

Values of JSON's own types are encoded as they are. Every other value is an object with one key that starts
with `$`:

    {"$tuple": […]}  {"$dict": [[key, value], …]}  {"$float": "nan"}  {"$int": "…"}  {"$bytes": "base64"}
    {"$counter": [[key, count], …]}  {"$tensor": "name"}  {"$array": "name"}  {"$dtype": "float32"}

A value of any other type is an error that names its place, so that nothing is silently left out.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from tensorforge.errors import EncodingError, InvalidInputError

Json = Any
Leaf = Callable[[object, str], Json | None]
"""Encodes a value of a type that this module does not know (value, place), or returns `None`."""

Reader = Callable[[str, Json, str], object]
"""Decodes a `$` object that this module does not know (tag, value, place)."""

_SAFE_INT = 1 << 53
_MAX_DEPTH = 100


def encode_tree(value: object, leaf: Leaf, where: str = "", depth: int = 0) -> Json:
    """Encode a value; `InvalidInputError` names the place of a value that has no encoding."""
    if depth > _MAX_DEPTH:
        raise InvalidInputError(f"{where}: nested more than {_MAX_DEPTH} deep, or contains itself")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _SAFE_INT else {"$int": str(int(value))}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    encoded = leaf(value, where)
    if encoded is not None:
        return encoded
    if isinstance(value, Mapping):
        return _encode_mapping(value, leaf, where, depth)
    if isinstance(value, (list, tuple)):
        items = [
            encode_tree(item, leaf, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
        return items if isinstance(value, list) else {"$tuple": items}
    raise InvalidInputError(
        f"{where or 'the state'} is a {type(value).__name__}, which a checkpoint cannot store; "
        "use tensors, arrays, numbers, strings, bytes, lists, tuples and dictionaries"
    )


def _encode_mapping(value: Mapping[Any, Any], leaf: Leaf, where: str, depth: int) -> Json:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {
            str(key): encode_tree(item, leaf, join(where, key), depth + 1)
            for key, item in value.items()
        }
    return {
        "$counter" if is_counter else "$dict": [
            [
                encode_tree(key, leaf, f"{where} key", depth + 1),
                encode_tree(item, leaf, join(where, str(key)), depth + 1),
            ]
            for key, item in value.items()
        ]
    }


def join(where: str, key: str) -> str:
    """The name of the place `key` inside the place `where`."""
    return f"{where}/{key}" if where else key


def decode_tree(data: Json, reader: Reader, where: str = "", depth: int = 0) -> Any:
    """Decode the result of `encode_tree`; `EncodingError` names the place of anything else."""
    if depth > 2 * _MAX_DEPTH:
        raise EncodingError(f"{where}: nested too deep")
    if isinstance(data, list):
        return [
            decode_tree(item, reader, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(data)
        ]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {
            key: decode_tree(item, reader, join(where, key), depth + 1)
            for key, item in data.items()
        }
    if len(data) != 1:
        raise EncodingError(f"{where}: {tag} must be the only key")
    return _decode_tagged(tag, data[tag], reader, where, depth)


def _decode_tagged(tag: str, value: Json, reader: Reader, where: str, depth: int) -> Any:
    try:
        match tag:
            case "$tuple" if isinstance(value, list):
                return tuple(decode_tree(value, reader, where, depth + 1))
            case "$dict" if isinstance(value, list):
                pairs = [decode_tree(pair, reader, where, depth + 1) for pair in value]
                return dict(pairs)
            case "$counter" if isinstance(value, list):
                return Counter(dict(decode_tree(pair, reader, where, depth + 1) for pair in value))
            case "$float" if value in ("nan", "inf", "-inf"):
                return float(value)
            case "$int" if isinstance(value, str) and len(value) < 1000:
                return int(value)
            case "$bytes" if isinstance(value, str):
                return base64.b64decode(value, validate=True)
    except (ValueError, TypeError, binascii.Error) as error:
        raise EncodingError(f"{where}: not a valid {tag}: {error}") from error
    return reader(tag, value, where)


def merge_trees(trees: list[Json], where: str = "") -> Json:
    """Merge the encoded states of all ranks: dictionaries are united, other values must be equal."""
    first = trees[0]
    if all(isinstance(tree, dict) for tree in trees) and not _is_tagged(first):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {
            key: merge_trees([tree[key] for tree in trees if key in tree], join(where, key))
            for key in keys
        }
    for rank, tree in enumerate(trees):
        if tree != first:
            raise InvalidInputError(
                f"{where or 'the state'} differs between ranks: {first!r} and {tree!r} "
                f"(rank {rank} of those that have it)"
            )
    return first


def _is_tagged(tree: Mapping[str, Json]) -> bool:
    return next(iter(tree), "").startswith("$")
