"""A project per test, ended whatever the test does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ratchet.project import Project


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A project that nothing runs in yet."""
    project = Project(tmp_path)
    yield project
    project.stop()
