"""On-policy distillation: a teacher scores the recorded ids, and single trajectories move the policy towards it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from ratchet.store.records import TeacherScore, Transcript, unpack_logprobs
from ratchet.store.states import GroupState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judge_runner import JudgeRunner
from ratchet.trainer.judges.kinds.teacher import TeacherJudge, batched
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.settings.judge_specs import TeacherSpec
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.records import answered_trajectory
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.scripted_teacher import NAME, ScriptedTeacher
from tests.trainer.test_rows import call, choice

if TYPE_CHECKING:
    from tests.harness.trainer.stepped_controller import SteppedController

DISTILLATION = LearnerSettings(loss_type="distillation", learning_rate=1e-2, sequence_mask_threshold=None)
TEACHER = {"kind": "teacher", "base_url": "http://127.0.0.1:1", "model": NAME}


@pytest.fixture
def teacher() -> Iterator[ScriptedTeacher]:
    made = ScriptedTeacher()
    yield made
    made.close()


def judge_by(teacher: ScriptedTeacher, **changes: Any) -> TeacherJudge:
    spec = TeacherSpec(kind="teacher", base_url=f"{teacher.url}/v1", model=NAME, **changes)
    return TeacherJudge(spec, {"KEY": "secret"})


def test_the_teacher_scores_the_recorded_ids_and_each_answer_once(store: Store, teacher: ScriptedTeacher) -> None:
    answered_trajectory(store, "t")  # ids 1 2 3, sampled 4 5 at -6.25
    teacher.logprob = lambda ids: -float(ids[-1])
    judgement = judge_by(teacher, api_key_env="KEY", input_cost_per_million=2e6).judge(
        None, [store.trajectories.read("t")]
    )
    (verdict,), (scored,) = judgement.verdicts, judgement.teacher_scores
    assert teacher.scored[-1] == [1, 2, 3, 4, 5]
    assert set(teacher.authorizations) == {"Bearer secret"}
    assert [(one.call_id, unpack_logprobs(one.logprobs)) for one in scored.answers] == [("call_t", (-4.0, -5.0))]
    gaps = (2.25, 1.25)
    assert verdict.components["reverse_kl"] == pytest.approx(-sum(gaps) / 2)
    assert verdict.score == pytest.approx(math.exp(-sum(math.exp(gap) - 1 - gap for gap in gaps) / 2))
    assert (verdict.cost, [one.prompt_tokens for one in judgement.judge_requests]) == (10.0, [5])


def test_a_conversation_is_scored_as_one_sequence_and_a_fork_as_another(teacher: ScriptedTeacher) -> None:
    calls = [
        call("1", (1, 2), choice((3, 4))),
        call("2", (5,), choice((6,)), parent_call="1", context="exact"),
        call("3", (9, 9), choice((8,))),
    ]
    member = Transcript(trajectory=run_of("t"), calls=tuple(calls), messages=(), tools=())
    judgement = judge_by(teacher).judge(None, [member])
    assert sorted(teacher.scored[1:]) == [[1, 2, 3, 4, 5, 6], [9, 9, 8]]
    assert {one.call_id for one in judgement.teacher_scores[0].answers} == {"1", "2", "3"}


def test_what_ends_beyond_the_teachers_context_is_not_scored(teacher: ScriptedTeacher) -> None:
    teacher.card["max_model_len"] = 6
    calls = [call("1", (1, 2), choice((3, 4))), call("2", (5,), choice((6,)), parent_call="1", context="exact")]
    member = Transcript(trajectory=run_of("t"), calls=tuple(calls), messages=(), tools=())
    (scored,) = judge_by(teacher).judge(None, [member]).teacher_scores
    assert teacher.scored[-1] == [1, 2, 3, 4]
    by_answer = {(one.call_id, one.choice): unpack_logprobs(one.logprobs) for one in scored.answers}
    built = build_rows("t", calls, 0.0, teacher=by_answer)
    assert [row.tokens_trained for row in built.rows] == [2]
    assert built.untrained == {"no_teacher_logprobs": 1}


def test_a_trajectory_without_trainable_tokens_is_a_failure_that_says_why(teacher: ScriptedTeacher) -> None:
    greedy = call("1", (1, 2), choice((3, 4)), sampling={"temperature": 0})
    member = Transcript(trajectory=run_of("t"), calls=(greedy,), messages=(), tools=())
    judgement = judge_by(teacher).judge(None, [member])
    assert (judgement.unavailable, judgement.teacher_scores, len(teacher.requests)) == (None, (), 1)
    assert "no token to score; untrained: 2 tokens greedy (" in (judgement.verdicts[0].failure or "")


def test_rows_hold_the_difference_of_the_two_logprobs() -> None:
    calls = [call("1", (1, 2), choice((3, 4)))]
    sampled = unpack_logprobs(calls[0].choices[0].logprobs)
    (row,) = build_rows("t", calls, 0.0, teacher={("1", 0): (-1.0, -2.0)}).rows
    assert row.advantages == (0.0, 0.0, -1.0 - sampled[0], -2.0 - sampled[1])


def test_sequences_share_a_request_up_to_its_size() -> None:
    assert batched([[0] * size for size in (3, 3, 5, 9, 1)], 8) == [[0, 1], [2], [3], [4]]


def test_a_teacher_that_is_away_delays_trajectories_however_long_and_drops_none(
    store: Store, teacher: ScriptedTeacher
) -> None:
    answered_trajectory(store, "t")
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("k", "agent", ["t"], now=101.0)
    runner = JudgeRunner(store, judge_by(teacher), attempts=2, retry_seconds=5.0, alarm_after=2)
    teacher.status = 503
    for attempt in range(20):
        now = 1000.0 * attempt
        runner.submit([store.groups.get(group.id)], store.trajectories.read)
        assert runner.collect_results(now, timeout=60.0) == 1
        assert store.groups.awaiting_verdict("agent", now + 61.0) == [store.groups.get(group.id)]
    (alarm,) = store.alarms.active()
    assert alarm.name == "judge_failed:agent"
    assert "answered 503" in alarm.reason
    assert store.groups.verdict_history(group.id) == []
    teacher.status = 200
    runner.submit([store.groups.get(group.id)], store.trajectories.read)
    assert runner.collect_results(1e6, timeout=60.0) == 1
    assert store.groups.get(group.id).state is GroupState.JUDGED
    assert store.alarms.active() == []
    assert isinstance(store.groups.teacher_scores(["t"])["t"], TeacherScore)
    runner.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 1}, "trainer.judge: the teacher big has another tokenizer than base"),
        ({"hosted": True}, "returned no prompt_logprobs .* hosted APIs cannot; serve the teacher with vLLM"),
        ({"card": {"id": "other"}}, "serves other, not 'big'"),
        ({"status": 401}, r"does not list its models \(401\).*check its key"),
    ],
    ids=["another tokenizer", "a hosted model", "an unknown name", "a wrong key"],
)
def test_a_model_that_cannot_be_the_teacher_is_refused_with_the_remedy(
    change: dict[str, Any], reason: str, teacher: ScriptedTeacher, engine: ScriptedEngine
) -> None:
    for name, value in change.items():
        setattr(teacher, name, value)
    spec = TeacherSpec(kind="teacher", base_url=teacher.url, model=NAME)
    judge = TeacherJudge(spec, {}, policy=lambda: VllmServer(engine.url))
    with pytest.raises(JudgeError, match=reason):
        judge.check()
    assert judge.judge(None, []).unavailable is None
    member = Transcript(trajectory=run_of("t"), calls=(call("1", (1, 2), choice((3, 4))),), messages=(), tools=())
    assert re.search(reason, judge.judge(None, [member]).unavailable or "")


def test_an_adapter_can_be_the_teacher_and_has_the_context_of_its_base_model(teacher: ScriptedTeacher) -> None:
    teacher.card = {"id": NAME, "parent": "base", "max_model_len": None}
    teacher.other_cards = [{"id": "base", "parent": None, "max_model_len": 64}]
    assert judge_by(teacher).check() == 63  # one token is sampled


def test_a_teacher_without_address_or_key_is_refused() -> None:
    with pytest.raises(JudgeError, match="big has no URL: give base_url"):
        TeacherJudge(TeacherSpec(kind="teacher", model=NAME), {})
    with pytest.raises(JudgeError, match="TEACHER_KEY, which is not set"):
        TeacherJudge(TeacherSpec(**TEACHER, api_key_env="TEACHER_KEY"), {})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"judge": "a:b"}, "set trainer.judge to {kind: teacher, model: NAME}, a name of model_list"),
        ({"learner": LearnerSettings()}, "set learner.loss_type to distillation"),
        ({"ungrouped": "baseline"}, "ungrouped has no effect with loss_type distillation"),
        ({"resample": {"samples": 2}}, "resample.samples has no effect"),
        ({"release": {"held_out_share": 0.1}}, "set release.workflow and release.tasks"),
    ],
    ids=["no teacher", "another objective", "a baseline", "resampling", "held-out prompts"],
)
def test_settings_that_do_not_fit_distillation_are_refused(changes: dict[str, Any], reason: str) -> None:
    valid: dict[str, Any] = {
        "store": "s.db", "model": "agent", "base_model": "b", "vllm": ("http://127.0.0.1:1",), "checkpoints": "c",
        "judge": TEACHER, "learner": DISTILLATION,
    }  # fmt: skip
    TrainerSettings(**valid)
    with pytest.raises(ValidationError, match=reason):
        TrainerSettings(**(valid | changes))


@pytest.mark.slow
def test_single_trajectories_are_trained_towards_the_teacher_without_a_group_and_scored_once(
    store: Store, make_controller: Callable[..., SteppedController], teacher: ScriptedTeacher
) -> None:
    """The teacher likes one token only; a restart between scoring and training does not ask it again."""
    teacher.logprob = lambda ids: -0.1 if ids[-1] == 10 else -12.0
    values: dict[str, Any] = {"judge": TEACHER | {"base_url": teacher.url}, "learner": DISTILLATION}
    for task in ("a", "b"):  # two trajectories of different tasks count as a group of two
        agents_work(store, task, [None])
    waiting = make_controller(**values, groups_per_round=8)
    waiting.step(1000.0)
    assert [run.state for run in store.trajectories.page()] == [TrajectoryState.GROUPED] * 2
    assert store.rounds.page("agent") == []
    requests = len(teacher.requests)
    assert requests == 3  # the check of the start, and each trajectory
    waiting.close()
    controller = make_controller(**values, groups_per_round=1)
    controller.step(1001.0)
    (done,) = store.rounds.page("agent")
    assert (done.state, done.metrics["trajectories"]) == ("committed", 2)
    assert {run.state for run in store.trajectories.page()} == {TrajectoryState.TRAINED}
    assert len(teacher.requests) == requests + 1  # the check of the start
    ids = (5, 6, 7, 10)
    assert controller.learner.score([ids])[0][-1] > controller.learner.score([ids], adapter=False)[0][-1] + 0.01


def test_the_expected_gradient_is_that_of_the_reverse_kl(tiny_model: Path, tmp_path: Path) -> None:
    """Over all tokens of the vocabulary, sampled uniformly and weighted by importance, against autograd."""
    import torch

    from tests.harness.trainer.tiny import VOCABULARY, build_row
    from tests.trainer.test_loss_contract import Computed, backward, build_trainer, double, gradients

    chosen = LearnerSettings(
        loss_type="distillation", max_grad_norm=0, vllm_importance_sampling_clip_max=1e6, sequence_mask_threshold=None
    )
    trainer = build_trainer(chosen, tiny_model, tmp_path, budget=100_000)
    context = (5, 6, 7, 8)
    generator = torch.Generator().manual_seed(3)
    taught = torch.log_softmax(2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64), -1)
    uniform = -math.log(VOCABULARY)
    rows = [
        replace(
            build_row(token), ids=(*context, token), mask=(0, 0, 0, 0, 1), logprobs=(0.0, 0.0, 0.0, 0.0, uniform),
            advantage=0.0, advantages=(0.0, 0.0, 0.0, 0.0, float(taught[token]) - uniform),
        )
        for token in range(VOCABULARY)
    ]  # fmt: skip
    ours, _ = backward(trainer, trainer.prepare(rows, only_step=True))
    model = double(trainer.model)
    logprobs = torch.log_softmax(model(input_ids=torch.tensor([context])).logits[0, -1], -1)
    kl = (logprobs.exp() * (logprobs - taught)).sum()
    kl.backward()
    assert ours.relative_error(Computed(ours.loss, gradients(model))) < 2e-5


def run_of(name: str) -> Any:
    from tests.trainer.test_grouping import run

    return run(name)
