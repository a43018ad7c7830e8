"""`tensorforge chaos`: inject random faults into a running job, then check it."""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import Annotated

import typer

from tensorforge.cli._cluster import (
    AsJson,
    Ca,
    Cert,
    Key,
    RunDir,
    TokenFile,
    connect,
    locate,
)
from tensorforge.errors import InvalidInputError
from tensorforge.launch.chaos.storm import Strike, parse_kinds, plan_storm
from tensorforge.wording import counted

app = typer.Typer(help="Inject random faults into a running job, then check it.")


@app.command()
def chaos(
    run_dir: RunDir = None,
    coordinator: Annotated[
        str | None, typer.Option("--coordinator", "-c", help="HOST:PORT of the coordinator.")
    ] = None,
    kinds: Annotated[
        str, typer.Option(help="kill, freeze, leave, join, coordinator-kill; or all.")
    ] = "all",
    rate: Annotated[float, typer.Option(help="Strikes per second, on average.")] = 0.2,
    duration: Annotated[float, typer.Option(help="How many seconds the storm lasts.")] = 30.0,
    freeze_seconds: Annotated[
        float, typer.Option(help="Average seconds that a freeze lasts.")
    ] = 3.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same storm.")] = None,
    settle: Annotated[
        float, typer.Option(help="Seconds for the job to recover, or to end, after the storm.")
    ] = 60.0,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Check the job after it has ended.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan of the storm and do nothing.")
    ] = False,
    token_file: TokenFile = None,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json_output: AsJson = False,
) -> None:
    """Kill, freeze, remove and add workers at random, then check what must hold of every run.

    Only processes on this machine are killed or frozen. Exit code 1: a check failed.
    """
    from tensorforge.launch.chaos.strikes import Job, Storm, StrikeResult, check_job

    chosen = secrets.randbelow(2**31) if seed is None else seed
    plan = plan_storm(
        seed=chosen,
        duration=duration,
        rate=rate,
        kinds=parse_kinds(kinds),
        freeze_seconds=freeze_seconds,
    )
    if dry_run:
        _show_plan(plan.strikes, chosen, json_output=json_output)
        return
    if run_dir is None and coordinator is None:  # never hit a job that the user has not named
        raise InvalidInputError("name the job with --run-dir or --coordinator")
    address, run_dir = locate(coordinator, run_dir)

    def show(strike: StrikeResult) -> None:
        if not json_output:
            victim = strike.victim or "nobody"
            typer.echo(f"{strike.at:7.2f} s  {strike.kind.value:<16} {victim:<12} {strike.note}")

    job = Job(connect(address, token_file, ca, cert, key, run_dir), run_dir)
    try:
        view = job.open()
        if not json_output:
            strikes = counted(len(plan.strikes), "strike")
            members = counted(len(view.workers), "worker")
            typer.echo(f"storm {chosen}: {strikes} in {duration:g} s")
            typer.echo(f"against {members}, generation {view.generation}")
        results = Storm(plan, job, show).run()
        report = check_job(job, settle=settle, until_end=until_end, strikes=results)
    finally:
        job.close()
    if json_output:
        facts = dataclasses.asdict(report) | {"seed": chosen, "survived": report.survived}
        typer.echo(json.dumps(facts, default=lambda kind: kind.value))
    else:
        for verdict in report.verdicts:
            mark = "held  " if verdict.holds else "BROKEN"
            typer.echo(f"{mark}  {verdict.name}: {verdict.detail}")
    if not report.survived:
        raise typer.Exit(1)


def _show_plan(strikes: tuple[Strike, ...], seed: int, *, json_output: bool) -> None:
    if json_output:
        plan = {"seed": seed, "strikes": [dataclasses.asdict(strike) for strike in strikes]}
        typer.echo(json.dumps(plan, default=lambda kind: kind.value))
        return
    typer.echo(f"storm {seed}: {counted(len(strikes), 'strike')}")
    for strike in strikes:
        typer.echo(f"{strike.at:7.2f} s  {strike.kind.value}")
