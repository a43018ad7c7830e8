"""What must hold after a storm, judged from the coordinator's views and the workers' logs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tensorforge.cluster.committed_step import CommittedStep
from tensorforge.encoding import Json
from tensorforge.validation import is_whole_number
from tensorforge.wording import counted

Line = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one invariant holds, and the facts behind the answer."""

    name: str
    holds: bool
    detail: str


def generations_grow(seen: Sequence[int]) -> Verdict:
    """The generations, in the order in which the views showed them, never decrease."""
    name = "generations only grow"
    for before, after in itertools.pairwise(seen):
        if after < before:
            return Verdict(name, False, f"generation {after} was seen after {before}")
    if not seen:
        return Verdict(name, False, "no generation was seen")
    return Verdict(name, True, f"from {seen[0]} to {seen[-1]}")


def steps_are_committed_once(lines: Iterable[Line]) -> Verdict:
    """No worker commits a step twice or goes back, all workers commit the same step, and no step is missing."""
    name = "every step is committed exactly once"
    last: dict[str, int] = {}
    results: dict[int, tuple[int, int, Mapping[str, float]]] = {}
    reached = -1
    for line in lines:
        if line["kind"] == "formed":
            reached = max(reached, _step_number(line.get("committed_step")))
        committed = CommittedStep.from_json(line) if line["kind"] == "commit" else None
        if committed is None:
            continue
        worker, step = str(line.get("worker")), committed.step
        if step <= last.get(worker, -1):
            return Verdict(name, False, f"{worker} committed step {step} after {last[worker]}")
        last[worker] = step
        result = (committed.epoch, committed.samples, committed.metrics)
        if results.setdefault(step, result) != result:
            return Verdict(name, False, f"{worker} committed another step {step} than the others")
    missing = [step for step in range(max(results, default=-1)) if step not in results]
    # A worker that rolled forward, or that was killed, has not written a line for its last step.
    lost = [step for step in missing if step > reached]
    if lost:
        return Verdict(name, False, f"no worker committed the steps {lost[:5]}")
    return Verdict(
        name,
        bool(results),
        f"{counted(len(results), 'step')}, {counted(len(last), 'worker')}, none twice",
    )


def members_agree(lines: Iterable[Line]) -> Verdict:
    """All members of a generation, and all workers that ended at the same step, have the same digest."""
    name = "all members have one digest"
    digests: dict[tuple[str, int], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in lines:
        digest = line.get("digest")
        if isinstance(digest, str) and line["kind"] in ("formed", "final"):
            key = "generation" if line["kind"] == "formed" else "committed_step"
            place = (line["kind"], _step_number(line.get(key)))
            digests[place][digest].add(str(line.get("worker")))
    for (kind, number), found in sorted(digests.items()):
        if len(found) > 1:
            at = f"generation {number}" if kind == "formed" else f"the end (step {number})"
            sides = "; ".join(f"{d[:12]}: {', '.join(sorted(w))}" for d, w in sorted(found.items()))
            return Verdict(name, False, f"at {at} there are {len(found)}: {sides}")
    return Verdict(name, True, f"compared at {len(digests)} places")


def ledger_is_complete(lines: Iterable[Line]) -> Verdict:
    """Each worker that completed the training proved that each sample was in exactly one committed step."""
    name = "each sample was used exactly once"
    proofs = [
        str(line.get("proof"))
        for line in lines
        if line["kind"] == "final" and line.get("outcome") == "complete" and line.get("proof")
    ]
    if not proofs:
        return Verdict(name, False, "no worker proved it")
    if len(set(proofs)) > 1:
        return Verdict(name, False, f"the proofs differ: {'; '.join(sorted(set(proofs)))}")
    return Verdict(name, True, f"{counted(len(proofs), 'worker')}: {proofs[0]}")


def run_goes_on(ended: str | None, reason: str, recovered: bool, remark: str = "") -> Verdict:
    """After the storm the run has completed, or commits steps again."""
    name = "the run survived"
    if ended is not None:
        return Verdict(name, ended == "completed", f"{ended}: {reason}")
    detail = "steps are committed again" if recovered else "no step was committed after the storm"
    return Verdict(name, recovered, detail + remark)


def _step_number(value: Json) -> int:
    return value if is_whole_number(value) else -1
