"""Registration of weights, and export of a checkpoint's model to one safetensors file.

A checkpoint may be sharded, compressed, or stored as a difference to another one. The exported file has the
complete tensors. Every chunk is verified while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorforge.errors import AlreadyExistsError, NotFoundError
from tensorforge.registry.database.writes.registering import FIRST_VERSION
from tensorforge.registry.domain.models import Actor, Lineage, ModelMetadata, Shape
from tensorforge.registry.domain.shapes import DueBump
from tensorforge.registry.domain.versions import Bump, ModelVersion
from tensorforge.registry.model_registry import ModelRegistry
from tensorforge.registry.weights import Progress, Weights, describe_weights

if TYPE_CHECKING:
    from tensorforge.checkpoint.format.manifest import CheckpointManifest
    from tensorforge.storage.blobs import BlobStore

_RUN_KEYS = ("training_run_id", "run_id")
_STEP_KEYS = ("step",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The model and version to register weights as.

    Without `version` the registry chooses the one that is due.
    """

    model_id: str
    version: ModelVersion | None = None
    least_bump: Bump = Bump.PATCH
    name: str = ""
    framework: str = "pytorch"
    input_shape: Shape = ()
    output_shape: Shape = ()
    description: str = ""
    tags: Mapping[str, str] | None = None
    lineage: Lineage = field(default_factory=Lineage)
    source: str = ""


def register_weights(
    registry: ModelRegistry,
    registration: Registration,
    weights: Weights,
    *,
    actor: Actor | None = None,
) -> tuple[ModelMetadata, DueBump | None]:
    """Register weights with their tensors, size and checksum.

    Returns what was stored, and why its version was due; `None` if `registration` has an explicit version.
    """
    metadata = ModelMetadata(
        model_id=registration.model_id,
        name=registration.name or registration.model_id,
        version=registration.version or FIRST_VERSION,
        framework=registration.framework,
        input_shape=registration.input_shape,
        output_shape=registration.output_shape,
        size_bytes=weights.size_bytes,
        checksum=weights.checksum,
        registered_at=datetime.now(UTC),
        tags=registration.tags or {},
        source=registration.source or str(weights.path.resolve()),
        description=registration.description,
        lineage=registration.lineage,
    )
    if registration.version is not None:
        return registry.register(metadata, tensors=weights.tensors, actor=actor), None
    return registry.register_next(
        metadata, least=registration.least_bump, tensors=weights.tensors, actor=actor
    )


def register_checkpoint(
    registry: ModelRegistry,
    registration: Registration,
    store: BlobStore,
    destination: Path,
    *,
    prefix: str | None = None,
    actor: Actor | None = None,
    progress: Progress | None = None,
) -> tuple[ModelMetadata, DueBump | None]:
    """Export a checkpoint's model to `destination` and register it with its lineage.

    `prefix` names the checkpoint; without it the newest one is exported. Fields of the lineage that
    `registration` leaves empty are read from the checkpoint.
    """
    manifest = find_manifest(store, prefix)
    weights = export_checkpoint(store, manifest, destination, progress=progress)
    lineage = _merge(registration.lineage, lineage_of(manifest))
    described = replace(registration, lineage=lineage)
    return register_weights(registry, described, weights, actor=actor)


def find_manifest(store: BlobStore, prefix: str | None) -> CheckpointManifest:
    """The manifest of a checkpoint, or of the newest one; `NotFoundError` if there is none."""
    from tensorforge.checkpoint import store_index

    if prefix is None:
        found = store_index.prefixes_by_age(store)
        if not found:
            raise NotFoundError(f"there is no checkpoint in {store.url}")
        prefix = found[0]
    return store_index.read_manifest(store, prefix)


def export_checkpoint(
    store: BlobStore,
    manifest: CheckpointManifest,
    destination: Path,
    *,
    progress: Progress | None = None,
) -> Weights:
    """Write the model's tensors to one safetensors file. After a failure or crash `destination` does not exist.

    `AlreadyExistsError` if it exists already.
    """
    from safetensors.torch import save_file

    if destination.exists():
        raise AlreadyExistsError(f"{destination} exists; weights are never replaced in place")
    tensors = _read_model(store, manifest, progress)
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, temporary, metadata={"format": "pt", "checkpoint": manifest.prefix})
        _persist(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)
    return describe_weights(destination)


def _read_model(
    store: BlobStore, manifest: CheckpointManifest, progress: Progress | None
) -> dict[str, Any]:
    from tensorforge.checkpoint.format.file_layout import MODEL
    from tensorforge.checkpoint.full_state import read_full_tensors

    names = [name for name in manifest.tensors if name.startswith(MODEL)]
    if not names:
        raise NotFoundError(f"the checkpoint {manifest.prefix} has no model")
    tensors = read_full_tensors(store, manifest, names, progress)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _persist(temporary: Path, destination: Path) -> None:
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    # A rename would silently replace a file that another process exported meanwhile; a link fails.
    try:
        os.link(temporary, destination)
    except FileExistsError:
        raise AlreadyExistsError(f"{destination} exists; weights are never replaced") from None
    folder = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lineage_of(manifest: CheckpointManifest) -> Lineage:
    """The run, step and id of a checkpoint: from its record in a catalog, or else from its metadata."""
    from tensorforge.catalog.stored_records import record_in

    record = record_in(manifest, manifest.size_bytes)
    if record is not None:
        return Lineage(
            run_id=record.training_run_id, step=record.step, checkpoint_id=record.checkpoint_id
        )
    facts = manifest.custom_metadata if isinstance(manifest.custom_metadata, dict) else {}
    run = next((facts[key] for key in _RUN_KEYS if isinstance(facts.get(key), str)), "")
    steps = (facts[key] for key in _STEP_KEYS if type(facts.get(key)) is int)
    return Lineage(run_id=run, step=next(steps, None), checkpoint_id=manifest.prefix)


def _merge(given: Lineage, found: Lineage) -> Lineage:
    return Lineage(
        run_id=given.run_id or found.run_id,
        step=found.step if given.step is None else given.step,
        checkpoint_id=given.checkpoint_id or found.checkpoint_id,
        run_link=given.run_link,
    )
