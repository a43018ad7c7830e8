"""Files over HTTP: those of a version, and those under the routes of MLflow's artifact proxy.

A file is sent by PUT, as one stream or in parts with `Content-Range`. `X-Checksum-SHA256` is checked if it is
sent, and every answer with a file has it. GET takes a `Range`, so that a download can be resumed.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.registry.artifacts import (
    PIECE,
    VERSION_FOLDER,
    ArtifactStore,
    FolderEntry,
    version_folder,
)
from tensorforge.registry.domain.names import check_name
from tensorforge.registry.domain.versions import require_version
from tensorforge.registry.service.context import ServiceContext
from tensorforge.registry.service.endpoints import Endpoint, Endpoints, measured
from tensorforge.registry.service.error_responses import json_response
from tensorforge.registry.service.operations import require_scope
from tensorforge.registry.tokens import Scope

CHECKSUM = "X-Checksum-SHA256"
_VERSION = "/api/v1/models/{model_id}/versions/{version}/files"
_PROXY = "/api/2.0/mlflow-artifacts/artifacts"
_PART = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_LARGEST_PART = 64 * 2**20


def endpoints(context: ServiceContext) -> Endpoints:
    """The endpoints for files; none if the service stores no files."""
    artifacts = context.options.artifacts
    if artifacts is None:
        return {}
    files = _Files(context, artifacts)
    found: dict[tuple[str, str], tuple[str, Endpoint]] = {
        ("PUT", _VERSION + "/{path:path}"): ("put_file", files.put_version_file),
        ("GET", _VERSION + "/{path:path}"): ("get_file", files.get_version_file),
        ("GET", _VERSION): ("list_files", files.list_version_files),
        ("PUT", _PROXY + "/{path:path}"): ("mlflow_put_artifact", files.put_artifact),
        ("GET", _PROXY + "/{path:path}"): ("mlflow_get_artifact", files.get_artifact),
        ("DELETE", _PROXY + "/{path:path}"): ("mlflow_delete_artifact", files.delete_artifact),
        ("GET", _PROXY): ("mlflow_list_artifacts", files.list_artifacts),
    }
    return {key: measured(context, name, run) for key, (name, run) in found.items()}


class _Files:
    """The endpoints, each with the scope that it needs."""

    def __init__(self, context: ServiceContext, artifacts: ArtifactStore) -> None:
        self._context = context
        self._artifacts = artifacts

    async def put_version_file(self, request: Request) -> Response:
        folder = await self._version_folder(request, Scope.WRITE)
        return await self._put(request, f"{folder}/{request.path_params['path']}")

    async def get_version_file(self, request: Request) -> Response:
        folder = await self._version_folder(request, Scope.READ)
        return await self._get(request, f"{folder}/{request.path_params['path']}")

    async def list_version_files(self, request: Request) -> Response:
        folder = await self._version_folder(request, Scope.READ)
        return await self._list(folder, request.query_params.get("path", ""))

    async def put_artifact(self, request: Request) -> Response:
        self._require(request, Scope.WRITE)
        path = request.path_params["path"]
        if path.split("/")[0] == VERSION_FOLDER:
            raise InvalidInputError(f"files of versions are sent to {_VERSION}")
        return await self._put(request, path)

    async def get_artifact(self, request: Request) -> Response:
        self._require(request, Scope.READ)
        return await self._get(request, request.path_params["path"])

    async def delete_artifact(self, request: Request) -> Response:
        self._require(request, Scope.ADMIN)
        await self._context.run(self._artifacts.delete, request.path_params["path"])
        return json_response(200, {})

    async def list_artifacts(self, request: Request) -> Response:
        self._require(request, Scope.READ)
        return await self._list("", request.query_params.get("path", ""))

    def _require(self, request: Request, scope: Scope, model_id: str | None = None) -> None:
        require_scope(scope, request.scope["tensorforge.principal"], model_id)

    async def _version_folder(self, request: Request, scope: Scope) -> str:
        model_id = check_name("model_id", request.path_params["model_id"])
        self._require(request, scope, model_id)
        version = require_version(request.path_params["version"])
        found = await self._context.run(self._context.registry.require, model_id, version)
        return version_folder(model_id, found.number)

    async def _put(self, request: Request, path: str) -> Response:
        who = request.scope["tensorforge.principal"].name
        expected = request.headers.get(CHECKSUM, "")
        if "content-range" in request.headers:
            return await self._put_part(request, path, who, expected)
        run = self._context.run
        upload = await run(lambda: self._artifacts.begin(path, uploaded_by=who, sha256=expected))
        try:
            async for piece in _pieces(request):
                await run(upload.append, piece)
            stored = await run(upload.finish)
        finally:
            await run(upload.close)
        answer = {"size_bytes": stored.size_bytes, "sha256": stored.sha256}
        return json_response(200, answer, {CHECKSUM: stored.sha256})

    async def _put_part(self, request: Request, path: str, who: str, expected: str) -> Response:
        match = _PART.fullmatch(request.headers["content-range"])
        if match is None:
            raise InvalidInputError("Content-Range must be: bytes START-END/TOTAL")
        start, end, total = (int(text) for text in match.groups())
        length = end - start + 1
        if not 0 < length <= _LARGEST_PART:
            raise InvalidInputError(f"a part must have between 1 and {_LARGEST_PART} bytes")
        data = await _exactly(request, length)
        received = await self._context.run(
            lambda: self._artifacts.put_part(
                path, start, total, data, uploaded_by=who, sha256=expected
            )
        )
        status = 200 if received == total else 202
        return json_response(status, {"received": received, "total": total})

    async def _get(self, request: Request, path: str) -> Response:
        if "upload_total" in request.query_params:
            return await self._received(request, path)
        file = await self._context.run(self._artifacts.find, path)
        start, end, status = 0, file.size_bytes, 200
        match = _RANGE.fullmatch(request.headers.get("range", ""))
        if match is not None and int(match[1]) < file.size_bytes:
            start, status = int(match[1]), 206
            end = min(file.size_bytes, int(match[2]) + 1) if match[2] else file.size_bytes
        headers = {
            CHECKSUM: file.sha256,
            "Accept-Ranges": "bytes",
            "Content-Length": str(max(0, end - start)),
            "X-Content-Type-Options": "nosniff",
        }
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{file.size_bytes}"
        pieces = self._artifacts.read(file, start, end)
        kind = "application/octet-stream"
        return StreamingResponse(pieces, status, headers=headers, media_type=kind)

    async def _received(self, request: Request, path: str) -> Response:
        text = request.query_params["upload_total"]
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InvalidInputError("upload_total must be the size of the file")
        received = await self._context.run(self._artifacts.received, path, int(text))
        return json_response(200, {"received": received, "total": int(text)})

    async def _list(self, root: str, path: str) -> Response:
        folder = "/".join(part for part in (root, path.strip("/")) if part)
        entries = await self._context.run(self._artifacts.list, folder)
        if not entries and path and not root:
            raise NotFoundError(f"there is no folder {path[:200]!r}")
        return json_response(200, {"files": [_entry(each) for each in entries]})


def _entry(entry: FolderEntry) -> dict[str, Any]:
    found: dict[str, Any] = {"path": entry.name, "is_dir": entry.is_folder}
    return found if entry.is_folder else found | {"file_size": entry.size_bytes}


async def _exactly(request: Request, length: int) -> bytes:
    """The body, which must have exactly this length; no more than that is kept."""
    pieces, size = [], 0
    async for piece in _pieces(request):
        size += len(piece)
        if size > length:
            break
        pieces.append(piece)
    if size != length:
        raise InvalidInputError(f"the body does not have the {length} bytes of the range")
    return b"".join(pieces)


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces of about a megabyte, so that few of them are handed to a thread."""
    collected: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        collected.append(chunk)
        size += len(chunk)
        if size >= PIECE:
            yield b"".join(collected)
            collected, size = [], 0
    if size:
        yield b"".join(collected)
