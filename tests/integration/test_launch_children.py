"""Real processes: their output, their exits, and that none outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tensorforge.environment import PRELOAD
from tensorforge.errors import NotFoundError, UnavailableError
from tensorforge.launch.processes.children import Children, Exited, Printed, Reported, StackLine

BOOTSTRAP = [sys.executable, "-m", "tensorforge.launch.processes.bootstrap"]
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def children():
    with Children() as found:
        yield found


@pytest.fixture
def script(tmp_path):
    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def start(children, name, script, *arguments):
    command = [*BOOTSTRAP, str(script), *arguments]
    return children.start(name, command, ENVIRONMENT, script.parent)


def until(children, condition, seconds=60.0):
    """Collect events until `condition(events)` holds."""
    events, limit = [], time.monotonic() + seconds
    while not condition(events):
        assert time.monotonic() < limit, f"nothing came of {events}"
        events += children.poll(1.0)
    return events


def until_exit(children, count=1):
    return until(children, lambda events: sum(isinstance(e, Exited) for e in events) == count)


def printed(events, child=None):
    return [e.line for e in events if isinstance(e, Printed) and child in (None, e.child)]


def failure(events):
    (message,) = [e.message for e in events if isinstance(e, Reported)]
    assert message["kind"] == "failed"
    return message


def wait_gone(pid):
    limit = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < limit, f"process {pid} is still there"
        time.sleep(0.01)


def test_a_script_runs_as_main_with_its_arguments_and_its_folder_on_the_path(children, script):
    script("value = 7", "beside.py")
    text = (
        "import sys, beside\nprint(__name__, sys.argv[1:], beside.value, __file__ == sys.argv[0])"
    )
    start(children, "a", script(text), "-x", "1")
    events = until_exit(children)
    assert printed(events) == ["__main__ ['-x', '1'] 7 True"]
    assert events[-1] == Exited("a", 0)
    assert children.names == ()


def test_a_module_runs_by_name(children, script):
    path = script("import sys; print(sys.argv[1:])", "job.py")
    command = [*BOOTSTRAP, "-m", "job", "one"]
    children.start("a", command, ENVIRONMENT, path.parent)
    assert printed(until_exit(children)) == ["['one']"]


def test_everything_a_child_wrote_comes_before_its_exit(children, script):
    start(children, "a", script("print('x' * 100_000); print('end', end='')"))
    events = until_exit(children)
    lines = printed(events)
    assert sum(map(len, lines)) == 100_003
    assert lines[-1] == "end"
    assert isinstance(events[-1], Exited)


def test_output_of_several_children_is_kept_apart(children, script):
    path = script("import sys\nfor n in range(200): print(sys.argv[1], n)")
    for name in ("a", "b", "c"):
        start(children, name, path, name)
    events = until_exit(children, 3)
    for name in ("a", "b", "c"):
        assert printed(events, name) == [f"{name} {n}" for n in range(200)]


def test_an_exception_is_told_with_the_scripts_own_frames_only(children, script):
    text = "def f():\n    raise ValueError('broken: é')\n\nf()\n"
    start(children, "a", script(text))
    events = until_exit(children)
    told = failure(events)
    assert told["exception"] == "ValueError"
    assert told["message"] == "broken: é"
    assert told["where"] == "train.py:2 in f"
    assert "bootstrap" not in told["traceback"]
    assert told["traceback"].endswith("ValueError: broken: é\n")
    assert printed(events) == []  # it is for the launcher to show
    assert events[-1] == Exited("a", 1)


def test_the_place_of_an_error_inside_a_library_is_the_line_that_called_it(children, script):
    start(children, "a", script("import json\njson.loads('{')\n"))
    assert failure(until_exit(children))["where"] == "train.py:2 in <module>"


def test_a_script_that_does_not_parse_is_told(children, script):
    start(children, "a", script("x = 1\ny = (\n"))
    told = failure(until_exit(children))
    assert told["exception"] == "SyntaxError"
    assert told["where"].startswith("train.py:2")


@pytest.mark.parametrize(
    ("statement", "code", "told"),
    [
        ("sys.exit()", 0, False),
        ("sys.exit(0)", 0, False),
        ("sys.exit(7)", 7, True),
        ("sys.exit('no data')", 1, True),
        ("os._exit(9)", 9, False),
        ("raise KeyboardInterrupt", 130, False),
    ],
)
def test_an_exit_code_is_passed_on(children, script, statement, code, told):
    start(children, "a", script(f"import os, sys\n{statement}\n"))
    events = until_exit(children)
    assert events[-1] == Exited("a", code)
    assert any(isinstance(event, Reported) for event in events) == told


def test_a_script_that_does_not_exist_is_a_usage_error(children, tmp_path):
    start(children, "a", tmp_path / "nowhere.py")
    events = until_exit(children)
    assert "nowhere.py does not exist" in printed(events)[0]
    assert events[-1] == Exited("a", 2)


def test_a_command_that_does_not_exist_is_an_error(children, tmp_path):
    with pytest.raises(UnavailableError, match="a could not be started"):
        children.start("a", ["/no/such/program"], ENVIRONMENT, tmp_path)
    with pytest.raises(NotFoundError):
        children.kill("a")


def test_binary_junk_and_half_lines_do_not_hurt(children, script):
    text = (
        "import os, time\n"
        "os.write(1, b'\\xff\\x00ok\\nhalf')\n"
        "time.sleep(0.05)\n"
        "os.write(2, b' line\\n')\n"
    )
    start(children, "a", script(text))
    assert printed(until_exit(children)) == ["\\xff\x00ok", "half line"]


def test_stacks_come_on_request_even_from_a_busy_loop(children, script):
    start(children, "a", script("def spin():\n    print('go')\n    while True: pass\nspin()\n"))
    until(children, printed)
    children.signal("a", signal.SIGUSR1)
    events = until(
        children, lambda found: any("bootstrap" in getattr(e, "line", "") for e in found)
    )
    stack = "\n".join(event.line for event in events if isinstance(event, StackLine))
    assert 'train.py"' in stack
    assert "in spin" in stack
    children.kill("a")
    assert until_exit(children)[-1] == Exited("a", -9)


def test_what_a_child_started_ends_with_it(children, script):
    text = (
        "import subprocess\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "raise SystemExit(0)\n"
    )
    start(children, "a", script(text))
    (pid,) = printed(until_exit(children))
    wait_gone(int(pid))


def test_a_frozen_child_can_be_killed(children, script):
    start(children, "a", script("import time\nprint('up')\ntime.sleep(600)"))
    until(children, printed)
    children.signal("a", signal.SIGSTOP)
    children.kill("a")
    assert until_exit(children)[-1] == Exited("a", -9)


def test_closing_kills_whoever_still_runs(script):
    found = Children()
    pid = start(found, "a", script("import time; time.sleep(600)"))
    found.close()
    found.close()
    assert not psutil.pid_exists(pid)


def test_another_thread_can_end_a_wait(children):
    children.wake()
    started = time.monotonic()
    assert children.poll(60.0) == []
    assert time.monotonic() - started < 30
    for _ in range(100_000):  # a full pipe is no error
        children.wake()
    assert children.poll(60.0) == []


LAUNCHER = """
import os, sys
from pathlib import Path
from tensorforge.launch.processes.children import Children, Printed

children = Children()
script = Path(sys.argv[1])
command = [sys.executable, "-m", "tensorforge.launch.processes.bootstrap", str(script)]
children.start("a", command, dict(os.environ), script.parent)
while True:
    for event in children.poll(1.0):
        if isinstance(event, Printed):
            print(event.line, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_dies_leaves_nobody_behind(script, how):
    path = script(
        "import os, subprocess, time\n"
        "print(os.getpid(), subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(path)], stdout=subprocess.PIPE, text=True
    )
    with launcher:
        pids = [int(word) for word in launcher.stdout.readline().split()]
        launcher.send_signal(how)
    assert len(pids) == 2
    for pid in pids:
        wait_gone(pid)


def test_a_child_whose_launcher_is_gone_already_does_not_start(script):
    path = script("print('never')")
    environment = {**os.environ, "TENSORFORGE_LAUNCHER_PID": "1"}
    done = subprocess.run([*BOOTSTRAP, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""


def test_without_a_launcher_the_bootstrap_runs_the_script_all_the_same(script):
    path = script("print('alone')")
    done = subprocess.run([*BOOTSTRAP, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "alone\n"


INTERRUPTED = """
import os, signal
def leave(*_):
    os.write(1, b"left\\n")
    raise SystemExit
signal.signal(signal.SIGTERM, leave)
os.write(1, b"here\\n")
while True:
    signal.pause()
"""


@pytest.mark.parametrize(("text", "last", "code"), [(INTERRUPTED, "left\n", 0), ("", "", 130)])
def test_a_worker_at_a_terminal_leaves_when_it_is_interrupted(script, text, last, code):
    busy = text or "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
    with subprocess.Popen(
        [*BOOTSTRAP, str(script(busy))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout.readline() == "here\n"
        worker.send_signal(signal.SIGINT)
        told, errors = worker.communicate()
    assert (told, worker.returncode) == (last, code)
    assert ("leaving after this step" in errors) is bool(text)


def test_a_killed_reaper_is_no_reason_to_stop(children, script):
    children._reaper.kill()
    children._reaper.wait()
    start(children, "a", script("print('fine')"))
    assert printed(until_exit(children)) == ["fine"]


def start_spare(children, script, preload):
    environment = {**ENVIRONMENT, PRELOAD.name: preload}
    return children.start(
        "spare", [*BOOTSTRAP, str(script)], environment, script.parent, spare=True
    )


def warm(events):
    return any(isinstance(event, Reported) and event.message["kind"] == "warm" for event in events)


def test_a_spare_has_imported_what_it_was_told_to_and_waits_for_activation(children, script):
    path = script(
        "import os, sys\n"
        "print('colorsys' in sys.modules, 'wave' in sys.modules, __name__, sys.argv[1:])\n"
        "print([name for name in os.environ if name.startswith('TENSORFORGE_')])"
    )
    pid = start_spare(children, path, "colorsys,no_such_module_anywhere")
    before = until(children, warm)
    assert printed(before) == []
    assert children.activate("spare") == pid
    events = until_exit(children)
    assert printed(events) == ["True False __main__ []", "[]"]
    assert events[-1] == Exited("spare", 0)


def test_a_spare_that_is_told_before_it_is_warm_goes_on_at_once(children, script):
    start_spare(children, script("print('here')"), "colorsys")
    children.activate("spare")
    assert printed(until_exit(children)) == ["here"]


def test_a_spare_that_is_not_needed_ends_with_the_launcher(script):
    with Children() as children:
        pid = start_spare(children, script("print('never')"), "")
        until(children, warm)
    wait_gone(pid)
