"""`tensorforge status`: the workers, the last committed step and the rescales of a run."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tensorforge.cli._cluster import AsJson, as_json, member_count, with_client
from tensorforge.elastic.client import CoordinatorClient
from tensorforge.elastic.protocol.cluster_view import ClusterView
from tensorforge.elastic.protocol.rescale_record import RescalePhase, RescaleRecord
from tensorforge.wording import counted

app = typer.Typer(help="Show the workers, the last committed step and the rescales of a run.")

_SHOWN = 8
_WIDTH_FOR_PHASES = 120


@app.command()
@with_client
def status(
    client: CoordinatorClient,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Update until interrupted.")] = False,
    json_output: AsJson = False,
) -> None:
    """Show the cluster. With --watch and --json: one line of JSON for every change."""
    console = Console()
    if not watch:
        view = client.status()
        if json_output:
            typer.echo(as_json(view))
        else:
            console.print(render(view, console.width))
    elif json_output:
        for view in client.watch():
            typer.echo(msgspec.json.encode(view).decode())
    else:
        with Live(console=console, auto_refresh=False) as live:
            for view in client.watch():
                live.update(render(view, console.width), refresh=True)


def render(view: ClusterView, width: int) -> RenderableType:
    """The cluster as text and tables, for a terminal of `width` columns."""
    return Group(_summary(view), _workers(view), _rescales(view.rescales[-_SHOWN:], width))


def _summary(view: ClusterView) -> Text:
    limits = f"{view.min_workers} to {view.max_workers or 'any number'}"
    wanted = "" if view.desired_workers is None else f", {view.desired_workers} wanted"
    members = counted(member_count(view), "worker")
    lines = [
        f"run {view.run_id}: {view.phase}, generation {view.generation}",
        f"{members} ({limits}{wanted}), {len(view.waiting)} waiting",
        _progress(view),
    ]
    if view.ended is not None:
        lines.append(f"{view.ended.outcome}: {view.ended.reason}")
    return Text("\n".join(lines))


def _progress(view: ClusterView) -> str:
    state = view.state
    goal = "" if view.goal is None else f", the goal is {view.goal}"
    if state.step < 0:
        return f"no step yet{goal}"
    batch = counted(state.samples, "sample")
    return (
        f"epoch {state.epoch}, step {state.step} ({batch}){goal}, "
        f"learning rate {state.learning_rate:g}"
    )


def _workers(view: ClusterView) -> Table:
    table = Table("rank", "worker", "address", "status", "step", "last seen", title_justify="left")
    for worker in (*view.workers, *view.waiting):
        rank = "-" if worker.rank < 0 else str(worker.rank)
        step = "-" if worker.committed_step is None else str(worker.committed_step)
        seen = f"{worker.last_seen_ms / 1000:.1f} s ago" if worker.is_connected else "not connected"
        address = worker.address.removesuffix(":0")  # it serves no shards
        table.add_row(rank, Text(worker.id), Text(address), Text(worker.status), step, seen)
    return table


def _rescales(rescales: list[RescaleRecord], width: int) -> Table:
    """The rescales with their reasons and milliseconds; a wide terminal shows each phase."""
    phases = tuple(RescalePhase)
    is_wide = width >= _WIDTH_FOR_PHASES
    table = Table("gen", "workers", "why", *(phase.label for phase in phases if is_wide), "ms")
    for record in rescales:
        times = [record.milliseconds.get(phase) for phase in phases if is_wide]
        shown = [_milliseconds(time) for time in (*times, record.total_ms)]
        sizes = f"{record.old_size} → {record.new_size}"
        table.add_row(str(record.generation), sizes, Text(record.reason), *shown)
    return table


def _milliseconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.1f}"
