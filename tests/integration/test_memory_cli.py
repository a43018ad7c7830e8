"""Recording real programs through the command line."""

import json
import subprocess
import sys

import pytest

from tensorforge.cli import main as cli
from tensorforge.memory import AllocationTrace

pytestmark = pytest.mark.may_leak("files", "torch's profiler makes the compiler's cache folder")

PROGRAM = """
import sys, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
print("trained for", sys.argv[1])
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def tensorforge(*words):
    return subprocess.run(
        [sys.executable, "-m", "tensorforge", "memory", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_is_recorded_replayed_and_judged(program, tmp_path):
    output = tmp_path / "trace.json.gz"
    done = tensorforge("record", "--json", "-o", output, program, "4")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "trained for 4" in done.stderr
    trace = AllocationTrace.load(output)
    assert facts["events"] == len(trace) > 50
    assert trace.name == "train"
    assert any("Adam.step" in life.label for life in trace.lifetimes())

    replayed = json.loads(tensorforge("replay", output, "--json").stdout)
    assert replayed["peak_live"] == trace.peak_live
    assert set(replayed["policies"]) >= {"best-fit", "pytorch-like", "offline"}

    advice = json.loads(tensorforge("advise", output, "--json").stdout)
    assert advice["fits"]
    assert advice["oom_seconds"] is None


def test_what_a_failing_program_did_is_kept(program, tmp_path, capsys):
    output = tmp_path / "trace.json.gz"
    with pytest.raises(SystemExit) as caught:
        cli.main(["memory", "record", "-o", str(output), str(program), "1", "on purpose"])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert "trained for 1" in printed.out
    assert "failed: ValueError: on purpose" in printed.err
    assert "Traceback" not in printed.err
    assert len(AllocationTrace.load(output)) > 10
