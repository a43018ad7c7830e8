import json
from pathlib import Path

import psutil
import pytest

from tensorforge.elastic import ElasticTrainingConfig
from tensorforge.errors import ConfigurationError, ConflictError, EncodingError, NotFoundError
from tensorforge.launch.launch_settings import LaunchSettings
from tensorforge.launch.run_directory import (
    RunLock,
    RunRecord,
    read_record,
    write_record,
)
from tensorforge.launch.run_log_reader import Progress, RunLogTail
from tensorforge.launch.supervisor.events import CheckpointProgress, StepCommitted, WorkerConcluded
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy
from tensorforge.processes import ProcessIdentity


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = RunRecord(
        script="train.py",
        coordinator_address="127.0.0.1:1",
        coordinator=ProcessIdentity("host", "boot", "pid:[1]", 5, 1.0),
        launcher=ProcessIdentity.current(),
        workers={"worker-0": ProcessIdentity("host", "", "", 6, 2.0)},
    )
    write_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(NotFoundError, match="no run was launched in"):
        read_record(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(EncodingError, match=r"run\.json is not JSON"):
        read_record(tmp_path)


def test_a_record_of_the_first_version_is_read(tmp_path):
    mine = psutil.Process()
    old = {
        "script": "train.py",
        "coordinator_address": None,
        "coordinator": None,
        "launcher": {"pid": mine.pid, "started": mine.create_time()},
        "workers": {"worker-0": {"pid": mine.pid, "started": mine.create_time() - 100}},
    }
    payload = {"type": "RunRecord", "version": 1, "data": old}
    (tmp_path / "run.json").write_text(json.dumps(payload))
    record = read_record(tmp_path)
    assert record.launcher.is_running()
    assert not record.workers["worker-0"].is_running()
    del old["launcher"]
    (tmp_path / "run.json").write_text(json.dumps(payload))
    with pytest.raises(EncodingError, match="version 1, but not complete"):
        read_record(tmp_path)


def test_a_folder_has_one_launcher_at_a_time(tmp_path):
    with (
        RunLock(tmp_path / "run"),
        pytest.raises(ConflictError, match="another launcher runs in"),
        RunLock(tmp_path / "run"),
    ):
        pass
    with RunLock(tmp_path / "run"):
        pass


def line(**facts) -> str:
    return json.dumps(facts) + "\n"


def test_logs_are_followed_across_half_lines_and_junk(tmp_path):
    tail = RunLogTail(tmp_path / "workers")
    assert tail.read() == []
    (tmp_path / "workers").mkdir()
    path = tmp_path / "workers" / "a.jsonl"
    path.write_text(line(kind="commit", step=0) + '{"kind": "com')
    assert [found["step"] for found in tail.read()] == [0]
    with path.open("a") as file:
        file.write('mit", "step": 1}\nnot json\n[1]\n{"kind": 3}\n' + line(kind="commit", step=2))
    assert [found["step"] for found in tail.read()] == [1, 2]
    tail.close()


def test_a_step_that_several_workers_tell_counts_once():
    progress = Progress()
    commit = {"kind": "commit", "samples": 8, "epoch": 1, "learning_rate": 0.1}
    lines = [
        {**commit, "step": 0, "metrics": {"loss": 2.0}},
        {**commit, "step": 0, "metrics": {"loss": 2.0}},
        {**commit, "step": 1},
        {"kind": "commit", "step": "x"},
        {"kind": "checkpoint", "step": 1, "complete": True},
        {"kind": "checkpoint"},
        {"kind": "final", "worker": "a", "outcome": "complete"},
        {"kind": "other"},
    ]
    assert list(progress.events(lines)) == [
        StepCommitted(0, epoch=1, samples=8, loss=2.0, learning_rate=0.1),
        StepCommitted(1, epoch=1, samples=16, loss=None, learning_rate=0.1),
        CheckpointProgress(1, complete=True),
        WorkerConcluded("a", "complete"),
    ]


def test_settings_are_checked_before_anything_starts(tmp_path):
    with pytest.raises(NotFoundError, match=r"the script nowhere\.py does not exist"):
        LaunchSettings(script="nowhere.py", run_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="is no address"):
        LaunchSettings(script=__file__, run_dir=tmp_path, host="0.0.0.0")
    with pytest.raises(ConfigurationError, match="min_workers"):
        LaunchSettings(
            script=__file__,
            run_dir=tmp_path,
            config=ElasticTrainingConfig(min_workers=2),
            policy=SupervisionPolicy(workers=3),
        )


def test_a_worker_finds_its_run_in_its_environment(tmp_path):
    settings = LaunchSettings(
        script=__file__, arguments=("-x",), run_dir=tmp_path, environment={"A": "b"}
    )
    found = settings.worker_environment("worker-1", "127.0.0.1:5", "tf_x")
    assert found["A"] == "b"
    assert found["TENSORFORGE_WORKER_ID"] == "worker-1"
    assert found["TENSORFORGE_COORDINATOR"] == "127.0.0.1:5"
    assert found["TENSORFORGE_TOKEN"] == "tf_x"
    assert json.loads(found["TENSORFORGE_CONFIG"])["type"] == "ElasticTrainingConfig"
    assert settings.worker_command("python")[-2:] == [str(Path(__file__)), "-x"]
    by_module = LaunchSettings(script="job", as_module=True, run_dir=tmp_path)
    assert by_module.worker_command("python")[-2:] == ["-m", "job"]
