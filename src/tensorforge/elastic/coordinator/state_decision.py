"""How the members of a new generation come to one state: decided once, from what they said at the barrier.

The coordinator sends the verdict with the formation, and the members carry it out. A fixed set of processes,
which has no coordinator, calls the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tensorforge.elastic.protocol.messages import MemberReport, Verdict


def decide(reports: Sequence[MemberReport]) -> Verdict:
    """The verdict on these reports, which are in order of rank.

    No step that a member has committed is lost: the target is the newest one. A member that is gone may have
    committed the step after it. That needed the votes of all members of its generation, so it is possible only
    if every survivor of the newest generation has prepared that step; then they all commit it now.
    """
    target = max(report.committed_step for report in reports)
    newest = max(r.last_generation for r in reports if r.committed_step == target)
    voters = [
        rank
        for rank, report in enumerate(reports)
        if report.committed_step == target and report.last_generation == newest
    ]
    if all(reports[rank].prepared_step == target + 1 for rank in voters):
        return Verdict(target_step=target + 1, roll_forward=ranges(voters), donors=ranges(voters))
    if target < 0 and newest == 0:
        return Verdict(target_step=-1, donors=((0, 1),), is_fresh=True)
    if (
        target < 0
    ):  # a generation formed before and has one state, though it has committed nothing yet
        return Verdict(target_step=-1, donors=ranges(voters))
    behind = [
        rank
        for rank, report in enumerate(reports)
        if report.committed_step == target - 1 and report.prepared_step == target
    ]
    there = [rank for rank, report in enumerate(reports) if report.committed_step == target]
    donors = ranges(sorted({*behind, *there}))
    return Verdict(target_step=target, roll_forward=ranges(behind), donors=donors)


def ranges(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending ranks as (first, count) of each sequence without a gap."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        if found and rank == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((rank, 1))
    return tuple(found)
