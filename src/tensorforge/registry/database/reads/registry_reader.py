"""`RegistryReader`: every question that a registry answers. Each call reads one consistent snapshot."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tensorforge.errors import NotFoundError
from tensorforge.registry.database import audit
from tensorforge.registry.database.audit import AuditEntry, AuditHead
from tensorforge.registry.database.reads.comparison import VersionDiff, compare
from tensorforge.registry.database.reads.overviews import (
    ModelOverview,
    read_overviews,
    to_models,
)
from tensorforge.registry.database.reads.search import (
    MODEL_SEARCH,
    VERSION_SEARCH,
    Bounds,
    Document,
    Page,
    PageRequest,
    check_page_size,
    find_documents,
    find_page,
)
from tensorforge.registry.database.rows import (
    VERSION_BY_ALIAS,
    VERSION_BY_NUMBER,
    VERSION_BY_PARTS,
    VERSION_ORDER,
    VERSION_QUERY,
    find_model,
    find_model_with_tags,
    find_version,
    find_version_or_none,
    latest_validation,
    parse_stored_version,
    parts_of,
    read_model,
    tensors_of,
    to_metadata,
    to_sla,
    to_validation,
    validation_query,
    version_of,
)
from tensorforge.registry.database.tables import AUDIT, MODELS, PRODUCTION, VERSIONS
from tensorforge.registry.database.times import to_micros
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import (
    ModelMetadata,
    RegisteredModel,
    TensorSpec,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.domain.names import check_text
from tensorforge.registry.domain.selection import CanaryDecision, CanaryPolicy, decide_canary
from tensorforge.registry.domain.version_ranges import VersionRange, is_range, parse_range
from tensorforge.registry.domain.versions import ModelVersion
from tensorforge.storage.database import Database
from tensorforge.storage.prepared import Prepared, Row

Clock = Callable[[], datetime]

_RETIRED = (DeploymentState.DEPRECATED.value, DeploymentState.ARCHIVED.value)


class RegistryReader:
    """The read methods of a registry. Threads may share a reader."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # SQLite's driver releases the interpreter lock at every row. Threads that fetch many rows at the same
        # time would pass the lock back and forth, and finish later than one after the other.
        self._search_lock = threading.Lock() if database.is_sqlite else contextlib.nullcontext()

    def get(self, model_id: str, version: ModelVersion) -> ModelMetadata | None:
        """A version, or `None` if the model or the version does not exist."""
        check_text("model_id", model_id)
        return self._fetch_one(VERSION_BY_PARTS, {"model_id": model_id, **parts_of(version)})

    def _fetch_one(
        self, statement: Prepared, parameters: Mapping[str, Any]
    ) -> ModelMetadata | None:
        rows = self._database.fetch(statement, parameters)
        return to_metadata(rows[0]) if rows else None

    def require(self, model_id: str, version: ModelVersion) -> ModelMetadata:
        """A version; `NotFoundError` says whether the model or the version is missing."""
        found = self.get(model_id, version)
        if found is None:
            with self._database.read() as connection:
                return to_metadata(find_version(connection, model_id, version))
        return found

    def get_by_number(self, model_id: str, number: int) -> ModelMetadata | None:
        """A version by its number: versions of a model are numbered from 1 in the order of registration."""
        check_text("model_id", model_id)
        return self._fetch_one(VERSION_BY_NUMBER, {"model_id": model_id, "number": number})

    def get_latest(self, model_id: str) -> ModelMetadata | None:
        """The highest version of a model, whenever it was registered; `None` if there is none."""
        query = VERSION_QUERY.where(MODELS.c.model_id == model_id)
        return self._first(query.order_by(*_descending()))

    def latest_in_state(
        self, model_id: str, states: Sequence[DeploymentState]
    ) -> ModelMetadata | None:
        """The highest version of a model that is in one of these states; `None` if there is none."""
        found = [self._highest(model_id, state) for state in states]
        return max(filter(None, found), key=lambda metadata: metadata.version, default=None)

    def _highest(self, model_id: str, state: DeploymentState) -> ModelMetadata | None:
        query = VERSION_QUERY.where(MODELS.c.model_id == model_id, VERSIONS.c.state == state.value)
        return self._first(query.order_by(*_descending()))

    def _first(self, query: sa.Select[Any]) -> ModelMetadata | None:
        with self._database.read() as connection:
            row = connection.execute(query.limit(1)).mappings().one_or_none()
        return None if row is None else to_metadata(row)

    def list_versions(self, model_id: str) -> list[ModelVersion]:
        """Every version of a model, the lowest first; empty if the model does not exist."""
        query = (
            sa.select(*VERSION_ORDER.clauses)
            .join_from(VERSIONS, MODELS)
            .where(MODELS.c.model_id == model_id)
            .order_by(*VERSION_ORDER.clauses)
        )
        with self._database.read() as connection:
            return [version_of(row) for row in connection.execute(query).mappings()]

    def find_by_state(self, state: DeploymentState) -> list[ModelMetadata]:
        """Every version of every model that is in `state`, sorted by model and version."""
        query = VERSION_QUERY.where(VERSIONS.c.state == state.value)
        with self._database.read() as connection:
            found = [to_metadata(row) for row in connection.execute(query).mappings()]
        return sorted(found, key=lambda metadata: (metadata.model_id, metadata.version))

    def model_count(self) -> int:
        """How many models there are."""
        return self._count(MODELS)

    def version_count(self) -> int:
        """How many versions there are, over all models."""
        return self._count(VERSIONS)

    def _count(self, table: sa.Table) -> int:
        with self._database.read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0

    def get_model(self, model_id: str) -> RegisteredModel:
        """A model; `NotFoundError` if there is none."""
        check_text("model_id", model_id)
        with self._database.read() as connection:
            return read_model(connection, model_id)

    def get_by_alias(self, model_id: str, alias: str) -> ModelMetadata:
        """The version that an alias points to; `NotFoundError` if the model has no such alias."""
        check_text("model_id", model_id)
        check_text("alias", alias)
        found = self._fetch_one(VERSION_BY_ALIAS, {"model_id": model_id, "alias": alias})
        if found is None:
            with self._database.read() as connection:
                find_model(connection, model_id)
            raise NotFoundError(f"the model {model_id!r} has no alias {alias[:100]!r}")
        return found

    def highest_in_range(self, model_id: str, versions: VersionRange) -> ModelMetadata | None:
        """The highest version in a range that is neither deprecated nor archived; `None` if there is none."""
        query = VERSION_QUERY.where(
            MODELS.c.model_id == model_id,
            _bound(versions.low) <= VERSION_ORDER,
            VERSIONS.c.state.not_in(_RETIRED),
        )
        if versions.high is not None:
            query = query.where(_bound(versions.high) > VERSION_ORDER)
        return self._first(query.order_by(*_descending()))

    def resolve(self, model_id: str, text: str) -> ModelMetadata:
        """The version that a text names: `latest`, a state, a version, a range or an alias.

        `production` names the version that serves, any other state the highest version in it. A range names the
        highest version in it that is neither deprecated nor archived; an exact version names that one in any
        state. After `@` an alias comes first, even one that is called like a state. `NotFoundError` if there is
        no such version.
        """
        check_text("version", text, limit=200, required=True)
        self.get_model(model_id)
        word = text.removeprefix("@")
        found: ModelMetadata | None
        if text.startswith("@") and (aliased := self._alias_or_none(model_id, word)) is not None:
            return aliased
        if word.lower() == "latest":
            found = self.get_latest(model_id)
        elif word.lower() == DeploymentState.PRODUCTION.value:
            found = self.production(model_id)
        elif word.lower() in {state.value for state in DeploymentState}:
            found = self._highest(model_id, DeploymentState(word.lower()))
        elif is_range(word):
            found = self._in_range(model_id, parse_range(word))
        else:
            return self.get_by_alias(model_id, word)
        if found is None:
            raise NotFoundError(f"no version of {model_id!r} is {text!r}")
        return found

    def _alias_or_none(self, model_id: str, alias: str) -> ModelMetadata | None:
        return self._fetch_one(VERSION_BY_ALIAS, {"model_id": model_id, "alias": alias})

    def newest(self, model_id: str) -> ModelMetadata | None:
        """The version of a model that was registered last; `None` if there is none."""
        query = VERSION_QUERY.where(MODELS.c.model_id == model_id)
        return self._first(query.order_by(VERSIONS.c.number.desc()))

    def _in_range(self, model_id: str, versions: VersionRange) -> ModelMetadata | None:
        low, high = versions.low, versions.high
        if high == (low[0], low[1], low[2] + 1):
            return self.get(model_id, ModelVersion(*low))
        return self.highest_in_range(model_id, versions)

    def search_versions(
        self,
        filter_text: str = "",
        *,
        order_by: Sequence[str] = (),
        limit: int = 100,
        token: str | None = None,
        model_id: str | None = None,
        versions: VersionRange | None = None,
    ) -> Page[ModelMetadata]:
        """One page of the versions that match a filter, the newest first unless `order_by` says otherwise.

        `model_id` and `versions` restrict the search to one model and to a range. `token` is the `next_token`
        of the page before.
        """
        low, high = (None, None) if versions is None else (versions.low, versions.high)
        with self._search_lock, self._database.read() as connection:
            key = None
            if model_id is not None:
                check_text("model_id", model_id)
                key = find_model(connection, model_id)["key"]
            search = PageRequest(
                filter_text=filter_text,
                order_by=order_by,
                limit=limit,
                token=token,
                bounds=Bounds(model_key=key, low=low, high=high),
            )
            rows, next_token = find_page(connection, VERSION_SEARCH, search)
        return Page(tuple(to_metadata(row) for row in rows), next_token)

    def search_version_documents(
        self,
        document: Document,
        filter_text: str = "",
        *,
        order_by: Sequence[str] = (),
        limit: int = 100,
        token: str | None = None,
    ) -> tuple[str, str | None]:
        """Like `search_versions`, but the database writes each version as a JSON document.

        Returns the items of a JSON array as text, and the token of the next page. Prompts are found only by a
        filter for their tag.
        """
        search = PageRequest(
            filter_text=filter_text,
            order_by=order_by,
            limit=limit,
            token=token,
            bounds=Bounds(prompts=False),
        )
        return find_documents(self._database, VERSION_SEARCH, document, search)

    def search_models(
        self,
        filter_text: str = "",
        *,
        order_by: Sequence[str] = (),
        limit: int = 100,
        token: str | None = None,
    ) -> Page[RegisteredModel]:
        """One page of the models that match a filter, sorted by name unless `order_by` says otherwise."""
        search = PageRequest(filter_text=filter_text, order_by=order_by, limit=limit, token=token)
        with self._search_lock, self._database.read() as connection:
            rows, next_token = find_page(connection, MODEL_SEARCH, search)
            return Page(tuple(to_models(connection, rows)), next_token)

    def search_overviews(
        self,
        filter_text: str = "",
        *,
        order_by: Sequence[str] = (),
        limit: int = 100,
        token: str | None = None,
    ) -> Page[ModelOverview]:
        """Like `search_models`, with the newest version in each of MLflow's stages.

        Prompts are found only by a filter for their tag.
        """
        search = PageRequest(
            filter_text=filter_text,
            order_by=order_by,
            limit=limit,
            token=token,
            bounds=Bounds(prompts=False),
        )
        with self._search_lock, self._database.read() as connection:
            rows, next_token = find_page(connection, MODEL_SEARCH, search)
            return Page(tuple(read_overviews(connection, rows)), next_token)

    def overview(self, model_id: str) -> ModelOverview:
        """A model with the newest version in each of MLflow's stages; `NotFoundError` if there is none."""
        check_text("model_id", model_id)
        with self._database.read() as connection:
            (found,) = read_overviews(connection, [find_model_with_tags(connection, model_id)])
            return found

    def get_validation(self, model_id: str, version: ModelVersion) -> ValidationResult | None:
        """The newest validation of a version; `None` if none was recorded or the version does not exist."""
        with self._database.read() as connection:
            row = find_version_or_none(connection, model_id, version)
            record = None if row is None else latest_validation(connection, model_id, row)
        return None if record is None else record.result

    def validations(
        self, model_id: str, version: ModelVersion, *, limit: int = 100
    ) -> list[ValidationRecord]:
        """The validations of a version, the newest first."""
        with self._database.read() as connection:
            row = find_version(connection, model_id, version)
            query = validation_query(row["key"]).limit(check_page_size(limit))
            found = connection.execute(query).mappings()
            return [to_validation(model_id, version, each) for each in found]

    def canary_decision(
        self, model_id: str, version: ModelVersion, policy: CanaryPolicy | None = None
    ) -> CanaryDecision:
        """Judge a version's newest validation by the SLA and by that of the version that serves.

        `NotFoundError` if the version has no validation.
        """
        with self._database.read() as connection:
            model = find_model(connection, model_id)
            row = find_version(connection, model_id, version)
            record = latest_validation(connection, model_id, row)
            baseline = self._serving_validation(connection, model, row)
        if record is None:
            raise NotFoundError(f"no validation of {model_id} {version} was recorded")
        return decide_canary(record.result, baseline, to_sla(model), policy)

    @staticmethod
    def _serving_validation(
        connection: sa.Connection, model: Row, canary: Row
    ) -> ValidationResult | None:
        if model["production_key"] in (None, canary["key"]):
            return None
        query = sa.select(VERSIONS).where(VERSIONS.c.key == model["production_key"])
        serving = connection.execute(query).mappings().one()
        record = latest_validation(connection, model["model_id"], serving)
        return None if record is None else record.result

    def tensors(self, model_id: str, version: ModelVersion) -> dict[str, TensorSpec]:
        """The tensors that were declared when the version was registered."""
        with self._database.read() as connection:
            return tensors_of(connection, find_version(connection, model_id, version)["key"])

    def diff(self, model_id: str, before: ModelVersion, after: ModelVersion) -> VersionDiff:
        """What changed between two versions, and which bump the change calls for."""
        with self._database.read() as connection:
            return compare(connection, model_id, before, after)

    def production(self, model_id: str) -> ModelMetadata | None:
        """The version that serves now; `None` if none does."""
        version = self.get_model(model_id).production
        return None if version is None else self.get(model_id, version)

    def production_at(self, model_id: str, moment: datetime) -> ModelVersion | None:
        """The version that served at a moment; `None` if none did."""
        check_text("model_id", model_id)
        at_us = to_micros(moment)
        with self._database.read() as connection:
            model = find_model(connection, model_id)
            query = (
                sa.select(PRODUCTION.c.version)
                .where(PRODUCTION.c.model_key == model["key"], PRODUCTION.c.at_us <= at_us)
                .order_by(PRODUCTION.c.at_us.desc(), PRODUCTION.c.sequence.desc())
                .limit(1)
            )
            return parse_stored_version(connection.scalar(query))

    def history(
        self,
        model_id: str | None = None,
        *,
        version: ModelVersion | None = None,
        after: int = 0,
        limit: int = 100,
    ) -> list[AuditEntry]:
        """Audit rows with numbers above `after`, the oldest first: of all models, of one, or of one version.

        The history of a model can still be read after the model was renamed or deleted.
        """
        conditions = [AUDIT.c.sequence > after]
        with self._database.read() as connection:
            if model_id is not None:
                check_text("model_id", model_id)
                conditions.append(AUDIT.c.model_key == _audited_key(connection, model_id))
            if version is not None:
                conditions.append(AUDIT.c.version == str(version))
            query = sa.select(AUDIT).where(*conditions).order_by(AUDIT.c.sequence)
            rows = connection.execute(query.limit(check_page_size(limit))).mappings()
            return [audit.to_entry(row) for row in rows]

    def verify_audit(self, *known: AuditHead) -> AuditHead:
        """Recompute the hashes of the audit; `IntegrityError` names the first row that was tampered with.

        The versions and aliases in the tables must be those that the audit tells of. `known` are heads that
        were noted earlier. The audit must still contain them.
        """
        with self._database.read() as connection:
            return audit.verify(connection, *known)

    def audit_head(self) -> AuditHead:
        """The head of the audit as it is stored, without a check."""
        with self._database.read() as connection:
            return audit.read_head(connection)


def _audited_key(connection: sa.Connection, model_id: str) -> int:
    key = connection.scalar(sa.select(MODELS.c.key).where(MODELS.c.model_id == model_id))
    if key is None:
        query = sa.select(sa.func.max(AUDIT.c.model_key)).where(AUDIT.c.model_id == model_id)
        key = connection.scalar(query)
    if key is None:
        raise NotFoundError(f"no model is or was called {model_id[:200]!r}")
    return int(key)


def _bound(parts: tuple[int, int, int]) -> sa.ColumnElement[Any]:
    return sa.tuple_(*(sa.literal(part, sa.BigInteger) for part in parts))


def _descending() -> list[Any]:
    return [column.desc() for column in VERSION_ORDER.clauses]
