"""Tuning of weights: rounds, evaluations, the end, the best version, and going on after a kill."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.api.reports import markdown, show_weights
from ratchet.store.operation_records import Tuning
from ratchet.store.reasons import DropReason
from ratchet.store.states import PolicyState, RolloutState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import FunctionSpec
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.statistics import ComparisonVerdict
from ratchet.tuner.reports import plain as plain_result
from ratchet.tuner.reports import read, report
from ratchet.tuner.rollouts.runner import RolloutRunner
from ratchet.tuner.rollouts.scoring import RolloutScorer, RolloutTools
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings
from ratchet.tuner.tasks import parse_families
from ratchet.tuner.weights.weight_tuning import LIVE, WeightsPlan, WeightsTuning, config_of
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.tuner import scripted_versions
from tests.tuner.conftest import ALIAS

AGENT = "tests.harness.tuner.scripted_versions:agent"
TASKS, ATTEMPTS = 3, 2


def task_set(folder: Path, name: str) -> Path:
    """Twenty questions to train on, and as many others to validate and to test on."""
    (folder / name).mkdir()
    for split, start in (("train", 100), ("validation", 200), ("test", 0)):
        rows = [{"question": f"{name} number {start + number}? #say=so"} for number in range(20)]
        (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


class ScriptedTrainer:
    """Makes a version after each of the rounds named; `turn` is called all the while, as the services are watched."""

    def __init__(self, store: Store, folder: Path, after: Sequence[int]) -> None:
        self._store = store
        self._folder = folder
        self._after = list(after)
        self.kill_at: int | None = None  # rollouts that have ended
        self.drops_as = "scripted"

    def turn(self) -> None:
        store = self._store
        store.trajectories.seal_idle_trajectories(ALIAS, 1e12, 1.0)
        waiting = [run.id for run in store.trajectories.sealed(ALIAS)]
        store.trajectories.drop(waiting, self.drops_as)
        tunings = store.tunings.page("weights")
        live = [one for tuning in tunings for one in store.rollouts.of_tuning(tuning.id, LIVE)]
        ended = [one for one in live if one.state is not RolloutState.PLANNED]
        if self.kill_at is not None and len(ended) >= self.kill_at:
            raise KeyboardInterrupt
        done = len(ended) // (TASKS * ATTEMPTS)
        if self._after and done > self._after[0]:
            self._after.pop(0)
            self.make_version()

    def make_version(self, tuning_id: str | None = None, *, held_for: str | None = None) -> int:
        known = [held.to_version or 0 for held in self._store.rounds.page(ALIAS)]
        number = max(known, default=0) + 1
        held = self._store.rounds.start(ALIAS, number - 1)
        metrics: dict[str, Any] = {"tuning": tuning_id, "by_source": {"policy": 4}, "loss_by_epoch": [1.0]}
        metrics = {"warm_start": metrics} if tuning_id else {}
        self._store.rounds.commit(
            held.id, version=number, checkpoint=str(self._folder / str(number)), groups=[], metrics=metrics
        )
        if held_for is None:
            self._store.policies.promote(ALIAS, number, {})
        else:
            self._store.policies.require_approval(ALIAS, number, {}, by="sentinel", reason=held_for)
        return number


class Stand:
    """Everything that a run needs, and a way to begin and to go on."""

    def __init__(self, store: Store, proxy: Proxy, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self._proxy = proxy
        self.mail = task_set(folder, "mail")
        self.trainer = ScriptedTrainer(store, folder, [])

    def begin(self, **changes: Any) -> Tuning:
        values: dict[str, Any] = {
            "families": (str(self.mail),), "workflow": AGENT, "rounds": 4, "tasks_per_round": TASKS,
            "attempts": ATTEMPTS, "eval_every": 2, "max_trainer_wait_seconds": 20.0,
        }  # fmt: skip
        return self.store.tunings.begin("weights", ALIAS, config_of(WeightsPlan(**(values | changes))))

    def run(self, tuning: Tuning) -> Any:
        """The result of a run that goes on to its end."""
        tuning = self.store.tunings.get(tuning.id)
        judge = make_judge(FunctionSpec(kind="function", function="tests.harness.tuner.scripted_versions:judge"), {})
        runner = RolloutRunner(
            self.store, self._proxy.url, None, load_workflow(AGENT), TunerSettings(concurrency=8),
            alias=ALIAS,
        )  # fmt: skip
        scorer = RolloutScorer(self.store, judge)
        settings = TrainerSettings(
            store="unused", model=ALIAS, base_model="unused", vllm=("http://127.0.0.1:1",), checkpoints=self.folder,
            judge="tests.harness.tuner.scripted_versions:judge",
        )  # fmt: skip
        families = parse_families(tuning.config["families"])
        tools = RolloutTools(store=self.store, runner=runner, scorer=scorer)
        made = WeightsTuning(tools, tuning, families, settings, watch=self.trainer.turn)
        return asyncio.run(made.run())


@pytest.fixture
def stand(store: Store, proxy: Proxy, tmp_path: Path) -> Stand:
    scripted_versions.able.clear()
    scripted_versions.fails.clear()
    scripted_versions.tested.clear()
    return Stand(store, proxy, tmp_path)


@pytest.mark.slow
def test_the_curve_shows_each_evaluation_against_the_baseline_and_the_gain_once(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 5, 2: 9}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0, 2])
    tuning = stand.begin()
    result = stand.run(tuning)
    assert [(one["round"], one["version"], one["mean"]) for one in result.details["curve"]] == [
        (0, 0, 0.2), (2, 1, 0.5), (4, 2, 0.9),
    ]  # fmt: skip
    assert (result.baseline, result.best, result.promoted) == ("agent@0", "agent@2", "agent@2")
    assert result.gain.difference == pytest.approx(0.7)
    assert result.gain.low > 0
    assert (result.gain.tasks, result.task_set.tasks) == (20, 20)
    assert [(one["split"], one["version"], one["mean"]) for one in result.details["test"]] == [
        ("test", 0, 0.2), ("test", 2, 0.9),
    ]  # fmt: skip
    assert {one["split"] for one in result.details["curve"]} == {"validation"}
    assert result.spent.rollouts == (3 + 2) * 20 + 4 * TASKS * ATTEMPTS
    made = stand.store.rollouts.of_tuning(tuning.id)
    assert all(one.prompt_tokens for one in made), "what is trained costs, too"
    assert result.spent.prompt_tokens == sum(one.prompt_tokens for one in made)
    assert read(plain_result(result)) == result
    purposes = {one.purpose for one in stand.store.rollouts.of_tuning(tuning.id) if one.split != "train"}
    assert purposes == {"eval"}, "what is tested is never trained"


@pytest.mark.slow
def test_what_was_not_trained_is_reported_with_the_reason_and_the_remedy(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 2}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0])
    stand.trainer.drops_as = DropReason.NO_VARIANCE
    tuning = stand.begin()
    failed = stand.store.rounds.start(ALIAS, 0)
    stand.store.rounds.abandon(failed.id, "no token; untrained: 9 tokens greedy (sample at a positive temperature)")
    result = stand.run(tuning)
    assert result.details["trained"]["rollouts"] == {"no_variance": 4 * TASKS * ATTEMPTS}
    wanted = (
        "rounds of the trainer: 1 committed, 1 abandoned; 0 of 24 training rollouts were trained, the others not: "
        "24 no_variance (all members got the same score: use harder or easier tasks, or a judge that separates them)"
    )
    assert any(note.startswith("the last abandoned round: no token; untrained: 9 tokens") for note in result.notes)
    stand.store.tunings.end(tuning.id, "done", result=plain_result(result))
    show_weights(result, shown := io.StringIO())
    assert wanted in " ".join(shown.getvalue().split())
    assert wanted in markdown(report(stand.store.tunings.page()))


@pytest.mark.slow
def test_the_test_tasks_decide_nothing(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 5, 2: 4}
    scripted_versions.tested |= {1: 1, 2: 9}  # on the test tasks the second is far better, and nobody looks
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0, 1])
    tuning = stand.begin(rounds=50, eval_every=1, patience=2)
    result = stand.run(tuning)
    assert f"2 evaluations without a gain over {ALIAS}@1" in result.notes[0]
    tested = [one for one in stand.store.rollouts.of_tuning(tuning.id) if one.split == "test"]
    assert {one.candidate for one in tested} == {"agent@0", "agent@2"}
    assert [one["mean"] for one in result.details["test"]] == [0.2, 0.9]


@pytest.mark.slow
def test_without_a_validation_split_some_training_tasks_validate_and_are_not_trained(stand: Stand) -> None:
    scripted_versions.able |= {0: 2}
    (stand.mail / "validation.jsonl").unlink()
    copied = (stand.mail / "train.jsonl").read_text().splitlines()[0]  # stands in both splits: it is tested alone
    with (stand.mail / "test.jsonl").open("a") as file:
        file.write(copied + "\n")
    tuning = stand.begin(rounds=12, eval_every=12)
    stand.run(tuning)
    made = stand.store.rollouts.of_tuning(tuning.id)
    trained = {one.task_id for one in made if one.candidate == LIVE}
    tested = {one.task_id for one in made if one.split == "test"}
    validated = {one.task_id for one in made if one.candidate != LIVE} - tested
    assert (len(trained), len(validated), len(tested)) == (15, 4, 21)
    assert not trained & validated
    assert not (trained | validated) & tested


@pytest.mark.slow
def test_it_stops_where_nothing_is_gained_any_more(stand: Stand) -> None:
    scripted_versions.able |= {0: 4, 1: 6}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0])
    result = stand.run(stand.begin(rounds=50, eval_every=1, patience=2))
    assert result.details["rounds"] == 3
    assert [one["version"] for one in result.details["curve"]] == [0, 1, 1, 1]
    assert re.search("2 evaluations .* agent@1", result.notes[0])


@pytest.mark.slow
def test_a_version_that_is_shown_to_be_worse_than_the_best_is_taken_back(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9, 2: 3}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0, 2])
    result = stand.run(stand.begin())
    assert stand.store.policies.live()[ALIAS].version == 1
    assert stand.store.policies.get(ALIAS, 2).state is PolicyState.REJECTED
    (decision, *_) = stand.store.decisions.decisions_of(ALIAS, 2)
    assert (decision.decided_by, "worse than agent@1" in decision.reason) == ("tuner", True)
    assert (result.best, result.promoted) == ("agent@1", "agent@1")
    assert "rolled back from agent@2 to agent@1" in result.notes[0]


@pytest.mark.slow
def test_a_last_version_that_is_only_a_bit_lower_stays(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9, 2: 8}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0, 2])
    result = stand.run(stand.begin(validation_tasks=10))
    assert stand.store.policies.live()[ALIAS].version == 2
    assert not any("rolled back" in note for note in result.notes)


@pytest.mark.slow
def test_what_was_killed_goes_on_where_it_was_and_repeats_nothing(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [2])
    stand.trainer.kill_at = 2 * TASKS * ATTEMPTS + 1
    tuning = stand.begin()
    with pytest.raises(KeyboardInterrupt):
        stand.run(tuning)
    before = {one.id for one in stand.store.rollouts.of_tuning(tuning.id) if one.counts}
    stand.trainer.kill_at = None
    result = stand.run(stand.store.tunings.resume(tuning.id))
    after = stand.store.rollouts.of_tuning(tuning.id)
    live = [one for one in after if one.candidate == LIVE and one.counts]  # without those that the kill cut off
    assert len(live) == 4 * TASKS * ATTEMPTS
    assert len({(one.task_id, one.attempt, one.step) for one in live}) == len(live), "no job was done twice"
    assert before <= {one.id for one in after}
    assert [one["version"] for one in result.details["curve"]] == [0, 0, 1]
    assert result.gain.verdict is ComparisonVerdict.BETTER


@pytest.mark.slow
def test_an_evaluation_that_a_kill_prevented_is_run_on_resume(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0])
    tuning = stand.begin(rounds=2)
    stand.run(tuning)
    progress = dict(stand.store.tunings.get(tuning.id).result or {})
    stand.store.tunings.update(tuning.id, progress | {"evaluations": progress["evaluations"][:2]})
    result = stand.run(tuning)
    assert [(one["round"], one["version"]) for one in result.details["curve"]] == [(0, 0), (2, 1)]


@pytest.mark.slow
def test_several_families_are_measured_each_by_itself(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0])
    sums = task_set(stand.folder, "sums")
    result = stand.run(stand.begin(rounds=2, families=(f"post={stand.mail}:3", f"sums={sums}")))
    assert result.task_set.tasks == 40
    assert set(result.details["families"]) == {"post", "sums"}
    assert result.details["families"]["sums"]["tasks"] == 20
    assert result.details["curve"][-1]["families"] == {"post": 0.9, "sums": 0.9}
    drawn = {one.task_id.partition("/")[0] for one in stand.store.rollouts.of_tuning(result_id(stand), LIVE)}
    assert drawn <= {"post", "sums"}


def result_id(stand: Stand) -> str:
    return stand.store.tunings.page("weights")[0].id


@pytest.mark.slow
def test_judge_failures_are_reported_and_name_no_winner(stand: Stand) -> None:
    scripted_versions.able |= {0: 2, 1: 9}
    scripted_versions.fails |= {1}
    stand.trainer = ScriptedTrainer(stand.store, stand.folder, [0])
    result = stand.run(stand.begin(rounds=2))
    assert result.gain.unjudged == 20
    assert result.best is None
    assert any(note.startswith("the judge failed, most often with") for note in result.notes)
    assert stand.store.policies.live()[ALIAS].version == 1, "nor is it taken back for it"


@pytest.mark.slow
def test_training_tasks_are_collected_and_imitated_before_the_first_round(stand: Stand) -> None:
    scripted_versions.able |= {0: 3, 1: 8}
    tuning = stand.begin(rounds=0, collect=2, warm_start={"sources": ["policy"]})
    stages: list[str] = []
    turn = stand.trainer.turn

    def and_imitate() -> None:
        turn()
        progress = stand.store.tunings.get(tuning.id).result or {}
        if progress.get("stage") == "warm_start" and not stages:
            stages.append(progress["stage"])
            stand.trainer.make_version(tuning.id)

    stand.trainer.turn = and_imitate  # type: ignore[method-assign]
    result = stand.run(tuning)
    collected = stand.store.rollouts.of_tuning(tuning.id, "collected")
    assert len(collected) == 2 * TASKS * ATTEMPTS
    assert {(one.split, one.purpose) for one in collected} == {("train", "eval")}
    assert all(one.score is not None for one in collected)
    assert [(one["version"], one["mean"]) for one in result.details["curve"]] == [(0, 0.3), (1, 0.8)]
    assert (result.technique, result.details["warm_start"]["version"]) == ("SFT", 1)


@pytest.mark.slow
def test_a_warm_start_whose_version_awaits_approval_is_measured_and_reported(stand: Stand) -> None:
    scripted_versions.able |= {0: 3, 1: 8}
    tuning = stand.begin(rounds=0, warm_start={"sources": ["policy"]})
    turn = stand.trainer.turn

    def and_imitate() -> None:
        turn()
        progress = stand.store.tunings.get(tuning.id).result or {}
        if progress.get("stage") == "warm_start" and not stand.store.rounds.page(ALIAS):
            stand.trainer.make_version(tuning.id, held_for="the judges disagree")

    stand.trainer.turn = and_imitate  # type: ignore[method-assign]
    result = stand.run(tuning)
    assert [(one["version"], one["mean"]) for one in result.details["curve"]] == [(0, 0.3), (1, 0.8)]
    assert any("needs approval" in note for note in result.notes)
    assert result.promoted is None
    assert stand.store.policies.live()[ALIAS].version == 0


@pytest.mark.slow
def test_a_kill_while_tasks_are_collected_tells_the_baseline_once(stand: Stand) -> None:
    tuning = stand.begin(rounds=0, collect=2, warm_start={"sources": ["policy"]})
    turn = stand.trainer.turn

    def and_kill() -> None:
        if any(one.state is RolloutState.ENDED for one in stand.store.rollouts.of_tuning(tuning.id, "collected")):
            raise KeyboardInterrupt

    stand.trainer.turn = and_kill  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stand.run(tuning)

    def and_imitate() -> None:
        turn()
        progress = stand.store.tunings.get(tuning.id).result or {}
        if progress.get("stage") == "warm_start" and not stand.store.rounds.page(ALIAS):
            stand.trainer.make_version(tuning.id)

    stand.trainer.turn = and_imitate  # type: ignore[method-assign]
    result = stand.run(stand.store.tunings.resume(tuning.id))
    assert [(one["round"], one["version"]) for one in result.details["curve"]] == [(0, 0), (0, 1)]


@pytest.mark.slow
def test_a_warm_start_that_the_trainer_refuses_ends_the_run_with_its_reason(stand: Stand) -> None:
    tuning = stand.begin(rounds=1, warm_start={"sources": ["policy"]})
    turn = stand.trainer.turn

    def and_refuse() -> None:
        turn()
        current = stand.store.tunings.get(tuning.id)
        if (current.result or {}).get("stage") == "warm_start" and current.state is TuningState.RUNNING:
            stand.store.tunings.end(tuning.id, "failed", error="warm start: 1 trajectories, 16 are needed")

    stand.trainer.turn = and_refuse  # type: ignore[method-assign]
    with pytest.raises(TuningError, match="16 are needed"):
        stand.run(tuning)


def test_a_service_that_exits_ends_the_run_at_once(stand: Stand) -> None:
    def ended() -> None:
        raise TuningError("vllm ended")

    stand.trainer.turn = ended  # type: ignore[method-assign]
    with pytest.raises(TuningError, match="vllm ended"):
        stand.run(stand.begin())
