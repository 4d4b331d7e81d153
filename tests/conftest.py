"""Shared fixtures: an empty store, created once and copied, and no TLS certificates."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.store.store import Store, open_store


@pytest.fixture(scope="session", autouse=True)
def no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reading a machine's certificates costs an HTTP client more than all else: tests of TLS bring their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty SQLite store; never written to."""
    file = tmp_path_factory.mktemp("migrated") / "store.db"
    open_store(str(file)).close()
    return file


@pytest.fixture
def store_file(migrated: Path, tmp_path: Path) -> Path:
    """The file of an empty SQLite store, `store.db` in the test's folder."""
    return Path(shutil.copy(migrated, tmp_path / "store.db"))


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    """A fresh SQLite store."""
    opened = open_store(str(store_file))
    yield opened
    opened.close()
