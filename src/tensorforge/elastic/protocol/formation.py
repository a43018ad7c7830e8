"""What the members of a generation know about each other when they form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensorforge.cluster.topology import ClusterTopology
from tensorforge.elastic.protocol.messages import MemberReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """The outcome of a rescale barrier, identical on all members.

    `members` maps worker ids to what each said. `target_step` is the newest step that any member who was
    here before has committed: a member one step behind that holds its reduced gradient rolls forward,
    others and newcomers are healed to it. It is -1 when nobody has committed anything.
    """

    generation: int
    topology: ClusterTopology
    members: Mapping[str, MemberReport]
    target_step: int

    @property
    def newcomers(self) -> tuple[str, ...]:
        """Members that were not in the last formed generation, in order of rank."""
        return tuple(name for name, report in self.members.items() if report.is_newcomer)

    @property
    def donors(self) -> tuple[str, ...]:
        """Members that have committed the target step, in order of rank."""
        return tuple(
            name
            for name, report in self.members.items()
            if report.committed_step == self.target_step and not report.is_newcomer
        )
