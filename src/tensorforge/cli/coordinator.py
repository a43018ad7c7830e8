"""`tensorforge coordinator`: coordinate the workers of a run."""

from __future__ import annotations

import gc
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tensorforge.cli._cluster import AsJson, Ca, Cert, Key, tls_options
from tensorforge.cli._journal_commands import journal_commands
from tensorforge.cluster.elastic_config import ElasticTrainingConfig
from tensorforge.cluster.ended_runs import EXIT_UNFINISHED
from tensorforge.errors import InvalidInputError
from tensorforge.security import TokenStore

app = typer.Typer(help="Coordinate a run: admit workers, detect failures, decide rescales.")
app.add_typer(journal_commands, name="journal")

EXIT_ABORTED = 3
_SERVE_AFTER_END_SECONDS = 1.0
"""How long the coordinator serves after the end of the run, so that the workers learn of it."""


def _config(text: str | None, options: dict[str, int | None]) -> ElasticTrainingConfig:
    given: dict[str, object] = {}
    if text is not None:
        path = Path(text)
        source = path.read_text() if not text.lstrip().startswith("{") and path.is_file() else text
        try:
            given = msgspec.json.decode(source, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise InvalidInputError(f"--config: neither JSON nor a file: {error}") from error
        if set(given) == {"type", "version", "data"}:
            given = msgspec.convert(given["data"], dict[str, object])
    given |= {name: value for name, value in options.items() if value is not None}
    unknown = sorted(set(given) - set(ElasticTrainingConfig.__dataclass_fields__))
    if unknown:
        raise InvalidInputError(f"--config: no such option: {', '.join(unknown)}")
    try:
        return msgspec.convert(given, ElasticTrainingConfig)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"--config: {error}") from error


@app.callback(invoke_without_command=True)
def coordinator(
    context: typer.Context,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 picks a free one.")] = 29_400,
    journal: Annotated[
        str, typer.Option(help="Path or URL of the metadata database.")
    ] = "tensorforge-run/meta.db",
    run: Annotated[str, typer.Option(help="The run's name in the journal.")] = "default",
    workers: Annotated[int | None, typer.Option(help="The target number of workers.")] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="Training pauses with fewer workers.")
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(help="The highest number that `scale` accepts.")
    ] = None,
    rescale_timeout_ms: Annotated[
        int | None, typer.Option(help="The longest time of a rescale or a pause.")
    ] = None,
    max_consecutive_failures: Annotated[
        int | None,
        typer.Option(help="How many failures in a row, without a step between, end the run."),
    ] = None,
    stability_window_ms: Annotated[
        int | None, typer.Option(help="Time without a change before new workers are admitted.")
    ] = None,
    worker_heartbeat_timeout_ms: Annotated[
        int | None,
        typer.Option(help="Time without a heartbeat after which a worker counts as lost."),
    ] = None,
    failure_tolerance_percentage: Annotated[
        int | None,
        typer.Option(help="The percentage of workers that may be lost between two steps."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="All options as JSON, or a file with it.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics for Prometheus, and /healthz.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The token for every role; the file is made if it is missing."),
    ] = None,
    join_token_file: Annotated[
        Path | None, typer.Option(help="A token that allows joining only; made if it is missing.")
    ] = None,
    observe_token_file: Annotated[
        Path | None, typer.Option(help="A token that allows observing only; made if it is missing.")
    ] = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    again: Annotated[bool, typer.Option("--again", help="Continue a run that has ended.")] = False,
    lease_wait: Annotated[
        float,
        typer.Option(help="How many seconds to wait for another coordinator's lease to expire."),
    ] = 30.0,
    json_output: AsJson = False,
) -> None:
    """Coordinate a run until it ends. Started again on the same journal, it continues the run.

    Exit code 0: the run completed, or a signal stopped the coordinator; 75: the run was stopped before its
    goal was reached; 3: the run was aborted; 1: an error.
    """
    if context.invoked_subcommand is not None:
        return
    from tensorforge.elastic.coordinator.coordinator import ElasticCoordinator

    options = {
        "min_workers": min_workers,
        "max_workers": max_workers,
        "rescale_timeout_ms": rescale_timeout_ms,
        "max_consecutive_failures": max_consecutive_failures,
        "stability_window_ms": stability_window_ms,
        "worker_heartbeat_timeout_ms": worker_heartbeat_timeout_ms,
        "failure_tolerance_percentage": failure_tolerance_percentage,
    }
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    server = ElasticCoordinator(
        _config(config, options),
        host=host,
        port=port,
        database=journal,
        run_id=run,
        desired_workers=workers,
        tokens=_tokens(token_file, join_token_file, observe_token_file),
        tls=tls_options(ca, cert, key),
        metrics_port=metrics_port,
        resume=again,
        lease_wait=lease_wait,
    )
    asked_to_stop = threading.Event()
    gc.freeze()  # a full collection need not visit imported modules while workers wait
    with server:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: asked_to_stop.set())
        where = {"address": server.address, "metrics": server.metrics_address, "run": run}
        text = f"The coordinator of run {run!r} serves at {server.address}"
        typer.echo(json.dumps(where) if json_output else text)
        sys.stdout.flush()
        outcome = None
        while outcome is None and not asked_to_stop.is_set():
            outcome = server.wait_until_ended(0.1)
        if outcome is not None:
            asked_to_stop.wait(_SERVE_AFTER_END_SECONDS)
    if outcome is None:
        return
    ended = {"outcome": outcome.outcome, "reason": outcome.reason}
    text = f"The run {outcome.outcome}: {outcome.reason}"
    typer.echo(json.dumps(ended) if json_output else text)
    if outcome.outcome == "aborted":
        raise typer.Exit(EXIT_ABORTED)
    if outcome.outcome == "stopped":
        raise typer.Exit(EXIT_UNFINISHED)


def _tokens(job: Path | None, join: Path | None, observe: Path | None) -> TokenStore | None:
    from tensorforge.elastic.protocol import access
    from tensorforge.elastic.protocol.token_files import load_or_issue

    wanted = [
        (job, "job", access.ROLES),
        (join, "join", (access.JOIN,)),
        (observe, "observe", (access.OBSERVE,)),
    ]
    if not any(path for path, _, _ in wanted):
        return None
    store = TokenStore()
    for path, name, roles in wanted:
        if path is not None:
            load_or_issue(store, path, name, roles)
    return store
