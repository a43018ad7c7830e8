"""Whether the versions and aliases in the tables are those that the audit tells of.

The chain of hashes protects the audit's rows. These in turn have a digest of each version's content, its state,
its signature and its aliases. So a source or checksum that was swapped in the tables shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import IntegrityError
from tensorforge.registry.database.rows import record_digest, version_of
from tensorforge.registry.database.tables import ALIASES, MODELS, VERSIONS


@dataclass(slots=True)
class _Version:
    """What the audit says about a version. `digest` is empty if an earlier release registered it."""

    state: str
    checksum: str
    digest: str
    signature: str = ""


Key = tuple[int, str]


@dataclass(slots=True)
class AuditedRecords:
    """The versions and aliases that must exist after the rows of the audit that were replayed."""

    _versions: dict[Key, _Version] = field(default_factory=dict)
    _aliases: dict[Key, str] = field(default_factory=dict)

    def replay(self, row: Mapping[Any, Any]) -> None:
        """Take a row of the audit into account; rows must come in order."""
        evidence = json.loads(row["evidence"])
        model, action, key = row["model_key"], row["action"], (row["model_key"], row["version"])
        if action == "register":
            self._versions[key] = _Version(
                row["to_state"], evidence["checksum"], evidence.get("record", "")
            )
        elif action in ("transition", "rollback", "stage_move"):
            self._versions[key].state = row["to_state"]
        elif action == "sign":
            self._versions[key].signature = evidence["signature"]
        elif action == "set_alias":
            self._aliases[model, evidence["alias"]] = row["version"]
        elif action == "delete_alias":
            self._aliases.pop((model, evidence["alias"]), None)
        elif action == "delete_version":
            self._versions.pop(key, None)
            self._drop_aliases(lambda of, version: (of, version) == key)
        elif action == "delete_model":
            self._versions = {k: v for k, v in self._versions.items() if k[0] != model}
            self._drop_aliases(lambda of, _: of == model)

    def _drop_aliases(self, gone: Any) -> None:
        kept = {k: v for k, v in self._aliases.items() if not gone(k[0], v)}
        self._aliases = kept

    def compare(self, connection: sa.Connection) -> None:
        """`IntegrityError` names the first version or alias in the tables that the audit does not tell of."""
        names = {row.key: row.model_id for row in connection.execute(sa.select(MODELS))}
        remaining = dict(self._versions)
        for row in connection.execute(sa.select(VERSIONS)).mappings():
            version = str(version_of(row))
            known = remaining.pop((row["model_key"], version), None)
            _check(f"{names.get(row['model_key'])} {version}", row, known)
        for model, version in remaining:
            raise IntegrityError(
                f"{names.get(model)} {version} is in the audit but not in the tables"
            )
        self._compare_aliases(connection, names)

    def _compare_aliases(self, connection: sa.Connection, names: Mapping[int, str]) -> None:
        query = sa.select(ALIASES.c.model_key, ALIASES.c.alias, VERSIONS).join_from(
            ALIASES, VERSIONS, ALIASES.c.version_key == VERSIONS.c.key
        )
        found = {
            (row["model_key"], row["alias"]): str(version_of(row))
            for row in connection.execute(query).mappings()
        }
        for model, alias in sorted(found.items() ^ self._aliases.items()):
            raise IntegrityError(
                f"the alias {model[1]} of {names.get(model[0])} is not as the audit tells ({alias})"
            )


def _check(name: str, row: Mapping[Any, Any], known: _Version | None) -> None:
    if known is None:
        raise IntegrityError(f"{name} is in the tables but not in the audit")
    if row["checksum"] != known.checksum or (known.digest and record_digest(row) != known.digest):
        raise IntegrityError(f"{name} was changed in the tables after it was registered")
    if row["state"] != known.state:
        raise IntegrityError(
            f"{name} is {row['state']} in the tables, but the audit says {known.state}"
        )
    if row["signature"] != known.signature:
        raise IntegrityError(f"the signature of {name} is not the one that the audit tells of")
