"""The doctor's proof about batches: an engine that answers the base model by an adapter is found."""

from __future__ import annotations

from pathlib import Path

from ratchet.checks.learner_check import check_batches
from ratchet.trainer.adapters.vllm_api import VllmServer
from tests.harness.cli.mixing_engine import MixingEngine
from tests.harness.proxy.servers import served

PROBES = [(1, 2, 3), (4, 5)]


def prove(engine: MixingEngine) -> tuple[bool, str]:
    with served(engine) as url:
        replica = VllmServer(url)
        found = check_batches(replica, "policy@0", Path("/adapter"), 2, PROBES)
        replica.close()
    assert engine.loaded == []
    assert engine.max_tokens == 8, "a CPU takes minutes for more with several adapters of a real model"
    return found.passed, found.seen + found.remedy


def test_an_engine_that_keeps_base_and_adapters_apart_passes() -> None:
    passed, text = prove(MixingEngine(mixes=False))
    assert passed, text


def test_an_engine_that_answers_the_base_model_by_an_adapter_fails_with_the_remedy() -> None:
    passed, text = prove(MixingEngine(mixes=True))
    assert not passed
    assert "an adapter answers requests for the base model" in text
    assert "without Ratchet's plug-in" in text
