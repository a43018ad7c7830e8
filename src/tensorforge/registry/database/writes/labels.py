"""Tags and aliases: the names that people hang on models and versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from tensorforge.errors import InvalidInputError, NotFoundError
from tensorforge.registry.database.audit import AuditFact
from tensorforge.registry.database.rows import find_version, look_for_alias, version_of
from tensorforge.registry.database.tables import ALIASES, MODEL_TAGS, VERSION_TAGS
from tensorforge.registry.database.writes import changes
from tensorforge.registry.database.writes.descriptions import touch_model
from tensorforge.registry.domain.models import Actor
from tensorforge.registry.domain.names import (
    MAX_TAGS,
    check_alias,
    check_tag_key,
    check_tags,
    tag_digest,
)
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Prepared, Row

_DROP_ALIAS = Prepared(
    ALIASES.delete().where(
        ALIASES.c.model_key == sa.bindparam("of_model"), ALIASES.c.alias == sa.bindparam("named")
    )
)
_ADD_ALIAS = Prepared(ALIASES.insert(), columns=["model_key", "alias", "version_key"])
_ADD_TAG = {
    table.name: Prepared(table.insert(), columns=[column.name for column in table.columns])
    for table in (MODEL_TAGS, VERSION_TAGS)
}


def change_tags(
    connection: sa.Connection,
    model: Row,
    version: Row | None,
    put: Mapping[str, str],
    drop: Iterable[str],
    actor: Actor,
    now_us: int,
) -> None:
    """Set and remove tags of a locked model, or of one of its versions; what changed is audited."""
    table, owner, key = MODEL_TAGS, MODEL_TAGS.c.model_key, model["key"]
    if version is not None:
        table, owner, key = VERSION_TAGS, VERSION_TAGS.c.version_key, version["key"]
    query = sa.select(table.c.tag, table.c.value).where(owner == key)
    before = {row.tag: row.value for row in connection.execute(query)}
    tags, gone = check_tags(put), set(map(check_tag_key, drop))
    after = {tag: value for tag, value in before.items() if tag not in gone} | tags
    if len(after) > MAX_TAGS:
        raise InvalidInputError(f"more than {MAX_TAGS} tags on one thing are not allowed")
    changed = sorted(
        tag for tag in before.keys() | after.keys() if before.get(tag) != after.get(tag)
    )
    if not changed:
        return
    connection.execute(table.delete().where(owner == key, table.c.tag.in_(changed)))
    kept = {tag: after[tag] for tag in changed if tag in after}
    insert_tags(connection, table, owner.name, key, kept)
    if version is None:
        touch_model(connection, model, now_us)
    fact = AuditFact(
        actor=actor.name,
        action="set_tags",
        model_key=model["key"],
        model_id=model["model_id"],
        version="" if version is None else str(version_of(version)),
        evidence={"tags": {tag: [before.get(tag), after.get(tag)] for tag in changed}},
    )
    changes.record(connection, fact, now_us)


def insert_tags(
    connection: sa.Connection, table: sa.Table, owner: str, key: int, tags: Mapping[str, str]
) -> None:
    """Write checked tags of a thing that has none of these keys."""
    for tag, value in tags.items():
        row = {owner: key, "tag": tag, "value": value, "digest": tag_digest(value)}
        _ADD_TAG[table.name].run(connection, row)


def set_alias(
    connection: sa.Connection,
    model: Row,
    alias: str,
    version: ModelVersion,
    actor: Actor,
    now_us: int,
) -> None:
    """Let an alias of a locked model point to a version, wherever it pointed before."""
    check_alias(alias)
    row = find_version(connection, model["model_id"], version)
    before = look_for_alias(connection, model["model_id"], alias)
    if before is not None:
        _DROP_ALIAS.run(connection, {"of_model": model["key"], "named": alias})
    added = {"model_key": model["key"], "alias": alias, "version_key": row["key"]}
    _ADD_ALIAS.run(connection, added)
    was = "" if before is None else str(version_of(before))
    _record(connection, model, "set_alias", alias, str(version), was, actor, now_us)


def delete_alias(
    connection: sa.Connection, model: Row, alias: str, actor: Actor, now_us: int
) -> None:
    """Remove an alias of a locked model; `NotFoundError` if there is none."""
    before = look_for_alias(connection, model["model_id"], alias)
    if before is None:
        raise NotFoundError(f"the model {model['model_id']!r} has no alias {alias[:100]!r}")
    _DROP_ALIAS.run(connection, {"of_model": model["key"], "named": alias})
    was = str(version_of(before))
    _record(connection, model, "delete_alias", alias, was, was, actor, now_us)


def _record(
    connection: sa.Connection,
    model: Row,
    action: str,
    alias: str,
    version: str,
    was: str,
    actor: Actor,
    now_us: int,
) -> None:
    fact = AuditFact(
        actor=actor.name,
        action=action,
        model_key=model["key"],
        model_id=model["model_id"],
        version=version,
        evidence={"alias": alias, "previous": was},
    )
    changes.record(connection, fact, now_us)
