"""The model registry: versions, where they stand, why, and what serves."""

from __future__ import annotations

import getpass
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import sqlalchemy as sa

from tensorforge.errors import AlreadyExistsError, ConflictError
from tensorforge.registry.database.reads.registry_reader import Clock, RegistryReader
from tensorforge.registry.database.rows import (
    find_model,
    find_version,
    read_model,
    to_metadata,
)
from tensorforge.registry.database.tables import MODEL_TAGS, SCHEMA
from tensorforge.registry.database.times import from_micros, to_micros
from tensorforge.registry.database.writes import (
    changes,
    descriptions,
    labels,
    removing,
    transitions,
)
from tensorforge.registry.database.writes.idempotency import RequestKey, earlier_answer, remember
from tensorforge.registry.database.writes.labels import insert_tags
from tensorforge.registry.database.writes.registering import (
    check_metadata,
    create_model,
    insert_version,
    model_for_writing,
    next_version,
)
from tensorforge.registry.database.writes.transitions import Request
from tensorforge.registry.database.writes.validations import check_result, keep_result
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
    """Models, their versions, and the record of who moved which one where and why.

    `database` is a `Database`, a URL or a path; in memory by default. Threads share a registry, processes open
    their own on the same database. Every change is one transaction with its audit row. Those who pass no
    `actor` act under the name of the system's user. `clock` gives the time in UTC.
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
            changes.prepare(connection)

    @property
    def database(self) -> Database:
        """The database behind the registry."""
        return self._database

    def close(self) -> None:
        """Close the database, if it was opened here; closing twice is fine."""
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _now_us(self) -> int:
        return to_micros(self._clock())

    def register(
        self,
        metadata: ModelMetadata,
        *,
        tensors: Mapping[str, TensorSpec] | None = None,
        actor: Actor | None = None,
        request_key: RequestKey | None = None,
        must_exist: bool = False,
    ) -> ModelMetadata:
        """Add a version, and its model if that is new; returns what was stored.

        With `must_exist` a model that is new is a `NotFoundError` instead.
        `AlreadyExistsError` if the version is taken. `ConflictError` if its shapes would break the users of its
        neighbour with the same major version. With a `request_key`, repeating the same request
        returns what the first one stored.
        """
        checked, tensors, who = check_metadata(metadata), tensors or {}, actor or local_actor()
        now_us = self._now_us()
        with self._database.write() as connection:
            earlier = self._earlier_version(connection, request_key)
            if earlier is not None:
                return earlier
            model = model_for_writing(
                connection, checked.model_id, who, now_us, must_exist=must_exist
            )
            kept = insert_version(connection, model, checked, tensors, who, now_us)
            if request_key:
                remember(connection, request_key, checked.model_id, checked.version, now_us)
            return kept

    @staticmethod
    def _earlier_version(
        connection: sa.Connection, request_key: RequestKey | None
    ) -> ModelMetadata | None:
        earlier = request_key and earlier_answer(connection, request_key)
        if not earlier:
            return None
        model_id, version = earlier
        if version is None:
            raise ConflictError("the key was used before, to create a model")
        return to_metadata(find_version(connection, model_id, version))

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
        """Register under the version that is due, whatever `metadata.version` says.

        The bump after the highest version is the one that the change of shapes calls for, at least `least`; the
        first version is 1.0.0. Returns what was stored, and why this bump was due.
        """
        checked, tensors, who = check_metadata(metadata), tensors or {}, actor or local_actor()
        now_us = self._now_us()
        with self._database.write() as connection:
            earlier = self._earlier_version(connection, request_key)
            if earlier is not None:
                return earlier, DueBump(least, ("registered by the same request before",))
            model = model_for_writing(
                connection, checked.model_id, who, now_us, must_exist=must_exist
            )
            version, due = next_version(connection, model["key"], checked, tensors, least)
            numbered = replace(checked, version=version)
            kept = insert_version(connection, model, numbered, tensors, who, now_us, is_next=True)
            if request_key:
                remember(connection, request_key, checked.model_id, version, now_us)
            return kept, due

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

        With a `request_key`, repeating the same request returns what the first one made.
        """
        check_name("model_id", model_id)
        check_text("description", description)
        checked, who, now_us = check_tags(tags or {}), actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            if request_key and earlier_answer(connection, request_key):
                return read_model(connection, model_id)
            model = create_model(connection, model_id, who, now_us, description=description)
            insert_tags(connection, MODEL_TAGS, "model_key", model["key"], checked)
            if sla is not None:
                descriptions.set_sla(connection, model, sla, who, now_us)
            if request_key:
                remember(connection, request_key, model_id, None, now_us)
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
        """Say what every version must reach before it may be promoted; `None` for no limits."""
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            descriptions.set_sla(connection, model, sla, actor or local_actor(), self._now_us())

    def describe_model(
        self, model_id: str, description: str, *, actor: Actor | None = None
    ) -> RegisteredModel:
        """Replace a model's description."""
        check_text("description", description)
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            descriptions.describe_model(connection, model, description, who, now_us)
            return read_model(connection, model_id)

    def describe_version(
        self,
        model_id: str,
        version: ModelVersion,
        description: str,
        *,
        actor: Actor | None = None,
    ) -> ModelMetadata:
        """Replace a version's description."""
        check_text("description", description)
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            row = find_version(connection, model_id, version)
            descriptions.describe_version(connection, model, row, description, who, now_us)
            return to_metadata(find_version(connection, model_id, version))

    def rename_model(
        self, model_id: str, new_id: str, *, actor: Actor | None = None
    ) -> RegisteredModel:
        """Give a model another name; its versions and its history stay with it."""
        check_name("new name", new_id)
        who, now_us = actor or local_actor(), self._now_us()
        try:
            with self._database.write() as connection:
                model = find_model(connection, model_id, lock=True)
                descriptions.rename_model(connection, model, new_id, who, now_us)
                return read_model(connection, new_id)
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
        """Set and remove tags of a model, or of one of its versions. Absent ones are dropped silently."""
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            row = None if version is None else find_version(connection, model_id, version)
            labels.change_tags(connection, model, row, put or {}, drop, who, now_us)

    def set_alias(
        self, model_id: str, alias: str, version: ModelVersion, *, actor: Actor | None = None
    ) -> None:
        """Let an alias point to a version, wherever it pointed before."""
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            who = actor or local_actor()
            labels.set_alias(connection, model, alias, version, who, self._now_us())

    def delete_alias(self, model_id: str, alias: str, *, actor: Actor | None = None) -> None:
        """Remove an alias; `NotFoundError` if there is none."""
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            labels.delete_alias(connection, model, alias, actor or local_actor(), self._now_us())

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
        """Move a version, if the lifecycle has the move and the evidence for it was recorded.

        Validating → staging and canary → production need a validation that was recorded since the version
        entered the state it leaves, passed, and meets the model's SLA. `force` overrides missing evidence,
        never the lifecycle; it needs a reason and an actor with the scope `registry:force`. With
        `expected_revision` the move happens only if nobody moved the version meanwhile
        (`LostRaceError`). `retire_previous` deprecates what was in production before.
        """
        steps = (new_state,)
        return self.walk(
            model_id,
            version,
            steps,
            request=Request(
                actor=actor or local_actor(),
                reason=reason,
                force=force,
                expected_revision=expected_revision,
            ),
            retire_previous=retire_previous,
        )

    def walk(
        self,
        model_id: str,
        version: ModelVersion,
        steps: Iterable[DeploymentState],
        *,
        request: Request,
        retire_previous: bool = False,
    ) -> Transition:
        """Make several moves in one transaction, each with its audit row; all of them or none."""
        now_us, sequence = self._now_us(), 0
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            before = DeploymentState(find_version(connection, model_id, version)["state"])
            for step in steps:
                sequence = transitions.move(connection, model, version, step, request, now_us)
                request = replace(request, expected_revision=None)
                model = find_model(connection, model_id, lock=True)
            row = find_version(connection, model_id, version)
            if retire_previous and row["state"] == DeploymentState.PRODUCTION.value:
                transitions.retire_others(connection, model, version, request, now_us)
            metadata = to_metadata(row)
        return Transition(metadata=metadata, previous=before, audit_sequence=sequence)

    def rollback(
        self,
        model_id: str,
        *,
        to: ModelVersion | None = None,
        reason: str = "",
        actor: Actor | None = None,
        expected_revision: int | None = None,
    ) -> Rollback:
        """Deprecate the version that serves and let an earlier one serve again, in one step.

        Only versions that are still in production can take over: `to` names one; otherwise the best of them
        does (highest accuracy, then lowest p99). `ConflictError` if there is none.
        """
        request = Request(
            actor=actor or local_actor(), reason=reason, expected_revision=expected_revision
        )
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            return transitions.roll_back(connection, model, to, request, self._now_us())

    def record_validation(
        self, result: ValidationResult, *, actor: Actor | None = None
    ) -> ValidationRecord:
        """Keep what a validation measured, as evidence for the state that the version is in now."""
        check_result(result)
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, result.model_id, lock=True)
            return keep_result(connection, model, result, who, now_us)

    def delete_version(
        self, model_id: str, version: ModelVersion, *, actor: Actor | None = None
    ) -> None:
        """Remove a version that does not serve; its history stays in the audit."""
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            row = find_version(connection, model_id, version)
            removing.remove_version(connection, model, row, who, now_us)

    def delete_model(self, model_id: str, *, actor: Actor | None = None) -> None:
        """Remove a model of which no version serves; its history stays in the audit."""
        who, now_us = actor or local_actor(), self._now_us()
        with self._database.write() as connection:
            model = find_model(connection, model_id, lock=True)
            removing.remove_model(connection, model, who, now_us)


def local_actor() -> Actor:
    """Whoever runs this process."""
    try:
        return Actor(name=getpass.getuser())
    except (KeyError, OSError):
        return Actor(name="unknown")
