"""The database queries of the catalog. Each runs inside the transaction of its caller."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from tensorforge.catalog.chains.chains import chain_length, is_restorable
from tensorforge.catalog.chains.records import (
    CHECKPOINT_LIFECYCLE,
    CheckpointRecord,
    CheckpointState,
    CreateCheckpointRequest,
    RestoreCriteria,
)
from tensorforge.catalog.chains.restore import selection_score
from tensorforge.catalog.schema import CHECKPOINTS, from_row
from tensorforge.errors import ConflictError, InvalidInputError, NotFoundError

LIVE = (CheckpointState.CREATING, CheckpointState.COMPLETE, CheckpointState.CORRUPTED)
USABLE = (CheckpointState.CREATING, CheckpointState.COMPLETE)
_FIRST_PAGE = 2  # the newest record is usually the one
_PAGE = 64


def lock_run(connection: sa.Connection, training_run_id: str) -> None:
    """Block other writers of this run until the transaction ends.

    SQLite has one writer at a time anyway. Row locks do not suffice: they do not block the insertion of a
    child while its parent is being deleted.
    """
    if connection.dialect.name != "sqlite":
        key = zlib.crc32(b"tensorforge.catalog." + training_run_id.encode())
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))


def in_states(states: Iterable[CheckpointState]) -> sa.ColumnElement[bool]:
    """The condition that a row is in one of these states."""
    return CHECKPOINTS.c.state.in_([state.value for state in states])


def find(
    connection: sa.Connection, checkpoint_id: str, *, lock: bool = False
) -> CheckpointRecord | None:
    """The record with this id, or `None`; `lock` blocks other writers of the record."""
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.checkpoint_id == checkpoint_id)
    row = connection.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else from_row(row)


def existing(
    connection: sa.Connection, checkpoint_id: str, *, lock: bool = False
) -> CheckpointRecord:
    """The record with this id; `NotFoundError` if there is none."""
    record = find(connection, checkpoint_id, lock=lock)
    if record is None:
        raise NotFoundError(f"the catalog has no checkpoint {checkpoint_id!r}")
    return record


def update(connection: sa.Connection, record: CheckpointRecord, **values: Any) -> CheckpointRecord:
    """Change columns of a record that the caller has locked, and return the changed record."""
    name = CHECKPOINTS.c.checkpoint_id == record.checkpoint_id
    statement = CHECKPOINTS.update().where(name).values(**values).returning(*CHECKPOINTS.c)
    return from_row(connection.execute(statement).one())


def transition(
    connection: sa.Connection, record: CheckpointRecord, state: CheckpointState, **values: Any
) -> CheckpointRecord:
    """Change state and columns of a record that the caller has locked; `TransitionError` if illegal."""
    CHECKPOINT_LIFECYCLE.require(record.state, state)
    return update(connection, record, state=state.value, **values)


def transition_by_id(
    connection: sa.Connection, checkpoint_id: str, state: CheckpointState, **values: Any
) -> CheckpointRecord:
    """The same in one statement, for a record that the caller has neither read nor locked."""
    sources = [s for s in CheckpointState if CHECKPOINT_LIFECYCLE.can_transition(s, state)]
    statement = (
        CHECKPOINTS.update()
        .where(CHECKPOINTS.c.checkpoint_id == checkpoint_id, in_states(sources))
        .values(state=state.value, **values)
        .returning(*CHECKPOINTS.c)
    )
    row = connection.execute(statement).one_or_none()
    if row is None:
        CHECKPOINT_LIFECYCLE.require(existing(connection, checkpoint_id).state, state)
        raise ConflictError(
            f"checkpoint {checkpoint_id!r} was changed by another process at the same time; try again"
        )
    return from_row(row)


def chain(connection: sa.Connection, record: CheckpointRecord) -> dict[str, CheckpointRecord]:
    """The record and its existing ancestors, by id."""
    if record.is_self_contained:
        return {record.checkpoint_id: record}
    rows = connection.execute(_CHAIN, {"start": record.checkpoint_id})
    return {row.checkpoint_id: from_row(row) for row in rows}


def _chain_query() -> sa.Select[Any]:
    table = CHECKPOINTS.c
    start = sa.select(table.checkpoint_id, table.parent_id).where(
        table.checkpoint_id == sa.bindparam("start")
    )
    walk = start.cte("walk", recursive=True)
    # UNION instead of UNION ALL, so that a cycle ends.
    walk = walk.union(
        sa.select(table.checkpoint_id, table.parent_id).where(
            table.checkpoint_id == walk.c.parent_id
        )
    )
    return sa.select(CHECKPOINTS).join(walk, table.checkpoint_id == walk.c.checkpoint_id)


_CHAIN = _chain_query()


def descendants(connection: sa.Connection, checkpoint_id: str) -> list[CheckpointRecord]:
    """The usable checkpoints that build on this one, directly or not, nearest first. They become locked."""
    found: list[CheckpointRecord] = []
    seen, level = {checkpoint_id}, [checkpoint_id]
    while level:
        query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.parent_id.in_(level), in_states(USABLE))
        records = [from_row(row) for row in connection.execute(query.with_for_update())]
        fresh = [record for record in records if record.checkpoint_id not in seen]
        found.extend(fresh)
        level = [record.checkpoint_id for record in fresh]
        seen.update(level)
    return found


def of_runs(connection: sa.Connection, runs: Sequence[str]) -> Iterator[CheckpointRecord]:
    """The records of these runs that are not deleted, run by run, oldest first."""
    table = CHECKPOINTS.c
    query = (
        sa.select(CHECKPOINTS)
        .where(table.training_run_id.in_(runs), in_states(LIVE))
        .order_by(table.training_run_id, table.step, table.created_at, table.checkpoint_id)
    )
    return map(from_row, connection.execute(query))


def restorable(
    connection: sa.Connection, criteria: RestoreCriteria
) -> Iterator[tuple[CheckpointRecord, int]]:
    """The records that meet the criteria and have an intact chain, each with the length of its chain.

    They are ordered by score, without the contribution of the chain's length. A record in state `CREATING` has
    length 0.
    """
    for record in _candidates(connection, criteria):
        if record.state is not CheckpointState.COMPLETE:
            yield record, 0
            continue
        known = chain(connection, record)
        if is_restorable(known, record.checkpoint_id):
            yield record, chain_length(known, record.checkpoint_id)


def best_restorable(
    connection: sa.Connection, criteria: RestoreCriteria
) -> CheckpointRecord | None:
    """The record with the highest selection score among the restorable ones."""

    def score_without_chain(pair: tuple[CheckpointRecord, int]) -> tuple[Any, ...]:
        record = pair[0]
        preferred = criteria.prefer_full and record.is_self_contained
        return (record.state, preferred, record.step)

    for _, group in itertools.groupby(restorable(connection, criteria), score_without_chain):
        return max(
            group,
            key=lambda pair: (
                selection_score(pair[0], criteria, pair[1] or None),
                pair[0].recency,
            ),
        )[0]
    return None


def parent_for(connection: sa.Connection, request: CreateCheckpointRequest) -> str:
    """The id of the parent for a requested incremental checkpoint."""
    run = request.training_run_id
    if request.parent_id is not None:
        return _requested_parent(connection, request, request.parent_id).checkpoint_id
    criteria = RestoreCriteria(training_run_id=run, max_epoch=request.epoch, max_step=request.step)
    for record, _ in restorable(connection, criteria):
        return record.checkpoint_id
    raise ConflictError(
        f"run {run!r} has no restorable checkpoint up to step {request.step} to build on; "
        "create a full one first"
    )


def _requested_parent(
    connection: sa.Connection, request: CreateCheckpointRequest, parent_id: str
) -> CheckpointRecord:
    parent = existing(connection, parent_id)
    if parent.training_run_id != request.training_run_id:
        raise InvalidInputError(
            f"parent_id = {parent_id!r}: belongs to run {parent.training_run_id!r}, "
            f"not {request.training_run_id!r}"
        )
    if parent.epoch > request.epoch or parent.step > request.step:
        raise InvalidInputError(
            f"parent_id = {parent_id!r}: its epoch {parent.epoch}, step {parent.step} is after "
            f"epoch {request.epoch}, step {request.step}"
        )
    if not is_restorable(chain(connection, parent), parent_id):
        raise ConflictError(
            f"checkpoint {parent_id!r} ({parent.state.value}) cannot be built on: "
            "it or one of its ancestors is not complete"
        )
    return parent


def _candidates(connection: sa.Connection, criteria: RestoreCriteria) -> Iterator[CheckpointRecord]:
    table = CHECKPOINTS.c
    query = sa.select(CHECKPOINTS).where(table.training_run_id == criteria.training_run_id)
    if criteria.max_epoch is not None:
        query = query.where(table.epoch <= criteria.max_epoch)
    if criteria.max_step is not None:
        query = query.where(table.step <= criteria.max_step)
    newest = (table.step.desc(), table.created_at.desc(), table.checkpoint_id.desc())
    states = [CheckpointState.COMPLETE]
    if not criteria.require_complete:
        states.append(CheckpointState.CREATING)
    kinds: list[sa.ColumnElement[bool]] = [sa.true()]
    if criteria.prefer_full:
        kinds = [table.parent_id.is_(None), table.parent_id.is_not(None)]
    for state, kind in itertools.product(states, kinds):
        yield from _paged(
            connection, query.where(table.state == state.value, kind).order_by(*newest)
        )


def _paged(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[CheckpointRecord]:
    done, page = 0, _FIRST_PAGE
    while True:
        rows = connection.execute(query.limit(page).offset(done)).all()
        yield from map(from_row, rows)
        if len(rows) < page:
            return
        done, page = done + page, _PAGE
