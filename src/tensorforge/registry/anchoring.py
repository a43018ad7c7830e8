"""Audit heads that are noted outside the database, on a schedule.

Whoever can rewrite the database can rewrite the audit and its hashes. A head that was noted where that person
cannot write shows it: the rewritten audit does not contain that head.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from tensorforge.errors import InvalidInputError, TensorForgeError, UnavailableError
from tensorforge.registry.database.audit import AuditHead, read_head
from tensorforge.registry.database.dialects import insert_if_absent
from tensorforge.registry.database.outbox import Webhook
from tensorforge.registry.database.tables import ANCHORS
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.webhooks import WebhookRequest
from tensorforge.storage.database import Database
from tensorforge.storage.opening import open_store

_log = logging.getLogger(__name__)
_ADD = insert_if_absent(ANCHORS, [column.name for column in ANCHORS.columns])
_LONGEST_POLL = 60.0

Clock = Callable[[], datetime]


def write_anchor(
    head: AuditHead, target: str, at: datetime, *, allow_private: bool = False
) -> None:
    """Note a head at a target: a line in a file, a new blob in a store, or a message to a webhook.

    `target` is a path, the URL of a blob store, or an http or https URL.
    """
    noted = {"sequence": head.sequence, "hash": head.hash, "at": at.isoformat()}
    if target.startswith(("http://", "https://")):
        _send(target, json.dumps(noted), at, allow_private=allow_private)
    elif "://" in target:
        store = open_store(target)
        try:
            key = f"audit-heads/{head.sequence:016d}-{to_micros(at)}.json"
            store.create(key, json.dumps(noted).encode())
        finally:
            store.close()
    else:
        _append(Path(target).expanduser(), json.dumps(noted) + "\n")


def _send(target: str, body: str, at: datetime, *, allow_private: bool) -> None:
    webhook = Webhook(
        webhook_id=0,
        url=target,
        secret="",
        model_id="",
        actions=(),
        created_at=at,
        created_by="",
    )
    request = WebhookRequest(allow_private=allow_private, clock=lambda: at)
    status = request.send(webhook, body, f"audit-{to_micros(at)}")
    if not 200 <= status < 300:
        raise UnavailableError(f"{target} answered {status}")


def _append(path: Path, line: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UnavailableError(f"the audit head cannot be written to {path}: {error}") from error


def read_heads(text: str) -> list[AuditHead]:
    """The heads in a text: `SEQUENCE:HASH`, or the path of a file with the lines that `write_anchor` wrote."""
    sequence, _, digest = text.partition(":")
    if sequence.isascii() and sequence.isdigit() and len(digest) == 64:
        return [AuditHead(sequence=int(sequence), hash=digest)]
    try:
        lines = Path(text).expanduser().read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.strip()]
        return [AuditHead(sequence=int(each["sequence"]), hash=str(each["hash"])) for each in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{text[:200]!r} is neither SEQUENCE:HASH nor a file with audit heads: {error}"
        ) from error


class AnchorSchedule:
    """A thread that notes the audit head at each target once in every interval.

    Of several processes with the same targets one notes the head in each interval.
    """

    def __init__(
        self,
        database: Database,
        targets: Iterable[str],
        *,
        seconds: float,
        allow_private: bool = False,
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        if not seconds > 0:
            raise InvalidInputError(f"the interval of {seconds} seconds must be positive")
        self._database = database
        self._targets = tuple(targets)
        self._seconds = seconds
        self._allow_private = allow_private
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="audit-anchors", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Finish what was begun, and stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.note_due()
            except Exception:  # noqa: BLE001  the thread must survive anything
                _log.exception("the audit head cannot be noted now")
            self._stop.wait(min(self._seconds, _LONGEST_POLL))

    def note_due(self) -> int:
        """Note the head at each target where this was not done in this interval; returns at how many."""
        return sum(self._note(target) for target in self._targets)

    def _note(self, target: str) -> bool:
        now = self._clock()
        slot = int(now.timestamp() / self._seconds)
        with self._database.write() as connection:
            head = read_head(connection)
            claim = {"target": target, "slot": slot, "sequence": head.sequence, "hash": head.hash}
            if _ADD.first(connection, claim | {"at_us": to_micros(now)}) is None:
                return False
        try:
            write_anchor(head, target, now, allow_private=self._allow_private)
        except TensorForgeError as error:
            _log.warning("the audit head was not noted at %s: %s", target, error)
            mine = (ANCHORS.c.target == target, ANCHORS.c.slot == slot)
            with self._database.write() as connection:
                connection.execute(ANCHORS.delete().where(*mine))
            return False
        return True
