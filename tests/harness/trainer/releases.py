"""The release of an agent, with few settings; without a ramp unless others are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.release.release import Release
from ratchet.trainer.settings.trainer_settings import TrainerSettings


def make_release(store: Store, replicas: Sequence[VllmServer] = (), alias: str = "agent", **changes: Any) -> Release:
    """Return the release of `alias`, whose judge has the version 1."""
    values: dict[str, Any] = {
        "store": "unused", "model": alias, "base_model": "scripted", "vllm": ("http://127.0.0.1:1",),
        "checkpoints": Path("unused"), "judge": "a:b", "proof_tolerance": 0.05, "keep_loaded_adapters": 0,
        "release": {"policy": "immediate"},
    }  # fmt: skip
    return Release(store, replicas, TrainerSettings(**(values | changes)), "1")
