"""The registry's tables. Times are microseconds since 1970 in UTC; NaN is stored as NULL."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.types import TypeEngine

SCHEMA = sa.MetaData()

# SQLite numbers the rows by itself only where the key is a plain INTEGER.
_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _columns(kind: TypeEngine[Any], *names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _texts(*names: str) -> list[sa.Column[Any]]:
    return _columns(sa.Text(), *names)


def _integers(*names: str) -> list[sa.Column[Any]]:
    return _columns(sa.BigInteger(), *names)


def _added_texts(*names: str, default: str = "") -> list[sa.Column[Any]]:
    """Columns that databases of earlier releases do not have yet."""
    return [sa.Column(n, sa.Text, nullable=False, server_default=default) for n in names]


def _numbered_key() -> sa.Column[int]:
    return sa.Column("key", _KEY, primary_key=True, autoincrement=True)


def _given_key(name: str) -> sa.Column[int]:
    return sa.Column(name, _KEY, primary_key=True, autoincrement=False)


def _owner_key(owner: sa.Table, name: str) -> sa.Column[int]:
    """A part of the primary key that refers to the row of `owner` to which this row belongs."""
    return sa.Column(name, _KEY, sa.ForeignKey(owner.c.key), primary_key=True, autoincrement=False)


MODELS = sa.Table(
    "registry_models",
    SCHEMA,
    _numbered_key(),
    sa.Column("model_id", sa.Text, nullable=False, unique=True),
    *_texts("description"),
    *_integers("created_us", "updated_us"),
    *_columns(sa.Double(), "sla_max_latency_ms", "sla_min_accuracy", nullable=True),
    *_integers("last_number", "version_count"),
    sa.Column("production_key", _KEY),
    *_added_texts("sla_signed_by"),
    sa.Index("registry_models_updated", "updated_us", "key"),
)
"""One row a model.

`production_key` is the version that serves; `last_number` was given to the newest version.
"""

VERSIONS = sa.Table(
    "registry_versions",
    SCHEMA,
    _numbered_key(),
    sa.Column("model_key", _KEY, sa.ForeignKey(MODELS.c.key), nullable=False),
    *_integers("number", "major", "minor", "patch"),
    *_texts("name", "framework", "input_shape", "output_shape"),
    *_integers("size_bytes"),
    *_texts("checksum"),
    *_integers("registered_us", "updated_us"),
    *_texts("state"),
    *_integers("revision"),
    *_texts("source", "description", "run_id"),
    sa.Column("step", sa.BigInteger),
    *_texts("checkpoint_id", "run_link", "registered_by"),
    *_added_texts("logged_model_id", "experiment_id", "download_uri", "signature", "signed_by"),
    sa.UniqueConstraint("model_key", "major", "minor", "patch"),
    sa.UniqueConstraint("model_key", "number"),
    sa.Index("registry_versions_in_state", "model_key", "state", "major", "minor", "patch"),
    sa.Index("registry_versions_model", "model_key", "key"),
    sa.Index("registry_versions_state", "state", "key"),
    sa.Index("registry_versions_run", "run_id"),
    sa.Index("registry_versions_updated", "updated_us", "key"),
)

TENSORS = sa.Table(
    "registry_tensors", SCHEMA, _owner_key(VERSIONS, "version_key"), *_texts("tensors")
)


def _tags_table(name: str, owner: sa.Table, owner_key: str) -> sa.Table:
    return sa.Table(
        name,
        SCHEMA,
        _owner_key(owner, owner_key),
        sa.Column("tag", sa.Text, primary_key=True),
        *_texts("value", "digest"),
        sa.Index(f"{name}_digest", "tag", "digest", owner_key),
        sqlite_with_rowid=False,
    )


MODEL_TAGS = _tags_table("registry_model_tags", MODELS, "model_key")
VERSION_TAGS = _tags_table("registry_version_tags", VERSIONS, "version_key")

ALIASES = sa.Table(
    "registry_aliases",
    SCHEMA,
    _owner_key(MODELS, "model_key"),
    sa.Column("alias", sa.Text, primary_key=True),
    sa.Column("version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), nullable=False),
    sa.Index("registry_aliases_version", "version_key"),
    sqlite_with_rowid=False,
)

VALIDATIONS = sa.Table(
    "registry_validations",
    SCHEMA,
    _numbered_key(),
    sa.Column("version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), nullable=False),
    *_texts("state"),
    *_integers("revision"),
    sa.Column("passed", sa.Boolean, nullable=False),
    *_columns(sa.Double(), "latency_p50_ms", "latency_p99_ms", "accuracy_score", nullable=True),
    *_texts("errors"),
    sa.Column("samples", sa.BigInteger),
    *_integers("recorded_us"),
    *_texts("recorded_by"),
    sa.Index("registry_validations_version", "version_key", "key"),
)

AUDIT = sa.Table(
    "registry_audit",
    SCHEMA,
    _given_key("sequence"),
    *_integers("at_us"),
    *_texts("actor", "action"),
    sa.Column("model_key", _KEY, nullable=False),
    *_texts("model_id", "version", "from_state", "to_state", "reason", "evidence"),
    sa.Column("forced", sa.Boolean, nullable=False),
    *_texts("previous_hash", "hash"),
    sa.Index("registry_audit_model", "model_key", "sequence"),
)
"""One row a change. A row's hash covers its columns in this order, so the order must never change."""

AUDIT_HEAD = sa.Table(
    "registry_audit_head",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    *_integers("sequence"),
    *_texts("hash"),
    *_integers("at_us"),
)

PRODUCTION = sa.Table(
    "registry_production",
    SCHEMA,
    _given_key("sequence"),
    sa.Column("model_key", _KEY, nullable=False),
    *_integers("at_us"),
    sa.Column("version", sa.Text),
    sa.Index("registry_production_model", "model_key", "at_us", "sequence"),
)
"""Which version of a model served from when on; a NULL version means that none did."""

TOKENS = sa.Table(
    "registry_tokens",
    SCHEMA,
    sa.Column("token_id", sa.Text, primary_key=True),
    *_texts("name", "secret_hash", "scopes"),
    *_integers("created_us"),
    *_columns(sa.BigInteger(), "expires_us", "revoked_us", nullable=True),
)

IDEMPOTENCY = sa.Table(
    "registry_idempotency",
    SCHEMA,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("request_key", sa.Text, primary_key=True),
    *_texts("request_hash", "model_id", "version"),
    *_integers("created_us"),
    sa.Index("registry_idempotency_created", "created_us"),
)

WEBHOOKS = sa.Table(
    "registry_webhooks",
    SCHEMA,
    _numbered_key(),
    *_texts("url", "secret", "actions", "model_id"),
    *_integers("created_us"),
    *_texts("created_by"),
    *_added_texts("name", "description", "events"),
    *_added_texts("status", default="ACTIVE"),
    sa.Column("updated_us", sa.BigInteger, nullable=False, server_default="0"),
)
"""One row a webhook. `secret` is encrypted. A webhook with `events` was made by MLflow's API."""

OUTBOX = sa.Table(
    "registry_outbox",
    SCHEMA,
    _numbered_key(),
    sa.Column("webhook_key", _KEY, nullable=False),
    *_integers("sequence"),
    *_texts("body"),
    sa.Column("attempts", sa.Integer, nullable=False),
    *_texts("status"),
    *_integers("due_us"),
    *_texts("last_error"),
    sa.Index("registry_outbox_due", "status", "due_us"),
    sa.Index("registry_outbox_webhook", "webhook_key", "key"),
    sa.Index("registry_outbox_queue", "webhook_key", "status", "due_us"),
)

FILES = sa.Table(
    "registry_files",
    SCHEMA,
    sa.Column("path", sa.Text, primary_key=True),
    *_integers("size_bytes"),
    *_texts("sha256", "blob"),
    *_integers("uploaded_us"),
    *_texts("uploaded_by"),
)
"""The files in the artifact store, by their path in it."""

ANCHORS = sa.Table(
    "registry_anchors",
    SCHEMA,
    sa.Column("target", sa.Text, primary_key=True),
    _given_key("slot"),
    *_integers("sequence", "at_us"),
    *_texts("hash"),
)
"""The audit heads that were written outside the database. `slot` is the interval in which that happened."""
