"""`tensorforge checkpoint runs | latest | gc | restore-plan | rebuild | audit`: commands on the catalog."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.progress import Progress

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointRecord,
    CheckpointState,
    GcPolicy,
    RestoreCriteria,
    RestorePlan,
    RetentionDecision,
    rebuild,
    sweep,
    verify,
)
from tensorforge.catalog.upkeep import without_record
from tensorforge.cli._checkpoint_places import (
    AsJson,
    Catalog,
    Place,
    RunDir,
    Store,
    find_place,
    latest_record,
    require_run,
)
from tensorforge.cli._tables import print_table, table_of
from tensorforge.encoding import encode
from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.storage.blobs import BlobStore

Run = Annotated[str | None, typer.Option("--run", help="Only this run.")]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class _Opened:
    manager: CheckpointManager
    store: BlobStore


@contextlib.contextmanager
def _opened(place: Place, policy: GcPolicy | None = None) -> Iterator[_Opened]:
    with (
        place.opened_store() as store,
        place.opened_catalog(store, policy) as manager,
    ):
        yield _Opened(manager, store)


def runs(
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """List the runs that have checkpoints."""
    with _opened(find_place(store, catalog, run_dir)) as opened:
        found = opened.manager.list_runs()
    if json_output:
        typer.echo(json.dumps([encode(run)["data"] for run in found]))
        return
    table = table_of("run", "checkpoints", "size", "last step", "last saved")
    for run in found:
        table.add_row(
            run.training_run_id,
            str(run.checkpoints),
            readable_size(run.size_bytes),
            str(run.last_step),
            f"{run.last_created_at:%Y-%m-%d %H:%M:%S}",
        )
    print_table(table, "run")


def gc(
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    run: Run = None,
    keep: Annotated[
        int | None, typer.Option(help="How many of the newest to keep of each run.")
    ] = 10,
    max_age: Annotated[
        str | None, typer.Option(help="Delete older ones: 90s, 30m, 12h, 7d.")
    ] = None,
    keep_best: Annotated[int, typer.Option(help="How many of the best by metric to keep.")] = 0,
    metric: Annotated[str, typer.Option(help="The metric of --keep-best.")] = "loss",
    higher_is_better: Annotated[
        bool, typer.Option(help="Of the metric; by default lower is better.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    json_output: AsJson = False,
) -> None:
    """Delete the checkpoints that the limits do not keep, and clean up after crashed saves.

    The newest restorable and the newest verified checkpoint of a run are always kept, and so are the ancestors
    of a kept checkpoint.
    """
    policy = GcPolicy(
        max_checkpoints_per_run=keep,
        max_age_seconds=None if max_age is None else parse_duration(max_age),
        keep_best_n=keep_best,
        metric_key=metric,
        metric_ascending=not higher_is_better,
    )
    place = find_place(store, catalog, run_dir)
    run = run or place.run
    with _opened(place, policy) as opened:
        if not dry_run:
            sweep(opened.manager, opened.store, training_run_id=run)
        decisions = list(opened.manager.retention(training_run_id=run))
        deleted = () if dry_run else opened.manager.gc(training_run_id=run)
        kept = {
            "files_left": [r.checkpoint_id for r in opened.manager.with_files_left(run)],
            "without_record": list(without_record(opened.manager, opened.store)),
        }
    if json_output:
        typer.echo(json.dumps({**_gc_json(decisions, deleted, dry_run=dry_run), **kept}))
        return
    _print_decisions(decisions, deleted, dry_run=dry_run)
    for name in kept["files_left"]:
        typer.echo(f"the files of {name} could not be removed; the next gc tries again")
    for prefix in kept["without_record"]:
        typer.echo(f"{prefix} has no record and is kept; `rebuild` adds the record")


def restore_plan(
    run: Annotated[
        str | None, typer.Argument(help="The run to restore; by default the only one.")
    ] = None,
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    max_step: Annotated[int | None, typer.Option(help="No checkpoint after this step.")] = None,
    max_epoch: Annotated[int | None, typer.Option(help="No checkpoint after this epoch.")] = None,
    prefer_full: Annotated[bool, typer.Option(help="Prefer self-contained checkpoints.")] = False,
    json_output: AsJson = False,
) -> None:
    """Explain which checkpoint a restore would load, why, and how long this would take."""
    place = find_place(store, catalog, run_dir)
    with _opened(place) as opened:
        run = require_run(place, opened.manager, run)
        criteria = RestoreCriteria(
            training_run_id=run, max_step=max_step, max_epoch=max_epoch, prefer_full=prefer_full
        )
        plan = opened.manager.restore_plan(criteria)
    if not plan.candidates:
        raise NotFoundError(f"the catalog {place.catalog} has no checkpoint of run {run!r}")
    if json_output:
        typer.echo(json.dumps(_plan_json(plan)))
    else:
        _print_plan(plan)
    if plan.chosen is None:
        raise typer.Exit(1)


def rebuild_catalog(
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="The run of old checkpoints whose manifests name none."),
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Add every checkpoint of the store to the catalog, from the manifests alone.

    Checkpoints that the catalog has as corrupted are read again; intact ones become complete.
    """
    place = find_place(store, catalog, run_dir)
    with _opened(place) as opened:
        old_run = run or place.run or "default"
        report = rebuild(opened.manager, opened.store, old_run=old_run)
    if json_output:
        typer.echo(json.dumps(encode(report)["data"]))
        return
    typer.echo(
        f"{len(report.adopted)} added, {len(report.corrupted)} added as corrupted, "
        f"{len(report.foreign)} saved without a catalog"
    )
    if report.recovered:
        typer.echo(f"{len(report.recovered)} marked as corrupted are intact and complete again")
    for prefix in report.foreign:
        typer.echo(f"  saved without a catalog: {prefix}")


def audit(
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    run: Run = None,
    json_output: AsJson = False,
) -> None:
    """Read every byte of every complete checkpoint and mark damaged ones; exit 1 if there are any."""
    place = find_place(store, catalog, run_dir)
    with _opened(place) as opened:
        found = _audit(opened, run or place.run, show=not json_output)
    if json_output:
        typer.echo(json.dumps(found))
    else:
        for name, message in found["damaged"].items():
            typer.secho(f"{name}: {message}", fg=typer.colors.RED)
        typer.echo(f"{len(found['intact'])} intact, {len(found['damaged'])} damaged")
    if found["damaged"]:
        raise typer.Exit(1)


def latest(
    run: Annotated[str | None, typer.Argument(help="The run; by default the only one.")] = None,
    store: Store = None,
    catalog: Catalog = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """Print the id of the newest checkpoint that can be restored."""
    place = find_place(store, catalog, run_dir)
    with _opened(place) as opened:
        record = latest_record(place, opened.manager, run)
    if json_output:
        typer.echo(json.dumps(encode(record)["data"]))
    else:
        typer.echo(record.checkpoint_id)


def register(app: typer.Typer) -> None:
    """Add the catalog's commands to `tensorforge checkpoint`."""
    app.command("runs")(runs)
    app.command("latest")(latest)
    app.command("gc")(gc)
    app.command("restore-plan")(restore_plan)
    app.command("rebuild")(rebuild_catalog)
    app.command("audit")(audit)


def parse_duration(text: str) -> float:
    """The seconds of a duration such as `90s`, `30m`, `12h`, `7d`, or of a plain number."""
    number, unit = (text[:-1], _UNITS[text[-1:]]) if text[-1:] in _UNITS else (text, 1.0)
    try:
        return float(number) * unit
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a duration such as 90s, 30m, 12h or 7d") from None


def _audit(opened: _Opened, run: str | None, *, show: bool) -> dict[str, Any]:
    names = [each.training_run_id for each in opened.manager.list_runs()] if run is None else [run]
    ids = [
        record.checkpoint_id
        for name in names
        for record in opened.manager.list_for_run(name)
        if record.state is CheckpointState.COMPLETE
    ]
    intact: list[str] = []
    damaged: dict[str, str] = {}
    with Progress(disable=not show, transient=True) as bar:
        for number, checkpoint_id in enumerate(ids, 1):
            record = opened.manager.get(checkpoint_id)
            if record is None or record.state is not CheckpointState.COMPLETE:
                damaged[checkpoint_id] = "one of its ancestors is damaged"
                continue
            task = bar.add_task(f"{number} of {len(ids)}", total=None)
            report = verify(
                opened.manager,
                opened.store,
                checkpoint_id,
                lambda done, total, task=task: bar.update(task, completed=done, total=total),  # type: ignore[misc]  # bound early
            )
            bar.remove_task(task)
            if report.is_valid:
                intact.append(checkpoint_id)
            else:
                damaged[checkpoint_id] = report.errors[0].message
    return {"intact": intact, "damaged": damaged}


def _print_decisions(
    decisions: Sequence[RetentionDecision], deleted: Sequence[str], *, dry_run: bool
) -> None:
    table = table_of("", "run", "checkpoint", "step", "size", "why")
    for decision in decisions:
        record = decision.record
        mark = "[green]keep[/]" if decision.keep else "[red]delete[/]"
        why = "; ".join(decision.reasons)
        table.add_row(mark, record.training_run_id, *_columns(record), why)
    print_table(table, "run", "checkpoint")
    freed = sum(d.record.size_bytes for d in decisions if not d.keep)
    count = sum(not d.keep for d in decisions) if dry_run else len(deleted)
    typer.echo(f"{'would delete' if dry_run else 'deleted'} {count}, {readable_size(freed)}")


def _gc_json(
    decisions: Sequence[RetentionDecision], deleted: Sequence[str], *, dry_run: bool
) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "deleted": list(deleted),
        "decisions": [
            {
                "checkpoint_id": decision.checkpoint_id,
                "training_run_id": decision.record.training_run_id,
                "step": decision.record.step,
                "size_bytes": decision.record.size_bytes,
                "keep": decision.keep,
                "reasons": list(decision.reasons),
            }
            for decision in decisions
        ],
    }


def _print_plan(plan: RestorePlan) -> None:
    table = table_of("", "checkpoint", "step", "size", "type", "chain", "to read", "why")
    for candidate in plan.candidates:
        record = candidate.record
        is_chosen = candidate is plan.chosen
        why = candidate.score.refusal or (
            "the best score" if is_chosen else _why_not_chosen(plan, record)
        )
        table.add_row(
            "→" if is_chosen else "",
            *_columns(record),
            record.checkpoint_type.value,
            str(len(candidate.chain) or "-"),
            readable_size(candidate.bytes_to_read),
            why,
        )
    print_table(table, "checkpoint")
    if plan.chosen is None:
        typer.secho("no checkpoint qualifies", fg=typer.colors.RED)
        return
    names = " → ".join(record.checkpoint_id for record in plan.chosen.chain)
    typer.echo(f"restore {names}")
    if plan.rates is None:
        typer.echo("no estimate of the duration: no restore was measured yet")
    else:
        typer.echo(
            f"about {(plan.estimated_ms or 0) / 1000:.1f} s, from {plan.rates.measurements} "
            f"measured restores at {plan.rates.bytes_per_ms / 1e3:.0f} MB/s"
        )


def _why_not_chosen(plan: RestorePlan, record: CheckpointRecord) -> str:
    chosen = plan.chosen
    if chosen is None:
        return ""
    if plan.criteria.prefer_full and chosen.record.is_self_contained != record.is_self_contained:
        return "it is not self-contained"
    if record.step < chosen.record.step:
        return f"{chosen.record.step - record.step} steps older"
    return "a longer chain, or older, at the same step"


def _plan_json(plan: RestorePlan) -> dict[str, Any]:
    chosen = plan.chosen
    return {
        "chosen": None if chosen is None else chosen.record.checkpoint_id,
        "chain": [] if chosen is None else [record.checkpoint_id for record in chosen.chain],
        "bytes_to_read": 0 if chosen is None else chosen.bytes_to_read,
        "estimated_ms": plan.estimated_ms,
        "rates": None if plan.rates is None else encode(plan.rates)["data"],
        "candidates": [
            {
                "checkpoint_id": candidate.record.checkpoint_id,
                "step": candidate.record.step,
                "type": candidate.record.checkpoint_type.value,
                "chain_length": len(candidate.chain),
                "refusal": candidate.score.refusal or None,
                "score": {
                    "completeness": candidate.score.completeness,
                    "type_preference": candidate.score.type_preference,
                    "recency": candidate.score.recency,
                    "chain": candidate.score.chain,
                },
            }
            for candidate in plan.candidates
        ],
    }


def _columns(record: CheckpointRecord) -> tuple[str, str, str]:
    return record.checkpoint_id, str(record.step), readable_size(record.size_bytes)


def readable_size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
