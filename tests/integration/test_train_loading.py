"""Batches that processes load ahead: the same numbers, the right errors, and nothing left behind."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from tests.integration.train_cases import Noisy, data, make_run, train
from torch.nn import functional as F  # noqa: N812

from tensorforge.errors import ConfigurationError, UnavailableError
from tensorforge.train import Loading, RunConfig
from tensorforge.train.data import loading_processes
from tensorforge.train.data.batch_loading import BatchSource, MicroBatch
from tensorforge.train.data.loading_processes import LoadingProcesses
from tensorforge.train.gradients.step_work import Share
from tensorforge.train.loop.engine import StepEngine


def train_noisily(total=16, **loading):
    run = make_run("mlp", dataset=Noisy(data("mlp")), loading=Loading(**loading), accumulation=2)
    return train(run, total)


@pytest.fixture(scope="module")
def inline():
    return train_noisily()


@pytest.mark.parametrize(("workers", "ahead"), [(1, 1), (2, 2), (2, 5)])
def test_who_loads_a_batch_does_not_change_what_is_random_in_it(inline, workers, ahead):
    assert train_noisily(num_workers=workers, prefetch_factor=ahead) == inline


class Threads(Noisy):
    """Tells how many threads torch has for a sample: its sums depend on it."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * torch.get_num_threads(), y


def test_torch_has_one_thread_for_samples_wherever_they_are_loaded():
    def digest(workers):
        run = make_run("mlp", dataset=Threads(data("mlp")), loading=Loading(num_workers=workers))
        torch.set_num_threads(2)
        try:
            return train(run, 3), torch.get_num_threads()
        finally:
            torch.set_num_threads(1)

    assert digest(0) == digest(1)
    assert digest(0)[1] == 2


def test_a_dataset_that_can_be_pickled_may_go_to_processes_that_are_spawned():
    spawned = Loading(num_workers=1, multiprocessing_context="spawn")
    assert train(make_run("mlp", loading=spawned), 3) == train(make_run("mlp"), 3)


def test_as_long_as_nothing_changes_every_batch_is_the_one_that_was_loaded(monkeypatch, inline):
    plans = []
    predict = StepEngine.upcoming
    monkeypatch.setattr(
        StepEngine, "upcoming", lambda self, first: plans.append(first) or predict(self, first)
    )
    assert train_noisily(num_workers=2) == inline  # over the end of two epochs
    assert len(plans) == 1


def test_as_much_as_possible_may_be_asked_for_before_anything_is_taken():
    run = make_run(
        "mlp", dataset=Noisy(data("mlp")), loading=Loading(num_workers=1, prefetch_factor=64)
    )
    assert train(run, 2) == train(make_run("mlp", dataset=Noisy(data("mlp"))), 2)


def test_a_worker_whose_own_shards_are_empty_loads_what_it_computes_for_another():
    run = make_run("mlp", dataset=data("mlp", 2), shards=4, batch_size=2)
    engine = run._engine
    engine.session = SimpleNamespace(rank=1, world_size=2)
    engine._shares = (Share((), ()), Share((), (0,)))
    assert list(engine.upcoming(MicroBatch(0, 0, 1))) == [MicroBatch(0, 0, 1)]


def test_the_callers_random_streams_stay_where_they_are():
    def look():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    run = make_run("mlp", dataset=Noisy(data("mlp")), loading=Loading(num_workers=1))
    before = look()
    train(run, 2)
    assert look() == before


class Broken(Noisy):
    """Has one sample that cannot be read."""

    def __getitem__(self, index):
        if index == 150:
            raise ValueError("sample 150 is damaged")
        return super().__getitem__(index)


def test_an_error_in_a_process_reaches_the_training_loop_with_its_traceback_and_not_too_early():
    run = make_run("mlp", dataset=Broken(data("mlp")), loading=Loading(num_workers=2))
    with pytest.raises(
        ValueError, match=r"(?s)sample 150 is damaged.*__getitem__|__getitem__.*150"
    ):
        train(run, 20)
    other = make_run("mlp", dataset=Broken(data("mlp")))
    with pytest.raises(ValueError, match="damaged"):
        train(other, 20)
    assert run.state.committed_step == other.state.committed_step > 0


def test_a_connection_of_the_datasets_own_that_breaks_is_an_error_of_the_dataset():
    class Remote(Noisy):
        def __getitem__(self, index):
            raise ConnectionResetError("the image server hung up")

    with pytest.raises(ConnectionResetError, match="image server"):
        train(make_run("mlp", dataset=Remote(data("mlp")), loading=Loading(num_workers=1)), 2)


def test_an_error_in_a_batch_that_nobody_wants_is_not_raised():
    run = make_run("mlp", dataset=Broken(data("mlp")))
    with pytest.raises(ValueError, match="damaged"):
        train(run, 20)
    good = run.state.committed_step + 1
    ahead = Loading(num_workers=2, prefetch_factor=20)  # beyond the last step that is taken
    train(make_run("mlp", dataset=Broken(data("mlp")), loading=ahead), good)


def test_a_process_that_dies_is_named():
    with (
        pytest.raises(UnavailableError, match=r"loading-1 \(pid \d+\) was killed by SIGKILL"),
        make_run("mlp", loading=Loading(num_workers=2)) as run,
    ):
        for step in run.steps(total=50):  # what it has sent already is still taken
            for x, y in step.batches():
                for child in multiprocessing.active_children():
                    if child.name == "loading-1":
                        child.kill()
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_to_the_whole_group_is_the_training_process_s_business(inline, number):
    with make_run(
        "mlp", dataset=Noisy(data("mlp")), loading=Loading(num_workers=2), accumulation=2
    ) as run:
        for step in run.steps(total=16):
            for x, y in step.batches():
                if step.number == 1:
                    for child in multiprocessing.active_children():
                        os.kill(child.pid, number)
                step.backward(F.cross_entropy(run.model(x), y))
            step.commit()
    assert run.digest() == inline[0]


def test_a_script_that_forgets_to_close_its_run_ends():
    script = """if True:
        from tests.integration.train_cases import make_run
        from tensorforge.train import Loading
        run = make_run("mlp", loading=Loading(num_workers=2))
        steps = run.steps(total=50)
        batch = next(next(steps).batches())
        print("one batch")
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.stdout, done.returncode) == (b"one batch\n", 0), done.stderr.decode()


class TalkingBackError(Exception):
    """One that pickle makes, but cannot make again."""

    def __init__(self, index, why):
        super().__init__(f"{index}: {why}")


class Rude(Noisy):
    def __getitem__(self, index):
        raise TalkingBackError(index, "no")


def test_an_error_that_cannot_be_pickled_is_told_in_words():
    with pytest.raises(RuntimeError, match=r"TalkingBackError: \d+: no") as caught:
        train(make_run("mlp", dataset=Rude(data("mlp")), loading=Loading(num_workers=1)), 2)
    assert "__getitem__" in caught.value.__notes__[0]


def test_a_batch_that_cannot_be_pickled_is_an_error_that_says_so():
    class Functions(Noisy):
        def __getitem__(self, index):
            return lambda: index

    run = make_run("mlp", dataset=Functions(data("mlp")), loading=Loading(num_workers=1))
    run._batches._collate = list
    with pytest.raises((AttributeError, RuntimeError), match="pickle"):
        train(run, 2)


def test_a_process_that_is_stuck_does_not_hold_the_end_up():
    class Stuck(Noisy):
        def __getitem__(self, index):
            if index == 150:
                signal.pause()
            return super().__getitem__(index)

    ahead = Loading(num_workers=1, prefetch_factor=40)
    train(make_run("mlp", dataset=Stuck(data("mlp")), loading=ahead), 1)


def test_processes_that_are_stuck_are_waited_for_together(monkeypatch):
    class Stuck(Noisy):
        def __getitem__(self, index):
            if multiprocessing.current_process().name != "MainProcess":
                signal.pause()
            return super().__getitem__(index)

    waits = []
    join = multiprocessing.process.BaseProcess.join

    def note(process, timeout=None):
        if timeout is not None:
            waits.append(timeout)
        join(process, timeout)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "join", note)
    monkeypatch.setattr(loading_processes, "_EXIT_SECONDS", 0.5)
    source = BatchSource(Stuck(data("mlp")), RunConfig(batch_size=30), None)
    processes = LoadingProcesses(source, Loading(num_workers=3), lambda first: iter([first] * 3))
    processes._plan = iter([MicroBatch(0, 0, 1)] * 3)
    processes._ask()
    processes.close()
    assert len(waits) == 3
    assert waits[1:] == [0, 0]


def test_no_process_holds_the_connection_of_another():
    def connections(pid):
        names = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return {name for name in names if name.startswith("socket:")}

    source = BatchSource(Noisy(data("mlp")), RunConfig(batch_size=30), None)
    processes = LoadingProcesses(source, Loading(num_workers=3), lambda first: iter([first] * 3))
    try:
        for _ in range(3):  # then all of them are idle
            processes.load(MicroBatch(0, 0, 1))
        held = [connections(child.pid) for child in multiprocessing.active_children()]
        assert [len(one - set.intersection(*held)) for one in held] == [1, 1, 1]
    finally:
        processes.close()


class Waiting(Noisy):
    """Never comes to an end; says which process waits."""

    def __getitem__(self, index):
        print(os.getpid(), flush=True)
        signal.pause()


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_a_process_that_is_stuck_ends_with_a_training_process_that_is_killed(how, tmp_path):
    script = f"""if __name__ == "__main__":
        from tests.integration.test_train_loading import *
        loading = Loading(num_workers=1, multiprocessing_context={how!r})
        train(make_run("mlp", dataset=Waiting(data("mlp")), loading=loading), 1)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # where a fork server leaves its socket
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as training:
        stuck = psutil.Process(int(training.stdout.readline()))
        training.kill()
        gone, _ = psutil.wait_procs([stuck], timeout=60)
    assert gone == [stuck]


def test_each_process_is_prepared_and_told_its_number(tmp_path):
    def prepare(number):
        (tmp_path / str(number)).touch()

    train(make_run("mlp", loading=Loading(num_workers=2, worker_init_fn=prepare)), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_error_while_a_process_is_prepared_reaches_the_training_loop():
    def fail(number):
        raise ValueError(f"process {number} finds no cache")

    with pytest.raises(ValueError, match="process 0 finds no cache"):
        train(make_run("mlp", loading=Loading(num_workers=2, worker_init_fn=fail)), 2)


def test_what_a_signal_handler_of_the_script_raises_is_not_taken_for_a_death():
    class Stuck(Noisy):
        def __getitem__(self, index):
            os.kill(os.getppid(), signal.SIGUSR1)
            signal.pause()

    def give_up(*_):
        raise TimeoutError("this takes too long")

    before = signal.signal(signal.SIGUSR1, give_up)
    try:
        with pytest.raises(TimeoutError, match="too long"):
            train(make_run("mlp", dataset=Stuck(data("mlp")), loading=Loading(num_workers=1)), 2)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": -1},
        {"num_workers": True},
        {"prefetch_factor": 0},
        {"prefetch_factor": 1.5},
        {"prefetch_factor": 65},
        {"multiprocessing_context": "threads"},
    ],
)
def test_settings_that_make_no_sense_are_named(settings):
    (name,) = settings
    with pytest.raises(ConfigurationError, match=name):
        Loading(**settings)
