"""Delivery of the outbox's messages to webhooks, with signatures and retries, to public addresses only.

Each webhook with due messages has a thread of its own while there are any. A receiver that is slow, hangs or
breaks the protocol delays only the messages to itself. An attempt has a total deadline, and nothing of the
answer but its status is read.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import logging
import random
import ssl
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

import httpx

from tensorforge.errors import (
    InvalidInputError,
    NotFoundError,
    TensorForgeError,
    UnavailableError,
)
from tensorforge.registry.addresses import Resolver, check_target, resolve_target
from tensorforge.registry.database.outbox import Delivery, Outbox, Webhook
from tensorforge.registry.database.times import to_micros
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.database import Database

_log = logging.getLogger(__name__)

SIGNATURE = "X-TensorForge-Signature"
DELIVERY = "X-TensorForge-Delivery"
MLFLOW_SIGNATURE = "X-MLflow-Signature"
MLFLOW_DELIVERY = "X-MLflow-Delivery-Id"
MLFLOW_TIMESTAMP = "X-MLflow-Timestamp"
RETRIES = RetryPolicy(max_attempts=12, base_delay=5.0, max_delay=3600.0)
_CLAIM_US = 60 * 1_000_000
_CLAIMED = 5
DEADLINE = 10.0
"""How many seconds one attempt may take in total, from the connection to the status of the answer."""
_POLL_SECONDS = 1.0
_jitter = random.Random()  # noqa: S311  spreads retries, guards nothing


def sign(secret: str, timestamp: int, body: str) -> str:
    """The signature of a message: `t=<seconds>,v1=<HMAC-SHA-256 of "<seconds>.<body>">`."""
    digest = hmac.new(secret.encode(), f"{timestamp}.{body}".encode(), hashlib.sha256)
    return f"t={timestamp},v1={digest.hexdigest()}"


def sign_for_mlflow(secret: str, delivery_id: str, timestamp: int, body: str) -> str:
    """MLflow's signature: `v1,` and the base64 of the HMAC-SHA-256 of `<delivery id>.<seconds>.<body>`."""
    signed = f"{delivery_id}.{timestamp}.{body}".encode()
    digest = hmac.new(secret.encode(), signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode('ascii')}"


def verify_signature(
    secret: str, header: str, body: str, *, now: int, tolerance: int = 300
) -> bool:
    """Whether a message was signed with the secret at most `tolerance` seconds ago; for receivers."""
    parts = dict(part.partition("=")[::2] for part in header.split(","))
    timestamp = parts.get("t", "")
    if not (timestamp.isascii() and timestamp.isdigit()) or abs(now - int(timestamp)) > tolerance:
        return False
    return hmac.compare_digest(sign(secret, int(timestamp), body), header)


class WebhookSender:
    """Delivers the messages that are due, by one thread per webhook. Several may run, in several processes."""

    def __init__(
        self,
        database: Database,
        *,
        allow_private: bool = False,
        retries: RetryPolicy = RETRIES,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        self._outbox = Outbox(database)
        self._post = WebhookRequest(
            allow_private=allow_private,
            clock=clock,
            resolver=resolver,
            transport=transport,
            deadline=deadline,
        )
        self._retries = retries
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._queues: dict[int, threading.Thread] = {}

    def start(self) -> Self:
        """Start the thread that looks for due messages."""
        self._thread = threading.Thread(target=self._run, name="webhook-sender", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Finish the current attempts, which takes at most their deadline, and stop all threads."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            running = list(self._queues.values())
        for thread in running:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for webhook_id in self._outbox.queues_due(to_micros(self._clock())):
                    self._start_queue(webhook_id)
            except TensorForgeError as error:
                _log.warning("webhook messages cannot be read now: %s", error)
            except Exception:  # noqa: BLE001  the thread must survive anything
                _log.exception("webhook messages cannot be read now")
            self._stop.wait(_POLL_SECONDS)

    def _start_queue(self, webhook_id: int) -> None:
        with self._lock:
            if webhook_id in self._queues:
                return
            thread = threading.Thread(
                target=self._serve_queue,
                args=(webhook_id,),
                name=f"webhook-{webhook_id}",
                daemon=True,
            )
            self._queues[webhook_id] = thread
            thread.start()

    def _serve_queue(self, webhook_id: int) -> None:
        try:
            while not self._stop.is_set() and self.deliver_to(webhook_id):
                pass
        except TensorForgeError as error:
            _log.warning("webhook %d: its messages cannot be read now: %s", webhook_id, error)
        except Exception:  # noqa: BLE001  the next poll starts the queue again
            _log.exception("webhook %d: its messages cannot be delivered now", webhook_id)
        finally:
            with self._lock:
                del self._queues[webhook_id]

    def deliver_due(self) -> int:
        """Try to deliver each message that is due once; returns how many were tried."""
        due = self._outbox.queues_due(to_micros(self._clock()))
        return sum(self.deliver_to(webhook_id) for webhook_id in due)

    def deliver_to(self, webhook_id: int) -> int:
        """Try to deliver the next messages to one webhook; returns how many were tried."""
        now_us = to_micros(self._clock())
        claimed = self._outbox.claim(
            now_us, claim_us=_CLAIM_US, webhook_id=webhook_id, limit=_CLAIMED
        )
        for number, delivery in enumerate(claimed):
            if self._stop.is_set() and number:
                break
            self._attempt(delivery)
        return len(claimed)

    def _attempt(self, delivery: Delivery) -> None:
        try:
            webhook = self._outbox.get(delivery.webhook_id)
            status = self._post.send(webhook, delivery.body, str(delivery.delivery_id))
            if not 200 <= status < 300:
                raise UnavailableError(f"{webhook.url} answered {status}")
        except NotFoundError:
            return
        except TensorForgeError as error:
            self._postpone(delivery, error)
        except Exception as error:  # noqa: BLE001  one message must not stop the others
            _log.exception("webhook %d: an attempt failed unexpectedly", delivery.webhook_id)
            self._postpone(delivery, UnavailableError(f"the attempt failed: {error!r}"))
        else:
            now_us = to_micros(self._clock())
            self._outbox.settle(delivery, status="delivered", now_us=now_us)

    def _postpone(self, delivery: Delivery, error: TensorForgeError) -> None:
        now_us = to_micros(self._clock())
        attempt = delivery.attempts + 1
        # At least half of the longest delay, so that an overloaded receiver gets a pause.
        share = 0.5 + _jitter.random() / 2
        delay = self._retries.next_delay(attempt, error, 0.0, share)
        if delay is None:
            _log.warning(
                "webhook %d: gave up delivery %d: %s",
                delivery.webhook_id,
                delivery.delivery_id,
                error,
            )
            self._outbox.settle(delivery, status="failed", now_us=now_us, error=str(error))
            return
        due_us = now_us + int(delay * 1_000_000)
        self._outbox.settle(
            delivery, status="pending", now_us=now_us, due_us=due_us, error=str(error)
        )


class WebhookRequest:
    """Sends one message to a webhook, within a deadline and only to an address that was checked."""

    def __init__(
        self,
        *,
        allow_private: bool,
        clock: Callable[[], datetime],
        resolver: Resolver | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        self._allow_private = allow_private
        self._clock = clock
        self._resolver = resolver
        self._transport = transport
        self._deadline = deadline

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def send(self, webhook: Webhook, body: str, delivery_id: str) -> int:
        """Send a message and return the status of the answer.

        `UnavailableError` if no answer begins before the deadline; `InvalidInputError` or
        `PermissionDeniedError` if the URL must not be called.
        """
        parts = check_target(webhook.url, allow_private=self._allow_private)
        address = resolve_target(parts, allow_private=self._allow_private, resolver=self._resolver)
        headers = self._headers(webhook, body, delivery_id)
        try:
            return asyncio.run(self._status(webhook.url, address, body, headers))
        except httpx.InvalidURL as error:
            raise InvalidInputError(f"{webhook.url} is not a URL: {error}") from error
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            raise UnavailableError(f"{webhook.url} did not answer: {problem}") from error

    def _headers(self, webhook: Webhook, body: str, delivery_id: str) -> dict[str, str]:
        timestamp = int(self._clock().timestamp())
        headers = {"Content-Type": "application/json", "User-Agent": "tensorforge"}
        if not webhook.events:
            headers[DELIVERY] = delivery_id
            if webhook.secret:
                headers[SIGNATURE] = sign(webhook.secret, timestamp, body)
            return headers
        headers |= {MLFLOW_DELIVERY: delivery_id, MLFLOW_TIMESTAMP: str(timestamp)}
        if webhook.secret:
            signature = sign_for_mlflow(webhook.secret, delivery_id, timestamp, body)
            headers[MLFLOW_SIGNATURE] = signature
        return headers

    async def _status(self, text: str, address: str, body: str, headers: dict[str, str]) -> int:
        url = httpx.URL(text)
        headers["Host"] = url.netloc.decode("ascii")
        # A proxy or a redirect would send the message to an address that was not checked.
        client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=self._deadline,
            verify=self._tls,
            transport=self._transport,
        )
        request = client.build_request(
            "POST",
            url.copy_with(host=address),
            content=body,
            headers=headers,
            extensions={"sni_hostname": url.host},
        )
        async with asyncio.timeout(self._deadline), client:
            # The body of the answer is not read: closing the client closes the connection.
            answer = await client.send(request, stream=True)
            await answer.aclose()
            return answer.status_code
