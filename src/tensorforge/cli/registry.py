"""`tensorforge registry`: models, their versions, states and history."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tensorforge.catalog import CheckpointRecord
from tensorforge.cli import _registry_tokens
from tensorforge.cli._checkpoint_places import (
    best_record,
    find_place,
    find_prefix,
    latest_record,
)
from tensorforge.cli._registry_output import (
    DEFAULT,
    AsJson,
    Database,
    entry_lines,
    open_existing,
    print_json,
    progress_bar,
    when,
)
from tensorforge.cli._tables import console, table_of
from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.registry import (
    Actor,
    Bump,
    DeploymentState,
    Lineage,
    ModelMetadata,
    ModelRegistry,
    Sla,
)
from tensorforge.registry.anchoring import read_heads, write_anchor
from tensorforge.registry.database.writes.transitions import FORCE
from tensorforge.registry.domain import signatures
from tensorforge.registry.domain.deployment_lifecycle import DEPLOYMENT_LIFECYCLE
from tensorforge.registry.domain.versions import require_version
from tensorforge.registry.export import Registration, register_checkpoint, register_weights
from tensorforge.registry.model_registry import local_actor
from tensorforge.registry.weights import describe_weights, require_checksum
from tensorforge.storage.blobs import BlobStore

app = typer.Typer(help="Models, their versions, states and history.", no_args_is_help=True)
app.add_typer(_registry_tokens.app, name="token")

Model = Annotated[str, typer.Argument(help="The model's name.")]
Version = Annotated[str, typer.Argument(help="A version, a range like ^1.2, a state, an alias.")]
Reason = Annotated[str, typer.Option(help="Why; the audit keeps the reason.")]


@app.command("ls")
def list_models(
    model: Annotated[str | None, typer.Argument(help="Only this model's versions.")] = None,
    where: Annotated[str, typer.Option(help="A filter, such as state = 'production'.")] = "",
    limit: Annotated[int, typer.Option(help="The highest number of rows.", min=1, max=10_000)] = 50,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List models, or the versions of one."""
    with open_existing(database) as registry:
        if model is None and not where:
            _list_all(registry, limit, as_json=as_json)
            return
        found = registry.search_versions(where, model_id=model, limit=limit).items
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("No version matches.")
        return
    table = table_of("MODEL", "VERSION", "NO", "STATE", "ALIASES", "REGISTERED", "BY", "TAGS")
    for each in found:
        tags = ", ".join(f"{key}={value}" for key, value in each.tags.items())
        table.add_row(
            each.model_id,
            str(each.version),
            str(each.number),
            each.state.value,
            ", ".join(each.aliases),
            when(each.registered_at),
            each.registered_by,
            tags,
        )
    console().print(table)


def _list_all(registry: ModelRegistry, limit: int, *, as_json: bool) -> None:
    models = registry.search_models(limit=limit).items
    if as_json:
        print_json(models)
        return
    if not models:
        typer.echo("No model is registered yet: tensorforge registry register --help")
        return
    table = table_of("MODEL", "VERSIONS", "SERVES", "ALIASES", "UPDATED")
    for each in models:
        aliases = ", ".join(f"{alias}→{version}" for alias, version in each.aliases.items())
        serves = "-" if each.production is None else str(each.production)
        table.add_row(
            each.model_id, str(each.version_count), serves, aliases, when(each.updated_at)
        )
    console().print(table)


@app.command()
def show(
    model: Model,
    version: Version = "latest",
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show a version: its state, its newest validations, and the states that may follow."""
    with open_existing(database) as registry:
        metadata = registry.resolve(model, version)
        validations = registry.validations(model, metadata.version, limit=5)
        sla = registry.get_model(model).sla
    if as_json:
        print_json({"version": metadata, "sla": sla, "validations": validations})
        return
    table = table_of("", "")
    for name, value in _facts(metadata):
        if value:
            table.add_row(name, value)
    if sla is not None:
        limit = f"p99 ≤ {sla.max_latency_ms:g} ms, accuracy ≥ {sla.min_accuracy:g}"
        table.add_row("SLA", limit)
    for record in validations:
        result = record.result
        verdict = "passed" if result.passed else f"failed: {'; '.join(result.errors) or 'SLA'}"
        figures = f"p99 {result.latency_p99_ms:.3g} ms, accuracy {result.accuracy_score:.4g}"
        table.add_row(f"in {record.state.value}", f"{verdict} ({figures})")
    console().print(table)


def _facts(metadata: ModelMetadata) -> list[tuple[str, str]]:
    lineage, following = metadata.lineage, DEPLOYMENT_LIFECYCLE.allowed(metadata.state)
    return [
        ("model", metadata.model_id),
        ("version", f"{metadata.version} (number {metadata.number})"),
        ("state", f"{metadata.state.value} (revision {metadata.revision})"),
        ("shapes", f"{list(metadata.input_shape)} → {list(metadata.output_shape)}"),
        ("size", f"{metadata.size_bytes:,} bytes"),
        ("checksum", metadata.checksum),
        ("source", metadata.source),
        ("run", lineage.run_id),
        ("step", "" if lineage.step is None else str(lineage.step)),
        ("checkpoint", lineage.checkpoint_id),
        ("aliases", ", ".join(metadata.aliases)),
        ("tags", ", ".join(f"{key}={value}" for key, value in metadata.tags.items())),
        ("description", metadata.description),
        ("registered", f"{when(metadata.registered_at)} by {metadata.registered_by}"),
        ("may enter", ", ".join(state.value for state in following)),
    ]


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InvalidInputError(f"{text!r} is no shape; write 3,224,224") from None


def _tags(pairs: list[str]) -> dict[str, str]:
    split = [pair.partition("=") for pair in pairs]
    if not all(middle for _, middle, _ in split):
        raise InvalidInputError("write tags as key=value")
    return {key: value for key, _, value in split}


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint to register: `prefix` is `None` for the newest; `record` is known for a run's folder."""

    store: BlobStore
    prefix: str | None
    run_dir: Path | None = None
    record: CheckpointRecord | None = None

    def default_target(self, model: str) -> Path:
        """Where the weights are written unless the caller says so."""
        if self.run_dir is None or self.record is None:
            raise InvalidInputError("--checkpoint needs --export-to FILE.safetensors")
        name = f"{model.replace('/', '_')}-{self.record.checkpoint_id}.safetensors"
        return self.run_dir / "exports" / name

    def lineage_with(self, run: str, step: int | None) -> Lineage:
        """The checkpoint's run, step and id; `run` and `step` take precedence."""
        record = self.record
        if record is None:
            return Lineage(run_id=run, step=step)
        return Lineage(
            run_id=run or record.training_run_id,
            step=record.step if step is None else step,
            checkpoint_id=record.checkpoint_id,
        )


@contextlib.contextmanager
def _exported(
    checkpoint: str | None,
    prefix: str | None,
    run_dir: Path | None,
    best: str | None,
    higher_is_better: bool,
) -> Iterator[_Source]:
    """The checkpoint that the options of `register` name; its store is closed at the end of the block."""
    place = find_place(checkpoint, None, run_dir)
    with place.opened_store() as store:
        if run_dir is None or prefix is not None:
            name = None if prefix is None else find_prefix(place, store, prefix)
            yield _Source(store, name, run_dir)
            return
        with place.opened_catalog(store) as manager:
            if best is None:
                record = latest_record(place, manager, None)
            else:
                record = best_record(place, manager, best, higher_is_better=higher_is_better)
        yield _Source(store, record.storage_path, run_dir, record)


@app.command()
def register(
    model: Model,
    weights: Annotated[
        Path | None, typer.Option(help="A safetensors file, or a folder of them.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A checkpoint store (folder or URL) to export from.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Which checkpoint; without it, the newest.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The folder of a run, to take one of its checkpoints.")
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(help="With --run-dir: the best by this metric instead of the newest."),
    ] = None,
    higher_is_better: Annotated[
        bool, typer.Option(help="Of --best; by default lower is better.")
    ] = False,
    export_to: Annotated[
        Path | None,
        typer.Option(help="Where to write the exported weights; default: in the run's folder."),
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="The version; without it, the one that is due.")
    ] = None,
    least: Annotated[Bump, typer.Option(help="At least this bump.")] = Bump.PATCH,
    input_shape: Annotated[str, typer.Option(help="Such as 3,224,224.")] = "",
    output_shape: Annotated[str, typer.Option(help="Such as 1000.")] = "",
    run: Annotated[str, typer.Option(help="The training run that the weights came from.")] = "",
    step: Annotated[
        int | None, typer.Option(help="The training step that the weights came from.")
    ] = None,
    description: Annotated[str, typer.Option(help="What it is.")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="key=value; may be repeated.")] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Register a version from weights, or from a checkpoint that is exported first.

    With --run-dir the version gets the run, step and id of the checkpoint.
    """
    registration = Registration(
        model_id=model,
        version=None if version is None else require_version(version),
        least_bump=least,
        input_shape=_shape(input_shape),
        output_shape=_shape(output_shape),
        description=description,
        tags=_tags(tag or []),
        lineage=Lineage(run_id=run, step=step),
    )
    if sum(each is not None for each in (weights, checkpoint, run_dir)) != 1:
        raise InvalidInputError("name either --weights, --checkpoint or --run-dir")
    if best is not None and run_dir is None:
        raise InvalidInputError("--best needs --run-dir, whose catalog has the metrics")
    with ModelRegistry(database) as registry, progress_bar("Reading", quiet=as_json) as progress:
        if weights is not None:
            described = describe_weights(weights, progress=progress)
            stored, due = register_weights(registry, registration, described)
        else:
            with _exported(checkpoint, prefix, run_dir, best, higher_is_better) as found:
                target = export_to or found.default_target(model)
                registration = replace(registration, lineage=found.lineage_with(run, step))
                stored, due = register_checkpoint(
                    registry,
                    registration,
                    found.store,
                    target,
                    prefix=found.prefix,
                    progress=progress,
                )
    if as_json:
        print_json({"version": stored, "due": due})
        return
    why = ""
    if due is not None:
        bump = "" if stored.number == 1 else f"{due.bump.value}: "
        why = f" ({bump}{'; '.join(due.reasons)})"
    typer.echo(f"Registered {stored.model_id} {stored.version}{why}")


@app.command()
def validate(
    model: Model,
    version: Version,
    loader: Annotated[
        str, typer.Option(help="package.module:function or file.py:function; tensors → model.")
    ],
    data: Annotated[Path, typer.Option(help="safetensors or .npz with inputs and targets.")],
    weights: Annotated[
        Path | None, typer.Option(help="The weights; without it, the version's source.")
    ] = None,
    metric: Annotated[str, typer.Option(help="module:function (outputs, targets) → score.")] = "",
    batch_size: Annotated[int, typer.Option(help="Samples per timed request.", min=1)] = 1,
    warm_up: Annotated[int, typer.Option(help="Requests before the timed ones.", min=0)] = 5,
    repeats: Annotated[int, typer.Option(help="Timed requests.", min=1)] = 100,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Load the registered weights, measure latency and accuracy, and record the result."""
    from tensorforge.registry.model_validation import ValidationPlan, run_validation

    with open_existing(database) as registry:
        metadata = registry.resolve(model, version)
        plan = ValidationPlan(
            weights=weights or Path(metadata.source),
            loader=loader,
            data=data,
            metric=metric,
            batch_size=batch_size,
            warm_up=warm_up,
            repeats=repeats,
        )
        with progress_bar("Measuring", quiet=as_json) as progress:
            sla = registry.get_model(model).sla
            result = run_validation(metadata, plan, sla, progress=progress)
        record = registry.record_validation(result)
        decision = registry.canary_decision(model, metadata.version)
    if as_json:
        print_json({"validation": record, "decision": decision})
    else:
        typer.echo(
            f"{model} {metadata.version} in {metadata.state.value}: "
            f"{'passed' if result.passed else 'FAILED'}, p50 {result.latency_p50_ms:.3f} ms, "
            f"p99 {result.latency_p99_ms:.3f} ms, accuracy {result.accuracy_score:.4f} "
            f"on {result.samples or 0} samples"
        )
        for error in result.errors:
            typer.echo(f"  {error}")
        if metadata.state is DeploymentState.CANARY:
            reasons = "; ".join(decision.reasons)
            typer.echo(
                f"Compared with the version that serves: {decision.verdict.value} ({reasons})"
            )
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def promote(
    model: Model,
    version: Version,
    to: Annotated[DeploymentState, typer.Option(help="The state to enter.")],
    reason: Reason = "",
    force: Annotated[bool, typer.Option(help="Override missing evidence; needs --reason.")] = False,
    retire_previous: Annotated[
        bool, typer.Option(help="Deprecate the versions that were in production before.")
    ] = False,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Make a transition: take a version into another state of the lifecycle."""
    with open_existing(database) as registry:
        metadata = registry.resolve(model, version)
        done = registry.transition_state(
            model,
            metadata.version,
            to,
            actor=_local_actor_with_force(),
            reason=reason,
            force=force,
            expected_revision=metadata.revision,
            retire_previous=retire_previous,
        )
    if as_json:
        print_json(done)
        return
    typer.echo(f"{model} {metadata.version}: {done.previous.value} → {to.value}")


def _local_actor_with_force() -> Actor:
    """The local user, who may force transitions: a user who can write the database file may do everything."""
    return Actor(name=local_actor().name, scopes=frozenset({FORCE}))


@app.command()
def rollback(
    model: Model,
    reason: Reason = "",
    to: Annotated[
        str | None, typer.Option(help="The version that will serve; without it, the best one.")
    ] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Deprecate the version that serves and let another version in production serve, in one step."""
    with open_existing(database) as registry:
        target = None if to is None else require_version(to)
        done = registry.rollback(model, to=target, reason=reason)
    if as_json:
        print_json(done)
        return
    typer.echo(f"{model}: {done.previous} → {done.current} ({'; '.join(done.reasons)})")


@app.command()
def history(
    model: Model,
    version: Annotated[str | None, typer.Option(help="Only this version.")] = None,
    after: Annotated[int, typer.Option(help="Only rows after this one.", min=0)] = 0,
    limit: Annotated[
        int, typer.Option(help="The highest number of rows.", min=1, max=10_000)
    ] = 100,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show who did what, when, why and on what evidence."""
    with open_existing(database) as registry:
        wanted = None if version is None else require_version(version)
        entries = registry.history(model, version=wanted, after=after, limit=limit)
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        for line in entry_lines(entry):
            typer.echo(line)


@app.command()
def diff(
    model: Model,
    before: Version,
    after: Version,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two versions, and which bump the change needs."""
    with open_existing(database) as registry:
        old, new = registry.resolve(model, before), registry.resolve(model, after)
        found = registry.diff(model, old.version, new.version)
    if as_json:
        print_json(found)
        return
    table = table_of("", str(old.version), str(new.version))
    for name, (first, second) in found.fields.items():
        table.add_row(name, first, second)
    for tag, pair in found.tags.items():
        table.add_row(f"tag {tag}", pair[0] or "-", pair[1] or "-")
    console().print(table)
    typer.echo(f"Due: {found.due.bump.value} ({'; '.join(found.due.reasons)})")
    typer.echo(f"Shape compatibility: {found.compatibility:.2f}")
    if found.rollback is not None:
        reasons = "; ".join(found.rollback.reasons) or "nothing got worse"
        typer.echo(f"Rollback priority: {found.rollback.priority:.2f} ({reasons})")


@app.command()
def sla(
    model: Model,
    max_latency_ms: Annotated[float, typer.Option(help="The highest p99 latency.")],
    min_accuracy: Annotated[float, typer.Option(help="The lowest accuracy.")],
    signed_by: Annotated[
        list[str] | None,
        typer.Option(help="A public key by which versions must be signed; may be repeated."),
    ] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Set the limits that a version must meet to enter staging or production."""
    limits = Sla(
        max_latency_ms=max_latency_ms,
        min_accuracy=min_accuracy,
        signed_by=tuple(signed_by or ()),
    )
    with open_existing(database) as registry:
        registry.set_sla(model, limits)
    if as_json:
        print_json(limits)
        return
    typer.echo(f"{model}: p99 ≤ {max_latency_ms:g} ms, accuracy ≥ {min_accuracy:g}")


@app.command()
def audit(
    since: Annotated[
        str | None,
        typer.Option(
            help="A head that was noted earlier and that the audit must still contain: SEQUENCE:HASH, or a "
            "file with noted heads."
        ),
    ] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Recompute the hashes of the audit and compare the tables with it.

    Exits with 1 and names the row, version or alias that was tampered with.
    """
    known = [] if since is None else read_heads(since)
    with open_existing(database) as registry:
        head = registry.verify_audit(*known)
    if as_json:
        print_json(head)
        return
    typer.echo(f"The audit is intact: {head.sequence} rows, head {head.sequence}:{head.hash}")


@app.command()
def anchor(
    to: Annotated[
        str, typer.Argument(help="A file, the URL of a blob store, or an http or https URL.")
    ],
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Note the audit's head outside the database, so that even a rewritten audit shows."""
    with open_existing(database) as registry:
        head = registry.verify_audit()
    write_anchor(head, to, datetime.now(UTC), allow_private=True)
    if as_json:
        print_json(head)
        return
    typer.echo(f"Noted {head.sequence}:{head.hash} at {to}")


@app.command()
def keygen(
    key: Annotated[Path, typer.Argument(help="The file for the new private key.")],
    as_json: AsJson = False,
) -> None:
    """Create a key for signatures; the public key is printed."""
    private = signatures.new_private_key()
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(private + "\n")
    public = signatures.public_key_of(private)
    typer.echo(json.dumps({"public_key": public}) if as_json else public)


@app.command()
def sign(
    model: Model,
    version: Version,
    key: Annotated[Path, typer.Option(help="The file with the private key: `registry keygen`.")],
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Sign a version's checksum and metadata."""
    private = key.read_text(encoding="ascii").strip()
    with open_existing(database) as registry:
        metadata = registry.resolve(model, version)
        signature = signatures.sign_version(metadata, private)
        public = signatures.public_key_of(private)
        done = registry.sign_version(model, metadata.version, signature, public)
    if as_json:
        print_json({"signature": done.signature, "signed_by": done.signed_by})
        return
    typer.echo(f"Signed {model} {metadata.version} by {public}")


@app.command()
def verify(
    model: Model,
    version: Version,
    key: Annotated[
        list[str] | None,
        typer.Option(
            help="A public key that is trusted; may be repeated. By default those of the SLA."
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The weights, to compare with the registered checksum.")
    ] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Check a version's signature, and its weights if they are given; exit with 1 if one does not fit."""
    with open_existing(database) as registry:
        metadata = registry.resolve(model, version)
        limits = registry.get_model(model).sla
    trusted = key or (limits.signed_by if limits is not None else ())
    if not trusted:
        raise InvalidInputError("name a trusted key by --key, or in the model's SLA")
    problem = signatures.signature_problem(metadata, trusted)
    if problem is not None:
        raise IntegrityError(f"{model} {metadata.version}: {problem}")
    if weights is not None:
        require_checksum(describe_weights(weights), metadata.checksum)
    if as_json:
        print_json({"signed_by": metadata.signed_by, "checksum": metadata.checksum})
        return
    typer.echo(f"{model} {metadata.version} is signed by {metadata.signed_by}")
