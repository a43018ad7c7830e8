"""What a user sees when something is wrong: each case with real processes, each with a clear message."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensorforge.cli import main as cli

TOY = str(Path(__file__).parents[1] / "integration" / "toy_train.py")
FAST = ["--stability-window", "0.05", "--heartbeat-timeout", "3"]


@pytest.fixture
def run(tmp_path):
    def launch(*options: str, script: str = TOY, arguments=()):
        folder = str(tmp_path / "run")
        command = [sys.executable, "-m", "tensorforge", "run", "--run-dir", folder, *FAST]
        return subprocess.run(
            [*command, *options, script, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=tmp_path,
        )

    return launch


def script(tmp_path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def logs(tmp_path) -> str:
    return "".join(path.read_text() for path in (tmp_path / "run" / "logs").iterdir())


def test_a_script_that_does_not_exist(run):
    done = run(script="nowhere.py")
    assert done.returncode == 1
    assert done.stderr == "error: the script nowhere.py does not exist\n"
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "0"], "workers = 0: must be at least 1"),
        (["-n", "3", "--max-workers", "2"], "max_workers = 2: must be at least 3"),
        (["--hang-timeout", "-1"], "hang_timeout = -1.0: must be more than 0 seconds"),
        (["--port", "99999"], "port = 99999: must be at most 65535"),
    ],
)
def test_wrong_options(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "--run-dir", str(tmp_path / "run"), *options, TOY])
    assert caught.value.code == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run-dir", "run", "."], ". is a folder; name the script in it, or a module with -m"),
        (["--run-dir", "file", TOY], "file is a file; the run needs a folder"),
        (["--run-dir", "file/x", TOY], "the folder file/x cannot be made: Not a directory"),
    ],
)
def test_what_is_in_the_way(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", *words])
    assert caught.value.code == 1
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 1
    told = f"error: the coordinator did not start: cannot listen on 127.0.0.1:{port}: is it in use?"
    assert told in done.stderr
    assert len(done.stdout.splitlines()) == 1, done.stdout


def test_a_script_that_raises_at_import(run, tmp_path):
    done = run("-n", "2", script=script(tmp_path, "import no_such_module\n"))
    assert done.returncode == 1
    assert "raised ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
    assert "(train.py:1 in <module>)" in done.stderr
    assert "the traceback of worker-" in done.stderr
    assert "bootstrap" not in done.stderr
    assert (done.stdout + done.stderr).count("Traceback (most recent call last)") == 1
    assert "ModuleNotFoundError" in logs(tmp_path)


def test_a_script_that_never_trains(run, tmp_path):
    done = run(script=script(tmp_path, "print('hello')\n"))
    assert done.returncode == 1
    assert "[worker-0] hello" in done.stdout
    assert "ended without training" in done.stderr


def test_an_exception_in_one_worker_is_forgiven_once(run):
    arguments = ["--steps", "60", "--only", "worker-1", "--raise-at", "10"]
    done = run("-n", "2", "--min-workers", "2", arguments=arguments)
    assert done.returncode == 0, done.stderr
    assert "worker-1 raised ValueError: bad sample in step 10" in done.stdout
    assert "[worker-1] ValueError: bad sample in step 10" in done.stdout
    assert "it is replaced (9 of 10 restarts left)" in done.stdout


def test_an_exception_that_comes_again_ends_the_run_with_the_workers_traceback(run):
    done = run("-n", "2", arguments=["--steps", "60", "--raise-at", "10"])
    assert done.returncode == 1
    assert "ValueError: bad sample in step 10" in done.stderr
    assert 'toy_train.py", line' in done.stderr


def test_an_exit_code_of_the_script_is_told(run):
    done = run(arguments=["--steps", "60", "--exit-at", "3"])
    assert done.returncode == 1
    assert "worker-0 called sys.exit(5) (toy_train.py:" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_spent_restart_budget_is_told(run):
    options = ["-n", "2", "--min-workers", "2", "--max-restarts", "1", "--failure-tolerance", "100"]
    done = run(*options, arguments=["--steps", "1000", "--die-at", "10"])
    assert done.returncode == 1
    assert "the restart budget is spent (1 in 3600 s)" in done.stderr
    assert "min_workers (2)" in done.stderr


def test_a_hang_is_found_shown_with_its_stack_and_replaced(run):
    arguments = ["--steps", "30", "--only", "worker-0", "--hang-at", "10"]
    done = run("--hang-timeout", "2", arguments=arguments)
    assert done.returncode == 0, done.stderr
    assert "worker-0 hangs: no progress for 2 s" in done.stdout
    assert 'toy_train.py", line' in done.stdout
    assert "in hang" in done.stdout
