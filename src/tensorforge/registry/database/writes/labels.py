"""Changes of tags and aliases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from tensorforge.errors import ConflictError, InvalidInputError, NotFoundError
from tensorforge.registry.database.rows import find_alias_or_none, version_of
from tensorforge.registry.database.tables import ALIASES, MODEL_TAGS, VERSION_TAGS
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.domain.deployment_lifecycle import SERVING_STATES
from tensorforge.registry.domain.names import (
    MAX_TAGS,
    check_alias,
    check_tag_key,
    check_tags,
    tag_digest,
)
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.prepared import Prepared, Row

_SERVING = frozenset(state.value for state in SERVING_STATES)
_DELETE_ALIAS = Prepared(
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
    change: Change, version: Row | None, put: Mapping[str, str], drop: Iterable[str]
) -> None:
    """Set the tags `put` and remove the keys `drop`, of the model or of one of its versions.

    The audit shows the old and new value of each tag that changed; if none did, nothing is written.
    """
    connection = change.connection
    table, owner, key = MODEL_TAGS, MODEL_TAGS.c.model_key, change.model["key"]
    if version is not None:
        table, owner, key = VERSION_TAGS, VERSION_TAGS.c.version_key, version["key"]
    query = sa.select(table.c.tag, table.c.value).where(owner == key)
    before = {row.tag: row.value for row in connection.execute(query)}
    tags, dropped = check_tags(put), set(map(check_tag_key, drop))
    after = {tag: value for tag, value in before.items() if tag not in dropped} | tags
    if len(after) > MAX_TAGS:
        raise InvalidInputError(f"at most {MAX_TAGS} tags are allowed on a model or version")
    changed = sorted(
        tag for tag in before.keys() | after.keys() if before.get(tag) != after.get(tag)
    )
    if not changed:
        return
    connection.execute(table.delete().where(owner == key, table.c.tag.in_(changed)))
    added = {tag: after[tag] for tag in changed if tag in after}
    insert_tags(connection, table, owner.name, key, added)
    if version is None:
        change.update_model()
    evidence = {"tags": {tag: [before.get(tag), after.get(tag)] for tag in changed}}
    of = None if version is None else version_of(version)
    change.record("set_tags", version=of, evidence=evidence)


def insert_tags(
    connection: sa.Connection, table: sa.Table, owner: str, key: int, tags: Mapping[str, str]
) -> None:
    """Insert checked tags for the row `key`, which has no tag with one of these keys."""
    for tag, value in tags.items():
        row = {owner: key, "tag": tag, "value": value, "digest": tag_digest(value)}
        _ADD_TAG[table.name].run(connection, row)


def set_alias(
    change: Change,
    alias: str,
    version: ModelVersion,
    *,
    protected: bool = False,
    force: bool = False,
) -> None:
    """Point an alias at a version. An alias that points at another version is replaced.

    A `protected` alias may point only at a version in canary or production, which has passed the lifecycle's
    checks; otherwise `ConflictError`. `force` overrides that, and the audit shows it.
    """
    check_alias(alias)
    row = change.find_version(version)
    overridden = protected and row["state"] not in _SERVING
    if overridden and not force:
        raise ConflictError(
            f"the alias {alias} of {change.model_id} is protected: {version} is in {row['state']}, but the "
            "alias may point only at a version in canary or production"
        )
    before = find_alias_or_none(change.connection, change.model_id, alias)
    if before is not None:
        _delete_alias(change, alias)
    added = {"model_key": change.model["key"], "alias": alias, "version_key": row["key"]}
    _ADD_ALIAS.run(change.connection, added)
    previous = "" if before is None else str(version_of(before))
    evidence = {"alias": alias, "previous": previous}
    change.record("set_alias", version=version, evidence=evidence, forced=overridden)


def delete_alias(change: Change, alias: str) -> None:
    """Remove an alias; `NotFoundError` if there is none."""
    before = find_alias_or_none(change.connection, change.model_id, alias)
    if before is None:
        raise NotFoundError(f"the model {change.model_id!r} has no alias {alias[:100]!r}")
    _delete_alias(change, alias)
    version = version_of(before)
    evidence = {"alias": alias, "previous": str(version)}
    change.record("delete_alias", version=version, evidence=evidence)


def _delete_alias(change: Change, alias: str) -> None:
    _DELETE_ALIAS.run(change.connection, {"of_model": change.model["key"], "named": alias})
