"""`ModelRegistry`: models, their versions and states, the audit, and which version serves."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import sqlalchemy as sa

from tensorforge.errors import AlreadyExistsError
from tensorforge.registry.database import audit
from tensorforge.registry.database.reads.registry_reader import Clock, RegistryReader
from tensorforge.registry.database.rows import find_model, read_model, to_metadata
from tensorforge.registry.database.tables import SCHEMA
from tensorforge.registry.database.times import from_micros, to_micros
from tensorforge.registry.database.writes import descriptions, labels, registering, removing
from tensorforge.registry.database.writes.changes import Change
from tensorforge.registry.database.writes.idempotency import (
    RequestKey,
    remember,
    version_created_before,
    was_answered,
)
from tensorforge.registry.database.writes.stage_moves import StageRequest, enter_stage
from tensorforge.registry.database.writes.transitions import (
    TransitionRequest,
    make_transitions,
    roll_back,
)
from tensorforge.registry.database.writes.validations import check_result, store_result
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import (
    Actor,
    ModelMetadata,
    RegisteredModel,
    Rollback,
    Sla,
    TensorSpec,
    Transition,
    ValidationRecord,
    ValidationResult,
)
from tensorforge.registry.domain.names import check_name, check_tags, check_text
from tensorforge.registry.domain.shapes import DueBump
from tensorforge.registry.domain.versions import Bump, ModelVersion
from tensorforge.storage.database import IN_MEMORY, Database


def _utc_now() -> datetime:
    return datetime.now(UTC)


class ModelRegistry(RegistryReader):
    """A registry of models and their versions.

    `database` is a `Database`, a URL or a path; without it the registry lives in memory. Threads may share a
    registry; each process opens its own on the same database. Every change is one transaction, which includes
    its audit row. A change without an `actor` is made in the name of the user who runs this process. `clock`
    returns the time in UTC.
    """

    def __init__(
        self, database: Database | str | Path = IN_MEMORY, *, clock: Clock = _utc_now
    ) -> None:
        self._owns_database = not isinstance(database, Database)
        opened = database if isinstance(database, Database) else Database(database)
        super().__init__(opened)
        self._clock = clock
        opened.create(SCHEMA)
        with opened.write() as connection:
            audit.create_head(connection)

    @property
    def database(self) -> Database:
        """The database that the registry reads and writes."""
        return self._database

    def close(self) -> None:
        """Close the database if this registry opened it; a second call does nothing."""
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now_us(self) -> int:
        return to_micros(self._clock())

    @contextlib.contextmanager
    def _change(self, model_id: str, actor: Actor | None) -> Iterator[Change]:
        """A transaction that changes an existing model; `NotFoundError` if there is none."""
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            yield Change(connection, model, actor or local_actor(), self._now_us())

    def register(
        self,
        metadata: ModelMetadata,
        *,
        tensors: Mapping[str, TensorSpec] | None = None,
        actor: Actor | None = None,
        request_key: RequestKey | None = None,
        must_exist: bool = False,
    ) -> ModelMetadata:
        """Add a version and, if it does not exist, its model; returns what was stored.

        With `must_exist` a missing model is a `NotFoundError`. `AlreadyExistsError` if the version is taken.
        `ConflictError` if the shapes would break users of the nearest version with the same major version. With
        a `request_key`, a repeated request returns what the first one stored.
        """
        checked, who = registering.check_metadata(metadata), actor or local_actor()
        with self._database.write() as connection:
            earlier = version_created_before(connection, request_key)
            if earlier is not None:
                return earlier
            change = registering.open_model(
                connection, checked.model_id, who, self._now_us(), must_exist=must_exist
            )
            stored = registering.register_version(change, checked, tensors or {})
            remember(change, request_key, stored.version)
            return stored

    def register_next(
        self,
        metadata: ModelMetadata,
        *,
        least: Bump = Bump.PATCH,
        tensors: Mapping[str, TensorSpec] | None = None,
        actor: Actor | None = None,
        request_key: RequestKey | None = None,
        must_exist: bool = False,
    ) -> tuple[ModelMetadata, DueBump]:
        """Like `register`, under the version that is due; `metadata.version` is ignored.

        The version follows the highest one by the bump that the change of shapes needs, at least `least`. The
        first version is 1.0.0. Returns what was stored, and why this bump was due.
        """
        checked, who = registering.check_metadata(metadata), actor or local_actor()
        with self._database.write() as connection:
            earlier = version_created_before(connection, request_key)
            if earlier is not None:
                return earlier, DueBump(least, ("registered by the same request before",))
            change = registering.open_model(
                connection, checked.model_id, who, self._now_us(), must_exist=must_exist
            )
            stored, due = registering.register_next_version(change, checked, tensors or {}, least)
            remember(change, request_key, stored.version)
            return stored, due

    def create_model(
        self,
        model_id: str,
        *,
        description: str = "",
        tags: Mapping[str, str] | None = None,
        sla: Sla | None = None,
        actor: Actor | None = None,
        request_key: RequestKey | None = None,
    ) -> RegisteredModel:
        """Add a model without versions; `AlreadyExistsError` if the name is taken.

        With a `request_key`, a repeated request returns the model that the first one created.
        """
        check_name("model_id", model_id)
        check_text("description", description)
        checked, who, now_us = check_tags(tags or {}), actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            if was_answered(connection, request_key):
                return read_model(connection, model_id)
            change = registering.create_model(
                connection, model_id, who, now_us, description=description, tags=checked
            )
            if sla is not None:
                descriptions.set_sla(change, sla)
            remember(change, request_key, None)
        return RegisteredModel(
            model_id=model_id,
            description=description,
            created_at=from_micros(now_us),
            updated_at=from_micros(now_us),
            tags=dict(sorted(checked.items())),
            aliases={},
            sla=sla,
            production=None,
            version_count=0,
        )

    def set_sla(self, model_id: str, sla: Sla | None, *, actor: Actor | None = None) -> None:
        """Set the limits that a version must meet to enter staging or production; `None` removes them."""
        with self._change(model_id, actor) as change:
            descriptions.set_sla(change, sla)

    def describe_model(
        self, model_id: str, description: str, *, actor: Actor | None = None
    ) -> RegisteredModel:
        """Replace a model's description; returns the model."""
        check_text("description", description)
        with self._change(model_id, actor) as change:
            descriptions.describe_model(change, description)
            return read_model(change.connection, model_id)

    def describe_version(
        self,
        model_id: str,
        version: ModelVersion,
        description: str,
        *,
        actor: Actor | None = None,
    ) -> ModelMetadata:
        """Replace a version's description; returns the version."""
        check_text("description", description)
        with self._change(model_id, actor) as change:
            descriptions.describe_version(change, change.find_version(version), description)
            return to_metadata(change.find_version(version))

    def sign_version(
        self,
        model_id: str,
        version: ModelVersion,
        signature: str,
        public_key: str,
        *,
        actor: Actor | None = None,
    ) -> ModelMetadata:
        """Store a signature that `signatures.sign_version` made; `IntegrityError` if it does not fit."""
        with self._change(model_id, actor) as change:
            descriptions.sign_version(change, change.find_version(version), signature, public_key)
            return to_metadata(change.find_version(version))

    def rename_model(
        self, model_id: str, new_id: str, *, actor: Actor | None = None
    ) -> RegisteredModel:
        """Give a model another name; its versions and its history stay with it.

        `AlreadyExistsError` if the new name is taken.
        """
        check_name("new name", new_id)
        try:
            with self._change(model_id, actor) as change:
                descriptions.rename_model(change, new_id)
                return read_model(change.connection, new_id)
        except sa.exc.IntegrityError as error:
            raise AlreadyExistsError(f"there is a model called {new_id!r} already") from error

    def set_tags(
        self,
        model_id: str,
        version: ModelVersion | None = None,
        *,
        put: Mapping[str, str] | None = None,
        drop: Iterable[str] = (),
        actor: Actor | None = None,
    ) -> None:
        """Set the tags `put` and remove the keys `drop`, of a model or of one of its versions.

        A key in `drop` that is not set is ignored.
        """
        with self._change(model_id, actor) as change:
            row = None if version is None else change.find_version(version)
            labels.change_tags(change, row, put or {}, drop)

    def set_alias(
        self,
        model_id: str,
        alias: str,
        version: ModelVersion,
        *,
        actor: Actor | None = None,
        protected: bool = False,
        force: bool = False,
    ) -> None:
        """Point an alias at a version. An alias that points at another version is replaced.

        A `protected` alias may point only at a version in canary or production, else `ConflictError`; `force`
        overrides that, and the audit shows it.
        """
        with self._change(model_id, actor) as change:
            labels.set_alias(change, alias, version, protected=protected, force=force)

    def delete_alias(self, model_id: str, alias: str, *, actor: Actor | None = None) -> None:
        """Remove an alias; `NotFoundError` if there is none."""
        with self._change(model_id, actor) as change:
            labels.delete_alias(change, alias)

    def transition_state(
        self,
        model_id: str,
        version: ModelVersion,
        new_state: DeploymentState,
        *,
        actor: Actor | None = None,
        reason: str = "",
        force: bool = False,
        expected_revision: int | None = None,
        retire_previous: bool = False,
    ) -> Transition:
        """Take a version into `new_state`, if the lifecycle has this transition and its evidence was recorded.

        Validating → staging and canary → production need a validation that was recorded since the version
        entered the state it leaves, passed, and meets the model's SLA. `force` overrides missing evidence,
        never the lifecycle; it needs a reason and an actor with the scope `registry:force`. With
        `expected_revision` the transition is a `LostRaceError` if the version is at another revision.
        `retire_previous` deprecates the versions that were in production before.
        """
        request = TransitionRequest(
            reason=reason,
            force=force,
            expected_revision=expected_revision,
            retire_previous=retire_previous,
        )
        return self.transition_path(model_id, version, (new_state,), request, actor=actor)

    def transition_path(
        self,
        model_id: str,
        version: ModelVersion,
        path: Iterable[DeploymentState],
        request: TransitionRequest,
        *,
        actor: Actor | None = None,
    ) -> Transition:
        """Make several transitions in one transaction, each with its audit row; all of them or none."""
        with self._change(model_id, actor) as change:
            return make_transitions(change, version, path, request)

    def enter_stage(
        self,
        model_id: str,
        version: ModelVersion,
        request: StageRequest,
        *,
        actor: Actor | None = None,
    ) -> ModelMetadata:
        """Take a version into one of MLflow's stages, with all that this causes, in one transaction.

        Returns the version as it is stored when the transaction ends. Missing evidence is overridden if the
        actor has the scope `registry:force`, and the audit shows it.
        """
        with self._change(model_id, actor) as change:
            return enter_stage(change, version, request)

    def rollback(
        self,
        model_id: str,
        *,
        to: ModelVersion | None = None,
        reason: str = "",
        actor: Actor | None = None,
        expected_revision: int | None = None,
    ) -> Rollback:
        """Deprecate the version that serves and let another version in production serve, in one transaction.

        `to` names that version; without it the best one serves: highest accuracy, then lowest p99 latency.
        `ConflictError` if no other version is in production.
        """
        request = TransitionRequest(reason=reason, expected_revision=expected_revision)
        with self._change(model_id, actor) as change:
            return roll_back(change, to, request)

    def record_validation(
        self, result: ValidationResult, *, actor: Actor | None = None
    ) -> ValidationRecord:
        """Store what a validation measured, as evidence for the state that the version is in now."""
        check_result(result)
        with self._change(result.model_id, actor) as change:
            return store_result(change, result)

    def delete_version(
        self, model_id: str, version: ModelVersion, *, actor: Actor | None = None
    ) -> None:
        """Remove a version; `ConflictError` if it serves. Its history stays in the audit."""
        with self._change(model_id, actor) as change:
            removing.remove_version(change, change.find_version(version))

    def delete_model(self, model_id: str, *, actor: Actor | None = None) -> None:
        """Remove a model and its versions; `ConflictError` if one serves. Its history stays in the audit."""
        with self._change(model_id, actor) as change:
            removing.remove_model(change)


def local_actor() -> Actor:
    """The user who runs this process."""
    try:
        return Actor(name=getpass.getuser())
    except (KeyError, OSError):
        return Actor(name="unknown")
