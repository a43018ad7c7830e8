"""What the members of a new generation do first: come to one state, and divide the next step.

1. Each tells which step it has committed, which one it has prepared, and in which generation.
2. Whoever was in the newest generation and holds the complete gradient of the next step commits it too, if
   somebody did or may have: nobody ever goes back.
3. Whoever is still behind is healed by those who are not.
4. All compare a digest of the whole state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from tensorforge.errors import IntegrityError, InvalidInputError
from tensorforge.train.gradients.shard_tree import Node
from tensorforge.train.group import healing
from tensorforge.train.group.gloo_group import GenerationGroup
from tensorforge.train.loop.training_state import Prepared, TrainingState

NOTHING_PREPARED = -2


@dataclass(frozen=True, slots=True)
class Facts:
    """What one member says of itself."""

    committed_step: int
    prepared_step: int
    generation: int
    """The last generation in which this member was in a working group; 0 for a newcomer."""
    script: int
    """A hash of the model's layout and the run's settings."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from the facts: the step that all will stand at, and how each one gets there."""

    target_step: int
    roll_forward: tuple[int, ...]
    donors: tuple[int, ...]
    newcomers: tuple[int, ...]


def decide(facts: Sequence[Facts]) -> Verdict:
    """Judge the members' facts. Pure; every member comes to the same verdict.

    A step may have been applied by somebody who is gone. That needs the votes of all members of that
    generation, so it can only be if every survivor of the newest generation has prepared the step.
    """
    target = max(fact.committed_step for fact in facts)
    newest = max(fact.generation for fact in facts if fact.committed_step == target)
    voters = [
        rank
        for rank, fact in enumerate(facts)
        if fact.committed_step == target and fact.generation == newest
    ]
    behind = {
        rank
        for rank, fact in enumerate(facts)
        if fact.committed_step == target - 1 and fact.prepared_step == target
    }
    if all(facts[rank].prepared_step == target + 1 for rank in voters):
        rolling, target = tuple(voters), target + 1
        donors = rolling
    else:
        rolling = tuple(sorted(behind))
        donors = tuple(
            rank
            for rank, fact in enumerate(facts)
            if fact.committed_step == target or rank in behind
        )
    newcomers = tuple(rank for rank in range(len(facts)) if rank not in donors)
    return Verdict(target, rolling, donors, newcomers)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The outcome: what healing moved, and the nodes of the next step that each member still holds.

    `rolled_forward`: this member has committed the step that it had prepared.
    """

    healed_bytes: int
    rolled_forward: bool
    digest: str
    held: tuple[tuple[Node, ...], ...]


def agree(
    group: GenerationGroup | None,
    state: TrainingState,
    *,
    prepared: Prepared | None,
    generation: int,
    restore: Callable[[], None] | None,
    held: Callable[[], tuple[Node, ...]],
) -> Agreement:
    """Bring all members to one state. `restore` loads a checkpoint, where there is one, into a fresh run.

    `held` is asked after the state has settled: the nodes of the next step that are complete here.
    """
    script = fingerprint(state)

    def mine() -> Facts:
        prepared_step = NOTHING_PREPARED if prepared is None else prepared.step
        return Facts(state.committed_step, prepared_step, generation, script)

    facts = _exchange(group, mine())
    if restore is not None and all(fact.committed_step == -1 for fact in facts):
        if group is None or group.rank == 0:
            restore()
        facts = _exchange(group, mine())
    if state.base_workers is None:
        state.base_workers = len(facts)
    verdict = decide(facts)
    rank = 0 if group is None else group.rank
    if rank in verdict.roll_forward and prepared is not None:
        state.commit(prepared)
    if group is None:
        digest = state.capture().digest().hex()
        return Agreement(0, bool(verdict.roll_forward), digest, (held(),))
    return _heal(group, state, verdict, held)


def _exchange(group: GenerationGroup | None, fact: Facts) -> list[Facts]:
    if group is None:
        return [fact]
    numbers = [fact.committed_step, fact.prepared_step, fact.generation, fact.script]
    everything = torch.empty(4 * group.world_size, dtype=torch.int64)
    group.all_gather(everything, torch.tensor(numbers, dtype=torch.int64))
    facts = [Facts(*(int(n) for n in row)) for row in everything.view(-1, 4).tolist()]
    odd = [rank for rank, other in enumerate(facts) if other.script != facts[0].script]
    if odd:
        raise InvalidInputError(
            f"ranks {odd} have another model or other settings than rank 0: "
            "all workers must run the same script with the same arguments"
        )
    return facts


def _heal(
    group: GenerationGroup,
    state: TrainingState,
    verdict: Verdict,
    held: Callable[[], tuple[Node, ...]],
) -> Agreement:
    is_donor = group.rank in verdict.donors
    flat = state.capture() if is_donor else None
    digest = flat.digest().hex() if flat is not None else ""
    nodes = held() if is_donor else ()
    answers = [
        json.loads(answer) for answer in group.gather_bytes(json.dumps([digest, nodes]).encode())
    ]
    digests = [bytes.fromhex(answers[rank][0]) for rank in verdict.donors]
    donors, newcomers = verdict.donors, verdict.newcomers
    if len(set(digests)) > 1:
        if verdict.target_step >= 0:
            healing.require_equal(digests, verdict.target_step)
        # A fresh run whose processes drew different weights: the first one's are everybody's.
        donors, newcomers = (0,), tuple(range(1, group.world_size))
    healed = 0
    if newcomers:
        healed = _transfer(group, state, donors, newcomers, expected=digests[0])
    return Agreement(
        healed,
        group.rank in verdict.roll_forward,
        digests[0].hex(),
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
    if group.rank in donors:
        moved = healing.donate(group, state.capture(), donors, newcomers)
    else:
        flat, moved = healing.receive(group, donors)
        state.restore(flat)
    digest = state.capture().digest() if group.rank in newcomers else expected
    everybody = group.gather_bytes(digest)
    odd = [rank for rank, other in enumerate(everybody) if other != expected]
    if odd:
        raise IntegrityError(f"ranks {odd} have another state after healing than their donors")
    return moved


def fingerprint(state: TrainingState) -> int:
    """A hash of what must be the same on all workers; 62 bits."""
    parts = [
        repr(state.config),
        *(f"{n} {p.dtype} {tuple(p.shape)}" for n, p in state.model.named_parameters()),
        *(f"{n} {b.dtype} {tuple(b.shape)}" for n, b in state.model.named_buffers()),
        type(state.optimizer).__name__,
        str(state.ledger.size),
    ]
    return xxhash.xxh3_64_intdigest("\n".join(parts).encode()) >> 2
