"""Which members have answered the barrier of a rescale, and which have formed the new group."""

from __future__ import annotations

from collections.abc import Collection

from tensorforge.elastic.coordinator.machine.roster import Participant
from tensorforge.elastic.coordinator.state_decision import decide
from tensorforge.elastic.protocol.messages import (
    FormationNotice,
    Formed,
    MemberReport,
    Progress,
    Ready,
    distinct_runs,
)


class Barrier:
    """The answers of one generation's members, and what they received while they formed.

    `early_commit` is a step that was committed before every member was known to have formed. `has_failed`: a
    member was lost because it did not answer, or did not form, in time.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Ready] = {}
        self.formed: set[str] = set()
        self.moved: dict[str, int] = {}
        self.early_commit: Progress | None = None
        self.has_failed = False

    def answer(self, worker_id: str, ready: Ready) -> None:
        """The member has stopped; only its first answer counts."""
        self.answers.setdefault(worker_id, ready)

    def form(self, worker_id: str, formed: Formed) -> None:
        """The member has formed; a repeated message changes nothing."""
        if worker_id not in self.formed:
            self.formed.add(worker_id)
            for name, amount in formed.moved.items():
                self.moved[name] = self.moved.get(name, 0) + amount

    def notice(
        self,
        generation: int,
        members: Collection[Participant],
        formed_before: Collection[tuple[str, str]],
    ) -> FormationNotice:
        """What all members are told: every answer, and how they come to one state.

        `formed_before` has the names and incarnations of the last formed generation's members.
        """
        reports = [self._report(member, formed_before) for member in members]
        distinct, runs = distinct_runs(reports)
        return FormationNotice(
            generation=generation, distinct=distinct, runs=runs, verdict=decide(reports)
        )

    def _report(
        self, member: Participant, formed_before: Collection[tuple[str, str]]
    ) -> MemberReport:
        answer = self.answers[member.id]
        return MemberReport(
            committed_step=answer.committed_step,
            prepared_step=answer.prepared_step,
            last_generation=answer.last_generation,
            attributes=answer.attributes,
            is_newcomer=(member.id, member.incarnation) not in formed_before,
        )
