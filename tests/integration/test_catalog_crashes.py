import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.store_files import orphans
from tests.unit.catalog.run_states import State, occupied

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    RunCheckpoints,
    remover,
)
from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
from tensorforge.storage.local_store import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore::tensorforge.checkpoint.StaleSaveWarning")


CRASH = textwrap.dedent(
    """
    import os, sys, signal, torch
    from tensorforge.catalog import CheckpointManager, IncrementPolicy, RunCheckpoints, remover
    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore
    from tensorforge.storage.system_calls import SystemCalls

    class State(dict):
        def state_dict(self): return dict(self)

    folder, crash_at = sys.argv[1], sys.argv[2]
    store = LocalStore(folder + "/blobs")
    manager = CheckpointManager(database=folder + "/c.db", remove_files=remover(store))
    runs = RunCheckpoints(
        manager, DistributedCheckpoint(SingleProcess(), store), "run", increments=IncrementPolicy()
    )
    state = State(w=torch.arange(200_000.0))
    runs.save(state, epoch=0, step=0)
    state["w"] += 1

    def die(*_a, **_k):
        os.kill(os.getpid(), signal.SIGKILL)

    if crash_at == "before the files":
        store.open_writer = die
    elif crash_at == "before the manifest":
        create = store.create
        store.create = lambda key, data: die() if "metadata" in key else create(key, data)
    elif crash_at == "before the record":
        manager.complete = die
    runs.save(state, epoch=0, step=1)
    """
)


@pytest.mark.parametrize(
    ("crash_at", "completed"),
    [("before the files", False), ("before the manifest", False), ("before the record", True)],
)
def test_a_crash_in_a_save_is_settled_at_the_next_start(tmp_path, crash_at, completed):
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path), crash_at], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    store = LocalStore(tmp_path / "blobs")
    with (
        CheckpointManager(database=tmp_path / "c.db", remove_files=remover(store)) as manager,
        RunCheckpoints(manager, DistributedCheckpoint(SingleProcess(), store), "run") as runs,
    ):
        (unfinished,) = [
            r for r in manager.list_for_run("run") if r.state is CheckpointState.CREATING
        ]
        report = runs.sweep()
        ids = (unfinished.checkpoint_id,)
        assert (report.completed, report.deleted) == ((ids, ()) if completed else ((), ids))
        found = State(w=torch.zeros(200_000))
        assert runs.restore(found).record.step == (1 if completed else 0)
        assert torch.equal(found.tensors["w"], torch.arange(200_000.0) + completed)
        assert orphans(store) == []
        assert occupied(store) == manager.total_size()
    store.close()


TRAINING = textwrap.dedent(
    """
    import sys, time, torch
    from tensorforge.catalog import CheckpointManager, EmergencySaves, IncrementPolicy, RunCheckpoints
    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore

    class State(dict):
        def state_dict(self): return dict(self)

    store = LocalStore(sys.argv[1] + "/blobs")
    with CheckpointManager(database=sys.argv[1] + "/c.db") as manager:
        runs = RunCheckpoints(
            manager, DistributedCheckpoint(SingleProcess(), store), "run", increments=IncrementPolicy()
        )
        state = State(w=torch.zeros(50_000), frozen=torch.arange(50_000.0))
        runs.save(state, epoch=0, step=0)
        step = 0
        with EmergencySaves(lambda: runs.emergency(state, epoch=0, step=step)) as emergency:
            while True:
                state["w"] += 1
                step += 1
                print(step, flush=True)
                emergency.check()
    """
)


def test_sigterm_leaves_an_emergency_checkpoint_of_the_last_step(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) == 5:
            process.send_signal(signal.SIGTERM)
            break
    last = int((process.stdout.read().split() or ["5"])[-1])
    process.stdout.close()
    assert process.wait() == 143
    store = LocalStore(tmp_path / "blobs")
    with CheckpointManager(database=tmp_path / "c.db") as manager:
        runs = RunCheckpoints(manager, DistributedCheckpoint(SingleProcess(), store), "run")
        found = State(w=torch.ones(50_000), frozen=torch.zeros(50_000))
        record = runs.restore(found).record
        assert (record.checkpoint_type, record.step) == (CheckpointType.EMERGENCY, last)
        assert record.parent_id is not None
        assert torch.equal(found.tensors["w"], torch.full((50_000,), float(last)))
        assert torch.equal(found.tensors["frozen"], torch.arange(50_000.0))
    store.close()
