"""Encryption of the secrets that the registry stores, such as those of webhooks.

The key comes from the environment or from a file. Whoever reads only the database, for example from a backup,
does not learn the secrets.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Self

from cryptography.fernet import Fernet, InvalidToken
from sqlalchemy.engine import make_url

from tensorforge import environment
from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.storage.database import Database

_PREFIX = "encrypted:"
_LEAST = 16


class SecretCipher:
    """Encrypts and decrypts texts with one key."""

    def __init__(self, key: str) -> None:
        if len(key) < _LEAST:
            raise InvalidInputError(
                f"the key for secrets has {len(key)} characters, at least {_LEAST} are needed"
            )
        digest = hashlib.sha256(b"tensorforge.registry.secrets\x00" + key.encode()).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(digest))

    @classmethod
    def for_database(cls, database: Database) -> Self:
        """The cipher of a registry's database.

        The key is in the environment, or in the file that the environment names. Without either, an SQLite file
        gets a key file beside it, which only its owner may read, and a database in memory gets a new key.
        `InvalidInputError` for PostgreSQL without a key.
        """
        key = environment.SECRETS_KEY.read()
        if key is not None:
            return cls(key)
        named = environment.SECRETS_KEY_FILE.read()
        if named is not None:
            return cls(_read_key(named))
        if database.is_in_memory:
            return cls(secrets.token_hex(32))
        if not database.is_sqlite:
            raise InvalidInputError(
                "webhook secrets are encrypted, and this database has no key: set "
                f"{environment.SECRETS_KEY.name} or {environment.SECRETS_KEY_FILE.name}"
            )
        return cls(_own_key(Path(f"{make_url(database.url).database}.key")))

    def encrypt(self, text: str) -> str:
        """The text that is stored for a secret; an empty secret stays empty."""
        if not text:
            return ""
        return _PREFIX + self._fernet.encrypt(text.encode()).decode("ascii")

    def decrypt(self, stored: str) -> str:
        """The secret; `IntegrityError` if it was encrypted with another key or changed.

        A secret that an earlier release stored without encryption is returned as it is.
        """
        if not stored.startswith(_PREFIX):
            return stored
        try:
            return self._fernet.decrypt(stored.removeprefix(_PREFIX)).decode()
        except InvalidToken as error:
            raise IntegrityError(
                "a webhook secret cannot be decrypted: the key is another one, or the row was changed"
            ) from error


def _read_key(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise InvalidInputError(f"the key for secrets cannot be read: {error}") from error


def _own_key(path: Path) -> str:
    """The key in the file, which is created if it does not exist; of several processes one creates it."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)
        finally:
            draft.unlink()
    return _read_key(path)
