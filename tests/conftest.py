"""What every test gets: a private temporary folder, a leak check, and a Hypothesis profile."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tensorforge import environment

if TYPE_CHECKING:
    from tensorforge.testing.network_namespace import DistantHost
    from tensorforge.testing.s3 import S3Server

# The standard library starts this helper process once and keeps it; it is no test's leak.
resource_tracker.ensure_running()

SOAK = environment.SOAK.read()
GRACE_SECONDS = 5.0

settings.register_profile(
    "gate",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "soak", parent=settings.get_profile("gate"), derandomize=False, max_examples=2000
)
settings.load_profile("soak" if SOAK else "gate")


def _threads() -> set[str]:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _processes() -> set[str]:
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(f"pid {child.pid}: {' '.join(child.cmdline())[:120]}")
        except psutil.NoSuchProcess:
            continue
    return found


def _descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink()
        except OSError:
            continue
        # Runtimes keep epoll and event descriptors of their own; files, sockets and pipes are ours.
        if not str(target).startswith(("anon_inode:", "/dev/", "/proc/")):
            found.add(f"{entry.name} -> {target}")
    return found


def _files(folder: Path) -> Callable[[], set[str]]:
    return lambda: {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(autouse=True)
def no_leaks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch
) -> Iterator[None]:
    """Fail a test that leaves threads, processes, descriptors or temporary files behind.

    What ends by itself shortly after the test is no leak, so the check waits a little before it judges.
    """
    if {"postgres_url", "database_url"} & set(request.fixturenames):
        request.getfixturevalue("postgres_server")  # the session's, so no leak of this test
    folder = tmp_path_factory.mktemp("tempfile")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    allowed = {mark.args[0] for mark in request.node.iter_markers("may_leak")}
    probes = {
        "threads": _threads,
        "processes": _processes,
        "descriptors": _descriptors,
        "files": _files(folder),
    }
    before = {kind: probe() for kind, probe in probes.items() if kind not in allowed}
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        leaks = {kind: probes[kind]() - known for kind, known in before.items()}
        if not any(leaks.values()):
            return
        if time.monotonic() > deadline:
            lines = [f"{kind}: {sorted(found)}" for kind, found in leaks.items() if found]
            pytest.fail("the test left something behind\n" + "\n".join(lines), pytrace=False)
        gc.collect()
        time.sleep(0.02)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """A real PostgreSQL for the session, one per test process."""
    from tensorforge.testing.postgres import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """An empty PostgreSQL database of this test's own."""
    from tensorforge.testing.postgres import fresh_database

    with fresh_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server for the session, one per test process."""
    from tensorforge.testing.s3 import running_s3

    with running_s3() as server:
        yield server


@pytest.fixture
def distant_host() -> Iterator[DistantHost]:
    """Another host, as far as the network is concerned."""
    from tensorforge.testing.network_namespace import DistantHost

    if not DistantHost.is_possible():
        pytest.skip("NOT TESTED, a split network: this machine gives us no network namespaces")
    with DistantHost() as host:
        yield host


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database; the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'meta.db'}"
    return request.getfixturevalue("postgres_url")
