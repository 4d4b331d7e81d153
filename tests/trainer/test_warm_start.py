"""The warm start: what is imitated, what is not, and that it becomes a version by the path of any other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.records import OTHER, Feedback
from ratchet.store.states import PolicyState, RoundState, TrajectoryState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.errors import SettingError
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.rows.chat_rows import ChatRows
from ratchet.trainer.settings.judge_specs import FunctionSpec
from ratchet.trainer.settings.trainer_settings import WarmStartSettings
from ratchet.trainer.tasks import is_held_out
from ratchet.trainer.warm_start import COLLECTED, SFTData, SFTDataCollector, mix_rows, warm_start_metrics
from tests.harness.records import QUESTION, call_start, end_rollout, ended, tool_call
from tests.harness.trainer import judge_samples
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_rows, build_tokenizer

SFT: dict[str, Any] = {"min_trajectories": 2, "batch_size": 2, "num_train_epochs": 3, "learning_rate": 1e-2}


def ask(store: Store, **wanted: Any) -> Tuning:
    """A tuning whose progress has reached its warm start."""
    tuning = store.tunings.begin("weights", "agent", {"warm_start": SFT | wanted})
    store.tunings.update(tuning.id, {"stage": "warm_start"})
    return tuning


def general_file(folder: Path, count: int = 12) -> Path:
    messages = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} quick brown foxes " * 5}]
        for n in range(count)
    ]
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": conversation}) for conversation in messages))
    return folder / "chat.jsonl"


def search(store: Store, tuning_id: str = "", **given: Any) -> SFTData:
    judge = make_judge(FunctionSpec(kind="function", function="tests.harness.trainer.judge_samples:scripted"), {})
    chat = ChatRows(build_tokenizer())
    own = {name: given.pop(name) for name in ("held_out", "relative") if name in given}
    return SFTDataCollector(store, "agent", judge, chat, WarmStartSettings(**given), tuning_id, **own).collect()


@pytest.mark.slow
def test_good_trajectories_are_imitated_and_the_version_is_proven_and_live(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine, tmp_path: Path
) -> None:
    controller = make_controller()
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller.step(1000.0)
    assert store.policies.live()["agent"].version == 1
    tuning = ask(store, general=str(general_file(tmp_path)), general_ratio=0.5)
    controller.step(2000.0)
    live = store.policies.live()["agent"]
    assert live.version == 2
    assert live.evidence["proof"]
    assert list(engine.loaded)[-1] == "agent@2"
    found = warm_start_metrics(store, "agent", tuning.id)
    assert found is not None
    version, story = found
    assert (version, story["trajectories"], story["by_source"]) == (2, 2, {"policy": 2})
    assert story["skipped"]["score below 0.5"] == 2
    assert (story["general_rows"], story["general_held_out"]) == (2, 6)
    assert story["loss_by_epoch"][-1] < story["loss_by_epoch"][0]
    assert story["general_loss_after"] != story["general_loss_before"]
    assert store.lineage.versions_of(["a-1"])["a-1"] == ("agent@1", "agent@2")


@pytest.mark.slow
def test_after_it_reinforcement_goes_on_from_its_version_with_its_own_loss(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller()
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 1.0])
    controller.step(1000.0)
    ask(store, num_train_epochs=1, learning_rate=1e-4)
    controller.step(2000.0)
    assert store.policies.live()["agent"].version == 1
    agents_work(store, "c", [0.0, 1.0])
    controller.step(3000.0 + 601.0)
    assert store.policies.live()["agent"].version == 2
    newest, warm = store.rounds.page("agent")
    assert (newest.from_version, newest.metrics["groups"]) == (1, 2)
    assert newest.metrics["step"] == warm.metrics["step"] + 1
    assert newest.metrics["tokens_compared"] > 0, "the ratio to the engine's policy is back"


@pytest.mark.slow
def test_a_tuning_gets_one_warm_start_however_often_the_trainer_dies(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [1.0, 1.0])
    first = make_controller()
    first.step(1000.0)
    ask(store)
    first.step(2000.0)
    for now in (3000.0, 4000.0):
        make_controller().step(now)
    assert [held.state for held in store.rounds.page("agent")] == [RoundState.COMMITTED]


@pytest.mark.slow
def test_too_few_trajectories_are_refused_with_what_was_left_out(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller()
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.2, 0.0])
    controller.step(1000.0)
    tuning = ask(store, min_trajectories=16)
    controller.step(2000.0)
    ended = store.tunings.get(tuning.id)
    assert ended.state is TuningState.FAILED
    assert ended.error is not None
    assert re.search(r"1 trajectories .* from policy, demonstrations, 16 .*\(score below 0.5: 3\)", ended.error)
    agents_work(store, "c", [0.0, 1.0])
    agents_work(store, "d", [0.0, 1.0])
    controller.step(3000.0)
    assert store.policies.live()["agent"].version == 2, "the trainer goes on as if nobody had asked"


@pytest.mark.slow
def test_a_warm_start_that_forgets_too_much_is_refused_and_leaves_no_version(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    controller = make_controller()
    agents_work(store, "a", [1.0, 1.0])
    controller.step(1000.0)
    chat = {"general": str(general_file(tmp_path)), "general_ratio": 0.0, "max_loss_increase": 0.01}
    tuning = ask(store, learning_rate=0.1, num_train_epochs=10, **chat)
    controller.step(2000.0)
    assert "general loss rose" in (store.tunings.get(tuning.id).error or "")
    assert [policy.version for policy in store.policies.all("agent")] == [0]
    (held,) = store.rounds.page("agent")
    assert held.state is RoundState.ABANDONED


@pytest.mark.slow
def test_a_source_that_is_no_task_set_fails_the_tuning_and_not_the_trainer(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    controller = make_controller()
    agents_work(store, "a", [1.0, 1.0])
    controller.step(1000.0)
    tuning = ask(store, general=str(tmp_path / "nowhere.jsonl"))
    controller.step(2000.0)
    assert "nowhere.jsonl" in (store.tunings.get(tuning.id).error or "")


@pytest.mark.slow
def test_under_the_guarded_policy_it_begins_with_a_ramp_like_any_version(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    controller = make_controller(release={"policy": "guarded", "invariant_prompts": 0})
    agents_work(store, "a", [1.0, 1.0])
    controller.step(1000.0)
    ask(store)
    controller.step(2000.0)
    assert store.policies.get("agent", 1).state is PolicyState.RAMP


def teacher(store: Store, name: str, answer: str, **changes: Any) -> None:
    """A trajectory of another model: two calls, without ids of our tokenizer."""
    judge_samples.by_answer.setdefault(answer, 0.0)
    values: dict[str, Any] = {"alias": "big", "purpose": OTHER} | changes
    first = call_start(f"call_{name}a", name, **values)
    one = ended(first, tool_call(), prompt=(), ids=(), untrainable="no_token_ids")
    messages = [*QUESTION, tool_call(), {"role": "tool", "tool_call_id": "c1", "content": "Oslo"}]
    second = call_start(f"call_{name}b", name, messages, at=2.0, parent_call=first.call_id, **values)
    reply = {"role": "assistant", "content": answer}
    two = ended(second, reply, messages=messages, prompt=(), ids=(), untrainable="no_token_ids")
    store.calls.ship([one, two])


def test_a_stronger_model_is_imitated_where_the_judge_likes_it_answer_tokens_only(store: Store) -> None:
    judge_samples.by_answer |= {"in Oslo": 1.0, "no idea": 0.1, "broken": ValueError("x")}
    teacher(store, "t1", "in Oslo")
    teacher(store, "t2", "no idea", task="other")
    teacher(store, "t3", "broken", task="third")
    found = search(store, sources=("big",))
    assert found.scores == {"t1": 1.0}
    assert found.skipped == {"score below 0.5": 1, "judge failed": 1}
    (row,) = found.rows
    tokenizer = build_tokenizer()
    trained = tokenizer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on])
    assert trained == "<|im_end|>in Oslo<|im_end|>", "the tiny template shows no tool calls"
    assert "Where?" in tokenizer.decode(list(row.ids))


@pytest.mark.parametrize("name", ["policy", "demonstrations"])
def test_a_model_with_a_reserved_source_name_is_refused(store: Store, name: str) -> None:
    teacher(store, "t1", "in Oslo", alias=name)
    with pytest.raises(SettingError, match=f"'{name}' is a reserved source name.* under another name"):
        search(store, sources=(name,))


def test_what_was_evaluated_is_never_imitated(store: Store) -> None:
    tuning = store.tunings.begin("select-model", "agent", {})
    judge_samples.by_answer |= {"in Oslo": 1.0}
    for name, split, purpose in (("t1", "test", "live"), ("t2", "train", "eval"), ("t3", "train", "live")):
        teacher(store, name, "in Oslo", task=name)
        planned = Rollout(
            id=name, tuning_id=tuning.id, task_id=name, split=split, attempt=0, candidate="big", planned_at=1.0,
            purpose=purpose,
        )  # fmt: skip
        store.rollouts.plan([planned])
    found = search(store, sources=("big",))
    assert list(found.scores) == ["t3"]
    assert found.skipped == {"evaluated": 2}


def test_what_the_tuning_collected_is_imitated_and_trains_nothing_else(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = agents_work(store, "a", [1.0, 0.0, 1.0], purpose="eval")
    agents_work(store, "b", [1.0], purpose="eval")
    tuning = store.tunings.begin("weights", "agent", {})
    for name, score in zip(names, (1.0, 0.0, 1.0), strict=True):
        planned = Rollout(
            id=name, tuning_id=tuning.id, task_id="a", split="train", attempt=0, candidate=COLLECTED, planned_at=1.0,
            purpose="eval",
        )  # fmt: skip
        store.rollouts.plan([planned])
        end_rollout(store, name, started_at=1.0, ended_at=2.0)
        store.rollouts.score(name, score, "rule")
    make_controller().step(1000.0)
    assert {store.trajectories.get(name).state for name in names} == {TrajectoryState.DROPPED}
    found = search(store, tuning.id, sources=("policy",))
    assert set(found.scores) == {"a-0", "a-2"}
    assert search(store, "tun_other", sources=("policy",)).scores == {}


@pytest.mark.slow
def test_of_a_task_the_best_few_are_taken(store: Store, make_controller: Callable[..., SteppedController]) -> None:
    agents_work(store, "a", [0.6, 1.0, 0.9, 0.0])
    agents_work(store, "b", [0.7, 0.7])
    make_controller(groups_per_round=100).step(1000.0)
    found = search(store, sources=("policy",), max_per_task=2)
    assert set(found.scores) == {"a-1", "a-2", "b-0", "b-1"}
    assert found.skipped == {"score below 0.5": 1, "more of the same task": 1}


def test_demonstrations_are_imitated_whatever_the_answer_scored(store: Store) -> None:
    agents_work(store, "a", [0.0])
    feedback: dict[str, Any] = {
        "kind": "trajectory",
        "target": "a-0",
        "source": "ann",
        "given_at": 5.0,
        "trusted": True,
    }
    store.feedback.add([Feedback(id="fb_1", demonstration="It is in Oslo.", **feedback)])
    store.feedback.add([Feedback(id="fb_2", value=0.0, **feedback)])
    found = search(store, sources=("demonstrations",))
    (row,) = found.rows
    tokenizer = build_tokenizer()
    trained = tokenizer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on])
    assert trained == "It is in Oslo.<|im_end|>"
    assert found.scores == {"a-0": None}


def test_no_source_gives_anything_of_a_held_out_task(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    names = [f"task/{number}" for number in range(100)]
    aside = next(name for name in names if is_held_out(f"task:{name}", 0.3))
    usual = next(name for name in names if not is_held_out(f"task:{name}", 0.3))
    judge_samples.by_answer |= {"in Oslo": 1.0}
    for task in (aside, usual):
        agents_work(store, task, [1.0, 0.0])
        teacher(store, f"big-{task}", "in Oslo", task=task)
        feedback = Feedback(
            id=f"fb_{task}", kind="trajectory", target=f"{task}-0", source="ann", given_at=5.0, trusted=True,
            demonstration="It is in Oslo.",
        )  # fmt: skip
        store.feedback.add([feedback])
    make_controller(groups_per_round=100).step(1000.0)
    for source, name in (("policy", f"{usual}-0"), ("demonstrations", f"{usual}-0"), ("big", f"big-{usual}")):
        found = search(store, sources=(source,), held_out=0.3)
        assert list(found.scores) == [name], source
        assert found.skipped["of a held-out task"] >= 1, source


def test_greedy_answers_are_imitated_though_no_ratio_could_be_taken(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [1.0, 1.0], temperature=0.0)
    make_controller().step(1000.0)
    found = search(store, sources=("policy",))
    assert [(row.temperature, row.importance) for row in found.rows] == [(1.0, False)] * 2


@pytest.mark.parametrize(("share", "general"), [(0.0, 0), (0.2, 1), (0.5, 4), (0.9, 10)])
def test_general_rows_have_the_configured_share_or_all_are_used(share: float, general: int) -> None:
    good, chat = build_rows(4), build_rows(10, seed=1)
    drawn = mix_rows(good, chat, share, seed=0)
    assert (sum(row in good for row in drawn), sum(row in chat for row in drawn)) == (4, general)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sources": ["policy", "policy"]}, "is listed twice"),
        ({"max_loss_increase": 0.1}, "set `general`"),
        ({"general_ratio": 1.0}, "less than 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WarmStartSettings(**wrong)


def test_a_trajectory_with_a_fork_is_learnt_once(store: Store) -> None:
    judge_samples.by_answer |= {"in Oslo": 1.0, "in Rome": 1.0}
    teacher(store, "t1", "in Oslo")
    messages = [*QUESTION, tool_call(), {"role": "tool", "tool_call_id": "c1", "content": "Rome"}]
    values: dict[str, Any] = {"alias": "big", "purpose": OTHER}
    other = call_start("call_t1c", "t1", messages, at=3.0, parent_call="call_t1a", **values)
    reply = {"role": "assistant", "content": "in Rome"}
    end = ended(other, reply, messages=messages, prompt=(), ids=(), untrainable="no_token_ids")
    store.calls.ship([msgspec.structs.replace(end, ended_at=3.5)])
    found = search(store, sources=("big",))
    tokenizer = build_tokenizer()
    trained = [
        tokenizer.decode([token for token, on in zip(row.ids, row.mask, strict=True) if on]) for row in found.rows
    ]
    assert sorted(trained) == ["<|im_end|>in Rome<|im_end|>", "in Oslo<|im_end|>"]
