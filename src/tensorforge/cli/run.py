"""`tensorforge run`: train a script on local workers whose number may change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tensorforge.cluster.elastic_config import (
    AdaptationStrategy,
    ElasticTrainingConfig,
    RedistributionType,
)
from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.launch.launch_settings import LaunchSettings
from tensorforge.launch.supervisor.instructions import Outcome
from tensorforge.launch.supervisor.supervision_policy import SupervisionPolicy

_SIGNALLED = 128


class LrAdaptation(StrEnum):
    """The values of `--lr-adaptation`: those of `AdaptationStrategy`."""

    NONE = "none"
    LINEAR = "linear"
    SQUARE_ROOT = "square_root"


class Redistribution(StrEnum):
    """The values of `--redistribution`."""

    FULL = "full"
    INCREMENTAL = "incremental"


_REDISTRIBUTIONS = {
    Redistribution.FULL: RedistributionType.FULL_RESHUFFLE,
    Redistribution.INCREMENTAL: RedistributionType.INCREMENTAL,
}

ScriptArguments = Annotated[
    list[str] | None, typer.Argument(help="Passed to the script unchanged.")
]
AsModule = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module.")]

app = typer.Typer(help="Train a script on local workers whose number may change.")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def run(
    script: Annotated[str, typer.Argument(help="The training script, or a module with -m.")],
    arguments: ScriptArguments = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many at the start.")] = 1,
    min_workers: Annotated[int, typer.Option(help="Training pauses with fewer workers.")] = 1,
    max_workers: Annotated[int | None, typer.Option(help="The limit of `scale`.")] = None,
    standbys: Annotated[
        int, typer.Option(help="Additional connected workers, to replace one that fails.")
    ] = 0,
    spares: Annotated[
        int,
        typer.Option(help="Waiting processes with the heavy imports done, for the next workers."),
    ] = 1,
    gpus_per_worker: Annotated[
        int, typer.Option(help="How many GPUs of its own each worker sees; 0: all see all.")
    ] = 0,
    module: AsModule = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="The run's folder; name that of an interrupted run to continue it."),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How many failed workers are replaced…")] = 10,
    max_host_failures: Annotated[
        int, typer.Option(help="How many workers are replaced that found no place or vanished…")
    ] = 20,
    restart_window: Annotated[float, typer.Option(help="…within this many seconds.")] = 3600.0,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds without progress that count as a hang; 0: never.")
    ] = 300.0,
    join_timeout: Annotated[
        float, typer.Option(help="Seconds within which a worker must join; 0: no limit.")
    ] = 300.0,
    stop_timeout: Annotated[
        float, typer.Option(help="Seconds that a graceful stop may take.")
    ] = 30.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a worker counts as lost.")
    ] = 10.0,
    stability_window: Annotated[
        float, typer.Option(help="Seconds without a change before new workers are admitted.")
    ] = 1.0,
    rescale_timeout: Annotated[
        float, typer.Option(help="Seconds that a rescale, or a pause, may take.")
    ] = 30.0,
    failure_tolerance: Annotated[
        int, typer.Option(help="The percentage of workers that may be lost between two steps.")
    ] = 50,
    max_failures: Annotated[
        int, typer.Option(help="How many failures in a row, without a step between, end the run.")
    ] = 3,
    lr_adaptation: Annotated[
        LrAdaptation,
        typer.Option(
            help="How batch and learning rate follow the number of workers; none is exact."
        ),
    ] = LrAdaptation.NONE,
    redistribution: Annotated[
        Redistribution, typer.Option(help="How local shards are divided again after a change.")
    ] = Redistribution.FULL,
    synchronous_rescaling: Annotated[
        bool, typer.Option(help="Wait for training code at each barrier; `Run` always does.")
    ] = True,
    parallel_transfer: Annotated[bool, typer.Option(help="Move several shards at a time.")] = True,
    host: Annotated[str, typer.Option(help="Where the coordinator listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The coordinator's port; 0 picks a free one.")] = 0,
    dashboard: Annotated[
        int | None,
        typer.Option(
            help="Serve pages that show this run, on this port (0: a free one).", min=0, max=65535
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, no live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """Train SCRIPT; the script's own options come after its name.

    Workers that die or hang are replaced. Interrupt once to stop after the current step with a checkpoint,
    twice to stop at once. Exit code 0: the goal is reached; 75: stopped before that, and can be continued;
    1: training failed; 130: interrupted.
    """
    from tensorforge.launch.display.displays import choose_display
    from tensorforge.launch.launcher import Launcher

    settings = LaunchSettings(
        script=script,
        arguments=tuple(script_arguments(arguments)),
        as_module=module,
        run_dir=run_dir or default_run_dir(script),
        host=host,
        port=port,
        spares=spares,
        gpus_per_worker=gpus_per_worker,
        config=ElasticTrainingConfig(
            min_workers=min_workers,
            max_workers=max_workers,
            rescale_timeout_ms=round(rescale_timeout * 1000),
            max_consecutive_failures=max_failures,
            stability_window_ms=round(stability_window * 1000),
            worker_heartbeat_timeout_ms=round(heartbeat_timeout * 1000),
            failure_tolerance_percentage=failure_tolerance,
            lr_adaptation_strategy=AdaptationStrategy(lr_adaptation.value),
            redistribution_type=_REDISTRIBUTIONS[redistribution],
            use_synchronous_rescaling=synchronous_rescaling,
            use_parallel_data_transfer=parallel_transfer,
        ),
        policy=SupervisionPolicy(
            workers=workers,
            min_workers=min_workers,
            max_workers=max_workers,
            standbys=standbys,
            max_restarts=max_restarts,
            max_host_failures=max_host_failures,
            restart_window=restart_window,
            hang_timeout=hang_timeout or None,
            join_timeout=join_timeout or None,
            stop_timeout=stop_timeout,
            lost_timeout=max(heartbeat_timeout, 5.0),
        ),
    )
    started = time.monotonic()
    if not as_json:
        typer.echo(f"tensorforge: run folder {settings.run_dir}")
    with _dashboard(settings.run_dir, dashboard, as_json=as_json):
        outcome = Launcher(settings, choose_display(as_json=as_json, plain=plain)).run()
    try:
        show_outcome(outcome, settings.run_dir, time.monotonic() - started, as_json=as_json)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:  # the reader of the output is gone; the exit code remains
        _discard_output()
    raise typer.Exit(outcome.code)


@contextlib.contextmanager
def _dashboard(folder: Path, port: int | None, *, as_json: bool) -> Iterator[None]:
    """A process that serves the pages of this run while the block runs; nothing without a port."""
    if port is None:
        yield
        return
    from tensorforge.dashboard.dashboard_server import beside_run

    with beside_run(folder, port) as (url, token):
        if as_json:
            typer.echo(json.dumps({"event": "dashboard", "url": url, "token": token}))
        else:
            typer.echo(f"tensorforge: dashboard {url}/sign-in#{token}")
        yield


def _discard_output() -> None:
    """Send standard output to /dev/null, so that flushing it at exit cannot fail and change the exit code."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def script_arguments(words: list[str] | None) -> list[str]:
    """The arguments for the script, without a leading `--`."""
    given = list(words or ())
    return given[1:] if given[:1] == ["--"] else given


def default_run_dir(script: str) -> Path:
    """A new folder under `runs`, named after the script and the time."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{Path(script).stem}-{now}"


def show_outcome(outcome: Outcome, folder: Path, seconds: float, *, as_json: bool) -> None:
    """Print the outcome; after a failure, also the worker's traceback."""
    if as_json:
        facts = {"event": "outcome", **dataclasses.asdict(outcome), "run_dir": str(folder)}
        typer.echo(json.dumps({**facts, "seconds": round(seconds, 3)}))
    if outcome.code == 0:
        if not as_json:
            typer.echo(f"tensorforge: {outcome.reason} ({seconds:.1f} s); logs in {folder}")
        return
    if outcome.code == EXIT_UNFINISHED or outcome.code > _SIGNALLED:
        again = f"launch with --run-dir {folder} to continue from the newest checkpoint"
        typer.echo(f"tensorforge: {outcome.reason} ({seconds:.1f} s); {again}", err=True)
        return
    failure = outcome.failure
    if failure is not None and failure.traceback_shown:
        typer.echo(f"the traceback of {outcome.worker}:\n{failure.traceback_shown}", err=True)
    typer.secho(f"error: {outcome.reason}", err=True, fg=typer.colors.RED)
    typer.echo(f"logs: {folder / 'logs'}", err=True)
