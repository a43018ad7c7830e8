"""A worker's log of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.data.plan.ledger import Ledger
from tensorforge.train.run_log import RunLog, read_run_logs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_a_full_disk_costs_lines_not_the_training(tmp_path, caplog):
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "w.jsonl").symlink_to("/dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = RunLog(folder, "w")
    log.write("formed", generation=1)
    log.commit(0, 1, CommittedStep(step=0))
    log.ledger(Ledger(12, 3))
    log.close()
    assert caplog.text.count("the run log cannot be written: [Errno 28]") == 1
    (folder / "w.jsonl").unlink()
    assert read_run_logs(tmp_path) == []
