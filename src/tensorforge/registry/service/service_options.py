"""What an operator chooses about the service, besides its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorforge.registry.domain.mlflow_stages import StageMoves

if TYPE_CHECKING:
    from tensorforge.registry.artifacts import ArtifactStore
    from tensorforge.registry.sources import SourceResolver

PROTECTED_ALIASES = frozenset({"champion", "production"})
"""The aliases that are protected unless the operator names others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How the service behaves.

    A protected alias needs the scope `registry:promote`, and points only at versions in canary or production.
    Without `artifacts` the service stores no files; without `sources` it stores sources as clients send them.
    """

    allow_private_webhooks: bool = False
    stage_moves: StageMoves = StageMoves.LENIENT
    protected_aliases: frozenset[str] = field(default=PROTECTED_ALIASES)
    artifacts: ArtifactStore | None = None
    sources: SourceResolver | None = None
