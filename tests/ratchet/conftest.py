"""A project per test, ended whatever the test does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cli.project import Project


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_arrives() -> None:
    """A shell lets background jobs ignore Ctrl-C, and what they start as well: not what these tests start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project that nothing runs in yet."""
    project = Project(tmp_path)
    yield project
    project.stop()
