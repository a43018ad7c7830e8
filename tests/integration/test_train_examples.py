"""The examples run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def start(*words, folder=EXAMPLES, timeout=110):
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run(*words, **options):
    done = start(*words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
@pytest.mark.parametrize("script", ["plain.py", "elastic.py", "convnet_linear.py"])
def test_an_example_runs(script):
    assert run(script)


@pytest.mark.soak
@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
def test_a_run_resumed_elsewhere_ends_with_the_same_bits():
    assert "stopped and resumed" in run("resume_elsewhere.py", timeout=600)


@pytest.mark.soak
@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
def test_the_convnet_grows_with_its_workers_and_takes_each_sample_once(tmp_path):
    command = ["-m", "tensorforge", "run", "-n", "2", "--min-workers", "2", "--plain"]
    told = run(*command, str(EXAMPLES / "convnet_linear.py"), folder=tmp_path, timeout=300)
    assert "48 samples" in told
    assert "none twice, none missing" in told or "complete; epoch" in told


@pytest.mark.soak
@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
def test_the_demo_proves_its_claims(tmp_path):
    told = run(EXAMPLES / "demo.py", folder=tmp_path, timeout=600)
    assert "All claims hold" in told
    assert (tmp_path / "demo-output" / "demo.html").exists()


@pytest.mark.soak
@pytest.mark.may_leak("files", "torch leaves a folder for compiled kernels")
def test_the_demo_fails_if_its_proof_does(tmp_path):
    done = start(EXAMPLES / "demo.py", "--sabotage", folder=tmp_path, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED the weights are the undisturbed run's" in done.stdout
