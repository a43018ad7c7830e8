"""The logs of the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorforge.launch.processes.log_files import LogFiles


def test_each_process_has_its_file_and_goes_on_with_it(tmp_path):
    warnings: list[str] = []
    logs = LogFiles(tmp_path, warnings.append)
    for text in ("one\n", "two\n"):
        logs.open("a")
        logs.write("a", text)
        logs.close("a")
    logs.write("stranger", "nothing")
    logs.close("stranger")
    assert (tmp_path / "a.log").read_text() == "one\ntwo\n"
    assert warnings == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_what_does_not_fit_is_lost_and_told_once(tmp_path):
    warnings: list[str] = []
    logs = LogFiles(tmp_path, warnings.append)
    (tmp_path / "a.log").symlink_to("/dev/full")
    (tmp_path / "b.log").mkdir()
    for name in "ab":
        logs.open(name)
        logs.write(name, "x\n" * 9)
    logs.close_all()
    (warning,) = warnings
    assert "No space left on device; training continues" in warning
