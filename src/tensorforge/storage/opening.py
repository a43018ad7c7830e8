"""Opens a blob store by its path or URL."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from tensorforge.errors import InvalidInputError
from tensorforge.storage.blobs import BlobStore
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.memory_store import MemoryStore

_memory_stores: dict[str, MemoryStore] = {}
_lock = threading.Lock()


def open_store(address: str | Path) -> BlobStore:
    """Open the store at a folder's path or at a URL.

    `file:///folder` is a folder, like a path; `memory://name` is one store per name in this process;
    `s3://bucket/prefix`, `gs://...` and `az://...` are object stores.
    """
    text = str(address)
    if isinstance(address, Path) or "://" not in text:
        return LocalStore(text)
    scheme = urlsplit(text).scheme.lower()
    opener = OPENERS.get(scheme)
    if opener is None:
        known = ", ".join(sorted(OPENERS))
        raise InvalidInputError(f"{text!r}: no store has the scheme {scheme!r}; known are {known}")
    if isinstance(opener, str):
        module, _, name = opener.partition(":")
        opener = cast("Callable[[str], BlobStore]", getattr(importlib.import_module(module), name))
    return opener(text)


def _open_file(url: str) -> BlobStore:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidInputError(f"{url!r}: a folder on this machine is file:///absolute/path")
    return LocalStore(unquote(parts.path))


def _open_memory(url: str) -> BlobStore:
    name = url.partition("://")[2]
    with _lock:
        return _memory_stores.setdefault(name, MemoryStore(name))


OPENERS: dict[str, Callable[[str], BlobStore] | str] = {
    "file": _open_file,
    "memory": _open_memory,
    "s3": "tensorforge.storage.object_store:open_object_store",
    "gs": "tensorforge.storage.object_store:open_object_store",
    "az": "tensorforge.storage.object_store:open_object_store",
}
"""URL scheme → the function that opens it, or its `module:name`, which is imported on first use."""
