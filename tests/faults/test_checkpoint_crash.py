"""A saving process is killed at every system call that changes the disk, and at random moments.

Run as a script, this file is that process: torch is imported once, then every attempt is a fork of it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOAK_RUNS, TEST_RUNS = 200, 20

pytestmark = pytest.mark.timeout(600)  # dozens of processes, which a busy machine starts slowly


class State:
    def __init__(self, value, size=3000):
        import torch

        self.tensors = {
            "a": torch.full((size, 7), float(value)),
            "b": torch.full((11,), value, dtype=torch.int64),
        }

    def state_dict(self):
        return self.tensors

    def load_state_dict(self, state):
        self.tensors = state

    @property
    def value(self):
        """The one number that the state is made of; -1 if it is a mixture."""
        numbers = {*self.tensors["a"].unique().tolist(), *self.tensors["b"].unique().tolist()}
        return int(numbers.pop()) if len(numbers) == 1 else -1


def dying_system(after):
    """System calls that kill the process instead of the call number `after`; counts them otherwise."""
    from tensorforge.storage.system_calls import SystemCalls

    class Dying(SystemCalls):
        count = 0

    def wrap(name):
        original = getattr(SystemCalls, name)

        def call(self, *arguments):
            if Dying.count == after:
                os.kill(os.getpid(), signal.SIGKILL)
            Dying.count += 1
            return original(self, *arguments)

        return call

    for name in vars(SystemCalls):
        if not name.startswith("_"):
            setattr(Dying, name, wrap(name))
    return Dying()


def save(folder, prefix, value, layout, system=None, size=3000):
    from tensorforge.checkpoint import (
        CheckpointFormat,
        DistributedCheckpoint,
        SaveOptions,
        SingleProcess,
    )
    from tensorforge.storage.local_store import LocalStore

    options = SaveOptions(checkpoint_prefix=prefix, format=CheckpointFormat(layout))
    with DistributedCheckpoint(SingleProcess(), LocalStore(folder, system=system)) as checkpoint:
        checkpoint.save(State(value, size), options=options)


def forked(work, *arguments):
    """Run in a child and return its process id."""
    pid = os.fork()
    if not pid:
        try:
            work(*arguments)
        except BaseException:  # noqa: BLE001  the parent sees the exit code
            os._exit(1)
        os._exit(0)
    return pid


def newest(folder, size=3000):
    """What the newest checkpoint holds, and what lies in the folder."""
    from tensorforge.checkpoint import DistributedCheckpoint, SingleProcess
    from tensorforge.storage.local_store import LocalStore

    with DistributedCheckpoint(SingleProcess(), LocalStore(folder)) as checkpoint:
        listed = [info.prefix for info in checkpoint.list_checkpoints()]
        state = State(0, size)
        result = checkpoint.load(state)
        assert result.manifest.prefix == listed[-1], "the newest listed one is the one that loads"
        assert not result.rejected
        return state.value, listed


def remaining(folder):
    return sorted(
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if path.is_file() and not path.name.endswith(".metadata.json")
    )


def crash_at_every_call(folder, layout):
    """Save 1, then die while saving 2 at call 0, 1, 2, … until the save outlives the number."""
    base = Path(folder)
    save(base / "base", "one", 1, layout)
    outcomes, call = [], 0
    while True:
        place = base / str(call)
        subprocess.run(["cp", "-r", base / "base", place], check=True)
        pid = forked(save, place, "two", 2, layout, dying_system(call))
        status = os.waitpid(pid, 0)[1]
        value, listed = newest(place)
        save(place, "three", 3, layout)
        after, _ = newest(place)
        litter = [
            name
            for name in remaining(place)
            if name.startswith((".staging", "two")) and "two" not in listed
        ] + [name for name in remaining(place) if "saving" in name or "deleting" in name]
        outcomes.append({"call": call, "value": value, "after": after, "litter": litter})
        if status == 0:
            return outcomes
        assert os.WIFSIGNALED(status)
        call += 1


def crash_at_random(folder, runs, seed):
    """Save larger and larger numbers, each killed after a random time."""
    size, dice = 300_000, random.Random(seed)
    save(folder, "checkpoint-0", 1, "multi_shard", size=size)
    started = time.monotonic()
    save(folder, "timing", 1, "multi_shard", size=size)
    usual = time.monotonic() - started
    value = 2
    save(folder, "checkpoint-1", value, "multi_shard", size=size)
    last, outcomes = value, []
    for run in range(runs):
        value += 1
        pid = forked(save, folder, f"checkpoint-{run + 2}", value, "multi_shard", None, size)
        time.sleep(dice.uniform(0, usual * 1.5))
        os.kill(pid, signal.SIGKILL)
        killed = os.waitpid(pid, 0)[1] != 0
        found, _ = newest(folder, size)
        outcomes.append({"old": last, "new": value, "found": found, "killed": killed})
        last = found
    save(folder, "final", 0, "multi_shard", size=size)
    litter = [name for name in remaining(folder) if ".staging" in name or "saving" in name]
    return {"outcomes": outcomes, "litter": litter}


def launch(*words):
    command = [sys.executable, __file__, *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("layout", ["multi_shard", "consolidated"])
def test_killed_at_any_system_call_the_newest_checkpoint_is_the_old_or_the_new_one(
    tmp_path, layout
):
    outcomes = launch("calls", tmp_path, layout)
    assert len(outcomes) > 20, "the save makes more system calls than that"
    assert outcomes[0]["value"] == 1
    assert outcomes[-1]["value"] == 2
    values = [outcome["value"] for outcome in outcomes]
    assert values == sorted(values), "there is one moment from which on the new one counts"
    assert set(values) == {1, 2}
    assert {outcome["after"] for outcome in outcomes} == {3}
    assert [outcome for outcome in outcomes if outcome["litter"]] == []


def check_random(report, runs):
    assert len(report["outcomes"]) == runs
    for outcome in report["outcomes"]:
        assert outcome["found"] in (outcome["old"], outcome["new"]), outcome
    assert report["litter"] == []


def test_killed_at_random_moments_the_newest_checkpoint_is_the_old_or_the_new_one(tmp_path):
    check_random(launch("random", tmp_path, TEST_RUNS, 7), TEST_RUNS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_many_times(tmp_path):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    check_random(launch("random", tmp_path, SOAK_RUNS, seed), SOAK_RUNS)


def main(kind, folder, *rest):
    import torch

    torch.set_num_threads(1)
    if kind == "calls":
        print(json.dumps(crash_at_every_call(folder, *rest)))
    else:
        print(json.dumps(crash_at_random(folder, *map(int, rest))))


if __name__ == "__main__":
    main(*sys.argv[1:])
