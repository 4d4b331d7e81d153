"""Lessons on live traffic: the trainer's release process measures them against what serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet_lessons.lessons import LessonSettings, learn, start_ramp
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.stepped_controller import SteppedController
from tests.trainer.test_prompt_versions import (
    GUARDED,
    make,
    migrated_postgres,
    postgres,
    proxy,
    store,
    store_url,
    until,
    vllm,
    work,
)  # fmt: skip

__all__ = ["make", "migrated_postgres", "postgres", "proxy", "store", "store_url", "vllm"]  # fixtures


def test_lessons_are_measured_against_what_serves_and_stay_only_where_they_help(
    proxy: Proxy, store: Store, make: Callable[..., SteppedController]
) -> None:
    controller = make(**GUARDED)
    work(proxy, ["task/1", "task/2", "task/3"] * 2)

    def all_scored() -> bool:
        controller.step(time.time())
        return _scores(store) >= 6

    eventually(all_scored)
    with ScriptedModel() as scripted:
        scripted.answers = [says({"diagnosis": "d", "lessons": ["Try to be better."]})]
        model = LanguageModel(ModelSpec(base_url=scripted.url, model="m"), None)
        learned = learn(store, "agent", model, LessonSettings(failure_threshold=0.6))
        model.close()
    trial = start_ramp(store, "agent", learned, 0.5, "tun_1")
    promoted = until(controller, proxy, store, trial.version, PolicyState.RAMP)
    assert promoted.state is PolicyState.LIVE
    assert promoted.evidence["harm"][str(promoted.version)] <= 1
    assert promoted.evidence["lessons"]["families"] == {"task:task": {"failed_tasks": 3, "mean": 0.5}}


def _scores(store: Store) -> int:
    judge = store.groups.newest_judge_version("agent")
    return len(store.groups.past_scores("agent", judge)) if judge else 0
