"""The commands, against a real coordinator."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import replace

import pytest

from tensorforge.cli.main import main
from tensorforge.elastic import ElasticCoordinator, ElasticTrainingConfig, ElasticWorker, WorkerId
from tensorforge.launch.run_directory import RunRecord, write_record
from tensorforge.processes import ProcessIdentity
from tensorforge.testing.minimal_worker import MinimalTrainingLoop

CONFIG = ElasticTrainingConfig(
    stability_window_ms=100,
    worker_heartbeat_timeout_ms=3_000,
    failure_tolerance_percentage=100,
)


@pytest.fixture
def cluster():
    with ElasticCoordinator(CONFIG, desired_workers=2, metrics_port=0) as coordinator:
        loops = []
        for name in ("a", "b"):
            worker = ElasticWorker(WorkerId(name, "127.0.0.1", 0), CONFIG)
            worker.connect_to_cluster(coordinator.address)
            loops.append(MinimalTrainingLoop(worker))
        threads = [threading.Thread(target=loop.run) for loop in loops]
        for thread in threads:
            thread.start()
        while coordinator.status().state.step < 1:
            threading.Event().wait(0.01)
        yield coordinator
        for loop in loops:
            loop.stop()
            loop.worker.disconnect()
        for thread in threads:
            thread.join()


def run(*words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code or 0


def test_status_shows_workers_and_why_the_cluster_changed(cluster, capsys):
    assert run("status", "-c", cluster.address) == 0
    shown = capsys.readouterr().out
    assert "run default: active, generation 1" in shown
    assert "2 workers (1 to any number, 2 wanted), 0 waiting" in shown
    assert "the first 2 workers are here" in shown


def test_status_as_json_has_every_figure(cluster, capsys):
    assert run("status", "-c", cluster.address, "--json") == 0
    view = json.loads(capsys.readouterr().out)
    assert [worker["id"] for worker in view["workers"]] == ["a", "b"]
    rescale = view["rescales"][0]
    assert rescale["reason"] == "the first 2 workers are here"
    assert {"detection_ms", "decision_ms", "barrier_ms", "forming_ms", "first_commit_ms"} <= set(
        rescale
    )


def test_scale_and_leave_change_the_cluster_and_say_so(cluster, capsys):
    assert run("scale", "1", "-c", cluster.address) == 0
    assert "1 worker wanted; generation 2 has 1" in capsys.readouterr().out
    assert run("leave", "a", "-c", cluster.address, "--json") == 0
    assert json.loads(capsys.readouterr().out)["generation"] == 3


def test_a_run_is_found_by_its_folder_or_by_being_the_only_one(
    cluster, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert run("status") == 1
    assert "name the run with --run-dir or --coordinator" in capsys.readouterr().err
    launcher = ProcessIdentity.current()
    ended = replace(launcher, started=launcher.started - 100)
    for name, process in (("a", launcher), ("b", ended)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        record = RunRecord(
            script="t.py", coordinator_address=cluster.address, launcher=process, workers={}
        )
        write_record(folder, record)
    assert run("status") == 0
    assert "run default: active" in capsys.readouterr().out
    assert run("scale", "2", "--run-dir", "runs/a") == 0
    assert run("scale", "2", "--run-dir", "runs/b") == 1
    assert "the run in runs/b is not active" in capsys.readouterr().err


def test_a_mistake_is_a_message_and_a_failure(cluster, capsys):
    assert run("scale", "0", "-c", cluster.address) == 1
    assert "must be at least min_workers (1)" in capsys.readouterr().err
    assert run("leave", "ghost", "-c", cluster.address) == 1
    assert "there is no worker 'ghost'; known workers: a, b" in capsys.readouterr().err
    assert run("status", "-c", "127.0.0.1:9") == 1
    assert "no coordinator answers at 127.0.0.1:9" in capsys.readouterr().err


def test_prometheus_reads_the_figures(cluster):
    url = f"http://{cluster.metrics_address}/metrics"
    with urllib.request.urlopen(url) as response:
        text = response.read().decode()
    assert 'tensorforge_workers{run="default"} 2.0' in text
    assert 'tensorforge_generation{run="default"} 1.0' in text
    assert 'tensorforge_phase{phase="active",run="default"} 1.0' in text
    assert re.search(r'tensorforge_last_rescale_seconds\{part="barrier",run="default"\} \d', text)


def test_the_coordinator_command_serves_until_it_is_told_to_stop(tmp_path):
    command = [sys.executable, "-m", "tensorforge", "coordinator", "--json", "--port", "0"]
    command += ["--journal", str(tmp_path / "j.db"), "--token-file", str(tmp_path / "job.token")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        address = json.loads(process.stdout.readline())["address"]
        assert (tmp_path / "job.token").stat().st_mode & 0o777 == 0o600
        token = str(tmp_path / "job.token")
        watch = [sys.executable, "-m", "tensorforge", "status", "-c", address, "--watch", "--json"]
        with subprocess.Popen([*watch, "--token-file", token], stdout=subprocess.PIPE) as watching:
            assert json.loads(watching.stdout.readline())["phase"] == "gathering"
            watching.terminate()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "a job token is required"),
        (["--min-workers", "0"], "min_workers = 0: must be at least 1"),
        (["--config", '{"min_worker": 1}'], "no such option: min_worker"),
        (["--config", "nowhere.json"], "neither JSON nor a file"),
        (["--workers", "9", "--max-workers", "3"], "workers = 9: must lie between"),
    ],
)
def test_a_coordinator_that_cannot_work_says_why(words, message, tmp_path, capsys):
    assert run("coordinator", "--port", "0", "--journal", str(tmp_path / "j.db"), *words) == 1
    assert message in capsys.readouterr().err
