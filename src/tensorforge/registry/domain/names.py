"""The rules for names, tags, aliases and texts.

The rules refuse what has a meaning elsewhere or cannot be stored: parts of paths, separators of model URIs,
control characters, and texts that a database does not accept.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping

from tensorforge.errors import InvalidInputError
from tensorforge.registry.domain.version_ranges import is_range

MAX_NAME = 256
MAX_TAG_KEY = 250
MAX_TAG_VALUE = 100_000
MAX_TEXT = 100_000
MAX_TAGS = 200
MAX_ALIAS = 255

PROMPT_TAG = "mlflow.prompt.is_prompt"
"""The tag by which MLflow marks a model or a version that is a prompt."""

TAG_SEPARATORS = ("\x1e", "\x1f")
"""The characters between tags, and between key and value, in the text in which a query returns all tags."""

_NOT_IN_NAMES = frozenset("/:\\")
_KEY_PUNCTUATION = frozenset(" ._-/:")
_ALIAS = re.compile(r"[A-Za-z0-9_-]+")
_RESERVED_ALIASES = frozenset({"latest"})


def check_name(field: str, value: object) -> str:
    """A model's name: printable characters without `/`, `:` and backslash; not `.` or `..`.

    It neither begins nor ends with a space.
    """
    name = check_text(field, value, limit=MAX_NAME, required=True)
    wrong = sorted({c for c in name if c in _NOT_IN_NAMES or not c.isprintable()})
    if wrong:
        raise InvalidInputError(f"{field} = {_shown(name)}: {wrong[0]!r} is not allowed")
    if name != name.strip() or name in (".", ".."):
        raise InvalidInputError(
            f"{field} = {_shown(name)}: must not begin or end with a space, nor be a dot or two"
        )
    if not unicodedata.is_normalized("NFC", name):
        raise InvalidInputError(
            f"{field} = {_shown(name)}: write it in Unicode's composed form (NFC)"
        )
    return name


def check_alias(alias: object) -> str:
    """An alias: letters, digits, `_` and `-`; not a version, a range or `latest`."""
    text = check_text("alias", alias, limit=MAX_ALIAS, required=True)
    if not _ALIAS.fullmatch(text):
        raise InvalidInputError(f"alias = {_shown(text)}: use letters, digits, '_' and '-'")
    if text.lower() in _RESERVED_ALIASES or re.fullmatch(r"[vV]\d+", text) or is_range(text):
        raise InvalidInputError(f"alias = {_shown(text)}: is reserved for versions")
    return text


def check_tags(tags: object) -> dict[str, str]:
    """The tags, with every key and value checked; at most 200."""
    if not isinstance(tags, Mapping):
        raise InvalidInputError(f"tags must map keys to values, not be a {type(tags).__name__}")
    if len(tags) > MAX_TAGS:
        raise InvalidInputError(f"{len(tags)} tags are more than {MAX_TAGS}")
    return {check_tag_key(key): check_tag_value(key, value) for key, value in tags.items()}


def check_tag_key(key: object) -> str:
    """A tag's key: letters, digits, space, `.`, `_`, `-`, `:`, and `/` if it does not look like a path."""
    text = check_text("tag key", key, limit=MAX_TAG_KEY, required=True)
    wrong = sorted({c for c in text if not (c.isalnum() or c in _KEY_PUNCTUATION)})
    if wrong:
        raise InvalidInputError(f"tag key = {_shown(text)}: {wrong[0]!r} is not allowed")
    if any(part in ("", ".", "..") for part in text.split("/")):
        raise InvalidInputError(f"tag key = {_shown(text)}: must not look like a path")
    return text


def check_tag_value(key: str, value: object) -> str:
    """A tag's value: any text of at most 100,000 characters."""
    text = check_text(f"tag {key[:40]!r}", value, limit=MAX_TAG_VALUE)
    if any(separator in text for separator in TAG_SEPARATORS):
        raise InvalidInputError(f"tag {key[:40]!r}: contains a separator character (1E or 1F)")
    return text


def tag_digest(value: str) -> str:
    """A digest of a tag's value, for the index over tags: the value itself may be too long for an index."""
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def check_text(field: str, value: object, *, limit: int = MAX_TEXT, required: bool = False) -> str:
    """A text that both databases can store and return unchanged; `InvalidInputError` for any other value."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{field} must be a text, not a {type(value).__name__}")
    if required and not value:
        raise InvalidInputError(f"{field} must not be empty")
    if len(value) > limit:
        raise InvalidInputError(f"{field} has {len(value)} characters, at most {limit} are allowed")
    if "\x00" in value:
        raise InvalidInputError(f"{field} contains a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(f"{field} contains half of a surrogate pair") from None
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
