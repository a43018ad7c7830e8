"""Drawing the view of a run: all of it for a terminal, single lines for other output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensorforge.launch.display.run_view import Rescale, RunView, WorkerRow
from tensorforge.wording import counted

RESCALES_SHOWN = 6
_BARS = "▁▂▃▄▅▆▇█"
_NOT_A_NUMBER = "!"
_ROOM_FOR_PHASES = 140
_ROOM_FOR_REASONS = 60
_COLOURS = {"training": "green", "standing by": "cyan", "lost": "red", "leaving": "yellow"}


def render(view: RunView, now: float, width: int) -> RenderableType:
    """The complete view, at most `width` columns wide."""
    parts: list[RenderableType] = [_headline(view), Text(step_line(view, now) or "no step yet")]
    if view.losses:
        label = "loss "
        curve = sparkline(list(view.losses), max(10, width - len(label) - 1))
        parts.append(Text.assemble(label, (curve, "magenta")))
    parts.append(_workers(view, now))
    if view.rescales:
        parts.append(_timeline(view, now, width))
    if view.checkpoint is not None:
        state = "complete" if view.checkpoint.complete else "being written"
        parts.append(Text(f"checkpoint of step {view.checkpoint.step}: {state}"))
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
    """The last committed step in one line; `None` before the first."""
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
    """The last rescales, one line each; a narrow terminal shows no phases, a very narrow one no reasons."""
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


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve of `values` in at most `width` characters; each shows the mean of its values.

    Values that are not finite appear as `!` and do not count for the scale.
    """
    if width <= 0 or not values:
        return ""
    columns = _columns(values, min(width, len(values)))
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return _NOT_A_NUMBER * len(columns)
    low, high = min(finite), max(finite)
    return "".join(_bar(value, low, high) for value in columns)


def _columns(values: Sequence[float], width: int) -> list[float]:
    cuts = [len(values) * column // width for column in range(width + 1)]
    return [_mean(values[start:stop]) for start, stop in itertools.pairwise(cuts)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(value / len(values) for value in values) if _finite(values) else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NOT_A_NUMBER
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
    return _BARS[max(0, min(len(_BARS) - 1, round(share * (len(_BARS) - 1))))]
