"""What every fabric promises, as checks of a formed group of three or more members in one process.

Each check takes the members' fabrics, by rank, and the device of the tensors. A check in `ENDING_CHECKS` leaves
a group that cannot be used any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tensorforge.train.group.fabric import Fabric, GroupAbortedError

Result = TypeVar("Result")
Members = Sequence[Fabric]
Check = Callable[[Members, torch.device], None]

_SECONDS = 60.0


def on_all(members: Members, do: Callable[[Fabric], Result]) -> list[Result]:
    """What `do` returned for each member, each called by a thread of its own."""
    with ThreadPoolExecutor(len(members)) as pool:
        calls = [pool.submit(do, member) for member in members]
        return [call.result(_SECONDS) for call in calls]


def check_an_uneven_exchange(members: Members, device: torch.device) -> None:
    """Member r sends s + 1 elements to member s, each of the value 10 r + s."""
    size = len(members)

    def exchange(fabric: Fabric) -> list[float]:
        values = [10.0 * fabric.rank + to for to in range(size) for _ in range(to + 1)]
        into = torch.zeros(size * (fabric.rank + 1), device=device)
        send, receive = [to + 1 for to in range(size)], [fabric.rank + 1] * size
        fabric.start_all_to_all(into, torch.tensor(values, device=device), receive, send)()
        return list(into.tolist())

    expected = [
        [10.0 * source + rank for source in range(size) for _ in range(rank + 1)]
        for rank in range(size)
    ]
    _require_equal(on_all(members, exchange), expected)


def check_an_exchange_in_which_one_member_sends(members: Members, device: torch.device) -> None:
    """Member 0 sends two elements to each member; the others send nothing."""
    size = len(members)

    def exchange(fabric: Fabric) -> list[int]:
        count = 2 * size if fabric.rank == 0 else 0
        sent = torch.arange(count, dtype=torch.int32, device=device)
        into = torch.zeros(2, dtype=torch.int32, device=device)
        send = [2 if fabric.rank == 0 else 0] * size
        fabric.start_all_to_all(into, sent, [2] + [0] * (size - 1), send)()
        return list(into.tolist())

    expected = [[2 * rank, 2 * rank + 1] for rank in range(size)]
    _require_equal(on_all(members, exchange), expected)


def check_sums_and_gathers(members: Members, device: torch.device) -> None:
    """`all_reduce` adds in place, `start_all_gather` concatenates by rank."""
    size = len(members)

    def both(fabric: Fabric) -> tuple[float, list[float]]:
        total = torch.full((1,), float(fabric.rank), device=device)
        fabric.all_reduce(total)
        gathered = torch.zeros(size, device=device)
        own = torch.full((1,), float(fabric.rank), device=device)
        fabric.start_all_gather(gathered, own)()
        return float(total), list(gathered.tolist())

    ranks = [float(rank) for rank in range(size)]
    _require_equal(on_all(members, both), [(sum(ranks), ranks)] * size)


def check_operations_in_flight(members: Members, device: torch.device) -> None:
    """Five gathers are started before the first is waited for; memory is used again afterwards."""
    size = len(members)

    def gather(fabric: Fabric) -> list[list[float]]:
        found = []
        own = [torch.zeros(4096, device=device) for _ in range(5)]
        into = [torch.zeros(4096 * size, device=device) for _ in range(5)]
        for turn in range(3):
            waits = []
            for number in range(5):
                own[number].fill_(float(100 * turn + 10 * number + fabric.rank))
                waits.append(fabric.start_all_gather(into[number], own[number]))
            for wait in waits:
                wait()
            found += [each[::4096].tolist() for each in into]
        return found

    expected = [
        [float(100 * turn + 10 * number + rank) for rank in range(size)]
        for turn in range(3)
        for number in range(5)
    ]
    _require_equal(on_all(members, gather), [expected] * size)


def check_that_an_abort_ends_every_wait(members: Members, device: torch.device) -> None:
    """The last member aborts, from its own thread, while the others wait for it."""

    def wait(fabric: Fabric) -> bool:
        if fabric.rank == len(members) - 1:
            fabric.abort("a check")
            fabric.abort("again")
        return _is_refused(fabric, device)

    _require_equal(on_all(members, wait), [True] * len(members))
    _require_equal([fabric.is_aborted for fabric in members], [True] * len(members))


def check_that_a_closed_member_ends_the_others(members: Members, device: torch.device) -> None:
    """The first member closes its fabric in the middle of the others' operation."""

    def wait(fabric: Fabric) -> bool:
        if fabric.rank == 0:
            fabric.close()
        return _is_refused(fabric, device)

    _require_equal(on_all(members, wait), [True] * len(members))


def check_that_nothing_starts_after_an_abort(members: Members, device: torch.device) -> None:
    """Each operation of an aborted fabric raises at once."""
    members[0].abort("a check")
    _require_equal([_is_refused(members[0], device) for _ in range(3)], [True] * 3)


def _is_refused(fabric: Fabric, device: torch.device) -> bool:
    try:
        fabric.all_reduce(torch.zeros(1000, device=device))
    except GroupAbortedError:
        return True
    return False


def _require_equal(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"expected {expected}, found {found}")


CHECKS: tuple[Check, ...] = (
    check_an_uneven_exchange,
    check_an_exchange_in_which_one_member_sends,
    check_sums_and_gathers,
    check_operations_in_flight,
)
ENDING_CHECKS: tuple[Check, ...] = (
    check_that_an_abort_ends_every_wait,
    check_that_a_closed_member_ends_the_others,
    check_that_nothing_starts_after_an_abort,
)
