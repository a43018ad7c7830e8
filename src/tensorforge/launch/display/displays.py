"""The displays of a run: a live view for terminals, plain lines for files, JSON lines for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.encoding import Json
from tensorforge.launch.display.render import render, rescale_line, step_line, timing_line
from tensorforge.launch.display.run_view import RunView
from tensorforge.launch.processes.output_lines import clean
from tensorforge.launch.supervisor.events import Event, GenerationFormed, Tick
from tensorforge.launch.supervisor.instructions import Level, Say

STEP_LINE_SECONDS = 5.0
REFRESH_SECONDS = 0.25
_PALETTE = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")
_LEVELS = {Level.INFO: "", Level.WARNING: "yellow", Level.ERROR: "red"}


class Display(Protocol):
    """Shows a run. The launcher applies an event to the view before it calls `event`."""

    def printed(self, worker: str, line: str) -> None:
        """Show a line of a worker's output."""
        ...

    def say(self, notice: Say) -> None:
        """Show a notice of the supervisor."""
        ...

    def event(self, event: Event, view: RunView, now: float) -> None:
        """Show an event."""
        ...

    def refresh(self, view: RunView, now: float) -> None:
        """Draw again if it is time; called in each turn of the launcher's loop."""
        ...

    def close(self) -> None:
        """Show the last state and release the terminal."""
        ...


class PlainDisplay:
    """Writes lines, each with its source in front."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._step_shown_at: float | None = None
        self._formed = -1
        self._timed = -1

    def printed(self, worker: str, line: str) -> None:
        """Show a line of a worker's output."""
        self._write(f"[{worker}] {clean(line, colour=False)}")

    def say(self, notice: Say) -> None:
        """Show a notice of the supervisor."""
        mark = "" if notice.level is Level.INFO else f"{notice.level.value}: "
        self._write(f"tensorforge: {mark}{notice.text}")
        for line in notice.detail.splitlines():
            self.printed(notice.worker or "tensorforge", line)

    def event(self, event: Event, view: RunView, now: float) -> None:
        """Show a rescale at once, and a step every few seconds."""
        if isinstance(event, GenerationFormed) and view.rescales:
            self._rescaled(view)
        elif isinstance(event, CommittedStep):
            shown = self._step_shown_at
            if shown is None or now >= shown + STEP_LINE_SECONDS:
                self._step_shown_at = now
                self._write(f"tensorforge: {step_line(view, now)}")

    def _rescaled(self, view: RunView) -> None:
        rescale = view.rescales[-1]
        if rescale.generation > self._formed:
            self._formed = rescale.generation
            self._write(f"tensorforge: {rescale_line(rescale)}")
        if rescale.generation > self._timed and any(n == "first commit" for n, _ in rescale.phases):
            self._timed = rescale.generation
            self._write(f"tensorforge: {timing_line(rescale)}")

    def refresh(self, view: RunView, now: float) -> None:
        """Do nothing: lines do not change."""

    def close(self) -> None:
        """Do nothing: the stream stays open."""

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveDisplay:
    """Keeps the view at the bottom of the terminal while the output scrolls above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        self._drawn_at: float | None = None
        self._newest: tuple[RunView, float] | None = None

    def printed(self, worker: str, line: str) -> None:
        """Show a line of a worker's output, with the worker's name in its colour."""
        prefix = Text(f"[{worker}] ", _colour(worker))
        self._console.print(prefix + Text.from_ansi(clean(line, colour=True)), soft_wrap=True)

    def say(self, notice: Say) -> None:
        """Show a notice of the supervisor."""
        self._console.print(Text(f"tensorforge: {notice.text}", _LEVELS[notice.level]))
        for line in notice.detail.splitlines():
            self.printed(notice.worker or "tensorforge", line)

    def event(self, event: Event, view: RunView, now: float) -> None:  # noqa: ARG002  one protocol for all
        """Remember the view for `refresh` and `close`."""
        self._newest = (view, now)

    def refresh(self, view: RunView, now: float) -> None:
        """Draw the view again, at most a few times per second."""
        if self._drawn_at is None or now >= self._drawn_at + REFRESH_SECONDS:
            self._drawn_at = now
            self._live.update(render(view, now, self._console.width), refresh=True)

    def close(self) -> None:
        """Leave the last view on the screen and release the terminal."""
        if self._newest is not None:
            self._live.update(render(*self._newest, self._console.width), refresh=True)
        self._live.stop()


class JsonDisplay:
    """Writes one JSON object per line, for programs."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout

    def printed(self, worker: str, line: str) -> None:
        """Show a line of a worker's output."""
        self._write({"event": "log", "worker": worker, "line": line})

    def say(self, notice: Say) -> None:
        """Show a notice of the supervisor."""
        facts: dict[str, Json] = {"event": "notice", "level": notice.level.value}
        self._write(
            {**facts, "text": notice.text, "worker": notice.worker, "detail": notice.detail}
        )

    def event(self, event: Event, view: RunView, now: float) -> None:  # noqa: ARG002  one protocol for all
        """Write every event except `Tick`."""
        if isinstance(event, CommittedStep):
            self._committed(event, view.samples)
        elif not isinstance(event, Tick):
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
            self._write({"event": name, **dataclasses.asdict(event)})

    def _committed(self, step: CommittedStep, samples: int) -> None:
        self._write(
            {
                "event": "step_committed",
                "step": step.step,
                "epoch": step.epoch,
                "samples": samples,
                "loss": _finite(step.loss),
                "learning_rate": _finite(step.learning_rate),
            }
        )

    def refresh(self, view: RunView, now: float) -> None:
        """Do nothing: lines do not change."""

    def close(self) -> None:
        """Do nothing: the stream stays open."""

    def _write(self, value: dict[str, Json]) -> None:
        self._stream.write(json.dumps(value) + "\n")
        self._stream.flush()


def _finite(value: float | None) -> float | None:
    """JSON cannot express NaN or infinity; they are written as null."""
    return value if value is not None and math.isfinite(value) else None


def _colour(worker: str) -> str:
    number = worker.rpartition("-")[2]
    return _PALETTE[int(number) % len(_PALETTE)] if number.isdecimal() else "white"


class FailsafeDisplay:
    """Passes everything on to another display until writing fails, and discards everything afterwards.

    A closed terminal must not end training: it sends SIGHUP, which the launcher handles, unless the user
    had SIGHUP ignored. `is_pipe_broken`: writing failed because the reader of a pipe closed it, as `head` does.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._is_silent = False
        self.is_pipe_broken = False

    def printed(self, worker: str, line: str) -> None:
        """Show a line of a worker's output."""
        self._attempt(lambda: self._display.printed(worker, line))

    def say(self, notice: Say) -> None:
        """Show a notice of the supervisor."""
        self._attempt(lambda: self._display.say(notice))

    def event(self, event: Event, view: RunView, now: float) -> None:
        """Show an event."""
        self._attempt(lambda: self._display.event(event, view, now))

    def refresh(self, view: RunView, now: float) -> None:
        """Draw again if it is time."""
        self._attempt(lambda: self._display.refresh(view, now))

    def close(self) -> None:
        """Close the other display."""
        self._attempt(self._display.close)

    def _attempt(self, show: Callable[[], None]) -> None:
        if self._is_silent:
            return
        try:
            show()
        except OSError as error:
            self._is_silent = True
            self.is_pipe_broken = isinstance(error, BrokenPipeError)


def choose_display(*, as_json: bool, plain: bool = False) -> Display:
    """JSON if `as_json`, the live view on a terminal that can move its cursor, plain lines otherwise."""
    if as_json:
        return JsonDisplay()
    if plain or not sys.stdout.isatty():
        return PlainDisplay()
    console = Console()
    return PlainDisplay() if console.is_dumb_terminal else LiveDisplay(console)
