import itertools

import pytest
import sqlalchemy as sa
from tests.unit.registry.making import S, bring, metadata

from tensorforge.errors import IntegrityError
from tensorforge.registry import AuditHead
from tensorforge.registry.audit import GENESIS
from tensorforge.registry.schema import AUDIT, AUDIT_HEAD


@pytest.fixture
def busy(registry):
    registry.register(metadata())
    bring(registry, "1.0.0", S.PRODUCTION)
    return registry


def tamper(registry, statement):
    with registry.database.write() as connection:
        connection.execute(statement)


def test_every_change_is_written_down_with_who_when_and_what(busy, clock):
    entries = busy.history("ranker")
    assert [(e.action, e.from_state, e.to_state) for e in entries] == [
        ("create_model", "", ""),
        ("register", "", "registered"),
        ("transition", "registered", "validating"),
        ("validate", "validating", "validating"),
        ("transition", "validating", "staging"),
        ("transition", "staging", "canary"),
        ("validate", "canary", "canary"),
        ("transition", "canary", "production"),
    ]
    assert {e.at for e in entries} == {clock.utc}
    assert [e.sequence for e in entries] == list(range(1, 9))
    assert entries[0].previous_hash == GENESIS
    assert all(a.hash == b.previous_hash for a, b in itertools.pairwise(entries))
    assert busy.verify_audit() == AuditHead(sequence=8, hash=entries[-1].hash)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("actor", "somebody"),
        ("reason", "because"),
        ("to_state", "archived"),
        ("evidence", "{}"),
        ("forced", True),
        ("at_us", 1),
        ("model_id", "other"),
        ("version", "9.9.9"),
        ("previous_hash", "f" * 64),
        ("hash", "f" * 64),
    ],
)
def test_a_changed_row_shows(busy, column, value):
    tamper(busy, AUDIT.update().where(AUDIT.c.sequence == 5).values({column: value}))
    with pytest.raises(IntegrityError, match=r"audit row [56]"):
        busy.verify_audit()


def test_a_missing_row_shows(busy):
    tamper(busy, AUDIT.delete().where(AUDIT.c.sequence == 4))
    with pytest.raises(IntegrityError, match="audit row 4 is missing"):
        busy.verify_audit()


def test_a_cut_tail_shows(busy):
    tamper(busy, AUDIT.delete().where(AUDIT.c.sequence > 6))
    with pytest.raises(IntegrityError, match="ends at row 6, but its head says 8"):
        busy.verify_audit()


def test_a_tail_cut_together_with_the_head_shows_against_a_head_kept_elsewhere(busy):
    known = busy.verify_audit()
    row = busy.history("ranker")[5]
    tamper(busy, AUDIT.delete().where(AUDIT.c.sequence > 6))
    tamper(busy, AUDIT_HEAD.update().values(sequence=6, hash=row.hash))
    busy.verify_audit()
    with pytest.raises(IntegrityError, match="row 8, noted earlier, is missing"):
        busy.verify_audit(known)
    with pytest.raises(IntegrityError, match="not the one that was noted"):
        busy.verify_audit(AuditHead(sequence=6, hash="0" * 64))


def test_swapped_rows_show(busy):
    tamper(busy, AUDIT.update().where(AUDIT.c.sequence == 3).values(sequence=99))
    tamper(busy, AUDIT.update().where(AUDIT.c.sequence == 4).values(sequence=3))
    tamper(busy, AUDIT.update().where(AUDIT.c.sequence == 99).values(sequence=4))
    with pytest.raises(IntegrityError, match="audit row 3"):
        busy.verify_audit()


def test_a_move_that_fails_leaves_no_row(busy):
    before = busy.verify_audit()
    with pytest.raises(Exception, match="cannot go from production"):
        bring(busy, "1.0.0", S.VALIDATING)
    assert busy.verify_audit() == before


def test_time_never_runs_backwards_along_the_chain(busy, clock):
    noted = clock.utc
    clock._origin = clock._origin.replace(year=2001)
    busy.create_model("later")
    assert busy.history("later")[0].at == noted


def test_rows_are_verified_in_batches(registry, monkeypatch):
    monkeypatch.setattr("tensorforge.registry.audit._BATCH", 3)
    for number in range(7):
        registry.create_model(f"m{number}")
    assert registry.verify_audit().sequence == 7
    with registry.database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(AUDIT)) == 7
