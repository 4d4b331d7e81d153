"""GEPA, and what holds for optimizers whatever they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ratchet.trainer.errors import BudgetExceeded, TuningError
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.tuner.prompts.optimizer import load_optimizer
from ratchet.tuner.prompts.reflection_model import ReflectionModel
from ratchet.tuner.prompts.trials import Budget
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.tuner import prompt_world
from tests.harness.tuner.prompt_fakes import TRAIN, VALIDATION, WorldEvaluate, search

ROOT = Path(__file__).parents[2]


def reflection(server: ScriptedReflectionModel) -> ReflectionModel:
    model = LanguageModel(ModelSpec.model_validate(server.spec()), None, sleep=lambda seconds: None)
    return ReflectionModel(model, Budget(1000))


def test_gepa_finds_every_rule_that_a_reflection_model_proposes(reflection_server: ScriptedReflectionModel) -> None:
    evaluate = WorldEvaluate()
    load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    score, prompt = evaluate.best()
    assert score == 1.0
    assert all(f"a {thing} is a {word}" in prompt for thing, word in prompt_world.WORDS.items())


def test_gepa_ends_by_itself_when_nothing_new_is_to_be_learnt(reflection_server: ScriptedReflectionModel) -> None:
    reflection_server.propose = lambda prompt, rows: prompt
    evaluate = WorldEvaluate(most=10_000)
    load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search(rollouts=10_000))
    assert evaluate.paid == len(TRAIN) + len(VALIDATION)


def test_reflection_is_shown_training_tasks_alone(reflection_server: ScriptedReflectionModel) -> None:
    load_optimizer("gepa").optimize(prompt_world.SEED, WorldEvaluate(), reflection(reflection_server), search())
    requests = str(reflection_server.requests)
    numbers = range(len(TRAIN), len(TRAIN) + len(VALIDATION))
    assert "(0)" in requests
    assert not [n for n in numbers if f"({n})" in requests]


def test_the_same_seed_asks_the_same_questions() -> None:
    questions = []
    for seed in (1, 1, 2):
        with ScriptedReflectionModel() as server:
            evaluate = WorldEvaluate()
            load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(server), search(seed))
            questions.append(evaluate.questions)
    assert questions[0] == questions[1]
    assert questions[0] != questions[2]


def test_the_end_of_the_budget_comes_out_of_the_library(reflection_server: ScriptedReflectionModel) -> None:
    evaluate = WorldEvaluate(most=20)
    with pytest.raises(BudgetExceeded):
        load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    assert evaluate.paid <= 20


def test_any_other_error_of_ours_comes_out_of_the_library_too(reflection_server: ScriptedReflectionModel) -> None:
    class Broken(WorldEvaluate):
        def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
            if prompt != prompt_world.SEED:
                raise ZeroDivisionError("a defect")
            return super().scores(prompt, task_ids)

    with pytest.raises(ZeroDivisionError):
        load_optimizer("gepa").optimize(prompt_world.SEED, Broken(), reflection(reflection_server), search())


def test_a_prompt_that_the_judge_fails_on_is_set_aside_and_the_search_goes_on(
    reflection_server: ScriptedReflectionModel,
) -> None:
    def first_rule_alone(prompt: str, task: str) -> bool:
        return prompt.count("\n") == 1 and "blim" in prompt

    evaluate = WorldEvaluate(unjudged=first_rule_alone)
    load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    score, prompt = evaluate.best()
    assert score > 0
    assert not first_rule_alone(prompt, "")


def test_a_reflection_model_that_is_down_ends_the_search_with_its_setting_named(
    reflection_server: ScriptedReflectionModel,
) -> None:
    reflection_server.down = 1000
    with pytest.raises(TuningError, match=r"tuner\.reflection"):
        load_optimizer("gepa").optimize(prompt_world.SEED, WorldEvaluate(), reflection(reflection_server), search())


def test_a_reflection_model_that_stumbles_costs_one_proposal(reflection_server: ScriptedReflectionModel) -> None:
    reflection_server.down = 2
    evaluate = WorldEvaluate()
    load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    assert evaluate.best()[0] == 1.0


def test_a_missing_extra_is_reported_with_its_install_command() -> None:
    program = (
        "import sys; sys.modules['gepa'] = None\n"
        "from ratchet.tuner.prompts.optimizer import load_optimizer\n"
        "try: load_optimizer('gepa')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60, check=True
    )
    assert f"{TuningError.__name__} --method" in done.stdout
    assert "pip install '.[tune-gepa]'" in done.stdout


def test_scores_above_one_are_improved_too(reflection_server: ScriptedReflectionModel) -> None:
    class OfTen(WorldEvaluate):
        def scores_or_none(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
            return [None if score is None else 2.0 + 8.0 * score for score in super().scores_or_none(prompt, task_ids)]

    evaluate = OfTen()
    load_optimizer("gepa").optimize(prompt_world.SEED, evaluate, reflection(reflection_server), search())
    assert evaluate.best()[0] == 1.0  # of what is known below the judge's scale
