import json

import psutil
import pytest

from tensorforge.errors import ConflictError, EncodingError, NotFoundError
from tensorforge.launch.run_directory import (
    RunLock,
    RunRecord,
    read_record,
    write_record,
)
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
