"""`tensorforge registry token`: the tokens of those who may use the service."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Annotated

import typer

from tensorforge.cli._registry_output import (
    DEFAULT,
    AsJson,
    Database,
    plain,
    when,
)
from tensorforge.cli._tables import console, table_of
from tensorforge.registry import ModelRegistry
from tensorforge.registry.tokens import DatabaseTokens

app = typer.Typer(help="Tokens for the service.", no_args_is_help=True)


@app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Who will use the token.")],
    scope: Annotated[
        list[str],
        typer.Option(
            help="What the token may do, such as registry:read; registry:promote:ranker* only for models "
            "whose names match the pattern. May be repeated."
        ),
    ],
    days: Annotated[float | None, typer.Option(help="How many days the token is valid.")] = None,
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Create a token and print it; it cannot be shown again."""
    lifetime = None if days is None else timedelta(days=days)
    with ModelRegistry(database) as registry:
        tokens = DatabaseTokens(registry.database)
        made = tokens.issue(name, scope, lifetime=lifetime)
    typer.echo(json.dumps({"token": made}) if as_json else made)


@app.command("ls")
def list_tokens(database: Database = DEFAULT, as_json: AsJson = False) -> None:
    """List tokens without their secrets."""
    with ModelRegistry(database) as registry:
        records = DatabaseTokens(registry.database).records()
    shown = [{k: v for k, v in plain(each).items() if k != "secret_hash"} for each in records]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return
    table = table_of("ID", "NAME", "SCOPES", "CREATED", "EXPIRES", "REVOKED")
    for record in records:
        table.add_row(
            record.token_id,
            record.name,
            ", ".join(record.scopes),
            when(record.created_at),
            "-" if record.expires_at is None else when(record.expires_at),
            "-" if record.revoked_at is None else when(record.revoked_at),
        )
    console().print(table)


@app.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="The token's id: the part after tf_.")],
    database: Database = DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Revoke a token for good."""
    with ModelRegistry(database) as registry:
        record = DatabaseTokens(registry.database).revoke(token_id)
    if as_json:
        typer.echo(json.dumps({"token_id": record.token_id, "revoked": True}))
        return
    typer.echo(f"Revoked {record.name} ({record.token_id})")
