"""What the members of a new generation do first: come to one state.

1. Each member reports which step it has committed, which one it has prepared, and in which generation.
2. The members of the newest generation that have the complete gradient of the next step commit it now, if some
   member has committed it or may have. So no member ever goes back.
3. Members that are still behind are healed by those that are not.
4. All members compare a digest of the state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.train.gradients.shard_tree import Node
from tensorforge.train.group import healing
from tensorforge.train.group.generation_group import GenerationGroup
from tensorforge.train.loop.training_state import PreparedStep, TrainingState
from tensorforge.train.supported_models import model_device, numerics

NOTHING_PREPARED = -2


class MemberReport(NamedTuple):
    """What one member reports of itself."""

    committed_step: int
    prepared_step: int
    generation: int
    """The last generation in which this member was in a working group; 0 for a newcomer."""
    fingerprint: int
    """A hash of the model's layout and the run's settings."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the reports: the step that all members will have committed, and how each gets there.

    The members in `roll_forward` commit the step that they have prepared; then `donors` send the state to
    `newcomers`. Members are ranks.
    """

    target_step: int
    roll_forward: tuple[int, ...]
    donors: tuple[int, ...]
    newcomers: tuple[int, ...]


def decide(reports: Sequence[MemberReport]) -> Decision:
    """Decide from the members' reports. Pure; every member comes to the same decision.

    A member that is gone may have committed the next step. That needed the votes of all members of its
    generation, so it is possible only if every survivor of the newest generation has prepared the step.
    """
    target = max(report.committed_step for report in reports)
    newest = max(report.generation for report in reports if report.committed_step == target)
    voters = [
        rank
        for rank, report in enumerate(reports)
        if report.committed_step == target and report.generation == newest
    ]
    behind = {
        rank
        for rank, report in enumerate(reports)
        if report.committed_step == target - 1 and report.prepared_step == target
    }
    if all(reports[rank].prepared_step == target + 1 for rank in voters):
        rolling, target = tuple(voters), target + 1
        donors = rolling
    else:
        rolling = tuple(sorted(behind))
        donors = tuple(
            rank
            for rank, report in enumerate(reports)
            if report.committed_step == target or rank in behind
        )
    newcomers = tuple(rank for rank in range(len(reports)) if rank not in donors)
    return Decision(target, rolling, donors, newcomers)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome on this member.

    `healed_bytes`: what this member sent or received. `finished_nodes`: the nodes of the next step that each
    member has finished.
    """

    healed_bytes: int
    digest: str
    finished_nodes: tuple[tuple[Node, ...], ...]


def agree(
    group: GenerationGroup | None,
    state: TrainingState,
    *,
    prepared: PreparedStep | None,
    commit: Callable[[PreparedStep], None],
    generation: int,
    restore: Callable[[], None] | None,
    finished_nodes: Callable[[], tuple[Node, ...]],
) -> Agreement:
    """Bring all members to one state.

    `commit` is called with `prepared` if the members decide to roll it forward; that is final, even if the
    group breaks afterwards. If no member has committed a step, rank 0 calls `restore`, which loads a
    checkpoint if there is one. `finished_nodes` is called once the state is settled; it returns the nodes
    of the next step that are complete on this member.
    """
    hashed = fingerprint(state)

    def own_report() -> MemberReport:
        prepared_step = NOTHING_PREPARED if prepared is None else prepared.step
        return MemberReport(state.committed_step, prepared_step, generation, hashed)

    reports = _exchange_reports(group, own_report())
    if restore is not None and all(report.committed_step == -1 for report in reports):
        if group is None or group.rank == 0:
            restore()
        reports = _exchange_reports(group, own_report())
    if state.base_workers is None:
        state.base_workers = len(reports)
    decision = decide(reports)
    rank = 0 if group is None else group.rank
    if rank in decision.roll_forward and prepared is not None:
        commit(prepared)
    if group is None:
        return Agreement(0, state.capture().digest().hex(), (finished_nodes(),))
    return _heal(group, state, decision, finished_nodes)


def _exchange_reports(group: GenerationGroup | None, own: MemberReport) -> list[MemberReport]:
    if group is None:
        return [own]
    gathered = torch.empty(len(own) * group.world_size, dtype=torch.int64)
    group.all_gather(gathered, torch.tensor(own, dtype=torch.int64))
    reports = [MemberReport(*map(int, row)) for row in gathered.view(-1, len(own)).tolist()]
    odd = [r for r, report in enumerate(reports) if report.fingerprint != reports[0].fingerprint]
    if odd:
        raise InvalidInputError(
            f"ranks {odd} have another model or other settings than rank 0: all workers must run the same "
            "script with the same arguments, on one kind of device, with one version and one set of "
            "numerical settings of torch"
        )
    return reports


def _heal(
    group: GenerationGroup,
    state: TrainingState,
    decision: Decision,
    finished_nodes: Callable[[], tuple[Node, ...]],
) -> Agreement:
    is_donor = group.rank in decision.donors
    digest = state.capture().digest().hex() if is_donor else ""
    nodes = finished_nodes() if is_donor else ()
    answers = [
        json.loads(answer) for answer in group.gather_bytes(json.dumps([digest, nodes]).encode())
    ]
    digests = {rank: bytes.fromhex(answers[rank][0]) for rank in decision.donors}
    donors, newcomers = decision.donors, decision.newcomers
    if len(set(digests.values())) > 1:
        if decision.target_step >= 0:
            found = ", ".join(f"rank {rank}: {each.hex()[:12]}" for rank, each in digests.items())
            raise IntegrityError(
                f"the members' states differ after step {decision.target_step}: {found}"
            )
        # The processes of a fresh run have initialised their weights differently: take those of rank 0.
        donors, newcomers = (0,), tuple(range(1, group.world_size))
    expected = digests[donors[0]]
    healed = 0
    if newcomers:
        healed = _transfer(group, state, donors, newcomers, expected=expected)
    return Agreement(
        healed,
        expected.hex(),
        tuple(
            () if rank in newcomers else tuple((low, high) for low, high in answer[1])
            for rank, answer in enumerate(answers)
        ),
    )


def _transfer(
    group: GenerationGroup,
    state: TrainingState,
    donors: Sequence[int],
    newcomers: Sequence[int],
    *,
    expected: bytes,
) -> int:
    """Send the state from the donors to the newcomers and compare digests; return this member's bytes."""
    if group.rank in donors:
        moved = healing.donate(group, state.capture(), donors, newcomers)
    else:
        flat, moved = healing.receive(group, donors)
        state.restore(flat)
    digest = state.capture().digest() if group.rank in newcomers else expected
    digests = group.gather_bytes(digest)
    odd = [rank for rank, other in enumerate(digests) if other != expected]
    if odd:
        raise IntegrityError(f"ranks {odd} have another state after healing than their donors")
    return moved


def fingerprint(state: TrainingState) -> int:
    """A 62-bit hash of what must be the same on all workers: settings, shapes, optimizer, data, numerics."""
    parts = [
        repr(state.config),
        *(f"{n} {p.dtype} {tuple(p.shape)}" for n, p in state.model.named_parameters()),
        *(f"{n} {b.dtype} {tuple(b.shape)}" for n, b in state.model.named_buffers()),
        type(state.optimizer).__name__,
        str(state.ledger.size),
        *numerics(model_device(state.model)),
    ]
    return xxhash.xxh3_64_intdigest("\n".join(parts).encode()) >> 2
