"""The live view as text: for a terminal (rich) and as single lines for everywhere else."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tensorforge.launch.display.run_view import Rescale, RunView, WorkerRow
from tensorforge.launch.display.sparkline import sparkline
from tensorforge.wording import counted

RESCALES_SHOWN = 6
_ROOM_FOR_PHASES = 140
_ROOM_FOR_REASONS = 60
_COLOURS = {"training": "green", "standing by": "cyan", "lost": "red", "leaving": "yellow"}


def render(view: RunView, now: float, width: int) -> RenderableType:
    """The whole view, at most `width` columns wide."""
    parts: list[RenderableType] = [_headline(view), Text(step_line(view, now) or "no step yet")]
    if view.losses:
        label = "loss "
        curve = sparkline(list(view.losses), max(10, width - len(label) - 1))
        parts.append(Text.assemble(label, (curve, "magenta")))
    parts.append(_workers(view, now))
    if view.rescales:
        parts.append(_timeline(view, now, width))
    if view.checkpoint is not None:
        parts.append(_checkpoint(view, width))
    return Group(*parts)


def _headline(view: RunView) -> Text:
    taking_part = sum(row.state == "training" for row in view.workers.values())
    return Text.assemble(
        ("tensorforge ", "bold"),
        f"{view.phase} · ",
        f"generation {'–' if view.generation is None else view.generation} · ",  # noqa: RUF001
        f"{taking_part} of {view.target} workers · coordinator {view.coordinator}",
    )


def step_line(view: RunView, now: float) -> str | None:
    """Where training stands, in one line; `None` before the first step."""
    if view.step is None:
        return None
    parts = [f"step {view.step}", f"epoch {view.epoch}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    rate = view.samples_per_second(now)
    if rate is not None:
        parts.append(f"{rate:,.0f} samples/s")
    if view.learning_rate is not None:
        parts.append(f"learning rate {view.learning_rate:.3g}")
    return "  ".join(parts)


def _workers(view: RunView, now: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in view.workers.values():
        colour = "red" if row.gone and row.state != "ended" else _COLOURS.get(row.state, "")
        table.add_row(
            Text(row.name), Text(_where(row)), Text(row.state, colour), _age(now - row.since)
        )
    return table


def _where(row: WorkerRow) -> str:
    return "elsewhere" if row.pid is None else f"pid {row.pid}"


def _age(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(int(seconds), 60)
    return (
        f"{minutes} min {seconds:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60} min"
    )


def _timeline(view: RunView, now: float, width: int) -> Table:
    """The last rescales, a line each; what is worth least goes first where there is no room."""
    table = Table.grid(padding=(0, 2))
    generation = "generation" if width >= _ROOM_FOR_REASONS else "gen"
    for rescale in list(view.rescales)[-RESCALES_SHOWN:]:
        line = [
            Text(f"{_age(now - rescale.at)} ago", no_wrap=True),
            Text(f"{generation} {rescale.generation}", no_wrap=True),
            Text(counted(rescale.size, "worker"), no_wrap=True),
            Text(f"{rescale.total:.0f} ms", "bold", no_wrap=True),
        ]
        if width >= _ROOM_FOR_PHASES:
            line.append(Text(_phases(rescale), no_wrap=True, overflow="ellipsis"))
        if width >= _ROOM_FOR_REASONS:
            line.append(Text(rescale.reason, no_wrap=True, overflow="ellipsis"))
        table.add_row(*line)
    return table


def _phases(rescale: Rescale) -> str:
    return ", ".join(f"{name} {time:.0f}" for name, time in rescale.phases)


def rescale_line(rescale: Rescale) -> str:
    """A rescale in one line."""
    text = f"generation {rescale.generation}: {counted(rescale.size, 'worker')}"
    if rescale.reason:
        text += f" ({rescale.reason})"
    return text


def timing_line(rescale: Rescale) -> str:
    """How long a rescale took, in one line."""
    parts = f" ({_phases(rescale)})" if rescale.phases else ""
    again = " again" if rescale.generation > 1 else ""
    return f"generation {rescale.generation}: training{again} after {rescale.total:.0f} ms{parts}"


def _checkpoint(view: RunView, width: int) -> RenderableType:
    checkpoint = view.checkpoint
    if checkpoint is None:
        return Text("")
    if checkpoint.complete or checkpoint.share is None:
        state = "complete" if checkpoint.complete else "being written"
        return Text(f"checkpoint of step {checkpoint.step}: {state}")
    label = Text(f"checkpoint of step {checkpoint.step} ")
    bar = ProgressBar(total=1.0, completed=checkpoint.share, width=max(10, width - len(label) - 2))
    table = Table.grid()
    table.add_row(label, bar)
    return table
