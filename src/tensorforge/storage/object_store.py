"""Blobs in S3, Google Cloud Storage or Azure, by URL.

A put is atomic and durable there by nature, so nothing is staged. What is special:

- `create` is a conditional put, and is never repeated by itself: an answer that got lost would make the
  second attempt fail against the first one's success. Its `UnavailableError` means "unknown".
- Large blobs go up in parts. The parts of an upload that died are invisible to every reader, but some services
  keep and bill them: give the bucket a rule that ends incomplete uploads after a day.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from tensorforge.errors import (
    AlreadyExistsError,
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    EncodingError,
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
    """A bucket, or the part of one below a prefix. Safe to share between threads.

    `config` overrides what the environment says (`endpoint`, `access_key_id`, `region`, ...) and
    `client_options` how to connect (`allow_http`, `timeout`, ...); both are obstore's. A request that failed
    on the way is repeated for at most `retry_seconds`.
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

        Goes up in one piece, so it is meant for manifests rather than for tensors. After an
        `UnavailableError` the blob may or may not be there.
        """
        content = b"".join(buffers_of(data))
        _require(self._once, self.url).put(validate_key(key), content, "create", self.url)
        return self.stat(key)

    def open_writer(self, key: str, size_hint: int | None = None) -> ObjectWriter:
        """Start a blob that comes in pieces; parts are as large as `size_hint` makes necessary."""
        part = max(_PART_BYTES, -(-(size_hint or 0) // (_MAX_PARTS - 1)))
        return ObjectWriter(self, validate_key(key), part)

    def read(self, key: str) -> bytes:
        """The whole blob; `NotFoundError` if there is none."""
        return _require(self._store, self.url).get(validate_key(key), self.url)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the blob's bytes from `offset`; one request."""
        target = flat(buffer)
        store = _require(self._store, self.url)
        if offset < 0 or len(target) == 0:
            check_range(key, offset, len(target), self.stat(key).size)
            return
        try:
            found = store.get_range(validate_key(key), offset, len(target), self.url)
        except UnavailableError:
            # Services answer a range beyond the end with an error of their own: say what it is.
            check_range(key, offset, len(target), self.stat(key).size)
            raise
        if len(found) != len(target):
            raise EncodingError(
                f"{key} has {offset + len(found)} bytes, but {offset + len(target)} are needed: "
                "it was cut short"
            )
        target[:] = found

    def stat(self, key: str) -> BlobInfo:
        """What is known about a blob; `NotFoundError` if there is none."""
        return _info(_require(self._store, self.url).head(validate_key(key), self.url))

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Every blob whose key starts with `prefix`, in order of keys."""
        folder = prefix.rpartition("/")[0]  # services list by folder; the rest is compared here
        found = _require(self._store, self.url).list(folder, self.url)
        infos = (_info(meta) for meta in found)
        matching = (info for info in infos if info.key.startswith(prefix))
        return iter(sorted(matching, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove a blob for good; one that does not exist is removed already."""
        _require(self._store, self.url).delete(validate_key(key), self.url)

    def sweep(self) -> int:
        """Nothing is ever left behind that a reader could see: 0."""
        _require(self._store, self.url)
        return 0

    def close(self) -> None:
        """Let go of connections; closing twice is fine."""
        self._store = self._once = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_upload(self, key: str, part: int) -> Any:
        return _require(self._store, self.url).begin_upload(key, part, self.url)


class ObjectWriter:
    """A blob on its way up. Small ones are sent whole at the commit, larger ones in parts meanwhile."""

    def __init__(self, store: ObjectStore, key: str, part: int) -> None:
        self._store = store
        self._key = key
        self._upload = store._begin_upload(key, part)  # noqa: SLF001  two halves of one thing

    def append(self, data: Buffer) -> None:
        """Add bytes at the end."""
        copy = bytes(flat(data))  # the upload keeps what it is given until the part is sent
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
        """Throw away what was written; after a commit or an abort this does nothing."""
        self._upload = None

    def _running(self) -> Any:
        if self._upload is None:
            raise ClosedError(f"the writer of {self._key} has ended")
        return self._upload

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()


class _Client:
    """obstore's functions on one store, with errors in our terms."""

    def __init__(self, store: Any) -> None:
        import obstore

        self._api: Any = obstore
        self._store = store

    def put(self, key: str, content: bytes, mode: str, url: str) -> None:
        with _translated(key, url):
            self._api.put(self._store, key, content, mode=mode, use_multipart=False)

    def get(self, key: str, url: str) -> bytes:
        with _translated(key, url):
            return bytes(self._api.get(self._store, key).bytes())

    def get_range(self, key: str, start: int, length: int, url: str) -> memoryview:
        with _translated(key, url):
            return memoryview(self._api.get_range(self._store, key, start=start, length=length))

    def head(self, key: str, url: str) -> Mapping[str, Any]:
        with _translated(key, url):
            found: Mapping[str, Any] = self._api.head(self._store, key)
            return found

    def list(self, folder: str, url: str) -> list[Mapping[str, Any]]:
        with _translated(folder, url):
            found: list[Mapping[str, Any]] = self._api.list(self._store, folder or None).collect()
            return found

    def delete(self, key: str, url: str) -> None:
        with _translated(key, url), contextlib.suppress(FileNotFoundError):
            self._api.delete(self._store, key)

    def begin_upload(self, key: str, part: int, url: str) -> Any:
        with _translated(key, url):
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
        return _Client(store.from_url(url, retry_config=dict(retries), **options))  # type: ignore[call-overload]  # obstore has one overload per service
    except (BaseError, ValueError) as error:
        raise InvalidInputError(f"{_without_secrets(url)} cannot be opened: {error}") from error


_ENDPOINTS = {
    "s3": ("endpoint", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("base_url", "GOOGLE_BASE_URL"),
    "az": ("endpoint", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""URL scheme → the option and the environment variables that name a service's address."""


def _endpoint(scheme: str, config: Mapping[str, Any] | None) -> str:
    """The address that the user gave; one without TLS is a decision that is not asked for twice."""
    option, *names = _ENDPOINTS.get(scheme, ("endpoint",))
    given = [(config or {}).get(option), *map(os.environ.get, names)]
    return next((str(endpoint) for endpoint in given if endpoint), "")


def _require(client: _Client | None, url: str) -> _Client:
    if client is None:
        raise ClosedError(f"the store {url} was closed")
    return client


def _info(meta: Mapping[str, Any]) -> BlobInfo:
    return BlobInfo(meta["path"], meta["size"], meta["last_modified"])


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@contextlib.contextmanager
def _translated(key: str, url: str) -> Iterator[None]:
    """obstore's errors as ours; their first line says what happened, the rest is a dump."""
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
        raise AuthenticationError(f"{url} does not know who asks: {_first(error)}") from error
    except (OSError, exceptions.BaseError) as error:
        # Uploads in parts report every failure as one kind of error, so the text must tell.
        if "403 Forbidden" in str(error) or "401 Unauthorized" in str(error):
            raise PermissionDeniedError(f"{url} refused {key!r}: {_first(error)}") from error
        raise UnavailableError(f"{url} failed at {key!r}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
