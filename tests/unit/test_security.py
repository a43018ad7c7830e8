"""Tokens: issued, checked, revoked, and accepted from another store."""

import threading
from datetime import UTC, datetime, timedelta

import pytest

from tensorforge.errors import (
    AuthenticationError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
)
from tensorforge.security import TokenStore

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_token_opens_its_scopes_and_no_other():
    store = TokenStore()
    token = store.issue("ci", ["join", "observe"])
    assert store.authorize(token, "join").name == "ci"
    with pytest.raises(PermissionDeniedError, match="has join, observe; this needs control"):
        store.authorize(token, "control")


def test_the_secret_is_not_kept():
    store = TokenStore()
    token = store.issue("ci", ["join"])
    secret = token.rsplit("_", 1)[1]
    assert secret not in repr(store.records())


@pytest.mark.parametrize(
    "forge", ["", "tf", "tf__", "nonsense", "xx_{id}_{secret}", "tf_{id}_wrong", "tf_{id}_"]
)
def test_a_forged_token_is_unknown(forge):
    store = TokenStore()
    _, token_id, secret = store.issue("ci", ["join"]).split("_")
    with pytest.raises(AuthenticationError, match="not known here"):
        store.authenticate(forge.format(id=token_id, secret=secret))


def test_a_token_expires_at_its_moment():
    store = TokenStore()
    token = store.issue("ci", ["join"], lifetime=timedelta(hours=1), now=NOW)
    store.authenticate(token, now=NOW + timedelta(minutes=59))
    with pytest.raises(AuthenticationError, match="has expired"):
        store.authenticate(token, now=NOW + timedelta(hours=1))


def test_a_revoked_token_stays_revoked():
    store = TokenStore()
    token = store.issue("ci", ["join"])
    token_id = token.split("_")[1]
    first = store.revoke(token_id, now=NOW)
    assert store.revoke(token_id) == first
    with pytest.raises(AuthenticationError, match="was revoked"):
        store.authenticate(token)


def test_an_unknown_token_cannot_be_revoked():
    with pytest.raises(NotFoundError):
        TokenStore().revoke("beef")


@pytest.mark.parametrize(("name", "scopes"), [("", ["join"]), ("ci", []), ("ci", [""])])
def test_a_token_needs_a_name_and_a_scope(name, scopes):
    with pytest.raises(InvalidInputError):
        TokenStore().issue(name, scopes)


def test_a_lifetime_must_be_positive():
    with pytest.raises(InvalidInputError):
        TokenStore().issue("ci", ["join"], lifetime=timedelta(0))


def test_records_carry_a_store_over():
    store = TokenStore()
    token = store.issue("ci", ["join"])
    assert TokenStore(store.records()).authenticate(token).name == "ci"


def test_threads_lose_no_token():
    store = TokenStore()
    issued: list[str] = []

    def hammer(name):
        for turn in range(300):
            token = store.issue(f"{name}-{turn}", ["join"])
            store.authorize(token, "join")
            if turn % 3 == 0:
                store.revoke(token.split("_")[1])
            issued.append(token)

    threads = [threading.Thread(target=hammer, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.records()) == len(issued) == 600
    assert sum(record.revoked_at is not None for record in store.records()) == 200
