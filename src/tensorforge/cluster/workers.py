"""The identity, the status and the description of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from types import MappingProxyType

from tensorforge.errors import InvalidInputError
from tensorforge.lifecycle import Lifecycle
from tensorforge.validation import whole_number


class WorkerStatus(Enum):
    """What a worker is doing; `WORKER_LIFECYCLE` has the allowed transitions."""

    JOINING = "joining"
    ACTIVE = "active"
    RESCALING = "rescaling"
    LEAVING = "leaving"
    FAILED = "failed"


WORKER_LIFECYCLE: Lifecycle[WorkerStatus] = Lifecycle(
    "worker",
    {
        WorkerStatus.JOINING: (
            WorkerStatus.RESCALING,
            WorkerStatus.ACTIVE,
            WorkerStatus.LEAVING,
            WorkerStatus.FAILED,
        ),
        WorkerStatus.ACTIVE: (WorkerStatus.RESCALING, WorkerStatus.LEAVING, WorkerStatus.FAILED),
        WorkerStatus.RESCALING: (WorkerStatus.ACTIVE, WorkerStatus.LEAVING, WorkerStatus.FAILED),
        WorkerStatus.LEAVING: (WorkerStatus.FAILED,),
        # A worker that was taken for dead joins again as a newcomer with a new incarnation.
        WorkerStatus.FAILED: (WorkerStatus.JOINING,),
    },
)

_LONGEST_NAME = 255
_MARKUP = frozenset("<>[]")
"""Names are shown in terminals and pages, where these characters would be markup."""


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """A worker's name and the address at which it serves shards to its peers."""

    id: str
    hostname: str
    port: int

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidInputError(f"id = {self.id!r}: a worker needs a name")
        if not isinstance(self.hostname, str) or not self.hostname:
            raise InvalidInputError(f"hostname = {self.hostname!r}: a worker needs a host")
        for name, text in (("id", self.id), ("hostname", self.hostname)):
            if len(text) > _LONGEST_NAME or not text.isprintable():
                rule = f"must be at most {_LONGEST_NAME} printable characters"
                raise InvalidInputError(f"{name} = {text[:_LONGEST_NAME]!r}: {rule}")
        if _MARKUP & set(self.id):
            raise InvalidInputError(f"id = {self.id!r}: must have none of {' '.join(_MARKUP)}")
        whole_number("port", self.port, least=0, most=65_535)

    def __str__(self) -> str:
        return f"{self.id}@{self.hostname}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetadata:
    """What the cluster knows about one worker. A rank of -1 means that it has none yet."""

    worker_id: WorkerId
    status: WorkerStatus
    join_time: datetime
    last_heartbeat: datetime
    rank: int = -1
    local_world_size: int = 1
    custom_attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rank < -1:
            raise InvalidInputError(f"rank = {self.rank}: must be -1 (none yet) or more")
        if self.local_world_size < 1:
            raise InvalidInputError(f"local_world_size = {self.local_world_size}: at least 1")
        attributes = MappingProxyType(dict(self.custom_attributes))
        object.__setattr__(self, "custom_attributes", attributes)

    def is_healthy(self, timeout: timedelta, now: datetime) -> bool:
        """Whether the last heartbeat is less than `timeout` ago."""
        return now - self.last_heartbeat < timeout
