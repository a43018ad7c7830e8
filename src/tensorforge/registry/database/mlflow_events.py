"""The events that MLflow's webhooks know, and the messages about them that an audit row causes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import NotFoundError
from tensorforge.registry.database.rows import find_version_or_none, read_model, to_metadata
from tensorforge.registry.database.times import from_micros
from tensorforge.registry.domain.models import ModelMetadata
from tensorforge.registry.domain.names import PROMPT_TAG
from tensorforge.registry.domain.versions import require_version

EVENTS = (
    "registered_model.created",
    "model_version.created",
    "model_version_tag.set",
    "model_version_tag.deleted",
    "model_version_alias.created",
    "model_version_alias.deleted",
    "prompt.created",
    "prompt_version.created",
    "prompt_tag.set",
    "prompt_tag.deleted",
    "prompt_version_tag.set",
    "prompt_version_tag.deleted",
    "prompt_alias.created",
    "prompt_alias.deleted",
)
"""The events of MLflow's model registry, each as entity and action."""

PROMPT_TEXT_TAG = "mlflow.prompt.text"

_AS_PROMPT = {
    "registered_model": "prompt",
    "model_version": "prompt_version",
    "model_version_tag": "prompt_version_tag",
    "model_version_alias": "prompt_alias",
}

Event = tuple[str, dict[str, Any]]


def messages(
    connection: sa.Connection, row: Mapping[str, Any], evidence: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The events that an audit row causes: the name of each, and the JSON body of its message."""
    is_prompt = _is_prompt(connection, row["model_id"])
    found = []
    for name, data in _events(connection, row, evidence, is_prompt=is_prompt):
        found.append((name, message(name, data, from_micros(row["at_us"]).isoformat())))
    return found


def message(name: str, data: Mapping[str, Any], at: str) -> str:
    """The JSON body of a message about an event."""
    entity, _, action = name.partition(".")
    return json.dumps({"entity": entity, "action": action, "timestamp": at, "data": data})


def example(name: str) -> dict[str, Any]:
    """Data as an event of this name could have them, for the test of a webhook."""
    entity, _, action = name.partition(".")
    data: dict[str, Any] = {"name": "example"}
    if "version" in entity or "alias" in entity:
        data["version"] = "1"
    if entity.endswith("_tag"):
        data["key"] = "example-key"
        if action == "set":
            data["value"] = "example-value"
    elif entity.endswith("_alias"):
        data["alias"] = "example-alias"
        if action == "deleted":
            del data["version"]
    else:
        data |= {"tags": {"example-key": "example-value"}, "description": "An example"}
        if entity == "model_version":
            data |= {"source": "models:/example", "run_id": "example-run"}
        elif entity == "prompt_version":
            data["template"] = "Hello {{name}}"
    return data


def _is_prompt(connection: sa.Connection, model_id: str) -> bool:
    try:
        return read_model(connection, model_id).tags.get(PROMPT_TAG, "").lower() == "true"
    except NotFoundError:
        return False


def _events(
    connection: sa.Connection,
    row: Mapping[str, Any],
    evidence: Mapping[str, Any],
    *,
    is_prompt: bool,
) -> Iterator[Event]:
    action, name = row["action"], row["model_id"]
    if action == "create_model":
        model = read_model(connection, name)
        data = {"name": name, "tags": _own(model.tags), "description": model.description or None}
        yield _named("registered_model.created", is_prompt), data
    elif action == "register":
        metadata = _version(connection, row)
        if metadata is not None:
            yield _named("model_version.created", is_prompt), _created(metadata, is_prompt)
    elif action == "set_alias":
        metadata = _version(connection, row)
        number = "" if metadata is None else str(metadata.number)
        data = {"name": name, "alias": evidence["alias"], "version": number}
        yield _named("model_version_alias.created", is_prompt), data
    elif action == "delete_alias":
        data = {"name": name, "alias": evidence["alias"]}
        yield _named("model_version_alias.deleted", is_prompt), data
    elif action == "set_tags":
        yield from _tag_events(connection, row, evidence, is_prompt=is_prompt)


def _tag_events(
    connection: sa.Connection,
    row: Mapping[str, Any],
    evidence: Mapping[str, Any],
    *,
    is_prompt: bool,
) -> Iterator[Event]:
    data: dict[str, Any] = {"name": row["model_id"]}
    if row["version"]:
        metadata = _version(connection, row)
        data["version"] = "" if metadata is None else str(metadata.number)
        entity = _AS_PROMPT["model_version_tag"] if is_prompt else "model_version_tag"
    elif is_prompt:
        entity = "prompt_tag"
    else:
        return
    for key, (_, value) in evidence["tags"].items():
        if value is None:
            yield f"{entity}.deleted", {**data, "key": key}
        else:
            yield f"{entity}.set", {**data, "key": key, "value": value}


def _named(event: str, is_prompt: bool) -> str:
    entity, _, action = event.partition(".")
    return f"{_AS_PROMPT[entity]}.{action}" if is_prompt else event


def _created(metadata: ModelMetadata, is_prompt: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"name": metadata.model_id, "version": str(metadata.number)}
    if is_prompt:
        data["template"] = metadata.tags.get(PROMPT_TEXT_TAG, "")
    else:
        data |= {"source": metadata.source, "run_id": metadata.lineage.run_id or None}
    tags = {key: value for key, value in metadata.tags.items() if key != PROMPT_TEXT_TAG}
    return data | {"tags": _own(tags), "description": metadata.description or None}


def _own(tags: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in tags.items() if key != PROMPT_TAG}


def _version(connection: sa.Connection, row: Mapping[str, Any]) -> ModelMetadata | None:
    found = find_version_or_none(connection, row["model_id"], require_version(row["version"]))
    return None if found is None else to_metadata(found)
