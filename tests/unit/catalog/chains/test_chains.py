from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tensorforge.catalog import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    chain_length,
    chain_size,
    find_chain_root,
    restoration_chain,
    validate_checkpoint,
)
from tensorforge.errors import CheckpointError, InvalidInputError, NotFoundError

AT = datetime(2026, 1, 1, tzinfo=UTC)


def record(name, parent=None, *, step=0, state=CheckpointState.COMPLETE, **more):
    kind = CheckpointType.INCREMENTAL if parent else CheckpointType.FULL
    fields = {
        "checkpoint_id": name,
        "training_run_id": "run",
        "epoch": 0,
        "step": step,
        "checkpoint_type": kind,
        "state": state,
        "created_at": AT,
        "size_bytes": 10,
        "parent_id": parent,
        "storage_path": f"run/{name}",
    }
    return CheckpointRecord(**fields | more)


CHAIN = [record("c", "b", step=3), record("a", step=1), record("b", "a", step=2)]


def test_a_checkpoint_that_stands_alone_is_a_chain_of_one():
    assert chain_length(CHAIN, "a") == 1
    assert restoration_chain(CHAIN, "a") == ("a",)


def test_a_chain_is_restored_root_first():
    assert restoration_chain(CHAIN, "c") == ("a", "b", "c")
    assert (chain_length(CHAIN, "c"), find_chain_root(CHAIN, "c")) == (3, "a")


def test_the_size_of_a_chain_is_the_sum_of_its_links():
    assert chain_size([replace(each, size_bytes=7) for each in CHAIN], "b") == 14


@pytest.mark.parametrize(
    "ask", [chain_length, find_chain_root, restoration_chain, chain_size], ids=lambda f: f.__name__
)
class TestEveryQuestionAboutAChain:
    def test_names_a_checkpoint_that_is_not_known(self, ask):
        with pytest.raises(NotFoundError, match="'z'"):
            ask(CHAIN, "z")

    def test_names_a_missing_parent(self, ask):
        with pytest.raises(CheckpointError, match="'b' needs 'a', which is missing"):
            ask([CHAIN[0], CHAIN[2]], "c")

    def test_ends_at_a_cycle(self, ask):
        with pytest.raises(CheckpointError, match="cycle"):
            ask([record("a", "c"), record("b", "a"), record("c", "b")], "b")

    def test_ends_at_a_checkpoint_that_is_its_own_parent(self, ask):
        with pytest.raises(CheckpointError, match="cycle"):
            ask([record("a", "a")], "a")

    def test_refuses_a_parent_from_another_run(self, ask):
        with pytest.raises(CheckpointError, match="another run"):
            ask([record("a", training_run_id="other"), record("b", "a")], "b")


@pytest.mark.parametrize(
    "state", [CheckpointState.CREATING, CheckpointState.CORRUPTED, CheckpointState.DELETED]
)
def test_nothing_is_restored_through_a_link_that_is_not_complete(state):
    links = [record("a"), record("b", "a", state=state), record("c", "b")]
    with pytest.raises(CheckpointError, match=f"'b' is {state.value}"):
        restoration_chain(links, "c")
    assert chain_length(links, "c") == 3


def test_a_consistent_chain_is_valid():
    for each in CHAIN:
        validate_checkpoint(each, CHAIN)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (record("x", storage_path=""), "no storage path"),
        (record("x", checkpoint_type=CheckpointType.INCREMENTAL), "names no parent"),
        (record("x", "a", step=9, checkpoint_type=CheckpointType.FULL), "it is full"),
        (record("x", "c", step=2), "which is later"),
        (record("x", "nobody", step=9), "missing"),
        (record("x", "x", step=9), "cycle"),
    ],
)
def test_an_inconsistent_checkpoint_is_told_what_is_wrong(wrong, complaint):
    with pytest.raises(CheckpointError, match=complaint):
        validate_checkpoint(wrong, CHAIN)


def test_an_epoch_that_goes_back_is_inconsistent():
    later = [record("a", epoch=2, step=1), record("b", "a", epoch=1, step=2)]
    with pytest.raises(CheckpointError, match="epoch 2"):
        validate_checkpoint(later[1], later)


def test_a_complete_checkpoint_must_not_rest_on_a_corrupted_one():
    parent = record("a", state=CheckpointState.CORRUPTED)
    with pytest.raises(CheckpointError, match="'a' is corrupted"):
        validate_checkpoint(record("b", "a"), [parent])


def test_a_corrupted_checkpoint_needs_no_intact_parent():
    parent = record("a", state=CheckpointState.CORRUPTED)
    validate_checkpoint(record("b", "a", state=CheckpointState.CORRUPTED), [parent])


def test_an_emergency_checkpoint_may_stand_alone_or_not():
    emergency = CheckpointType.EMERGENCY
    validate_checkpoint(record("x", checkpoint_type=emergency), CHAIN)
    validate_checkpoint(record("x", "c", step=5, checkpoint_type=emergency), CHAIN)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("checkpoint_id", ""),
        ("training_run_id", ""),
        ("epoch", -1),
        ("step", True),
        ("size_bytes", -1),
        ("created_at", datetime(2026, 1, 1)),  # noqa: DTZ001  the point: no time zone
    ],
)
def test_a_record_refuses_what_can_never_be(field, value):
    with pytest.raises(InvalidInputError, match=field):
        record("x", **{field: value}) if field != "checkpoint_id" else record(value)
