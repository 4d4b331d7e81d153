"""Fixtures of the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tiny import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model; never written to."""
    import torch

    # One thread: the operations are so small that on a busy machine a second one is only waited for, 50 times as long.
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))
