import os
import signal
import subprocess

import pytest

from tensorforge.errors import ConflictError, EncodingError, NotFoundError
from tensorforge.launch.run_directory import (
    ProcessRecord,
    RunLock,
    RunRecord,
    read_record,
    write_record,
)


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = RunRecord(
        script="train.py",
        coordinator_address="127.0.0.1:1",
        coordinator=ProcessRecord(5, 1.0),
        launcher=ProcessRecord.of(os.getpid()),
        workers={"worker-0": ProcessRecord(6, 2.0)},
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


def test_another_process_with_the_same_number_is_left_alone():
    with subprocess.Popen(["sleep", "600"]) as child:
        record = ProcessRecord.of(child.pid)
        other = ProcessRecord(child.pid, record.started - 100.0)
        assert record.is_alive()
        assert not other.is_alive()
        assert not other.send(signal.SIGKILL)
        assert child.poll() is None
        assert record.send(signal.SIGKILL)
        child.wait()
    assert not record.is_alive()
    assert not record.send(signal.SIGKILL)
    assert not ProcessRecord.of(child.pid).is_alive()


def test_a_folder_has_one_launcher_at_a_time(tmp_path):
    with (
        RunLock(tmp_path / "run"),
        pytest.raises(ConflictError, match="another launcher runs in"),
        RunLock(tmp_path / "run"),
    ):
        pass
    with RunLock(tmp_path / "run"):
        pass
