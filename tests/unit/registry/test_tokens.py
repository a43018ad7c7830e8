from datetime import timedelta

import pytest

from tensorforge.errors import AuthenticationError, InvalidInputError, NotFoundError
from tensorforge.registry.tokens import DatabaseTokens
from tensorforge.testing.clock import ManualClock


def test_a_token_is_known_to_every_opener_of_the_database(stored):
    token = DatabaseTokens(stored.database).issue("ci", ["registry:read", "registry:write"])
    record = DatabaseTokens(stored.database).authenticate(token)
    assert (record.name, record.scopes) == ("ci", ("registry:read", "registry:write"))
    (kept,) = DatabaseTokens(stored.database).records()
    assert kept == record
    assert token.split("_")[2] not in str(kept)


def test_wrong_expired_and_revoked_tokens_are_refused(registry, clock):
    tokens = DatabaseTokens(registry.database)
    token = tokens.issue("ci", ["registry:read"], lifetime=timedelta(hours=1), now=clock.utc)
    tokens.authenticate(token, now=clock.utc)
    for wrong in ("", "x", "tf__", token + "x", token[:-1], "tf_' OR 1=1_x", "tf_\x00_x", "tf_é_x"):
        with pytest.raises(AuthenticationError):
            tokens.authenticate(wrong, now=clock.utc)
    clock.advance(3600)
    with pytest.raises(AuthenticationError, match="has expired"):
        tokens.authenticate(token, now=clock.utc)
    tokens.revoke(token.split("_")[1])
    with pytest.raises(AuthenticationError, match="was revoked"):
        tokens.authenticate(token, now=clock.utc)
    with pytest.raises(NotFoundError):
        tokens.revoke("nobody")


def test_a_revocation_elsewhere_is_felt_once_the_cache_is_old(registry):
    time = ManualClock()
    here = DatabaseTokens(registry.database, cache_seconds=2, monotonic=time)
    elsewhere = DatabaseTokens(registry.database)
    token = elsewhere.issue("ci", ["registry:read"])
    assert here.authenticate_cached(token) is None
    here.authenticate(token)
    elsewhere.revoke(token.split("_")[1])
    time.advance(1.9)
    here.authenticate(token)
    assert here.authenticate_cached(token) is not None
    time.advance(0.2)
    with pytest.raises(AuthenticationError, match="was revoked"):
        here.authenticate(token)


def test_a_scope_that_does_not_exist_is_refused(registry):
    with pytest.raises(InvalidInputError, match="'registry:everything' is no scope"):
        DatabaseTokens(registry.database).issue("ci", ["registry:everything"])
