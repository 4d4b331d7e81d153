"""Fixtures of the example's tests: a built mailbox with its task set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.email_search.__main__ import main
from examples.email_search.mailbox import DATABASE, Mailbox
from examples.email_search.tasks import Task, read_tasks


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `build-db` writes it; never written to."""
    folder = tmp_path_factory.mktemp("email_search")
    assert main(["build-db", "--home", str(folder)]) == 0
    return folder


@pytest.fixture
def box(home: Path) -> Iterator[Mailbox]:
    """The built mailbox."""
    opened = Mailbox(home / DATABASE)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def task(home: Path) -> Task:
    """The first held-out task."""
    return read_tasks(home, "test")[0]
