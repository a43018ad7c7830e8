"""Recording real programs, through the command line and as a context manager."""

import json
import subprocess
import sys

import pytest
import torch

from tensorforge.cli import main as cli
from tensorforge.errors import ClosedError, InvalidInputError
from tensorforge.memory import AllocationTrace, record_allocations, replay_trace

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


def test_the_recorder_sees_what_is_allocated_and_freed():
    with record_allocations(name="mine") as recording:
        with pytest.raises(ClosedError, match="has not ended"):
            _ = recording.trace
        kept = torch.empty(1000, dtype=torch.uint8)
        temporary = torch.empty(5000, dtype=torch.uint8)
        del temporary
    trace = recording.trace
    assert trace.name == "mine"
    assert [event.size for event in trace.events] == [1000, 5000, -5000]
    assert all(event.label == "aten::empty" for event in trace.events if event.size > 0)
    assert replay_trace(trace, "best-fit").overhead == pytest.approx(1.0, abs=0.15)
    assert kept.numel() == 1000


def test_what_was_there_before_is_left_out():
    old = torch.empty(1000)
    with record_allocations() as recording:
        del old
        torch.empty(10, dtype=torch.uint8)
    assert [event.size for event in recording.trace.events] == [10, -10]


def test_the_trace_is_there_also_after_an_exception():
    with pytest.raises(KeyError), record_allocations() as recording:
        torch.empty(10, dtype=torch.uint8)
        raise KeyError
    assert len(recording.trace) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="only without a GPU")
def test_recording_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidInputError, match="no CUDA"), record_allocations(device="cuda"):
        pass
