"""A run's checkpoints: train, audit, collect, rebuild, restore, resume and register, on a real run's folder."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.integration.train_cases import data, make_run, train
from torch.nn import functional as F  # noqa: N812

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointSchedule,
    CheckpointState,
    CheckpointType,
    GcPolicy,
    IncrementPolicy,
    rebuild,
)
from tensorforge.catalog.checkpoint_location import CheckpointLocation
from tensorforge.checkpoint import store_index
from tensorforge.cli._tables import print_table, table_of
from tensorforge.cli.main import main
from tensorforge.errors import CheckpointError, ConfigurationError
from tensorforge.registry import ModelRegistry
from tensorforge.storage.local_store import LocalStore
from tensorforge.storage.opening import open_store
from tensorforge.storage.system_calls import SystemCalls
from tensorforge.train import CheckpointPlan, Evaluation
from tensorforge.train.run_checkpoints import Checkpointer
from tensorforge.train.run_log import RunLog

pytestmark = pytest.mark.may_leak("files", "torch makes the folder of its compiler's cache once")

OLD_RUN = Path(__file__).parent / "old_run"
TOTAL = 14
KIND = "convnet"


@pytest.fixture(scope="module")
def undisturbed():
    return train(make_run(KIND), TOTAL)[0]


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("TENSORFORGE_RUN_DIR", str(folder))
    monkeypatch.setenv("TENSORFORGE_REGISTRY", str(tmp_path / "registry.db"))
    return folder


def plan_for(run_dir, **changes):
    values = {
        "location": run_dir / "checkpoints",
        "schedule": CheckpointSchedule(every_steps=3),
        "run_id": "a run",
    }
    return CheckpointPlan(**{**values, **changes})


def command(capsys, *words, code=0):
    """What a command prints; it must end with this exit code."""
    try:
        main([str(word) for word in words])
        ended = 0
    except SystemExit as end:
        ended = end.code or 0
    captured = capsys.readouterr()
    assert ended == code, captured.out + captured.err
    return captured.out


def store_of(run_dir):
    return contextlib.closing(LocalStore(run_dir / "checkpoints"))


@contextlib.contextmanager
def opened(run_dir):
    location = CheckpointLocation.read(run_dir)
    with (
        contextlib.closing(open_store(location.store)) as store,
        location.open_catalog(store) as manager,
    ):
        yield manager


def prefixes(run_dir):
    with store_of(run_dir) as store:
        return sorted(prefix for prefix, _ in store_index.manifest_blobs(store))


def test_all_commands_leave_a_run_that_resumes_to_the_same_bits(
    run_dir, database_url, capsys, undisturbed
):
    plan = plan_for(run_dir, catalog=database_url)
    train(make_run(KIND, checkpoints=plan), 8)
    with opened(run_dir) as manager:
        records = manager.list_for_run("a run")
    assert [record.step for record in records] == [2, 5, 7]
    assert prefixes(run_dir) == sorted(record.storage_path for record in records)
    here = ("--run-dir", run_dir)
    assert "3 intact, 0 damaged" in command(capsys, "checkpoint", "audit", *here)
    assert "deleted 0" in command(capsys, "checkpoint", "gc", *here)
    done = json.loads(command(capsys, "checkpoint", "gc", "--keep", 2, "--json", *here))
    assert done["deleted"] == [records[0].checkpoint_id]
    assert prefixes(run_dir) == sorted(record.storage_path for record in records[1:])
    assert "0 added" in command(capsys, "checkpoint", "rebuild", *here)
    latest = json.loads(command(capsys, "checkpoint", "latest", "--json", *here))
    assert (latest["checkpoint_id"], latest["step"]) == (records[2].checkpoint_id, 7)
    plan_text = command(capsys, "checkpoint", "restore-plan", *here)
    assert f"restore {records[2].checkpoint_id}" in plan_text
    for name in ("latest", records[2].checkpoint_id, records[2].storage_path):
        assert "step 7" in command(capsys, "checkpoint", "show", name, *here)
        assert "is intact" in command(capsys, "checkpoint", "verify", name, *here)
    command(
        capsys, "checkpoint", "diff", records[1].checkpoint_id, "latest", "--json", *here, code=1
    )
    assert records[2].checkpoint_id in command(capsys, "checkpoint", "ls", *here)
    registered = command(capsys, "registry", "register", "net", *here)
    assert "Registered net 1.0.0" in registered
    assert train(make_run(KIND, checkpoints=plan), TOTAL)[0] == undisturbed
    assert "4 intact, 0 damaged" in command(capsys, "checkpoint", "audit", *here)


def test_a_lost_catalog_is_made_again_by_the_next_start(run_dir, undisturbed, capsys):
    plan = plan_for(run_dir)
    train(make_run(KIND, checkpoints=plan), 8)
    for file in (run_dir / "checkpoints").glob("catalog.db*"):
        file.unlink()
    with store_of(run_dir) as store, CheckpointManager() as manager:
        report = rebuild(manager, store)
        assert (len(report.adopted), report.foreign) == (3, ())
        assert {r.training_run_id for r in manager.list_for_run("a run")} == {"a run"}
    assert train(make_run(KIND, checkpoints=plan), TOTAL)[0] == undisturbed
    assert "0 damaged" in command(capsys, "checkpoint", "audit", "--run-dir", run_dir)


def test_bookkeeping_is_a_tree_of_the_manifest(run_dir):
    train(make_run(KIND, checkpoints=plan_for(run_dir)), 3)
    with store_of(run_dir) as store:
        manifest = store_index.read_manifest(store, prefixes(run_dir)[0])
    extra = manifest.state["extra"]
    assert set(extra) == {"transient", "scheduler", "stateful", "progress", "digest"}
    assert set(manifest.custom_metadata) == {"tensorforge.catalog"}


def test_increments_and_an_emergency_share_one_chain(run_dir, undisturbed):
    plan = plan_for(run_dir, increments=IncrementPolicy(max_chain=8))
    run = make_run(KIND, checkpoints=plan)
    train(run, 8)
    checkpointer = Checkpointer(plan, RunLog(None, "w"))
    checkpointer.restore(run.state)
    checkpointer.save_now(run.state, {}, CheckpointType.EMERGENCY)
    checkpointer.close()
    with opened(run_dir) as manager:
        records = manager.list_for_run("a run")
    kinds = [record.checkpoint_type.value for record in records]
    assert kinds == ["full", "incremental", "incremental", "emergency"]
    assert train(make_run(KIND, checkpoints=plan), TOTAL)[0] == undisturbed


def test_a_damaged_checkpoint_is_passed_over(run_dir, undisturbed, caplog):
    plan = plan_for(run_dir)
    train(make_run(KIND, checkpoints=plan), 8)
    with opened(run_dir) as manager:
        newest = manager.get_latest("a run")
    (file,) = (run_dir / "checkpoints" / newest.storage_path).iterdir()
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert train(make_run(KIND, checkpoints=plan), TOTAL)[0] == undisturbed
    assert f"checkpoint {newest.checkpoint_id} is damaged" in caplog.text


def test_a_run_whose_checkpoints_are_all_lost_does_not_begin_anew_in_silence(run_dir):
    plan = plan_for(run_dir)
    train(make_run(KIND, checkpoints=plan), 3)
    with store_of(run_dir) as store:
        store_index.delete_files(store, prefixes(run_dir)[0])
    with pytest.raises(CheckpointError, match="choose another run_id, or resume=False"):
        train(make_run(KIND, checkpoints=plan), 4)


@pytest.fixture
def old_run(run_dir):
    """A folder as the first versions of training left it: base64 in metadata, records that name manifests."""
    folder = run_dir / "checkpoints"
    shutil.copytree(OLD_RUN / "checkpoints", folder)
    connection = sqlite3.connect(folder / "catalog.db")
    connection.executescript((OLD_RUN / "catalog.sql").read_text())
    connection.close()
    plan = plan_for(run_dir, run_id="old run")
    CheckpointLocation.of(plan.location, None, "old run").write(run_dir)
    return plan


def test_an_old_run_is_audited_and_resumed(run_dir, old_run, capsys):
    here = ("--run-dir", run_dir)
    assert "3 intact, 0 damaged" in command(capsys, "checkpoint", "audit", *here)
    shown = command(capsys, "checkpoint", "show", "latest", *here)
    assert "step 10" in shown
    assert max(map(len, shown.split())) < 200, "no base64"
    assert "0 added" in command(capsys, "checkpoint", "rebuild", *here)
    run = make_run("mlp", checkpoints=old_run)
    train(run, 13)
    steps = [r.step for r in records_of(run_dir, "old run")]
    assert steps == [3, 7, 10, 12]
    command(capsys, "checkpoint", "gc", "--keep", 1, *here)
    assert [r.step for r in records_of(run_dir, "old run")] == [12]
    assert len(prefixes(run_dir)) == 1


def records_of(run_dir, run):
    with opened(run_dir) as manager:
        return manager.list_for_run(run)


def test_a_lost_catalog_of_an_old_run_is_rebuilt(run_dir, old_run, capsys):
    (run_dir / "checkpoints" / "catalog.db").unlink()
    assert "3 added" in command(capsys, "checkpoint", "rebuild", "--run-dir", run_dir)
    assert [r.step for r in records_of(run_dir, "old run")] == [3, 7, 10]
    run = make_run("mlp", checkpoints=old_run)
    assert len(train(run, 12)[1]) == 1


def test_records_that_an_old_audit_called_corrupted_are_taken_back(run_dir, old_run):
    with opened(run_dir) as manager:
        for record in manager.list_for_run("old run"):
            manager.mark_corrupted(record.checkpoint_id, "there is no such checkpoint")
    train(make_run("mlp", checkpoints=old_run), 12)
    states = {r.step: r.state for r in records_of(run_dir, "old run")}
    assert states == dict.fromkeys((3, 7, 10, 11), CheckpointState.COMPLETE)


def validated_run(run_dir, plan, every=3):
    """A run whose evaluation is better the earlier the step."""
    run = None

    def score(batch):
        return {"score": -float(run.state.committed_step)}

    evaluation = Evaluation(score, data(KIND, 12), every=every)
    run = make_run(KIND, checkpoints=plan, evaluation=evaluation)
    return run


def test_the_best_by_a_metric_of_the_evaluation_is_kept(run_dir):
    policy = GcPolicy(
        max_checkpoints_per_run=1,
        keep_best_n=1,
        metric_key="evaluation/score",
        metric_ascending=False,
    )
    train(validated_run(run_dir, plan_for(run_dir, retention=policy)), 10)
    found = {r.step: dict(r.metrics) for r in records_of(run_dir, "a run")}
    assert set(found) == {2, 9}
    assert found[2]["evaluation/score"] == -2.0
    assert "loss" in found[2]


def test_retention_by_an_unknown_metric_is_refused(run_dir):
    policy = GcPolicy(keep_best_n=1, metric_key="accuracy")
    with pytest.raises(ConfigurationError, match="must be a metric of this run: loss"):
        make_run(KIND, checkpoints=plan_for(run_dir, retention=policy))


def test_collecting_by_a_metric_that_no_checkpoint_has_keeps_all(run_dir, capsys):
    train(make_run(KIND, checkpoints=plan_for(run_dir)), 8)
    words = ("gc", "--keep", 1, "--keep-best", 1, "--metric", "typo", "--run-dir", run_dir)
    assert "deleted 0" in command(capsys, "checkpoint", *words)
    assert len(prefixes(run_dir)) == 3


def test_the_best_checkpoint_is_registered_with_its_lineage(run_dir, capsys, tmp_path):
    train(validated_run(run_dir, plan_for(run_dir)), 8)
    words = ("--run-dir", run_dir, "--best", "evaluation/score", "--higher-is-better")
    command(capsys, "registry", "register", "net", *words)
    with ModelRegistry(tmp_path / "registry.db") as registry:
        version = registry.resolve("net", "latest")
        tensors = registry.tensors("net", version.version)
    best = records_of(run_dir, "a run")[0]
    assert best.step == 2
    assert (version.lineage.run_id, version.lineage.step) == ("a run", 2)
    assert version.lineage.checkpoint_id == best.checkpoint_id
    assert version.checksum.startswith("sha256:")
    assert tensors["head.weight"].shape == (4, 96)
    error = command(
        capsys, "registry", "register", "net", "--run-dir", run_dir, "--best", "typo", code=1
    )
    assert "Registered" not in error


class FullDisk(SystemCalls):
    """A disk that has no space for another file once it is full."""

    is_full = False

    def create(self, name, flags, folder):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(name, flags, folder)


def test_a_run_whose_last_state_is_not_saved_does_not_complete(run_dir, monkeypatch, caplog):
    disk = FullDisk()
    monkeypatch.setattr(
        "tensorforge.train.run_checkpoints.open_store", lambda path: LocalStore(path, system=disk)
    )
    run = make_run(KIND, checkpoints=plan_for(run_dir))
    with pytest.raises(CheckpointError, match="the state after step 7 is not saved"), run:
        for step in run.steps(total=8):
            for x, y in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
            disk.is_full = step.number >= 4
            step.commit()
    assert run.outcome is None
    assert "after step 5" in caplog.text
    assert [r.step for r in records_of(run_dir, "a run")] == [2]


JOB = Path(__file__).parent / "checkpointed_train.py"


def launch(folder, name, *arguments, code=0):
    """Run the job on two workers in `folder`; return what was printed."""
    words = [sys.executable, "-m", "tensorforge", "run", "-n", "2", "--run-dir", f"runs/{name}"]
    done = subprocess.run(
        [*words, str(JOB), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def train_alone(folder, checkpoints):
    """The digest after 14 steps in one process."""
    done = subprocess.run(
        [sys.executable, str(JOB), "14", str(folder / checkpoints), "-1"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


def test_the_commands_find_a_launched_run_by_themselves(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    undisturbed = train_alone(tmp_path, "other")
    launch(tmp_path, "first", 10, "saved", -1)
    assert "3 intact, 0 damaged" in command(capsys, "checkpoint", "audit")
    name = command(capsys, "checkpoint", "latest").strip()
    assert "step 9" in command(capsys, "checkpoint", "show", name)
    command(capsys, "checkpoint", "gc", "--keep", 1)
    command(capsys, "registry", "register", "net", "--run-dir", "runs/first")
    assert train_alone(tmp_path, "saved") == undisturbed
    assert "2 intact, 0 damaged" in command(capsys, "checkpoint", "audit")


def test_a_launched_run_that_cannot_save_its_end_fails(tmp_path):
    printed = launch(tmp_path, "first", 10, "saved", 6, code=1)
    assert "the state after step 9 is not saved" in printed
    assert "training is complete" not in printed


def test_an_identifier_stays_one_word_in_a_narrow_terminal():
    table, text = table_of("checkpoint", "why"), io.StringIO()
    table.add_row("0123456789" * 4, "because of a long, long reason")
    print_table(table, "checkpoint", to=Console(file=text, width=30))
    assert "0123456789" * 4 in text.getvalue()
    assert "reason" in text.getvalue()


def test_without_a_database_the_manifests_are_the_catalog(run_dir, undisturbed):
    policy = GcPolicy(max_checkpoints_per_run=2)
    plan = plan_for(run_dir, location="memory://a run's store", retention=policy)
    train(make_run(KIND, checkpoints=plan), 8)
    assert CheckpointLocation.read(run_dir).catalog is None
    assert [r.step for r in records_of(run_dir, "a run")] == [5, 7]
    assert train(make_run(KIND, checkpoints=plan), TOTAL)[0] == undisturbed
    assert [r.step for r in records_of(run_dir, "a run")] == [10, 13]
