"""The examples run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words, timeout=110):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
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
def test_the_demo_proves_its_claims(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "demo-output" / "demo.html").exists()
