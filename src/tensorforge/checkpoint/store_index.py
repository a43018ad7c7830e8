"""The checkpoints in a store: list them, claim a prefix for a save, delete one, clean up after crashes.

    <prefix>.metadata.json    the manifest; the checkpoint exists exactly while this key exists
    <prefix>.saving.json      the claim of a save that is running or has crashed
    <prefix>.deleting.json    marks a deletion that is running or has crashed

Imports no torch.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec

from tensorforge.checkpoint.format.file_layout import index_key
from tensorforge.checkpoint.format.manifest import (
    SUFFIX,
    CheckpointManifest,
    ManifestSummary,
    creation_time,
    decode_manifest,
    manifest_key,
    summarize_manifest,
)
from tensorforge.checkpoint.options import CheckpointInfo
from tensorforge.errors import (
    AlreadyExistsError,
    CheckpointError,
    CheckpointErrorType,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    TensorForgeError,
)
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.blobs import BlobInfo, BlobStore
from tensorforge.typed_json import decode_typed

SAVING = ".saving.json"
DELETING = ".deleting.json"

_SLACK = timedelta(minutes=1)
_OWN_FILE = re.compile(
    r"((rank|model|optimizer|full)-\d{5,}-of-\d{5,}\.(safetensors|frames)|part-\d{5,}\.bin)"
)


class SaveClaim(msgspec.Struct, frozen=True, kw_only=True):
    """Reserves a prefix for one save: which process saves, and when the claim expires.

    Version 0.1.0 wrote no process; such a save has ended when its claim has expired.
    """

    prefix: str
    save_id: str
    world_size: int
    process: ProcessIdentity | None = None
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        """Whether the save has certainly ended: the claim has expired, or its only process has ended.

        With several ranks the end of rank 0 proves nothing, because the others may still be writing.
        """
        if now > self.expires_at:
            return True
        return self.world_size == 1 and self.process is not None and self.process.has_ended()


def read_manifest(store: BlobStore, prefix: str) -> CheckpointManifest:
    """The manifest of a checkpoint; `CheckpointError` if it is missing, damaged or of a newer version."""
    key = manifest_key(prefix)
    try:
        document = store.read(key)
    except NotFoundError as error:
        raise CheckpointError(
            f"there is no checkpoint {prefix!r} in {store.url}",
            key,
            CheckpointErrorType.LOAD_FAILED,
        ) from error
    return decode_manifest(document, key)


def exists(store: BlobStore, prefix: str) -> bool:
    """Whether the store has a checkpoint with this prefix, intact or not."""
    try:
        return _exists(store, manifest_key(prefix))
    except InvalidInputError:
        return False


def _info(summary: ManifestSummary) -> CheckpointInfo:
    return CheckpointInfo(
        summary.prefix,
        summary.version,
        summary.created_at,
        summary.world_size,
        summary.size_bytes,
        summary.format,
    )


def prefixes_by_age(store: BlobStore) -> list[str]:
    """Every prefix with a manifest, newest first.

    The age is that in the manifest; for a manifest that cannot be read it is the age of the file, so that
    the damaged checkpoint is not overlooked.
    """
    found: list[tuple[datetime, str]] = []
    for prefix, blob in manifest_blobs(store):
        try:
            found.append((creation_time(store.read(blob.key), blob.key), prefix))
        except NotFoundError:
            continue  # deleted in the meantime
        except TensorForgeError as error:
            if not is_unreadable(error):
                raise
            found.append((blob.modified_at, prefix))
    return [prefix for _, prefix in sorted(found, reverse=True)]


def is_unreadable(error: TensorForgeError) -> bool:
    """Whether the error is about this one file: damaged, forbidden, or on a bad sector.

    A store that cannot be reached at all is another matter: nobody may take that for a damaged checkpoint.
    """
    if isinstance(error, CheckpointError | PermissionDeniedError):
        return True
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EIO


def manifest_blobs(store: BlobStore) -> Iterator[tuple[str, BlobInfo]]:
    """Every prefix with a manifest, in order, and the entry of the manifest in the store."""
    for blob in store.list():
        if blob.key.endswith(SUFFIX):
            yield blob.key.removesuffix(SUFFIX), blob


def list_checkpoints(store: BlobStore) -> list[CheckpointInfo]:
    """All checkpoints whose manifests are intact, oldest first."""
    return list_with_damaged(store)[0]


def list_with_damaged(store: BlobStore) -> tuple[list[CheckpointInfo], list[str]]:
    """All checkpoints whose manifests are intact, oldest first, and the prefixes of damaged manifests."""
    intact: list[CheckpointInfo] = []
    damaged: list[str] = []
    for prefix, summary in _summaries(store):
        if summary is None:
            damaged.append(prefix)
        else:
            intact.append(_info(summary))
    return sorted(intact, key=lambda info: (info.timestamp, info.prefix)), damaged


def _summaries(store: BlobStore) -> Iterator[tuple[str, ManifestSummary | None]]:
    """Every prefix with a manifest, in order, and the summary of its manifest; `None` if that is damaged."""
    for prefix, blob in manifest_blobs(store):
        try:
            yield prefix, summarize_manifest(store.read(blob.key), blob.key)
        except NotFoundError:
            continue  # deleted in the meantime
        except TensorForgeError as error:
            if not is_unreadable(error):
                raise
            yield prefix, None


def claim_prefix(store: BlobStore, prefix: str, world_size: int, timeout: float) -> SaveClaim:
    """Reserve a prefix for a save; `CheckpointError` if it exists or another save has claimed it."""
    key = manifest_key(prefix)
    if _exists(store, key):
        raise CheckpointError(
            f"checkpoint {prefix!r} exists already; choose another prefix or delete it first",
            key,
            CheckpointErrorType.SAVE_FAILED,
        )
    claim = SaveClaim(
        prefix=prefix,
        save_id=uuid.uuid4().hex,
        world_size=world_size,
        process=ProcessIdentity.current(),
        expires_at=datetime.now(UTC) + timedelta(seconds=timeout) + _SLACK,
    )
    try:
        store.create(f"{prefix}{SAVING}", msgspec.json.encode(claim))
    except AlreadyExistsError as error:
        raise CheckpointError(
            f"another save of {prefix!r} is running",
            key,
            CheckpointErrorType.SAVE_FAILED,
        ) from error
    return claim


def check_claim(store: BlobStore, claim: SaveClaim) -> None:
    """Raise `CheckpointError` unless the claim is still in the store: a sweep removes an expired one."""
    current = _read_claim(store, f"{claim.prefix}{SAVING}")
    if current is None or current.save_id != claim.save_id:
        raise CheckpointError(
            f"the claim of the save {claim.prefix!r} expired, and another process removed it",
            manifest_key(claim.prefix),
            CheckpointErrorType.SAVE_FAILED,
        )


def release_claim(store: BlobStore, claim: SaveClaim) -> None:
    """Remove the claim."""
    store.delete(f"{claim.prefix}{SAVING}")


def data_keys(store: BlobStore, prefix: str) -> list[str]:
    """The keys of all data files under a prefix, whether or not a manifest lists them."""
    names = [f"{prefix}.safetensors", f"{prefix}.frames", index_key(prefix)]
    found = [name for name in names if _exists(store, name)]
    folder = f"{prefix}/"
    inside = (blob.key for blob in store.list(folder))
    return found + [key for key in inside if _OWN_FILE.fullmatch(key.removeprefix(folder))]


def delete_checkpoint(store: BlobStore, prefix: str) -> None:
    """Delete a checkpoint: first its manifest, then its files. After a crash in between, `sweep` finishes.

    `ConflictError` if another checkpoint refers to its files.
    """
    needed_by = [
        other
        for other, summary in _summaries(store)
        if summary is not None and any(file.owner == prefix for file in summary.files)
    ]
    if needed_by:
        raise ConflictError(f"{prefix!r} cannot be deleted: {', '.join(needed_by)} need its files")
    if not _exists(store, manifest_key(prefix)):
        raise CheckpointError(
            f"there is no checkpoint {prefix!r} in {store.url}",
            manifest_key(prefix),
            CheckpointErrorType.STORAGE_ERROR,
        )
    delete_files(store, prefix)


def delete_files(store: BlobStore, prefix: str) -> None:
    """Delete everything under a prefix, whether or not there is a manifest; may be repeated after a crash."""
    store.write(f"{prefix}{DELETING}", b"{}")
    store.delete(manifest_key(prefix))
    for key in data_keys(store, prefix):
        store.delete(key)
    store.delete(f"{prefix}{SAVING}")
    store.delete(f"{prefix}{DELETING}")


def sweep(store: BlobStore, now: datetime | None = None) -> list[str]:
    """Delete the files of crashed saves and deletions, and return their prefixes.

    Saves that may still be running are left alone.
    """
    moment = now or datetime.now(UTC)
    store.sweep()
    swept = []
    for blob in list(store.list()):
        if blob.key.endswith(DELETING):
            prefix = blob.key.removesuffix(DELETING)
            delete_files(store, prefix)
            swept.append(prefix)
        elif blob.key.endswith(SAVING):
            prefix = blob.key.removesuffix(SAVING)
            if _sweep_save(store, prefix, moment, blob.modified_at):
                swept.append(prefix)
    return swept


def _sweep_save(store: BlobStore, prefix: str, now: datetime, stored_at: datetime) -> bool:
    key = f"{prefix}{SAVING}"
    claim = _read_claim(store, key)
    if claim is None:
        # The claim cannot be read: wait for longer than any save takes.
        if now - stored_at < timedelta(days=1):
            return False
    elif not claim.is_over(now):
        return False
    if _exists(store, manifest_key(prefix)):
        store.delete(key)  # the save was committed; only its claim is left
    else:
        delete_files(store, prefix)
    return True


def _read_claim(store: BlobStore, key: str) -> SaveClaim | None:
    try:
        return decode_typed(store.read(key), SaveClaim)
    except (NotFoundError, msgspec.DecodeError):
        return None


def _exists(store: BlobStore, key: str) -> bool:
    try:
        store.stat(key)
    except NotFoundError:
        return False
    return True
