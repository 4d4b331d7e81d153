"""Whole runs of prompt tuning over a real store, with rollouts of the small world."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import TooManyFailures, TuningError, Unjudged
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.settings.judge_specs import ModelSpec
from ratchet.tuner.prompts.optimizer import load_optimizer
from ratchet.tuner.prompts.prompt_tuning import Found, PromptPlan, PromptTuning, divide
from ratchet.tuner.prompts.reflection_model import ReflectionModel
from ratchet.tuner.prompts.trials import Budget, Trials, given
from ratchet.tuner.rollouts.runner import RolloutJob, plan_rollout
from ratchet.tuner.settings import TunerSettings
from tests.harness.chat_models import ScriptedReflectionModel
from tests.harness.records import answered_trajectory
from tests.harness.tuner import prompt_world
from tests.harness.tuner.world_rollouts import TOKENS, Killed, WorldRollouts, tasks

TASKS = tasks(60)
SETTINGS = TunerSettings(seed=1)
SETS = divide(TASKS[:30], TASKS[30:], SETTINGS.prompt, seed=1)
PLAN = PromptPlan(SETS, SETTINGS, given(prompt_world.SEED))


class PromptTuningRun:
    """A run in the small world that another process can continue."""

    def __init__(self, store: Store, server: ScriptedReflectionModel, rollouts: int = 400, **changes: Any) -> None:
        self.tuning_id = store.tunings.begin("prompt", "agent", {}).id
        self.answered: list[Any] = []
        self.reports: list[str] = []
        self._store = store
        self._server = server
        self._rollouts = rollouts
        self._changes = changes
        self.begin()

    def begin(self) -> None:
        """A process begins."""
        self.budget = Budget(self._rollouts, self._changes.get("tokens"))
        self.rollouts = WorldRollouts(
            self._store,
            self.tuning_id,
            self._changes.get("answer", prompt_world.answer),
            self._changes.get("lives", 10**9),
        )
        self.rollouts.fails = self._changes.get("fails", self.rollouts.fails)
        self.rollouts.unjudged = self._changes.get("unjudged", self.rollouts.unjudged)

    def run(self, plan: PromptPlan = PLAN) -> Found:
        """Run to the end, or to the end of this process."""
        known = {task.id: task for task in TASKS}
        self.trials = Trials(
            self._store, self.tuning_id, known, self.rollouts.run, self.rollouts.judge, self.budget
        )  # fmt: skip
        spec = ModelSpec.model_validate(self._server.spec())
        model = LanguageModel(spec, None, sleep=lambda seconds: None)
        return PromptTuning(
            self.trials,
            self.budget,
            load_optimizer("gepa"),
            lambda seed: ReflectionModel(
                model, self.budget, mode=seed.mode, answered=tuple(self.answered), keep=self._keep
            ),
            plan,
            self.reports.append,
        ).run()

    def _keep(self, answered: Any, judge_requests: Sequence[Any]) -> None:
        self.answered.append(json.loads(json.dumps(answered)))

    def prompts_on(self, ids: Sequence[str]) -> set[str]:
        """Prompts that were tried on one of these tasks."""
        return {prompt for prompt, task in self.rollouts.made if task in ids}


@pytest.mark.slow
def test_what_is_found_is_better_on_tasks_that_the_search_never_saw(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    world = PromptTuningRun(store, reflection_server)
    found = world.run()
    assert found.verdict == "better"
    assert found.gain is not None
    assert found.gain.low > 0
    assert (found.gain.against_mean, found.gain.mean, found.gain.tasks) == (0.0, 1.0, 30)
    assert store.prompts.get(found.best).text == found.prompt
    assert world.prompts_on(SETS.held_out) == {prompt_world.SEED, found.prompt}
    assert "(30)" not in str(reflection_server.requests)


@pytest.mark.slow
def test_held_out_tasks_decide_against_a_prompt_that_fits_the_searchs_tasks_only(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    seen = {task.id: task.row["question"].partition("(")[2].rstrip(")") for task in TASKS}
    numbers = ",".join(seen[task] for task in (*SETS.train, *SETS.validation))

    def answer(prompt: str, question: str) -> str:  # one rule of three is known without any prompt
        if "blim" in question and "only" not in prompt:
            return "tree"
        return prompt_world.answer(prompt, question)

    reflection_server.propose = lambda prompt, rows: f"only {numbers}: all rules"
    found = PromptTuningRun(store, reflection_server, answer=answer).run()
    assert max(one.mean or 0.0 for one in found.tried) == 1.0
    assert found.verdict == "worse"
    assert found.gain is not None
    assert found.gain.high < 0


def test_a_reflection_model_without_an_idea_leaves_the_seed_and_no_held_out_task_is_paid_for(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    reflection_server.propose = lambda prompt, rows: f"{prompt} Please."
    world = PromptTuningRun(store, reflection_server, rollouts=200)
    found = world.run()
    assert (found.verdict, found.prompt, found.gain) == ("no better", prompt_world.SEED, None)
    assert world.prompts_on(SETS.held_out) == set()


@pytest.mark.slow
def test_the_budget_of_rollouts_is_hard_and_what_was_found_is_kept_and_compared(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    world = PromptTuningRun(store, reflection_server, rollouts=120)
    found = world.run()
    assert len(world.rollouts.made) <= 120
    assert "--max-rollouts" in found.ended_by
    assert found.gain is not None
    assert found.gain.tasks == 30
    assert 0.0 < (found.gain.mean or 0.0) < 1.0


@pytest.mark.slow
def test_the_budget_of_tokens_is_hard_with_the_reflections_in_it(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    tokens = 100 * TOKENS + 3 * 550
    world = PromptTuningRun(store, reflection_server, tokens=tokens)
    found = world.run()
    assert "--max-total-tokens" in found.ended_by
    assert world.budget.tokens_spent <= tokens
    assert world.budget.reflection_tokens > 0
    assert found.gain is not None
    assert found.gain.tasks == 30


@pytest.mark.slow
def test_a_comparison_that_the_tokens_end_is_inconclusive(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    world = PromptTuningRun(store, reflection_server, tokens=100 * TOKENS + 3 * 550)
    world.rollouts.tokens = lambda job: TOKENS * (20 if job.task.id in SETS.held_out[10:] else 1)
    found = world.run()
    assert found.verdict == "inconclusive"
    assert "attempts are unjudged" in found.why
    assert any("cut short" in line for line in world.reports)


def test_a_budget_that_cannot_come_to_a_result_is_refused_with_the_number_that_can(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    with pytest.raises(TuningError, match=r"at least 98, including 60"):
        PromptTuningRun(store, reflection_server, rollouts=97).run()


@pytest.mark.slow
@pytest.mark.parametrize("lives", [1, 50, 140])
def test_a_killed_run_goes_on_where_it_was_and_pays_for_nothing_twice(
    store: Store, reflection_server: ScriptedReflectionModel, lives: int
) -> None:
    whole = PromptTuningRun(store, reflection_server)
    expected = whole.run()
    requests = len(reflection_server.requests)
    world = PromptTuningRun(store, reflection_server, lives=lives)
    with pytest.raises(Killed):
        world.run()
    before = list(world.rollouts.made)
    world._changes["lives"] = 10**9
    world.begin()
    found = world.run()
    assert (found.prompt, found.verdict, found.tried) == (expected.prompt, expected.verdict, expected.tried)
    assert sorted(before + world.rollouts.made) == sorted(whole.rollouts.made)
    assert len(reflection_server.requests) == 2 * requests


def _abandoned(store: Store, world: PromptTuningRun, more: int = 0) -> int:
    """Let a killed run go on, with so many more rollouts that were under way; return how many were cut off."""
    first = TASKS[0]
    store.rollouts.plan([plan_rollout(RolloutJob(first, number, "x"), world.tuning_id) for number in range(more)])
    store.rollouts.plan([plan_rollout(RolloutJob(first, 0, "only planned"), world.tuning_id)])
    store.tunings.resume(world.tuning_id)
    gone = [one for one in store.rollouts.of_tuning(world.tuning_id) if one.state is RolloutState.ABANDONED]
    under_way = [one.id for one in gone if one.candidate != "only planned"]
    for name in under_way:
        answered_trajectory(store, name)
    store.rollouts.count_tokens(under_way)
    world._changes["lives"] = 10**9
    world.begin()
    return len(under_way)


@pytest.mark.slow
def test_what_a_kill_cut_off_counts_against_the_budget_and_the_cost(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    world = PromptTuningRun(store, reflection_server, lives=20)
    with pytest.raises(Killed):
        world.run()
    gone = _abandoned(store, world, more=2)
    assert gone == 3
    world.run()
    assert world.budget.started_rollouts == 20 + gone + len(world.rollouts.made)
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in world.trials.rollouts)
    assert world.budget.agent_tokens == tokens > (20 + len(world.rollouts.made)) * TOKENS


@pytest.mark.slow
def test_where_a_kill_cut_off_too_much_fewer_held_out_tasks_decide(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    whole = PromptTuningRun(store, reflection_server, rollouts=160)
    whole.run()
    world = PromptTuningRun(store, reflection_server, rollouts=160, lives=len(whole.rollouts.made) - 40)
    with pytest.raises(Killed):
        world.run()
    _abandoned(store, world, more=160 - len(world.rollouts.made) - 21)
    found = world.run()
    assert found.gain is not None
    assert 0 < found.gain.tasks < len(SETS.held_out)
    assert found.gain.unjudged == 0
    assert world.budget.started_rollouts <= 160
    assert any(f"compared on {found.gain.tasks} of 30 held-out tasks" in line for line in world.reports)


@pytest.mark.slow
def test_a_failed_rollout_counts_as_a_failure_and_is_not_tried_again(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    def crashes(job: Any) -> bool:
        return "quib" in (job.system_prompt or "")

    world = PromptTuningRun(store, reflection_server, fails=crashes)
    found = world.run()
    assert "quib" not in found.prompt
    assert len(world.rollouts.made) == len(set(world.rollouts.made))


@pytest.mark.slow
def test_a_crashing_prompt_never_wins_under_a_judge_with_negative_scores(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    world = PromptTuningRun(store, reflection_server, fails=lambda job: "quib" in (job.system_prompt or ""))
    world.rollouts.reward = lambda right: 5.0 * right - 5.0
    found = world.run()
    assert "quib" not in found.prompt
    assert all((one.mean or 0.0) <= -5.0 for one in found.tried if "quib" in one.prompt)


@pytest.mark.slow
def test_the_reflection_model_reads_why_a_rollout_failed(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    PromptTuningRun(store, reflection_server, fails=lambda job: job.task.id in SETS.train[:5]).run()
    assert "The agent failed: RuntimeError: scripted" in str(reflection_server.requests)


def test_a_seed_prompt_whose_rollouts_all_fail_ends_the_run_with_their_reason(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    with pytest.raises(TooManyFailures, match="RuntimeError: scripted"):
        PromptTuningRun(store, reflection_server, fails=lambda job: True).run()


def test_an_agent_that_fails_before_it_calls_a_model_ends_the_run_with_its_reason(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    plan = PromptPlan(SETS, SETTINGS)  # the seed is to be read from what the agent sends
    with pytest.raises(TooManyFailures, match="failed before calling a model: RuntimeError: scripted"):
        PromptTuningRun(store, reflection_server, fails=lambda job: True).run(plan)


def test_a_judge_that_fails_on_the_seed_ends_the_run_and_says_so(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    with pytest.raises(Unjudged, match="the judge failed on 15 of 15"):
        PromptTuningRun(store, reflection_server, unjudged=lambda prompt, task: True).run()


@pytest.mark.slow
def test_a_prompt_that_the_judge_fails_on_never_wins(store: Store, reflection_server: ScriptedReflectionModel) -> None:
    def out(prompt: str, task: str) -> bool:
        return "quib" in prompt and task == SETS.validation[0]

    found = PromptTuningRun(store, reflection_server, unjudged=out).run()
    assert "quib" not in found.prompt


@pytest.mark.slow
def test_unjudged_rollouts_on_held_out_tasks_leave_it_inconclusive_if_they_could_change_it(
    store: Store, reflection_server: ScriptedReflectionModel
) -> None:
    def out(prompt: str, task: str) -> bool:
        return task in SETS.held_out[:25] and prompt != prompt_world.SEED

    found = PromptTuningRun(store, reflection_server, unjudged=out).run()
    assert found.verdict == "inconclusive"
    assert found.gain is not None
    assert found.gain.unjudged == 25
    assert "25 attempts are unjudged" in found.why


@pytest.mark.slow
def test_a_judge_failure_is_judged_once_more(store: Store, reflection_server: ScriptedReflectionModel) -> None:
    failed: set[tuple[str, str]] = set()

    def out_at_first(prompt: str, task: str) -> bool:
        again = (prompt, task) in failed
        failed.add((prompt, task))
        return not again and prompt == prompt_world.SEED and task in SETS.validation

    world = PromptTuningRun(store, reflection_server, unjudged=out_at_first)
    with pytest.raises(Unjudged):
        world.run()
    world.begin()
    world.rollouts._prompts = {one.id: prompt_world.SEED for one in store.rollouts.of_tuning(world.tuning_id)}
    assert world.run().verdict == "better"
