"""The checkpoints in a store: what there is, what is left of crashed saves, taking one away.

    <prefix>.metadata.json    the manifest; a checkpoint exists exactly if this does
    <prefix>.saving.json      somebody is saving, or crashed while doing so
    <prefix>.deleting.json    somebody is deleting, or crashed while doing so

Starts without torch.
"""

from __future__ import annotations

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
    decode_manifest,
    manifest_key,
    moment_of,
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
)
from tensorforge.processes import ProcessIdentity
from tensorforge.storage.blobs import BlobStore
from tensorforge.typed_json import decode_typed

SAVING = ".saving.json"
DELETING = ".deleting.json"

_SLACK = timedelta(minutes=1)
_OWN_FILE = re.compile(
    r"((rank|model|optimizer|full)-\d{5,}-of-\d{5,}\.(safetensors|frames)|part-\d{5,}\.bin)"
)


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """Who is saving under a prefix, and until when at the latest.

    An older version wrote down no process: such a save is over when its time is up.
    """

    prefix: str
    save_id: str
    world_size: int
    process: ProcessIdentity | None = None
    expires_at: datetime

    def is_over(self, now: datetime) -> bool:
        """Whether nobody can be saving any more: the process is gone, or its time is up.

        With several ranks a dead first one proves nothing, the others may still be writing.
        """
        if now > self.expires_at:
            return True
        return self.world_size == 1 and self.process is not None and self.process.has_ended()


def read_manifest(store: BlobStore, prefix: str) -> CheckpointManifest:
    """The manifest of a checkpoint; `CheckpointError` if there is none or it cannot be trusted."""
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
    """Whether there is a checkpoint of that name, intact or not."""
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

    The manifest says when; one that cannot be read counts by when it was stored, so that it is still noticed.
    """
    found: list[tuple[datetime, str]] = []
    for blob in store.list():
        if blob.key.endswith(SUFFIX):
            prefix = blob.key.removesuffix(SUFFIX)
            try:
                found.append((moment_of(store.read(blob.key), blob.key), prefix))
            except NotFoundError:
                continue  # deleted meanwhile
            except CheckpointError:
                found.append((blob.modified_at, prefix))
    return [prefix for _, prefix in sorted(found, reverse=True)]


def manifests(store: BlobStore) -> Iterator[CheckpointManifest]:
    """Every manifest that can be read, in order of prefixes."""
    for blob in store.list():
        if blob.key.endswith(SUFFIX):
            try:
                yield read_manifest(store, blob.key.removesuffix(SUFFIX))
            except CheckpointError:
                continue


def list_checkpoints(store: BlobStore) -> list[CheckpointInfo]:
    """All checkpoints whose manifests are intact, oldest first."""
    return survey(store)[0]


def survey(store: BlobStore) -> tuple[list[CheckpointInfo], list[str]]:
    """All checkpoints whose manifests are intact, oldest first, and the prefixes of the other manifests."""
    intact: list[CheckpointInfo] = []
    damaged: list[str] = []
    for prefix, summary in _summaries(store):
        if summary is None:
            damaged.append(prefix)
        else:
            intact.append(_info(summary))
    return sorted(intact, key=lambda info: (info.timestamp, info.prefix)), damaged


def _summaries(store: BlobStore) -> Iterator[tuple[str, ManifestSummary | None]]:
    """Every prefix with a manifest, in order, and what its manifest says, unless that cannot be trusted."""
    for blob in store.list():
        if blob.key.endswith(SUFFIX):
            prefix = blob.key.removesuffix(SUFFIX)
            try:
                yield prefix, summarize_manifest(store.read(blob.key), blob.key)
            except NotFoundError:
                continue  # deleted meanwhile
            except CheckpointError:
                yield prefix, None


def announce(store: BlobStore, prefix: str, world_size: int, timeout: float) -> Intent:
    """Claim a prefix for a save; an error if it is taken or somebody is at it already."""
    key = manifest_key(prefix)
    if _exists(store, key):
        raise CheckpointError(
            f"checkpoint {prefix!r} exists already; choose another prefix or delete it first",
            key,
            CheckpointErrorType.SAVE_FAILED,
        )
    intent = Intent(
        prefix=prefix,
        save_id=uuid.uuid4().hex,
        world_size=world_size,
        process=ProcessIdentity.current(),
        expires_at=datetime.now(UTC) + timedelta(seconds=timeout) + _SLACK,
    )
    try:
        store.create(f"{prefix}{SAVING}", msgspec.json.encode(intent))
    except AlreadyExistsError as error:
        raise CheckpointError(
            f"somebody else is saving {prefix!r} at the moment",
            key,
            CheckpointErrorType.SAVE_FAILED,
        ) from error
    return intent


def check_claim(store: BlobStore, intent: Intent) -> None:
    """Raise unless the prefix is still ours: a save that took too long may have been swept."""
    current = _read_intent(store, f"{intent.prefix}{SAVING}")
    if current is None or current.save_id != intent.save_id:
        raise CheckpointError(
            f"the save of {intent.prefix!r} was given up by somebody else because it took too long",
            manifest_key(intent.prefix),
            CheckpointErrorType.SAVE_FAILED,
        )


def withdraw(store: BlobStore, intent: Intent) -> None:
    """Give up the claim."""
    store.delete(f"{intent.prefix}{SAVING}")


def leftover_keys(store: BlobStore, prefix: str) -> list[str]:
    """The data files that lie under a prefix, whether a manifest knows them or not."""
    names = [f"{prefix}.safetensors", f"{prefix}.frames", index_key(prefix)]
    found = [name for name in names if _exists(store, name)]
    folder = f"{prefix}/"
    inside = (blob.key for blob in store.list(folder))
    return found + [key for key in inside if _OWN_FILE.fullmatch(key.removeprefix(folder))]


def delete_checkpoint(store: BlobStore, prefix: str) -> None:
    """Remove a checkpoint: first its manifest, then its files. A crash in between is completed by a sweep.

    `ConflictError` if another checkpoint needs its files.
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
    erase(store, prefix)


def erase(store: BlobStore, prefix: str) -> None:
    """Remove everything under a prefix, whole or not; idempotent, and safe to repeat after a crash."""
    store.write(f"{prefix}{DELETING}", b"{}")
    store.delete(manifest_key(prefix))
    for key in leftover_keys(store, prefix):
        store.delete(key)
    store.delete(f"{prefix}{SAVING}")
    store.delete(f"{prefix}{DELETING}")


def sweep(store: BlobStore, now: datetime | None = None) -> list[str]:
    """Remove what crashed saves and deletions left; returns the prefixes that were cleaned up.

    Saves that may still be going on are left alone.
    """
    moment = now or datetime.now(UTC)
    store.sweep()
    swept = []
    for blob in list(store.list()):
        if blob.key.endswith(DELETING):
            prefix = blob.key.removesuffix(DELETING)
            erase(store, prefix)
            swept.append(prefix)
        elif blob.key.endswith(SAVING):
            prefix = blob.key.removesuffix(SAVING)
            if _sweep_save(store, prefix, moment, blob.modified_at):
                swept.append(prefix)
    return swept


def _sweep_save(store: BlobStore, prefix: str, now: datetime, stored_at: datetime) -> bool:
    key = f"{prefix}{SAVING}"
    intent = _read_intent(store, key)
    if intent is None:
        # Unreadable: wait as long as any reasonable save could take.
        if now - stored_at < timedelta(days=1):
            return False
    elif not intent.is_over(now):
        return False
    if _exists(store, manifest_key(prefix)):
        store.delete(key)  # it was committed; only the announcement is left
    else:
        erase(store, prefix)
    return True


def _read_intent(store: BlobStore, key: str) -> Intent | None:
    try:
        return decode_typed(store.read(key), Intent)
    except (NotFoundError, msgspec.DecodeError):
        return None


def _exists(store: BlobStore, key: str) -> bool:
    try:
        store.stat(key)
    except NotFoundError:
        return False
    return True
