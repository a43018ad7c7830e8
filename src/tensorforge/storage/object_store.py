"""Blobs in S3, Google Cloud Storage or Azure, by URL.

These services make every put atomic and durable, so nothing is staged. Two things are special:

- `create` is a conditional put and is never retried: if the answer to a successful attempt were lost, a second
  attempt would fail because of the first one. After an `UnavailableError` the outcome is unknown.
- Large blobs are uploaded in parts. The parts of an unfinished upload are invisible to readers, but some
  services store and bill them: give the bucket a rule that ends incomplete uploads after a day.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tensorforge.errors import (
    AlreadyExistsError,
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from tensorforge.storage.blobs import (
    BlobData,
    BlobInfo,
    Buffer,
    buffers_of,
    check_range,
    flat,
    validate_key,
)

Result = TypeVar("Result")

_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000
_CONCURRENT_PARTS = 8


def open_object_store(url: str) -> ObjectStore:
    """Open `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix`.

    Account, credentials, region and endpoint come from the service's usual environment variables
    (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME`,
    `AZURE_STORAGE_ACCOUNT_KEY`, ...).
    """
    return ObjectStore(url)


class ObjectStore:
    """A bucket, or the part of a bucket below a prefix. Safe to share between threads.

    `config` (`endpoint`, `access_key_id`, `region`, ...) overrides the environment, and `client_options`
    (`allow_http`, `timeout`, ...) the way to connect; both are obstore's. A request that fails because of the
    network is retried for at most `retry_seconds`.
    """

    def __init__(
        self,
        url: str,
        *,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        retry_seconds: float = 60.0,
    ) -> None:
        if not retry_seconds >= 0:
            raise ConfigurationError("retry_seconds", retry_seconds, "must not be negative")
        self.url = _without_secrets(url)
        endpoint = _endpoint(urlsplit(url).scheme, config)
        client = {"allow_http": endpoint.startswith("http://"), **(client_options or {})}
        options = {"config": dict(config or {}), "client_options": client}
        patient = {"max_retries": 10, "retry_timeout": timedelta(seconds=retry_seconds)}
        self._store = _connect(url, options, patient)
        self._once = _connect(url, options, {"max_retries": 0})

    def write(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob, replacing one of the same key."""
        with self.open_writer(key) as writer:
            for buffer in buffers_of(data):
                writer.append(buffer)
            return writer.commit()

    def create(self, key: str, data: BlobData) -> BlobInfo:
        """Store a blob under a new key; `AlreadyExistsError` if the key is taken.

        The blob is uploaded in one piece, so this is meant for manifests rather than for tensors. After
        an `UnavailableError` the blob may or may not exist.
        """
        content = b"".join(buffers_of(data))
        self._require(self._once).create(validate_key(key), content)
        return self.stat(key)

    def open_writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        """Start a blob that is written in pieces; the size of its parts follows from `size_hint`."""
        part = max(_PART_BYTES, -(-(size_hint or 0) // (_MAX_PARTS - 1)))
        return ObjectWriter(self, validate_key(key), part)

    def read(self, key: str) -> bytes:
        """The bytes of a blob; `NotFoundError` if there is none."""
        return self._require(self._store).get(validate_key(key))

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`, in one request."""
        target = flat(buffer)
        store = self._require(self._store)
        if offset < 0 or len(target) == 0:
            check_range(key, offset, len(target), self.stat(key).size)
            return
        try:
            found = store.get_range(validate_key(key), offset, len(target))
        except UnavailableError:
            # Services have different errors for a range beyond the end; check for that case here.
            check_range(key, offset, len(target), self.stat(key).size)
            raise
        check_range(key, offset, len(target), offset + len(found))
        target[:] = found

    def stat(self, key: str) -> BlobInfo:
        """The size and time of a blob; `NotFoundError` if there is none."""
        return _info(self._require(self._store).head(validate_key(key)))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""
        folder = prefix.rpartition("/")[0]  # services list by folder; the rest is filtered here
        found = self._require(self._store).list(folder)
        infos = (_info(meta) for meta in found)
        matching = (info for info in infos if info.key.startswith(prefix))
        return iter(sorted(matching, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove a blob; a missing blob is not an error."""
        self._require(self._store).delete(validate_key(key))

    def sweep(self) -> int:
        """Return 0: unfinished uploads are invisible, and only the service can remove them."""
        self._require(self._store)
        return 0

    def close(self) -> None:
        """Close connections; closing again changes nothing."""
        self._store = self._once = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require(self, client: _Client | None) -> _Client:
        if client is None:
            raise ClosedError(f"the store {self.url} was closed")
        return client

    def _begin_upload(self, key: str, part: int) -> Any:
        return self._require(self._store).begin_upload(key, part)


class ObjectWriter:
    """Uploads a blob: a small one in one piece at the commit, a larger one in parts while it is written."""

    def __init__(self, store: ObjectStore, key: str, part: int) -> None:
        self._store = store
        self._key = key
        self._upload = store._begin_upload(key, part)  # noqa: SLF001  a writer is part of its store

    def append(self, data: Buffer) -> None:
        """Add bytes at the end."""
        copy = bytes(flat(data))  # the upload keeps the buffer until the part is sent
        with _translated(self._key, self._store.url):
            self._running().write(copy)

    def commit(self) -> BlobInfo:
        """Make the blob visible and durable, replacing one of the same key."""
        upload = self._running()
        self._upload = None
        with _translated(self._key, self._store.url):
            upload.close()
        return self._store.stat(self._key)

    def abort(self) -> None:
        """Discard what was written; after a commit or an abort this does nothing."""
        self._upload = None

    def _running(self) -> Any:
        if self._upload is None:
            raise ClosedError(f"the writer of {self._key} has ended")
        return self._upload

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


class _Client:
    """obstore's functions on one store, with errors translated."""

    def __init__(self, store: Any, url: str) -> None:
        import obstore

        self._api: Any = obstore
        self._store, self._url = store, url

    def create(self, key: str, content: bytes) -> None:
        with _translated(key, self._url):
            self._api.put(self._store, key, content, mode="create", use_multipart=False)

    def get(self, key: str) -> bytes:
        with _translated(key, self._url):
            return bytes(self._api.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        with _translated(key, self._url):
            return memoryview(self._api.get_range(self._store, key, start=start, length=length))

    def head(self, key: str) -> Mapping[str, Any]:
        with _translated(key, self._url):
            found: Mapping[str, Any] = self._api.head(self._store, key)
            return found

    def list(self, folder: str) -> list[Mapping[str, Any]]:
        with _translated(folder, self._url):
            found: list[Mapping[str, Any]] = self._api.list(self._store, folder or None).collect()
            return found

    def delete(self, key: str) -> None:
        with _translated(key, self._url), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, key)

    def begin_upload(self, key: str, part: int) -> Any:
        with _translated(key, self._url):
            return self._api.open_writer(
                self._store, key, buffer_size=part, max_concurrency=_CONCURRENT_PARTS
            )


def _connect(url: str, options: Mapping[str, Any], retries: Mapping[str, Any]) -> _Client | None:
    try:
        from obstore import store
        from obstore.exceptions import BaseError
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{_without_secrets(url)}: object stores need obstore; install tensorforge[s3]"
        ) from error
    try:
        opened = store.from_url(url, retry_config=dict(retries), **options)  # type: ignore[call-overload]  # obstore has one overload per service
        return _Client(opened, _without_secrets(url))
    except (BaseError, ValueError) as error:
        raise InvalidInputError(f"{_without_secrets(url)} cannot be opened: {error}") from error


_ENDPOINTS = {
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""URL scheme → the option and the environment variables for the service's address."""


def _endpoint(scheme: str, config: Mapping[str, Any] | None) -> str:
    """The configured address of the service; if it is `http://`, connections without TLS are allowed."""
    option, *names = _ENDPOINTS.get(scheme, ("endpoint",))
    given = [(config or {}).get(option), *map(os.environ.get, names)]
    return next((str(endpoint) for endpoint in given if endpoint), "")


def _info(meta: Mapping[str, Any]) -> BlobInfo:
    return BlobInfo(meta["path"], meta["size"], meta["last_modified"])


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@contextlib.contextmanager
def _translated(key: str, url: str) -> Iterator[None]:
    """Translate obstore's errors into `TensorForgeError`s, with the first line of their text."""
    from obstore import exceptions

    try:
        yield
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        raise NotFoundError(f"{url} has no blob {key!r}") from error
    except (FileExistsError, exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise AlreadyExistsError(f"{url} has a blob {key!r} already") from error
    except (PermissionError, exceptions.PermissionDeniedError) as error:
        raise PermissionDeniedError(f"{url} refused access to {key!r}: {_first(error)}") from error
    except exceptions.UnauthenticatedError as error:
        raise AuthenticationError(f"{url} rejected the credentials: {_first(error)}") from error
    except (OSError, exceptions.BaseError) as error:
        # Uploads in parts report every failure as one class of error, so only the text tells them apart.
        if "403 Forbidden" in str(error) or "401 Unauthorized" in str(error):
            raise PermissionDeniedError(f"{url} refused {key!r}: {_first(error)}") from error
        raise UnavailableError(f"{url} failed at {key!r}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
