"""Settings under which nothing could ever be learnt are refused before anything starts, with reason and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.kinds.answer import AnswerJudge
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.settings.judge_specs import AnswerSpec
from ratchet.trainer.settings.trainer_settings import TrainerSettings

RANKS = {"kind": "ruler", "base_url": "http://127.0.0.1:1", "model": "m"}


def settings(**changes: Any) -> TrainerSettings:
    values: dict[str, Any] = {
        "store": "store.db",
        "model": "agent",
        "base_model": "base",
        "vllm": ("http://127.0.0.1:1",),
        "checkpoints": "checkpoints",
        "judge": "a:b",
    }
    return TrainerSettings(**(values | changes))


def part(judge: dict[str, Any], **role: float) -> dict[str, Any]:
    return {"name": f"p{len(str(judge))}", "judge": judge, **role}


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"num_generations": 1}, "every advantage would be 0", "ungrouped: baseline"),
        ({"min_group_size": 1}, "every advantage would be 0", "use 2 or more"),
        ({"num_generations": 2, "min_group_size": 4}, "no smaller group is ever compared", "lower it"),
        (
            {"ungrouped": "baseline", "min_baseline_samples": 513},
            "have a baseline",
            "lower it",
        ),
        ({"ungrouped": "baseline", "judge": RANKS}, "only ranks the members of one group", "ungrouped: drop"),
        ({"ungrouped": "cohort", "judge": RANKS}, "scores of different times and tasks", "ungrouped: drop"),
        ({"resample": {"samples": 1}, "min_group_size": 3}, "would never be compared", "set resample.samples to 2"),
        (
            {
                "resample": {"samples": 2},
                "judge": {"kind": "composite", "parts": [part({"kind": "feedback"}, weight=1.0)]},
            },
            "waits for feedback",
            "resample.samples: 0",
        ),
        ({"ungrouped": "baseline", "judge": RANKS}, "only ranks the members of one group", "resample.samples"),
        ({"proof_tolerance": 1e-7}, "every version would be rejected", "0.01 to 0.2"),
        ({"learner": {"learning_rate": 1e-12}}, "too small to change an fp32 weight", "1e-6 to 1e-4"),
        (
            {"learner": {"learning_rate": 1e-3, "target_kl": 0.01}},
            "target_kl has no effect with learning_rate 0.001",
            "learning_rate: auto",
        ),
        ({"learner": {"max_grad_norm": 1e-9}}, "below AdamW's epsilon", "1.0 is usual"),
        (
            {"learner": {"steps_per_round": 2, "epsilon": 1e-6, "epsilon_high": 1e-6}},
            "first of 2 steps",
            "0.2 and 0.28",
        ),
        ({"learner": {"loss_type": "cispo", "epsilon": 0.1}}, "epsilon has no effect with loss cispo", "leave it"),
        (
            {"learner": {"loss_type": "sft", "top_entropy_quantile": 0.2}},
            "top_entropy_quantile has no effect",
            "leave it out",
        ),
        (
            {"learner": {"loss_type": "grpo", "dr_grpo_length": 9}},
            "dr_grpo_length has no effect",
            "use a loss that has",
        ),
        ({"learner": {"preference_beta": 0.5}}, "preference_beta has no effect with loss dapo", "leave it out"),
    ],
)
def test_settings_that_train_nothing_are_refused_with_reason_and_remedy(
    changes: dict[str, Any], reason: str, remedy: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        settings(**changes)
    message = str(refused.value)
    assert reason in message
    assert remedy in message


def test_a_learning_rate_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"learning_rate is 0\.0; it must be auto, or a number above 0"):
        settings(learner={"learning_rate": 0})


@pytest.mark.parametrize(
    "changes",
    [
        {"ungrouped": "drop", "min_baseline_samples": 513},  # not used
        {"max_staleness": 0},  # on-policy: what was sampled before a swap is dropped, what comes after it is trained
        {"learner": {"epsilon": 1e-6, "epsilon_high": 1e-6}},  # in the only step every ratio is 1
        {"learner": {"max_grad_norm": 0}},
        {"learner": {"loss_type": "cispo", "epsilon_high": 4.0, "top_entropy_quantile": 0.2}},
        {"learner": {"loss_type": "dr_grpo", "dr_grpo_length": 64, "epsilon": 0.1}},
    ],
)  # fmt: skip
def test_settings_that_can_train_are_accepted(changes: dict[str, Any]) -> None:
    settings(**changes)


@pytest.mark.parametrize("name", ["always_zero", "always_zero_later"])
def test_a_judge_function_that_reads_nothing_is_refused(name: str) -> None:
    with pytest.raises(JudgeError, match="same score"):
        FunctionJudge(f"tests.harness.trainer.judge_samples:{name}")


def answers(folder: Path, *right: str) -> Path:
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps({"task": f"t{n}", "answer": one}) + "\n" for n, one in enumerate(right)))
    return file


def test_an_answer_rule_that_nobody_can_meet_is_refused(tmp_path: Path) -> None:
    file = answers(tmp_path, "Oslo", "Rome")
    with pytest.raises(JudgeError, match="has a number; use match"):
        AnswerJudge(AnswerSpec(kind="answer", answers=file, match="numeric"))
    with pytest.raises(JudgeError, match="raise max_chars"):
        AnswerJudge(AnswerSpec(kind="answer", answers=file, match="contains", max_chars=3))
    AnswerJudge(AnswerSpec(kind="answer", answers=file, match="contains", max_chars=4))
