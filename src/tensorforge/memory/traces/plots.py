"""Plots of a replay: bytes over time, and the offsets of every block."""

from __future__ import annotations

import base64
import html
import io
from collections import Counter
from pathlib import Path
from typing import Any

from tensorforge.errors import InvalidInputError, UnavailableError
from tensorforge.memory.traces.replay import Replay
from tensorforge.memory.traces.trace import AllocationTrace

_LABELS_SHOWN = 9
_OTHER = "other"
_MIB = 1 << 20


def save_plot(trace: AllocationTrace, result: Replay, path: str | Path) -> None:
    """Draw a replay into a `.png`, `.svg` or `.html` file."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "html"):
        raise InvalidInputError(f"{path.name}: a plot is written as .png, .svg or .html")
    figure = _figure(trace, result)
    if kind == "html":
        path.write_text(_page(trace, result, _image(figure)), encoding="utf-8")
    else:
        figure.savefig(path, format=kind)


def _figure(trace: AllocationTrace, result: Replay) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError("plots need matplotlib: pip install 'tensorforge[plot]'") from error
    figure = Figure(figsize=(14, 9), dpi=110, layout="constrained")
    over_time, block_map = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    _draw_over_time(over_time, trace, result)
    _draw_block_map(block_map, trace, result)
    figure.suptitle(
        f"{trace.name}, {result.policy}: {result.peak_reserved / _MIB:.1f} MiB needed, "
        f"{result.peak_live / _MIB:.1f} MiB in use at most (ratio {result.overhead:.3f})"
    )
    return figure


def _draw_over_time(axes: Any, trace: AllocationTrace, result: Replay) -> None:
    times = [event.time for event in trace.events]
    reserved = [nbytes / _MIB for nbytes in result.reserved]
    live = [nbytes / _MIB for nbytes in trace.live_bytes()]
    axes.step(times, reserved, where="post", color="tab:red", label="needed so far")
    axes.fill_between(times, live, step="post", color="tab:blue", alpha=0.6, label="in use")
    axes.set_ylabel("MiB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def _draw_block_map(axes: Any, trace: AllocationTrace, result: Replay) -> None:
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[list[tuple[float, float]]]] = {}
    shown = _common_labels(trace)
    last = trace.events[-1].time if trace.events else 0.0
    for life in trace.lifetimes():
        left = trace.events[life.start].time
        right = trace.events[life.stop].time if life.stop < len(trace) else last
        low = result.position(life.block) / _MIB
        high = low + life.size / _MIB
        label = life.label if life.label in shown else _OTHER
        box = [(left, low), (right, low), (right, high), (left, high)]
        boxes.setdefault(label, []).append(box)
    palette = colormaps["tab10"]
    for index, label in enumerate([*shown, _OTHER]):
        if label in boxes:
            color = palette(index % 10)
            axes.add_collection(PolyCollection(boxes[label], facecolors=[color], label=label[:48]))
    axes.set_xlim(0, last or 1)
    axes.set_ylim(0, max(1, result.peak_reserved) / _MIB)
    axes.set_xlabel("seconds")
    axes.set_ylabel("offset, MiB")
    if boxes:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", title="allocated in")


def _common_labels(trace: AllocationTrace) -> list[str]:
    """The labels whose blocks cover the largest area of the plot (bytes times events)."""
    weight: Counter[str] = Counter()
    for life in trace.lifetimes():
        weight[life.label] += life.size * (life.stop - life.start)
    return [label for label, _ in weight.most_common(_LABELS_SHOWN) if label]


def _image(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _page(trace: AllocationTrace, result: Replay, image: str) -> str:
    rows = {
        "events": f"{len(trace):,}",
        "allocations": f"{trace.allocations:,}",
        "duration": f"{trace.duration:.3f} s",
        "policy": result.policy,
        "in use at most": f"{result.peak_live:,} bytes",
        "needed": f"{result.peak_reserved:,} bytes",
        "needed over in use": f"{result.overhead:.4f}",
    }
    table = "".join(f"<tr><th>{html.escape(k)}<td>{html.escape(v)}" for k, v in rows.items())
    title = html.escape(f"Memory of {trace.name}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px system-ui;margin:2rem}th{text-align:left;padding-right:2rem}"
        "img{max-width:100%}</style>"
        f'<h1>{title}</h1><table>{table}</table><img alt="memory over time and block map" '
        f'src="data:image/png;base64,{image}"></html>'
    )
