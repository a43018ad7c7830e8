"""What the members of a new generation do first: come to one state.

How is decided elsewhere (`elastic/coordinator/state_decision`); every member gets the same verdict.

1. The members that the verdict names commit the step whose complete gradient they have; nobody goes back.
2. Members that are still behind are healed by those that are not.
3. All members compare a digest of the state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tensorforge.elastic.protocol.messages import Verdict
from tensorforge.errors import IntegrityError
from tensorforge.train.gradients.shard_tree import Node
from tensorforge.train.group import healing
from tensorforge.train.group.gloo_group import GenerationGroup
from tensorforge.train.loop.training_state import PreparedStep, TrainingState


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
    verdict: Verdict,
    restore: Callable[[], None] | None,
    finished_nodes: Callable[[], tuple[Node, ...]],
) -> Agreement:
    """Carry out the verdict: bring all members to one state.

    `commit` is called with `prepared` if this member has to roll it forward; that is final, even if the
    group breaks afterwards. If no member has committed a step, rank 0 calls `restore`, which loads a
    checkpoint if there is one. `finished_nodes` is called once the state is settled; it returns the nodes
    of the next step that are complete on this member.
    """
    rank = 0 if group is None else group.rank
    if verdict.is_fresh and restore is not None and rank == 0:
        restore()
    if state.base_workers is None:
        state.base_workers = 1 if group is None else group.world_size
    if verdict.rolls_forward(rank) and prepared is not None:
        commit(prepared)
    if group is None:
        return Agreement(0, state.capture().digest().hex(), (finished_nodes(),))
    return _heal(group, state, verdict, finished_nodes)


def _heal(
    group: GenerationGroup,
    state: TrainingState,
    verdict: Verdict,
    finished_nodes: Callable[[], tuple[Node, ...]],
) -> Agreement:
    donors = verdict.donor_ranks()
    is_donor = group.rank in donors
    # In a fresh run the processes have mostly initialised the same weights; then nothing is sent.
    digest = state.capture().digest().hex() if is_donor or verdict.is_fresh else ""
    nodes = finished_nodes() if is_donor else ()
    answers = [
        json.loads(answer) for answer in group.gather_bytes(json.dumps([digest, nodes]).encode())
    ]
    digests = {rank: bytes.fromhex(answer[0]) for rank, answer in enumerate(answers)}
    expected = digests[donors[0]]
    odd = {rank: digests[rank].hex()[:12] for rank in donors if digests[rank] != expected}
    if odd:
        raise IntegrityError(
            f"the members' states differ after step {verdict.target_step}: "
            f"rank {donors[0]}: {expected.hex()[:12]}, {odd}"
        )
    newcomers = tuple(rank for rank in digests if rank not in donors and digests[rank] != expected)
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
