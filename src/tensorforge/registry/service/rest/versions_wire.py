"""Requests about versions, and their answers."""

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
    SearchQuery,
    Shape,
    Tags,
    Text,
    Version,
    Whole,
    WireRequest,
)


class TensorBody(msgspec.Struct, forbid_unknown_fields=True):
    """The type and shape of a tensor."""

    dtype: Annotated[str, Meta(min_length=1, max_length=40)]
    shape: Shape


class CreateVersion(WireRequest):
    """A new version. Without `version` it gets the next one that the change of shapes needs."""

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
        """The metadata of the version in this request."""
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
        """The tensors in this request."""
        return {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}


class UpdateVersion(WireRequest):
    """The new description of a version."""

    description: Text


class MakeTransition(WireRequest):
    """A transition along the lifecycle."""

    to: DeploymentState
    reason: Text = ""
    force: bool = False
    retire_previous: bool = False


class VersionsQuery(SearchQuery):
    """A search that is restricted to a range of versions."""

    range: Annotated[str, Meta(max_length=200)] = "*"


class ResolveQuery(WireRequest):
    """A version, a range, a state, an alias or `latest`."""

    version: Annotated[str, Meta(min_length=1, max_length=200)]


class DiffQuery(WireRequest):
    """The two versions to compare."""

    before: Version
    after: Version


class VersionAnswer(Answer):
    """A version."""

    model_id: str
    version: str
    number: int
    revision: int
    state: DeploymentState
    name: str
    framework: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    size_bytes: int
    checksum: str
    source: str
    description: str
    tags: dict[str, str]
    aliases: tuple[str, ...]
    lineage: Lineage
    registered_at: datetime
    registered_by: str
    updated_at: datetime | None


class CreatedVersion(Answer):
    """The new version; if the registry chose its number, `due` says why."""

    version: VersionAnswer
    due: DueBump | None


class VersionPage(Answer):
    """A page of versions."""

    items: list[VersionAnswer]
    next_page_token: str | None


class TransitionAnswer(Answer):
    """The version after a transition, its previous state, and the number of the audit row."""

    previous: DeploymentState
    audit_sequence: int
    version: VersionAnswer


class DiffAnswer(Answer):
    """What changed between two versions."""

    before: str
    after: str
    due: DueBump
    compatibility: float
    fields: dict[str, list[str]]
    tags: dict[str, list[str | None]]
    rollback_priority: float | None
    rollback_reasons: list[str]


def version_answer(metadata: ModelMetadata) -> VersionAnswer:
    """The answer that describes a version."""
    return VersionAnswer.of(metadata, version=str(metadata.version))


def diff_answer(diff: VersionDiff) -> DiffAnswer:
    """The answer that describes a comparison."""
    rollback = diff.rollback
    return DiffAnswer(
        before=str(diff.before.version),
        after=str(diff.after.version),
        due=diff.due,
        compatibility=diff.compatibility,
        fields={field: list(pair) for field, pair in diff.fields.items()},
        tags={tag: list(pair) for tag, pair in diff.tags.items()},
        rollback_priority=None if rollback is None else rollback.priority,
        rollback_reasons=[] if rollback is None else list(rollback.reasons),
    )
