"""Job tokens in files that only their owner can read, so that a restarted coordinator accepts them again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from tensorforge.errors import InvalidInputError
from tensorforge.security import TokenStore


def load_or_issue(store: TokenStore, path: Path, name: str, roles: Iterable[str]) -> str:
    """Return the token in `path` and add it to `store`; if there is no file, issue a token and write it."""
    with contextlib.suppress(FileNotFoundError):
        token = read_token(path)
        store.adopt(token, name, roles)
        return token
    token = store.issue(name, roles)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token


def read_token(path: Path) -> str:
    """The token in a file; a file that other users can read is refused."""
    if path.stat().st_mode & 0o077:
        raise InvalidInputError(f"{path} can be read by other users; run chmod 600 on it")
    return path.read_text().strip()
