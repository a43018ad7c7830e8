"""The hash chain of a journal: each entry's digest covers its text, its number and the digest before it.

The head is the number and digest of the newest entry. The database has it, and beside an SQLite database a file
has it as well, which tells a lost write-ahead log or an emptied table from a new run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensorforge.errors import IntegrityError, UnavailableError

BEGINNING = ""
"""The digest before the first entry of a run."""


class Head(msgspec.Struct, frozen=True):
    """The newest entry of a journal: its number (0: no entry yet) and its digest."""

    sequence: int = 0
    digest: str = BEGINNING


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A row of the journal. `previous` and `digest` are `None` in entries that an older version wrote."""

    sequence: int
    text: str
    previous: str | None
    digest: str | None


def link(previous: str, sequence: int, text: str) -> str:
    """The digest of an entry that follows the entry with the digest `previous`."""
    return hashlib.sha256(f"{previous}\n{sequence}\n{text}".encode()).hexdigest()


def chain(head: Head, texts: Iterable[str]) -> list[StoredEntry]:
    """The rows for entries that are appended after `head`."""
    rows = []
    for text in texts:
        digest = link(head.digest, head.sequence + 1, text)
        rows.append(StoredEntry(head.sequence + 1, text, head.digest, digest))
        head = Head(head.sequence + 1, digest)
    return rows


def problem(rows: Sequence[StoredEntry], head: Head | None, noted: Head | None) -> str | None:
    """What is wrong with the rows of a run, oldest first; `None` if nothing is.

    `head` is the head in the database, `noted` the head in the file beside it; `None`: there is none. The noted
    head may be older than the rows, because the file is written after the database.
    """
    for row, following in itertools.pairwise(rows):
        if following.sequence != row.sequence + 1:
            return (
                f"entry {row.sequence + 1} is missing: {following.sequence} follows {row.sequence}"
            )
    before: StoredEntry | None = None
    for row in rows:
        wrong = _wrong(before, row)
        if wrong:
            return wrong
        before = row
    return _end_problem(rows, head) or _noted_problem(rows, noted)


def _wrong(before: StoredEntry | None, row: StoredEntry) -> str | None:
    if row.digest is None or row.previous is None:
        is_late = before is not None and before.digest is not None
        return f"entry {row.sequence} has no digest, but earlier ones do" if is_late else None
    if link(row.previous, row.sequence, row.text) != row.digest:
        return f"entry {row.sequence} is not the one that was written: its digest does not match"
    if before is not None and before.digest is not None and row.previous != before.digest:
        return f"entry {row.sequence} does not follow entry {before.sequence}: one was replaced"
    return None


def _end_problem(rows: Sequence[StoredEntry], head: Head | None) -> str | None:
    last = Head(rows[-1].sequence, rows[-1].digest or BEGINNING) if rows else Head()
    if head is None or head == last:
        return None if head is not None or not last.digest else "the head of its chain is missing"
    if not rows:
        return f"all entries are missing; {head.sequence} were written"
    if last.sequence < head.sequence:
        return f"entries {last.sequence + 1} to {head.sequence} are missing at the end"
    return f"it ends with entry {last.sequence}, but its head is entry {head.sequence}"


def _noted_problem(rows: Sequence[StoredEntry], noted: Head | None) -> str | None:
    if noted is None or not noted.sequence:
        return None
    last = rows[-1].sequence if rows else 0
    if last < noted.sequence:
        return (
            f"entries {last + 1} to {noted.sequence} were acknowledged and are missing; the database "
            "or its write-ahead log was deleted or replaced"
        )
    found = next((row for row in rows if row.sequence == noted.sequence), None)
    if found is not None and found.digest != noted.digest:
        return f"entry {noted.sequence} is not the one that was acknowledged"
    return None


class HeadFile:
    """A file beside an SQLite database with the head of one run's journal."""

    def __init__(self, database: Path, run_id: str) -> None:
        name = hashlib.sha256(run_id.encode()).hexdigest()[:12]
        self.path = database.with_name(f"{database.name}-head-{name}")

    def read(self) -> Head | None:
        """The noted head; `None` without a file. A file that is no head is an `IntegrityError`."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Head)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise IntegrityError(f"{self.path} is not the head of a journal: {error}") from error
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be read: {error.strerror}") from error

    def write(self, head: Head) -> None:
        """Replace the noted head. A crash leaves the old one or the new one; both are accepted later."""
        temporary = self.path.with_name(f"{self.path.name}.new")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(head))
            temporary.replace(self.path)
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be written: {error.strerror}") from error
