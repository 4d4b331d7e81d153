"""A real proxy process with a scripted vLLM, and a trainer's controller with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ratchet.store.store import Store, open_store
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually, served
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController

# The scripted vLLM's logprobs are not the tiny model's: its rows would rightly be rejected.
LEARNER = LearnerSettings(learning_rate=1e-2, sequence_mask_threshold=None)


@contextmanager
def proxy_before(vllm: ScriptedVllm, folder: Path) -> Iterator[str]:
    """Run a proxy with its store in the folder; the value is its URL."""
    with served(vllm) as url:
        process = ProxyProcess(folder, upstreams=[url])
        try:
            eventually(lambda: httpx.get(process.url + "/health/ready", timeout=60).status_code == 200)
            yield process.url
        finally:
            process.stop()


def all_shipped(proxy: str) -> None:
    """Wait until all records of the proxy are in the store, which takes a while on a busy machine."""
    eventually(lambda: httpx.get(f"{proxy}/health/backlog", timeout=60).json()["unshipped_records"] == 0)


@contextmanager
def trainer_of(
    folder: Path, tiny_model: Path, **settings: Any
) -> Iterator[tuple[SteppedController, Store, ScriptedEngine]]:
    """A controller on the store in the folder, with an engine that serves its versions."""
    store, engine = open_store(str(folder / "store.db")), ScriptedEngine(lambda name, ids: 0.0)
    values: dict[str, Any] = {
        "store": str(folder / "store.db"), "model": "agent", "base_model": str(tiny_model), "vllm": (engine.url,),
        "checkpoints": folder / "checkpoints", "groups_per_round": 1, "learner": LEARNER,
        "release": {"policy": "immediate"},
    }  # fmt: skip
    controller = SteppedController(TrainerSettings(**(values | settings)), store)

    engine.scorer = Faithful(engine, lambda: controller.learner)
    try:
        yield controller, store, engine
    finally:
        controller.close()
        engine.close()
        store.close()
