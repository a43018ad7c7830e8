"""`ArtifactStore`: files that belong to versions, on a blob store, each with its checksum.

A file is uploaded as one stream, or in parts that may be sent again after an interruption. It becomes visible
when it is complete and its checksum fits. A file of a version is written once: the files that were validated
are the files that are loaded.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import sqlalchemy as sa

from tensorforge.errors import (
    AlreadyExistsError,
    CapacityError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
)
from tensorforge.registry.database.tables import FILES
from tensorforge.registry.database.times import to_micros
from tensorforge.storage.blobs import BlobStore, BlobWriter, validate_key
from tensorforge.storage.database import Database

VERSION_FOLDER = "versions"
"""The folder with the files of versions; a file in it is written once."""
PIECE = 2**20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file: its path in the store, its size and its SHA-256."""

    path: str
    size_bytes: int
    sha256: str
    blob: str


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """A file or folder in a folder, by its name there."""

    name: str
    size_bytes: int | None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.size_bytes is None


class ArtifactStore:
    """Stores, finds and reads files. Threads may share it."""

    def __init__(self, database: Database, store: BlobStore, *, max_bytes: int) -> None:
        self._database = database
        self._store = store
        self._max_bytes = max_bytes

    def begin(self, path: str, *, uploaded_by: str, sha256: str = "") -> Upload:
        """Begin to upload a file as one stream; with `sha256` its content must have this checksum."""
        check_path(path)
        blob = f"blobs/{secrets.token_hex(16)}"
        return Upload(self, path, blob, self._store.open_writer(blob), uploaded_by, sha256.lower())

    def check_size(self, path: str, size: int) -> None:
        """`CapacityError` if a file of this size is too large."""
        if size > self._max_bytes:
            raise CapacityError(
                f"{path} has more than {self._max_bytes} bytes, which is the largest file allowed here",
                requested=size,
                available=self._max_bytes,
            )

    def put_part(
        self, path: str, start: int, total: int, data: bytes, *, uploaded_by: str, sha256: str = ""
    ) -> int:
        """Store the bytes of a file from `start` on; returns how many bytes from its beginning have arrived.

        When all `total` bytes have arrived, the file is complete and visible. A part that was sent before may
        be sent again.
        """
        check_path(path)
        self.check_size(path, total)
        if not 0 <= start <= start + len(data) <= total:
            raise InvalidInputError(
                f"{path}: bytes {start} to {start + len(data)} are not within {total}"
            )
        folder = _parts_folder(path, total)
        self._store.write(f"{folder}/{start:020d}", data)
        received = self.received(path, total)
        if received == total:
            self._assemble(path, folder, uploaded_by=uploaded_by, sha256=sha256)
        return received

    def received(self, path: str, total: int) -> int:
        """How many bytes from the beginning of a file have arrived in parts."""
        end = 0
        for info in self._store.list(f"{_parts_folder(path, total)}/"):
            start = int(info.key.rpartition("/")[2])
            if start > end:
                break
            end = max(end, start + info.size)
        return end

    def _assemble(self, path: str, folder: str, *, uploaded_by: str, sha256: str) -> None:
        parts = list(self._store.list(f"{folder}/"))
        end = 0
        with self.begin(path, uploaded_by=uploaded_by, sha256=sha256) as upload:
            for info in parts:
                start = int(info.key.rpartition("/")[2])
                if start + info.size > end:
                    upload.append(self._store.read(info.key)[end - start :])
                    end = start + info.size
            upload.finish()
        for info in parts:
            self._store.delete(info.key)

    def keep(self, file: StoredFile, uploaded_by: str) -> StoredFile:
        """Make an uploaded blob visible under its path; `AlreadyExistsError` if a version's file differs."""
        row = {
            "path": file.path,
            "size_bytes": file.size_bytes,
            "sha256": file.sha256,
            "blob": file.blob,
            "uploaded_us": to_micros(datetime.now(UTC)),
            "uploaded_by": uploaded_by,
        }
        with self._database.write() as connection:
            before = _find(connection, file.path)
            if before is not None and file.path.startswith(f"{VERSION_FOLDER}/"):
                if before.sha256 != file.sha256:
                    raise AlreadyExistsError(f"{file.path} exists with another content")
                self._store.delete(file.blob)
                return before
            connection.execute(FILES.delete().where(FILES.c.path == file.path))
            connection.execute(FILES.insert().values(**row))
        if before is not None:
            self._store.delete(before.blob)
        return file

    def discard(self, blob: str) -> None:
        """Remove a blob that no file has."""
        self._store.delete(blob)

    def find(self, path: str) -> StoredFile:
        """A file; `NotFoundError` if there is none."""
        check_path(path)
        with self._database.read() as connection:
            found = _find(connection, path)
        if found is None:
            raise NotFoundError(f"there is no file {path[:300]!r}")
        return found

    def read(self, file: StoredFile, start: int, end: int) -> Iterator[bytes]:
        """The bytes of a file from `start` to `end`, in pieces.

        `IntegrityError` before the last piece if all of the file is read and its checksum does not fit.
        """
        digest = hashlib.sha256() if (start, end) == (0, file.size_bytes) else None
        while start < end:
            piece = bytearray(min(PIECE, end - start))
            self._store.read_into(file.blob, start, memoryview(piece))
            start += len(piece)
            if digest is not None:
                digest.update(piece)
                if start == end and digest.hexdigest() != file.sha256:
                    raise IntegrityError(f"{file.path} is damaged: its checksum does not fit")
            yield bytes(piece)

    def list(self, folder: str) -> list[FolderEntry]:
        """The files and folders in a folder, sorted by name; empty if there is no such folder."""
        prefix = f"{check_path(folder)}/" if folder else ""
        query = sa.select(FILES.c.path, FILES.c.size_bytes).where(
            FILES.c.path.startswith(prefix, autoescape=True)
        )
        found: dict[str, FolderEntry] = {}
        with self._database.read() as connection:
            for row in connection.execute(query):
                name, _, below = row.path.removeprefix(prefix).partition("/")
                found[name] = FolderEntry(name, None if below else row.size_bytes)
        return sorted(found.values(), key=lambda entry: entry.name)

    def delete(self, path: str) -> None:
        """Remove a file or a folder with everything in it; what does not exist is not an error."""
        check_path(path)
        if path.split("/", maxsplit=1)[0] == VERSION_FOLDER:
            raise InvalidInputError("the files of a version cannot be deleted")
        mine = sa.or_(FILES.c.path == path, FILES.c.path.startswith(f"{path}/", autoescape=True))
        with self._database.write() as connection:
            blobs = list(connection.scalars(sa.select(FILES.c.blob).where(mine)))
            connection.execute(FILES.delete().where(mine))
        for blob in blobs:
            self._store.delete(blob)

    def has_files(self, folder: str) -> bool:
        """Whether a folder has at least one file."""
        query = sa.select(FILES.c.path).where(
            FILES.c.path.startswith(f"{folder}/", autoescape=True)
        )
        with self._database.read() as connection:
            return connection.execute(query.limit(1)).first() is not None


class Upload:
    """One file that is being uploaded. Leaving the block without `finish` discards it."""

    def __init__(
        self,
        artifacts: ArtifactStore,
        path: str,
        blob: str,
        writer: BlobWriter,
        uploaded_by: str,
        sha256: str,
    ) -> None:
        self._artifacts = artifacts
        self._path = path
        self._blob = blob
        self._writer = writer
        self._uploaded_by = uploaded_by
        self._expected = sha256
        self._digest = hashlib.sha256()
        self._size = 0

    def append(self, data: bytes) -> None:
        """Add bytes at the end; `CapacityError` if the file becomes too large."""
        self._size += len(data)
        self._artifacts.check_size(self._path, self._size)
        self._digest.update(data)
        self._writer.append(data)

    def finish(self) -> StoredFile:
        """Make the file visible; `IntegrityError` if its checksum is not the expected one."""
        found = self._digest.hexdigest()
        if self._expected and found != self._expected:
            raise IntegrityError(
                f"{self._path} arrived with the checksum {found}, not {self._expected}"
            )
        self._writer.commit()
        file = StoredFile(self._path, self._size, found, self._blob)
        try:
            return self._artifacts.keep(file, self._uploaded_by)
        except AlreadyExistsError:
            self._artifacts.discard(self._blob)
            raise

    def close(self) -> None:
        """Discard the file unless it was finished."""
        self._writer.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_path(path: str) -> str:
    """The path; `InvalidInputError` if it could lead elsewhere."""
    return validate_key(path)


def version_folder(model_id: str, number: int) -> str:
    """The folder of a version's files; numbers of versions are never used twice."""
    return f"{VERSION_FOLDER}/{hashlib.sha256(model_id.encode()).hexdigest()[:32]}/{number}"


def _parts_folder(path: str, total: int) -> str:
    return f"parts/{hashlib.sha256(f'{total}/{path}'.encode()).hexdigest()}"


def _find(connection: sa.Connection, path: str) -> StoredFile | None:
    row = connection.execute(sa.select(FILES).where(FILES.c.path == path)).one_or_none()
    return None if row is None else StoredFile(row.path, row.size_bytes, row.sha256, row.blob)
