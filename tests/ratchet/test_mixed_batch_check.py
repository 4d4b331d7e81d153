"""The doctor's proof about batches: an engine that answers the base model by an adapter is found."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ratchet.checks.learner_check import check_batches
from ratchet.trainer.adapters.vllm_api import VllmServer
from tests.harness.trainer.scripted_engine import ScriptedEngine

PROBES = [(1, 2, 3), (4, 5)]


class MixingEngine(ScriptedEngine):
    """An adapter's logprobs are half a nat lower. If it `mixes`, an adapter answers for the base beside other calls."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__(self._logprob)
        self.reply = self._busily
        self._mixes = mixes
        self._busy = 0

    def _logprob(self, name: str, ids: Sequence[int]) -> float:
        return -float(ids[-1]) - 0.5 * (name in self.loaded or (self._mixes and self._busy > 0))

    def _busily(self, name: str, messages: Sequence[Any]) -> str:
        self._busy += 1
        time.sleep(0.3)
        self._busy -= 1
        return "noted"


def prove(engine: MixingEngine) -> tuple[bool, str]:
    with contextlib.closing(engine), contextlib.closing(VllmServer(engine.url)) as replica:
        found = check_batches(replica, "policy@0", Path("/adapter"), 2, PROBES)
    assert engine.loaded == {}
    assert {body["max_tokens"] for body in engine.requests} == {8}, (
        "a CPU takes minutes for more with several adapters of a real model"
    )
    return found.passed, found.seen + found.remedy


def test_an_engine_that_keeps_base_and_adapters_apart_passes() -> None:
    passed, text = prove(MixingEngine(mixes=False))
    assert passed, text


def test_an_engine_that_answers_the_base_model_by_an_adapter_fails_with_the_remedy() -> None:
    passed, text = prove(MixingEngine(mixes=True))
    assert not passed
    assert "an adapter answers requests for the base model" in text
    assert "without Ratchet's plug-in" in text
