"""The card of an exported version says what the store knows."""

from __future__ import annotations

from pathlib import Path

from ratchet.store.records import Policy
from ratchet.store.reports.learning_report import RELATIVE_SCORES_NOTE, record_judge_scale
from ratchet.store.store import Store
from ratchet.trainer.statistics import compare
from ratchet.tuner.reports import TuningResult, plain, task_set
from ratchet_model_card import model_card
from tests.harness.records import commit_round, judged_group


def trained_version(store: Store, number: int, scores: tuple[float, float], metrics: dict[str, object]) -> Policy:
    group = judged_group(
        store, [f"a{number}", f"b{number}"], scores, task=f"mail/{number}", versions=(number - 1, number - 1)
    )
    held = store.rounds.start("agent", number - 1)
    round_metrics = {"trajectories": 2, "groups": 1, "tokens_trained": 4, "reward": 0.5, "loss": -0.25} | metrics
    store.rounds.commit(held.id, version=number, checkpoint=f"/c/{number}", groups=[group.id], metrics=round_metrics)
    evidence = {"release": {"difference": {"value": 0.125, "low": 0.0625}}}
    return store.policies.promote("agent", number, evidence, by="release", reason="+0.125 | better\n# x")


def test_the_card_says_what_the_store_knows_and_what_nobody_knows(store: Store, tiny_model: Path) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    newest = trained_version(store, 2, (0.0, 1.0), {"untrained_tokens": {"greedy": 7}, "entropy": 1.5})
    card = model_card(store, newest, str(tiny_model), {"torch": "2.13.0"}, None, merged=True)
    assert card.startswith('---\nlicense: "unknown"\n')
    assert "# agent@2" in card
    assert "4 trajectories in 2 groups, 8 trained tokens" in card
    assert "| task:mail | 4 |" in card
    assert "| 7 | greedy: sampled at temperature 0" in card
    assert "| rule | `1` | 4 |" in card
    assert "promote by release: +0.125 / better # x" in card
    assert "release.difference.low: 0.0625" in card
    assert "Not known: each side needs 30 scores; there are 4 in all, " in card
    assert "| 2 | " in card
    assert "Training data: not known" in card
    assert "Made with: torch 2.13.0." in card
    assert str(tiny_model) not in card


def test_the_model_card_has_the_gain_with_its_interval_and_the_base_models_license(
    store: Store, tmp_path: Path
) -> None:
    for version, scores in ((0, [0.0, 0.25]), (1, [0.75, 1.0])):
        names = [f"v{version}-{number}" for number in range(40)]
        judged_group(store, names, scores * 20, task=f"mail/{version}", versions=[version] * 40)
    commit_round(store, "agent", 1, checkpoint="/c")
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    card = model_card(store, store.policies.get("agent", 1), str(tmp_path), {}, None, merged=False)
    assert "0.125 (@0 to @0, 40 scores) to 0.875 (@1 to @1, 40 scores): +0.750 (95% +0.6" in card
    assert "Base model: apache-2.0, as stated by its card" in card
    assert "library_name: peft" in card


def test_a_version_with_a_prompt_says_that_it_is_not_in_the_weights(store: Store) -> None:
    trained_version(store, 1, (0.0, 1.0), {})
    prompt = store.prompts.register("Be brief.\n    # not a heading", families={"task:mail": "Read first."})
    tuned = store.policies.register_prompt_version("agent", prompt.id, {})
    card = model_card(store, tuned, "base", {}, None, merged=True)
    assert "send it if you serve the model elsewhere" in card
    assert "\n    Be brief.\n        # not a heading\n" in card
    assert "For tasks of task:mail:\n    Read first." in card
    assert "2 trajectories in 1 groups" in card  # those of the weights that it shares


def test_the_model_card_has_sft_data_and_evaluations(store: Store) -> None:
    group = judged_group(store, ["a", "b"], (0.0, 1.0), task="mail/1")
    held = store.rounds.start("agent", 0)
    story = {"trajectories": 2, "by_source": {"demonstration": 2}, "general_rows": 5}
    metrics = {"trajectories": 2, "warm_start": story}
    store.rounds.commit(held.id, version=1, checkpoint="/c", groups=[], metrics=metrics, demonstrations=group.members)
    marks = {"bfcl": {str(task): (1.0,) for task in range(20)}, "before": {str(task): (0.0,) for task in range(20)}}
    gain = compare(marks["bfcl"], marks["before"], names=("agent@1", "agent@0"))
    tasks = task_set("bfcl:simple_python", "test", list(marks["bfcl"]))
    result = TuningResult(
        method="eval", technique="BFCL v4", alias="agent", task_set=tasks, judge="bfcl-eval", workflow="w", gain=gain
    )
    tuning = store.tunings.begin("eval", "agent", {})
    store.tunings.end(tuning.id, "done", plain(result))
    lessons = store.tunings.begin("lessons", "agent", {})  # it measures nothing itself: the gate does
    store.tunings.end(lessons.id, "done", {"families": {}})
    doctor = store.tunings.begin("eval", "agent", {"doctor": "w"})  # nor does `ratchet doctor --workflow`
    store.tunings.end(doctor.id, "done", {"reasons": []})
    card = model_card(store, store.policies.get("agent", 1), "base", {}, None, merged=True)
    assert "2 trajectories (2 demonstration) were used for an SFT warm start, with 5 rows of general chat data." in card
    assert "0 trajectories in 0 groups" in card
    assert "| rule | `1` | 2 |" in card
    assert "BFCL v4 (20 tasks of bfcl:simple_python, judged by bfcl-eval): agent@1 against agent@0: +1.000" in card


def test_relative_scores_have_no_gain(store: Store) -> None:
    for number in range(20):
        judged_group(store, [f"a{number}", f"b{number}"], [0.0, 0.1], task=f"t{number}", versions=[0, 0])
        judged_group(store, [f"c{number}", f"d{number}"], [0.9, 1.0], task=f"t{number}", versions=[1, 1])
    record_judge_scale(store, "agent", "1", relative=True)
    card = model_card(store, store.policies.get("agent", 0), "base", {}, None, merged=True)
    assert f"Not known: {RELATIVE_SCORES_NOTE}." in card
