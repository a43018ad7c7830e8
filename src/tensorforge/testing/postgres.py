"""A PostgreSQL server on this machine, for tests."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
import warnings
from collections.abc import Iterator

import sqlalchemy as sa


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server in a temporary folder, yield its URL, end it and remove the folder."""
    with tempfile.TemporaryDirectory(prefix="tensorforge-pg-") as folder:
        with warnings.catch_warnings():
            # It has its locks below XDG_RUNTIME_DIR, and warns if that is not set.
            warnings.simplefilter("ignore")
            from pgserver.postgres_server import get_server

            server = get_server(folder, cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextlib.contextmanager
def fresh_database(server_url: str) -> Iterator[str]:
    """Create an empty database on a running server, yield its URL, drop it."""
    name = f"test_{uuid.uuid4().hex}"
    url = sa.make_url(server_url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        yield url.set(database=name).render_as_string(hide_password=False)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        engine.dispose()
