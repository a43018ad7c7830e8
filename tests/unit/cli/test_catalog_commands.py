"""`tensorforge checkpoint` on a real store and a real catalog."""

import json

import pytest
import torch

from tensorforge.catalog import CheckpointManager, CheckpointState, IncrementPolicy, RunCheckpoints
from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
from tensorforge.cli._catalog_commands import parse_duration
from tensorforge.cli.main import main
from tensorforge.errors import InvalidInputError
from tensorforge.storage.local_store import LocalStore


class State(dict):
    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)


@pytest.fixture
def places(tmp_path, monkeypatch):
    store, catalog = tmp_path / "blobs", tmp_path / "catalog.db"
    monkeypatch.setenv("TENSORFORGE_STORE", str(store))
    monkeypatch.setenv("TENSORFORGE_CATALOG", str(catalog))
    monkeypatch.setenv("COLUMNS", "200")
    return store, catalog


@pytest.fixture
def saved(places):
    store, catalog = places
    state, records = State(w=torch.arange(1000.0), b=torch.zeros(10)), []
    with (
        CheckpointManager(database=catalog) as manager,
        DistributedCheckpoint(SingleProcess(), LocalStore(store)) as checkpoint,
        RunCheckpoints(
            manager, checkpoint, "bert", increments=IncrementPolicy(max_chain=2)
        ) as runs,
    ):
        for step in range(4):
            state["b"] += 1
            records.append(runs.save(state, epoch=0, step=step, metrics={"loss": 4.0 - step}))
            runs.wait()
    return [record.checkpoint_id for record in records]


def run(capsys, *words):
    """The exit code and what was printed."""
    try:
        main(["checkpoint", *words])
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, capsys.readouterr().out


def test_runs_are_listed(saved, capsys):
    code, out = run(capsys, "runs", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert (found["training_run_id"], found["checkpoints"], found["last_step"]) == ("bert", 4, 3)
    assert "bert" in run(capsys, "runs")[1]


def test_a_dry_run_says_what_would_go_and_why(saved, places, capsys):
    code, out = run(capsys, "gc", "--keep", "1", "--dry-run")
    assert code == 0
    assert "would delete 3" in out
    assert "it is not among the newest 1" in out
    assert "the newest restorable checkpoint of the run" in out
    with CheckpointManager(database=places[1]) as manager:
        assert manager.total_count() == 4


def test_collecting_deletes_records_and_files(saved, places, capsys):
    code, out = run(capsys, "gc", "--keep", "1", "--keep-best", "1", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result["deleted"]) == set(saved[:3])
    assert [d["checkpoint_id"] for d in result["decisions"] if d["keep"]] == [saved[3]]
    left = {blob.key.split("/")[1].split(".")[0] for blob in LocalStore(places[0]).list()}
    assert left == {saved[3]}


def test_a_restore_plan_explains_the_choice(saved, capsys):
    code, out = run(capsys, "restore-plan", "bert")
    assert code == 0
    assert f"restore {saved[3]}" in out
    assert "1 steps older" in out
    assert "no restore was measured yet" in out
    code, out = run(capsys, "restore-plan", "bert", "--max-step", "1", "--json")
    plan = json.loads(out)
    assert plan["chosen"] == saved[1]
    assert plan["chain"][-1] == saved[1]
    assert "its step 3 is beyond 1" in {each["refusal"] for each in plan["candidates"]}


def test_a_restore_plan_of_an_unknown_run_is_an_error(saved, capsys):
    code, out = run(capsys, "restore-plan", "nobody", "--json")
    assert code == 1
    assert "nobody" in json.loads(out)["message"]


def test_a_plan_in_which_nothing_qualifies_fails(saved, places, capsys):
    with CheckpointManager(database=places[1]) as manager:
        for name in saved:
            if manager.get(name).state is CheckpointState.COMPLETE:
                manager.mark_corrupted(name, "test")
    code, out = run(capsys, "restore-plan", "bert")
    assert code == 1
    assert "no checkpoint qualifies" in out


def test_a_lost_catalog_is_rebuilt(saved, places, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TENSORFORGE_CATALOG", str(tmp_path / "new.db"))
    code, out = run(capsys, "rebuild")
    assert (code, out) == (0, "4 added, 0 added as corrupted, 0 saved without a catalog\n")
    assert json.loads(run(capsys, "restore-plan", "bert", "--json")[1])["chosen"] == saved[3]


def test_an_audit_finds_damage_and_fails(saved, places, capsys):
    assert run(capsys, "audit")[0] == 0
    path = next((places[0] / "bert" / saved[3]).iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, out = run(capsys, "audit", "--run", "bert", "--json")
    found = json.loads(out)
    assert code == 1
    assert set(found["damaged"]) == {saved[3]}
    assert set(found["intact"]) == set(saved[:3])
    assert run(capsys, "audit")[0] == 0, "what is marked is not read again"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("5", 5)]
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "soon", "1w"])
def test_other_texts_are_no_durations(text):
    with pytest.raises(InvalidInputError, match="not a duration"):
        parse_duration(text)
