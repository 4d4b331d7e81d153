"""What people say becomes a score, is waited for, changes verdicts when it comes late, and trains nothing twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from ratchet.store.reasons import DropReason
from ratchet.store.records import Feedback, Transcript
from ratchet.store.states import GroupState, TrajectoryState
from ratchet.store.store import Store
from ratchet.trainer.collect.collector import FeedbackWait, feedback_wait_of
from ratchet.trainer.judges.judge_runner import JudgeRunner
from ratchet.trainer.judges.judgement import DraftVerdict, GroupJudgement, NamedJudge
from ratchet.trainer.judges.kinds.given_scores import FeedbackJudge, votes_of
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import FeedbackSpec, read_spec
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually
from tests.harness.records import answered_trajectory
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.whole_circle import all_shipped, proxy_before, trainer_of

DAY = 86_400.0
WAITING: Any = {"kind": "feedback", "within_seconds": 100.0}


@pytest.fixture
def waiting_controller(make_controller: Callable[..., SteppedController]) -> Callable[..., SteppedController]:
    """A controller whose judge waits for what people say."""
    return lambda **changes: make_controller(**({"judge": WAITING, "groups_per_round": 1} | changes))


_numbers = iter(range(10**6))


def say(store: Store, run: str, value: float | None, source: str = "user:ann", **changes: Any) -> None:
    number = next(_numbers)
    values: dict[str, Any] = {"kind": "trajectory", "target": run, "given_at": 2.0 + number, "trusted": True} | changes
    store.feedback.add([Feedback(id=f"fb_{number:06d}", source=source, value=value, **values)])


def score(store: Store, run: str, **spec: Any) -> Any:
    return FeedbackJudge(FeedbackSpec(kind="feedback", **spec)).judge(None, [read(store, run)]).verdicts[0]


def read(store: Store, run: str) -> Transcript:
    return store.trajectories.read(run)


def latest(store: Store, *runs: str) -> list[float | None]:
    found = store.groups.verdicts(runs)
    return [found[run].score if run in found else None for run in runs]


def finish_judging(controller: SteppedController, now: float, turns: int = 6) -> None:
    for _ in range(turns):
        controller.step(now)


# --- the score ------------------------------------------------------------------------------------------------


def test_the_newest_word_of_a_source_counts_and_sources_are_averaged(store: Store) -> None:
    answered_trajectory(store, "t")
    say(store, "t", 0.0, comment="too long")
    say(store, "t", 1.0)  # ann thinks better of it
    say(store, "t", 0.0, source="user:bob")
    say(store, "t", None, source="user:cid", comment="no thumb")
    verdict = score(store, "t")
    assert (verdict.score, verdict.components) == (0.5, {"sources": 2.0, "apart": 1.0})
    assert verdict.explanation == "too long | no thumb"


def test_a_word_on_the_whole_counts_in_place_of_words_on_its_answers() -> None:
    def word(call: str | None, value: float) -> Feedback:
        return Feedback(id="f", kind="call", target="x", source="ann", given_at=1.0, value=value, call_id=call)

    assert votes_of([word("a", 1.0), word("b", 0.0), word("b", 0.5)]) == {"ann": 0.75}
    assert votes_of([word(None, 0.25), word("a", 1.0)]) == {"ann": 0.25}
    assert votes_of([]) == {}


def test_values_are_read_on_their_own_scale(store: Store) -> None:
    answered_trajectory(store, "t")
    for stars, wanted in ((4.0, 0.75), (9.0, 1.0), (-3.0, 0.0)):
        say(store, "t", stars)
        assert score(store, "t", worst=1, best=5).score == wanted
    assert score(store, "t", worst=5, best=1).score == 1.0  # the fewer, the better


def test_silence_is_a_failure_or_the_score_that_was_set(store: Store) -> None:
    answered_trajectory(store, "t")
    assert score(store, "t").failure == "this trajectory has no feedback yet"
    assert score(store, "t", missing=0.5).score == 0.5
    say(store, "t", None, demonstration="Oslo, of course.")
    assert score(store, "t").score is None  # the right answer is no score of the given one


def test_the_feedback_judge_has_a_name_and_can_be_part_of_a_composite(store: Store) -> None:
    answered_trajectory(store, "t")
    say(store, "t", 1.0)
    parts = [
        {"name": "liked", "weight": 1.0, "judge": {"kind": "feedback", "within_seconds": 5}},
        {"name": "brief", "penalty": 0.5, "judge": "tests.harness.trainer.judge_samples:half"},
    ]
    spec = read_spec({"kind": "composite", "parts": parts})
    verdict = make_judge(spec, {}).judge(None, [read(store, "t")]).verdicts[0]
    assert (verdict.score, verdict.components) == (0.75, {"liked": 1.0, "brief": 0.5})
    assert feedback_wait_of(spec) == FeedbackWait(5.0, drops=True)
    assert feedback_wait_of(read_spec({"kind": "feedback", "missing": 0.5})) == FeedbackWait(DAY, drops=False)
    assert feedback_wait_of(read_spec("a:b")) is None


@pytest.mark.parametrize(
    "wrong", [{"worst": 1, "best": 1}, {"missing": 2}, {"missing": "wait"}, {"within_seconds": 0}, {"within": 5}]
)
def test_a_scale_or_a_default_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read_spec({"kind": "feedback"} | wrong)


def test_a_judge_function_receives_the_feedback(store: Store) -> None:
    answered_trajectory(store, "t", "liked")
    say(store, "t", 1.0, comment="good")
    verdict = make_judge(read_spec("tests.harness.trainer.judge_samples:comments"), {}).judge(None, [read(store, "t")])
    assert verdict.verdicts[0].explanation == "good"


# --- waiting --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trajectory_waits_for_its_feedback_and_fails_nothing_meanwhile(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    good, bad = agents_work(store, "a", [0.0, 0.0])
    controller = waiting_controller()
    controller.step(70.0)
    say(store, good, 1.0)
    controller.step(80.0)
    assert {store.trajectories.get(name).state for name in (good, bad)} == {TrajectoryState.SEALED}
    say(store, bad, 0.0)
    finish_judging(controller, 90.0)
    assert latest(store, good, bad) == [1.0, 0.0]
    assert {store.trajectories.get(name).state for name in (good, bad)} == {TrajectoryState.TRAINED}
    assert store.feedback.applied_too_late("agent") == []
    assert store.alarms.active() == []


@pytest.mark.slow
def test_a_trajectory_without_feedback_in_time_is_dropped_with_that_reason(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    spoken, other, silent = agents_work(store, "a", [0.0, 0.0, 0.0])
    controller = waiting_controller()
    controller.step(100.0)
    assert store.trajectories.drop_counts() == {}
    say(store, spoken, 1.0)
    say(store, other, 0.0)
    finish_judging(controller, 102.0)
    assert store.trajectories.get(silent).drop_reason == DropReason.NO_FEEDBACK
    assert store.trajectories.drop_counts() == {DropReason.NO_FEEDBACK: 1}
    assert {store.trajectories.get(name).state for name in (spoken, other)} == {TrajectoryState.TRAINED}


def test_with_a_default_silence_is_judged_once_its_time_is_up(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    spoken, silent = agents_work(store, "a", [0.0, 0.0])
    say(store, spoken, 1.0)
    controller = waiting_controller(judge=WAITING | {"missing": 0.5})
    controller.step(100.0)
    assert store.groups.page() == []
    finish_judging(controller, 102.0)
    assert latest(store, spoken, silent) == [1.0, 0.5]
    assert store.trajectories.get(silent).state is TrajectoryState.TRAINED


@pytest.mark.slow
def test_peers_are_awaited_from_the_feedback_on(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    early, late = agents_work(store, "a", [0.0, 0.0])
    controller = waiting_controller(judge=WAITING | {"within_seconds": DAY}, group_wait_seconds=300.0)
    say(store, early, 1.0, given_at=5000.0)
    controller.step(5001.0)
    assert store.trajectories.get(early).state is TrajectoryState.SEALED
    say(store, late, 0.0, given_at=5200.0)
    finish_judging(controller, 5201.0)
    assert store.trajectories.get(early).group_id == store.trajectories.get(late).group_id is not None


# --- late and revised -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_late_feedback_adds_a_verdict_names_what_was_trained_and_trains_nothing_twice(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    first, second = agents_work(store, "a", [0.0, 0.0])
    say(store, first, 1.0)
    say(store, second, 0.0)
    controller = waiting_controller()
    finish_judging(controller, 70.0)
    more = agents_work(store, "b", [0.0, 0.0])
    for name, value in zip(more, (0.0, 1.0), strict=True):
        say(store, name, value)
    finish_judging(controller, 140.0)
    assert store.lineage.versions_of([first])[first] == ("agent@1", "agent@2")
    group = store.trajectories.get(first).group_id or ""
    assert len(store.groups.verdict_history(group)) == 2

    say(store, first, 0.0)  # the same user thinks worse of it
    finish_judging(controller, 150.0)
    verdict = store.groups.verdicts([first])[first]
    assert verdict.score == 0.0
    assert verdict.explanation.startswith("[after it trained agent@1, agent@2]")
    assert [one.score for one in store.groups.verdict_history(group)] == [1.0, 0.0, 0.0]  # added, and only what changed
    assert store.groups.get(group).state is GroupState.TRAINED
    assert len(store.rounds.page("agent")) == 2
    assert store.feedback.applied_too_late("agent") == []
    assert [one.score for one in store.groups.past_scores("agent", verdict.judge_version)].count(1.0) == 1


@pytest.mark.slow
def test_revised_feedback_before_the_round_is_what_trains(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    first, second = agents_work(store, "a", [0.0, 0.0])
    say(store, first, 1.0)
    say(store, second, 0.0)
    controller = waiting_controller(groups_per_round=2)
    finish_judging(controller, 70.0)
    assert latest(store, first, second) == [1.0, 0.0]
    say(store, first, 0.25)
    finish_judging(controller, 71.0)
    finish_judging(controller, 71.0 + 601.0)
    (held,) = store.rounds.page("agent")
    assert held.metrics["reward"] == 0.125


def test_feedback_on_what_was_put_aside_is_a_verdict_all_the_same(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    (name,) = agents_work(store, "a", [0.0])
    controller = waiting_controller()
    finish_judging(controller, 200.0)
    assert store.trajectories.get(name).drop_reason == DropReason.NO_FEEDBACK
    say(store, name, 1.0)
    finish_judging(controller, 201.0)
    assert latest(store, name) == [1.0]
    assert store.trajectories.get(name).state is TrajectoryState.DROPPED


@pytest.mark.slow
def test_a_part_that_fails_does_not_hold_late_feedback_for_ever(
    store: Store, waiting_controller: Callable[..., SteppedController]
) -> None:
    parts = [
        {"name": "liked", "weight": 1.0, "judge": WAITING},
        {"name": "rule", "weight": 1.0, "judge": "tests.harness.trainer.judge_samples:scripted"},
    ]
    first, second = agents_work(store, "a", [0.0, 1.0])
    say(store, first, 0.0)
    say(store, second, 1.0)
    judge: Any = {"kind": "composite", "parts": parts}
    controller = waiting_controller(judge=judge, judge_attempts=2, judge_retry_seconds=1.0)
    finish_judging(controller, 70.0)
    assert latest(store, first, second) == [0.0, 1.0]
    judge_samples.by_answer[first] = ValueError("out of order")
    say(store, first, 1.0)
    finish_judging(controller, 71.0)
    assert store.feedback.applied_too_late("agent") == [first]  # tried once, to be tried again
    finish_judging(controller, 73.0)
    assert store.feedback.applied_too_late("agent") == []
    assert latest(store, first, second) == [0.0, 1.0]  # a failure is no number


def test_late_feedback_waits_for_a_judge_that_is_away_however_long(store: Store) -> None:
    names = agents_work(store, "a", [0.0])
    store.trajectories.seal(names[0], 1.0)
    store.trajectories.drop(names, "ungrouped")
    say(store, names[0], 1.0)
    away = [True]

    class Absent(NamedJudge):
        name, version = "absent", "1"

        def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
            opinion = DraftVerdict.failed("away") if away[0] else DraftVerdict.of(0.25)
            verdicts = tuple(self.record(opinion, group_id, one) for one in members)
            return GroupJudgement(verdicts, unavailable="away" if away[0] else None)

    runner = JudgeRunner(store, Absent(), attempts=1, retry_seconds=60.0)
    for now, changed in ((1000.0, 0), (1061.0, 0), (1122.0, 1)):
        away[0] = not changed
        runner.judge_again("agent", now)
        assert runner.collect_results(now, 60.0) == changed
    runner.close()
    assert store.groups.verdicts(names)[names[0]].score == 0.25


@pytest.mark.slow
def test_thumbs_alone_make_a_version_and_a_late_one_names_it(tiny_model: Path, tmp_path: Path) -> None:
    with proxy_before(ScriptedVllm(), tmp_path) as proxy:
        with openai.OpenAI(base_url=proxy + "/v1", api_key="k", max_retries=0) as agent:
            question: Any = [{"role": "user", "content": "what is on friday?"}]
            liked = agent.chat.completions.create(model="agent", messages=question).id
            stream = agent.chat.completions.create(model="agent", messages=question, stream=True)
            disliked = [chunk.id for chunk in stream].pop()
        all_shipped(proxy)  # a call may take longer to reach the store than feedback waits for it
        give_thumbs(proxy, response_id=liked, value="up", end_user="ann")
        feedback = give_thumbs(proxy, response_id=disliked, value="down", comment="no", end_user="bob")
        by_thumbs: dict[str, Any] = {
            "judge": {"kind": "feedback"},
            "seal_after_idle_seconds": 0.2,
            "num_generations": 2,
        }
        with trainer_of(tmp_path, tiny_model, **by_thumbs) as (controller, store, engine):
            eventually(lambda: controller.step(time.time()) and store.rounds.newest_committed("agent"))
            assert {run.state for run in store.trajectories.page()} == {TrajectoryState.TRAINED}
            eventually(lambda: controller.step(time.time()) or "agent@1" in engine.loaded)

            give_thumbs(proxy, response_id=disliked, value="up", comment="I was wrong", end_user="bob")
            run = feedback["trajectory_id"]
            eventually(lambda: controller.step(time.time()) or store.groups.verdicts([run])[run].score == 1.0)
            assert store.groups.verdicts([run])[run].explanation == "[after it trained agent@1] no | I was wrong"
            (newest, *_) = httpx.get(f"{proxy}/api/feedback", params={"trajectory": run}, timeout=60).json()["data"]
            assert (newest["comment"], newest["trained"]) == ("I was wrong", ["agent@1"])
            assert len(store.rounds.page("agent")) == 1


def give_thumbs(proxy: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{proxy}/api/feedback", json=body, timeout=60)
    assert answer.status_code == 201, answer.text
    feedback: dict[str, Any] = answer.json()
    return feedback
