"""Requests about versions, and the answers to them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorforge.registry.database.reads.comparison import VersionDiff
from tensorforge.registry.domain.deployment_lifecycle import DeploymentState
from tensorforge.registry.domain.models import Lineage, ModelMetadata, TensorSpec
from tensorforge.registry.domain.shapes import DueBump
from tensorforge.registry.domain.versions import Bump, require_version
from tensorforge.registry.service.shared_wire import (
    Answer,
    Request,
    SearchQuery,
    Shape,
    Tags,
    Text,
    Version,
    Whole,
)


class TensorBody(msgspec.Struct, forbid_unknown_fields=True):
    """Type and shape of a tensor."""

    dtype: Annotated[str, Meta(min_length=1, max_length=40)]
    shape: Shape


class CreateVersion(Request):
    """A new version. Without `version` the next one that the change of shapes calls for is taken."""

    version: Version | None = None
    least_bump: Bump = Bump.PATCH
    name: Annotated[str, Meta(max_length=500)] = ""
    framework: Annotated[str, Meta(max_length=100)] = "pytorch"
    input_shape: Shape = msgspec.field(default_factory=list)
    output_shape: Shape = msgspec.field(default_factory=list)
    size_bytes: Whole = 0
    checksum: Annotated[str, Meta(max_length=500)] = ""
    source: Annotated[str, Meta(max_length=2_000)] = ""
    description: Text = ""
    tags: Tags = msgspec.field(default_factory=dict)
    run_id: Annotated[str, Meta(max_length=500)] = ""
    step: Whole | None = None
    checkpoint_id: Annotated[str, Meta(max_length=500)] = ""
    run_link: Annotated[str, Meta(max_length=2_000)] = ""
    tensors: Annotated[dict[str, TensorBody], Meta(max_length=100_000)] = msgspec.field(
        default_factory=dict
    )

    def metadata(self, model_id: str, now: datetime) -> ModelMetadata:
        """The version that this describes."""
        return ModelMetadata(
            model_id=model_id,
            name=self.name or model_id,
            version=require_version(self.version or "0.0.0"),
            framework=self.framework,
            input_shape=tuple(self.input_shape),
            output_shape=tuple(self.output_shape),
            size_bytes=self.size_bytes,
            checksum=self.checksum,
            registered_at=now,
            source=self.source,
            description=self.description,
            tags=self.tags,
            lineage=Lineage(
                run_id=self.run_id,
                step=self.step,
                checkpoint_id=self.checkpoint_id,
                run_link=self.run_link,
            ),
        )

    def specs(self) -> dict[str, TensorSpec]:
        """The declared tensors."""
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}


class UpdateVersion(Request):
    """What is to change of a version."""

    description: Text


class Move(Request):
    """A move along the lifecycle."""

    to: DeploymentState
    reason: Text = ""
    force: bool = False
    retire_previous: bool = False


class VersionsQuery(SearchQuery):
    """The same, within a range of versions."""

    range: Annotated[str, Meta(max_length=200)] = "*"


class ResolveQuery(Request):
    """A range, a state, an alias or `latest`."""

    version: Annotated[str, Meta(min_length=1, max_length=200)]


class DiffQuery(Request):
    """The two versions to compare."""

    before: Version
    after: Version


class LineageAnswer(Answer):
    """Where a version came from."""

    run_id: str
    step: int | None
    checkpoint_id: str
    run_link: str


class VersionAnswer(Answer):
    """A version."""

    model_id: str
    version: str
    number: int
    revision: int
    state: DeploymentState
    name: str
    framework: str
    input_shape: list[int]
    output_shape: list[int]
    size_bytes: int
    checksum: str
    source: str
    description: str
    tags: dict[str, str]
    aliases: list[str]
    lineage: LineageAnswer
    registered_at: datetime
    registered_by: str
    updated_at: datetime | None


class DueBumpAnswer(Answer):
    """Which bump a change calls for, and why."""

    bump: Bump
    reasons: list[str]


class CreatedVersion(Answer):
    """The new version, and why it got its number if the registry chose it."""

    version: VersionAnswer
    due: DueBumpAnswer | None


class VersionPage(Answer):
    """Some versions."""

    items: list[VersionAnswer]
    next_page_token: str | None


class TransitionAnswer(Answer):
    """A move that was made."""

    previous: DeploymentState
    audit_sequence: int
    version: VersionAnswer


class DiffAnswer(Answer):
    """What changed between two versions."""

    before: str
    after: str
    due: DueBumpAnswer
    compatibility: float
    fields: dict[str, list[str]]
    tags: dict[str, list[str | None]]
    rollback_priority: float | None
    rollback_reasons: list[str]


def version_answer(metadata: ModelMetadata) -> VersionAnswer:
    """A version as the wire shows it."""
    lineage = metadata.lineage
    return VersionAnswer(
        model_id=metadata.model_id,
        version=str(metadata.version),
        number=metadata.number,
        revision=metadata.revision,
        state=metadata.state,
        name=metadata.name,
        framework=metadata.framework,
        input_shape=list(metadata.input_shape),
        output_shape=list(metadata.output_shape),
        size_bytes=metadata.size_bytes,
        checksum=metadata.checksum,
        source=metadata.source,
        description=metadata.description,
        tags=dict(metadata.tags),
        aliases=list(metadata.aliases),
        lineage=LineageAnswer(
            run_id=lineage.run_id,
            step=lineage.step,
            checkpoint_id=lineage.checkpoint_id,
            run_link=lineage.run_link,
        ),
        registered_at=metadata.registered_at,
        registered_by=metadata.registered_by,
        updated_at=metadata.updated_at,
    )


def due_answer(due: DueBump) -> DueBumpAnswer:
    """Which bump is due, as the wire shows it."""
    return DueBumpAnswer(bump=due.bump, reasons=list(due.reasons))


def diff_answer(diff: VersionDiff) -> DiffAnswer:
    """A comparison as the wire shows it."""
    rollback = diff.rollback
    return DiffAnswer(
        before=str(diff.before.version),
        after=str(diff.after.version),
        due=due_answer(diff.due),
        compatibility=diff.compatibility,
        fields={field: list(pair) for field, pair in diff.fields.items()},
        tags={tag: list(pair) for tag, pair in diff.tags.items()},
        rollback_priority=None if rollback is None else rollback.priority,
        rollback_reasons=[] if rollback is None else list(rollback.reasons),
    )
