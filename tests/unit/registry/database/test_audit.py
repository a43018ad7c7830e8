import itertools

import pytest
import sqlalchemy as sa
from tests.unit.registry.sample_values import BOSS, S, bring, metadata, v

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.registry import AuditHead
from tensorforge.registry.anchoring import AnchorSchedule, read_heads, write_anchor
from tensorforge.registry.database.audit import GENESIS
from tensorforge.registry.database.tables import ALIASES, AUDIT, AUDIT_HEAD, VERSIONS


@pytest.fixture
def busy(stored):
    """A history of eight rows, on SQLite and on PostgreSQL."""
    stored.register(metadata())
    bring(stored, "1.0.0", S.PRODUCTION)
    return stored


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
    tamper(busy, VERSIONS.update().values(state="canary"))
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
    monkeypatch.setattr("tensorforge.registry.database.audit._BATCH", 3)
    for number in range(7):
        registry.create_model(f"m{number}")
    assert registry.verify_audit().sequence == 7
    with registry.database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(AUDIT)) == 7


def test_changed_tags_are_written_down_with_their_old_and_new_values(stored):
    stored.register(metadata(tags={"a": "1", "b": "2", "c": "3"}))
    stored.set_tags(
        "ranker", v("1.0.0"), put={"a": "9", "c": "3", "d": "4"}, drop=["b"], actor=BOSS
    )
    stored.set_tags("ranker", put={"team": "search"}, actor=BOSS)
    of_version, of_model = stored.history("ranker")[-2:]
    assert (of_version.actor, of_version.action, of_version.version) == (
        "boss",
        "set_tags",
        "1.0.0",
    )
    assert of_version.evidence == {"tags": {"a": ["1", "9"], "b": ["2", None], "d": [None, "4"]}}
    assert (of_model.action, of_model.version) == ("set_tags", "")
    assert of_model.evidence == {"tags": {"team": [None, "search"]}}
    stored.verify_audit()


def test_changed_descriptions_are_written_down_with_the_old_and_the_new_text(stored):
    stored.register(metadata(description="first"))
    stored.describe_version("ranker", v("1.0.0"), "second", actor=BOSS)
    stored.describe_model("ranker", "all of them", actor=BOSS)
    of_version, of_model = stored.history("ranker")[-2:]
    assert (of_version.actor, of_version.action, of_version.version) == (
        "boss",
        "describe",
        "1.0.0",
    )
    assert of_version.evidence == {"old": "first", "new": "second"}
    assert of_model.evidence == {"old": "", "new": "all of them"}
    stored.verify_audit()


def test_what_changes_nothing_leaves_no_row(stored):
    stored.register(metadata(tags={"a": "1"}, description="text"))
    before = stored.verify_audit()
    stored.set_tags("ranker", v("1.0.0"), put={"a": "1"}, drop=["absent"])
    stored.describe_version("ranker", v("1.0.0"), "text")
    stored.describe_model("ranker", "")
    assert stored.verify_audit() == before


def test_a_refused_change_of_tags_leaves_neither_tags_nor_a_row(stored):
    stored.register(metadata(tags={"a": "1"}))
    before = stored.verify_audit()
    with pytest.raises(InvalidInputError, match="at most 200 tags"):
        stored.set_tags("ranker", v("1.0.0"), put={f"k{i}": "" for i in range(200)})
    assert stored.verify_audit() == before
    assert stored.require("ranker", v("1.0.0")).tags == {"a": "1"}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("source", "s3://elsewhere"),
        ("checksum", "sha256:other"),
        ("state", "archived"),
        ("signature", "x"),
    ],
)
def test_a_version_that_was_changed_in_the_tables_shows(busy, column, value):
    tamper(busy, VERSIONS.update().values({column: value}))
    with pytest.raises(IntegrityError, match=r"ranker 1\.0\.0"):
        busy.verify_audit()


def test_an_alias_that_was_moved_in_the_tables_shows(busy):
    busy.set_alias("ranker", "champion", v("1.0.0"))
    busy.verify_audit()
    tamper(busy, ALIASES.update().values(alias="other"))
    with pytest.raises(IntegrityError, match="alias"):
        busy.verify_audit()


def test_a_version_without_an_audit_row_or_without_a_table_row_shows(busy):
    busy.register(metadata("1.1.0"))
    tamper(busy, VERSIONS.delete().where(VERSIONS.c.minor == 1))
    with pytest.raises(IntegrityError, match="not in the tables"):
        busy.verify_audit()


def test_a_noted_head_shows_a_chain_that_was_rewritten(busy, tmp_path):
    anchors = tmp_path / "heads"
    head = busy.audit_head()
    write_anchor(head, str(anchors), busy.history("ranker")[-1].at)
    busy.set_alias("ranker", "champion", v("1.0.0"))
    assert busy.verify_audit(*read_heads(str(anchors))).sequence == 9
    assert read_heads(f"{head.sequence}:{head.hash}") == [head]
    forged = AuditHead(sequence=head.sequence, hash="f" * 64)
    with pytest.raises(IntegrityError, match="noted earlier"):
        busy.verify_audit(forged)


def test_a_head_is_noted_once_in_every_interval(busy, tmp_path, clock):
    target = str(tmp_path / "heads")
    schedules = [
        AnchorSchedule(busy.database, [target], seconds=60, clock=lambda: clock.utc)
        for _ in range(2)
    ]
    assert [schedule.note_due() for schedule in schedules] == [1, 0]
    clock.advance(61)
    assert [schedule.note_due() for schedule in schedules] == [1, 0]
    assert len(read_heads(target)) == 2
    busy.verify_audit(*read_heads(target))
