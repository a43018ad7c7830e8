"""Many processes on one catalog: nothing is lost, nothing comes twice."""

import multiprocessing
import tempfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from tensorforge.catalog import (
    CheckpointManager,
    CheckpointState,
    CheckpointType,
    CreateCheckpointRequest,
    GcPolicy,
)
from tensorforge.errors import ConflictError, TransitionError

PROCESSES = 8
DELETED_EVERY = 4


def request(step, run="run", kind=CheckpointType.FULL):
    return CreateCheckpointRequest(training_run_id=run, epoch=0, step=step, checkpoint_type=kind)


def create_complete_delete(url, process, results, each):
    made = []
    with CheckpointManager(database=url) as manager:
        for step in range(each):
            record = manager.create(request(step, f"run-{step % 10}"))
            manager.complete(record.checkpoint_id, 1, f"{process}/{step}")
            if step % DELETED_EVERY == 0:
                manager.delete(record.checkpoint_id)
            made.append(record.checkpoint_id)
    results.put(made)


def in_processes(target, url, *more):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=target, args=(url, number, results, *more))
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    collected = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    results.close()
    results.join_thread()
    return collected


@pytest.fixture(params=["sqlite", "postgres"])
def hasty_database_url(request, postgres_server):
    """A database that does not wait for the disk: races are as wild, and 18,000 commits take seconds."""
    if request.param == "postgres":
        url = sa.make_url(request.getfixturevalue("postgres_url"))
        hasty = url.update_query_dict({"options": "-c synchronous_commit=off"})
        yield hasty.render_as_string(hide_password=False)
    else:
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            yield f"sqlite:///{folder}/meta.db"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("each", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_eight_processes_lose_and_duplicate_nothing(hasty_database_url, each):
    database_url = hasty_database_url
    made = in_processes(create_complete_delete, database_url, each)
    everything = [checkpoint_id for ids in made for checkpoint_id in ids]
    deleted = {checkpoint_id for ids in made for checkpoint_id in ids[::DELETED_EVERY]}
    assert len(set(everything)) == PROCESSES * each
    assert all(ids == sorted(ids) for ids in made)
    with CheckpointManager(database=database_url) as manager:
        listed = {r.checkpoint_id for k in range(10) for r in manager.list_for_run(f"run-{k}")}
        assert listed == set(everything) - deleted
        assert manager.total_count() == manager.total_size() == len(listed)
        assert all(manager.get(each).state is CheckpointState.DELETED for each in deleted)


def race_for_the_same(url, number, results, ids):
    won = []
    with CheckpointManager(database=url) as manager:
        for checkpoint_id in ids:
            try:
                manager.complete(checkpoint_id, number, f"by-{number}")
                won.append(checkpoint_id)
            except TransitionError:
                pass
    results.put(won)


def test_of_processes_that_complete_the_same_checkpoint_one_wins(database_url):
    with CheckpointManager(database=database_url) as manager:
        ids = [manager.create(request(step)).checkpoint_id for step in range(40)]
        won = in_processes(race_for_the_same, database_url, ids)
        assert sorted(checkpoint_id for each in won for checkpoint_id in each) == sorted(ids)


def extend_chains(manager, number, errors):
    for step in range(60):
        kind = CheckpointType.FULL if step % 5 == 0 else CheckpointType.INCREMENTAL
        try:
            record = manager.create(request(step, kind=kind))
            manager.complete(record.checkpoint_id, 1, f"{number}/{step}")
        except ConflictError as error:  # the collector was faster: a clear refusal, not a hole
            errors.append(error)


def test_nobody_builds_on_what_garbage_collection_takes(database_url):
    """Writers extend chains while a collector runs: every live incremental keeps its whole chain."""
    stop, errors = threading.Event(), []
    with CheckpointManager(GcPolicy(max_checkpoints_per_run=1), database=database_url) as manager:

        def collect():
            while not stop.is_set():
                manager.gc()

        collector = threading.Thread(target=collect)
        writers = [
            threading.Thread(target=extend_chains, args=(manager, number, errors))
            for number in range(3)
        ]
        for thread in [collector, *writers]:
            thread.start()
        for writer in writers:
            writer.join()
        stop.set()
        collector.join()
        live = {record.checkpoint_id for record in manager.list_for_run("run")}
        assert all(r.parent_id is None or r.parent_id in live for r in manager.list_for_run("run"))
        assert manager.get_latest("run").step == 59
