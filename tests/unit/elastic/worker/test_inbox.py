"""What a worker makes of the coordinator's messages."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime

import pytest

from tensorforge.elastic import WorkerId, WorkerMetadata, WorkerStatus
from tensorforge.elastic.protocol import messages
from tensorforge.elastic.worker.inbox import Callbacks, Inbox
from tensorforge.elastic.worker.resend_buffer import ResendBuffer
from tensorforge.elastic.worker.worker_state import WorkerState

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FENCED = messages.Refused(code=messages.REFUSED_FENCED, reason="w was taken out: its code raised")


@pytest.fixture
def worker():
    metadata = WorkerMetadata(
        worker_id=WorkerId("w", "127.0.0.1", 0),
        status=WorkerStatus.JOINING,
        join_time=NOW,
        last_heartbeat=NOW,
    )
    state, resend_buffer = WorkerState(metadata, "first"), ResendBuffer(lambda _message: None)
    inbox = Inbox(
        state,
        resend_buffer,
        threading.Condition(),
        Callbacks(),
        announced=lambda _event: None,
        gathered=lambda _generation: None,
        retire=lambda: None,
        rejoin=lambda: None,
        configure=lambda _config: None,
    )
    return inbox, resend_buffer, state


def test_a_worker_that_is_fenced_is_told_why_and_starts_over(worker, caplog):
    inbox, _resend_buffer, state = worker
    inbox.receive(FENCED)
    assert "w was refused (fenced): w was taken out" in caplog.text
    assert state.incarnation != "first"


def test_a_worker_that_has_told_its_exception_is_not_told_of_it_again(worker, caplog):
    inbox, resend_buffer, state = worker
    caplog.set_level(logging.WARNING)
    resend_buffer.send(messages.Abort(incarnation="first", generation=1, reason="ValueError: boom"))
    inbox.receive(FENCED)
    assert caplog.text == ""
    assert state.is_leaving
