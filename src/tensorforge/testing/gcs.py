"""Google Cloud Storage's XML interface on this machine, for tests: a proxy in front of the S3 server.

No package registry has a server of that interface. But the interface is S3's with other headers for access and
conditions and a few other answers. This proxy translates those; the S3 server stores the objects. The limits,
the consistency and the tokens of the real service are not reproduced.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from tensorforge.storage.object_store import ObjectStore
from tensorforge.testing.s3 import BUCKET, running_s3

TOKEN = "a-token-for-tests"  # noqa: S105  of a server that only this machine reaches
_FORWARDED = ("Range", "Content-Type", "If-Match", "If-Modified-Since", "If-Unmodified-Since")
_RETURNED = ("Content-Type", "Content-Range", "ETag", "Last-Modified", "Accept-Ranges")
_TIMEOUT = 30.0


class GcsServer:
    """A running proxy. `store()` opens a part of its bucket that no other test uses."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which `open_store("gs://tests/...")` finds this server."""
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": TOKEN}

    def store(self, prefix: str | None = None, *, token: str = TOKEN) -> ObjectStore:
        """A store below `prefix`, by default a new one."""
        config = {"base_url": self.endpoint, "bearer_token": token}
        url = f"gs://{BUCKET}/{prefix or uuid.uuid4().hex}"
        return ObjectStore(url, config=config, retry_seconds=2.0)


@contextlib.contextmanager
def running_gcs() -> Iterator[GcsServer]:
    """Start both servers, yield the proxy, end both."""
    with running_s3(anonymous=True) as s3:

        class Translator(_Translator):
            behind = urlsplit(s3.endpoint).netloc

        server = ThreadingHTTPServer(("127.0.0.1", 0), Translator)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, name="gcs", daemon=True)
        thread.start()
        try:
            yield GcsServer(f"http://127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Translator(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behind: ClassVar[str]

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(HTTPStatus.UNAUTHORIZED, "AuthenticationRequired")
        elif any(name.lower().startswith("x-amz-") for name in self.headers):
            self._refuse(HTTPStatus.BAD_REQUEST, "InvalidArgument")
        elif self._deletes_a_missing_object():
            self._refuse(HTTPStatus.NOT_FOUND, "NoSuchKey")
        else:
            self._forward(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815  the base class's names

    def _deletes_a_missing_object(self) -> bool:
        """Whether a missing object is deleted: that is no error in S3, but one in this interface."""
        if self.command != "DELETE" or "uploadId" in parse_qs(urlsplit(self.path).query):
            return False
        status, _, _ = self._ask("HEAD", {}, b"")
        return status == HTTPStatus.NOT_FOUND

    def _forward(self, body: bytes) -> None:
        headers = {name: self.headers[name] for name in _FORWARDED if name in self.headers}
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            if generation != "0":
                self._refuse(HTTPStatus.NOT_IMPLEMENTED, "NotImplemented")
                return
            headers["If-None-Match"] = "*"
        if source := self.headers.get("x-goog-copy-source"):
            headers["x-amz-copy-source"] = source
        status, found, content = self._ask(self.command, headers, body)
        answer = {name: found[name] for name in _RETURNED if name in found}
        answer["x-goog-generation"] = "1"
        length = found["Content-Length"] if self.command == "HEAD" else str(len(content))
        self._answer(status, answer | {"Content-Length": length or "0"}, content)

    def _ask(self, method: str, headers: dict[str, str], body: bytes) -> tuple[int, Any, bytes]:
        with contextlib.closing(http.client.HTTPConnection(self.behind, timeout=_TIMEOUT)) as s3:
            s3.request(method, self.path, body, headers)
            answer = s3.getresponse()
            return answer.status, answer.headers, answer.read()

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
        self._answer(status, {"Content-Length": str(len(content))}, content)

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the base class's name
        """Write no log."""
