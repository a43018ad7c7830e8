"""An SQL expression by which the database writes a version in MLflow's format.

The result equals that of `mlflow_wire.version_body`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from tensorforge.registry.database.dialects import (
    Formatted,
    Joined,
    JsonObject,
    JsonString,
    constant,
)
from tensorforge.registry.database.reads.search import Document
from tensorforge.registry.database.tables import ALIASES, MODELS, VERSION_TAGS, VERSIONS
from tensorforge.registry.domain.mlflow_stages import STAGES
from tensorforge.registry.service.mlflow.mlflow_wire import STATE_TAG, VERSION_TAG

_MILLI = sa.literal_column("1000", sa.BigInteger)


def _tags() -> sa.ScalarSelect[str]:
    """The tags that callers set, with a comma after each."""
    tags = VERSION_TAGS.c
    pair = JsonObject(constant("key"), tags.tag, constant("value"), tags.value) + constant(",")
    mine = tags.version_key == VERSIONS.c.key
    others = [tags.tag != constant(tag) for tag in (VERSION_TAG, STATE_TAG)]
    query = sa.select(Joined(pair, constant(""), tags.tag)).where(mine, *others)
    return query.correlate(VERSIONS).scalar_subquery()


def _aliases() -> sa.ScalarSelect[str]:
    joined = Joined(JsonString(ALIASES.c.alias), constant(","), ALIASES.c.alias)
    query = sa.select(joined).where(ALIASES.c.version_key == VERSIONS.c.key)
    return query.correlate(VERSIONS).scalar_subquery()


def _stage() -> sa.ColumnElement[str]:
    stages = {state.value: stage for stage, states in STAGES.items() for state in states}
    whens = (
        (VERSIONS.c.state == constant(state), constant(stage)) for state, stage in stages.items()
    )
    return sa.case(*whens)


def _fields() -> sa.ColumnElement[str]:
    """The fields that are no lists, as a JSON object."""
    row = VERSIONS.c
    fields: dict[str, Any] = {
        "name": MODELS.c.model_id,
        "version": sa.cast(row.number, sa.Text),
        "creation_timestamp": row.registered_us // _MILLI,
        "last_updated_timestamp": row.updated_us // _MILLI,
        "user_id": row.registered_by,
        "current_stage": _stage(),
        "description": row.description,
        "source": row.source,
        "run_id": row.run_id,
        "run_link": row.run_link,
        "model_id": row.logged_model_id,
        "status": constant("READY"),
    }
    return JsonObject(*(part for key, value in fields.items() for part in (constant(key), value)))


def _document() -> sa.ColumnElement[str]:
    """The whole document: the lists first, then the other fields without their opening brace."""
    row = VERSIONS.c
    ours = f'{{"key":"{VERSION_TAG}","value":"%s.%s.%s"}},{{"key":"{STATE_TAG}","value":"%s"}}'
    template = f'{{"tags":[%s{ours}],"aliases":[%s],%s'
    fields = sa.func.substr(_fields(), sa.literal_column("2", sa.Integer))
    numbers = (row.major, row.minor, row.patch)
    return Formatted(constant(template), _tags(), *numbers, row.state, _aliases(), fields)


VERSION_DOCUMENT = Document(_document())
