"""Many threads and processes request the same transition: one makes it, and the audit shows only that one."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.registry.sample_values import S, bring, metadata, result, v

from tensorforge.errors import AlreadyExistsError, ConflictError, LostRaceError, TransitionError
from tensorforge.registry import Actor, ModelRegistry

THREADS = 16
PROCESSES = 8


def prepare(url: str) -> None:
    with ModelRegistry(url) as registry:
        registry.register(metadata())
        bring(registry, "1.0.0", S.CANARY)
        registry.record_validation(result())


def enter_production(registry: ModelRegistry, name: str, revision: int | None) -> str:
    try:
        registry.transition_state(
            "ranker",
            v("1.0.0"),
            S.PRODUCTION,
            actor=Actor(name=name),
            expected_revision=revision,
        )
    except (TransitionError, LostRaceError) as error:
        return type(error).__name__
    return "won"


def check_one_winner(url: str, outcomes: list[str], loss: str) -> None:
    assert outcomes.count("won") == 1
    assert set(outcomes) == {"won", loss}
    with ModelRegistry(url) as registry:
        registry.verify_audit()
        entered = [e for e in registry.history("ranker") if e.to_state == "production"]
        assert len(entered) == 1
        assert registry.production("ranker").version == v("1.0.0")
        assert registry.get("ranker", v("1.0.0")).revision == 4


@pytest.mark.parametrize(("revision", "loss"), [(None, "TransitionError"), (3, "LostRaceError")])
def test_of_sixteen_threads_with_one_transition_exactly_one_wins(database_url, revision, loss):
    prepare(database_url)
    barrier = threading.Barrier(THREADS)
    with ModelRegistry(database_url) as registry, ThreadPoolExecutor(THREADS) as pool:

        def race(number: int) -> str:
            barrier.wait()
            return enter_production(registry, f"thread-{number}", revision)

        outcomes = list(pool.map(race, range(THREADS)))
    check_one_winner(database_url, outcomes, loss)


RACER = """
import sys
from tensorforge.errors import TensorForgeError
from tensorforge.registry import Actor, DeploymentState, ModelRegistry, ModelVersion
url, name = sys.argv[1:]
with ModelRegistry(url) as registry:
    print("ready", flush=True)
    sys.stdin.readline()
    production = ("ranker", ModelVersion(1, 0, 0), DeploymentState.PRODUCTION)
    try:
        registry.transition_state(*production, actor=Actor(name=name))
        print("won")
    except TensorForgeError as error:
        print(type(error).__name__)
"""

CRASHER = """
import os, sys
from tensorforge.registry import ModelRegistry
from tensorforge.registry.database.tables import VERSIONS
registry = ModelRegistry(sys.argv[1])
with registry.database.write() as connection:
    connection.execute(VERSIONS.update().values(state="production"))
    os._exit(9)
"""


def test_of_eight_processes_with_one_transition_exactly_one_wins(database_url):
    prepare(database_url)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, database_url, f"process-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    outcomes = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    check_one_winner(database_url, outcomes, "TransitionError")


def test_threads_that_register_the_same_version_store_it_once(database_url):
    barrier = threading.Barrier(THREADS)
    with ModelRegistry(database_url) as registry, ThreadPoolExecutor(THREADS) as pool:

        def race(number: int) -> str:
            barrier.wait()
            try:
                registry.register(metadata(checksum=f"sha256:{number}"))
            except AlreadyExistsError:
                return "taken"
            return "won"

        outcomes = list(pool.map(race, range(THREADS)))
        assert outcomes.count("won") == 1
        assert registry.version_count() == 1
        registry.verify_audit()


def test_threads_that_register_what_comes_next_never_share_a_number(database_url):
    with ModelRegistry(database_url) as registry, ThreadPoolExecutor(THREADS) as pool:

        def race(_: int) -> list[tuple[str, int]]:
            kept = [registry.register_next(metadata())[0] for _ in range(4)]
            return [(str(each.version), each.number) for each in kept]

        given = [pair for pairs in pool.map(race, range(THREADS)) for pair in pairs]
        assert sorted(number for _, number in given) == list(range(1, 4 * THREADS + 1))
        assert len({version for version, _ in given}) == 4 * THREADS
        assert registry.verify_audit().sequence == 4 * THREADS + 1


def test_threads_on_different_models_keep_one_unbroken_chain(database_url):
    with ModelRegistry(database_url) as registry, ThreadPoolExecutor(THREADS) as pool:

        def work(number: int) -> None:
            registry.register(metadata(model_id=f"m{number}"))
            bring(registry, "1.0.0", S.PRODUCTION, model_id=f"m{number}")

        list(pool.map(work, range(THREADS)))
        assert registry.verify_audit().sequence == THREADS * 8
        assert len(registry.find_by_state(S.PRODUCTION)) == THREADS


def test_rollbacks_that_race_never_leave_nothing_serving(database_url):
    with ModelRegistry(database_url) as registry, ThreadPoolExecutor(THREADS) as pool:
        for version in ("1.0.0", "1.1.0", "1.2.0"):
            registry.register(metadata(version))
            bring(registry, version, S.PRODUCTION)

        def race(_: int) -> str:
            try:
                return str(registry.rollback("ranker").current)
            except ConflictError:
                return "refused"

        outcomes = list(pool.map(race, range(THREADS)))
        assert outcomes.count("refused") == THREADS - 2
        assert registry.production("ranker") is not None
        registry.verify_audit()


def test_a_process_that_dies_in_the_middle_of_a_change_leaves_no_trace(database_url):
    prepare(database_url)
    victim = subprocess.run([sys.executable, "-c", CRASHER, database_url], check=False)
    assert victim.returncode == 9
    with ModelRegistry(database_url) as registry:
        assert registry.get("ranker", v("1.0.0")).state is S.CANARY
        registry.verify_audit()
        registry.transition_state("ranker", v("1.0.0"), S.PRODUCTION)
