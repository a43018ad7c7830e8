"""The conformance tests of crews: subclass `CrewConformance` and give it a `crew` fixture.

class TestMyCrew(CrewConformance):
    @pytest.fixture
    def crew(self):
        ...
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorforge.environment import PRELOAD, for_child
from tensorforge.errors import NotFoundError
from tensorforge.launch.crew.crew import Crew, CrewEvent, Order, Placed, Unplaceable
from tensorforge.launch.processes.children import Exited, Printed, Reported, StackLine

PATIENCE = 60.0
"""Seconds after which an event counts as missing."""

SLEEPS = """
    import signal, time
    signal.signal(signal.SIGTERM, lambda *_: exit(7))
    print("ready")
    while True:
        time.sleep(0.05)
"""


def wait_until(crew: Crew, is_last: Callable[[CrewEvent], bool]) -> list[CrewEvent]:
    """The events up to the one for which `is_last` is true, and those that came with it."""
    events: list[CrewEvent] = []
    limit = time.monotonic() + PATIENCE
    while not any(map(is_last, events)):
        assert time.monotonic() < limit, f"the event did not come; these did: {events}"
        events += crew.poll(0.2)
    return events


def until_exit(crew: Crew, name: str) -> list[CrewEvent]:
    """The events up to the exit of this worker."""
    return wait_until(crew, lambda event: isinstance(event, Exited) and event.child == name)


def until_printed(crew: Crew, line: str) -> list[CrewEvent]:
    """The events up to this line of any worker."""
    return wait_until(crew, lambda event: isinstance(event, Printed) and event.line == line)


class CrewConformance:
    """Every crew passes these tests. `crew` is open, and its workers can read `tmp_path`."""

    @pytest.fixture
    def order(self, tmp_path: Path) -> Callable[..., Order]:
        def make(source: str, *arguments: str, **options: object) -> Order:
            path = tmp_path / "script.py"
            path.write_text(textwrap.dedent(source), encoding="utf-8")
            words = (str(path), *arguments)
            chosen = {"variables": {"PYTHONUNBUFFERED": "1"}, "folder": tmp_path, **options}
            return Order(words=words, **chosen)  # type: ignore[arg-type]

        return make

    def test_a_worker_is_placed_prints_and_exits_in_this_order(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order("import sys; print(sys.argv[1]); sys.exit(3)", "hello"))
        events = until_exit(crew, "a")
        kinds = [type(event) for event in events if not isinstance(event, Reported)]
        assert kinds == [Placed, Printed, Exited]
        assert Printed("a", "hello") in events
        assert events[-1] == Exited("a", 3)
        assert "a" not in crew.names

    def test_a_worker_has_the_added_variables_and_the_folder(
        self, crew: Crew, order: Callable[..., Order], tmp_path: Path
    ) -> None:
        source = "import os; print(os.environ['ADDED'], os.getcwd())"
        crew.start("a", order(source, variables={"ADDED": "x"}))
        assert Printed("a", f"x {tmp_path}") in until_exit(crew, "a")

    def test_an_exception_is_reported_before_the_exit(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order("raise ValueError('bad')"))
        *_, report, last = until_exit(crew, "a")
        assert isinstance(report, Reported)
        assert (report.message["kind"], report.message["exception"]) == ("failed", "ValueError")
        assert last == Exited("a", 1)

    def test_sigterm_reaches_the_script_even_if_it_is_stopped(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order(SLEEPS))
        until_printed(crew, "ready")
        crew.signal("a", signal.SIGSTOP)
        crew.signal("a", signal.SIGTERM)
        assert until_exit(crew, "a")[-1] == Exited("a", 7)

    def test_a_stack_is_dumped_when_asked_for(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order(SLEEPS))
        until_printed(crew, "ready")
        crew.signal("a", signal.SIGUSR1)
        wait_until(crew, lambda event: isinstance(event, StackLine) and "script.py" in event.line)

    def test_a_killed_worker_exits_by_the_signal(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order(SLEEPS))
        until_printed(crew, "ready")
        crew.kill("a")
        assert until_exit(crew, "a")[-1] == Exited("a", -signal.SIGKILL)

    def test_a_spare_is_placed_when_its_turn_comes_and_gets_the_variables_then(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        source = "import os; print(os.environ['DEVICE'])"
        crew.start("a", order(source, spare=True, variables=for_child({PRELOAD: ("json",)})))
        before = wait_until(crew, lambda event: isinstance(event, Reported))
        assert not any(isinstance(event, Placed) for event in before)
        crew.its_turn("a", {"DEVICE": "3"})
        events = until_exit(crew, "a")
        assert isinstance(events[0], Placed)
        assert Printed("a", "3") in events

    def test_a_worker_that_cannot_start_is_unplaceable(
        self, crew: Crew, order: Callable[..., Order], tmp_path: Path
    ) -> None:
        crew.start("a", order("", folder=tmp_path / "missing"))
        events = wait_until(crew, lambda event: isinstance(event, Unplaceable))
        assert [type(event) for event in events] == [Unplaceable]
        assert "a" not in crew.names

    def test_two_workers_do_not_mix_their_events(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        wanted = order("import sys; print(sys.argv[1])", "x")
        crew.start("a", wanted)
        crew.start("b", wanted)
        exits = {"a", "b"}
        events: list[CrewEvent] = []
        while exits:
            events += wait_until(crew, lambda event: isinstance(event, Exited))
            exits -= {event.child for event in events if isinstance(event, Exited)}
        for name in ("a", "b"):
            mine = [e for e in events if getattr(e, "child", getattr(e, "worker", "")) == name]
            assert [type(event) for event in mine] == [Placed, Printed, Exited]

    def test_an_unknown_name_is_refused_and_may_be_abandoned(self, crew: Crew) -> None:
        with pytest.raises(NotFoundError):
            crew.signal("x", signal.SIGTERM)
        with pytest.raises(NotFoundError):
            crew.kill("x")
        with pytest.raises(NotFoundError):
            crew.its_turn("x", {})
        crew.abandon("x")

    def test_an_abandoned_worker_is_killed_if_it_can_be_reached(
        self, crew: Crew, order: Callable[..., Order]
    ) -> None:
        crew.start("a", order(SLEEPS))
        events = until_printed(crew, "ready")
        pid = next(event.pid for event in events if isinstance(event, Placed))
        crew.abandon("a")
        limit = time.monotonic() + PATIENCE
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < limit, "the worker still runs"
            crew.poll(0.1)

    def test_a_process_runs_on_the_launchers_machine(self, crew: Crew) -> None:
        command = [sys.executable, "-c", "import os; print(os.getpid())"]
        pid = crew.start_here("coordinator", command, os.environ)
        assert Printed("coordinator", str(pid)) in until_exit(crew, "coordinator")

    def test_wake_ends_a_wait(self, crew: Crew) -> None:
        crew.poll(0.0)
        crew.wake()
        started = time.monotonic()
        crew.poll(PATIENCE)
        assert time.monotonic() < started + PATIENCE

    def test_close_ends_every_worker(self, crew: Crew, order: Callable[..., Order]) -> None:
        crew.start("a", order(SLEEPS))
        events = until_printed(crew, "ready")
        pid = next(event.pid for event in events if isinstance(event, Placed))
        crew.close()
        limit = time.monotonic() + PATIENCE
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < limit, "the worker outlived its crew"
            time.sleep(0.05)
        crew.close()
