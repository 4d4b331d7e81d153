"""The trainer neither trains nor publishes while vLLM serves another base model, and refuses to learn on one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratchet.store.policies import fingerprints
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.base_model_files import DIGESTS, check_files
from ratchet.trainer.errors import ModelError
from tests.harness.trainer.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController


class KnownBase(ScriptedEngine):
    """An engine that also answers the fixed questions; `shift` makes it another model."""

    shift = 0.0

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/tokenize":
            return 200, {"tokens": [1, 2, 3]}
        if body.get("prompt") == fingerprints.requests("base")["likeliest"][1]["prompt"]:
            top = {"token_id:5": -0.2 - self.shift, "token_id:6": -2.0 + self.shift}
            return 200, {"choices": [{"index": i, "logprobs": {"top_logprobs": [top]}} for i in range(8)]}
        return super().answer(path, body)


@pytest.fixture
def engine() -> Any:
    made = KnownBase(lambda name, ids: 0.0)
    yield made
    made.close()


@pytest.fixture
def candidate(store: Store, tmp_path: Path, make_controller: Callable[..., SteppedController]) -> SteppedController:
    """A controller with a candidate that could be published: a prompt on the base model."""
    top = {"token_id:5": -0.2, "token_id:6": -2.0}
    store.base_models.register_base_model(
        "agent", "/m", server_fingerprint={"tokens": [1, 2, 3], "likeliest": [top] * 8}
    )
    store.policies.register_prompt_version("agent", store.prompts.register("Be brief.").id, {})
    return make_controller()


def alarms(store: Store) -> dict[str, str]:
    return {alarm.name: alarm.reason for alarm in store.alarms.active()}


def test_nothing_is_published_while_vllm_serves_another_base_model(
    candidate: SteppedController, engine: KnownBase, store: Store
) -> None:
    engine.shift = 1.0
    candidate.step(1000.0)
    candidate.step(1001.0)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    assert "does not serve /m" in alarms(store)["base_model:agent"]
    engine.shift = 0.0
    candidate.step(1002.0)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE  # it is asked again a little later
    candidate.step(1020.0)
    assert store.policies.get("agent", 1).state is PolicyState.LIVE
    assert "base_model:agent" not in alarms(store)


@pytest.mark.slow
def test_a_base_model_that_changes_between_two_looks_is_seen_before_a_publication(
    candidate: SteppedController, engine: KnownBase, store: Store
) -> None:
    store.policies.reject("agent", 1, {}, reason="not this one")
    candidate.step(1000.0)  # all is well
    engine.shift = 1.0
    store.policies.register_prompt_version("agent", store.prompts.register("Be kind.").id, {})
    candidate.step(1001.0)
    assert store.policies.get("agent", 2).state is PolicyState.CANDIDATE
    assert "base_model:agent" in alarms(store)


def test_an_unreachable_server_does_not_count_as_another_base_model(
    candidate: SteppedController, engine: KnownBase, store: Store
) -> None:
    store.base_models.clear_base_model("agent", served_only=True)
    engine.shift = 1.0  # nobody knows what is right
    candidate.step(1000.0)
    assert store.policies.get("agent", 1).state is PolicyState.LIVE


def test_a_trainer_is_refused_on_another_base_model_than_the_versions_belong_to(
    store: Store, tiny_model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / DIGESTS
    check_files(store, "agent", str(tiny_model), cache)  # taken up
    other = shutil.copytree(tiny_model, tmp_path / "other")
    check_files(store, "agent", str(other), cache)  # a copy
    weights = next(other.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    os.utime(weights)
    with pytest.raises(ModelError, match=f"{other} is not {tiny_model}, which the versions of agent belong to"):
        check_files(store, "agent", str(other), cache)
