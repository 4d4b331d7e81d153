"""Fixtures of the tuner's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.tuning.scripted_reflection_model import ScriptedReflectionModel


@pytest.fixture
def reflection_server() -> Iterator[ScriptedReflectionModel]:
    """A scripted reflection model that proposes what helps."""
    with ScriptedReflectionModel().running() as scripted:
        yield scripted
