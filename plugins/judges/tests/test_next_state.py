"""The judge `next_state`: it reads what came next, and the settings know what it needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.checks.judge_quality_check import proof
from ratchet.errors import SettingsError
from ratchet.settings.project_settings import Settings
from ratchet.store.store import Store
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.settings.judge_specs import asks_language_model, read_spec
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet_judges.next_state import evidence
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.records import answered_trajectory
from tests.ratchet.test_teacher import entry
from tests.trainer.test_rules import Message, made, member

JUDGE: dict[str, Any] = {"kind": "next_state", "base_url": "http://127.0.0.1:1", "model": "m"}


def test_a_next_state_model_that_is_away_gets_one_request() -> None:
    turns: list[Message] = [{"role": "assistant", "content": "Rome"}, {"role": "user", "content": "No."}]
    with ScriptedModel() as model:
        model.answers = [(401, "who are you")]
        judge = made(kind="next_state", base_url=model.url, model="m")
        judgement = judge.judge("g", [member("Oslo", before=turns), member("Bern", before=turns)])
        judge.close()
    assert "in RATCHET_JUDGE_API_KEY" in str(judgement.unavailable)
    assert [verdict.failure for verdict in judgement.verdicts] == [judgement.unavailable] * 2


def test_what_came_next_is_evidence_and_a_lone_answer_has_none() -> None:
    turns: list[Message] = [
        {"role": "assistant", "content": "Rome"},
        {"role": "user", "content": "No, that is wrong."},
    ]
    with ScriptedModel() as model:
        model.answers = [says({"answers": [{"number": 1, "shows": "bad"}]})]
        judge = made(kind="next_state", base_url=model.url, model="m")
        verdicts = judge.judge("g", [member("Oslo", before=turns), member("Oslo")]).verdicts
        judge.close()
    assert (verdicts[0].score, verdicts[0].components) == (0.0, {"turn_1": 0.0})
    assert "no evidence" in (verdicts[1].failure or "")
    assert json.loads(model.requests[0]["messages"][1]["content"])["answers"] == evidence(
        [{"role": "user", "content": "?"}, *turns, {"role": "assistant", "content": "Oslo"}]
    )


def test_a_next_state_prompt_keeps_its_budget_and_asks_for_the_answers_that_it_shows() -> None:
    turns: list[Message] = [{"role": "assistant", "content": "Rome"}, {"role": "user", "content": "Go on."}] * 3_000

    def rate(request: dict[str, Any]) -> Any:
        shown = json.loads(request["messages"][1]["content"])["answers"]
        numbers = [turn["number"] for turn in shown if isinstance(turn, dict)]
        return says({"answers": [{"number": number, "shows": "good"} for number in numbers]})

    with ScriptedModel() as model:
        model.answers = [rate]
        judge = made(kind="next_state", base_url=model.url, model="m", context_tokens=1_000)
        verdict = judge.judge("g", [member("Oslo", before=turns)]).verdicts[0]
        judge.close()
    assert len(model.requests[0]["messages"][1]["content"]) <= 3_000
    assert verdict.score == 1.0
    assert {"turn_1", "turn_3000"} <= set(verdict.components)
    assert "context_tokens" in verdict.explanation


def test_samples_that_no_user_sees_are_refused_beside_it() -> None:
    fields = {"store": "s", "model": "agent", "base_model": "b", "vllm": ["http://x"], "checkpoints": "c"}
    parts = [{"name": "next", "judge": JUDGE, "weight": 1.0}]
    with pytest.raises(ValidationError, match=r"judge next_state waits for the next message.*use a judge that reads"):
        TrainerSettings.model_validate(
            fields | {"resample": {"samples": 2}, "judge": {"kind": "composite", "parts": parts}}
        )


def test_it_counts_as_a_judge_with_noise_whose_model_may_be_in_model_list(tmp_path: Path) -> None:
    assert asks_language_model(read_spec(JUDGE))

    def judge(**settings: Any) -> Any:
        content = {"state_dir": tmp_path, "base_model": "t", "model_list": [entry()]}
        chosen = {"trainer": {"judge": {"kind": "next_state", **settings}}}
        return Settings.of(content | chosen).trainer.judge

    with pytest.raises(SettingsError, match=r"trainer\.judge\.model: field required: name a model of model_list"):
        judge()
    assert judge(model="teacher").settings["base_url"].startswith("http://")


def test_the_doctor_does_not_ask_it_about_answers_that_nobody_followed(store: Store) -> None:
    answered_trajectory(store, "t")
    found = proof(made(**JUDGE), "next_state", store, "agent")
    assert found.passed
    assert "needs traffic" in found.seen


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(JudgeError, match=r"judge next_state: .*base_url.* is not an http"):
        made(**JUDGE | {"base_url": "host"})
