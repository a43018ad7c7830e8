"""Delivery of the outbox's messages to webhooks, with signatures and retries, to public addresses only."""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self

import httpx

from tensorforge.errors import NotFoundError, TensorForgeError, UnavailableError
from tensorforge.registry.addresses import Resolver, check_target, resolve_target
from tensorforge.registry.database.outbox import Delivery, Outbox, Webhook
from tensorforge.registry.database.times import to_micros
from tensorforge.resilience import RetryPolicy
from tensorforge.storage.database import Database

_log = logging.getLogger(__name__)

SIGNATURE = "X-TensorForge-Signature"
DELIVERY = "X-TensorForge-Delivery"
RETRIES = RetryPolicy(max_attempts=12, base_delay=5.0, max_delay=3600.0)
_CLAIM_US = 60 * 1_000_000
_TIMEOUT = 10.0
_POLL_SECONDS = 1.0
_jitter = random.Random()  # noqa: S311  spreads retries, guards nothing


def sign(secret: str, timestamp: int, body: str) -> str:
    """The signature of a message: `t=<seconds>,v1=<HMAC-SHA-256 of "<seconds>.<body>">`."""
    digest = hmac.new(secret.encode(), f"{timestamp}.{body}".encode(), hashlib.sha256)
    return f"t={timestamp},v1={digest.hexdigest()}"


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
    """A thread that delivers the messages that are due. Several may run, in several processes."""

    def __init__(
        self,
        database: Database,
        *,
        allow_private: bool = False,
        retries: RetryPolicy = RETRIES,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        resolver: Resolver | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._outbox = Outbox(database)
        self._allow_private = allow_private
        self._retries = retries
        self._clock = clock
        self._resolver = resolver
        # A proxy or a redirect would send a message to an address that was not checked.
        self._client = httpx.Client(
            trust_env=False, follow_redirects=False, timeout=_TIMEOUT, transport=transport
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="webhook-sender", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Finish the current attempt and stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                delivered = self.deliver_due()
            except TensorForgeError as error:
                _log.warning("webhook messages cannot be read now: %s", error)
                delivered = 0
            if not delivered:
                self._stop.wait(_POLL_SECONDS)

    def deliver_due(self) -> int:
        """Try to deliver each message that is due once; returns how many were tried."""
        claimed = self._outbox.claim(to_micros(self._clock()), claim_us=_CLAIM_US)
        for delivery in claimed:
            self._attempt(delivery)
        return len(claimed)

    def _attempt(self, delivery: Delivery) -> None:
        try:
            self._send(self._outbox.get(delivery.webhook_id), delivery)
        except NotFoundError:
            return
        except TensorForgeError as error:
            self._postpone(delivery, error)
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

    def _send(self, webhook: Webhook, delivery: Delivery) -> None:
        parts = check_target(webhook.url, allow_private=self._allow_private)
        address = resolve_target(parts, allow_private=self._allow_private, resolver=self._resolver)
        timestamp = int(self._clock().timestamp())
        url = httpx.URL(webhook.url)
        try:
            answer = self._client.post(
                url.copy_with(host=address),
                content=delivery.body,
                headers={
                    "Host": url.netloc.decode("ascii"),
                    "Content-Type": "application/json",
                    "User-Agent": "tensorforge",
                    SIGNATURE: sign(webhook.secret, timestamp, delivery.body),
                    DELIVERY: str(delivery.delivery_id),
                },
                extensions={"sni_hostname": url.host},
            )
        except httpx.HTTPError as error:
            raise UnavailableError(f"{webhook.url} did not answer: {error}") from error
        if not answer.is_success:
            raise UnavailableError(f"{webhook.url} answered {answer.status_code}")
