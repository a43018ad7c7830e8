"""The registry's tables. Times are microseconds since 1970 in UTC; a NaN is stored as NULL."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA = sa.MetaData()

# SQLite fills in only a plain INTEGER key by itself.
_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

MODELS = sa.Table(
    "registry_models",
    SCHEMA,
    sa.Column("key", _KEY, primary_key=True, autoincrement=True),
    sa.Column("model_id", sa.Text, nullable=False, unique=True),
    sa.Column("description", sa.Text, nullable=False, default=""),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("updated_us", sa.BigInteger, nullable=False),
    sa.Column("sla_max_latency_ms", sa.Double),
    sa.Column("sla_min_accuracy", sa.Double),
    sa.Column("last_number", sa.BigInteger, nullable=False, default=0),
    sa.Column("version_count", sa.BigInteger, nullable=False, default=0),
    sa.Column("production_key", _KEY),
    sa.Index("registry_models_updated", "updated_us", "key"),
)

VERSIONS = sa.Table(
    "registry_versions",
    SCHEMA,
    sa.Column("key", _KEY, primary_key=True, autoincrement=True),
    sa.Column("model_key", _KEY, sa.ForeignKey(MODELS.c.key), nullable=False),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("major", sa.BigInteger, nullable=False),
    sa.Column("minor", sa.BigInteger, nullable=False),
    sa.Column("patch", sa.BigInteger, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("framework", sa.Text, nullable=False),
    sa.Column("input_shape", sa.Text, nullable=False),
    sa.Column("output_shape", sa.Text, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("checksum", sa.Text, nullable=False),
    sa.Column("registered_us", sa.BigInteger, nullable=False),
    sa.Column("updated_us", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False, default=0),
    sa.Column("source", sa.Text, nullable=False, default=""),
    sa.Column("description", sa.Text, nullable=False, default=""),
    sa.Column("run_id", sa.Text, nullable=False, default=""),
    sa.Column("step", sa.BigInteger),
    sa.Column("checkpoint_id", sa.Text, nullable=False, default=""),
    sa.Column("run_link", sa.Text, nullable=False, default=""),
    sa.Column("registered_by", sa.Text, nullable=False, default=""),
    sa.UniqueConstraint("model_key", "major", "minor", "patch"),
    sa.UniqueConstraint("model_key", "number"),
    sa.Index("registry_versions_in_state", "model_key", "state", "major", "minor", "patch"),
    sa.Index("registry_versions_model", "model_key", "key"),
    sa.Index("registry_versions_state", "state", "key"),
    sa.Index("registry_versions_run", "run_id"),
    sa.Index("registry_versions_updated", "updated_us", "key"),
)

TENSORS = sa.Table(
    "registry_tensors",
    SCHEMA,
    sa.Column(
        "version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), primary_key=True, autoincrement=False
    ),
    sa.Column("tensors", sa.Text, nullable=False),
)

MODEL_TAGS = sa.Table(
    "registry_model_tags",
    SCHEMA,
    sa.Column(
        "model_key", _KEY, sa.ForeignKey(MODELS.c.key), primary_key=True, autoincrement=False
    ),
    sa.Column("tag", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Index("registry_model_tags_digest", "tag", "digest", "model_key"),
    sqlite_with_rowid=False,
)

VERSION_TAGS = sa.Table(
    "registry_version_tags",
    SCHEMA,
    sa.Column(
        "version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), primary_key=True, autoincrement=False
    ),
    sa.Column("tag", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Index("registry_version_tags_digest", "tag", "digest", "version_key"),
    sqlite_with_rowid=False,
)

ALIASES = sa.Table(
    "registry_aliases",
    SCHEMA,
    sa.Column(
        "model_key", _KEY, sa.ForeignKey(MODELS.c.key), primary_key=True, autoincrement=False
    ),
    sa.Column("alias", sa.Text, primary_key=True),
    sa.Column("version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), nullable=False),
    sa.Index("registry_aliases_version", "version_key"),
    sqlite_with_rowid=False,
)

VALIDATIONS = sa.Table(
    "registry_validations",
    SCHEMA,
    sa.Column("key", _KEY, primary_key=True, autoincrement=True),
    sa.Column("version_key", _KEY, sa.ForeignKey(VERSIONS.c.key), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("passed", sa.Boolean, nullable=False),
    sa.Column("latency_p50_ms", sa.Double),
    sa.Column("latency_p99_ms", sa.Double),
    sa.Column("accuracy_score", sa.Double),
    sa.Column("errors", sa.Text, nullable=False),
    sa.Column("samples", sa.BigInteger),
    sa.Column("recorded_us", sa.BigInteger, nullable=False),
    sa.Column("recorded_by", sa.Text, nullable=False),
    sa.Index("registry_validations_version", "version_key", "key"),
)

AUDIT = sa.Table(
    "registry_audit",
    SCHEMA,
    sa.Column("sequence", _KEY, primary_key=True, autoincrement=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("model_key", _KEY, nullable=False),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("from_state", sa.Text, nullable=False),
    sa.Column("to_state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("evidence", sa.Text, nullable=False),
    sa.Column("forced", sa.Boolean, nullable=False),
    sa.Column("previous_hash", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Index("registry_audit_model", "model_key", "sequence"),
)

AUDIT_HEAD = sa.Table(
    "registry_audit_head",
    SCHEMA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
)

PRODUCTION = sa.Table(
    "registry_production",
    SCHEMA,
    sa.Column("sequence", _KEY, primary_key=True, autoincrement=False),
    sa.Column("model_key", _KEY, nullable=False),
    sa.Column("at_us", sa.BigInteger, nullable=False),
    sa.Column("version", sa.Text),
    sa.Index("registry_production_model", "model_key", "at_us", "sequence"),
)

TOKENS = sa.Table(
    "registry_tokens",
    SCHEMA,
    sa.Column("token_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("secret_hash", sa.Text, nullable=False),
    sa.Column("scopes", sa.Text, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("expires_us", sa.BigInteger),
    sa.Column("revoked_us", sa.BigInteger),
)

IDEMPOTENCY = sa.Table(
    "registry_idempotency",
    SCHEMA,
    sa.Column("caller", sa.Text, primary_key=True),
    sa.Column("request_key", sa.Text, primary_key=True),
    sa.Column("request_hash", sa.Text, nullable=False),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("version", sa.Text, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Index("registry_idempotency_created", "created_us"),
)

WEBHOOKS = sa.Table(
    "registry_webhooks",
    SCHEMA,
    sa.Column("key", _KEY, primary_key=True, autoincrement=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("secret", sa.Text, nullable=False),
    sa.Column("actions", sa.Text, nullable=False),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("created_us", sa.BigInteger, nullable=False),
    sa.Column("created_by", sa.Text, nullable=False),
)

OUTBOX = sa.Table(
    "registry_outbox",
    SCHEMA,
    sa.Column("key", _KEY, primary_key=True, autoincrement=True),
    sa.Column("webhook_key", _KEY, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("due_us", sa.BigInteger, nullable=False),
    sa.Column("last_error", sa.Text, nullable=False),
    sa.Index("registry_outbox_due", "status", "due_us"),
    sa.Index("registry_outbox_webhook", "webhook_key", "key"),
)
